"""Real runs of DeepSpeed's ZeRO go on here, where its package is installed."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trained import LR, STEPS, loss_of, make_model, rows_of, step_here

import fnshard as fs

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]


def run_zero(rank: int, folder: str, stage: int) -> tuple[list[float], list[float]]:
    """Make three steps of ZeRO and its checkpoint, and three more of it and of a step here that reads it."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    import deepspeed

    # A C++ extension that gloo does without; `deepspeed.comm.torch` itself is torch.
    import_module("deepspeed.comm.torch").build_shm_op = lambda *_: None
    deepspeed.init_distributed(dist_backend="gloo")
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0,  # which is 1.0 if nobody says it
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    theirs = []
    for number in range(2 * STEPS):
        if number == STEPS:
            engine.save_checkpoint(folder)
        x, y = rows_of(number, rank)
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        theirs.append(float(mean) / dist.get_world_size())

    step = step_here(fs.make_mesh(shard=2, device="cpu"))
    state, here = fs.checkpoint.load_deepspeed(folder, step), []
    assert int(state.step) == STEPS
    for number in range(STEPS, 2 * STEPS):
        state, metrics = step(state, *rows_of(number, rank))
        here.append(metrics.numbers()["loss"])
    return theirs[STEPS:], here


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_zero_goes_on_here(ranks: Any, tmp_path: Path, stage: int) -> None:
    for theirs, here in ranks(2).run(run_zero, str(tmp_path), stage):
        assert here == pytest.approx(theirs, rel=1e-6)
    # Two ranks' folder in a process of one.
    alone = fs.checkpoint.load_deepspeed(tmp_path, step_here(fs.make_mesh(shard=1)))
    assert int(alone.step) == STEPS
