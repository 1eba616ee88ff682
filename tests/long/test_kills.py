"""Kill campaigns: whatever is killed at whatever moment, nothing is lost.

`KILLS=60 python -m pytest -n 0 -m long tests/long/test_kills.py` makes sixty kills of each command.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from errors import raises
from kills import (
    CODES,
    FINETUNE,
    MOMENTS,
    REWARDS,
    SIDE_BY_SIDE,
    SWEEP,
    TORCHRUN,
    TRAIN,
    Campaign,
    Variant,
    draw,
)
from runs import differences

import fnshard as fs
from experiments import ROOT
from experiments.lib.folder import CHECKPOINTS, write_result
from experiments.lib.metrics import METRICS

KILLS, SEED = int(os.environ.get("KILLS", "3")), int(os.environ.get("SEED", "1"))
REPLICAS = ("run.replicas=1", "run.max_restarts=1000")
# By name: the command, more options of it, its ranks, the steps of each of its runs.
CAMPAIGNS = {
    "sync": (TRAIN, ("run.async_save=false",), 1, 60),
    "sync-2": (TRAIN, ("run.async_save=false",), 2, 60),
    "async": (TRAIN, ("run.async_save=true",), 1, 60),
    "async-2": (TRAIN, ("run.async_save=true",), 2, 60),
    "replicas": (TRAIN, REPLICAS, 1, 60),
    "replicas-2": (TRAIN, REPLICAS, 2, 60),
    "finetune": (FINETUNE, (), 1, 40),
    "finetune-2": (FINETUNE, (), 2, 40),
    "rewards": (REWARDS, (), 1, 30),
    "rewards-2": (REWARDS, (), 2, 30),
    "sweep": (SWEEP, (), 1, 25),
    "joblib": (SIDE_BY_SIDE, (), 1, 25),
    "torchrun": (TORCHRUN, (), 2, 60),
}


@pytest.mark.long
@pytest.mark.timeout(100 * KILLS + 600)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_nothing_is_lost(name: str, model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    """Checkpoints are whole, no committed step is lost, what is finished is left alone, and runs end as the
    unbroken one, bit for bit."""
    variant, more, ranks, steps = CAMPAIGNS[name]
    shutil.copytree(ROOT / "experiments", tmp_path / "text", ignore=shutil.ignore_patterns("__pycache__"))
    options = [f"mesh.shard={ranks}", f"run.steps={steps}", *more, *given(variant, tmp_path, model, data)]
    both = ranks if variant is not SIDE_BY_SIDE else 2  # a rank of each of two runs
    campaign = Campaign(tmp_path, variant, options, draw(f"{SEED} {name}", both), KILLS)
    campaign.run()
    print(f"{name}: {campaign}")
    assert campaign.problems == []
    assert len(campaign.done) == KILLS
    if more is REPLICAS:
        assert (campaign.made_again or KILLS < 3) and max(campaign.made_again, default=0) <= 1


def given(variant: Variant, folder: Path, model: Path, data: dict[str, Path]) -> list[str]:
    """Return the arguments that name what a command reads."""
    if variant in (FINETUNE, REWARDS):
        return [f"model={model}", f"data.train={data['samples']}"]
    return [f"data.root={folder / 'text'}"]


def test_kills_are_drawn_from_the_seed() -> None:
    first, again = (list(islice(draw(0, 4), 200)) for _ in range(2))
    assert first == again != list(islice(draw(1, 4), 200))
    assert {k.mode for k in first} == set(CODES) and {k.moment for k in first} == set(MOMENTS)
    assert {k.rank for k in first} == {0, 1, 2, 3}


def leave_run(
    folder: Path, *, loss: float = 1.0, weight: float = 1.0, step: int = 2, loader: int = 2
) -> Path:
    """Write what a run of two steps leaves."""
    folder.mkdir()
    rows = [{"step": 1, "loss": 2.0, "seconds": torch.rand(()).item()}, {"step": 2, "loss": loss}]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_result(folder, status="ok", overrides=[], loss=loss)
    params = {"w": torch.full((3,), weight)}
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    made = fs.shard_step(
        lambda p, x: (p["w"] * x).sum(), specs, optimizer=fs.optim.adamw(0.1), backend="eager"
    )
    state = made.init(params).replace(step=torch.tensor(step))
    fs.checkpoint.save(folder / CHECKPOINTS / "2", state, data={"step": loader})
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, r"^$"),
        ({"loss": 1.0 + 2**-52}, r"^metrics differ from row 1 on.*; results differ"),
        ({"weight": 1.0 + 2**-23}, r"^params/w differs$"),
        ({"loader": 3}, r"^data differs$"),
        ({"step": 3}, r"^step differs$"),
    ],
)
def test_the_last_bit_is_seen(tmp_path, changed, message):
    found = differences(leave_run(tmp_path / "a"), leave_run(tmp_path / "b", **changed))
    assert re.search(message, "; ".join(found), re.DOTALL)


def test_a_missing_row_and_a_repeated_one_are_seen(tmp_path):
    unbroken, broken = leave_run(tmp_path / "a"), leave_run(tmp_path / "b")
    lines = (broken / METRICS).read_text().splitlines(keepends=True)
    for wrong in (lines[:1], [*lines, lines[-1]], lines[::-1]):
        (broken / METRICS).write_text("".join(wrong))
        assert differences(unbroken, broken)[0].startswith("metrics differ")


def test_an_unreadable_checkpoint_is_an_error(tmp_path):
    unbroken = leave_run(tmp_path / "a")
    broken = Path(shutil.copytree(unbroken, tmp_path / "b"))
    (data,) = broken.glob(f"{CHECKPOINTS}/2/*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with raises(fs.errors.CheckpointError, leaves=str(broken)):
        differences(unbroken, broken)
