"""MLflow: runs in a local store of files, or wherever an MLflow URI points."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.cli.schema import flat
from experiments.trackers.base import Row, RunInfo, numbers

AT_ONCE, PARAMS_AT_ONCE, LONGEST = 1000, 100, 6000  # what the store takes in one call; of a parameter
STATES = {"ok": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """One run of the experiment `experiment`.

    Args:
        store: a folder, relative to where the job was started; or a URI, such as sqlite:///runs.db.
    """

    def __init__(self, experiment: str, store: str):
        self._experiment, self._store = experiment, store

    def start(self, run: RunInfo) -> str:
        # MLflow 3 needs a switch for stores of files, and would report its use to its makers.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        uri = self._store if "://" in self._store else Path(self._store).resolve().as_uri()
        self._client, self._run = MlflowClient(tracking_uri=uri), run.id
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            return run.id
        git = run.facts.get("git") or {}
        tags = {"mlflow.source.git.commit": git["revision"]} if git else {}
        created = self._client.create_run(self._experiment_id(), run_name=run.folder.name, tags=tags)
        self._run = created.info.run_id
        self._log_facts(run.facts)
        return self._run

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, v, now, row["step"]) for row in rows for name, v in numbers(row).items()]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + AT_ONCE])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        for name, value in flat({"status": status, **summary}):
            self._client.set_tag(self._run, f"result.{name}", str(value))
        self._client.set_terminated(self._run, STATES[status])

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if self._client.get_experiment_by_name(self._experiment) is None:
            with suppress(MlflowException):  # another run of a sweep makes it in the meantime
                return self._client.create_experiment(self._experiment)
        return self._client.get_experiment_by_name(self._experiment).experiment_id

    def _log_facts(self, facts: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:LONGEST]) for name, value in flat(facts)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + PARAMS_AT_ONCE])
