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
from experiments.lib.checks import TARGET, ConfigError, flatten_keys, join_problems
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

    def run_one(composed: DictConfig) -> Any:
        logging.getLogger("fnshard").setLevel(logging.WARNING)  # else Hydra shows how far a lowering is
        return task(read(command, composed), Path(HydraConfig.get().runtime.output_dir).resolve())

    def run() -> None:
        composed = from_shell(command)
        if isinstance(composed, Composed):
            task(composed.config, composed.folder)
        elif composed:
            run_sweep(command, run_one)

    exit_with(run)


def from_shell(command: Command, arguments: Sequence[str] | None = None) -> Composed | bool:
    """Compose and check arguments, by default those of this process.

    Returns:
        A run; or whether there are several, by `--multirun`, which Hydra is to compose one by one. Help and
        other flags are answered here.

    Raises:
        ConfigError: something is wrong with the command line.
    """
    # The flags are Hydra's, which parses them again if it has to answer.
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

    # Answer help, and refuse flags that are unsafe, that nothing here knows, or that contradict each other.
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

    # Let Hydra show what is asked for, check a sweep, or compose a run.
    before = [each for each in sys.argv[1:] if each not in arguments]  # Hydra's parser takes flags first
    if flags & SHOWN:
        # Wrong values are shown, too, but unknown keys are refused.
        prefixes: tuple[str, ...] = ()
        if known.cfg or known.info:
            with open_hydra(command, known.config_dir):
                values = plain_values(command, compose_values(command, arguments))
            if unknown := [each.text for each in check(values, command.config)[1] if each.kind == "key"]:
                raise join_problems(unknown)
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
    # Otherwise Hydra prints an exception and exits by itself; its own exceptions are passed on, too.
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
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
        if int(os.environ.get("RANK", "0")) == 0:  # all ranks of torchrun have the same command line
            print(f"error: {text_of(error)}", file=sys.stderr, flush=True)
        sys.exit(code)


def is_mistake(error: Exception) -> bool:
    """Return whether the user's configuration is wrong."""
    return isinstance(error, MISTAKES) or (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG)


def is_outside(error: Exception) -> bool:
    """Return whether something outside of the program failed: a rank, a disk, an agreement."""
    return isinstance(error, FnshardError) or (isinstance(error, OSError) and error.errno in OF_THE_MACHINE)


def text_of(error: Exception) -> str:
    """Return the text of an exception. That of OmegaConf's begins with the key that it is about."""
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
    # Find Hydra's keys that do nothing in a single run.
    keys = {each: re.split("[=@]", each.lstrip("+~"))[0] for each in arguments}
    of_hydra = [each for each in arguments if keys[each].startswith(("hydra.", "hydra/"))]
    acting = (*ACTING, LAUNCHER)
    below_acting = tuple(f"{key}." for key in acting)
    idle = [e for e in of_hydra if keys[e] not in acting and not keys[e].startswith(below_acting)]

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

        # Hydra has composed keys with `++` in front. Its record gets what the command line says.
        task = [each for each in arguments if each not in of_hydra]
        name = with_hydra.job.config.override_dirname
        named = sorted(each for each in task if keys[each] not in name.exclude_keys)
        with_hydra.overrides.task = task
        with_hydra.job.override_dirname = name.item_sep.join(named).replace("=", name.kv_sep)

        folder = Path(with_hydra.run.dir).resolve()
        with_hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(composed)  # for what looks there, as resolvers do
        config = read(command, composed)
    # Hydra would do this itself if it started the run.
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
    """Open Hydra on the files of a command. Errors of Hydra in the block become a ConfigError.

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
    # A single run has one value for each key.
    for override in OverridesParser.create().parse_overrides(arguments):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: several values are a sweep. Fix: --multirun; or quotes for text, "
                "[a,b] for a list."
            )

    # `++` lets Hydra add a key that does not exist. It stays away from groups, which choose files.
    loader, forced = GlobalHydra.instance().config_loader(), []
    for argument in put_targets_in_place(arguments):
        key, is_value, _ = argument.partition("=")
        is_plain = is_value and not key.startswith(("+", "~", "hydra.", "hydra/")) and "@" not in key
        # Groups are folders, whose names have no dots. Other keys are not looked up, which is slow: Hydra
        # copies all that it knows.
        is_group = "." not in key and loader.get_group_options(key)
        forced.append(f"++{argument}" if is_plain and not is_group else argument)

    # Compose, and once more without the files of groups that a recipe replaces by a `_target_`.
    try:
        composed = hydra.compose(command.name, forced, return_hydra_config=True)
        if gone := find_groups_to_drop(composed, lambda more: hydra.compose(command.name, [*forced, *more])):
            composed = hydra.compose(command.name, [*forced, *gone], return_hydra_config=True)
    except ConfigError:  # a ValueError, too
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
    # Keys below a `GROUP._target_=` are those of what is called, which the files of the group do not have.
    targets = {match[1] for match in map(TARGET_KEY.fullmatch, arguments) if match}
    out = [f"~{group}" for group in TARGET_GROUPS if group in targets]
    for argument in arguments:
        key, is_value, _ = argument.partition("=")
        match = TARGET_VALUE.fullmatch(argument)
        if match and match[1] == OBJECTIVE:
            out.append(f"++{argument}")
        elif match:
            out += [f"~{match[1]}", f"+{argument}"]
        elif is_value and any(key.startswith(f"{target}.") for target in targets):
            out.append(f"++{argument}")
        else:
            out.append(argument)
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
        if composed.hydra.runtime.choices.get(group) is None:  # no file of it was chosen
            continue
        if TARGET not in (load([f"~{group}"]).get(group) or {}):  # the file has it
            continue
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
    # In a run that Hydra starts, it has composed the files of all groups, those that a recipe replaces by a
    # `_target_` among them.
    is_open = GlobalHydra.instance().is_initialized()
    in_sweep = HydraConfig.initialized() and is_open and "hydra" not in composed
    if in_sweep and any(TARGET in (composed.get(group) or {}) for group in TARGET_GROUPS):
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
    prefixes: set[str] = set()
    problems: list[str] = []
    with open_hydra(command, config_dir):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        # Collect the arguments that each argument of the sweep stands for.
        choices: list[list[str]] = []
        for argument in arguments:
            if TARGET_VALUE.fullmatch(argument):  # a whole group as a `_target_`, which is one value
                choices.append([argument])
                continue
            (override,) = parser.parse_overrides([argument])
            if not override.is_sweep_override():
                choices.append([argument])
            elif override.value_type != ValueType.INTERVAL_SWEEP:
                values = list(islice(override.sweep_string_iterator(), SWEPT))
                if not values:
                    raise ConfigError(
                        f"{argument}: no value is meant by it. Fix: a pattern or range that has some."
                    )
                choices.append([f"{override.get_key_element()}={value}" for value in values])
        # Run i takes the ith value of each argument, or the last one that there is.
        for i in range(max(map(len, choices), default=1)):
            chosen = [texts[min(i, len(texts) - 1)] for texts in choices]
            values = plain_values(command, compose_values(command, chosen))
            prefixes |= {*find_target_prefixes(values)}
            # Rules for several values together are left to each run.
            problems += [each.text for each in check(values, command.config)[1] if each.kind != "rule"]
    if problems:
        raise join_problems(list(dict.fromkeys(problems)))
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
    # A group with alternatives (dataclasses, or a `_target_`) has no default here: a file chooses a schema.
    for group, kinds in _find_groups(kind).items():
        has_alternatives = len(_list_types(kind)[group]) > 1
        if has_alternatives:
            top.pop(group)
        for each in kinds:
            node = defaults(each)
            if has_alternatives or MISSING in node.values():
                store.store(group="schema", name=getattr(each, "name", group), node=node)
    store.store(name=name, node=top)


def defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass as nested plain values, `???` where there is none."""
    groups, out = _find_groups(kind), {}
    for each in dataclasses.fields(kind):
        if each.name in groups:
            out[each.name] = defaults(groups[each.name][0])
        elif each.default is dataclasses.MISSING:
            out[each.name] = MISSING
        else:
            out[each.name] = list(each.default) if type(each.default) is tuple else each.default
    return out


@cache
def _list_types(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the members of each field's union, or its type alone."""
    out = {}
    for name, hint in typing.get_type_hints(kind).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        out[name] = typing.get_args(hint) if is_union else (hint,)
    return out


@cache
def _find_groups(kind: type) -> dict[str, list[type]]:
    """Return the fields that are dataclasses, or one of several of them."""
    groups = {}
    for name, members in _list_types(kind).items():
        kinds = [member for member in members if dataclasses.is_dataclass(member)]
        if kinds:
            groups[name] = kinds
    return groups


def _choose(kind: type, group: str, value: Any) -> type | None:
    """Return the dataclass of a group's value, by its `name`; None if it may be, and is, a `_target_`."""
    kinds = _find_groups(kind)[group]
    values = value if isinstance(value, Mapping) else {}
    # A `Target` is a dict: a member of the union that is no dataclass.
    if TARGET in values and len(_list_types(kind)[group]) > len(kinds):
        return None
    return next((each for each in kinds if getattr(each, "name", None) == values.get("name")), kinds[0])


def kinds_of(kind: type, values: Mapping[str, Any]) -> dict[str, type | None]:
    """Return the dataclass of each group; among alternatives it is the one that `values` choose.

    It is None where the group is a `_target_`.
    """
    return {group: _choose(kind, group, values.get(group)) for group in _find_groups(kind)}


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
        raise join_problems([problem.text for problem in problems])
    return config


def check(values: Mapping[str, Any], kind: type) -> tuple[Any, list[Problem]]:
    """Return the dataclasses, None if something is wrong, and every problem."""
    try:
        return _make_adapter(kind).validate_python(_drop_missing(values)), []
    except ValidationError as error:
        return None, list(_list_problems(error, kind, values))


@cache
def _make_adapter(kind: type) -> TypeAdapter[Any]:
    """Make pydantic's validator of a dataclass, which takes a while."""
    return TypeAdapter(kind)


def _drop_missing(values: Any) -> Any:
    """Return values without keys that have no value, which pydantic then reports as missing."""
    if isinstance(values, Mapping):
        return {k: _drop_missing(v) for k, v in values.items() if not isinstance(v, str) or v != MISSING}
    return values


def _list_problems(error: ValidationError, kind: type, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the mistakes that pydantic has found, with the keys that were probably meant."""
    # List the keys that exist; of alternatives, those of the dataclass that the values choose.
    nested = defaults(kind)
    nested |= {group: defaults(each) for group, each in kinds_of(kind, values).items() if each is not None}
    known = [key for key, _ in flatten_keys(nested)]

    seen = set()
    for each in error.errors(include_url=False):
        parts = [str(part) for part in each["loc"]]
        group = parts[0] if len(parts) > 1 else ""
        # pydantic tries all alternatives of a group: only the errors of the chosen one count.
        if group in _find_groups(kind) and len(_list_types(kind)[group]) > 1:
            branch, chosen = parts.pop(1), _choose(kind, group, values.get(group))
            others = [k.__name__ for k in _find_groups(kind)[group] if k is not chosen]
            if branch in others or (chosen and branch != chosen.__name__):
                continue
        # Indices of tuples, and names of types, are no parts of a key.
        key = ".".join(part for part in parts if part.isidentifier() and part != "str")
        if each["type"] == "value_error":
            yield from (Problem(text, "rule") for text in str(each["ctx"]["error"]).split("\n  "))
        elif each["type"] == "unexpected_keyword_argument":
            for path, value in flatten_keys(each["input"], key):
                yield Problem(f"{path}={_spell(value)}: {_suggest_key(path, known)}", "key")
        elif key not in seen:
            seen.add(key)
            value = MISSING if each["type"] == "missing" else _spell(each["input"])
            yield Problem(f"{key}={value}: {_describe_error(each)}")


def _spell(value: Any) -> Any:
    """Return a value as a command line has it."""
    return "null" if value is None else value


def _suggest_key(key: str, known: list[str]) -> str:
    """Return the message about a key that does not exist.

    It names the key that is probably meant (one of the same name elsewhere, or the most similar one), and the
    keys that there are.
    """
    # Find the deepest group on the way to the key that exists, and the keys in it.
    group, _, last = key.rpartition(".")
    while group and not any(k.startswith(f"{group}.") for k in known):
        group = group.rpartition(".")[0]
    inside = [k for k in known if not group or k.startswith(f"{group}.")]
    names = dict.fromkeys(k.removeprefix(f"{group}.").partition(".")[0] for k in inside)
    same = [k for k in known if k.rpartition(".")[2] == last]
    meant = same or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    hint = f"Did you mean {meant[0]}? " if meant else ""
    return f"no such key. {hint}{group or 'The top'} has {', '.join(names)}."


def _describe_error(error: Mapping[str, Any]) -> str:
    """Return pydantic's own message, with the choice that was probably meant."""
    if error["type"] == "dataclass_type":
        return "expected keys below it."
    choices = []
    if error["type"] == "literal_error":
        choices = re.findall("'([^']*)'", error["ctx"]["expected"])
    meant = difflib.get_close_matches(str(error["input"]), choices, n=1)
    return f"{error['msg']}." + (f" Did you mean {meant[0]}?" if meant else "")
