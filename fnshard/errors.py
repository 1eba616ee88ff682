"""The errors that a user's mistake raises. One message lists all failing leaves and says the way out."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "AgreementError", "BudgetError", "CheckpointError", "CheckpointWarning", "CollectiveError",
    "DebugError", "FnshardError", "LaunchError", "MissingExtraError", "OptimizerError", "ScheduleError",
    "SpecError", "StateError", "TraceError",
]  # fmt: skip


class FnshardError(Exception):
    """Base of all errors fnshard raises on purpose; the arguments are those of `report`."""

    def __init__(self, headline: str, failures: Sequence[str] = (), fix: str = ""):
        super().__init__(report(headline, failures, fix))


class SpecError(FnshardError, ValueError):
    """A spec, rule or mesh does not fit the leaves it is meant for."""


class TraceError(FnshardError, TypeError):
    """`fn` does something that cannot be captured as one differentiable program."""


class StateError(FnshardError, ValueError):
    """A state, parameter tree or batch is not what the step was made for."""


class OptimizerError(FnshardError, TypeError):
    """An optimizer asks for something the layout cannot give."""


class ScheduleError(FnshardError, AssertionError):
    """`verify` found a schedule that would read, lose or keep the wrong thing: a bug of ours."""


class AgreementError(FnshardError, RuntimeError):
    """Ranks hold different programs, specs or meshes."""


class CollectiveError(FnshardError, RuntimeError):
    """A peer died, left, or did not answer within the timeout."""


class LaunchError(FnshardError, RuntimeError):
    """A rank failed, or cannot be started. One string, so that it survives pickling by a job launcher."""


class BudgetError(FnshardError, MemoryError):
    """A step takes more memory than it may."""


class CheckpointError(FnshardError, RuntimeError):
    """A checkpoint cannot be written, is corrupt, or is of another model."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, and why."""


class DebugError(FnshardError, AssertionError):
    """A check of `fs.debug` failed; `report` has its findings."""

    def __init__(self, headline: str, failures: Sequence[str] = (), fix: str = "", *, report: object = None):
        super().__init__(headline, failures, fix)
        self.report = report


class MissingExtraError(FnshardError, ImportError):
    """An optional package is not installed."""


def report(headline: str, failures: Sequence[str] = (), fix: str = "") -> str:
    """Join a headline, one line per failing leaf, and the way out.

    >>> print(report("1 leaf is wrong:", ["params['w'] [3]"], "name another axis."))
    1 leaf is wrong:
      params['w'] [3]
    Fix: name another axis.
    """
    lines = [headline, *(f"  {line}" for line in failures)]
    if fix:
        lines.append(f"Fix: {fix}")
    return "\n".join(lines)


def stable_repr(value: object) -> str:
    """Return `repr` without memory addresses: the same text in every process.

    >>> stable_repr(len), stable_repr(object())
    ('<built-in function len>', '<object object>')
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def misfits(values: Mapping[str, Any], expected: Mapping[str, tuple[Callable[[Any], Any], str]]) -> list[str]:
    """Return a line for each value that is not what is expected.

    Args:
        expected: by name, a function that says whether a value fits, and what would fit, as text.

    >>> misfits({"rank": 0, "mode": "min"}, {"rank": counts(1), "mode": one_of("min", "max")})
    ['rank=0: a whole number, at least 1']
    """
    return [f"{n}={values[n]!r}: {text}" for n, (fits, text) in expected.items() if not fits(values[n])]


def counts(least: int, what: str = "a whole number") -> tuple[Callable[[Any], bool], str]:
    """Return what `misfits` expects of a whole number that is at least `least`, and no boolean."""
    return lambda v: is_number(v) and isinstance(v, int) and v >= least, f"{what}, at least {least}"


def one_of(*choices: Any) -> tuple[Callable[[Any], bool], str]:
    """Return what `misfits` expects of a value that is one of these."""
    return lambda v: v in choices, f"one of {', '.join(map(repr, choices))}"


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def nearest(glob: str, names: Iterable[str]) -> str:
    """Return the end of a message, with the names that a glob may have meant.

    Of names that differ in their numbers alone (one per layer) only the first is suggested.

    >>> nearest("*.wv", ["layers.0.wq", "layers.1.wq", "norm"])
    "; nearest: 'layers.0.wq', 'norm'"
    """
    # Reversed, so that of names with the same pattern the first one stays in the dict.
    first = {re.sub(r"\d+", "0", name): name for name in reversed(list(names))}
    close = difflib.get_close_matches(glob.strip("*"), first, n=3, cutoff=0)
    return f"; nearest: {', '.join(repr(first[name]) for name in close)}" if close else ""


def leaves(count: int) -> str:
    """Return a count of leaves as text: "1 leaf", "2 leaves"."""
    return "1 leaf" if count == 1 else f"{count} leaves"
