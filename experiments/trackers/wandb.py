"""Weights & Biases: offline runs in the run's folder, for `wandb sync` from where there is a network."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.trackers.base import LogPosition, Row, RunInfo, numbers

EXIT_CODES = {"ok": 0, "stopped": 0}


class WandB:
    """One run; a process that goes on adds a folder of its own with the same id.

    Offline unless `WANDB_MODE` says otherwise: no login, no network, no question.

    Args:
        project: of wandb.
    """

    name = "wandb"

    def __init__(self, project: str):
        self._project = project

    def start(self, info: RunInfo) -> tuple[Mapping[str, Any], LogPosition]:
        """A new id, or the one that is known."""
        import wandb

        known = dict(info.known) or {"id": uuid.uuid4().hex[:8]}
        settings = wandb.Settings(
            mode=os.environ.get("WANDB_MODE", "offline"),
            silent=True,
            console="off",  # output is in ranks/rank0.log
            disable_git=True,  # the facts say it
            save_code=False,
            x_save_requirements=False,
            x_disable_stats=True,
            x_disable_machine_info=True,
            symlink=False,  # files are copied
            root_dir=str(info.folder),
        )
        facts = dict(info.facts)
        self._run = wandb.init(
            project=self._project,
            id=known["id"],
            name=info.folder.name,
            dir=str(info.folder),
            resume="allow",
            reinit="create_new",
            config={**facts.pop("config", {}), "facts": facts},
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        return known, info.at

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
        self._run.finish(exit_code=EXIT_CODES.get(status, 1))
