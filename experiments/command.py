"""Command: how the jobs here answer a command line: a user's mistake is one message and exit code 1."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments.config import ConfigError
from fnshard.errors import FnshardError

# A folder that cannot be written, a full disk: of the machine, not of the program.
NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
MISTAKES = (FnshardError, ConfigError, HydraException, OmegaConfBaseException)


def answer(run: Callable[[], None], *also: type[Exception], **schemas: type) -> None:
    """Run a Hydra application.

    Args:
        run: it; Hydra composes its configuration.
        also: what is told in one line beside `MISTAKES`; all else is a bug, with its traceback.
        schemas: by name, what configurations are checked against.
    """
    for name, node in schemas.items():
        ConfigStore.instance().store(name=name, node=node)
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands exceptions on, instead of printing them its way
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if wants_traceback or not (is_mistake(error) or isinstance(error, also)):
            raise
        if int(os.environ.get("RANK", "0")) == 0:
            print(message(error), file=sys.stderr, flush=True)
        sys.exit(1)


def is_mistake(error: Exception) -> bool:
    """Whether it is told in one line."""
    if isinstance(error, MISTAKES) or (isinstance(error, OSError) and error.errno in NO_ROOM):
        return True
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename  # `run=null` and the like
    return any(f"{os.sep}{package}{os.sep}" in innermost for package in ("hydra", "omegaconf"))


def message(error: Exception) -> str:
    """A mistake as it is told."""
    cause = error.__cause__
    more = f"\n{cause}" if isinstance(cause, OmegaConfBaseException) else ""
    return f"error: {error}{more}"
