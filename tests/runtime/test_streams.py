"""On a GPU's streams nothing is read or written before what it depends on."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
from emulated import Waits, on_gpu, put_on_gpu
from streams import COMPUTE, Log, Nccl, cuda_mesh, gpu, read_state
from tiered import PRESETS, TIERS
from torch import Tensor

import fnshard as fs
from fnshard.compiler.schedule.instructions import OverlappedUpdate
from fnshard.compiler.schedule.passes import defaults
from fnshard.runtime.collectives.base import Group
from fnshard.runtime.executor.scalars import Scalars, Summary
from fnshard.step import runner

STEPS = 3
BLOCKS, WIDTH = 2, 8
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


def run(case: Mapping[str, Any], rank: int = 0, log: Log | None = None) -> tuple[Log, Nccl, list[float]]:
    """Make some steps of one rank. With `Waits` as the log its tensors are on `cuda:3`."""
    case, log = dict(case), log or Log()
    nccl, emulated = Nccl(log, rank), isinstance(log, Waits)
    axes, preset, policy = case.pop("axes"), case.pop("preset"), case.pop("policy", {})
    optimizer = case.pop("optimizer", ADAMW)
    mesh, leaves, losses = cuda_mesh(**axes), params(), []
    with gpu(log, nccl):
        specs = fs.presets.PRESETS[preset](leaves, mesh, **policy)
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager", **case)
        draw = torch.Generator().manual_seed(1)
        batches = [torch.randn(4, WIDTH, generator=draw) for _ in range(STEPS)]
        lowered = step.lower(leaves, batches[0])
        if emulated:  # now: for a gradient autograd asks CUDA's driver
            put_on_gpu(lowered)
        with on_gpu(log) if emulated else nullcontext():
            with log.watching():
                state = step.init(leaves)
            for batch in batches:
                log.begin_step()
                with log.watching():
                    state, metrics = step(state, batch)
                losses.append(metrics["loss"])
                if not emulated:
                    read_state(log, state, specs)
            log.begin_step()
            return log, nccl, [value.tolist() for value in losses]


# ------------------------------------------------------------------ streams
def cases() -> dict[str, dict[str, Any]]:
    """Return every preset on every tier but disk, with the other features in turn."""
    tiers = {"device": {}} | {n: t for n, t in TIERS.items() if "disk" not in t.values()}
    turns = {
        "remat": cycle(("none", "offload", "unit", "unit+offload", 0.5)),
        "accumulating": cycle(
            (
                {},
                {"accumulate": 2},
                {},
                {"accumulate": 2, "accumulate_mode": "local"},
                {"accumulate": 2, "micro_order": "breadth"},
            )
        ),
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
    out["overlapped"] = {"axes": {"shard": 1}, "preset": "full_shard"}
    return out


CASES = cases()


@pytest.mark.suite({
    "full_shard-device": "gathers and reductions",
    "full_shard-streamed_all": "leaves that come and go",
    "full_shard-all_host": "updates on the host",
    "shard_grad_op-streamed": "leaves that stay gathered",
    "no_shard-all_host": "reductions alone",
    "tensor": "exchanges of a compute axis",
    "overlapped": "reductions that are waited for late",
})  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_every_access_comes_after_what_it_depends_on(name: str) -> None:
    assert run(CASES[name])[0].errors == []


# Those that another one may stand for: a stream does its work in order, so that a wait for what it does later
# is a wait for this; a copy waits for all that was launched, not for what it reads; and before anything is
# read after a step, the step has waited for all that it moved.
COVERED = {"Transfer.wait", "Transfers._copy", "Transfers.take", "Transfers.join", "Transfers.finish",
           "bind.<locals>.run"}  # fmt: skip
MOVING = [n for n in CASES if n.startswith(("full_shard", "zero1")) and "device" not in n]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("full_shard-device", marks=pytest.mark.long),
        "overlapped",
        *(pytest.param(n, marks=[pytest.mark.long, pytest.mark.timeout(900)]) for n in MOVING),
    ],
)
def test_no_wait_can_be_left_out(name: str) -> None:
    """Each wait of the second step that orders something is needed, but for some in `COVERED`."""
    log = run(CASES[name])[0]
    second = set(log.syncs[log.steps[1].syncs : log.steps[2].syncs])
    dropped = [sync for sync in log.needed if sync in second]
    missed = [sync for sync in dropped if not run(CASES[name], log=Log(sync))[0].errors]
    assert {by for _, by, _ in missed} <= (COVERED if name in MOVING else set())
    assert len(dropped) > 3 and len(missed) < len(dropped) / 3


def test_a_step_that_fails_leaves_no_update_under_way() -> None:
    log = Log()

    def fail(*_: Any) -> Any:
        raise RuntimeError("lost")

    patched = mock.patch.object(OverlappedUpdate, "bind_wait", lambda *_: fail)
    with patched, pytest.raises(RuntimeError, match=r"^lost"):
        run(CASES["overlapped"], log=log)
    gc.collect()
    log.launch(COMPUTE, "whatever comes next", [], [torch.empty(1)])
    assert log.errors == []


def test_overlapped_updates_are_those_of_one_stream() -> None:
    log, _, losses = run(CASES["overlapped"])
    with mock.patch.object(defaults, "overlap_updates", lambda schedule, depth: schedule):
        alone, _, expected = run(CASES["overlapped"])
    assert losses == expected and len(log.syncs) > len(alone.syncs)


# ------------------------------------------------------------------ the host
def find_waits(name: str) -> set[str]:
    """Return for what the host waits in the second step and the third, of rank 3 of 8."""
    case, waits = dict(CASES[name]), Waits()
    case["axes"] = {**case["axes"], "shard": 8 // len(case["axes"])}
    losses = run(case, 3)[2]
    assert run(case, 3, waits)[2] == losses
    return set(waits.errors[waits.steps[1].errors : waits.steps[STEPS].errors])


@pytest.mark.suite({
    "full_shard-streamed": "copies there and back",
    "full_shard-optimizer_host": "an update on the host",
    "hybrid_shard-device": "two axes",
    "zero2-device": "gradients that are kept",
    "tensor": "exchanges",
})  # fmt: skip
@pytest.mark.parametrize("name", [n for n in CASES if "full_shard" in n or "device" in n] + ["tensor"])
def test_the_host_waits_for_nothing(name: str) -> None:
    """No value of `cuda:3` is read, no copy blocks or is of pageable memory, and nothing is on the CPU.

    A step that moves values between device and host waits for them at its end. The first step compares
    replicas.
    """
    moves = CASES[name].get("policy", {}).keys() & {"memory", "optimizer_memory"}
    moves = moves or "offload" in str(CASES[name].get("remat"))
    ends = {"Transfers.join waits", "Transfers.finish waits", "bind.<locals>.run waits"}
    assert find_waits(name) <= (ends if moves else set())


def test_waits_of_the_host_are_found() -> None:
    def read(scalars: Scalars, vector: Tensor) -> Summary:
        vector.sum().item()
        return unpack(scalars, vector)

    unpack, plain = Scalars.unpack, lambda value, device: value.to(device)
    with mock.patch.object(runner, "copy_to_device", plain), mock.patch.object(Scalars, "unpack", read):
        found = find_waits("full_shard-device")
    copies = {"aten::_to_copy is blocking", "aten::_to_copy of pageable memory"}
    assert found == {"aten::_local_scalar_dense reads a value", *copies}


# ------------------------------------------------------------------ communicators
OF_EIGHT = {
    "shard": {"axes": {"shard": 8}, "preset": "full_shard"},
    "hybrid": {"axes": {"replicate": 2, "shard": 4}, "preset": "hybrid_shard", "optimizer": CLIPPED},
    "zero1": {"axes": {"shard": 8}, "preset": "zero1", "accumulate": 2},
    "tensor": {"axes": {"shard": 4, "tensor": 2}, "preset": "full_shard", "policy": {"tensor": SPLIT}},
}


def logs_differ(name: str, packs: int | None = None) -> bool:
    """Return whether eight ranks do not make the same groups, and issue the same collectives in one order.

    Args:
        packs: a rank that packs what the others reduce where it lies.
    """
    logs = []
    for rank in range(8):
        fault = mock.patch.object(Group, "reduce_leaves", lambda *_: None)
        with fault if rank == packs else nullcontext():
            nccl = run(OF_EIGHT[name], rank)[1]
        logs.append((nccl.made, nccl.issued))
    assert len(logs[0][1]) > 10
    return any(log != logs[0] for log in logs)


@pytest.mark.long  # the test below has axes, too
@pytest.mark.parametrize("name", OF_EIGHT)
def test_ranks_make_and_use_communicators_alike(name: str) -> None:
    """Ranks issue the same collectives on each communicator, in one order, with equal dtypes and sizes."""
    assert not logs_differ(name)


def test_a_rank_that_goes_its_own_way_is_found() -> None:
    assert logs_differ("shard", packs=5)
