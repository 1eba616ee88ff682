"""Checks: what a configuration's dataclass asks of its own numbers and names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NODES = {"AdamWConfig": "optimizer", "SGDConfig": "optimizer", "ShardsConfig": "data",
         "FinetuneDataConfig": "data", "ExplainConfig": ""}  # fmt: skip


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


def _each(config: object, names: tuple[str, ...], good: Any, wanted: str) -> None:
    bad = [n for n in names if getattr(config, n) is not None and not good(getattr(config, n))]
    if bad:
        kind = type(config).__name__
        node = NODES.get(kind, kind.removesuffix("Config").lower())
        shown = " and ".join(f"{node}.{n}={getattr(config, n)!r}".removeprefix(".") for n in bad)
        raise ValueError(f"{shown}: must be {wanted}.")


def at_least(least: int, config: object, *names: str) -> None:
    _each(config, names, lambda v: v >= least, f"{least} or more")


def above(bound: int, config: object, *names: str) -> None:
    _each(config, names, lambda v: v > bound, f"above {bound}")


def fraction(config: object, *names: str) -> None:
    _each(config, names, lambda v: 0 <= v < 1, "0 or more and below 1")


def one_of(choices: tuple[str, ...], config: object, *names: str) -> None:
    _each(config, names, lambda v: v in choices, f"one of {', '.join(choices)}")


def count(text: str) -> int:
    """An `argparse` type: a whole number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)
