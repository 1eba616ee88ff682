"""Sweep: the table of all runs of a `--multirun`, which Hydra calls back for at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.compare.outcome import find_jobs, read_outcome
from experiments.compare.table import write_comparison
from experiments.lib.launch import Sweep

TABLE, STEM = "table.txt", "sweep"


def print_table(sweep: Path, metric: str | None = None) -> int:
    """Print the table of all jobs, sorted by `metric`, and return how many failed.

    The table is written to the sweep's folder with a CSV and a picture of curves.
    """
    outcomes = [read_outcome(folder, folder.name) for folder in find_jobs(sweep)]
    is_known = any(metric in outcome.numbers for outcome in outcomes)
    text, ranking = write_comparison(outcomes, metric if is_known else None, sweep, STEM, TABLE)
    print(f"\n{text}\nresults: {sweep}", flush=True)
    if not is_known and metric is not None:
        print(
            f"hydra.callbacks.table.metric={metric}: no run has it; sorted by {ranking.metric}.", flush=True
        )
    return ranking.not_finished


class SweepTable(Callback):
    """A callback that prints the table at a sweep's end. The exit code is 1 if a run failed."""

    def __init__(self, metric: str | None = None) -> None:
        self._metric = metric

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        Sweep.begun = config

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if print_table(Path(config.hydra.sweep.dir).resolve(), self._metric):
            raise SystemExit(1)  # Hydra turns a callback's Exception into a warning
