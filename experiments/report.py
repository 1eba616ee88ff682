"""What a person sees of a run: a progress line, `metrics.jsonl`, `loss.png`, and the closing words."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
HELD_OUT = "held_out_loss"
WINDOW = 20  # steps that the shown speed is a mean of
PLAIN_LINES = 20  # in a run whose output is no terminal


class Silent:
    """The report of every rank but 0."""

    def step(self, number: int, values: Mapping[str, float], seconds: float) -> None:
        """Nothing."""

    def held_out(self, number: int, loss: float) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@dataclass
class Report:
    """Rank 0's report: one row of `metrics.jsonl` a step, one live line on a terminal.

    Where the output is no terminal, some 20 plain lines are printed instead.

    Args:
        folder: of the run.
        steps: in the run.
        tokens: per step, of all ranks.
        tables: n-gram losses, nats per byte, to compare with.
        made: steps that were made before; what an earlier process told of later ones is forgotten.
        earlier: the file that tells of them.
    """

    folder: Path
    steps: int
    tokens: int
    tables: Mapping[str, float]
    made: int = 0
    earlier: Path | None = None
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    rows: list[dict[str, Any]] = field(default_factory=list)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _loss: float = math.nan
    _after_first: float = 0.0

    def __post_init__(self) -> None:
        self.rows.extend(read_rows(self.earlier, self.made))
        path = self.folder / METRICS
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")
        self._loss = next((r[HELD_OUT] for r in reversed(self.rows) if HELD_OUT in r), math.nan)
        self._bar = None
        if self.stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self.steps, initial=self.made, unit="step", dynamic_ncols=True, file=self.stream
            )

    def step(self, number: int, values: Mapping[str, float], seconds: float) -> None:
        """Step `number` (from 1) took `seconds` and gave `values`."""
        speed = float(f"{self.tokens / seconds:.8g}")
        self._row(step=number, **values, tokens_per_s=speed, seconds=float(f"{seconds:.8g}"))
        first = number == self.made + 1  # it compiles, and tells nothing of those to come
        if first:
            self._after_first = time.perf_counter()
        self._recent.append(seconds)
        shown = first or number == self.steps or number % max(1, self.steps // PLAIN_LINES) == 0
        text = self._text(values)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(number - self._bar.n)
        elif shown:
            left = self._left(number)
            print(f"step {number}/{self.steps}, {text}, left {left}", file=self.stream, flush=True)
        if first:
            self._recent.clear()

    def held_out(self, number: int, loss: float) -> None:
        """The held-out loss after step `number`, nats per byte."""
        self._loss = loss
        self._row(step=number, held_out_loss=loss)

    def sync(self) -> None:
        """Make the rows outlive a power cut, as the checkpoint does that comes now."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Leave the last line standing."""
        if self._bar is not None:
            self._bar.close()
        self._file.close()

    def _row(self, **row: Any) -> None:
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()  # a run that dies leaves all its rows

    def _text(self, values: Mapping[str, float]) -> str:
        shown = [f"loss {values['loss']:.3f}"]
        if not math.isnan(self._loss):
            shown.append(f"held-out {self._loss:.3f}")
        shown += [f"lr {values['lr']:.1e}"]
        if "grad_norm" in values:
            shown.append(f"grad norm {values['grad_norm']:.2f}")
        return ", ".join([*shown, f"{self.tokens * len(self._recent) / sum(self._recent):,.0f} tokens/s"])

    def _left(self, number: int) -> str:
        made = number - self.made - 1
        if made == 0:
            return "?"
        left = round((time.perf_counter() - self._after_first) / made * (self.steps - number))
        return f"{left // 60}:{left % 60:02d}"


def read_rows(path: Path | None, made: int) -> list[dict[str, Any]]:
    """The rows of a metrics file up to step `made`, without what was measured behind it: that is done again.

    Anything behind a line that a killed process has left torn is gone.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] < made or (row["step"] == made and HELD_OUT not in row):
            rows.append(row)
    return rows


def metrics_beside(folder: Path, found: str) -> Path | None:
    """The metrics of the run whose checkpoint is gone on from: its own, or those of another folder.

    Args:
        found: a checkpoint, or the directory of a run's checkpoints.
    """
    places = [Path(found).parent, Path(found).parent.parent] if found else []
    return next((p / METRICS for p in [folder, *places] if found and (p / METRICS).exists()), None)


def plot_losses(
    rows: Iterable[Mapping[str, Any]], tables: Mapping[str, float], path: Path, *, unit: str = "byte"
) -> None:
    """Draw training and held-out loss by step, and a level line for each n-gram table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(rows)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for key, style in (("loss", {"lw": 0.8, "alpha": 0.7}), (HELD_OUT, {"marker": "o", "lw": 1.5})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot([x for x, _ in points], [y for _, y in points], label=key.replace("_", "-", 1), **style)
    for (name, loss), color in zip(tables.items(), ("tab:gray", "tab:brown"), strict=False):
        axes.axhline(loss, ls="--", lw=1, color=color, label=f"{name} table")
    axes.set(xlabel="step", ylabel=f"nats per {unit}")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def comparison(held_out_loss: float, tables: Mapping[str, float], *, unit: str = "byte") -> str:
    """The model beside the tables, one line.

    >>> comparison(2.0, {"bigram": 2.4, "trigram": 1.8})
    'held-out loss, nats per byte: model 2.000 (below the bigram table); bigram 2.400, trigram 1.800'
    """
    told = f"held-out loss, nats per {unit}: model {held_out_loss:.3f}"
    if not tables:
        return told
    below = [name for name, loss in tables.items() if held_out_loss < loss]
    said = f"below the {' and the '.join(below)} table" if below else "above every table"
    others = ", ".join(f"{name} {loss:.3f}" for name, loss in tables.items())
    return f"{told} ({said}); {others}"
