"""Typed: the arguments of a command line, each looked at on its own, before Hydra composes anything."""

from __future__ import annotations

import argparse
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from decimal import Decimal
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep, ValueType
from hydra.errors import HydraException
from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode
from omegaconf.errors import OmegaConfBaseException

from experiments.cli.allowlist import NOT_ALLOWED, is_allowed
from experiments.cli.provenance import TYPED
from experiments.cli.schema import options_of
from experiments.cli.suggest import no_such_choice, no_such_key
from experiments.configs.checks import ConfigError, too_large

NODES: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
LISTS = {int: "a list of whole numbers, as in [1,2]", str: "a list, as in [a,b]"}
MOST_JOBS = 10_000  # of a sweep: all of them are listed before the first one starts
UNLISTED = (ValueType.INTERVAL_SWEEP,)  # sweeps without a list of values


@dataclass(frozen=True)
class Known:
    """What may be said.

    Args:
        keys: every dotted key and its type.
        groups: every group and its choices.
    """

    keys: Mapping[str, Any]
    groups: Mapping[str, list[str]]

    @property
    def nodes(self) -> set[str]:
        """Keys that have keys below them."""
        return {key.rpartition(".")[0] for key in self.keys} - {""}


def flags_of(arguments: list[str]) -> argparse.Namespace:
    """Hydra's flags, and `overrides`.

    Raises:
        ConfigError: a flag that there is not, or that is not for these jobs.
    """
    parser = get_args_parser()

    def refuse(said: str) -> NoReturn:
        raise ConfigError(f"{said} ({TYPED}). Fix: --help shows what there is.")

    parser.error = refuse  # type: ignore[method-assign]  # of argparse's own, exit code and all
    flags = parser.parse_args(arguments)
    if flags.experimental_rerun is not None:
        refuse("--experimental-rerun runs whatever its file holds")
    if flags.config_path is not None:
        refuse("--config-path: the files of conf/ belong to the job; --config-dir adds some of your own")
    flags.overrides = [] if flags.overrides is None else flags.overrides
    return flags


def parsed(arguments: list[str], loader: ConfigLoader) -> tuple[list[Override], list[str]]:
    """The arguments as Hydra reads them, and what it could not read."""
    parser = OverridesParser.create(config_loader=loader)
    overrides, problems = [], []
    for argument in arguments:
        try:
            (override,) = parser.parse_overrides([argument])
        except HydraException:  # its own words point into a line that nobody sees
            quoted = "quote a value with brackets, blanks or letters beyond ASCII: 'run.prompt=\"a b\"'"
            problems.append(f"{argument} ({TYPED}): expected KEY=VALUE; {quoted}.")
            continue
        if override.key_or_group:
            overrides.append(override)
        else:
            problems.append(f"{argument} ({TYPED}): expected KEY=VALUE.")
    return overrides, problems


def is_hydras(override: Override) -> bool:
    """Whether it is about Hydra itself."""
    return override.key_or_group.partition(".")[0].partition("/")[0] == "hydra"


def problems_of(override: Override, known: Known, *, sweeps: bool) -> Iterator[str]:
    """What is wrong with one argument.

    Args:
        sweeps: whether it may have several values.
    """
    key, line = override.key_or_group, f"{override.input_line} ({TYPED})"
    if (jobs := jobs_of(override)) > MOST_JOBS:
        yield f"{line}: {too_many(jobs)}"
        return
    if is_hydras(override) and key not in known.groups:
        if not is_allowed(key):
            yield f"{line}: {NOT_ALLOWED}"
        return
    if override.is_delete():
        yield f"{line}: every key is needed, nothing can be taken away."
    elif override.is_sweep_override() and not sweeps:
        yield f"{line}: several values are a sweep. Fix: --multirun; or quotes for text, [a,b] for a list."
    elif key in known.groups:
        yield from _of_group(override, known, line)
    elif key in known.nodes:
        yield from _of_node(override, known, line)
    elif key in known.keys and override.is_add():
        yield f"{line}: is there already. Fix: {override.input_line[1:]}."
    elif key in known.keys:
        for value in values_of(override):
            said = misfit(known.keys[key], value)
            if said:
                yield f"{line}: {said}"
            yield from (f"{line}: {said.partition(': ')[2]}" for said in too_large(value, key))
    elif not any(key.startswith(f"{k}.") and hint is Any for k, hint in known.keys.items()):
        yield f"{line}: {no_such_key(key, known.keys, [g for g in known.groups if '/' not in g])}"


def _of_group(override: Override, known: Known, line: str) -> Iterator[str]:
    group, choices = override.key_or_group, known.groups[override.key_or_group]
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP and not override.value().filter(choices):
        yield f"{line}: matches none of {', '.join(choices)}."
        return
    if override.is_add() or override.is_force_add():
        yield f"{line}: {group} is there already. Fix: {override.input_line.lstrip('+')}."
        return
    given = values_of(override)
    for value in given[0] if given and isinstance(given[0], list) else given:
        if isinstance(value, Mapping):
            inside = next((k for k in known.keys if k.startswith(f"{group}.")), group)
            yield f"{line}: a choice is wanted, one of {', '.join(choices)}; for keys of it: {inside}=..."
        elif str(value) not in choices:
            yield f"{line}: {no_such_choice(group, 'null' if value is None else value, choices)}"


def _of_node(override: Override, known: Known, line: str) -> Iterator[str]:
    node = override.key_or_group
    for value in values_of(override):
        if not isinstance(value, Mapping):
            inside = next(k for k in known.keys if k.startswith(f"{node}."))
            yield f"{line}: {node} has keys below it, as in {inside}=..."
            continue
        for key, each in value.items():
            if f"{node}.{key}" not in known.keys:
                yield f"{line}: {node}.{key}: {no_such_key(f'{node}.{key}', known.keys)}"
            elif said := misfit(known.keys[f"{node}.{key}"], each):
                yield f"{line}: {node}.{key}: {said}"


def jobs_of(override: Override) -> float:
    """How many values an argument has, none of them made: `range(0,10000000000)` is short to write."""
    value = override.value()
    if isinstance(value, RangeSweep):
        try:
            return max(0, math.ceil((Decimal(value.stop) - Decimal(value.start)) / Decimal(value.step)))
        except (ArithmeticError, ValueError):  # by a step of 0, or to infinity
            return math.inf
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def too_many(jobs: float) -> str:
    """What is said of a sweep that is too large."""
    return f"a sweep of {jobs:.4g} jobs; {MOST_JOBS} is the most. Fix: fewer values, or several sweeps."


def values_of(override: Override) -> list[Any]:
    """The value, or all values of a sweep; none of an interval."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type in UNLISTED:
        return []
    return [getattr(value, "text", value) for value in override.sweep_iterator()]


def misfit(hint: Any, value: Any) -> str:
    """Why a value is none of this type; "" if it is, or can be made one.

    >>> misfit(int, "many"), misfit(float | None, None), misfit(int, "5")
    ("expected a whole number, not 'many'.", '', '')
    """
    options = options_of(hint)
    if hint is Any or "${" in str(value) or any(_fits(option, value) for option in options):
        return ""
    wanted = " or ".join(_word(option) for option in options)
    return f"expected {wanted}, not {'null' if value is None else repr(value)}."


def _fits(option: Any, value: Any) -> bool:
    if option is types.NoneType or value is None:
        return option is types.NoneType and value is None
    if typing.get_origin(option) is tuple:
        inside = typing.get_args(option)[0]
        return isinstance(value, list) and all(_fits(inside, each) for each in value)
    if is_dataclass(option):
        return isinstance(value, Mapping)
    try:
        NODES[option](value, is_optional=False)
    except OmegaConfBaseException:
        return False
    return True


def _word(option: Any) -> str:
    if typing.get_origin(option) is tuple:
        return LISTS[typing.get_args(option)[0]]
    return WORDS.get(option, "keys")
