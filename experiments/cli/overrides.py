"""The arguments of a command line, each checked on its own, before Hydra composes anything."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep, ValueType
from hydra.errors import HydraException

from experiments.cli.allowlist import NOT_ALLOWED, is_allowed
from experiments.cli.provenance import COMMAND_LINE
from experiments.cli.suggest import no_such_choice
from experiments.configs.checks import ConfigError

MOST_JOBS = 10_000  # of a sweep: all of them are listed before the first one starts


def flags_of(arguments: list[str]) -> argparse.Namespace:
    """Hydra's flags, and `overrides`."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message} ({COMMAND_LINE}). Fix: --help shows what there is.")

    parser.error = refuse  # type: ignore[method-assign]  # of argparse's own, exit code and all
    flags = parser.parse_args(arguments)
    if flags.experimental_rerun is not None:
        refuse("--experimental-rerun runs whatever its file holds")
    if flags.config_path is not None:
        refuse("--config-path: the files of conf/ belong to the job; --config-dir adds some of your own")
    flags.overrides = flags.overrides or []
    return flags


def parsed(arguments: list[str], loader: ConfigLoader) -> tuple[list[Override], list[str]]:
    """The arguments as Hydra reads them, and what it could not read."""
    parser = OverridesParser.create(config_loader=loader)
    overrides, problems = [], []
    for argument in arguments:
        try:
            (override,) = parser.parse_overrides([argument])
            if not override.key_or_group:
                raise HydraException
            overrides.append(override)
        except HydraException:  # its own words point into a line that nobody sees
            quoted = "quote a value with brackets, blanks or letters beyond ASCII: 'run.prompt=\"a b\"'"
            problems.append(f"{argument} ({COMMAND_LINE}): expected KEY=VALUE; {quoted}.")
    return overrides, problems


def is_of_hydra(override: Override) -> bool:
    return override.key_or_group.partition(".")[0].partition("/")[0] == "hydra"


def is_interval(override: Override) -> bool:
    return override.value_type == ValueType.INTERVAL_SWEEP


def problem_of(
    override: Override, groups: Mapping[str, list[str]], *, sweeps: bool, searched: bool
) -> str | None:
    """What is wrong with an argument as such; keys and types are checked when all are composed.

    Args:
        groups: every group and its choices.
        sweeps: whether it may have several values.
        searched: whether a search takes intervals.
    """
    key = override.key_or_group
    if (jobs := jobs_of(override)) > MOST_JOBS:
        return too_many(jobs)
    if is_of_hydra(override) and key not in groups:
        return None if is_allowed(key) else NOT_ALLOWED
    if override.is_delete():
        return "every key is needed, nothing can be taken away."
    if override.is_sweep_override() and not sweeps:
        return "several values are a sweep. Fix: --multirun; or quotes for text, [a,b] for a list."
    if is_interval(override) and not searched:
        return "an interval is for a search. Fix: hydra/sweeper=search_lr; or name values, 1,2."
    return _of_group(override, groups[key]) if key in groups else None


def _of_group(override: Override, choices: list[str]) -> str | None:
    group, values = override.key_or_group, values_of(override)
    if override.is_add() or override.is_force_add():
        return f"{group} is there already. Fix: {override.input_line.lstrip('+')}."
    if not values:
        return f"matches none of {', '.join(choices)}."
    for value in values[0] if isinstance(values[0], list) else values:
        if isinstance(value, Mapping):
            return f"expected a choice, one of {', '.join(choices)}; keys of it are set as {group}.KEY=VALUE."
        if str(value) not in choices:
            return no_such_choice(group, "null" if value is None else value, choices)
    return None


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
    """The message about a sweep that is too large.

    >>> too_many(1e10)
    'a sweep of 1e+10 jobs; 10000 is the most. Fix: fewer values, or several sweeps.'
    """
    return f"a sweep of {jobs:.4g} jobs; {MOST_JOBS} is the most. Fix: fewer values, or several sweeps."


def values_of(override: Override) -> list[Any]:
    """The value, or all values of a sweep; none of an interval."""
    if not override.is_sweep_override():
        return [override.value()]
    return [] if is_interval(override) else [getattr(v, "text", v) for v in override.sweep_iterator()]
