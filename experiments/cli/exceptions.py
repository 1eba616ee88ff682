"""Exceptions that come out of Hydra: which are a user's mistakes, which the machine's, and their message."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.cli.command_spec import CommandSpec
from experiments.configs.checks import ConfigError

MISTAKES = (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError)
# A folder that cannot be written, a full disk: of the machine, not of the program.
OF_THE_MACHINE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR,
                  errno.EEXIST, errno.ENOENT)  # fmt: skip


class _Wrapped(BaseException):
    """A task's exception on its way through Hydra, which would print it in its own way, and through the
    processes of a launcher."""

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


def run_by_hydra(spec: CommandSpec, task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra run `task` once, or for each run of a sweep; its exceptions come out as they are."""

    def wrapping(composed: DictConfig) -> Any:
        try:
            return task(composed)  # a sweeper may look at what it gives
        except Exception as error:
            raise _Wrapped(error) from None

    spec.register()
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions of Hydra's own are passed on, too
    try:
        hydra.main(version_base="1.3", config_path=str(spec.conf), config_name=spec.name)(wrapping)()
    except _Wrapped as wrapped:
        raise wrapped.error from None
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def text_of(error: Exception) -> str:
    """What an exception says, of OmegaConf's with the key that it is about."""
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).splitlines()[0]}." if error.full_key else str(error)
    cause = error.__cause__
    return f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error).strip()


def is_mistake(error: Exception) -> bool:
    """Whether the user's configuration is wrong."""
    if isinstance(error, MISTAKES):
        return True
    from fnshard.errors import BudgetError, MissingExtraError, OptimizerError, SpecError, TraceError

    return isinstance(error, BudgetError | MissingExtraError | OptimizerError | SpecError | TraceError)


def is_outside(error: Exception) -> bool:
    """Whether something else than the program failed: a rank, a disk, an agreement."""
    from fnshard.errors import FnshardError

    return isinstance(error, FnshardError) or (isinstance(error, OSError) and error.errno in OF_THE_MACHINE)
