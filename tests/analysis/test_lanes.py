"""Communicators run side by side, and share the links between ranks."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from toys import chain, lower, rows, run_chain

import fnshard as fs
from fnshard import Hardware, LayoutSpec, P
from fnshard.analysis.hardware import Link
from fnshard.analysis.timeline import HardwarePricer, Span, Timeline, simulate
from fnshard.compiler.schedule.instructions import COMMUNICATION, COMPUTE, Exchange, Gather, ReduceScatter
from fnshard.plot import text
from fnshard.step.lowered import Lowered

BLOCKS, WIDTH = 4, 32
FREE = dict.fromkeys(["instruction_seconds", "kernel_seconds", "launch_seconds", "floor_seconds"], 0.0)
EVEN = replace(Hardware.named("h100"), **FREE, node=Link.even(0, 1e9), network=Link.even(0, 1e9))


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


@functools.cache
def exchanging() -> Lowered:
    """Lower a step on two axes: leaves are sharded over `outer`, and each block sums over `inner`."""
    mesh = fs.make_mesh(outer=2, inner=2, abstract=True, device="cpu")

    params = chain(BLOCKS, WIDTH)
    specs = fs.match_specs(params, [(p, LayoutSpec(P("outer"), unit=p)) for p in params])

    def summed(p: Any, x: Any) -> Any:
        return run_chain(p, x, lambda x, block: fs.psum(x, "inner")).sum()

    step = fs.shard_step(summed, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager", prefetch=1,
                         overlap=1)  # fmt: skip
    return step.lower(params, rows(WIDTH))


def flights(got: Timeline) -> list[Span]:
    return [s for s in got.spans if s.lane == COMMUNICATION]


def spans_of(got: Timeline, low: Lowered, kind: type) -> list[Span]:
    return [s for s in flights(got) if isinstance(low.schedule.instructions[s.index], kind)]


def test_an_exchange_within_a_node_does_not_wait_for_a_gather_between_nodes() -> None:
    """The next block's leaves travel for a thousand times as long as an exchange takes."""
    low = exchanging()
    got = low.timeline(replace(EVEN, ranks_per_node=2, network=Link.even(0, 1e6)))
    gathers, beside = spans_of(got, low, Gather), 0
    for exchange in (s for s in spans_of(got, low, Exchange) if s.phase == "forward"):
        sent = max(s.end for s in got.spans if s.lane == COMPUTE and s.index <= exchange.index)
        assert exchange.start == pytest.approx(sent, abs=1e-12)
        beside += any(g.start <= exchange.start and exchange.end < g.end for g in gathers)
    assert beside >= BLOCKS - 1


@pytest.mark.parametrize("ranks_per_node", [1, 4], ids=["between nodes", "in one node"])
def test_flights_of_one_link_wait_for_one_another(ranks_per_node: int) -> None:
    low = exchanging()
    slow = replace(EVEN, ranks_per_node=ranks_per_node, node=Link.even(0, 1e7), network=Link.even(0, 1e7))
    spans = sorted(flights(low.timeline(slow)), key=lambda s: s.start)
    assert len({s.communicator for s in spans}) >= 3
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
    queued = [(a, b) for a, b in itertools.pairwise(spans) if a.end == pytest.approx(b.start, abs=1e-12)]
    assert any(a.communicator != b.communicator for a, b in queued)


def test_ranks_that_meet_hold_no_link() -> None:
    """A gather that is prefetched and an exchange that is issued meanwhile meet at the same time."""
    low, wait = exchanging(), 1.0
    meeting = replace(EVEN, ranks_per_node=1, node=Link.even(wait, 1e12), network=Link.even(wait, 1e12))
    got = low.timeline(meeting)
    gathers, exchanges = (spans_of(got, low, kind) for kind in (Gather, Exchange))
    assert any(abs(g.start - e.start) < wait / 2 for g in gathers for e in exchanges)


def test_gathers_and_reductions_have_a_lane_each_and_share_the_link() -> None:
    """`Group` has a process group of NCCL for each of the two."""
    low = lower(lambda p, x: loss(p, x), chain(BLOCKS, WIDTH), rows(WIDTH), ranks=4, prefetch=1, overlap=1)
    got = low.timeline(replace(EVEN, node=Link.even(0, 1e6)))
    lanes = [{s.communicator for s in spans_of(got, low, kind)} for kind in (Gather, ReduceScatter)]
    assert [len(each) for each in lanes] == [1, 1] and lanes[0] != lanes[1]
    spans = sorted(flights(got), key=lambda s: s.start)
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))


def test_a_group_with_several_ranks_on_each_node_keeps_both_links_busy() -> None:
    """A ring passes eight ranks of each node: one hop in eight leaves it, through the rank's own adapter."""
    low = lower(loss, chain(BLOCKS, WIDTH), rows(WIDTH), ranks=16)
    line = next(i for i in low.schedule.instructions if isinstance(i, Gather))
    sent = 15 / 16 * line.wire_bytes(low.schedule)
    rates = {"node": 4e9, "network": 1e8}
    hardware = replace(EVEN, **{name: Link.even(0, rate) for name, rate in rates.items()})
    price = line.price(HardwarePricer(low.schedule, hardware, low.sizes))
    assert price.link_seconds == pytest.approx({"node": sent * 7 / 8 / 4e9, "network": sent / 8 / 1e8})
    assert price.flight_seconds == pytest.approx(max(price.link_seconds.values()))
    for per_node, link in ((1, "network"), (16, "node")):
        price = line.price(
            HardwarePricer(low.schedule, replace(hardware, ranks_per_node=per_node), low.sizes)
        )
        assert price.link_seconds == pytest.approx({link: price.flight_seconds})


@dataclass
class OneQueue:
    """A pricer whose collectives all travel on one lane."""

    pricer: HardwarePricer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pricer, name)

    def collective(self, *args: Any) -> dict[str, Any]:
        flight = self.pricer.collective(*args)
        return {name: flight[name] for name in ("lane", "flight_seconds") if name in flight}


@pytest.mark.parametrize("preset", [*fs.presets.PRESETS, "exchanging"])
def test_compute_waits_for_no_longer_than_where_all_share_one_queue(preset: str) -> None:
    axes = {"replicate": 4, "shard": 4} if preset == "hybrid_shard" else {"shard": 16}
    low = exchanging() if preset == "exchanging" else lower(
        loss, chain(BLOCKS, WIDTH), rows(WIDTH), ranks=axes, preset=preset, prefetch=1, overlap=1
    )  # fmt: skip
    gained = []
    for per_node, network in itertools.product((1, 2, 4, 16), (1e6, 1e8, 1e10)):
        hardware = replace(EVEN, ranks_per_node=per_node, network=Link.even(1e-5, network))
        pricer = HardwarePricer(low.schedule, hardware, low.sizes)
        lanes, one = simulate(pricer, None), simulate(OneQueue(pricer), None)
        assert lanes.exposed_communication_seconds <= one.exposed_communication_seconds * (1 + 1e-9)
        assert lanes.step_seconds <= one.step_seconds * (1 + 1e-9)
        gained.append(lanes.step_seconds < 0.95 * one.step_seconds)
    assert any(gained) or preset != "exchanging"


def test_a_picture_has_a_row_for_each_communicator_that_has_one() -> None:
    shown = text.timeline(exchanging().timeline(EVEN)).splitlines()
    assert {"gather over outer", "reduce over outer", "reduce over inner"} <= {
        line.partition("|")[0].strip() for line in shown
    }
    one_clock = text.timeline(exchanging().timeline("cpu")).splitlines()
    assert any(line.startswith("communication") for line in one_clock) and len(one_clock) < len(shown)
