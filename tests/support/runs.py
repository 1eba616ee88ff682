"""The main job in small: its configuration, how it is stopped or killed, what it leaves, and whether two runs
are equal bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

import fnshard as fs
from experiments import ROOT
from experiments.cli.command_spec import CommandSpec
from experiments.configs.train import TrainConfig
from experiments.train import SPEC
from experiments.training import loop, steps
from experiments.training.metrics_file import METRICS
from experiments.training.result import read_result, write_result
from experiments.training.resume import CHECKPOINTS, RunFolder, identity_of
from experiments.training.run_record import VARIES
from fnshard.launcher.rank import Stop

STEPS = 13
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
RUN = (*SMALL, f"run.steps={STEPS}", "run.save_every=4", "run.held_out_every=4",
       "run.timeout_s=60", "run.sample_tokens=2")  # fmt: skip
DOUBLE = tuple(f"precision.{part}=float64" for part in ("storage", "compute", "reduce", "optimizer"))
TIMES = ("tokens_per_s", "seconds", *VARIES)  # what two equal runs differ in


def compose(*overrides: str, spec: CommandSpec = SPEC) -> Any:
    """A command's configuration, composed."""
    spec.register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(spec.conf)):
        return spec.read_composed(hydra.compose(spec.name, overrides=list(overrides)))


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
    step, save = steps.one_step, steps.Saver.save

    def stepped(*args: Any) -> Any:
        if args[2] == number and not before_save:
            raise KilledError
        return step(*args)

    def saved(self: Any, at: int, *args: Any) -> None:
        if at == number and before_save:
            raise KilledError
        save(self, at, *args)

    monkeypatch.setattr(steps, "one_step", stepped)
    monkeypatch.setattr(steps.Saver, "save", saved)


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
        patch.setattr(loop, "draw_run", lambda *_, **__: None)
        yield


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------ what runs leave


def leave_run(folder: Path, *overrides: str, status: str = "ok", steps: int = 4, **numbers: Any) -> Path:
    """What a run leaves, as far as a comparison reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": n, "loss": 5.0 - 0.1 * n, "tokens_per_s": 10.0} for n in range(1, steps + 1)]
    rows.append({"step": steps, "held_out_loss": numbers.get("held_out_loss", 9.0)})
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows if steps))
    (folder / "identity.json").write_text('{"run": {"steps": 40}}')
    (folder / ".hydra").mkdir(exist_ok=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    if status != "unfinished":
        write_result(folder, status=status, overrides=list(overrides), **numbers)
    return folder


def leave_checkpoint(folder: Path, number: int = 4) -> None:
    """A checkpoint of something, whole."""
    specs = fs.match_specs({"w": torch.ones(2)}, [("*", fs.LayoutSpec())])
    params = {"w": torch.ones(2)}
    step = fs.shard_step(lambda p, x: (p["w"] * x).sum(), specs, optimizer=fs.optim.sgd(0.1), backend="eager")
    fs.checkpoint.save(folder / CHECKPOINTS / str(number), step.init(params))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics; of a torn last line nothing."""
    rows = []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics without what the clock says."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows_of(folder)]


def differences(unbroken: Path, broken: Path) -> list[str]:
    """In what two runs differ that should be equal bit for bit: every loss, every parameter, the position."""
    wrong = []
    rows, others = timeless(unbroken), timeless(broken)
    if rows != others:
        pairs = enumerate(zip(rows, others, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(rows), len(others)))
        wrong.append(f"metrics differ from row {at} on: {rows[at : at + 1]} and {others[at : at + 1]}")
    results = [{k: v for k, v in read_result(f).items() if k not in TIMES} for f in (unbroken, broken)]
    if results[0] != results[1]:
        wrong.append(f"results differ: {results[0]} and {results[1]}")
    saved = [fs.checkpoint.latest(f / CHECKPOINTS) for f in (unbroken, broken)]
    a, b = (fs.checkpoint.verify(path) for path in saved)
    wrong += [f"{name} differs" for name in a.leaves if a.leaves[name] != b.leaves.get(name)]
    wrong += [f"{name} differs" for name in ("step", "seed", "data") if getattr(a, name) != getattr(b, name)]
    return wrong
