"""Report: what a run tells while it is at work, in progress lines, in `metrics.jsonl` and to trackers."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from experiments.lib.files import DamagedError, naming, write_bytes, write_text
from experiments.lib.metrics import METRICS, SUMS, Goal, Totals, line_of, read_rows
from experiments.lib.record import RunRecord, StepWork, peak_memory, speed_name
from experiments.lib.trackers import Feed, Tracker

LINES = 20  # the number of progress lines of a whole run
HINT_S = 10.0  # the seconds between two lines about what happens before a step
WINDOW = 20  # the number of last steps whose speed is shown
OTHERS = 4  # the most numbers of a progress line besides the goal's, the rate and the norm


@dataclass
class Progress:
    """The progress of a run, in lines.

    Args:
        made: the number of steps that earlier processes made.
        between: a function that returns the seconds so far that neither steps nor compiling took.
    """

    stream: TextIO
    steps: int
    made: int = 0
    between: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self._hinted, self._later_s = -math.inf, 0.0
        self._open = ExitStack()
        self._open.enter_context(_show_logs(self._hint))

    def step(self, number: int, text: str, seconds: float) -> None:
        """Note that step `number` is done, and print `text` about some of the steps."""
        first = number == self.made + 1  # it compiles, so that its time says nothing of later ones
        # What passes between steps is counted from the end of the first step on.
        self._later_s = -self.between() if first else self._later_s + seconds
        if first or number == self.steps or number % max(1, self.steps // LINES) == 0:
            # The time that is left follows from the steps that did not compile, and what was between them.
            timed, left = number - self.made - 1, "?"
            if timed > 0:
                mean = (self._later_s + self.between()) / timed
                seconds_left = round(mean * (self.steps - number))
                left = f"{seconds_left // 60}:{seconds_left % 60:02d}"
            self.say(f"step {number}/{self.steps}, {text}, left {left}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Stop showing what is logged. It may be called more than once."""
        self._open.close()

    def _hint(self, text: str) -> None:
        """Print a hint, unless another was printed less than `HINT_S` seconds ago."""
        if time.monotonic() - self._hinted > HINT_S:
            self._hinted = time.monotonic()
            self.say(text)


@contextmanager
def _show_logs(show: Callable[[str], None]) -> Iterator[None]:
    """Pass what fnshard logs in the block to `show`, because lowering and compiling a step take a while."""
    logger, handler = logging.getLogger("fnshard"), logging.Handler(logging.INFO)
    handler.emit = lambda record: show(record.getMessage())
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # it would be printed twice if a user has set up logging
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


# ------------------------------------------------------------------ reports


class Silent:
    """The report of every rank but 0."""

    def nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: rank 0 alone reports."""

    # These are the methods of `Report`.
    __enter__ = __exit__ = step = held_out = say = sync = close = finish = nothing


@dataclass
class Report:
    """The report of rank 0: one row of `metrics.jsonl` for each step, and progress lines.

    Args:
        folder: the folder of the run.
        steps: the number of steps of the run.
        tokens: the tokens of a step on all ranks, or its rows if `unit` says so.
        record: `run.json`, with the facts that trackers get.
        made: the number of steps that were made before; rows of later ones, by an earlier process, are
            dropped.
        earlier: the file with the rows of these steps.
        trackers: trackers by name, which get all rows, too.
        device_type: the device whose memory is measured.
        goal: the number that the run is judged by.
        unit: what `tokens` counts.
    """

    folder: Path
    steps: int
    tokens: int
    record: RunRecord
    made: int = 0
    earlier: Path | None = None
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    trackers: Mapping[str, Tracker] = field(default_factory=dict)
    device_type: str = "cpu"
    goal: Goal = Goal()
    unit: str = "token"
    totals: Totals = field(init=False)
    work: StepWork | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        path, self.totals = self.folder / METRICS, Totals(self.goal)
        self._progress = Progress(self.stream, self.steps, self.made, self.record.timer.between_steps)
        self._take_over(path)
        self._file = path.open("a", encoding="utf-8")
        self._sums = (self.folder / SUMS).open("a", encoding="utf-8")
        self._opened = os.fstat(self._file.fileno())
        facts = self.record.facts
        self._feeds = [Feed(name, tracker, path, facts, self.say) for name, tracker in self.trackers.items()]
        self._write_record("running")  # so that a run that is killed early has left its facts
        self._finished = False

    def _take_over(self, path: Path) -> None:
        """Write the rows of earlier processes anew.

        If some are damaged or missing, print that, and keep the file as it was under another name.
        """
        # Add up the rows of earlier processes, and say what is wrong with them.
        wrong: list[str] = []
        row = None
        for row in read_rows(self.earlier, self.made, wrong):
            self.totals.add(row)
        if self.totals.reached < self.made and self.earlier is not None:
            wrong.append(f"{self.earlier}: no rows of steps {self.totals.reached + 1} to {self.made}")
        elif self.made and self.earlier is None:
            wrong.append(f"{path} is missing: the steps up to {self.made} have no rows")
        for each in wrong:
            self.say(each)
        if wrong and path.exists():
            kept = path.with_name(f"{METRICS}.damaged")
            kept.write_bytes(path.read_bytes())
            self.say(f"the run goes on without them; the file as it was is {kept}")

        # The files are replaced one after the other. If this process is killed in between, there are more
        # checksums than lines, and that of the last line is among them, so that nothing counts as damaged or
        # missing.
        sums = self.folder / SUMS
        if row is not None:
            before = sums.read_bytes() if sums.exists() else b""
            write_bytes(sums, before + b"\n" + line_of(row)[1].encode())
        # Rows are read twice, since a long run has too many to hold in memory. The second time it may be the
        # file that was just written, which has the same rows.
        rows = read_rows(self.earlier, self.made)
        write_text(path, (line_of(row)[0] for row in rows), durable=True)
        rows = read_rows(self.earlier, self.made)
        write_text(sums, (line_of(row)[1] for row in rows), durable=True)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        """Close the report. A run that breaks off has failed."""
        # On a full disk closing fails, too: the first error counts.
        with suppress(OSError) if error is not None else nullcontext():
            self.close()
            if not self._finished and self.folder.is_dir():
                self.finish("failed")

    def step(self, number: int, values: Mapping[str, float], seconds: float) -> None:
        """Report that step `number` (from 1) took `seconds` and gave `values`."""
        speed = {speed_name(self.unit): float(f"{self.tokens / seconds:.8g}")}
        self._write_row(step=number, **values, **speed, seconds=float(f"{seconds:.8g}"))
        self._progress.step(number, self._describe_step(values), seconds)

    def held_out(self, number: int, value: float, more: Mapping[str, float]) -> None:
        """Report the goal's number on held-out data after step `number`, and what else was measured there."""
        found = {self.goal.held_out: value, **more}
        self._write_row(step=number, **found)
        shown = ", ".join(f"{name.replace('_', ' ')} {each:.3f}" for name, each in found.items())
        self.say(f"step {number}/{self.steps}, {shown.replace('held out', 'held-out')}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._progress.say(text)

    def sync(self) -> None:
        """Flush the rows, so that they outlive a power cut as the checkpoint does, which is written next."""
        self._check_folder()
        for name, file in ((SUMS, self._sums), (METRICS, self._file)):
            with naming(self.folder / name):
                os.fsync(file.fileno())
        self._write_record("running")
        for feed in self._feeds:
            feed.follow(at_once=True)

    def close(self) -> None:
        """End the progress lines, and close the files."""
        self._progress.close()
        for name, file in ((SUMS, self._sums), (METRICS, self._file)):
            with naming(self.folder / name):
                file.close()

    def finish(self, status: str, artifacts: Sequence[Path] = (), **summary: Any) -> dict[str, Any]:
        """Report that the run, or this process's part of it, has ended.

        Args:
            status: "ok", "stopped" or "failed".
            artifacts: files for the trackers.
            summary: numbers for them besides the totals.

        Returns:
            The totals of `run.json`.
        """
        if status != "failed":
            self._check_folder()
        self._finished = True
        totals = self._write_record(status)
        for feed in self._feeds:
            feed.finish(status, artifacts, **{**totals, **summary})
        return totals

    def _write_record(self, status: str) -> dict[str, Any]:
        """Write `run.json` with what is known so far, and return its totals."""
        totals, work, seconds = self.totals, self.work, self.totals.step_seconds()
        measured = {
            speed_name(self.unit): self.tokens / seconds,
            "loss": totals.losses[-1] if totals.losses else math.nan,
            **peak_memory(self.device_type),
        }
        if work is not None:
            counted = "token" if self.unit == "byte" else self.unit
            measured |= {
                "mfu": work.mfu(seconds),
                f"flops_per_{counted}": work.model_flops * work.ranks / self.tokens,
                "predicted_peak_bytes": work.peak_bytes,
            }
        # Without a finished step there is nothing that a prediction could be compared with.
        is_measured = work is not None and math.isfinite(seconds)
        predicted = {**work.prediction, "measured_s": seconds} if is_measured else None
        attention = None if work is None else work.attention
        return self.record.write(status, totals.reached or self.made, attention, predicted, **measured)

    def _write_row(self, **row: Any) -> None:
        """Write a row and its checksum, and let trackers follow."""
        self._check_folder()
        self.totals.add(row)
        line, checksum = line_of(row)
        # Both are flushed at once, so that a run that dies leaves all its rows, and trackers can read them.
        for name, file, text in ((SUMS, self._sums, checksum), (METRICS, self._file, line)):
            with naming(self.folder / name):
                file.write(text)
                file.flush()
        for feed in self._feeds:
            feed.follow()

    def _check_folder(self) -> None:
        """Check that the file of rows still is the one that was opened.

        Raises:
            DamagedError: it was deleted or replaced, so that rows would be lost.
        """
        path = self.folder / METRICS
        try:
            if os.path.samestat(os.stat(path), self._opened):
                return
        except FileNotFoundError:
            pass
        what = f"{path} was deleted or replaced" if self.folder.is_dir() else f"{self.folder} was deleted"
        raise DamagedError(
            f"{what} while the run was at work in it; rows that follow would be lost. Fix: the same command "
            "goes on from the newest checkpoint that is left, or begins anew."
        )

    def _describe_step(self, values: Mapping[str, float]) -> str:
        """Return a step's numbers for a line of progress."""
        name = self.goal.name
        shown = [f"{name} {values[name]:.3f}"]
        if "lr" in values:  # a user's optimizer need not report it
            shown.append(f"lr {values['lr']:.1e}")
        if "grad_norm" in values:
            shown.append(f"grad norm {values['grad_norm']:.2f}")
        others = [n for n in values if n not in (name, "loss", "lr", "grad_norm")][:OTHERS]
        shown += [f"{each.replace('_', ' ')} {values[each]:.4g}" for each in others]
        seconds, speed = self.totals.step_seconds(WINDOW), speed_name(self.unit).removesuffix("_per_s")
        shown.append(f"{self.tokens / seconds:,.0f} {speed}/s")
        mfu = self.work.mfu(seconds) if self.work is not None else math.nan
        if not math.isnan(mfu):
            shown.append(f"MFU {mfu:.1%}")
        return ", ".join(shown)


def metrics_next_to(folder: Path, found: str) -> Path | None:
    """Return the metrics file of the run whose checkpoint is resumed, or None.

    Args:
        found: a checkpoint, or the directory of a run's checkpoints; empty if nothing is resumed.
    """
    places = [folder, Path(found).parent, Path(found).parent.parent] if found else []
    return next((place / METRICS for place in places if (place / METRICS).exists()), None)
