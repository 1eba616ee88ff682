"""Checks: parts that the configurations of all commands share. They need no pydantic, which may be
missing."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from experiments import ROOT

T = TypeVar("T")

TARGET = "_target_"  # Hydra's key for the dotted name of what is called with the other keys


def targets_in(values: Any, key: str = "") -> list[str]:
    """Return where values name code that would run, at any depth.

    >>> targets_in({"model": {"_target_": "mine.Net", "width": 8}, "tracker": {"own": [{"_target_": "a.B"}]}})
    ['model._target_=mine.Net', 'tracker.own.0._target_=a.B']
    """
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(values, Mapping):
        pairs = values.items()
    elif isinstance(values, list | tuple):
        pairs = enumerate(values)
    targets: list[str] = []
    for name, value in pairs:
        path = f"{key}.{name}".removeprefix(".")
        if name == TARGET:
            targets.append(f"{path}={value!s:.80}")
        else:
            targets += targets_in(value, path)
    return targets


def flatten_keys(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, by dotted keys."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from flatten_keys(value, f"{key}.{name}".removeprefix("."))
    else:
        yield key, values


@dataclass_transform(kw_only_default=True, frozen_default=True)
def configuration(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with keyword arguments, of which pydantic checks keys and types.

    It refuses unknown keys, and numbers that are not finite.
    """
    cls.__pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "coerce_numbers_to_str": True}
    return dataclass(frozen=True, kw_only=True)(cls)


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every problem."""


def pluralize(number: int, of: str) -> str:
    """Return a number and what it counts.

    >>> pluralize(1, "way"), pluralize(4096, "device")
    ('1 way', '4,096 devices')
    """
    return f"{number:,} {of}{'s' if number != 1 else ''}"


def describe(error: BaseException) -> str:
    """Return what an error of the user's own code says, and the file and line in that code."""
    # The first cause is the user's error; Hydra and the jobs wrap it in their own.
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    # The last frame outside of libraries and of this repository is in the user's code.
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others = tuple(f"{path}{os.sep}" for path in (*libraries, ROOT / "fnshard", ROOT / "experiments"))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
    own = [each for each in frames if not each.filename.startswith(others)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def join_problems(problems: Sequence[str]) -> ConfigError:
    """Return one error that lists all problems. A single problem takes one line.

    >>> print(join_problems(["run.steps=0: must be 1 or more."]))
    run.steps=0: must be 1 or more.
    >>> print(join_problems(["run.steps=0: must be 1 or more.", "mesh.z: no such key."]))
    the configuration has 2 problems:
      run.steps=0: must be 1 or more.
      mesh.z: no such key.
    """
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n  ".join([f"the configuration has {len(problems)} problems:", *problems]))


def attempt(make: Callable[[], T], wrong: list[str]) -> T | None:
    """Return the result of `make`. If it raises a ConfigError, add its text to `wrong` and return None."""
    try:
        return make()
    except ConfigError as error:
        wrong.append(str(error))
        return None
