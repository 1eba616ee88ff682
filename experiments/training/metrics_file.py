"""The rows of `metrics.jsonl`, a line each, and what a report says of all of them in a few bytes a row.

Next to it `metrics.crc32` has the checksum of every line, before that line is written.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.files import UNREADABLE, first_few
from experiments.training.goal import Goal, is_held_out

METRICS, SUMS = "metrics.jsonl", "metrics.crc32"
RECENT, LOSSES = 1000, 64  # steps whose seconds and numbers are kept
SUM = re.compile(rb"[0-9a-f]{8}")
SHOWN = 8  # lines that a message names


def line_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return a row's line of `metrics.jsonl`, and the line of `metrics.crc32` that stands for it."""
    line = json.dumps(row) + "\n"
    return line, f"{zlib.crc32(line.encode()):08x}\n"


def read_rows(path: Path | None, made: int, wrong: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read the rows of a metrics file up to step `made`, without the held-out loss after that step: a resumed
    run measures it again.

    A line that is not what was written, or no row, is left out. So is a last line without its end, as a
    killed process leaves one. Where there are fewer checksums than lines, these are not compared with them.

    Args:
        wrong: gets texts for damaged lines and for rows that are missing, when all rows are read.
    """
    if path is None:
        return
    count = 0  # before the checksums are read: a run that is at work writes more of both meanwhile
    if path.exists():
        with path.open("rb") as lines:
            count = sum(line.endswith(b"\n") for line in lines)
    try:
        found = [int(each, 16) for each in SUM.findall((path.parent / SUMS).read_bytes())]
        sums = np.sort(np.array(found, np.uint32))
    except OSError:  # of an older version
        found, sums = [], None
    if not path.exists():
        if wrong is not None and found:
            wrong.append(f"{path} is missing")
        return
    if sums is not None and len(found) < count:  # they are what is damaged
        sums = None
        if wrong is not None:
            few = f"{len(found)} checksums of {count} lines"
            wrong.append(f"{path.parent / SUMS}: {few}: whether these are as they were written is not known")
    damaged, missing, last, ended = [], [], 0, not found
    with path.open("rb") as lines:
        for number, line in enumerate(islice(lines, count), 1):
            row = _row_of(line, sums)
            ended = ended or (row is not None and zlib.crc32(line) == found[-1])
            if row is None:
                damaged.append(str(number))
            elif row["step"] < made or (row["step"] == made and not is_held_out(row)):
                if not is_held_out(row):
                    if row["step"] > last + 1:
                        missing.append(f"{last + 1} to {row['step'] - 1}")
                    last = max(last, row["step"])
                yield row
    if wrong is not None and damaged:
        wrong.append(f"{path}: damaged lines are left out: {', '.join(first_few(damaged, SHOWN))}")
    if wrong is not None and missing:
        wrong.append(f"{path}: no rows of steps {', '.join(first_few(missing, SHOWN))}")
    # A run that is killed may have written a checksum without its line, of a step after `made`.
    if wrong is not None and last < made and sums is not None and not (ended or damaged):
        wrong.append(f"{path}: the last row that was written is missing")


def _row_of(line: bytes, sums: np.ndarray | None) -> dict[str, Any] | None:
    """Return the row that a line holds; None if it is not among the lines that were written, or no row."""
    if sums is not None:
        own = zlib.crc32(line)
        at = int(np.searchsorted(sums, own))
        if at == len(sums) or int(sums[at]) != own:
            return None
    try:
        row = json.loads(line)
    except UNREADABLE:
        return None
    numbers = isinstance(row, dict) and all(
        type(value) in (int, float)
        for name, value in row.items()
        if name in ("loss", "seconds") or is_held_out({name: value})
    )
    return row if numbers and type(row.get("step")) is int else None


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
    return [tuple(sum(p) / len(part) for p in zip(*part, strict=True)) for part in cut], size
