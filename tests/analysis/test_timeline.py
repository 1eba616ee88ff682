"""The simulated run: lanes, waits, what is exposed, FLOPs; properties over plans and hardware."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import chain, llama, lower, rows, run_chain

import fnshard as fs
from fnshard import Hardware
from fnshard.analysis.hardware import COLLECTIVES, Curve, Link
from fnshard.analysis.timeline import SLOWDOWN, HardwarePricer, Timeline
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    COMPUTE,
    OPTIMIZER,
    TRANSFER,
    Run,
    ToHost,
    Update,
    Wait,
)
from fnshard.step.lowered import Lowered

H100 = Hardware.named("h100")
BLOCKS, WIDTH = 3, 16


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


@functools.cache
def lower_chain(
    preset: str, ranks: int, accumulate: int = 1, prefetch: int = 1, remat: Any = "none",
    tier: str = "device", device: str = "cpu",
) -> Lowered:  # fmt: skip
    policy = (
        {"optimizer_memory": tier} if tier != "stored" else {"memory": "host", "optimizer_memory": "host"}
    )
    more = {"accumulate": accumulate, "prefetch": prefetch, "remat": remat, "policy": policy}
    axes = {"replicate": 2, "shard": ranks} if preset == "hybrid_shard" else {"shard": ranks}
    return lower(loss, chain(BLOCKS, WIDTH), rows(WIDTH), ranks=axes, preset=preset, device=device, **more)


plans = st.builds(
    lower_chain,
    st.sampled_from(["full_shard", "shard_grad_op", "zero2", "zero1", "no_shard", "hybrid_shard"]),
    st.sampled_from([1, 2, 8, 16]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from(["none", "unit", "offload"]),
    st.sampled_from(["device", "host", "stored", "disk"]),
    st.sampled_from(["cpu", "cuda"]),
)


@st.composite
def machines(draw: Any) -> Hardware:
    """Draw anything from all-compute to all-communication, overlapping or not."""
    rate = st.floats(1e4, 1e12)
    base = H100 if draw(st.booleans()) else Hardware.named("cpu")
    return replace(
        base,
        flops={"f32": Curve.flat(draw(rate))},
        memory=Curve.flat(draw(rate)),
        copy=Curve.flat(draw(rate)),
        node=Link.even(draw(st.floats(0, 1e-3)), draw(rate)),
        network=Link.even(draw(st.floats(0, 1e-3)), draw(rate)),
        host_link_bytes_per_s=draw(rate),
        host_update_bytes_per_s=draw(rate),
    )


@settings(deadline=None, max_examples=20)
@given(plans, machines())
def test_a_lane_does_one_thing_at_a_time(low: Lowered, hardware: Hardware) -> None:
    got = low.timeline(hardware)
    for lane in {(s.lane, s.communicator) for s in got.spans}:
        spans = [s for s in got.spans if (s.lane, s.communicator) == lane]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
        assert bool(lane[1]) == (lane[0] == COMMUNICATION and hardware.overlap)
    assert all(got.step_seconds >= seconds * (1 - 1e-9) for seconds in got.busy_seconds.values())
    assert all(0 <= s.start <= s.end <= got.step_seconds * (1 + 1e-9) for s in got.spans)


@settings(deadline=None, max_examples=20)
@given(plans, machines())
def test_nothing_computes_behind_a_wait_before_its_flight_has_landed(
    low: Lowered, hardware: Hardware
) -> None:
    got, flights = low.timeline(hardware), {}
    ends = {s.index: s.end for s in got.spans if s.lane in (COMMUNICATION, TRANSFER)}
    for index, line in enumerate(low.schedule.instructions):
        flights |= {n: index for n in line.writes if n.startswith("~")}
        if isinstance(line, Wait) and flights[line.reads[0]] in ends:
            landed = ends[flights[line.reads[0]]]
            if line.of.verb == "to_device" and line.writes[0].startswith(
                "s:"
            ):  # by the worker, for the next step
                assert got.step_seconds >= landed - 1e-12
                continue
            readers = [i for i, other in enumerate(low.schedule.instructions)
                       if i > index and set(other.reads) & set(line.writes)]  # fmt: skip
            later = [s.start for s in got.spans
                     if s.index >= index and (s.lane == COMPUTE or s.index in readers)]  # fmt: skip
            assert min(later, default=landed) >= landed - 1e-12


@settings(deadline=None, max_examples=20)
@given(plans, machines())
def test_a_step_is_no_shorter_than_its_critical_path(low: Lowered, hardware: Hardware) -> None:
    """The longest chain of lines in which each reads what the one before made, lanes and host aside."""
    pricer, done = HardwarePricer(low.schedule, hardware, low.sizes, fused=False), {}
    for line in low.schedule.instructions:
        price = line.price(pricer)
        end = (
            max((done.get(n, 0.0) for n in line.reads), default=0.0)
            + price.device_seconds
            + price.flight_seconds
        )
        done |= dict.fromkeys(line.writes, end)
    assert low.timeline(hardware).step_seconds >= max(done.values()) * (1 - 1e-9)


@settings(deadline=None, max_examples=20)
@given(plans, machines(), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(low: Lowered, hardware: Hardware, factor: float) -> None:
    def faster(link: Link) -> Link:
        curves = (getattr(link, name) for name in COLLECTIVES)
        return Link(
            link.latency_seconds, *(Curve(tuple((s, r * factor) for s, r in c.points)) for c in curves)
        )

    better = replace(
        hardware,
        node=faster(hardware.node),
        network=faster(hardware.network),
        host_link_bytes_per_s=hardware.host_link_bytes_per_s * factor,
    )
    assert low.timeline(better).step_seconds <= low.timeline(hardware).step_seconds * (1 + 1e-9)


# ------------------------------------------------------------------ by hand


def test_slow_links_are_exposed_and_fast_compute_does_not_help() -> None:
    slow = replace(H100, node=Link.even(0, 1e3), network=Link.even(0, 1e3))
    got = lower_chain("full_shard", 2).timeline(slow)
    assert got.exposed_communication_seconds > 0.9 * got.step_seconds
    assert got.step_seconds == pytest.approx(got.busy_seconds[COMMUNICATION], rel=0.05)


def test_prefetch_hides_gathers_behind_kernels() -> None:
    """Kernels and gathers of like length: with prefetch a step is hardly longer than its kernels."""
    base = lower_chain("full_shard", 2, prefetch=0)
    runs = [i for i in base.schedule.instructions if isinstance(i, Run)]
    free = replace(H100, instruction_seconds=0.0, kernel_seconds=0.0, launch_seconds=0.0)
    pricer = HardwarePricer(base.schedule, free, base.sizes, fused=False)
    kernel = sum(r.price(pricer).device_seconds for r in runs) / len(runs)
    hardware = replace(free, node=Link.even(0, 0.5 * WIDTH * WIDTH * 4 / kernel))
    without = base.timeline(hardware).exposed_communication_seconds
    assert lower_chain("full_shard", 2).timeline(hardware).exposed_communication_seconds < 0.75 * without


def test_an_overlapped_update_costs_kernels_a_part_of_its_time() -> None:
    free = dict.fromkeys(["instruction_seconds", "kernel_seconds", "launch_seconds", "floor_seconds"], 0.0)
    hardware = replace(H100, **free, update=Curve.flat(1e15))
    in_turn, overlapped = (lower_chain("full_shard", 1, device=d).timeline(hardware) for d in ("cpu", "cuda"))
    hidden = overlapped.busy_seconds[OPTIMIZER]
    assert hidden > 0 == in_turn.busy_seconds[OPTIMIZER]
    saved = (1 - SLOWDOWN) * hidden
    assert in_turn.step_seconds - overlapped.step_seconds == pytest.approx(saved)


def test_on_one_thread_everything_is_exposed() -> None:
    got = lower_chain("full_shard", 2, tier="stored").timeline(Hardware.named("cpu"))
    assert got.exposed_communication_seconds == pytest.approx(got.busy_seconds[COMMUNICATION])
    assert got.exposed_transfer_seconds == pytest.approx(got.busy_seconds[TRANSFER])
    assert got.step_seconds == pytest.approx(sum(got.busy_seconds.values()))


def spans_of(got: Timeline, low: Lowered, kind: type) -> list[Any]:
    return [s for s in got.spans if isinstance(low.schedule.instructions[s.index], kind)]


def test_compute_waits_for_what_it_sent_and_the_step_for_what_the_host_sends() -> None:
    """Nobody runs on after the Wait of a slow copy to the host: that is what the executor does."""
    slow = replace(H100, host_link_bytes_per_s=1e5)
    for low in (lower_chain("full_shard", 2, remat="offload"), lower_chain("full_shard", 2, tier="host")):
        got = low.timeline(slow)
        assert spans_of(got, low, ToHost)
        assert got.exposed_transfer_seconds > 0.9 * got.busy_seconds[TRANSFER]


def test_an_update_on_the_host_waits_for_the_numbers_that_the_device_makes() -> None:
    """If no gradients are sent, whose norm makes all wait, the step's count is on the device too."""
    fn, params, tokens = llama(2)
    how = {"policy": {"optimizer_memory": "host"}}
    clip = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1))
    free = replace(H100, instruction_seconds=0.0, kernel_seconds=0.0, launch_seconds=0.0)
    slow = replace(free, node=Link.even(1e-2, 1e12), network=Link.even(1e-2, 1e12))
    low = lower(fn, params, tokens, ranks=2, optimizer=clip, **how)
    got, lines = low.timeline(slow), low.schedule.instructions
    (summed,) = [s.end for s in got.spans if s.verb == "reduce_scalars" and s.lane == COMMUNICATION]
    updates = [s for s in spans_of(got, low, Update) if "scalars" in lines[s.index].reads]
    assert updates and all(s.start >= summed for s in updates)
    low = lower(fn, params, tokens, ranks=2, optimizer=fs.optim.sgd(0.1), **how)
    got = low.timeline(replace(free, flops={"f32": Curve.flat(1e3)}))
    first = min(spans_of(got, low, Update), key=lambda s: s.start)
    before = [s for s in got.spans if s.lane == COMPUTE and s.index < first.index]
    assert first.start >= max(s.end for s in before)


def test_the_host_stands_still_for_the_disk() -> None:
    """The disk itself takes no time: what is sent is the same, but nothing is issued meanwhile."""
    hardware = replace(H100, instruction_seconds=0.0, kernel_seconds=0.0, launch_seconds=0.0)
    hardware = replace(hardware, host_link_bytes_per_s=1e9, disk_bytes_per_s=1e30)
    seconds = {}
    for tier in ("host", "disk"):
        low = lower(loss, chain(BLOCKS, 256), rows(256), ranks=2, policy={"memory": tier})
        got = low.timeline(hardware)
        seconds[tier] = got.step_seconds
        loads = {s.index: s.end for s in got.spans if s.verb == "to_device"}
        assert loads
        for index, end in loads.items():
            later = [s.start for s in got.spans if s.index > index]
            assert tier == "host" or min(later) >= end
    assert seconds["disk"] > seconds["host"]


@pytest.mark.long
def test_recomputation_is_hardware_flops_and_no_model_flops() -> None:
    none, unit = (lower(*llama(3), ranks=2, remat=r).timeline(H100) for r in ("none", "unit"))
    assert none.model_flops == unit.model_flops
    assert unit.hardware_flops > none.hardware_flops
    assert unit.mfu == pytest.approx(unit.model_flops / unit.step_seconds / H100.peak_flops["f32"])


@pytest.mark.long
def test_micro_batches_do_the_work_of_one_batch() -> None:
    batch = torch.zeros(4, 6, dtype=torch.int64)
    fn, params, _ = llama(2)
    one, four = (lower(fn, params, batch, ranks=2, accumulate=a).timeline(H100) for a in (1, 4))
    assert one.model_flops == four.model_flops
    assert one.tokens_per_second * one.step_seconds == pytest.approx(2 * 4 * 6)
    assert four.tokens_per_second * four.step_seconds == pytest.approx(2 * 4 * 6)


def test_tokens_of_whole_leaves_are_counted_once() -> None:
    def fn(p: Any, tokens: Any) -> Any:
        return p["w"][tokens].sum()

    low = lower(fn, {"w": torch.randn(8, 4)}, fs.Whole(torch.zeros(4, 6, dtype=torch.int64)),
                ranks=2, accumulate=2)  # fmt: skip
    got = low.timeline(H100)
    assert got.tokens_per_second * got.step_seconds == pytest.approx(2 * 4 * 6)


def test_frozen_leaves_have_no_gradient_to_compute() -> None:
    params = {"a": torch.randn(8, 8), "b": torch.randn(8, 8)}
    mesh = fs.make_mesh(shard=2, abstract=True, device="cpu")

    def fn(p: Any, x: Any) -> Any:
        return (torch.tanh(x @ p["a"]) @ p["b"]).sum()

    def flops(trainable: str) -> float:
        specs = {n: fs.LayoutSpec(fs.P("shard"), trainable=n in trainable, unit="all") for n in params}
        step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")
        return step.lower(params, torch.randn(4, 8)).timeline(H100).model_flops

    one = 2 * 4 * 8 * 8
    assert flops("ab") == 5 * one  # forward 2, two weights, one tangent: the batch needs none
    assert flops("a") == 4 * one
    assert flops("b") == 3 * one


def test_it_prints_and_is_plain() -> None:
    got = lower(*llama(2), ranks=16).timeline(H100)
    text, plain = str(got), got.as_dict()
    assert "16 x h100" in text and "exposed communication" in text and "MFU" in text
    assert "spans" not in plain and plain["step_seconds"] == got.step_seconds
    assert plain["busy_seconds"]["compute"] > 0


def test_a_time_says_between_what_it_lies_where_that_was_compared() -> None:
    time = lower_chain("full_shard", 2).timeline(H100)
    assert time.interval == tuple(time.step_seconds * share for share in H100.spread)
    low, high = (f"{seconds * 1e3:.4g}" for seconds in time.interval)
    assert f"({low} to {high})" in str(time).splitlines()[1]
    own = lower_chain("full_shard", 2).timeline("cpu")
    assert own.interval is None and "to" not in str(own).splitlines()[1]
    assert Hardware.from_dict(H100.as_dict()) == H100
