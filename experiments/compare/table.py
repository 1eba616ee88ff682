"""Table: runs, the best first: as text, as CSV, and as one picture of what they measured, step by step."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from experiments.compare.outcome import FAILED, OK, Outcome
from experiments.configs.train import ConfigError
from experiments.training.metrics_file import HELD_OUT
from fnshard.analysis.tables import columns

COLUMNS = {
    "loss": ".3f",
    "held_out_loss": ".3f",
    "bigram": ".3f",
    "trigram": ".3f",
    "perplexity": ".3f",
    "accuracy": ".3f",
    "tokens_per_s": ",.0f",
    "seconds": ".0f",
    "predicted_peak_bytes": ",.1f",
    "measured_peak_bytes": ",.1f",
}
BYTES, MB = "_bytes", "_MB"
OTHERS, NONE = ".4g", "-"
GROWS = ("accuracy", "tokens_per_s", "mfu", "reward", "margin")  # in the name of what is the better the more
BEST, LONGEST = " *", 90  # characters of a reason; the CSV has all


@dataclass(frozen=True)
class Ranking:
    """Runs in order: finished ones by the metric, then unfinished ones, then failed ones."""

    outcomes: tuple[Outcome, ...]
    metric: str

    @property
    def best(self) -> Outcome | None:
        first = next(iter(self.outcomes), None)
        return first if first is not None and _value(first, self.metric) < math.inf else None

    @property
    def failed(self) -> int:
        return sum(outcome.status != OK for outcome in self.outcomes)


def ranked(outcomes: Sequence[Outcome], metric: str) -> Ranking:
    """Put runs in order."""
    known = {name for outcome in outcomes for name in outcome.numbers}
    if known and metric not in known:
        raise ConfigError(f"metric {metric}: no run has it; they have {', '.join(sorted(known))}.")
    place = {OK: 0, FAILED: 2}
    order = sorted(outcomes, key=lambda o: (place.get(o.status, 1), _value(o, metric)))
    return Ranking(tuple(order), metric)


def differences(outcomes: Sequence[Outcome]) -> dict[Path, str]:
    """By folder, the overrides that not all runs have in common."""
    common = set.intersection(*(set(o.overrides) for o in outcomes)) if len(outcomes) > 1 else set()
    return {o.folder: " ".join(x for x in o.overrides if x not in common) or "-" for o in outcomes}


def as_text(ranking: Ranking) -> str:
    """A row per run; the best one has a star. What is equal in all rows is said once, below them."""
    outcomes, own = ranking.outcomes, differences(ranking.outcomes)
    formats = COLUMNS | ({} if ranking.metric in COLUMNS else {ranking.metric: OTHERS})
    table = {key: [_cell(o, key, style) for o in outcomes] for key, style in formats.items()}
    known = {key: [cell for cell in cells if cell != NONE] for key, cells in table.items()}
    alike = {k: v[0] for k, v in known.items() if len(v) > 1 == len(set(v)) and k != ranking.metric}
    shown = {key.replace(BYTES, MB): table[key] for key in table if known[key] and key not in alike}
    if any(o.reason for o in outcomes):
        shown["reason"] = [shorten(o.reason, LONGEST, placeholder="...") or NONE for o in outcomes]
    rows = [("run", "overrides", "status", *shown)]
    for number, outcome in enumerate(outcomes):
        name = outcome.name + (BEST if outcome is ranking.best else "")
        rows.append((name, own[outcome.folder], outcome.status, *(cells[number] for cells in shown.values())))
    equal = ", ".join(f"{key.replace(BYTES, MB)} {cell}" for key, cell in alike.items())
    return "\n".join([*columns(rows), *([f"equal in all: {equal}"] if equal else [])])


def _cell(outcome: Outcome, key: str, style: str) -> str:
    if key not in outcome.numbers:
        return NONE
    return format(outcome.numbers[key] / (1e6 if key.endswith(BYTES) else 1), style)


def write_csv(ranking: Ranking, path: Path) -> None:
    """A row per run in the same order, a column for every option that any run names and for every number."""
    rows = []
    for o in ranking.outcomes:
        options = {k.lstrip("+~"): v for k, _, v in (override.partition("=") for override in o.overrides)}
        head = {"run": o.name, "status": o.status, "best": "yes" if o is ranking.best else ""}
        rows.append({**head, "reason": o.reason, "folder": str(o.folder), **options, **o.numbers})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)


def grows(metric: str) -> bool:
    """Whether more of it is better.

    >>> grows("held_out_accuracy"), grows("loss")
    (True, False)
    """
    return any(word in metric for word in GROWS)


def _value(outcome: Outcome, metric: str) -> float:
    """The less the better; none, or NaN, is the worst."""
    value = outcome.numbers.get(metric, math.nan)
    return math.inf if math.isnan(value) else -value if grows(metric) else value


# ------------------------------------------------------------------ curves


NAMED, LABEL = 10, 70  # runs that have a name in the legend, and its characters
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
    name = name if len(name) <= LABEL else f"{name[: LABEL - 3]}..."
    value = outcome.numbers.get(ranking.metric)
    notes = [] if value is None else [f"{ranking.metric} {value:.4g}"]
    notes += [] if outcome.status == "ok" else [outcome.status]
    star = " *" if outcome is ranking.best else ""
    return f"{name}{star}" + (f"  ({', '.join(notes)})" if notes else "")


def write(
    outcomes: Sequence[Outcome], metric: str, folder: Path, stem: str, text: str
) -> tuple[str, Ranking]:
    """Write `text` (the table), `STEM.csv` and `STEM.png`; give the text to print, and the order."""
    ranking = ranked(outcomes, metric)
    table, picture = as_text(ranking), folder / f"{stem}.png"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / text).write_text(table + "\n", encoding="utf-8")
    write_csv(ranking, folder / f"{stem}.csv")
    picture.unlink(missing_ok=True)  # of an earlier time
    written = [f"{stem}.csv", *([picture.name] if draw(ranking, picture) else [])]
    side = "highest" if grows(metric) else "lowest"
    notes = [] if ranking.best is None else [f"* the {side} {metric}: {ranking.best.folder}"]
    notes += [f"{ranking.failed} of {len(outcomes)} not finished"] if ranking.failed else []
    return "\n".join([table, *notes, f"written: {', '.join(written)}"]), ranking
