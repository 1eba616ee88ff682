"""The check of a whole command line, before Hydra acts on it and before torch is loaded.

Hydra's own parser reads the arguments and its loader composes the files; every problem is collected: choices
of groups here, keys and values by pydantic (`experiments.cli.schema`), rules by the dataclasses.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
from omegaconf import OmegaConf

from experiments.cli import schema
from experiments.cli.command_spec import CommandSpec
from experiments.cli.exceptions import MISTAKES, text_of
from experiments.cli.suggest import no_such_choice
from experiments.configs.checks import TARGET, ConfigError, refusal

QUOTES = "quote a value with brackets, blanks or letters beyond ASCII: 'run.prompt=\"a b\"'"
OWN_GROUP = re.compile(rf"(\w+)=(\{{.*\b{TARGET}:.*\}})", re.DOTALL)


def with_own_groups(arguments: list[str]) -> list[str]:
    """The arguments, where a group that is a `_target_` replaces the defaults of the group.

    >>> with_own_groups(["optimizer={_target_: mine.lion, lr: 1e-4}"])
    ['~optimizer', '+optimizer={_target_: mine.lion, lr: 1e-4}']
    """
    out = []
    for argument in arguments:
        found = OWN_GROUP.fullmatch(argument)
        out += [f"~{found[1]}", f"+{argument}"] if found else [argument]
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
    for value in [] if override.is_delete() else _values_of(override):
        for choice in value if isinstance(value, list) else [value]:
            if not isinstance(choice, dict) and str(choice) not in choices:
                return no_such_choice(group, "null" if choice is None else choice, choices)
    return None


def _values_of(override: Override) -> list[Any]:
    """The value, or all values of a sweep; none of an interval."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type == ValueType.INTERVAL_SWEEP:
        return []
    return [getattr(value, "text", value) for value in override.sweep_iterator()]


def _composed(
    spec: CommandSpec, loader: ConfigLoader, overrides: list[Override], groups: list[str]
) -> Iterator[dict[str, Any]]:
    """Plain values, without Hydra's part: of a sweep so many that each value of each argument is in one."""
    swept = [override for override in overrides if override.is_sweep_override()]
    plain = [_as_addition(override, groups) for override in overrides if override not in swept]
    choices = {o.get_key_element(): _values_of(o) for o in swept if o.key_or_group in groups}
    for i in range(max(map(len, choices.values()), default=1)):
        chosen = [f"{group}={each[min(i, len(each) - 1)]}" for group, each in choices.items()]
        composed = loader.load_configuration(spec.name, [*plain, *chosen], RunMode.RUN)
        own = OmegaConf.masked_copy(composed, [name for name in composed if name != "hydra"])
        values = OmegaConf.to_container(own, resolve=True)
        yield values
        for override in swept:
            if override.key_or_group.partition(".")[0] != "hydra" and override.key_or_group not in groups:
                yield from (_with(values, override.key_or_group, value) for value in _values_of(override))


def _as_addition(override: Override, groups: list[str]) -> str:
    """An argument as Hydra composes it: a key that does not exist is added, and reported with all others."""
    key = override.key_or_group
    changes = override.type == OverrideType.CHANGE and key not in groups and not key.startswith("hydra")
    return f"++{override.input_line}" if changes else override.input_line


def _with(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of nested values with another one at a dotted key."""
    out = at = copy.deepcopy(values)
    *above, last = key.split(".")
    for name in above:
        at = at.setdefault(name, {})
    at[last] = value
    return out
