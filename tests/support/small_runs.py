"""A run of thirteen small steps in this process; how it is stopped or killed, and its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from main_job import SMALL, compose

import fnshard as fs
from experiments.configs.train import TrainConfig
from experiments.training import loop, steps
from experiments.training.metrics_file import METRICS
from experiments.training.resume import (
    CHECKPOINTS,
    RunFolder,
    identity_of,
)
from fnshard.launcher.rank import Stop

ROOT = Path(__file__).resolve().parents[2]
STEPS = 13
RUN = (*SMALL, f"run.steps={STEPS}", "run.save_every=4", "run.held_out_every=4",
       "run.timeout_s=60", "run.sample_tokens=2")  # fmt: skip


def config_of(*overrides: str) -> TrainConfig:
    """Small, on one rank where nobody says otherwise."""
    return compose(*RUN, "mesh.shard=1", *overrides)


def run_in(folder: Path) -> RunFolder:
    folder.mkdir(parents=True, exist_ok=True)
    return RunFolder(str(folder))


class After(Stop):
    """A notice that comes before the `n`th step of this process."""

    def __init__(self, n: int):
        self.left = n

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left <= 0

    @asked.setter
    def asked(self, _: bool) -> None:
        pass


class KilledError(Exception):
    """Stands for a SIGKILL: nothing is done any more."""


def killed_at(monkeypatch: pytest.MonkeyPatch, number: int, *, before_save: bool = False) -> None:
    """Training ends without another word in step `number`; or after it, before it is saved."""
    step, save = steps.one_step, loop.Saver.save

    def stepped(*args: Any) -> Any:
        if args[2] == number and not before_save:
            raise KilledError
        return step(*args)

    def saved(self: Any, at: int, *args: Any) -> None:
        if at == number and before_save:
            raise KilledError
        save(self, at, *args)

    monkeypatch.setattr(steps, "one_step", stepped)
    monkeypatch.setattr(loop.Saver, "save", saved)


@pytest.fixture(scope="module")
def lowered_once() -> Iterator[None]:
    """Steps of equal runs are lowered once in this process, and losses are not drawn."""
    with remembered_setups({}):
        yield


@contextmanager
def remembered_setups(known: dict[str, loop.TrainSetup]) -> Iterator[None]:
    """Equal configurations are prepared once; `known` keeps what was, on a rank of a pool from run to run."""
    prepare = loop.prepare

    def prepared(config: TrainConfig) -> loop.TrainSetup:
        key = json.dumps(identity_of(config))
        known[key] = known.get(key) or prepare(config)
        return replace(known[key], config=config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare", prepared)
        patch.setattr(loop, "plot_losses", lambda *_, **__: None)
        yield


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def leave_checkpoint(folder: Path, number: int = 4) -> None:
    """A checkpoint of something, whole."""
    specs = fs.match_specs({"w": torch.ones(2)}, [("*", fs.LayoutSpec())])
    params = {"w": torch.ones(2)}
    step = fs.shard_step(lambda p, x: (p["w"] * x).sum(), specs, optimizer=fs.optim.sgd(0.1), backend="eager")
    fs.checkpoint.save(folder / CHECKPOINTS / str(number), step.init(params))
