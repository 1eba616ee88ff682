"""Compose: make a configuration of a command line. Hydra composes it, and pydantic checks all keys and
values.

Where a recipe has a `_target_` in place of a group, Hydra composes it again, without the file of that group.
Hydra gets plain mappings of the dataclasses' defaults, since OmegaConf's typed nodes would stop at the first
wrong value. Keys that nobody knows are added, so that pydantic reports them with all other mistakes, in one
error.

A mistake in a command line is one message and exit code 2, before anything is made or started. What goes
wrong later is exit code 1, and a bug has its traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import logging
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from experiments import ROOT
from experiments.lib.checks import TARGET, ConfigError, flat, refusal
from experiments.lib.config import MEASURED, TrainConfig
from fnshard.errors import BudgetError, FnshardError, MissingExtraError, OptimizerError, SpecError, TraceError

CONF = ROOT / "conf"
SHARED = CONF / "shared"  # groups that several commands have
TARGET_GROUPS = ("model", "data", "optimizer")  # groups in whose place a `_target_` may stand
OBJECTIVE = "objective"  # it may be a `_target_`, too, and is no group of files in the main job
TARGET_VALUE = re.compile(rf"(\w+)=(\{{.*\b{TARGET}:.*\}})", re.DOTALL)
TARGET_KEY = re.compile(rf"(\w+(?:\.\w+)*)\.{TARGET}=.*", re.DOTALL)
SWEPT = 64  # so many values of an argument of a sweep are checked before it starts; each job checks its own
SHOWN = {"--cfg", "--info", "--hydra-help", "--shell-completion"}  # flags that Hydra answers; nothing runs
# Hydra's keys that act in a single run, which Hydra composes and does not start. The others act in the runs
# that Hydra starts, those of a sweep.
ACTING = ("hydra.run.dir", "hydra.job.env_set", "hydra.job.name", "hydra.job.config.override_dirname",
          "hydra.searchpath")  # fmt: skip
LAUNCHER = "hydra/launcher"  # a single run refuses any other than its own
LOCAL = "basic"  # Hydra's name of the launcher that a single run has
MISSING = "???"  # OmegaConf's mark of a value that has to be set

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes
MISTAKES = (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError,
            BudgetError, MissingExtraError, OptimizerError, SpecError, TraceError)  # fmt: skip
# Errors of the machine, not of the program: a folder that cannot be written, a full disk.
OF_THE_MACHINE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR,
                  errno.EEXIST, errno.ENOENT)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command of `experiments/`.

    Args:
        name: the name of its configuration, `NAME.yaml`, and of its module.
        config: the dataclass of the configuration.
        about: what it does, for `--help`.
        examples: command lines and their purpose, for `--help`.
        conf: the folder of its configuration; groups of `conf/shared` are found from any.
        complete: a function that checks a configuration of the right keys and types further, and fills in
            what depends on its other values.
    """

    name: str
    config: type
    about: str
    examples: Mapping[str, str] = field(default_factory=dict)
    conf: Path = CONF
    complete: Callable[[Any], Any] = lambda config: config

    def read(self, values: Mapping[str, Any]) -> Any:
        """Return the configuration of plain values.

        Raises:
            ConfigError: keys are unknown, types are wrong, or values cannot be.
        """
        return self.complete(build(values, self.config))


@dataclass(frozen=True)
class Composed:
    """A command line that was composed and checked.

    Args:
        config: the configuration that it means.
        folder: the folder for its results, which nobody has made yet.
        overrides: its arguments.
        is_chosen: whether the command line names the folder.
    """

    config: Any
    folder: Path
    overrides: list[str]
    is_chosen: bool


# ------------------------------------------------------------------ from a shell to a task


def answer(command: Command, task: Callable[[Any, Path], Any]) -> None:
    """Run the command line of a command that starts no ranks by itself.

    Args:
        task: what it does with its configuration and the folder for its results.
    """

    def one(composed: DictConfig) -> Any:
        logging.getLogger("fnshard").setLevel(logging.WARNING)  # else Hydra shows how far a lowering is
        return task(read(command, composed), Path(HydraConfig.get().runtime.output_dir).resolve())

    def run() -> None:
        composed = from_shell(command)
        if isinstance(composed, Composed):
            task(composed.config, composed.folder)
        elif composed:
            run_sweep(command, one)

    exit_with(run)


def from_shell(command: Command, arguments: Sequence[str] | None = None) -> Composed | bool:
    """Compose and check arguments, by default those of this process.

    Returns:
        A run; or whether there are several, by `--multirun`, which Hydra is to compose one by one. Help and
        other flags are answered here.

    Raises:
        ConfigError: something is wrong with the command line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg")
    parser.add_argument("-i", "--info", nargs="?", const="all")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir")
    # Refused below; if they were not known here, `-cn` would be `-c` with the value `n`.
    parser.add_argument("-cn", "--config-name")
    parser.add_argument("-cp", "--config-path")
    parser.add_argument("--experimental-rerun")
    given = sys.argv[1:] if arguments is None else arguments
    sys.argv[1:] = [each for each in given if each not in ("-r", "--run")]  # a run is what happens anyway
    known, arguments = parser.parse_known_args(sys.argv[1:])
    if known.help:
        print(help_of(command))
        return False
    if known.experimental_rerun:
        raise ConfigError(
            f"--experimental-rerun {known.experimental_rerun}: is a pickle, and what is in it runs when it "
            "is read. Fix: the command line of the run, in its .hydra/overrides.yaml."
        )
    flags = {
        f"--{name.replace('_', '-')}" for name, value in vars(known).items() if value not in (None, False)
    }
    unknown = sorted(flags & {"--config-name", "--config-path"})
    unknown += [each for each in arguments if each.startswith("-")]
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: this command has no such flag. Fix: leave it out; --help shows the flags, and "
            "--config-dir DIR adds files of your own."
        )
    if "--cfg" not in flags and (alone := sorted(flags & {"--resolve", "--package"})):
        raise ConfigError(f"{alone[0]}: is for --cfg. Fix: add --cfg job.")
    asked = sorted(flags & {"--multirun", *SHOWN})
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)}: only one of them can be answered. Fix: leave one out.")
    before = [each for each in sys.argv[1:] if each not in arguments]  # Hydra's parser takes flags first
    if flags & SHOWN:
        # Values that cannot be are shown, too, but no keys that nobody has.
        prefixes: tuple[str, ...] = ()
        if known.cfg or known.info:
            with open_hydra(command, known.config_dir):
                values = plain_values(command, compose_values(command, arguments))
            if unknown := [each.text for each in check(values, command.config)[1] if each.kind == "key"]:
                raise refusal(unknown)
            prefixes = find_target_prefixes(values)
        sys.argv[1:] = [*before, *force(put_targets_in_place(arguments), prefixes)]
        run_sweep(command, lambda composed: None)
        return False
    if known.multirun:
        prefixes = check_sweep(command, arguments, known.config_dir)
        sys.argv[1:] = [*before, *force(put_targets_in_place(arguments), prefixes)]
        return True
    return compose(command, arguments, known.config_dir)


def run_sweep(command: Command, task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra run `task` for each run of `sys.argv`; exceptions pass through unchanged."""
    register(command.config, f"{command.name}_schema")
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions of Hydra's own are passed on, too
    try:
        hydra.main(version_base="1.3", config_path=str(command.conf), config_name=command.name)(task)()
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def exit_with(run: Callable[[], None]) -> None:
    """Run, and end the process with the exit code of the outcome."""
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        code = MISTAKE if is_mistake(error) else FAILURE
        expected = code == MISTAKE or is_outside(error)
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not expected:
            raise
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {text_of(error)}", file=sys.stderr, flush=True)
        sys.exit(code)


def is_mistake(error: Exception) -> bool:
    """Return whether the user's configuration is wrong."""
    return isinstance(error, MISTAKES) or (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG)


def is_outside(error: Exception) -> bool:
    """Return whether something else than the program failed: a rank, a disk, an agreement."""
    return isinstance(error, FnshardError) or (isinstance(error, OSError) and error.errno in OF_THE_MACHINE)


def text_of(error: Exception) -> str:
    """Return the text of an exception; one of OmegaConf's with the key that it is about."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        return f"{name:.60}...: no file has a name of {len(name)} characters."
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).splitlines()[0]}." if error.full_key else str(error)
    cause = error.__cause__
    return f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error).strip()


# ------------------------------------------------------------------ composing


def compose(command: Command, arguments: Sequence[str], config_dir: str | None = None) -> Composed:
    """Compose and check the command line of one run.

    Args:
        config_dir: a folder with files of groups, besides the command's own.

    Raises:
        ConfigError: Hydra refuses it; a key of Hydra's does nothing in a single run; or keys and values are
            wrong, all of which are listed.
    """
    keys = {each: re.split("[=@]", each.lstrip("+~"))[0] for each in arguments}
    of_hydra = [each for each in arguments if keys[each].startswith(("hydra.", "hydra/"))]
    idle = [
        each
        for each in of_hydra
        if not any(keys[each] == a or keys[each].startswith(f"{a}.") for a in (*ACTING, LAUNCHER))
    ]
    with open_hydra(command, config_dir):
        composed = compose_values(command, arguments)
        with_hydra = composed.hydra
        launcher = with_hydra.runtime.choices[LAUNCHER]
        if launcher != LOCAL:
            raise ConfigError(
                f"a launcher ({launcher}) starts the jobs of a sweep, and this is a single run. Fix: add "
                "--multirun, for one job, too; or leave the launcher out."
            )
        if idle:
            raise ConfigError(
                f"{' '.join(idle)}: does nothing in a single run. Fix: leave it out, or add --multirun, for "
                f"one job, too; of Hydra's keys a single run has {', '.join(ACTING)}."
            )

        # Hydra has seen keys with `++`. Its record gets what the command line says.
        task = [each for each in arguments if each not in of_hydra]
        name = with_hydra.job.config.override_dirname
        named = sorted(each for each in task if keys[each] not in name.exclude_keys)
        with_hydra.overrides.task = task
        with_hydra.job.override_dirname = name.item_sep.join(named).replace("=", name.kv_sep)

        folder = Path(with_hydra.run.dir).resolve()
        with_hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(composed)  # for what looks there, as resolvers do
        config = read(command, composed)
    os.environ.update({name: str(value) for name, value in with_hydra.job.env_set.items()})
    is_chosen = any(each.startswith("hydra.run.dir=") for each in arguments)
    return Composed(config, folder, list(with_hydra.overrides.task), is_chosen)


def read(command: Command, composed: DictConfig) -> Any:
    """Return the configuration of what Hydra has composed.

    Raises:
        ConfigError: keys are unknown, types are wrong, values cannot be, or a value refers to one that is
            missing.
    """
    return command.read(plain_values(command, composed))


@contextmanager
def open_hydra(command: Command, config_dir: str | None = None) -> Iterator[None]:
    """Open Hydra on the files of a command; errors of Hydra in the block become a ConfigError.

    Raises:
        ConfigError: `config_dir` is no directory, or Hydra refuses what is composed in the block.
    """
    register(command.config, f"{command.name}_schema")
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir={config_dir}: is no directory.")
    SharedGroups.more = None if config_dir is None else Path(config_dir).resolve()
    try:
        with hydra.initialize_config_dir(str(command.conf), job_name=command.name, version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(text_of(error)) from None
    except RecursionError:
        raise ConfigError("the command line is nested too deeply.") from None
    finally:
        SharedGroups.more = None


def compose_values(command: Command, arguments: Sequence[str]) -> DictConfig:
    """Compose arguments inside of `open_hydra`. A key that does not exist is added: pydantic reports it with
    all other mistakes."""
    loader, forced = GlobalHydra.instance().config_loader(), []
    for override in OverridesParser.create().parse_overrides(arguments):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: several values are a sweep. Fix: --multirun; or quotes for text, "
                "[a,b] for a list."
            )
    for argument in put_targets_in_place(arguments):
        key, is_value, _ = argument.partition("=")
        is_plain = is_value and not key.startswith(("+", "~", "hydra.", "hydra/")) and "@" not in key
        # Groups are folders, whose names have no dots. Others are not looked for: Hydra copies all it knows.
        is_group = "." not in key and loader.get_group_options(key)
        forced.append(f"++{argument}" if is_plain and not is_group else argument)
    try:
        composed = hydra.compose(command.name, forced, return_hydra_config=True)
        if gone := find_groups_to_drop(composed, lambda more: hydra.compose(command.name, [*forced, *more])):
            composed = hydra.compose(command.name, [*forced, *gone], return_hydra_config=True)
    except ConfigError:
        raise
    except ValueError as error:  # a choice that is no name, a file that is no text
        raise ConfigError(f"{' '.join(arguments)}: {error}") from None
    return composed


def force(arguments: Sequence[str], prefixes: tuple[str, ...]) -> list[str]:
    """Return the arguments with `++` before keys that begin with a prefix, so that Hydra adds them if needed.

    >>> force(["model.depth=3", "run.steps=2"], ("model.",))
    ['++model.depth=3', 'run.steps=2']
    """
    return [f"++{each}" if each.startswith(prefixes) and "=" in each else each for each in arguments]


def put_targets_in_place(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which a group that is a `_target_` replaces the defaults of the group.

    Hardware that runs have measured becomes a name.

    >>> put_targets_in_place(["optimizer={_target_: mine.lion, lr: 1e-4}"])
    ['~optimizer', '+optimizer={_target_: mine.lion, lr: 1e-4}']
    >>> put_targets_in_place(["model._target_=mine.Net", "model.width=8"])
    ['~model', '++model._target_=mine.Net', '++model.width=8']
    >>> put_targets_in_place(["objective.reward._target_=mine.reward", "objective.reward.most=3"])
    ['++objective.reward._target_=mine.reward', '++objective.reward.most=3']
    >>> put_targets_in_place(["hardware=measured:outputs"])
    ['hardware.name=measured:outputs']
    """
    arguments = [re.sub(f"^hardware=(?={MEASURED})", "hardware.name=", each) for each in arguments]
    targets = {found[1] for found in map(TARGET_KEY.fullmatch, arguments) if found}
    out = [f"~{group}" for group in TARGET_GROUPS if group in targets]
    for argument in arguments:
        found, (key, is_value, _) = TARGET_VALUE.fullmatch(argument), argument.partition("=")
        if found:
            out += [f"++{argument}"] if found[1] == OBJECTIVE else [f"~{found[1]}", f"+{argument}"]
        else:
            below = is_value and any(key.startswith(f"{each}.") for each in targets)
            out.append(f"++{argument}" if below else argument)
    return out


def find_groups_to_drop(composed: DictConfig, load: Callable[[list[str]], DictConfig]) -> list[str]:
    """Return the overrides that take away the files of groups in whose place a recipe has a `_target_`.

    It is called with the recipe's keys, and not with those of the group's default.

    Args:
        load: a function that composes the command line once more, with more overrides.

    Raises:
        ConfigError: the command line chooses a file of such a group, too.
    """
    out = []
    for group in TARGET_GROUPS:
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


def plain_values(command: Command, composed: DictConfig) -> dict[str, Any]:
    """Return what Hydra has composed as plain values, without Hydra's own part.

    Raises:
        ConfigError: a value refers to one that is missing.
    """
    here = GlobalHydra.instance()
    in_sweep = HydraConfig.initialized() and here.is_initialized() and "hydra" not in composed
    if in_sweep and any(TARGET in (composed.get(group) or {}) for group in TARGET_GROUPS):
        # This is one of the runs that Hydra starts, and Hydra has composed the files of groups in whose place
        # a recipe has a `_target_`.
        task = list(HydraConfig.get().overrides.task)
        whole = hydra.compose(command.name, task, return_hydra_config=True)
        gone = find_groups_to_drop(whole, lambda more: hydra.compose(command.name, [*task, *more]))
        composed = hydra.compose(command.name, [*task, *gone]) if gone else composed
    try:
        values = OmegaConf.masked_copy(composed, [name for name in composed if name != "hydra"])
        return OmegaConf.to_container(values, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(text_of(error)) from None


def check_sweep(command: Command, arguments: Sequence[str], config_dir: str | None = None) -> tuple[str, ...]:
    """Check a sweep before it starts, by so many runs that each value of each argument is in one.

    Returns:
        The prefixes of `find_target_prefixes`.

    Raises:
        ConfigError: the errors of `compose`, for all of these runs together.
    """
    prefixes, problems = set[str](), list[str]()
    with open_hydra(command, config_dir):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        choices: list[list[str]] = []
        for argument in arguments:
            is_target = TARGET_VALUE.fullmatch(argument)
            (override,) = (None,) if is_target else parser.parse_overrides([argument])
            if override is None or not override.is_sweep_override():
                choices.append([argument])
            elif override.value_type != ValueType.INTERVAL_SWEEP:
                values = list(islice(override.sweep_string_iterator(), SWEPT))
                if not values:
                    raise ConfigError(
                        f"{argument}: no value is meant by it. Fix: a pattern or range that has some."
                    )
                choices.append([f"{override.get_key_element()}={value}" for value in values])
        for i in range(max(map(len, choices), default=1)):
            chosen = [texts[min(i, len(texts) - 1)] for texts in choices]
            values = plain_values(command, compose_values(command, chosen))
            prefixes |= {*find_target_prefixes(values)}
            # Rules for several values together are left to each run.
            problems += [each.text for each in check(values, command.config)[1] if each.kind != "rule"]
    if problems:
        raise refusal(list(dict.fromkeys(problems)))
    return tuple(prefixes)


def find_target_prefixes(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of keys of groups that are a `_target_`.

    What is called may take more keys than the files name.
    """
    return tuple(f"{name}." for name, each in values.items() if isinstance(each, dict) and TARGET in each)


def help_of(command: Command) -> str:
    """Return the text of `--help`: what the command does, groups and their choices, keys with defaults."""
    with open_hydra(command):
        composed = hydra.compose(command.name, return_hydra_config=True)
        groups = sorted(name for name in composed.hydra.runtime.choices if not name.startswith("hydra"))
        loader = GlobalHydra.instance().config_loader()
        choices = "\n".join(f"  {group}: {', '.join(loader.get_group_options(group))}" for group in groups)
        defaults = OmegaConf.to_yaml(OmegaConf.masked_copy(composed, [n for n in composed if n != "hydra"]))
    source = command.config.__module__.replace(".", "/")
    parts = [
        textwrap.fill(command.about, 100),
        f"  python -m experiments.{command.name} [GROUP=CHOICE] [KEY=VALUE] ...",
        f"Groups:\n{choices}" if choices else "",
        f"Keys and their defaults (their meaning: {source}.py):\n{textwrap.indent(defaults, '  ')}".rstrip(),
        "\n".join(["Examples:", *(f"  {line}\n    {text}" for line, text in command.examples.items())]),
        "Flags: --multirun (a run for every combination of KEY=A,B), --cfg job (show the whole\n"
        "configuration, and run nothing), --config-dir DIR (with files of groups); others: --hydra-help",
    ]
    return "\n\n".join(filter(None, parts))


# ------------------------------------------------------------------ defaults, for Hydra


class SharedGroups(SearchPathPlugin):
    """A plugin that adds `conf/shared`, with groups that several commands have, to Hydra's search path.

    It adds the folder `more`, too.
    """

    more: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="fnshard", path=f"file://{SHARED}")
        if self.more is not None:
            search_path.append(provider="command-line", path=f"file://{self.more}")


def register(kind: type = TrainConfig, name: str = "train_schema") -> None:
    """Store the defaults of a configuration's dataclass in Hydra's `ConfigStore`.

    Files of groups that choose among dataclasses, or give what has no default, begin with
    `defaults: [/schema/NAME@_here_]`.
    """
    Plugins.instance().register(SharedGroups)
    store, top = ConfigStore.instance(), defaults(kind)
    for group, kinds in _groups_of(kind).items():
        has_alternatives = len(_options_of(kind)[group]) > 1
        if has_alternatives:
            top.pop(group)
        for each in kinds:
            node = defaults(each)
            if has_alternatives or MISSING in node.values():
                store.store(group="schema", name=getattr(each, "name", group), node=node)
    store.store(name=name, node=top)


def defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass as nested plain values, `???` where there is none."""
    groups, out = _groups_of(kind), {}
    for each in dataclasses.fields(kind):
        value = MISSING if each.default is dataclasses.MISSING else each.default
        plain = list(value) if type(value) is tuple else value
        out[each.name] = defaults(groups[each.name][0]) if each.name in groups else plain
    return out


@cache
def _options_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the members of each field's union, or its type alone."""
    unions = (typing.Union, types.UnionType)
    hints = typing.get_type_hints(kind).items()
    return {n: typing.get_args(h) if typing.get_origin(h) in unions else (h,) for n, h in hints}


@cache
def _groups_of(kind: type) -> dict[str, list[type]]:
    """Return the fields that are dataclasses, or one of several of them."""
    groups = {name: list(filter(dataclasses.is_dataclass, o)) for name, o in _options_of(kind).items()}
    return {name: kinds for name, kinds in groups.items() if kinds}


def _choose(kind: type, group: str, value: Any) -> type | None:
    """Return the dataclass of a group's value, by its `name`; None where it may be, and is, a `_target_`."""
    kinds, values = _groups_of(kind)[group], value if isinstance(value, Mapping) else {}
    if TARGET in values and len(_options_of(kind)[group]) > len(kinds):
        return None
    return next((each for each in kinds if getattr(each, "name", None) == values.get("name")), kinds[0])


def kinds_of(kind: type, values: Mapping[str, Any]) -> dict[str, type | None]:
    """Return the dataclass of each group; among alternatives it is the one that `values` choose.

    It is None where the group is a `_target_`.
    """
    return {group: _choose(kind, group, values.get(group)) for group in _groups_of(kind)}


def _list_keys(kind: type, values: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys that there are; among alternatives, those of the dataclass that `values`
    choose."""
    known = defaults(kind)
    known |= {group: defaults(each) for group, each in kinds_of(kind, values).items() if each is not None}
    return [key for key, _ in flat(known)]


# ------------------------------------------------------------------ the check, by pydantic


class Problem(NamedTuple):
    """A mistake: a "key" that nobody knows, the "value" of one, or a "rule" for several together."""

    text: str
    kind: str = "value"


def build(values: Mapping[str, Any], kind: type = TrainConfig) -> Any:
    """Make the dataclasses from nested mappings.

    Raises:
        ConfigError: unknown or missing keys, wrong types, values out of range; all of them at once.
    """
    config, problems = check(values, kind)
    if problems:
        raise refusal([problem.text for problem in problems])
    return config


def check(values: Mapping[str, Any], kind: type) -> tuple[Any, list[Problem]]:
    """Return the dataclasses, None if something is wrong, and every problem."""
    try:
        return _adapter(kind).validate_python(_without_missing(values)), []
    except ValidationError as error:
        return None, list(_problems(error, kind, values))


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _without_missing(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {k: _without_missing(v) for k, v in values.items() if not isinstance(v, str) or v != MISSING}
    return values


def _problems(error: ValidationError, kind: type, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the mistakes that pydantic has found, with the keys that were probably meant."""
    known, seen = _list_keys(kind, values), set()
    for each in error.errors(include_url=False):
        parts = [str(part) for part in each["loc"]]
        group = parts[0] if len(parts) > 1 else ""
        # pydantic tries all alternatives of a group: only the errors of the chosen one count.
        if group in _groups_of(kind) and len(_options_of(kind)[group]) > 1:
            branch, chosen = parts.pop(1), _choose(kind, group, values.get(group))
            others = [k.__name__ for k in _groups_of(kind)[group] if k is not chosen]
            if branch in others or (chosen and branch != chosen.__name__):
                continue
        # Indices of tuples, and names of types, are no parts of a key.
        key = ".".join(part for part in parts if part.isidentifier() and part != "str")
        if each["type"] == "value_error":
            yield from (Problem(text, "rule") for text in str(each["ctx"]["error"]).split("\n  "))
        elif each["type"] == "unexpected_keyword_argument":
            found = flat(each["input"], key)
            yield from (Problem(f"{at}={_show(v)}: {_no_such_key(at, known)}", "key") for at, v in found)
        elif key not in seen:
            seen.add(key)
            value = MISSING if each["type"] == "missing" else _show(each["input"])
            yield Problem(f"{key}={value}: {_message(each)}")


def _show(value: Any) -> Any:
    """Return a value as a command line has it."""
    return "null" if value is None else value


def _no_such_key(key: str, known: list[str]) -> str:
    """Return the message about a key that does not exist.

    It names the key that is probably meant (one of the same name elsewhere, or the most similar one), and the
    keys that there are.
    """
    at, _, last = key.rpartition(".")
    while at and not any(k.startswith(f"{at}.") for k in known):
        at = at.rpartition(".")[0]
    below = [k.removeprefix(f"{at}.").partition(".")[0] for k in known if not at or k.startswith(f"{at}.")]
    same = [k for k in known if k.rpartition(".")[2] == last]
    meant = same or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    hint = f"Did you mean {meant[0]}? " if meant else ""
    return f"no such key. {hint}{at or 'The top'} has {', '.join(dict.fromkeys(below))}."


def _message(error: Mapping[str, Any]) -> str:
    """Return pydantic's own message, with the choice that was probably meant."""
    if error["type"] == "dataclass_type":
        return "expected keys below it."
    choices = re.findall("'([^']*)'", error["ctx"]["expected"]) if error["type"] == "literal_error" else []
    meant = difflib.get_close_matches(str(error["input"]), choices, n=1)
    return f"{error['msg']}." + (f" Did you mean {meant[0]}?" if meant else "")
