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
