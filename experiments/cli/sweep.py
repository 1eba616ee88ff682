"""What a search gets of each run of a `--multirun`, and the table of all of them at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.compare.outcome import jobs_of, outcome_of
from experiments.compare.table import write
from experiments.training.goal import Goal, grows
from experiments.training.result import read_result

TABLE, STEM = "table.txt", "sweep"


def objective(
    folder: Path, metric: str | None = None, direction: str = "minimize", *, is_said: bool = False
) -> float | None:
    """Return the number of the run in `folder` that a search optimises, with the sign by which the search's
    direction prefers the better run; None if there is none, or no end.

    Args:
        metric: None for what the run itself is judged by.
        direction: of the search, "minimize" or "maximize".
        is_said: whether the user has written the direction, and so which of the metric is better.
    """
    result = read_result(folder)
    goal = Goal.of(result.get("goal")) or Goal()
    name = metric or goal.held_out
    value = result.get(name) if result["status"] == "ok" else None
    if type(value) not in (int, float):
        return None
    if metric is not None:
        turned = bool(grows(name, goal)) and direction == "minimize" and not is_said
    else:
        turned = goal.is_maximised != (direction == "maximize")
    return -float(value) if turned else float(value)


def print_table(sweep: Path, metric: str | None = None) -> int:
    """Print the table of all jobs, sorted by `metric`, and leave it in the sweep's folder with a CSV and a
    picture of their curves. How many failed."""
    outcomes = [outcome_of(folder, folder.name) for folder in jobs_of(sweep)]
    known = any(metric in outcome.numbers for outcome in outcomes)
    text, ranking = write(outcomes, metric if known else None, sweep, STEM, TABLE)
    print(f"\n{text}\nresults: {sweep}", flush=True)
    if not known and metric is not None:
        print(
            f"hydra.callbacks.table.metric={metric}: no run has it; sorted by {ranking.metric}.", flush=True
        )
    return ranking.failed


class SweepTable(Callback):
    """The table at a sweep's end. The exit code is 1 if a run failed."""

    def __init__(self, metric: str | None = None) -> None:
        self._metric = metric

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if print_table(Path(config.hydra.sweep.dir).resolve(), self._metric):
            raise SystemExit(1)  # Hydra turns a callback's Exception into a warning
