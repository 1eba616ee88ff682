"""MLflow: runs in a local store of files, or wherever an MLflow URI points."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.trackers.base import LogPosition, Row, RunInfo, flat, numbers

AT_ONCE, PARAMS_AT_ONCE, LONGEST = 1000, 100, 6000  # what the store takes in one call; of a parameter
STATES = {"ok": "FINISHED", "stopped": "KILLED"}


class MLflow:
    """One run of an experiment.

    Args:
        experiment: its name.
        store: a folder, relative to where the job was started; or a URI, such as sqlite:///runs.db.
    """

    name = "mlflow"

    def __init__(self, experiment: str, store: str):
        self._experiment, self._store = experiment, store

    def start(self, info: RunInfo) -> tuple[Mapping[str, Any], LogPosition]:
        """A new run, or the one that is known.

        The store is asked what it holds: nothing is logged twice, whenever an earlier process was killed.
        """
        # MLflow 3 keeps stores of files behind a switch, and would report its use to its makers.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        uri = self._store if "://" in self._store else Path(self._store).resolve().as_uri()
        known = dict(info.known)
        self._client = MlflowClient(tracking_uri=known.get("uri", uri))
        self._last: dict[str, int] = {}
        if known:
            self._run = known["run"]
            self._client.update_run(self._run, status="RUNNING")
            for key in self._client.get_run(self._run).data.metrics:
                history = self._client.get_metric_history(self._run, key)
                self._last[key] = max(metric.step for metric in history)
            return known, LogPosition()
        tags = {"mlflow.source.name": str(info.facts.get("command", ""))}
        git = info.facts.get("git") or {}
        if git:
            tags["mlflow.source.git.commit"] = git["revision"]
        run = self._client.create_run(self._experiment_id(), run_name=info.folder.name, tags=tags)
        self._run = run.info.run_id
        self._tell_facts(info.facts)
        return {"run": self._run, "uri": uri}, LogPosition()

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, row["step"])
            for row in rows
            for name, value in numbers(row).items()
            if row["step"] > self._last.get(name, -1)
        ]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + AT_ONCE])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        for name, value in flat({"status": status, **summary}).items():
            self._client.set_tag(self._run, f"result.{name}", str(value))
        self._client.set_terminated(self._run, STATES.get(status, "FAILED"))

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(self._experiment)
        except Exception:  # another run of a sweep has made it meanwhile
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                raise
            return found.experiment_id

    def _tell_facts(self, facts: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:LONGEST]) for name, value in flat(facts).items()]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + PARAMS_AT_ONCE])
