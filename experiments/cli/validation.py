"""The check of a whole command line, before Hydra acts on it and before torch is loaded; and `--help`.

Hydra parses the arguments and composes the files, and says what is wrong with either; pydantic checks all
keys and values (`experiments.cli.schema`), the dataclasses their rules.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.cli import schema
from experiments.cli.command_spec import GROUPS, MISTAKES, CommandSpec, find_groups_to_drop, text_of
from experiments.configs.checks import TARGET, ConfigError, refusal
from experiments.configs.train import MEASURED

OWN_GROUP = re.compile(rf"(\w+)=(\{{.*\b{TARGET}:.*\}})", re.DOTALL)
OWN_KEY = re.compile(rf"(\w+(?:\.\w+)*)\.{TARGET}=.*", re.DOTALL)
OBJECTIVE = "objective"  # which of the main job is no group of files
SWEPT = 64  # values of an argument of a sweep that are checked before it starts; each job checks its own


def with_own_groups(arguments: list[str]) -> list[str]:
    """The arguments, where a group that is a `_target_` replaces the defaults of the group, and what is
    measured is a name.

    >>> with_own_groups(["optimizer={_target_: mine.lion, lr: 1e-4}"])
    ['~optimizer', '+optimizer={_target_: mine.lion, lr: 1e-4}']
    >>> with_own_groups(["model._target_=mine.Net", "model.width=8"])
    ['~model', '++model._target_=mine.Net', '++model.width=8']
    >>> with_own_groups(["objective.reward._target_=mine.reward", "objective.reward.most=3", "run.steps=2"])
    ['++objective.reward._target_=mine.reward', '++objective.reward.most=3', 'run.steps=2']
    >>> with_own_groups(["hardware=measured:outputs"])
    ['hardware.name=measured:outputs']
    """
    arguments = [re.sub(f"^hardware=(?={MEASURED})", "hardware.name=", each) for each in arguments]
    own = {found[1] for found in map(OWN_KEY.fullmatch, arguments) if found}
    out = [f"~{group}" for group in GROUPS if group in own]
    for argument in arguments:
        found, (key, is_value, _) = OWN_GROUP.fullmatch(argument), argument.partition("=")
        if found:
            out += [f"++{argument}"] if found[1] == OBJECTIVE else [f"~{found[1]}", f"+{argument}"]
        else:
            below = is_value and any(key.startswith(f"{each}.") for each in own)
            out.append(f"++{argument}" if below else argument)
    return out


def with_own_keys(spec: CommandSpec, arguments: list[str]) -> list[str]:
    """Return the arguments, where keys of a group that is a `_target_` are added if the group's files do not
    name them: what is called may have more keys. Arguments that Hydra refuses stay as they are."""
    flags = get_args_parser().parse_args(arguments)
    inside = tuple(f"{group}." for group in (*GROUPS, OBJECTIVE))
    keyed = [each for each in flags.overrides or [] if each.startswith(inside) and "=" in each]
    if not keyed:
        return arguments
    own: set[str] = set()
    spec.register()
    with suppress(*MISTAKES, RecursionError), loader_of(spec, flags.config_dir) as loader:
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(flags.overrides)
        for values in _composed(spec, loader, overrides, sweeps=flags.multirun):
            own |= {f"{name}." for name, each in values.items() if isinstance(each, dict) and TARGET in each}
    added = {each for each in keyed if each.startswith(tuple(own))}
    return [f"++{each}" if each in added else each for each in arguments]


def validate(spec: CommandSpec, arguments: list[str]) -> Any:
    """The configuration that a command line means; None where it means several, or Hydra answers it.

    Raises:
        ConfigError: what Hydra refuses of it; or all keys and values that are wrong.
    """
    flags = get_args_parser().parse_args(with_own_groups(arguments))
    if flags.experimental_rerun:
        raise ConfigError(
            f"--experimental-rerun {flags.experimental_rerun}: is a pickle, and what is in it runs when "
            "it is read. Fix: the command line of the run, in its .hydra/overrides.yaml."
        )
    if flags.hydra_help or flags.shell_completion or flags.cfg or flags.info:
        return None
    spec.register()
    config, problems = None, []
    try:
        with loader_of(spec, flags.config_dir) as loader:
            overrides = OverridesParser.create(config_loader=loader).parse_overrides(flags.overrides or [])
            for values in _composed(spec, loader, overrides, sweeps=flags.multirun):
                config, found = schema.check(values, spec.config)
                # What one value of a sweep has to be beside another's is for each job to say.
                problems += [each.text for each in found if not (each.is_rule and flags.multirun)]
    except MISTAKES as error:
        raise ConfigError(text_of(error)) from None
    except RecursionError:
        raise ConfigError("the command line is nested too deeply.") from None
    if problems:
        raise refusal(list(dict.fromkeys(problems)))
    return None if flags.multirun else spec.complete(config)


def help_of(spec: CommandSpec) -> str:
    """What `--help` prints: what the command does, groups and their choices, keys with their defaults."""
    spec.register()
    with loader_of(spec) as loader:
        groups = loader.compute_defaults_list(spec.name, [], RunMode.RUN).overrides.known_choices
        own = [group for group in sorted(groups) if not group.startswith("hydra")]
        choices = "\n".join(f"  {group}: {', '.join(loader.get_group_options(group))}" for group in own)
        defaults = OmegaConf.to_yaml(_own(loader.load_configuration(spec.name, [], RunMode.RUN)))
    source = spec.config.__module__.replace(".", "/")
    parts = [
        textwrap.fill(spec.about, 100),
        f"  python -m {spec.module} [GROUP=CHOICE] [KEY=VALUE] ...",
        f"Groups:\n{choices}" if choices else "",
        f"Keys and their defaults (their meaning: {source}.py):\n{textwrap.indent(defaults, '  ')}".rstrip(),
        "\n".join(["Examples:", *(f"  {line}\n    {text}" for line, text in spec.examples.items())]),
        "Flags: --multirun (a run for every combination of KEY=A,B), --cfg job (show the whole\n"
        "configuration, and run nothing), --config-dir DIR (with files of groups); others: --hydra-help",
    ]
    return "\n\n".join(filter(None, parts))


@contextmanager
def loader_of(spec: CommandSpec, config_dir: str | None = None) -> Iterator[ConfigLoader]:
    """Hydra's reader of the files of a command."""
    with hydra.initialize_config_dir(str(spec.conf), job_name=spec.name, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        if config_dir is not None:
            if not Path(config_dir).is_dir():
                raise ConfigError(f"--config-dir={config_dir}: is no directory.")
            path = f"file://{Path(config_dir).resolve()}"
            loader.get_search_path().prepend("command-line", path, SearchPathQuery(provider="schema"))
            loader.repository.initialize_sources(loader.get_search_path())
        yield loader


def _composed(
    spec: CommandSpec, loader: ConfigLoader, overrides: list[Override], *, sweeps: bool
) -> Iterator[dict[str, Any]]:
    """Plain values, without Hydra's part: of a sweep so many that each value of each argument is in one.

    A key that does not exist is added, for pydantic to report with all others.
    """
    lines: list[list[str]] = []
    for override in overrides:
        key, texts = override.key_or_group, [override.input_line]
        if override.is_sweep_override():
            if not sweeps:
                raise ConfigError(
                    f"{texts[0]}: several values are a sweep. Fix: --multirun; or quotes for text, [a,b] for "
                    "a list."
                )
            interval = override.value_type == ValueType.INTERVAL_SWEEP
            values = [] if interval else islice(override.sweep_string_iterator(), SWEPT)
            texts = [f"{override.get_key_element()}={value}" for value in values]
        is_group = key.startswith("hydra") or loader.get_group_options(key)
        plain = override.type == OverrideType.CHANGE and not is_group
        lines += [[f"++{text}" if plain else text for text in texts]] if texts else []
    for i in range(max(map(len, lines), default=1)):
        chosen = [texts[min(i, len(texts) - 1)] for texts in lines]

        def compose(more: Sequence[str] = (), chosen: list[str] = chosen) -> DictConfig:
            return loader.load_configuration(spec.name, [*chosen, *more], RunMode.RUN)

        try:
            composed = compose()
            if gone := find_groups_to_drop(composed, compose):
                composed = compose(gone)
        except ConfigError:
            raise
        except ValueError as error:  # a choice that is no name, a file that is no text
            raise ConfigError(f"{' '.join(chosen)}: {error}") from None
        yield OmegaConf.to_container(_own(composed), resolve=True)


def _own(composed: DictConfig) -> DictConfig:
    """A configuration without Hydra's part."""
    return OmegaConf.masked_copy(composed, [name for name in composed if name != "hydra"])
