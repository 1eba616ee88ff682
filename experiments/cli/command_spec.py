"""What a command is: its configuration and help, and of a job of ranks what they do; which exceptions are a
user's mistakes, which the machine's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import ROOT
from experiments.cli import schema
from experiments.configs.checks import ConfigError

CONF = ROOT / "conf"


@dataclass(frozen=True)
class CommandSpec:
    """A command of `experiments/`.

    Args:
        name: of its configuration, `NAME.yaml`.
        config: the dataclass of the configuration.
        about: what it does, for `--help`.
        examples: command lines and their purpose, for `--help`.
        conf: the folder of its configuration; groups of `conf/shared` are found from any.
        complete: checks a configuration of the right keys and types further, and fills in what depends on
            its other values.
    """

    name: str
    config: type
    about: str
    examples: Mapping[str, str] = field(default_factory=dict)
    conf: Path = CONF
    complete: Callable[[Any], Any] = lambda config: config

    @property
    def module(self) -> str:
        return f"experiments.{self.name}"

    def read(self, values: Mapping[str, Any]) -> Any:
        """The configuration from plain values.

        Raises:
            ConfigError: unknown keys, wrong types; or values that cannot be.
        """
        return self.complete(schema.build(values, self.config))

    def read_composed(self, composed: DictConfig) -> Any:
        """The configuration that Hydra composed, without Hydra's own part.

        Raises:
            ConfigError: as `read`; or a value refers to one that is missing.
        """
        try:
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(str(error)) from None
        return self.read(values)

    def register(self) -> None:
        """Store the defaults where Hydra finds them, as `NAME_schema`."""
        schema.register(self.config, f"{self.name}_schema")


@dataclass(frozen=True)
class Job:
    """A command whose work ranks do together.

    Args:
        spec: of its command line; the configuration has `run`, `mesh` and `data`, as `TrainConfig` does.
        module: where it is, as `JOB`.
        work: what a rank does, as "module:function" of (placed config, `RunFolder`, overrides, `Stop`): the
            process that starts ranks does not import it.
        prepare: what is done before ranks start, with the placed configuration; gives the one for the ranks.
            Mistakes in what the configuration names (files, directories) are found here.
    """

    spec: CommandSpec
    module: str
    work: str
    prepare: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return self.spec.name


# ------------------------------------------------------------------ exceptions that come out of Hydra


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
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        return f"{name:.60}...: no file has a name of {len(name)} characters."
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).splitlines()[0]}." if error.full_key else str(error)
    cause = error.__cause__
    return f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error).strip()


def is_mistake(error: Exception) -> bool:
    """Whether the user's configuration is wrong."""
    if isinstance(error, MISTAKES) or (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG):
        return True
    from fnshard.errors import BudgetError, MissingExtraError, OptimizerError, SpecError, TraceError

    return isinstance(error, BudgetError | MissingExtraError | OptimizerError | SpecError | TraceError)


def is_outside(error: Exception) -> bool:
    """Whether something else than the program failed: a rank, a disk, an agreement."""
    from fnshard.errors import FnshardError

    return isinstance(error, FnshardError) or (isinstance(error, OSError) and error.errno in OF_THE_MACHINE)
