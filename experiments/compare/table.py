"""Table: runs, the best first: as text, and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from experiments.compare.outcome import FAILED, OK, Outcome
from experiments.configs.train import ConfigError
from experiments.tables import aligned

COLUMNS = {
    "loss": ".3f",
    "held_out_loss": ".3f",
    "bigram": ".3f",
    "trigram": ".3f",
    "perplexity": ".3f",
    "accuracy": ".3f",
    "tokens_per_s": ",.0f",
    "seconds": ".0f",
}
OTHERS = ".4g"
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
    """A row per run; the best one has a star."""
    outcomes, own = ranking.outcomes, differences(ranking.outcomes)
    formats = COLUMNS | ({} if ranking.metric in COLUMNS else {ranking.metric: OTHERS})
    columns = {key: style for key, style in formats.items() if any(key in o.numbers for o in outcomes)}
    reasons = ("reason",) if any(o.reason for o in outcomes) else ()
    rows = [("run", "overrides", "status", *columns, *reasons)]
    for outcome in outcomes:
        name = outcome.name + (BEST if outcome is ranking.best else "")
        numbers = (_shown(outcome.numbers.get(key), style) for key, style in columns.items())
        why = (shorten(outcome.reason, LONGEST, placeholder="...") or "-",) if reasons else ()
        rows.append((name, own[outcome.folder], outcome.status, *numbers, *why))
    stop = 3 + len(columns)
    named, reasoned = [row[:stop] for row in rows], [row[stop:] for row in rows]
    lines = zip(aligned(named, left=3), reasoned, strict=True)
    return "\n".join("  ".join([line, *why]).rstrip() for line, why in lines)


def write_csv(ranking: Ranking, path: Path) -> None:
    """A row per run in the same order, a column for every option that any run names and for every number."""
    options = [dict(_option(o) for o in outcome.overrides) for outcome in ranking.outcomes]
    keys = list(dict.fromkeys(key for each in options for key in each))
    numbers = list(dict.fromkeys(key for outcome in ranking.outcomes for key in outcome.numbers))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "status", "best", *keys, *numbers, "reason", "folder"])
        for outcome, own in zip(ranking.outcomes, options, strict=True):
            head = [outcome.name, outcome.status, "yes" if outcome is ranking.best else ""]
            measured = [outcome.numbers.get(key, "") for key in numbers]
            settings = [own.get(key, "") for key in keys]
            writer.writerow([*head, *settings, *measured, outcome.reason, outcome.folder])


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


def _option(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value


def _shown(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)
