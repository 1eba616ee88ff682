"""What a person sees of a run: a progress line, `metrics.jsonl`, `loss.png`, and the closing words."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
WINDOW = 20  # steps that the shown speed is a mean of
PLAIN_LINES = 20  # in a run whose output is no terminal


class Silent:
    """The report of every rank but 0."""

    def step(self, number: int, values: Mapping[str, float], seconds: float) -> None:
        """Nothing."""

    def held_out(self, number: int, loss: float) -> None:
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
    """

    folder: Path
    steps: int
    tokens: int
    tables: Mapping[str, float]
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    rows: list[dict[str, Any]] = field(default_factory=list)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _loss: float = math.nan
    _after_first: float = 0.0

    def __post_init__(self) -> None:
        self._file = (self.folder / METRICS).open("w", encoding="utf-8")
        self._bar = None
        if self.stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self.steps, unit="step", dynamic_ncols=True, file=self.stream)

    def step(self, number: int, values: Mapping[str, float], seconds: float) -> None:
        """Step `number` (from 1) took `seconds` and gave `values`."""
        self._row(step=number, **values, tokens_per_s=self.tokens / seconds, seconds=seconds)
        if number == 1:  # it compiles, and tells nothing of those to come
            self._after_first = time.perf_counter()
        self._recent.append(seconds)
        if self._bar is None and number not in (1, self.steps) and number % max(1, self.steps // PLAIN_LINES):
            return
        text = self._text(values)
        if self._bar is None:
            print(
                f"step {number}/{self.steps}, {text}, left {self._left(number)}", file=self.stream, flush=True
            )
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(number - self._bar.n)
        if number == 1:
            self._recent.clear()

    def held_out(self, number: int, loss: float) -> None:
        """The held-out loss after step `number`, nats per byte."""
        self._loss = loss
        self._row(step=number, held_out_loss=loss)

    def close(self) -> None:
        """Leave the last line standing."""
        if self._bar is not None:
            self._bar.close()
        self._file.close()

    @property
    def seconds(self) -> float:
        """Since the first step ended."""
        return time.perf_counter() - self._after_first

    def _row(self, **values: Any) -> None:
        row = {k: float(f"{v:.8g}") if isinstance(v, float) else v for k, v in values.items()}
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
        if number == 1:
            return "?"
        left = round(self.seconds / (number - 1) * (self.steps - number))
        return f"{left // 60}:{left % 60:02d}"


def plot_losses(rows: Iterable[Mapping[str, Any]], tables: Mapping[str, float], path: Path) -> None:
    """Draw training and held-out loss by step, and a level line for each n-gram table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(rows)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for key, style in (("loss", {"lw": 0.8, "alpha": 0.7}), ("held_out_loss", {"marker": "o", "lw": 1.5})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot([x for x, _ in points], [y for _, y in points], label=key.replace("_", "-", 1), **style)
    for (name, loss), color in zip(tables.items(), ("tab:gray", "tab:brown"), strict=False):
        axes.axhline(loss, ls="--", lw=1, color=color, label=f"{name} table")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def comparison(held_out_loss: float, tables: Mapping[str, float]) -> str:
    """The model beside the tables, one line.

    >>> comparison(2.0, {"bigram": 2.4, "trigram": 1.8})
    'held-out loss, nats per byte: model 2.000 (below the bigram table); bigram 2.400, trigram 1.800'
    """
    below = [name for name, loss in tables.items() if held_out_loss < loss]
    said = f"below the {' and the '.join(below)} table" if below else "above every table"
    others = ", ".join(f"{name} {loss:.3f}" for name, loss in tables.items())
    return f"held-out loss, nats per byte: model {held_out_loss:.3f} ({said}); {others}"
