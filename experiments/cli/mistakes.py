"""Mistakes: which exceptions are a user's, which are the machine's, and how they are told."""

from __future__ import annotations

import errno
import os
import traceback

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments.configs.train import ConfigError

# A folder that cannot be written, a full disk: of the machine, not of the program.
NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR,
           errno.EEXIST, errno.ENOENT)  # fmt: skip
SAID = (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError)


def is_mistake(error: Exception) -> bool:
    """Whether what was asked for is wrong."""
    if isinstance(error, SAID):
        return True
    innermost = traceback.extract_tb(error.__traceback__)[-1:]  # `run=null` and the like
    if any(f"{os.sep}{package}{os.sep}" in frame.filename for frame in innermost for package in
           ("hydra", "omegaconf")):  # fmt: skip
        return True
    from fnshard.errors import BudgetError, MissingExtraError, OptimizerError, SpecError, TraceError

    return isinstance(error, BudgetError | MissingExtraError | OptimizerError | SpecError | TraceError)


def is_outside(error: Exception) -> bool:
    """Whether something else than the program failed: a rank, a disk, an agreement."""
    from fnshard.errors import FnshardError

    return isinstance(error, FnshardError) or (isinstance(error, OSError) and error.errno in NO_ROOM)


def message(error: Exception) -> str:
    """A mistake as it is told."""
    cause = error.__cause__
    more = f"\n{cause}" if isinstance(cause, OmegaConfBaseException) else ""
    return f"error: {error}{more}"
