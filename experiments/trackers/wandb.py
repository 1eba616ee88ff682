"""Weights & Biases: offline runs in the run's folder, for `wandb sync` from where there is a network."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.trackers.base import Row, RunInfo, numbers

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
