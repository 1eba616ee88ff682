"""What each run of a `--multirun` leaves, and the table of all of them at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.compare.curves import write
from experiments.compare.outcome import jobs_of, outcome_of
from experiments.training.result import read_result

TABLE, STEM = "table.txt", "sweep"
METRIC = "held_out_loss"


def objective(folder: Path, metric: str = METRIC) -> float | None:
    """The number of the run in `folder` that a search optimises; None if there is none, or no end."""
    result = read_result(folder)
    value = result.get(metric) if result["status"] == "ok" else None
    return float(value) if type(value) in (int, float) else None


def print_table(sweep: Path, metric: str = METRIC, *, finished: bool = True) -> int:
    """Print the table of all jobs; leave it in the sweep's folder, with a CSV and a picture of their curves.

    Args:
        metric: what jobs are sorted by, if any has it.
        finished: the sweep is; one without `TABLE` can be resumed.

    Returns:
        How many did not finish.
    """
    outcomes = [outcome_of(folder, folder.name) for folder in jobs_of(sweep)]
    unknown = not any(metric in outcome.numbers for outcome in outcomes)
    text, ranking = write(outcomes, METRIC if unknown else metric, sweep, STEM, TABLE if finished else None)
    print(f"\n{text}\nresults: {sweep}", flush=True)
    if unknown and metric != METRIC:
        print(f"hydra.callbacks.table.metric={metric}: no run has it; sorted by {METRIC}.", flush=True)
    return ranking.failed


class SweepTable(Callback):
    """Tells of a sweep in its end, and makes the exit code 1 if a run failed."""

    def __init__(self, metric: str = METRIC) -> None:
        self._metric = metric

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if print_table(Path(config.hydra.sweep.dir).resolve(), self._metric):
            raise SystemExit(1)  # Hydra turns a callback's Exception into a warning
