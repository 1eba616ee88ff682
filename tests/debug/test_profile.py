"""`fs.profile`: instructions as spans of a trace, read back as a timeline; planted delays are found."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import raises
from toys import chain, rows, run_chain

import fnshard as fs
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    TRANSFER,
    Gather,
    Run,
    ToHost,
    Update,
    Wait,
)
from fnshard.debug.profile import measured, span_name, table
from fnshard.errors import SpecError

PARAMS = chain(2)


def make(mesh: fs.Mesh, **policy: Any) -> Any:
    specs = fs.presets.full_shard(PARAMS, mesh, **policy)
    adamw = fs.optim.adamw(1e-3)
    return fs.shard_step(
        lambda p, x: run_chain(p, x).sum(), specs, mesh=mesh, optimizer=adamw, backend="eager"
    )


def late(fn: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(args: Any) -> Any:
        time.sleep(seconds)
        return fn(args)

    return slow


# ------------------------------------------------------------------ on two ranks


def on_two(rank: int, folder: str, slow_s: float) -> dict[str, Any]:
    """Trace three steps, in which rank 1's forward kernels are slow; return what this rank reads of it."""
    step = make(fs.make_mesh(shard=2))
    state, batch = step.init(PARAMS), rows()
    lowered = step.lower(state, batch).compile()
    if rank == 1:
        slow = {k: late(f, slow_s) for k, f in lowered.compiled.items() if k[1] is Way.FORWARD}
        lowered.compiled = lowered.compiled | slow
    losses = []
    for number in range(6):
        path = Path(folder, f"{rank}.json")
        with fs.profile.traced(step, path) if number == 2 else nullcontext():
            for _ in range(3 if number == 2 else 1):
                state, metrics = step(state, batch)
                losses.append(metrics["loss"].item())
    got = measured(path, lowered)
    lines = lowered.schedule.instructions
    return {
        "losses": losses,
        "lanes": dict(got.busy_seconds),
        "exposed": got.exposed_communication_seconds,
        "step": got.step_seconds,
        "numbers": [s.index for s in got.spans],
        "starts": [s.start for s in got.spans],
        "runs": sum(s.end - s.start for s in got.spans
                    if isinstance(lines[s.index], Run) and not lines[s.index].backward),
        "waits": sum(s.end - s.start for s in got.spans if s.lane == COMMUNICATION),  # where ranks meet
        "instructions": len(lines),
        "forwards": sum(isinstance(line, Run) and not line.backward for line in lines),
        "table": table(lowered, lowered.timeline("cpu"), got),
        "mfu": (got.mfu, measured(path, lowered, "h100").mfu),
    }  # fmt: skip


def test_what_a_trace_says_of_a_step(ranks: Any, tmp_path: Path) -> None:
    fast, slow = ranks(2).run(on_two, str(tmp_path), 0.1)
    for got in (fast, slow):
        assert got["numbers"] == list(range(got["instructions"]))  # one after another, on one thread
        assert got["starts"] == sorted(got["starts"]) and got["starts"][0] == 0
        lanes = got["lanes"]
        assert lanes[TRANSFER] == lanes[HOST] == 0 and lanes[COMMUNICATION] > 0 and lanes[COMPUTE] > 0
        # Medians of each line on its own overlap a little with those of its neighbours.
        assert 0.5 * lanes[COMMUNICATION] < got["exposed"] <= 1.001 * lanes[COMMUNICATION]
        assert lanes[COMPUTE] + lanes[COMMUNICATION] <= got["step"] * 1.2
        assert math.isnan(got["mfu"][0]) and 0 < got["mfu"][1] < 1
    planted = 0.1 * slow["forwards"]
    assert slow["runs"] > planted and fast["runs"] < planted / 2  # who is slow
    assert fast["waits"] > planted / 2 > slow["waits"]  # and who waits for it
    assert fast["losses"] == slow["losses"] and len(fast["losses"]) == 8
    words = [line.split()[0:2] for line in fast["table"].splitlines()[1:]]
    assert ["run", "forward"] in words and ["run", "backward"] in words
    kinds = {word[0] for word in words}
    assert {"step", "gather", "reduce_scatter", "reduce_scalars", "update", "exposed"} <= kinds
    assert "wait" not in kinds


def test_a_traced_step_is_the_same_step(tmp_path: Path) -> None:
    """And nothing is left of the watching after it."""
    step, seen = make(fs.make_mesh()), []

    def watch(number: int, line: Any, action: Any) -> Any:
        def run(env: Any) -> None:
            seen.append(number)
            action(env)

        return run

    state, plain = step.init(PARAMS), step.init(PARAMS)
    lines = len(step.lower(state, rows()).schedule.instructions)
    for number in range(4):
        plain, expected = step(plain, rows())
        before = len(seen)
        if number % 2:
            with step.watching(watch):
                state, got = step(state, rows())
            assert seen[before:] == list(range(lines))
        else:
            state, got = step(state, rows())
            assert len(seen) == before
        assert torch.equal(got["loss"], expected["loss"])
    assert all(torch.equal(a, b) for a, b in zip(state.params.values(), plain.params.values(), strict=True))
    with pytest.raises(ZeroDivisionError, match="division"), step.watching(watch):
        1 / 0  # noqa: B018
    before = len(seen)
    step(state, rows())
    assert len(seen) == before


# ------------------------------------------------------------------ on a device, as its traces are


def event(name: str, cat: str, ts: float, dur: float, correlation: int | None = None, **more: Any) -> Any:
    args = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": ts,
        "dur": dur,
        "pid": 1,
        "tid": 7,
        "args": args,
    } | more


def gpu_trace(lowered: Any, steps: int = 3) -> list[Any]:
    """Make a trace of steps on a GPU.

    Every instruction takes the host 10 us and launches one thing that runs 50 us later for 8 us; a gather
    runs for 100 us on a stream of its own. The middle step is 1 us an instruction later.
    """
    events, number = [], 0
    for step in range(steps):
        began = 1e6 * (step + 1)
        for index, line in enumerate(lowered.schedule.instructions):
            at = began + index * (10 + (step == 1))
            events.append(event(span_name(index, line), "user_annotation", at, 9))
            events.append(event(span_name(index, line), "gpu_user_annotation", at + 50, 9))
            if isinstance(line, Wait | Update):
                continue
            number += 1
            events.append(event("cudaLaunchKernel", "cuda_runtime", at + 2, 1, number))
            name, cat, dur = "triton_fused", "kernel", 8
            if isinstance(line, Gather):
                name, dur = "ncclDevKernel_AllGather", 100
            if isinstance(line, ToHost):
                name, cat = "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy"
            events.append(event(name, cat, at + 50, dur, number, tid=21 if isinstance(line, Gather) else 20))
    number += 1
    events.append(event("cudaLaunchKernel", "cuda_runtime", 5.0, 1, number))  # before the first step
    events.append(event("somebody_else", "kernel", 1e6 + 5, 900, number))
    number += 1
    events.append(event("cudaLaunchKernel", "cuda_runtime", 1e6 + 3, 1, number, tid=99))  # another thread's
    events.append(event("somebody_else", "kernel", 1e6 + 6, 900, number))
    return events


def test_on_a_device_what_was_launched_counts() -> None:
    step = make(fs.make_mesh(shard=4, abstract=True), optimizer_memory="host")
    lowered = step.lower(PARAMS, rows())
    lines = lowered.schedule.instructions
    got = measured({"traceEvents": gpu_trace(lowered)}, lowered, "h100")
    by = {(s.index, s.lane): s for s in got.spans}
    gathers = [i for i, line in enumerate(lines) if isinstance(line, Gather)]
    moved = [i for i, line in enumerate(lines) if isinstance(line, ToHost)]
    updates = [i for i, line in enumerate(lines) if isinstance(line, Update)]
    assert gathers and moved and updates
    for i, line in enumerate(lines):
        lane = {Gather: COMMUNICATION, ToHost: TRANSFER, Update: HOST}.get(type(line), COMPUTE)
        if isinstance(line, Wait):
            assert not any(index == i for index, _ in by)
            continue
        span = by.pop((i, lane))
        length = {Gather: 100, Update: 9}.get(type(line), 8)
        start = i * 10 + (0 if isinstance(line, Update) else 50)
        assert (span.start, span.end) == pytest.approx((start * 1e-6, (start + length) * 1e-6))
        assert (span.verb, span.unit, span.phase) == (line.verb, line.unit, line.phase)
    assert not by
    together = 100 + 10 * (gathers[-1] - gathers[0])  # each gather begins during the one before
    assert got.busy_seconds[COMMUNICATION] == pytest.approx(together * 1e-6)
    assert 0 < got.exposed_communication_seconds < got.busy_seconds[COMMUNICATION]
    assert got.mfu == pytest.approx(got.model_flops / got.step_seconds / 67e12)


def test_exposed_is_what_compute_does_not_cover() -> None:
    step = make(fs.make_mesh(shard=4, abstract=True))
    lowered = step.lower(PARAMS, rows())
    lines = list(enumerate(lowered.schedule.instructions))
    gather = next((i, line) for i, line in lines if isinstance(line, Gather))
    run = next((i, line) for i, line in lines if isinstance(line, Run))
    events = [
        event(span_name(*gather), "user_annotation", 0, 1),
        event("cudaLaunchKernel", "cuda_runtime", 0, 1, 1),
        event("ncclDevKernel", "kernel", 10, 100, 1),
        event(span_name(*run), "user_annotation", 2, 1),
        event("cudaLaunchKernel", "cuda_runtime", 2, 1, 2),
        event("gemm", "kernel", 40, 30, 2),
    ]
    got = measured({"traceEvents": events}, lowered)
    assert got.exposed_communication_seconds == pytest.approx(70e-6)
    assert got.step_seconds == pytest.approx(110e-6)


# ------------------------------------------------------------------ refused


def test_traces_of_something_else_are_refused(tmp_path: Path) -> None:
    step = make(fs.make_mesh(shard=2, abstract=True))
    lowered = step.lower(PARAMS, rows())
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", "cpu_op", 0, 1)]}))
    with raises(SpecError, leaves="this trace", fix="traced"):
        measured(path, lowered)
    foreign = {"traceEvents": [event("fnshard 0 forward layers.9 gather", "user_annotation", 0, 1)]}
    with raises(SpecError, leaves="'fnshard 0 forward layers.9 gather'", fix="lower the step"):
        measured(foreign, lowered)


def test_steps_that_broke_off_are_left_out() -> None:
    step = make(fs.make_mesh(shard=2, abstract=True))
    lowered = step.lower(PARAMS, rows())
    names = [span_name(i, line) for i, line in enumerate(lowered.schedule.instructions)]
    full = [event(name, "user_annotation", 10 * i, 9) for i, name in enumerate(names)]
    broken = [event(name, "user_annotation", 1e6 + 500 * i, 499) for i, name in enumerate(names[:3])]
    got = measured({"traceEvents": [*broken, *full]}, lowered)
    assert got.step_seconds == pytest.approx((10 * len(names) - 1) * 1e-6)
