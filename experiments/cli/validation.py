"""The check of a whole command line, before Hydra acts on it and before torch is loaded; and `--help`.

Hydra's own parser reads the arguments and its loader composes the files; every problem is collected: choices
of groups here, keys and values by pydantic (`experiments.cli.schema`), rules by the dataclasses.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
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
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.cli import schema
from experiments.cli.command_spec import MISTAKES, CommandSpec, text_of
from experiments.configs.checks import TARGET, ConfigError, refusal
from experiments.configs.train import MEASURED

QUOTES = "quote a value with brackets, blanks or letters beyond ASCII: 'run.prompt=\"a b\"'"
OWN_GROUP = re.compile(rf"(\w+)=(\{{.*\b{TARGET}:.*\}})", re.DOTALL)
OWN_KEY = re.compile(rf"(model|data|objective|optimizer)\.{TARGET}=.*", re.DOTALL)
OBJECTIVE = "objective"  # which of the main job is no group of files
SWEPT = 64  # values of an argument of a sweep that are checked before it starts; each job checks its own


def with_own_groups(arguments: list[str]) -> list[str]:
    """The arguments, where a group that is a `_target_` replaces the defaults of the group, and what is
    measured is a name.

    >>> with_own_groups(["optimizer={_target_: mine.lion, lr: 1e-4}"])
    ['~optimizer', '+optimizer={_target_: mine.lion, lr: 1e-4}']
    >>> with_own_groups(["model._target_=mine.Net", "model.width=8"])
    ['~model', '++model._target_=mine.Net', '++model.width=8']
    >>> with_own_groups(["hardware=measured:outputs"])
    ['hardware.name=measured:outputs']
    """
    arguments = [re.sub(f"^hardware=(?={MEASURED})", "hardware.name=", each) for each in arguments]
    own = {found[1] for found in map(OWN_KEY.fullmatch, arguments) if found}
    out = [f"~{group}" for group in sorted(own - {OBJECTIVE})]
    for argument in arguments:
        found, group = OWN_GROUP.fullmatch(argument), argument.partition(".")[0]
        if found:
            out += [f"++{argument}"] if found[1] == OBJECTIVE else [f"~{found[1]}", f"+{argument}"]
        else:
            out.append(f"++{argument}" if group in own and "=" in argument else argument)
    return out


def validate(spec: CommandSpec, arguments: list[str]) -> Any:
    """The configuration that a command line means; None where it means several, or Hydra answers it.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    flags = get_args_parser().parse_args(with_own_groups(arguments))
    if flags.hydra_help or flags.shell_completion or flags.cfg or flags.info or flags.experimental_rerun:
        return None
    spec.register()
    try:
        with loader_of(spec, flags.config_dir) as loader:
            return _validated(spec, loader, flags.overrides or [], sweeps=flags.multirun)
    except MISTAKES as error:
        raise ConfigError(text_of(error)) from None


def help_of(spec: CommandSpec) -> str:
    """What `--help` prints: what the command does, groups and their choices, keys with their defaults."""
    spec.register()
    with loader_of(spec) as loader:
        groups = [group for group in groups_of(spec, loader) if not group.startswith("hydra")]
        choices = "\n".join(f"  {group}: {', '.join(loader.get_group_options(group))}" for group in groups)
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


def groups_of(spec: CommandSpec, loader: ConfigLoader) -> list[str]:
    """The groups of a command's defaults list; Hydra's own come last."""
    found = loader.compute_defaults_list(spec.name, [], RunMode.RUN).overrides.known_choices
    return sorted(found, key=lambda group: group.startswith("hydra"))


def _validated(spec: CommandSpec, loader: ConfigLoader, arguments: list[str], *, sweeps: bool) -> Any:
    parser, groups = OverridesParser.create(config_loader=loader), groups_of(spec, loader)
    good: list[Override] = []
    problems: list[str] = []
    unsure = set()  # groups that lack an argument; "" is the whole
    for argument in arguments:
        try:
            (override,) = parser.parse_overrides([argument])
            if not override.key_or_group:
                raise HydraException
        except HydraException:
            problems.append(f"{argument}: expected KEY=VALUE; {QUOTES}.")
            continue
        wrong = _problem_of(override, groups, loader, sweeps=sweeps)
        if wrong:
            problems.append(f"{argument}: {wrong}")
            unsure |= {override.key_or_group.partition(".")[0], ""}
        else:
            good.append(override)
    config = None
    for values in _composed(spec, loader, good, groups):
        config, found = schema.check(values, spec.config)
        for each in found:
            skipped = each.is_rule and (sweeps or each.key in unsure)
            problems += [] if skipped else [str(each)]
    if problems:
        raise refusal(list(dict.fromkeys(problems)))
    return None if sweeps else spec.complete(config)


def _problem_of(override: Override, groups: list[str], loader: ConfigLoader, *, sweeps: bool) -> str | None:
    """What is wrong with an argument as such; keys and values are checked when all are composed."""
    group = override.key_or_group
    if override.is_sweep_override() and not sweeps:
        return "several values are a sweep. Fix: --multirun; or quotes for text, [a,b] for a list."
    choices = loader.get_group_options(group)
    if group not in groups:
        own = [each for each in groups if "/" not in each]
        return f"no such group. The groups are {', '.join(own)}." if choices and own else None
    named = _swept(override) if override.is_sweep_override() else [override.value()]
    for value in [] if override.is_delete() else named:
        for choice in value if isinstance(value, list) else [value]:
            if not isinstance(choice, dict) and str(choice) not in choices:
                meant = difflib.get_close_matches(str(choice).lower(), choices, n=1, cutoff=0.5)
                hint = f"Did you mean {group}={meant[0]}? " if meant else ""
                return f"no such choice. {hint}{group} has {', '.join(choices)}."
    return None


def _swept(override: Override) -> list[str]:
    """Values of a sweep, as a command line says them; none of an interval."""
    interval = override.value_type == ValueType.INTERVAL_SWEEP
    return [] if interval else list(islice(override.sweep_string_iterator(), SWEPT))


def _composed(
    spec: CommandSpec, loader: ConfigLoader, overrides: list[Override], groups: list[str]
) -> Iterator[dict[str, Any]]:
    """Plain values, without Hydra's part: of a sweep so many that each value of each argument is in one.

    A key that does not exist is added, and reported with all other mistakes.
    """
    lines: list[list[str]] = []
    for override in overrides:
        key = override.key_or_group
        change = override.type == OverrideType.CHANGE and key not in groups and not key.startswith("hydra")
        texts = [override.input_line]
        if override.is_sweep_override():
            texts = [f"{override.get_key_element()}={text}" for text in _swept(override)]
        lines += [[f"++{text}" if change else text for text in texts]] if texts else []
    for i in range(max(map(len, lines), default=1)):
        chosen = [texts[min(i, len(texts) - 1)] for texts in lines]
        composed = loader.load_configuration(spec.name, chosen, RunMode.RUN)
        yield OmegaConf.to_container(_own(composed), resolve=True)


def _own(composed: DictConfig) -> DictConfig:
    """A configuration without Hydra's part."""
    return OmegaConf.masked_copy(composed, [name for name in composed if name != "hydra"])
