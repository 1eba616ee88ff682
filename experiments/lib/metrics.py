"""Metrics: the numbers of a run. They are its goal, the rows of `metrics.jsonl`, their totals and picture.

Next to `metrics.jsonl` the file `metrics.crc32` gets the checksum of every line before that line is written.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.files import UNREADABLE, first_few, naming

METRICS, SUMS = "metrics.jsonl", "metrics.crc32"
RECENT, LOSSES = 1000, 64  # the last steps whose seconds are kept, and whose losses are
SUM = re.compile(rb"[0-9a-f]{8}")
SHOWN = 8  # the number of lines that a message names
SMOOTH = 60  # the most points of a smoothed curve
HELD_OUT = "held_out_"  # the prefix of numbers that are measured on held-out data
# Words in the names of numbers of which more is better, or less. Of other numbers it is not known.
GROWING = ("accuracy", "acc", "match", "reward", "rewards", "margin", "margins", "mfu", "per_s", "f1", "auc",
           "bleu", "rouge", "recall", "iou")  # fmt: skip
SHRINKING = ("loss", "perplexity", "bigram", "trigram", "nll", "error", "mae", "mse", "rmse", "wer", "kl",
             "seconds", "s", "bytes")  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """The number that a run optimises.

    Args:
        name: the name of the number in the rows of training steps; on held-out data it is `held_out_NAME`.
        unit: what the number counts, as "nats per byte"; empty where nobody has said it.
        is_maximised: whether more is better.
    """

    name: str = "loss"
    unit: str = ""
    is_maximised: bool = False

    @property
    def held_out(self) -> str:
        """Return the name of the number on held-out data."""
        return HELD_OUT + self.name

    @property
    def label(self) -> str:
        """Return the number's name with its unit, for an axis.

        >>> Goal(unit="nats per byte").label, Goal("reward", is_maximised=True).label
        ('loss, nats per byte', 'reward')
        """
        return ", ".join(filter(None, [self.name, self.unit]))

    @property
    def aim(self) -> str:
        """Return in words what the run does about the number.

        >>> Goal(unit="nats per byte").aim, Goal("reward", is_maximised=True).aim
        ('minimises the loss, in nats per byte', 'maximises the reward')
        """
        verb = "maximises" if self.is_maximised else "minimises"
        return f"{verb} the {self.name}" + (f", in {self.unit}" if self.unit else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(values: Any) -> Goal | None:
        """Read what `as_dict` returned; None if it is something else, as in runs of older versions."""
        try:
            goal = Goal(**values)
        except TypeError:
            return None
        kinds = isinstance(goal.name, str), isinstance(goal.unit, str), isinstance(goal.is_maximised, bool)
        return goal if all(kinds) else None


def grows(name: str, goal: Goal | None = None) -> bool | None:
    """Return whether more of a number is better; None if that is not known.

    The goal says it of its own number, and words in the name of any other.

    >>> grows("held_out_accuracy"), grows("held_out_arc/acc_norm"), grows("loss"), grows("held_out_loss")
    (True, True, False, False)
    >>> grows("held_out_worst")
    >>> grows("held_out_yield", Goal("yield", is_maximised=True))
    True
    """
    if goal is not None and name.removeprefix(HELD_OUT) == goal.name:
        return goal.is_maximised
    # Underscores on both sides keep "acc" from being found in "vaccines", and let "per_s" be a word.
    words = f"_{name.removeprefix(HELD_OUT).replace('/', '_').lower()}_"
    if any(f"_{word}_" in words for word in GROWING):
        return True
    return False if any(f"_{word}_" in words for word in SHRINKING) else None


def is_held_out(row: Mapping[str, Any]) -> bool:
    """Return whether a row of metrics was measured on held-out data."""
    return any(name.startswith(HELD_OUT) for name in row)


# ------------------------------------------------------------------ rows


def line_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return a row's line of `metrics.jsonl`, and the line of `metrics.crc32` with its checksum."""
    line = json.dumps(row) + "\n"
    return line, f"{zlib.crc32(line.encode()):08x}\n"


def read_rows(path: Path | None, made: int, wrong: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read the rows of a metrics file up to step `made`.

    The held-out loss after that step is left out, since a resumed run measures it again. A line that is
    damaged, or is no row, is left out, and so is a last line without its end, which a killed process may
    leave. If there are fewer checksums than lines, lines are not compared with them.

    Args:
        wrong: a list to which texts about damaged lines and missing rows are added when all rows are read.
    """
    if path is None:
        return
    # Lines are counted before checksums are read: a run that is at work writes more of both meanwhile.
    count = 0
    if path.exists():
        with path.open("rb") as lines:
            count = sum(line.endswith(b"\n") for line in lines)
    try:
        written = [int(each, 16) for each in SUM.findall((path.parent / SUMS).read_bytes())]
        sums = np.sort(np.array(written, np.uint32))
    except OSError:  # an older version wrote no checksums
        written, sums = [], None
    if not path.exists():
        if wrong is not None and written:
            wrong.append(f"{path} is missing")
        return
    if sums is not None and len(written) < count:  # the checksums themselves are damaged
        sums = None
        if wrong is not None:
            few = f"{len(written)} checksums of {count} lines"
            wrong.append(f"{path.parent / SUMS}: {few}: whether these are as they were written is not known")

    # Yield the rows, and note which are damaged, whether steps are missing, and whether the row of the last
    # checksum was seen.
    damaged, missing, last, has_end = [], [], 0, not written
    with path.open("rb") as lines:
        for number, line in enumerate(islice(lines, count), 1):
            row = _parse_row(line, sums)
            has_end = has_end or (row is not None and zlib.crc32(line) == written[-1])
            if row is None:
                damaged.append(str(number))
            elif row["step"] < made or (row["step"] == made and not is_held_out(row)):
                if not is_held_out(row):
                    if row["step"] > last + 1:
                        missing.append(f"{last + 1} to {row['step'] - 1}")
                    last = max(last, row["step"])
                yield row

    # Say what is wrong.
    if wrong is not None and damaged:
        wrong.append(f"{path}: damaged lines are left out: {', '.join(first_few(damaged, SHOWN))}")
    if wrong is not None and missing:
        wrong.append(f"{path}: no rows of steps {', '.join(first_few(missing, SHOWN))}")
    # A run that is killed may have written a checksum without its line, of a step after `made`.
    if wrong is not None and last < made and sums is not None and not (has_end or damaged):
        wrong.append(f"{path}: the last row that was written is missing")


def _parse_row(line: bytes, sums: np.ndarray | None) -> dict[str, Any] | None:
    """Return the row that a line holds; None if it is not among the lines that were written, or no row."""
    if sums is not None:
        crc = zlib.crc32(line)
        at = int(np.searchsorted(sums, crc))
        if at == len(sums) or int(sums[at]) != crc:
            return None
    try:
        row = json.loads(line)
    except UNREADABLE:
        return None
    # What reports and pictures compute with has to be numbers, whatever a line of valid JSON holds.
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    for name, value in row.items():
        is_needed = name in ("loss", "seconds") or name.startswith(HELD_OUT)
        if is_needed and type(value) not in (int, float):
            return None
    return row


@dataclass
class Totals:
    """The sums that a report takes of all rows.

    Args:
        goal: the number that the run is judged by.
        reached: the last step.
        seconds: the seconds of all steps.
        recent: the seconds of each of the last steps.
        losses: the losses of the last steps.
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
        """Return the median of the last steps, since the first after each start compiles; NaN without any."""
        recent = list(self.recent)[-last:]
        return statistics.median(recent) if recent else math.nan


def smooth(curve: Sequence[tuple[float, float]], parts: int) -> tuple[list[tuple[float, float]], int]:
    """Return at most `parts` points, each the mean of as many points of the curve, and that number.

    >>> smooth([(1, 4.0), (2, 2.0), (3, 1.0), (4, 1.0)], parts=2)
    ([(1.5, 3.0), (3.5, 1.0)], 2)
    """
    size = max(1, math.ceil(len(curve) / parts))
    cut = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [tuple(sum(p) / len(part) for p in zip(*part, strict=True)) for part in cut], size


# ------------------------------------------------------------------ pictures and words


def draw_run(
    metrics: Path, goal: Goal, tables: Mapping[str, float], path: Path, title: str = "training"
) -> None:
    """Draw the goal's number by step, in training and on held-out data, with a level line for each n-gram
    table.

    For a long run the mean over some steps is drawn above the numbers of all steps, and the legend says over
    how many.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # pyplot takes twice the time to load

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # Each row is of a training step, or of a measurement.
    trained, measured = [], []
    for row in read_rows(metrics, sys.maxsize):
        if goal.held_out in row:
            measured.append((row["step"], row[goal.held_out]))
        elif goal.name in row:
            trained.append((row["step"], row[goal.name]))
    # Draw the curves, and the tables as level lines.
    means, size = smooth(trained, SMOOTH)
    if size > 1:
        axes.plot(*zip(*trained, strict=True), lw=0.5, alpha=0.3, color="tab:blue")
    if means:
        label = "training" + (f", mean of {size} steps" if size > 1 else ", each step")
        axes.plot(*zip(*means, strict=True), lw=1.4, color="tab:blue", label=label)
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", lw=1.4, color="tab:orange", label="held-out")
    for (name, loss), color in zip(tables.items(), ("tab:gray", "tab:brown"), strict=False):
        axes.axhline(loss, ls="--", lw=1, color=color, label=f"{name} table, held-out")
    axes.set(xlabel="step", ylabel=goal.label, title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.legend()
    with naming(path):
        figure.savefig(path, dpi=120)


def comparison(value: float, goal: Goal, tables: Mapping[str, float]) -> str:
    """Return a line that compares the model with the tables.

    >>> comparison(2.0, Goal(unit="nats per byte"), {"bigram": 2.4, "trigram": 1.8})
    'held-out loss, nats per byte: model 2.000 (below the bigram table); bigram 2.400, trigram 1.800'
    >>> comparison(0.75, Goal("reward", is_maximised=True), {})
    'held-out reward: model 0.750'
    """
    if not tables:
        return f"held-out {goal.label}: model {value:.3f}"
    below = [name for name, loss in tables.items() if value < loss]
    verdict = f"below the {' and the '.join(below)} table" if below else "above every table"
    others = ", ".join(f"{name} {loss:.3f}" for name, loss in tables.items())
    return f"held-out {goal.label}: model {value:.3f} ({verdict}); {others}"
