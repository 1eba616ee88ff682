"""What a tracker is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]  # of metrics.jsonl: "step", and numbers by name


@dataclass(frozen=True, order=True)
class LogPosition:
    """Up to where rows are logged: step `step`'s row, and its held-out loss where `held_out`."""

    step: int = 0
    held_out: bool = True


@dataclass(frozen=True)
class RunInfo:
    """What a tracker gets at the start of a run.

    `facts`: of `experiments.training.run_record`. `known`: what the tracker's `start` gave an earlier process
    of this run, empty in the first. `at`: up to where that process is known to have logged.
    """

    folder: Path
    facts: Mapping[str, Any]
    known: Mapping[str, Any]
    at: LogPosition


class Tracker(Protocol):
    """Somewhere to tell a run's numbers to. Anything it raises ends it, and not the run."""

    name: str

    def start(self, info: RunInfo) -> tuple[Mapping[str, Any], LogPosition]:
        """Begin, or resume the run of `info.known`.

        Returns:
            What the next process must know (JSON); and which rows are there already: the others come again.
        """

    def log(self, rows: Sequence[Row]) -> None:
        """Rows in order, each once; they are to outlive this process when this returns."""

    def artifact(self, path: Path) -> None:
        """A file of the run's folder: a text or a picture."""

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """The process ends: the run is "ok", "stopped" (it may go on) or "failed"."""


def numbers(row: Row) -> dict[str, float]:
    """What of a row is a number, but its step."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """A nested mapping, by dotted path.

    >>> flat({"run": {"steps": 3}, "seed": 0})
    {'run.steps': 3, 'seed': 0}
    """
    out: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        out |= flat(value, f"{at}{key}.") if nested else {f"{at}{key}": value}
    return out
