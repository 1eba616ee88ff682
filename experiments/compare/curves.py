"""Curves: one picture of what many runs measured, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.compare.outcome import Outcome
from experiments.compare.table import Ranking, as_text, differences, grows, ranked, write_csv
from experiments.training.metrics_file import HELD_OUT

NAMED = 10  # runs that have a name in the legend
LONGEST = 70  # characters of a name
SMOOTH = 40  # parts of a curve that are each drawn as their mean
SHOTS = 2.0  # a curve that leaves the others' highest start by this factor is cut off


def draw(ranking: Ranking, path: Path) -> bool:
    """Draw the runs' training losses (thin), held-out losses (marked), or another metric by step.

    Returns:
        Whether there was anything to draw.
    """
    key = "loss" if ranking.metric in ("loss", HELD_OUT) else ranking.metric
    if not any(key in row for o in ranking.outcomes for row in o.rows):
        key = "loss"  # accuracy and its like are measured once
    drawn = [o for o in ranking.outcomes if points(o, key)]
    if not drawn:
        return False
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = min(len(drawn), NAMED)
    figure = Figure(figsize=(8, 5 + 0.22 * named), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = matplotlib.colormaps["tab10" if len(drawn) <= NAMED else "viridis"]
    own = differences(ranking.outcomes)
    for place, outcome in reversed(list(enumerate(drawn))):  # the best on top
        colour = colours(place if len(drawn) <= NAMED else place / len(drawn))
        label = _label(ranking, outcome, own[outcome.folder]) if place < NAMED else None
        _curve(axes, points(outcome, key), colour, label)
        if key == "loss" and (held_out := points(outcome, HELD_OUT)):
            axes.plot(*zip(*held_out, strict=True), "o--", lw=0.8, ms=4, color=colour)
    axes.set(xlabel="step", ylabel="loss, nats per byte or token" if key == "loss" else key.replace("_", " "))
    if key == "loss":
        _limit(axes, [points(outcome, key) for outcome in drawn])
    axes.grid(alpha=0.25)
    handles, names = axes.get_legend_handles_labels()
    more = f"; named: the best {named} of {len(drawn)}" if named < len(drawn) else ""
    held_out_note = ", marked: held-out" if key == "loss" else ""
    figure.legend(
        handles[::-1], names[::-1], loc="outside lower left", ncols=1, fontsize=8, frameon=False,
        title=f"line: {key}{held_out_note}{more}", title_fontsize=8, alignment="left",
    )  # fmt: skip
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.1)  # long names widen it
    return True


def points(outcome: Outcome, key: str) -> list[tuple[float, float]]:
    rows = [(row["step"], row[key]) for row in outcome.rows if isinstance(row.get(key), int | float)]
    return [(step, value) for step, value in rows if math.isfinite(value)]


def smooth(curve: Sequence[tuple[float, float]], parts: int = SMOOTH) -> list[tuple[float, float]]:
    """At most `parts` points: each the mean of the steps around it.

    >>> smooth([(1, 4.0), (2, 2.0), (3, 1.0), (4, 1.0)], parts=2)
    [(1.5, 3.0), (3.5, 1.0)]
    """
    size = math.ceil(len(curve) / parts) if curve else 1
    cut = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [tuple(math.fsum(part) / len(each) for part in zip(*each, strict=True)) for each in cut]


def _label(ranking: Ranking, outcome: Outcome, own: str) -> str:
    """What distinguishes a run, and its result."""
    name = outcome.name if own == "-" else f"{outcome.name}: {own}"
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
    value = outcome.numbers.get(ranking.metric)
    notes = [] if value is None else [f"{ranking.metric} {value:.4g}"]
    notes += [] if outcome.status == "ok" else [outcome.status]
    star = " *" if outcome is ranking.best else ""
    return f"{name}{star}" + (f"  ({', '.join(notes)})" if notes else "")


def _curve(axes: Any, curve: Sequence[tuple[float, float]], colour: Any, label: str | None) -> None:
    if len(curve) > SMOOTH:
        axes.plot(*zip(*curve, strict=True), lw=0.6, color=colour, alpha=0.15)
        curve = smooth(curve)
    axes.plot(*zip(*curve, strict=True), "." if len(curve) == 1 else "-", lw=1.3, color=colour, label=label)


def _limit(axes: Any, curves: Sequence[Sequence[tuple[float, float]]]) -> None:
    """A run that diverges does not press the others flat."""
    start = max(curve[0][1] for curve in curves)
    highest = max(value for curve in curves for _, value in curve)
    if start > 0 and highest > SHOTS * start:
        axes.set_ylim(top=SHOTS * start, bottom=None)


def write(
    outcomes: Sequence[Outcome], metric: str, folder: Path, stem: str, text: str | None
) -> tuple[str, Ranking]:
    """Write `text` (the table), `STEM.csv` and `STEM.png`; give the text to print, and the order."""
    ranking = ranked(outcomes, metric)
    table = as_text(ranking)
    folder.mkdir(parents=True, exist_ok=True)
    if text is not None:
        (folder / text).write_text(table + "\n", encoding="utf-8")
    write_csv(ranking, folder / f"{stem}.csv")
    made = [f"{stem}.csv"]
    picture = folder / f"{stem}.png"
    picture.unlink(missing_ok=True)  # of an earlier time
    if draw(ranking, picture):
        made.append(picture.name)
    best = ranking.best
    side = "highest" if grows(metric) else "lowest"
    notes = [f"* the {side} {metric}: {best.folder}"] if best is not None else []
    if ranking.failed:
        notes.append(f"{ranking.failed} of {len(outcomes)} not finished")
    return "\n".join([table, *notes, f"written: {', '.join(made)}"]), ranking
