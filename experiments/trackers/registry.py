"""Registry: the trackers by name; a new one is a class and a row here, and a field of `TrackerConfig`."""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from experiments.cli.schema import flat
from experiments.configs.checks import TARGET
from experiments.configs.train import ConfigError, TrackerConfig
from experiments.trackers.base import Row, RunInfo, Tracker, numbers
from fnshard.errors import report

# ------------------------------------------------------------------ TensorBoard


class TensorBoard:
    """Scalars by name and step, texts and pictures. `tensorboard --logdir` of a folder of runs shows all."""

    def start(self, run: RunInfo) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._step = SummaryWriter(str(run.folder / "tensorboard")), 0
        if not run.id:
            self._text("run", json.dumps(run.facts, indent=1))
        return "tensorboard"

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._step = row["step"]
            for name, value in numbers(row).items():
                self._writer.add_scalar(name, value, self._step)
        self._writer.flush()

    def artifact(self, path: Path) -> None:
        if path.suffix == ".png":
            from matplotlib import image

            self._writer.add_image(path.stem, image.imread(path)[..., :3], self._step, dataformats="HWC")
        else:
            self._text(path.name, path.read_text(encoding="utf-8", errors="replace"))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self._text("result", json.dumps({"status": status, **summary}, indent=1))
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown shows it unchanged
        self._writer.add_text(name, indented, self._step)


# ------------------------------------------------------------------ Weights & Biases

# Output is in ranks/rank0.log, and the facts have code, packages and machine.
QUIET = {
    "silent": True, "console": "off", "disable_git": True, "save_code": False, "x_save_requirements": False,
    "x_disable_stats": True, "x_disable_machine_info": True, "symlink": False,
}  # fmt: skip


class WandB:
    """One run of `project`; a process that resumes it adds a folder of its own with the same id.

    Offline unless `WANDB_MODE` says otherwise: no login, no network, no question.
    """

    def __init__(self, project: str):
        self._project = project

    def start(self, run: RunInfo) -> str:
        import wandb

        name, folder, facts = run.id or uuid.uuid4().hex[:8], str(run.folder), dict(run.facts)
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=self._project, id=name, name=run.folder.name, dir=folder, resume="allow",
            reinit="create_new", config={**facts.pop("config", {}), "facts": facts},
            settings=wandb.Settings(mode=mode, root_dir=folder, **QUIET),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        return name

    def log(self, rows: Sequence[Row]) -> None:
        """`step` is a number among the others: a row of a held-out loss has the step of the row before."""
        for row in rows:
            self._run.log({**numbers(row), "step": row["step"]})

    def artifact(self, path: Path) -> None:
        import wandb

        if path.suffix == ".png":
            self._run.log({f"pictures/{path.stem}": wandb.Image(str(path))})
        else:
            self._run.save(str(path), base_path=str(path.parent), policy="now")

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=int(status == "failed"))


# ------------------------------------------------------------------ MLflow

LONGEST = 6000  # characters of a parameter
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
        import mlflow

        mlflow.set_tracking_uri(self._store if "://" in self._store else Path(self._store).resolve().as_uri())
        mlflow.set_experiment(self._experiment)
        if run.id:
            return mlflow.start_run(run.id).info.run_id
        git = run.facts.get("git") or {}
        tags = {"mlflow.source.git.commit": git["revision"]} if git else {}
        started = mlflow.start_run(run_name=run.folder.name, tags=tags)
        mlflow.log_params({name: str(value)[:LONGEST] for name, value in flat(run.facts)})
        return started.info.run_id

    def log(self, rows: Sequence[Row]) -> None:
        import mlflow

        for row in rows:
            mlflow.log_metrics(numbers(row), row["step"], synchronous=True)

    def artifact(self, path: Path) -> None:
        import mlflow

        mlflow.log_artifact(str(path))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        import mlflow

        mlflow.set_tags({f"result.{name}": value for name, value in flat({"status": status, **summary})})
        mlflow.end_run(STATES[status])


# ------------------------------------------------------------------ by name

# By the package's name, which is also the extra's and the field's of TrackerConfig.
TRACKERS: dict[str, Callable[[TrackerConfig], Tracker]] = {
    "tensorboard": lambda config: TensorBoard(),
    "wandb": lambda config: WandB(config.project),
    "mlflow": lambda config: MLflow(config.project, config.store),
}


def chosen(config: TrackerConfig) -> dict[str, Tracker]:
    """The trackers that a configuration names, by name."""
    own = {each[TARGET]: instantiate(each) for each in config.own}
    return {name: make(config) for name, make in TRACKERS.items() if getattr(config, name)} | own


def check_installed(config: TrackerConfig) -> None:
    """Refuse trackers whose packages are not installed, before a rank starts."""
    missing = [n for n in TRACKERS if getattr(config, n) and importlib.util.find_spec(n) is None]
    if missing:
        problems = [f"tracker={name}: the package {name} is not installed." for name in missing]
        fix = f"pip install 'fnshard[{','.join(missing)}]'; metrics.jsonl is written in any case."
        raise ConfigError(report("packages of these trackers are missing:", problems, fix))
