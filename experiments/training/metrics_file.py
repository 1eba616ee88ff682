"""The rows of `metrics.jsonl`, a line each, and what a report says of all of them in bounded memory."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.training.goal import Goal, is_held_out

METRICS = "metrics.jsonl"
RECENT, LOSSES = 1000, 64  # steps whose seconds and numbers are kept


def read_rows(path: Path | None, made: int) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file up to step `made`, without the held-out loss after that step: a resumed run
    measures it again.

    A line that is torn, as a killed process leaves one, or is no row ends the rows.
    """
    if path is None or not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                return
            if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                return
            if row["step"] < made or (row["step"] == made and not is_held_out(row)):
                yield row


@dataclass
class Totals:
    """What a report says of all rows.

    Args:
        goal: what the run is judged by.
        reached: the last step.
        seconds: of all steps.
        recent: seconds of each of the last steps.
        losses: of the last steps.
        trained: the goal's number in the last steps.
    """

    goal: Goal = Goal()
    reached: int = 0
    seconds: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES))
    trained: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES))

    def add(self, row: Mapping[str, Any]) -> None:
        self.reached = max(self.reached, row["step"])
        if "loss" in row:
            self.losses.append(row["loss"])
        if self.goal.name in row:
            self.trained.append(row[self.goal.name])
        if "seconds" in row:
            self.seconds += row["seconds"]
            self.recent.append(row["seconds"])

    def step_seconds(self, last: int = RECENT) -> float:
        """The median of the last steps: the first one after each start compiles. NaN where there is none."""
        recent = list(self.recent)[-last:]
        return statistics.median(recent) if recent else math.nan


def smooth(curve: Sequence[tuple[float, float]], parts: int) -> tuple[list[tuple[float, float]], int]:
    """Return at most `parts` points, each the mean of so many of the curve's, and of how many.

    >>> smooth([(1, 4.0), (2, 2.0), (3, 1.0), (4, 1.0)], parts=2)
    ([(1.5, 3.0), (3.5, 1.0)], 2)
    """
    size = max(1, math.ceil(len(curve) / parts))
    cut = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [tuple(math.fsum(p) / len(part) for p in zip(*part, strict=True)) for part in cut], size
