"""The main job in small: its configuration, how it is stopped or killed, what it leaves, and whether two runs
are equal bit for bit."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fnshard as fs
from experiments import ROOT, train
from experiments.lib.compose import Command, Composed, compose_values, from_shell, open_hydra, read
from experiments.lib.config import TrainConfig
from experiments.lib.folder import CHECKPOINTS, RunFolder, identity_of, read_result, write_result
from experiments.lib.metrics import METRICS
from experiments.lib.record import VARIES
from experiments.lib.run import Run
from experiments.train import COMMAND
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


def compose(*overrides: str, spec: Command = COMMAND) -> Any:
    """Compose a command's configuration."""
    with open_hydra(spec):
        return read(spec, compose_values(spec, overrides))


def validate(command: Command, arguments: Sequence[str]) -> Any:
    """Return the configuration that a command line means; None for a sweep, and if Hydra itself answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command.name])
        found = from_shell(command, list(arguments))
    return found.config if isinstance(found, Composed) else None


def config_of(*overrides: str) -> TrainConfig:
    """Compose a small run, on one rank unless `overrides` say otherwise."""
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
    """An error that stands for a SIGKILL: nothing is done any more."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int, *, before_save: bool = False) -> None:
    """Let training end without another word in step `number`, or after it, before it is saved."""
    step, save = Run.make_step, Run.save_if_due

    def stepped(self: Run, at: int, *args: Any) -> Any:
        if at == number and not before_save:
            raise KilledError
        return step(self, at, *args)

    def saved(self: Run, at: int, *args: Any) -> None:
        if at == number and before_save:
            raise KilledError
        save(self, at, *args)

    monkeypatch.setattr(Run, "make_step", stepped)
    monkeypatch.setattr(Run, "save_if_due", saved)


@pytest.fixture(scope="module")
def lowered_once() -> Iterator[None]:
    """Lower the steps of equal runs once in this process, and draw no losses."""
    with remember_steps({}):
        yield


@contextmanager
def remember_steps(known: dict[str, list[Any]]) -> Iterator[None]:
    """Make the steps and forwards of equal configurations once.

    `known` keeps them, on a rank of a pool from run to run.
    """
    whole = train.train

    def trained(config: TrainConfig, *args: Any) -> None:
        kept = known.setdefault(json.dumps(identity_of(config)), [])
        number = itertools.count()

        def once(make: Callable[..., Any]) -> Callable[..., Any]:
            def again(*args: Any, **how: Any) -> Any:
                at = next(number)
                if at == len(kept):
                    kept.append(make(*args, **how))
                return kept[at]

            return again

        with pytest.MonkeyPatch.context() as patch:
            for name in ("shard_step", "shard_forward"):
                patch.setattr(fs, name, once(getattr(fs, name)))
            whole(config, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", trained)
        patch.setattr(train, "draw_run", lambda *_, **__: None)
        yield


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------ what runs leave


def leave_run(folder: Path, *overrides: str, status: str = "ok", steps: int = 4, **numbers: Any) -> Path:
    """Write what a run leaves and a comparison reads."""
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
    """Write a whole checkpoint of a small state."""
    specs = fs.match_specs({"w": torch.ones(2)}, [("*", fs.LayoutSpec())])
    params = {"w": torch.ones(2)}
    step = fs.shard_step(lambda p, x: (p["w"] * x).sum(), specs, optimizer=fs.optim.sgd(0.1), backend="eager")
    fs.checkpoint.save(folder / CHECKPOINTS / str(number), step.init(params))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics, up to the first line that is torn."""
    rows = []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics without what the clock says."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows_of(folder)]


def differences(unbroken: Path, broken: Path) -> list[str]:
    """Return in what two runs differ that should be equal to the bit: losses, parameters, the position."""
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
    names = sorted(a.leaves.keys() | b.leaves.keys())
    wrong += [f"{name} differs" for name in names if a.leaves.get(name) != b.leaves.get(name)]
    wrong += [f"{name} differs" for name in ("step", "seed", "data") if getattr(a, name) != getattr(b, name)]
    return wrong
