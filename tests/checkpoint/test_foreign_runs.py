"""Real runs of FSDP2 and DDP on two ranks go on here with the losses that they would have had, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trained import LR, STEPS, loss_of, make_model, rows_of, step_here

import fnshard as fs


def train_theirs(model: nn.Module, optimizer: Any, rank: int, first: int) -> list[float]:
    """Train some steps of the rank's own rows; the losses are means over all ranks."""
    losses = []
    for step in range(first, first + STEPS):
        x, y = rows_of(step, rank)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def train_here(step: Any, state: Any, rank: int, first: int) -> tuple[Any, list[float]]:
    losses = []
    for number in range(first, first + STEPS):
        state, metrics = step(state, *rows_of(number, rank))
        losses.append(metrics.numbers()["loss"])
    return state, losses


def save_theirs(path: str, model: nn.Module, optimizer: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)


def load_theirs(path: str, model: nn.Module, optimizer: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    tree = {"model": weights, "optim": moments}
    dcp.load(tree, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])


def shard_by_torch() -> tuple[nn.Module, Any]:
    model = make_model()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def go_on_from_fsdp2(rank: int, folder: str) -> dict[str, Any]:
    """Make three steps of FSDP2, three more of it and of every layout here, and three more of both."""
    model, optimizer = shard_by_torch()
    train_theirs(model, optimizer, rank, 0)
    save_theirs(f"{folder}/theirs", model, optimizer)
    out: dict[str, Any] = {"theirs": train_theirs(model, optimizer, rank, 3), "here": {}}
    for preset, axis in {"full_shard": "shard", "zero1": "shard", "no_shard": "replicate"}.items():
        step = step_here(fs.make_mesh(**{axis: 2}, device="cpu"), preset)
        state = fs.checkpoint.load_dcp(f"{folder}/theirs", step)
        assert int(state.step) == 3
        state, out["here"][preset] = train_here(step, state, rank, 3)
        hyper = {"lr": LR} if preset == "full_shard" else None
        fs.checkpoint.save_dcp(f"{folder}/{preset}", state, optimizer=hyper)
    _, out["here again"] = train_here(step, state, rank, 6)
    fresh, anew = shard_by_torch()
    anew.param_groups[0]["lr"] = 7.0  # the saved one comes in its place
    load_theirs(f"{folder}/full_shard", fresh, anew)
    out["back"] = train_theirs(fresh, anew, rank, 6)
    return out


@pytest.mark.long  # test_foreign reads and writes what FSDP2 does
def test_a_run_of_fsdp2_goes_on_here_and_back(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(go_on_from_fsdp2, str(tmp_path)):
        for losses in found["here"].values():
            assert losses == pytest.approx(found["theirs"], abs=1e-6)
        assert found["back"] == pytest.approx(found["here again"], abs=1e-6)
    # Two ranks' folders of both kinds in a process of one.
    alone = step_here(fs.make_mesh(shard=1))
    first = fs.checkpoint.load_dcp(tmp_path / "full_shard", alone)
    second = fs.checkpoint.load_dcp(tmp_path / "no_shard", alone)
    assert int(first.step) == 6 and first.params["0.weight"].abs().sum() > 0
    for path, leaf in first.params.items():
        torch.testing.assert_close(leaf, second.params[path], rtol=0, atol=1e-6)


def go_on_from_ddp(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """Make three steps of DDP, save it as people do, and make three more of it and here."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    train_theirs(model, optimizer, rank, 0)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/ddp.pt")
    dist.barrier()
    theirs = train_theirs(model, optimizer, rank, 3)
    step = step_here(fs.make_mesh(shard=2, device="cpu"))
    return theirs, train_here(step, fs.checkpoint.load_torch(f"{folder}/ddp.pt", step), rank, 3)[1]


def test_a_run_of_ddp_goes_on_here(ranks: Any, tmp_path: Path) -> None:
    for theirs, here in ranks(2).run(go_on_from_ddp, str(tmp_path)):
        assert here == pytest.approx(theirs, abs=1e-6)
