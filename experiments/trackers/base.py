"""What a tracker is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]  # of metrics.jsonl: "step", and numbers by name


@dataclass(frozen=True)
class RunInfo:
    """What a tracker gets at the start of a process.

    `facts`: of `experiments.training.run_record`. `id`: what the tracker's `start` returned in an earlier
    process of this run, empty in the first.
    """

    folder: Path
    facts: Mapping[str, Any]
    id: str = ""


class Tracker(Protocol):
    """Somewhere to write a run's numbers. Anything it raises ends the tracker, and not the run."""

    def start(self, run: RunInfo) -> str:
        """Begin, or resume the run named `run.id`; returns the name that the next process resumes."""

    def log(self, rows: Sequence[Row]) -> None:
        """Rows in order; they outlive this process when this returns."""

    def artifact(self, path: Path) -> None:
        """A file of the run's folder: a text or a picture."""

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """The process ends: the run is "ok", "stopped" (it may be resumed) or "failed"."""


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row, without its step."""
    return {name: float(value) for name, value in row.items() if name != "step"}
