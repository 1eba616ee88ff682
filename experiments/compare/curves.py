"""Curves: one picture of what many runs measured, step by step; and all that a comparison leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from experiments.compare.outcome import Outcome
from experiments.compare.table import Ranking, as_text, differences, grows, ranked, write_csv
from experiments.training.metrics_file import HELD_OUT

NAMED, LONGEST = 10, 70  # runs that have a name in the legend, and its characters
SMOOTH = 40  # points of a curve: each is the mean of the steps around it
SHOTS = 2.0  # a curve that leaves the others' highest start by this factor is cut off


def draw(ranking: Ranking, path: Path) -> bool:
    """Draw the runs' training losses (lines) and held-out losses (marked), or another metric by step.

    Returns:
        Whether there was anything to draw.
    """
    key = "loss" if ranking.metric in ("loss", HELD_OUT) else ranking.metric
    if not any(key in row for o in ranking.outcomes for row in o.rows):
        key = "loss"  # accuracy and its like are measured once
    curves = [(outcome, curve) for outcome in ranking.outcomes if (curve := points(outcome, key))]
    if not curves:
        return False
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = min(len(curves), NAMED)
    figure = Figure(figsize=(8, 5 + 0.22 * named), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = matplotlib.colormaps["tab10" if len(curves) <= NAMED else "viridis"]
    own = differences(ranking.outcomes)
    for place, (outcome, curve) in reversed(list(enumerate(curves))):  # the best on top
        colour = colours(place if len(curves) <= NAMED else place / len(curves))
        label = _label(ranking, outcome, own[outcome.folder]) if place < NAMED else None
        axes.plot(*zip(*smooth(curve), strict=True), ".-", ms=2, lw=1.3, color=colour, label=label)
        if key == "loss" and (held_out := points(outcome, HELD_OUT)):
            axes.plot(*zip(*held_out, strict=True), "o--", lw=0.8, ms=4, color=colour)
    axes.set(xlabel="step", ylabel="loss, nats per byte or token" if key == "loss" else key.replace("_", " "))
    start = max(curve[0][1] for _, curve in curves)
    if key == "loss" and max(value for _, curve in curves for _, value in curve) > SHOTS * start > 0:
        axes.set_ylim(top=SHOTS * start)  # a run that diverges does not press the others flat
    axes.grid(alpha=0.25)
    handles, names = axes.get_legend_handles_labels()
    more = f"; named: the best {named} of {len(curves)}" if named < len(curves) else ""
    title = f"line: {key}{', marked: held-out' if key == 'loss' else ''}{more}"
    figure.legend(
        handles[::-1], names[::-1], loc="outside lower left", fontsize=8, frameon=False, title=title,
        title_fontsize=8, alignment="left",
    )  # fmt: skip
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.1)  # long names widen it
    return True


def points(outcome: Outcome, key: str) -> list[tuple[float, float]]:
    rows = [(row["step"], row[key]) for row in outcome.rows if isinstance(row.get(key), int | float)]
    return [(step, value) for step, value in rows if math.isfinite(value)]


def smooth(curve: Sequence[tuple[float, float]], parts: int = SMOOTH) -> list[tuple[float, float]]:
    """At most `parts` points.

    >>> smooth([(1, 4.0), (2, 2.0), (3, 1.0), (4, 1.0)], parts=2)
    [(1.5, 3.0), (3.5, 1.0)]
    """
    size = math.ceil(len(curve) / parts)
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


def write(
    outcomes: Sequence[Outcome], metric: str, folder: Path, stem: str, text: str | None
) -> tuple[str, Ranking]:
    """Write `text` (the table), `STEM.csv` and `STEM.png`; give the text to print, and the order."""
    ranking = ranked(outcomes, metric)
    table, picture = as_text(ranking), folder / f"{stem}.png"
    folder.mkdir(parents=True, exist_ok=True)
    if text is not None:
        (folder / text).write_text(table + "\n", encoding="utf-8")
    write_csv(ranking, folder / f"{stem}.csv")
    picture.unlink(missing_ok=True)  # of an earlier time
    written = [f"{stem}.csv", *([picture.name] if draw(ranking, picture) else [])]
    side = "highest" if grows(metric) else "lowest"
    notes = [] if ranking.best is None else [f"* the {side} {metric}: {ranking.best.folder}"]
    notes += [f"{ranking.failed} of {len(outcomes)} not finished"] if ranking.failed else []
    return "\n".join([table, *notes, f"written: {', '.join(written)}"]), ranking
