"""On a GPU's streams nothing is read or written before what it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
import torch
from streams import Log, Nccl, Sync, Watched, cuda_mesh, gpu, read_state
from tiered import PRESETS, TIERS
from torch import Tensor

import fnshard as fs

STEPS = 3
BLOCKS, WIDTH = 3, 8
ADAMW = fs.optim.adamw(1e-2, weight_decay=0.1)
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), ADAMW)
BF16 = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16, "optimizer_dtype": torch.float32}


def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    for i in range(BLOCKS):
        x = x.to(params[f"layers.{i}.up"].dtype)
        x = torch.tanh(x @ params[f"layers.{i}.up"]) @ params[f"layers.{i}.down"] + params[f"layers.{i}.bias"]
    return (x @ params["head"]).float().square().mean()


def params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "bias": (WIDTH,)}
    out = {f"layers.{i}.{n}": torch.randn(s, generator=draw) / 4 for i in range(BLOCKS)
           for n, s in shapes.items()}  # fmt: skip
    return out | {"head": torch.randn(WIDTH, 5, generator=draw)}  # which a shard axis of 2 or 4 pads or not


SPLIT = {f"layers.{i}.{n}": p for i in range(BLOCKS)
         for n, p in (("up", fs.P(None, "tensor")), ("down", fs.P("tensor")))}  # fmt: skip


def run(case: Mapping[str, Any], rank: int = 0, dropped: Sync | None = None) -> tuple[Log, Nccl]:
    """Some steps of one rank."""
    case, log = dict(case), Log(dropped)
    nccl = Nccl(log, rank)
    axes, preset, policy = case.pop("axes"), case.pop("preset"), case.pop("policy", {})
    optimizer = case.pop("optimizer", ADAMW)
    mesh, leaves = cuda_mesh(**axes), params()
    with gpu(log, nccl):
        specs = fs.presets.PRESETS[preset](leaves, mesh, **policy)
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager", **case)
        state, draw = step.init(leaves), torch.Generator().manual_seed(1)
        for number in range(STEPS):
            batch = torch.randn(4, WIDTH, generator=draw)
            with Watched(log) if number else nullcontext():  # the first one is lowered, too
                state, metrics = step(state, batch)
                metrics["loss"].item()
                read_state(log, state, specs)
    return log, nccl


# ------------------------------------------------------------------ streams
def cases() -> dict[str, dict[str, Any]]:
    """Every preset on every tier but disk, and the other features in turn."""
    tiers = {"device": {}} | {n: t for n, t in TIERS.items() if "disk" not in t.values()}
    turns = {
        "remat": cycle(("none", "offload", "unit", "unit+offload", 0.5)),
        "accumulating": cycle(({}, {"accumulate": 2}, {}, {"accumulate": 2, "accumulate_mode": "local"})),
        "optimizer": cycle((ADAMW, CLIPPED, CLIPPED)),
        "depth": cycle(({}, {"prefetch": 2, "overlap": 2}, {"prefetch": 0, "overlap": 0})),
        "dtypes": cycle(({}, BF16)),
    }
    out = {}
    for preset in PRESETS:
        for tier, policy in tiers.items():
            now = {name: next(turn) for name, turn in turns.items()}
            axes = {"replicate": 2, "shard": 2} if preset == "hybrid_shard" else {"shard": 2}
            out[f"{preset}-{tier}"] = {
                "axes": axes, "preset": preset, "policy": policy | now["dtypes"], "remat": now["remat"],
                "optimizer": now["optimizer"], **now["accumulating"], **now["depth"],
            }  # fmt: skip
    out["tensor"] = {"axes": {"shard": 2, "tensor": 2}, "preset": "full_shard", "policy": {"tensor": SPLIT}}
    return out


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_every_access_comes_after_what_it_depends_on(name: str) -> None:
    log, _ = run(CASES[name])
    assert log.errors == []


def test_no_wait_for_a_collective_can_be_left_out() -> None:
    """But for one a step at most."""
    case = CASES["full_shard-device"]
    waits = [sync for sync in run(case)[0].syncs if sync[1] == "Work.wait"]
    waits = waits[len(waits) // STEPS :]  # the first step is not watched
    needless = [sync for sync in waits if not run(case, dropped=sync)[0].errors]
    assert len(waits) > 20 and len(needless) <= STEPS - 1


# ------------------------------------------------------------------ communicators
OF_EIGHT = {
    "shard": {"axes": {"shard": 8}, "preset": "full_shard"},
    "hybrid": {"axes": {"replicate": 2, "shard": 4}, "preset": "hybrid_shard", "optimizer": CLIPPED},
    "zero1": {"axes": {"shard": 8}, "preset": "zero1", "accumulate": 2},
    "tensor": {"axes": {"shard": 4, "tensor": 2}, "preset": "full_shard", "policy": {"tensor": SPLIT}},
}


@pytest.mark.parametrize("name", OF_EIGHT)
def test_ranks_make_and_use_communicators_alike(name: str) -> None:
    """All ranks make the same groups, and issue the same collectives of the same sizes, in one order."""
    ranks = [run(OF_EIGHT[name], rank)[1] for rank in range(8)]
    assert all(rank.made == ranks[0].made for rank in ranks)
    assert all([call[1:] for call in rank.issued] == [call[1:] for call in ranks[0].issued] for rank in ranks)
    assert len(ranks[0].issued) > 10
