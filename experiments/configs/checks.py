"""Checks that the configurations' dataclasses make of their own numbers and names."""

from __future__ import annotations

import argparse
import ast
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from experiments import ROOT

T = TypeVar("T")

NODES = {"AdamWConfig": "optimizer", "SGDConfig": "optimizer", "ShardsConfig": "data",
         "FinetuneDataConfig": "data", "ExplainConfig": ""}  # fmt: skip

# The most that a number may be, by the last part of its key: far above what anybody runs, and below what
# takes hours, or all memory, before something else refuses it.
MOST_OF_ALL = 2**31 - 1  # of any other
MOST: Mapping[str, float] = {
    **dict.fromkeys(("width", "mlp"), 2**20), **dict.fromkeys(("heads", "kv_heads", "rank"), 2**14),
    "lr": 1e38,  # what is absurd here costs nothing, and is reported as a loss that is not finite
    **dict.fromkeys(("layers", "prefetch_forward", "prefetch_backward", "profile"), 10_000),
    **dict.fromkeys(("context", "length", "large_length", "vocab"), 2**24),
    **dict.fromkeys(("rows", "held_out_rows", "large_rows", "sample_tokens", "accumulate"), 2**20),
    **dict.fromkeys(("ranks", "replicate", "shard", "tensor", "worlds", "measured_worlds"), 2**20),
    **dict.fromkeys(("n_jobs", "n_trials", "array_parallelism"), 10_000),
    **dict.fromkeys(("processes", "rounds", "warmup", "losses", "kills", "max_restarts"), 2**20),
    **dict.fromkeys(("steps", "save_every", "held_out_every", "keep_every"), 10**9),
    **dict.fromkeys(("timeout_s", "stop_grace_s", "patience_s"), 10**8),
    "seed": 2**63 - 1, "tokens": 1e18, "theta": 1e18, "device_gb": 1e6, "shard_mb": 1e6,
}  # fmt: skip


def too_large(values: Any, key: str = "") -> Iterator[str]:
    """Numbers that are out of all proportion, with their keys, anywhere in nested values.

    >>> list(too_large({"model": {"layers": 10**9, "width": 128}}))
    ['model.layers=1000000000: must be 10000 or less.']
    >>> list(too_large({"optimizer": {"weight_decay": -(10**12)}}))
    ['optimizer.weight_decay=-1000000000000: must be -2147483647 or more.']
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from too_large(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from too_large(value, key)
    elif isinstance(values, int | float):
        most = MOST.get(key.rpartition(".")[2], MOST_OF_ALL)
        if abs(values) > most and abs(values) != math.inf:  # reported as no finite number
            bound = f"{_short(-most)} or more" if values < 0 else f"{_short(most)} or less"
            yield f"{key}={_short(values)}: must be {bound}."


def _short(number: float) -> str:
    """A short text: Python does not print integers of thousands of digits, and fifty are not readable."""
    return repr(number) if abs(number) < 10**20 else f"{'-' * (number < 0)}10^{math.log10(abs(number)):.0f}"


def unmakeable(place: str) -> str:
    """Why a folder cannot be made, or written; "" if it can.

    >>> unmakeable("outputs/today"), unmakeable("/dev/null/x"), unmakeable("")
    ('', '/dev/null is no folder', 'names no folder')
    """
    if not place.strip():
        return "names no folder"
    path = Path(place).absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


@dataclass_transform(kw_only_default=True, frozen_default=True)
def configuration(cls: type[T]) -> type[T]:
    """Make a frozen dataclass by keyword, whose keys and types pydantic checks: no others, numbers finite."""
    cls.__pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "coerce_numbers_to_str": True}
    return dataclass(frozen=True, kw_only=True)(cls)


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every problem."""


def refusal(problems: Sequence[str]) -> ConfigError:
    """All problems in one error; one alone in one line.

    >>> print(refusal(["run.steps=0: must be 1 or more."]))
    run.steps=0: must be 1 or more.
    >>> print(refusal(["run.steps=0: must be 1 or more.", "mesh.z: no such key."]))
    the configuration has 2 problems:
      run.steps=0: must be 1 or more.
      mesh.z: no such key.
    """
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n  ".join([f"the configuration has {len(problems)} problems:", *problems]))


def _each(config: object, names: tuple[str, ...], good: Any, rule: str) -> None:
    bad = [n for n in names if getattr(config, n) is not None and not good(getattr(config, n))]
    if bad:
        kind = type(config).__name__
        node = NODES.get(kind, kind.removesuffix("Config").lower())
        shown = " and ".join(f"{node}.{n}={getattr(config, n)!r}".removeprefix(".") for n in bad)
        raise ValueError(f"{shown}: must be {rule}.")


def at_least(least: int, config: object, *names: str) -> None:
    _each(config, names, lambda v: v >= least, f"{least} or more")


def above(bound: int, config: object, *names: str) -> None:
    _each(config, names, lambda v: v > bound, f"above {bound}")


def fraction(config: object, *names: str) -> None:
    _each(config, names, lambda v: 0 <= v < 1, "0 or more and below 1")


def one_of(choices: tuple[str, ...], config: object, *names: str) -> None:
    _each(config, names, lambda v: v in choices, f"one of {', '.join(choices)}")


def registered(file: str, registry: str) -> tuple[str, ...]:
    """The names in a registry of `fnshard`, read from its source: importing it would load torch.

    >>> registered("optim/schedules.py", "SCHEDULES")[0]
    'constant'
    """
    for node in ast.parse((ROOT / "fnshard" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == registry:
            return tuple(ast.literal_eval(key) for key in node.value.keys)
    raise LookupError(f"fnshard/{file} has no {registry}")


def with_defaults(config: T, defaults: Mapping[str, Any]) -> T:
    """The dataclass with these values where it has None."""
    return replace(config, **{k: v for k, v in defaults.items() if getattr(config, k) is None})


def out_of_range(config: object, choices: Mapping[str, Iterable[str]], least: Mapping[str, int]) -> list[str]:
    """Which values, or members of a list, are none of their choices or below their bound; None is neither."""
    problems = []
    for name, known in choices.items():
        problems += [
            f"{name}={v}: one of {', '.join(known)}." for v in _members(config, name) if v not in known
        ]
        problems += [f"{name}: at least one of {', '.join(known)}."] * (getattr(config, name) == ())
    for name, bound in least.items():
        problems += [f"{name}={v}: must be {bound} or more." for v in _members(config, name) if v < bound]
    return problems


def _members(config: object, name: str) -> tuple[Any, ...]:
    value = getattr(config, name)
    return value if isinstance(value, tuple) else () if value is None else (value,)


def count(text: str) -> int:
    """An `argparse` type: a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)
