"""Curves: one picture of what many runs measured, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.compare.outcome import Outcome
from experiments.compare.table import Ranking, as_text, differences, grows, ranked, write_csv
from experiments.training.metrics_file import HELD_OUT

NAMED = 10  # runs with a colour and a name of their own; beyond, a colour map says who is who
LONGEST = 70  # characters of a name
SAME = 4  # runs that are named as having the same curve
SMOOTH = 40  # parts of a curve that are each drawn as their mean
WIDTH = 1.3  # of every line, in points
SHOTS = 2.0  # a curve that leaves the others' highest start by this factor is cut off


def draw(ranking: Ranking, path: Path) -> bool:
    """Draw the runs' training losses (thin), held-out losses (marked), or another metric by step.

    Returns:
        Whether there was anything to draw.
    """
    key = "loss" if ranking.metric in ("loss", HELD_OUT) else ranking.metric
    if not any(key in row for o in ranking.outcomes for row in o.rows):
        key = "loss"  # accuracy and its like are measured once
    drawn = [o for o in ranking.outcomes if len(points(o, key)) > 0]
    if not drawn:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = drawn[:NAMED] if len(drawn) <= NAMED else drawn[:3]
    alike = _equal_curves(drawn, key)
    labels = labels_of(ranking, named, alike)
    # Of equal curves one line is seen; the legend names the runs behind it.
    hidden = {each for same in alike.values() for each in same}
    below = 0.22 * len(named) + 0.2
    figure = Figure(figsize=(8, 4.8 + below), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colors, scale = _colors(drawn, differences(ranking.outcomes))
    for place, outcome in reversed(list(enumerate(drawn))):  # the best on top
        if outcome.folder not in hidden:
            _curve(axes, outcome, key, colors[place], labels.get(outcome.folder))
    axes.set(xlabel="step", ylabel="loss, nats per byte or token" if key == "loss" else key.replace("_", " "))
    _limit(axes, drawn, key)
    axes.grid(alpha=0.25)
    if scale is not None:
        figure.colorbar(scale[0], ax=axes, label=scale[1])
    handles, names = axes.get_legend_handles_labels()
    more = f"; named: the best {len(named)} of {len(drawn)}" if len(named) < len(drawn) else ""
    held_out = ", marked: held-out" if key == "loss" else ""
    figure.legend(
        handles[::-1], names[::-1], loc="outside lower left", ncols=1, fontsize=8, frameon=False,
        title=f"line: {key}{held_out}{more}", title_fontsize=8, alignment="left",
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


def _equal_curves(drawn: Sequence[Outcome], key: str) -> dict[Path, list[Path]]:
    """By the first run of each curve, the others whose points are the same; most have none."""
    first: dict[tuple[Any, ...], Path] = {}
    alike: dict[Path, list[Path]] = {}
    for outcome in drawn:
        shape = tuple(points(outcome, key)), tuple(points(outcome, HELD_OUT) if key == "loss" else ())
        found = first.setdefault(shape, outcome.folder)
        if found != outcome.folder:
            alike.setdefault(found, []).append(outcome.folder)
    return alike


def labels_of(
    ranking: Ranking, named: Sequence[Outcome], alike: Mapping[Path, Sequence[Path]]
) -> dict[Path, str]:
    """What distinguishes each run, its result, and the runs with the same curve.

    Args:
        alike: by folder, the folders of the runs whose curves are equal to its.
    """
    own = differences(ranking.outcomes)
    out = {}
    for outcome in named:
        name = outcome.name if own[outcome.folder] == "-" else f"{outcome.name}: {own[outcome.folder]}"
        name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
        value = outcome.numbers.get(ranking.metric)
        notes = [] if value is None else [f"{ranking.metric} {value:.4g}"]
        notes += [] if outcome.status == "ok" else [outcome.status]
        star = " *" if outcome is ranking.best else ""
        names = {each.folder: each.name for each in ranking.outcomes}
        same = [names[folder] for folder in alike.get(outcome.folder, ())]
        more = f" and {len(same) - SAME} more" if len(same) > SAME else ""
        notes += [f"same curve: {', '.join(same[:SAME])}{more}"] if same else []
        out[outcome.folder] = f"{name}{star}" + (f"  ({', '.join(notes)})" if notes else "")
    return out


def _curve(axes: Any, outcome: Outcome, key: str, color: Any, label: str | None) -> None:
    curve = points(outcome, key)
    thin = {"color": color, "label": label} if len(curve) <= SMOOTH else {"color": color, "alpha": 0.15}
    axes.plot(*zip(*curve, strict=True), lw=WIDTH if "label" in thin else 0.6, **thin)
    if "label" not in thin:
        axes.plot(*zip(*smooth(curve), strict=True), lw=WIDTH, color=color, label=label)
    held_out = points(outcome, HELD_OUT) if key == "loss" else []
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o--", lw=0.8, ms=4, color=color)
    if len(curve) == 1:
        axes.plot(*curve[0], ".", color=color)


def _colors(drawn: Sequence[Outcome], own: dict[Path, str]) -> tuple[list[Any], tuple[Any, str] | None]:
    """A colour per run; of many runs, from a map over the one number in which they differ, or the rank."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    if len(drawn) <= NAMED:
        return list(matplotlib.colormaps["tab10"].colors), None
    values, title = _by_number([own[o.folder] for o in drawn])
    if values is None:
        values, title = [float(place) for place in range(1, len(drawn) + 1)], "place in the table (1: best)"
    low, high = min(values), max(values)
    norm = (
        LogNorm(low, high) if low > 0 and high / low > 20 and "place" not in title else Normalize(low, high)
    )
    mapped = ScalarMappable(norm, matplotlib.colormaps["viridis"])
    return [mapped.to_rgba(value) for value in values], (mapped, title)


def _by_number(own: Sequence[str]) -> tuple[list[float] | None, str]:
    pairs = [text.partition("=") for text in own]
    keys = {key for key, _, _ in pairs}
    try:
        return ([float(value) for _, _, value in pairs], keys.pop()) if len(keys) == 1 else (None, "")
    except ValueError:
        return None, ""


def _limit(axes: Any, drawn: Sequence[Outcome], key: str) -> None:
    """A run that diverges does not press the others flat."""
    if key != "loss" or grows(key):
        return
    start = max(points(outcome, key)[0][1] for outcome in drawn)
    highest = max(value for outcome in drawn for _, value in points(outcome, key))
    if start > 0 and highest > SHOTS * start:
        axes.set_ylim(top=SHOTS * start, bottom=None)


def write(
    outcomes: Sequence[Outcome], metric: str, folder: Path, stem: str, text: str
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
