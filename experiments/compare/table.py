"""Table: runs, the best first, as text, as CSV, and as a picture of their numbers by step."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from experiments.compare.outcome import FAILED, OK, Outcome
from experiments.lib.checks import ConfigError
from experiments.lib.metrics import HELD_OUT, Goal, grows, smooth
from fnshard.analysis.tables import columns

# The columns after those of the goal and of other numbers that were measured on held-out data.
COLUMNS = {
    "bigram": ".3f",
    "trigram": ".3f",
    "perplexity": ".3f",
    "accuracy": ".3f",
    "tokens_per_s": ",.0f",
    "rows_per_s": ",.0f",
    "seconds": ".0f",
    "predicted_peak_bytes": ",.1f",
    "measured_peak_bytes": ",.1f",
}
BYTES, MB = "_bytes", "_MB"
OTHERS, NONE = ".4g", "-"
BEST = " *"  # the mark of the best run
LONGEST = 90  # the most characters of a reason; the CSV has all of them


@dataclass(frozen=True)
class Ranking:
    """A list of runs in order: finished ones by the metric, then unfinished ones, then failed ones.

    Args:
        goal: the goal that most of them are judged by.
        is_maximised: whether more of the metric is better; None if that is not known.
    """

    outcomes: tuple[Outcome, ...]
    metric: str
    goal: Goal
    is_maximised: bool | None

    @property
    def best(self) -> Outcome | None:
        """Return the run that is better than all others.

        There is none if two are equal or count in different units, or if it is not known which is better.
        """
        if self.is_maximised is None or len(self.units) > 1:
            return None
        rivals = [each for each in self.outcomes if each.status == self.outcomes[0].status]
        costs = [_compute_cost(each, self.metric, self.is_maximised) for each in rivals]
        has_value = bool(costs) and costs[0] < math.inf
        is_tied = len(costs) > 1 and costs[0] >= costs[1]
        return self.outcomes[0] if has_value and not is_tied else None

    @property
    def units(self) -> list[str]:
        """Return the units of the goal's numbers in these runs, if the metric is one of these numbers."""
        names = (self.goal.name, self.goal.held_out)
        return sorted({each.goal.unit for each in self.outcomes if self.metric in names and each.numbers})

    @property
    def not_finished(self) -> int:
        return sum(outcome.status != OK for outcome in self.outcomes)


def rank_outcomes(
    outcomes: Sequence[Outcome], metric: str | None = None, is_maximised: bool | None = None
) -> Ranking:
    """Put runs in order, by a metric, or by the goal that most of them are judged by.

    Args:
        is_maximised: whether more of the metric is better; None takes it from the runs' goals, or its name.

    Raises:
        ConfigError: no run has the metric.
    """
    goals = Counter(each.goal for each in outcomes if each.numbers)
    goal = goals.most_common(1)[0][0] if goals else Goal()
    known = {name for outcome in outcomes for name in outcome.numbers}
    if known and metric is not None and metric not in known:
        raise ConfigError(f"metric {metric}: no run has it; they have {', '.join(sorted(known))}.")
    metric, place = metric or goal.held_out, {OK: 0, FAILED: 2}
    if is_maximised is None:
        matching = [each for each in goals if metric in (each.name, each.held_out)]
        is_maximised = grows(metric, matching[0] if matching else goal)
    order = sorted(outcomes, key=lambda o: (place.get(o.status, 1), _compute_cost(o, metric, is_maximised)))
    return Ranking(tuple(order), metric, goal, is_maximised)


def differences(outcomes: Sequence[Outcome]) -> dict[Path, str]:
    """Return, by folder, the overrides that not all runs have in common."""
    by_folder = _drop_common_overrides(outcomes)
    return {folder: " ".join(overrides) or "-" for folder, overrides in by_folder.items()}


def _drop_common_overrides(outcomes: Sequence[Outcome]) -> dict[Path, list[str]]:
    """Return, by folder, a list of the overrides that not all runs have in common."""
    common: set[str] = set()
    if len(outcomes) > 1:
        common = set.intersection(*(set(o.overrides) for o in outcomes))
    return {o.folder: [override for override in o.overrides if override not in common] for o in outcomes}


def as_text(ranking: Ranking) -> str:
    """Return the table with a row for each run. The best has a star.

    A number that all runs share has no column, and is written once below the table.
    """
    # All cells, by column: the goal's numbers, others on held-out data, and those of `COLUMNS`.
    outcomes = ranking.outcomes
    measured = dict.fromkeys(n for o in outcomes for n in o.numbers if n.startswith(HELD_OUT))
    names = [*dict.fromkeys(o.goal.name for o in outcomes), *dict.fromkeys(o.goal.held_out for o in outcomes)]
    formats = dict.fromkeys(names, ".3f") | {n: OTHERS for n in measured if n not in names} | COLUMNS
    formats.setdefault(ranking.metric, OTHERS)
    table = {key: [_format_cell(o, key, style) for o in outcomes] for key, style in formats.items()}

    # Leave out columns in which no run has a number, or all have the same one.
    known = {key: [cell for cell in cells if cell != NONE] for key, cells in table.items()}
    equal = {
        key: cells[0]
        for key, cells in known.items()
        if len(cells) > 1 and len(set(cells)) == 1 and key != ranking.metric
    }
    shown = {key.replace(BYTES, MB): table[key] for key in table if known[key] and key not in equal}
    if any(o.reason for o in outcomes):
        shown["reason"] = [shorten(o.reason, LONGEST, placeholder="...") or NONE for o in outcomes]

    # A row for each run, and a line for the numbers that are equal.
    overrides = differences(outcomes)
    rows = [("run", "overrides", "status", *shown)]
    for number, outcome in enumerate(outcomes):
        name = outcome.name + (BEST if outcome is ranking.best else "")
        cells = [column[number] for column in shown.values()]
        rows.append((name, overrides[outcome.folder], outcome.status, *cells))
    lines = [*columns(rows)]
    if equal:
        numbers = ", ".join(f"{key.replace(BYTES, MB)} {cell}" for key, cell in equal.items())
        lines.append(f"equal in all: {numbers}")
    return "\n".join(lines)


def _format_cell(outcome: Outcome, key: str, style: str) -> str:
    """Return a number of a run as text. Bytes are given in MB."""
    if key not in outcome.numbers:
        return NONE
    return format(outcome.numbers[key] / (1e6 if key.endswith(BYTES) else 1), style)


def write_csv(ranking: Ranking, path: Path) -> None:
    """Write a row for each run in the same order, and a column for every option and number that any run
    has."""
    rows = []
    for outcome in ranking.outcomes:
        row: dict[str, object] = {
            "run": outcome.name, "status": outcome.status, "best": "yes" if outcome is ranking.best else "",
            "reason": outcome.reason, "folder": str(outcome.folder),
        }  # fmt: skip
        for override in outcome.overrides:
            key, _, value = override.partition("=")
            row[key.lstrip("+~")] = value
        rows.append(row | outcome.numbers)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)


def _compute_cost(outcome: Outcome, metric: str, is_maximised: bool | None) -> float:
    """Return a number of which less is better. A run without the metric is the worst."""
    value = outcome.numbers.get(metric, math.nan)
    if math.isnan(value):
        return math.inf
    return -value if is_maximised else value


# ------------------------------------------------------------------ curves


NAMED, LABEL = 10, 70  # the most runs that the legend names, and the most characters of a name
SHORT = 50  # the most characters of overrides that name a run without its own name
SMOOTH = 40  # the points of a curve, each of which is the mean of the steps around it
SHOTS = 2.0  # a loss that rises above the highest start by this factor is cut off


def draw(ranking: Ranking, path: Path) -> bool:
    """Draw the goal's number by step, in training (lines) and on held-out data (marked), or another metric.

    Returns:
        Whether there was anything to draw.
    """
    # Choose the number that is drawn, and find its curves.
    goal = ranking.goal
    key = goal.name if ranking.metric in (goal.name, goal.held_out) else ranking.metric
    if not any(key in row for o in ranking.outcomes for row in o.rows):
        key = goal.name  # the metric is measured once in a run, and has no curve
    is_goal = key == goal.name
    curves = [(outcome, points(outcome, key)) for outcome in ranking.outcomes]
    curves = [(outcome, curve) for outcome, curve in curves if curve]
    if not curves:
        return False

    # Draw a line for each run, with marks on held-out data.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = min(len(curves), NAMED)
    figure = Figure(figsize=(8, 5 + 0.22 * named), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = matplotlib.colormaps["tab10" if len(curves) <= NAMED else "viridis"]
    names, sizes = name_runs(ranking.outcomes), []
    for place, (outcome, curve) in reversed(list(enumerate(curves))):  # the best on top
        colour = colours(place if len(curves) <= NAMED else place / len(curves))
        label = _make_label(ranking, outcome, names[outcome.folder]) if place < NAMED else None
        means, size = smooth(curve, SMOOTH)
        sizes.append(size)
        axes.plot(*zip(*means, strict=True), ".-", ms=2, lw=1.3, color=colour, label=label)
        if is_goal and (held_out := points(outcome, goal.held_out)):
            axes.plot(*zip(*held_out, strict=True), "o--", lw=0.8, ms=4, color=colour)

    # Label the axes, and bound them.
    shown = goal.label if is_goal and len(ranking.units) < 2 else key.replace("_", " ")
    count = f"{len(curves)} run{'s' if len(curves) > 1 else ''}"
    axes.set(xlabel="step", ylabel=shown, title=f"{key.replace('_', ' ')} by step, {count}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    start = max(curve[0][1] for _, curve in curves)
    is_loss = is_goal and not goal.is_maximised
    if is_loss and max(v for _, curve in curves for _, v in curve) > SHOTS * start > 0:
        axes.set_ylim(top=SHOTS * start)  # so that a run that diverges does not flatten the others
    axes.grid(alpha=0.25)

    # Explain the lines in the legend, which names the best runs.
    handles, texts = axes.get_legend_handles_labels()
    least, most = min(sizes), max(sizes)
    steps = f"{most}" if least == most else f"{least} to {most}"
    title = "line: training" if is_goal else f"line: {key.replace('_', ' ')}"
    if most > 1:
        title += f", mean of {steps} steps"
    if is_goal:
        title += "; marked: held-out"
    if named < len(curves):
        title += f"; named: the best {named} of {len(curves)}"
    figure.legend(
        handles[::-1], texts[::-1], loc="outside lower left", fontsize=8, frameon=False, title=title,
        title_fontsize=8, alignment="left",
    )  # fmt: skip
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.1)  # long names widen it
    return True


def points(outcome: Outcome, key: str) -> list[tuple[float, float]]:
    """Return (step, number) for the steps of a run that have a finite number of this name."""
    rows = [(row["step"], row[key]) for row in outcome.rows if isinstance(row.get(key), int | float)]
    return [(step, value) for step, value in rows if math.isfinite(value)]


def name_runs(outcomes: Sequence[Outcome]) -> dict[Path, str]:
    """Return a name for each run, by its folder: the choices and values that not all runs have in common.

    The run's own name precedes them if they are long, if two runs have the same, or if there are none.
    """
    texts = {
        folder: _describe_overrides(overrides)
        for folder, overrides in _drop_common_overrides(outcomes).items()
    }
    counts = Counter(texts.values())
    names = {}
    for outcome in outcomes:
        text = texts[outcome.folder]
        if 0 < len(text) <= SHORT and counts[text] == 1:
            names[outcome.folder] = text
        else:
            names[outcome.folder] = ": ".join(filter(None, [outcome.name, text]))
    return names


def _describe_overrides(overrides: Sequence[str]) -> str:
    """Return overrides in words.

    >>> _describe_overrides(["optimizer=muon", "optimizer.lr=0.02", "+run.seed=3", "lr=19", "run.prompt=a b"])
    'muon, lr 0.02, seed 3, lr 19, prompt a b'
    """
    words = []
    for override in overrides:
        key, has_value, value = override.lstrip("+~").partition("=")
        if not has_value:
            if override.startswith("~"):
                words.append(f"no {key}")
        elif "." in key or value.replace(".", "").replace("e-", "").isdigit():
            words.append(f"{key.rpartition('.')[2].replace('_', ' ')} {value}")
        else:
            words.append(value)
    return ", ".join(words)


def _make_label(ranking: Ranking, outcome: Outcome, name: str) -> str:
    """Return a run's label in the legend: its name and its result."""
    name = name if len(name) <= LABEL else f"{name[: LABEL - 3]}..."
    value, metric = outcome.numbers.get(ranking.metric), ranking.metric.replace("_", " ")
    notes = []
    if value is not None:
        notes.append(f"{metric.replace('held out', 'held-out')} {value:.4g}")
    if outcome.status != OK:
        notes.append(outcome.status)
    if outcome is ranking.best:
        name += BEST
    return f"{name}  ({', '.join(notes)})" if notes else name


def write_comparison(
    outcomes: Sequence[Outcome], metric: str | None, folder: Path, stem: str, table_name: str,
    is_maximised: bool | None = None,
) -> tuple[str, Ranking]:  # fmt: skip
    """Write the table as text, `STEM.csv` and `STEM.png`.

    Args:
        metric, is_maximised: the arguments of `rank_outcomes`.
        table_name: the name of the file that takes the table.

    Returns:
        The text to print, and the order of the runs.
    """
    ranking = rank_outcomes(outcomes, metric, is_maximised)
    table, picture = as_text(ranking), folder / f"{stem}.png"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / table_name).write_text(table + "\n", encoding="utf-8")
    write_csv(ranking, folder / f"{stem}.csv")
    picture.unlink(missing_ok=True)  # an earlier picture must not stay if there is nothing to draw now
    written = [f"{stem}.csv"]
    if draw(ranking, picture):
        written.append(picture.name)
    lines = [table, *_explain_star(ranking)]
    if ranking.not_finished:
        lines.append(f"{ranking.not_finished} of {len(outcomes)} not finished")
    return "\n".join([*lines, f"written: {', '.join(written)}"]), ranking


def _explain_star(ranking: Ranking) -> list[str]:
    """Return a line on which run is the best or why none has a star; [] if there is nothing to say."""
    metric, units = ranking.metric, ranking.units
    if ranking.best is not None:
        side = "highest" if ranking.is_maximised else "lowest"
        unit = f", {units[0]}" if units and units[0] else ""
        return [f"* the {side} {metric}{unit}: {ranking.best.folder}"]
    if len(units) > 1:
        said = ", ".join(unit or "no unit" for unit in units)
        return [f"no star: {metric} of these runs counts other things ({said})"]
    values = [o.numbers[metric] for o in ranking.outcomes if metric in o.numbers]
    if ranking.is_maximised is None and values:
        say = f"experiments.compare FOLDER --metric {metric} --direction maximize, or minimize"
        return [f"no star: whether more or less of {metric} is better is not known. Fix: {say}."]
    if len(values) > 1 and values[0] == values[1]:
        return [f"no star: the best {metric} is that of several runs"]
    return []
