"""Command: how the packages here answer a command line: a user's mistake is one message and exit code 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hydra.core.config_store import ConfigStore


def answer(run: Callable[[], None], mistakes: tuple[type[Exception], ...], **schemas: type) -> None:
    """Run a Hydra application.

    Args:
        run: it; Hydra composes its configuration.
        mistakes: what is told in one line; all else is a bug, with its traceback.
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
    except mistakes as error:
        if wants_traceback:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
