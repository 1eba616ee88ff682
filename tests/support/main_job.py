"""The main job in small: its overrides, its composed configuration, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
from omegaconf import OmegaConf

from experiments.cli import schema
from experiments.configs import train as configs

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "model.width=16",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.context=32",
    "data.held_out_rows=8",
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
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
