"""The main job in small: its overrides, its composed configuration, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from experiments.cli import schema
from experiments.configs import train as configs
from experiments.training.metrics_file import METRICS
from experiments.training.result import write_result

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "model.width=16",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.context=32",
    "data.held_out_rows=8",
    f"data.root={ROOT / 'experiments'}",
    "run.backend=eager",
    "run.device=cpu",
    "run.sample_tokens=5",
)


def compose(*overrides: str) -> configs.TrainConfig:
    schema.register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        composed = hydra.compose("train", overrides=list(overrides))
    return schema.build(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def leave_run(folder: Path, *overrides: str, status: str = "ok", steps: int = 4, **numbers: Any) -> Path:
    """What a run leaves, as far as a comparison reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": n, "loss": 5.0 - 0.1 * n, "tokens_per_s": 10.0} for n in range(1, steps + 1)]
    rows.append({"step": steps, "held_out_loss": numbers.get("held_out_loss", 9.0)})
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows if steps))
    job = {"config": {"run": {"steps": 40}}, "overrides": list(overrides)}
    (folder / "job.json").write_text(json.dumps(job))
    if status != "unfinished":
        write_result(folder, status=status, overrides=list(overrides), **numbers)
    return folder
