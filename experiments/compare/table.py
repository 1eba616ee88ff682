"""Table: runs, the best first, as text, as CSV, and as one picture of their numbers, step by step."""

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

# The columns behind those of the goal and of other numbers that were measured on held-out data.
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
LONGEST = 90  # the most characters of a reason, of which the CSV has all


@dataclass(frozen=True)
class Ranking:
    """A list of runs in order: finished ones by the metric, then unfinished ones, then failed ones.

    Args:
        goal: the goal that most of them are judged by.
        is_maximised: whether more of the metric is better; None where nobody has said it.
    """

    outcomes: tuple[Outcome, ...]
    metric: str
    goal: Goal
    is_maximised: bool | None

    @property
    def best(self) -> Outcome | None:
        """The run that is better than all others.

        There is none where two are equal or count in different units, or where nobody has said which is
        better.
        """
        if self.is_maximised is None:
            return None
        alike = [each for each in self.outcomes if each.status == self.outcomes[0].status]
        values = [_cost(each, self.metric, self.is_maximised) for each in alike]
        is_one = len(values) == 1 or (len(values) > 1 and values[0] < values[1])
        return self.outcomes[0] if is_one and values[0] < math.inf and len(self.units) < 2 else None

    @property
    def units(self) -> list[str]:
        """The units of the goal's numbers in these runs, where the metric is one of these numbers."""
        names = (self.goal.name, self.goal.held_out)
        return sorted({each.goal.unit for each in self.outcomes if self.metric in names and each.numbers})

    @property
    def failed(self) -> int:
        return sum(outcome.status != OK for outcome in self.outcomes)


def rank_outcomes(
    outcomes: Sequence[Outcome], metric: str | None = None, is_maximised: bool | None = None
) -> Ranking:
    """Put runs in order, by a metric, or by what most of them are judged by.

    Args:
        is_maximised: whether more of the metric is better; None asks the runs' goals, or its name.

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
        goals_own = [each for each in goals if metric in (each.name, each.held_out)]
        is_maximised = grows(metric, goals_own[0] if goals_own else goal)
    order = sorted(outcomes, key=lambda o: (place.get(o.status, 1), _cost(o, metric, is_maximised)))
    return Ranking(tuple(order), metric, goal, is_maximised)


def differences(outcomes: Sequence[Outcome]) -> dict[Path, str]:
    """Return, by folder, the overrides that not all runs have in common."""
    return {folder: " ".join(own) or "-" for folder, own in _own_overrides(outcomes).items()}


def _own_overrides(outcomes: Sequence[Outcome]) -> dict[Path, list[str]]:
    common = set.intersection(*(set(o.overrides) for o in outcomes)) if len(outcomes) > 1 else set()
    return {o.folder: [x for x in o.overrides if x not in common] for o in outcomes}


def as_text(ranking: Ranking) -> str:
    """Return the table with a row for each run. The best has a star. A number that all runs share has no
    column, and stands once below the table."""
    outcomes, own = ranking.outcomes, differences(ranking.outcomes)
    measured = dict.fromkeys(n for o in outcomes for n in o.numbers if n.startswith(HELD_OUT))
    names = [*dict.fromkeys(o.goal.name for o in outcomes), *dict.fromkeys(o.goal.held_out for o in outcomes)]
    formats = dict.fromkeys(names, ".3f") | {n: OTHERS for n in measured if n not in names} | COLUMNS
    formats |= {} if ranking.metric in formats else {ranking.metric: OTHERS}
    table = {key: [_format_cell(o, key, style) for o in outcomes] for key, style in formats.items()}
    # Leave out columns in which no run has a number, or all have the same one.
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


def _format_cell(outcome: Outcome, key: str, style: str) -> str:
    if key not in outcome.numbers:
        return NONE
    return format(outcome.numbers[key] / (1e6 if key.endswith(BYTES) else 1), style)


def write_csv(ranking: Ranking, path: Path) -> None:
    """Write a row for each run in the same order, and a column for every option and number that any run
    has."""
    rows = []
    for o in ranking.outcomes:
        options = {k.lstrip("+~"): v for k, _, v in (override.partition("=") for override in o.overrides)}
        head = {"run": o.name, "status": o.status, "best": "yes" if o is ranking.best else ""}
        rows.append({**head, "reason": o.reason, "folder": str(o.folder), **options, **o.numbers})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)


def _cost(outcome: Outcome, metric: str, is_maximised: bool | None) -> float:
    """Return a number of which less is better; a run without the metric is the worst."""
    value = outcome.numbers.get(metric, math.nan)
    return math.inf if math.isnan(value) else -value if is_maximised else value


# ------------------------------------------------------------------ curves


NAMED, LABEL = 10, 70  # the most runs that the legend names, and the most characters of a name
SHORT = 50  # the most characters of overrides that name a run without its own name
SMOOTH = 40  # the points of a curve, each of which is the mean of the steps around it
SHOTS = 2.0  # a loss that rises above the highest start by this factor is cut off


def draw(ranking: Ranking, path: Path) -> bool:
    """Draw the number that the runs are judged by, in training (lines) and on held-out data (marked), or
    another metric by step.

    Returns:
        Whether there was anything to draw.
    """
    goal = ranking.goal
    key = goal.name if ranking.metric in (goal.name, goal.held_out) else ranking.metric
    if not any(key in row for o in ranking.outcomes for row in o.rows):
        key = goal.name  # the metric is measured once in a run, and has no curve
    of_goal = key == goal.name
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
    names, sizes = name_runs(ranking.outcomes), []
    for place, (outcome, curve) in reversed(list(enumerate(curves))):  # the best on top
        colour = colours(place if len(curves) <= NAMED else place / len(curves))
        label = _make_label(ranking, outcome, names[outcome.folder]) if place < NAMED else None
        means, size = smooth(curve, SMOOTH)
        sizes.append(size)
        axes.plot(*zip(*means, strict=True), ".-", ms=2, lw=1.3, color=colour, label=label)
        if of_goal and (held_out := points(outcome, goal.held_out)):
            axes.plot(*zip(*held_out, strict=True), "o--", lw=0.8, ms=4, color=colour)
    shown = goal.label if of_goal and len(ranking.units) < 2 else key.replace("_", " ")
    count = f"{len(curves)} run{'s' if len(curves) > 1 else ''}"
    axes.set(xlabel="step", ylabel=shown, title=f"{key.replace('_', ' ')} by step, {count}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    start = max(curve[0][1] for _, curve in curves)
    is_loss = of_goal and not goal.is_maximised
    if is_loss and max(v for _, curve in curves for _, v in curve) > SHOTS * start > 0:
        axes.set_ylim(top=SHOTS * start)  # a run that diverges does not press the others flat
    axes.grid(alpha=0.25)
    handles, texts = axes.get_legend_handles_labels()
    least, most = min(sizes), max(sizes)
    steps = f"{most}" if least == most else f"{least} to {most}"
    title = "line: training" if of_goal else f"line: {key.replace('_', ' ')}"
    title += f", mean of {steps} steps" if most > 1 else ""
    title += "; marked: held-out" if of_goal else ""
    title += f"; named: the best {named} of {len(curves)}" if named < len(curves) else ""
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

    The run's own name stands before them where two have the same, and where there are none.
    """
    own = {folder: _in_words(overrides) for folder, overrides in _own_overrides(outcomes).items()}
    often = Counter(own.values())
    named = {o.folder: o.name for o in outcomes}
    return {
        folder: text
        if 0 < len(text) <= SHORT and often[text] == 1
        else ": ".join(filter(None, [named[folder], text]))
        for folder, text in own.items()
    }


def _in_words(overrides: Sequence[str]) -> str:
    """Return overrides as a person says them.

    >>> _in_words(["optimizer=muon", "optimizer.lr=0.02", "+run.seed=3", "lr=19", "run.prompt=a b"])
    'muon, lr 0.02, seed 3, lr 19, prompt a b'
    """
    words = []
    for override in overrides:
        key, has_value, value = override.lstrip("+~").partition("=")
        if not has_value:
            words += [f"no {key}"] if override.startswith("~") else []
        elif "." in key or value.replace(".", "").replace("e-", "").isdigit():
            words.append(f"{key.rpartition('.')[2].replace('_', ' ')} {value}")
        else:
            words.append(value)
    return ", ".join(words)


def _make_label(ranking: Ranking, outcome: Outcome, name: str) -> str:
    """Return a run's label in the legend: its name and its result."""
    name = name if len(name) <= LABEL else f"{name[: LABEL - 3]}..."
    value, metric = outcome.numbers.get(ranking.metric), ranking.metric.replace("_", " ")
    notes = [] if value is None else [f"{metric.replace('held out', 'held-out')} {value:.4g}"]
    notes += [] if outcome.status == "ok" else [outcome.status]
    star = " *" if outcome is ranking.best else ""
    return f"{name}{star}" + (f"  ({', '.join(notes)})" if notes else "")


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
    picture.unlink(missing_ok=True)  # an earlier picture must not stay where there is nothing to draw now
    written = [f"{stem}.csv", *([picture.name] if draw(ranking, picture) else [])]
    notes = [f"{ranking.failed} of {len(outcomes)} not finished"] if ranking.failed else []
    return "\n".join([table, *_verdict(ranking), *notes, f"written: {', '.join(written)}"]), ranking


def _verdict(ranking: Ranking) -> list[str]:
    """Say which run is the best, or why none has a star."""
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
