"""Every error a user's mistake can raise: one message, all failing leaves, the way out."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = [
    "AgreementError",
    "BudgetError",
    "CheckpointError",
    "CheckpointWarning",
    "CollectiveError",
    "DebugError",
    "FnshardError",
    "LaunchError",
    "MissingExtraError",
    "OptimizerError",
    "ScheduleError",
    "SpecError",
    "StateError",
    "TraceError",
]


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
    """What a check of `fs.debug` found: a difference, or a compilation too many. `report`: its findings."""

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
    """`repr` without memory addresses: the same text in every process.

    >>> stable_repr(len), stable_repr(object())
    ('<built-in function len>', '<object object>')
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def leaves(count: int) -> str:
    """`1 leaf`, `2 leaves`."""
    return "1 leaf" if count == 1 else f"{count} leaves"
