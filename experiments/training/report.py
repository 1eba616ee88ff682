"""What is seen of a run: a progress line, `metrics.jsonl`, trackers, `loss.png`, and the closing words."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from experiments.data.files import naming, write_text
from experiments.trackers.base import Tracker
from experiments.trackers.feed import Feed
from experiments.training.metrics_file import HELD_OUT, METRICS, RECENT, Totals, read_rows, thinned
from experiments.training.progress import Progress
from experiments.training.run_record import RunRecord, StepWork, in_words, peak_memory
from experiments.training.watchdog import Spikes

WINDOW = 20  # steps that the shown speed is a mean of
POINTS = 4000  # of a curve in loss.png, at most
FLUSH_s, FINISH_s = 20.0, 60.0  # what trackers get before a checkpoint, and at the end


@dataclass
class Silent:
    """The report of every rank but 0: nothing but how far it is."""

    made: int = 0

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        _note_step(error, self.made)

    def step(self, number: int, values: Mapping[str, float], seconds: float) -> None:
        self.made = number

    def nothing(self, *_: Any, **__: Any) -> None:
        """What rank 0 alone does."""

    held_out = say = sync = close = finish = nothing


@dataclass
class Report:
    """Rank 0's report: one row of `metrics.jsonl` a step, one live line on a terminal.

    Where the output is no terminal, some 20 plain lines are printed instead.

    Args:
        folder: of the run.
        steps: in the run.
        tokens: per step, of all ranks.
        made: steps that were made before; rows of later ones, by an earlier process, are dropped.
        earlier: the file with their rows.
        record: `run.json`; it has the facts that trackers get.
        trackers: get all rows, too.
        spikes: looks at every loss; what it finds is printed, and in the row.
        device_type: whose memory is measured.
    """

    folder: Path
    steps: int
    tokens: int
    made: int = 0
    earlier: Path | None = None
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    record: RunRecord | None = None
    trackers: Sequence[Tracker] = ()
    spikes: Spikes | None = None
    device_type: str = "cpu"
    totals: Totals = field(default_factory=Totals, init=False)
    work: StepWork | None = field(default=None, init=False)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _first: float | None = None  # seconds of this process's first step, which compiles
    _later: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        path = self.folder / METRICS
        write_text(path, self._earlier())
        self._file = path.open("a", encoding="utf-8")
        if self.spikes is not None:
            self.spikes.remember(self.totals.losses)
        self._progress = Progress(self.stream, self.steps, self.made)
        self._feeds = [Feed(tracker, self.folder, self.say) for tracker in self.trackers]
        for feed in self._feeds:
            earlier = islice(read_rows(path, sys.maxsize), self.totals.rows)
            feed.start(self.record.facts if self.record else {}, earlier)
        self._finished = False

    def __enter__(self) -> Report:
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        """A run that breaks off has failed; an error of the system names its step."""
        _note_step(error, self._reached())
        with (
            suppress(OSError) if error is not None else nullcontext()
        ):  # on a full disk, the first one counts
            self.close()
            if not self._finished:
                self.finish("failed")

    def step(self, number: int, values: Mapping[str, float], seconds: float) -> None:
        """Step `number` (from 1) took `seconds` and gave `values`."""
        speed = float(f"{self.tokens / seconds:.8g}")
        spike = self.spikes.look(number, values["loss"]) if self.spikes is not None else None
        marks = {} if spike is None else {"spike": spike.deviations}
        self._row(step=number, **values, tokens_per_s=speed, seconds=float(f"{seconds:.8g}"), **marks)
        if spike is not None and spike.is_first:
            self.say(str(spike))
        first = number == self.made + 1  # it compiles: its time says nothing of later ones
        self._recent.append(seconds)
        if self._first is None:
            self._first = seconds
        else:
            self._later.append(seconds)
        self._progress.step(number, self._text(values))
        if first:
            self._recent.clear()

    def held_out(self, number: int, loss: float) -> None:
        """The held-out loss after step `number`, nats per byte."""
        self._row(step=number, held_out_loss=loss)

    def say(self, text: str) -> None:
        self._progress.say(text)

    def sync(self) -> None:
        """Make the rows outlive a power cut, as the checkpoint does that comes now; trackers hear all."""
        with naming(self.folder / METRICS):
            os.fsync(self._file.fileno())
        until = time.monotonic() + FLUSH_s
        for feed in self._feeds:
            feed.flush(until)
        self._write("running")

    def close(self) -> None:
        self._progress.close()
        with naming(self.folder / METRICS):
            self._file.close()

    def finish(self, status: str, artifacts: Sequence[Path] = (), **summary: Any) -> dict[str, Any]:
        """The run, or this process's part of it, has ended: "ok", "stopped" or "failed".

        Args:
            artifacts: files for the trackers.
            summary: numbers for them beside the totals.

        Returns:
            What `run.json` says in total.
        """
        self._finished = True
        totals = self._write(status)
        for feed in self._feeds:
            for path in artifacts:
                feed.artifact(path)
            feed.close(status, {**totals, **summary})
        until = time.monotonic() + FINISH_s
        for feed in self._feeds:
            feed.join(until)
        return totals

    def closing(self, totals: Mapping[str, Any]) -> str:
        return in_words(totals, peak_memory(self.device_type)[1])

    def _write(self, status: str) -> dict[str, Any]:
        if self.record is None:
            return {}
        usual = statistics.median(self._later) if self._later else 0.0
        seconds = self.totals.step_seconds
        return self.record.write(
            status,
            self._reached(),
            max(0.0, (self._first or 0.0) - usual),
            self.work and dict(self.work.attention),
            tokens_per_s=seconds and self.tokens / seconds,
            loss=self.totals.losses[-1] if self.totals.losses else None,
            mfu=seconds and self.work and self.work.mfu(seconds),
            flops_per_token=self.work and self.work.model_flops * self.work.ranks / self.tokens,
            predicted_peak_bytes=self.work and self.work.peak_bytes,
            measured_peak_bytes=peak_memory(self.device_type)[0],
            spikes=self.totals.spikes,
        )

    def _reached(self) -> int:
        return self.totals.reached or self.made

    def _earlier(self) -> Iterator[str]:
        for row in read_rows(self.earlier, self.made):
            self.totals.add(row)
            yield json.dumps(row) + "\n"

    def _row(self, **row: Any) -> None:
        self.totals.add(row)
        with naming(self.folder / METRICS):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()  # a run that dies leaves all its rows
        for feed in self._feeds:
            feed.row(row)

    def _text(self, values: Mapping[str, float]) -> str:
        shown = [f"loss {values['loss']:.3f}"]
        if not math.isnan(self.totals.held_out):
            shown.append(f"held-out {self.totals.held_out:.3f}")
        shown += [f"lr {values['lr']:.1e}"]
        if "grad_norm" in values:
            shown.append(f"grad norm {values['grad_norm']:.2f}")
        seconds = sum(self._recent) / len(self._recent)
        mfu = self.work.mfu(seconds) if self.work is not None else None
        shown.append(f"{self.tokens / seconds:,.0f} tokens/s")
        return ", ".join(shown if mfu is None else [*shown, f"MFU {mfu:.1%}"])


def _note_step(error: BaseException | None, number: int) -> None:
    if isinstance(error, OSError):
        error.add_note(f"step {number}")


def metrics_beside(folder: Path, found: str) -> Path | None:
    """The metrics of the run whose checkpoint is gone on from: its own, or those of another folder.

    Args:
        found: a checkpoint, or the directory of a run's checkpoints.
    """
    places = [Path(found).parent, Path(found).parent.parent] if found else []
    return next((p / METRICS for p in [folder, *places] if found and (p / METRICS).exists()), None)


def plot_losses(metrics: Path, tables: Mapping[str, float], path: Path, *, unit: str = "byte") -> None:
    """Draw training and held-out loss by step, and a level line for each n-gram table.

    Of a long run every 2nd, 4th, ... loss is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for key, style in (("loss", {"lw": 0.8, "alpha": 0.7}), (HELD_OUT, {"marker": "o", "lw": 1.5})):
        rows = read_rows(metrics, sys.maxsize)
        points = thinned(((row["step"], row[key]) for row in rows if key in row), POINTS)
        axes.plot([x for x, _ in points], [y for _, y in points], label=key.replace("_", "-", 1), **style)
    for (name, loss), color in zip(tables.items(), ("tab:gray", "tab:brown"), strict=False):
        axes.axhline(loss, ls="--", lw=1, color=color, label=f"{name} table")
    axes.set(xlabel="step", ylabel=f"nats per {unit}")
    axes.legend()
    with naming(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def comparison(held_out_loss: float, tables: Mapping[str, float], *, unit: str = "byte") -> str:
    """The model beside the tables, one line.

    >>> comparison(2.0, {"bigram": 2.4, "trigram": 1.8})
    'held-out loss, nats per byte: model 2.000 (below the bigram table); bigram 2.400, trigram 1.800'
    """
    text = f"held-out loss, nats per {unit}: model {held_out_loss:.3f}"
    if not tables:
        return text
    below = [name for name, loss in tables.items() if held_out_loss < loss]
    verdict = f"below the {' and the '.join(below)} table" if below else "above every table"
    others = ", ".join(f"{name} {loss:.3f}" for name, loss in tables.items())
    return f"{text} ({verdict}); {others}"
