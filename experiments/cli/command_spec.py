"""What a command is: its configuration and help, and of a job of ranks what they do; which exceptions are a
user's mistakes, which the machine's."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import ROOT
from experiments.cli import schema
from experiments.configs.checks import TARGET, ConfigError
from experiments.data.files import LOCK, locked

CONF = ROOT / "conf"
GROUPS = ("model", "data", "optimizer")  # of files, in whose place a `_target_` may stand


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
            alone = _with_own_groups_alone(self.name, composed)
            values = OmegaConf.to_container(alone, resolve=True, throw_on_missing=True)
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


def find_groups_to_drop(composed: DictConfig, load: Callable[[list[str]], DictConfig]) -> list[str]:
    """Return the overrides that take away the files of groups in whose place a recipe has a `_target_`: it is
    called with the recipe's keys, and not with those of the group's default.

    Args:
        load: composes the same once more, with more overrides.

    Raises:
        ConfigError: the command line chooses a file of such a group, too.
    """
    out = []
    for group in GROUPS:
        values = composed.get(group)
        if not isinstance(values, DictConfig) or TARGET not in values:
            continue
        if composed.hydra.runtime.choices.get(group) is None:
            continue
        if TARGET not in (load([f"~{group}"]).get(group) or {}):
            continue  # the file has it
        said = [o for o in composed.hydra.overrides.task if o.startswith(f"{group}=")]
        if said:
            raise ConfigError(
                f"{said[0]}: the recipe has its own {group}, {values[TARGET]}. Fix: leave out {said[0]}, or "
                "the recipe."
            )
        out.append(f"~{group}")
    return out


def _with_own_groups_alone(name: str, composed: DictConfig) -> DictConfig:
    """Return what Hydra composed for a task, without the files that `find_groups_to_drop` finds."""
    running = GlobalHydra.instance()
    has_own = any(TARGET in (composed.get(group) or {}) for group in GROUPS)
    if not (has_own and HydraConfig.initialized() and running.is_initialized()):
        return composed
    overrides = list(HydraConfig.get().overrides.task)

    def load(more: Sequence[str] = ()) -> DictConfig:
        return running.config_loader().load_configuration(name, [*overrides, *more], RunMode.RUN)

    gone = find_groups_to_drop(load(), load)
    return OmegaConf.masked_copy(load(gone), list(composed)) if gone else composed


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

    there = _folders_there(sys.argv[1:])

    def wrapping(composed: DictConfig) -> Any:
        here = HydraConfig.get()
        folder = Path(here.runtime.output_dir).resolve()
        is_above = folder in (Path.cwd(), *Path.cwd().parents)
        is_new = here.mode == RunMode.RUN and not is_above and _names_in(folder) == {".hydra"}
        try:
            return task(composed)  # a sweeper may look at what it gives
        except Exception as error:
            if is_new and is_mistake(error):
                _remove_unless_begun(folder, there)
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


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _folders_there(arguments: Sequence[str]) -> set[Path]:
    """Return the folders that are there before a command makes its own: those that lie here, and of the one
    that the command names, itself and those above it."""
    found = {path.resolve() for path in Path.cwd().iterdir()}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "hydra.run.dir":
            named = Path(value.strip("'\"")).resolve()
            found |= {path for path in (named, *named.parents) if path.is_dir()}
    return found


def _remove_unless_begun(folder: Path, there: Set[Path]) -> None:
    """Remove what a command has made in its folder before its mistake was found; the folder, too, and those
    above it, up to the current one, that are empty then. A run that has made a step stays, and all that
    another process is at work in.

    Args:
        there: folders that the command did not make.
    """
    rows, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    with locked(folder) if (folder / LOCK).exists() else nullcontext(True) as is_ours:
        if not is_ours or (rows.exists() and rows.stat().st_size) or any(checkpoints.glob("*")):
            return
        for path in folder.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for each in (folder, *folder.parents):
        if each in there or (each != folder and Path.cwd() not in each.parents):
            return
        with suppress(OSError):  # others are in it
            each.rmdir()


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
