"""Files: what a comparison leaves: a text, a CSV, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.compare.curves import draw
from experiments.compare.outcome import Outcome
from experiments.compare.table import Ranking, as_text, grows, ranked, write_csv


def write(
    outcomes: Sequence[Outcome], metric: str, folder: Path, stem: str, text: str
) -> tuple[str, Ranking]:
    """Write `text` (the table), `STEM.csv` and `STEM.png`; give what a person is told, and the order.

    Raises:
        experiments.configs.train.ConfigError: see `ranked`.
    """
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
    said = [f"* the {side} {metric}: {best.folder}"] if best is not None else []
    if ranking.failed:
        said.append(f"{ranking.failed} of {len(outcomes)} not finished")
    return "\n".join([table, *said, f"written: {', '.join(made)}"]), ranking
