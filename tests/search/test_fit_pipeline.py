"""Fit on meshes with a pipeline: prices are those of the whole step, stages and bubble counted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from errors import raises
from toys import WIDTH, chain, lower

import fnshard as fs
from fnshard.analysis.flops import kernel_flops
from fnshard.analysis.timeline import _OverlappedClock
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.instructions import COMMUNICATION, Gather, ReduceScatter, Run, Send, Wait
from fnshard.compiler.schedule.ir import Price
from fnshard.errors import BudgetError, SpecError
from fnshard.plot import text
from fnshard.plot.pictures import tasks_of
from fnshard.search.fit import make_space, search_space
from fnshard.search.price import PARTS
from fnshard.search.space import Choice

WIDE = {f"layers.{i}.w": torch.empty(4096, 4096, device="meta") for i in range(8)}  # as a GPU likes them


def loss(params: Any, x: Any) -> Any:
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return x.square().mean()


@cache
def make_wide_space() -> Any:
    """Return the space of plans of WIDE over two stages of two ranks."""
    mesh = fs.make_mesh(pipeline=2, shard=2, abstract=True, device="cpu")
    return make_space(loss, WIDE, mesh, batch=(rows(8),))


def rows(count: int) -> Any:
    return torch.empty(count, 1024, 4096, device="meta")


@pytest.mark.long
def test_a_plan_of_a_pipeline_is_priced_as_its_step_is() -> None:
    space = make_wide_space()
    found = search_space(space, space.hardware.memory_bytes)
    lowered, line = found.lowered, found.timeline
    assert len(lowered.schedules) == 2 and found.chosen.choice.accumulate >= 2
    assert found.seconds == line.step_seconds > 0 and line.bubble > 0
    peaks = [lowered.memory_analysis(stage=stage).peak_bytes for stage in range(2)]
    assert found.peak_bytes == max(peaks)
    parts = found.chosen.parts
    assert parts["pipeline"] == pytest.approx(line.bubble_seconds) and set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(line.step_seconds)


@pytest.mark.long
def test_chunks_are_recut_and_the_best_number_is_found() -> None:
    """Four chunks a stage are all that eight units have room for; each plan is what its preset would be."""
    space = make_wide_space()
    mesh = space.meshes[0]
    plans = space.on(mesh)
    assert plans.chunks == (None, 2, 4)
    for count in (2, 4):
        specs = plans.specs_of(Choice(mesh, 4, chunks=count))
        own = fs.presets.full_shard(WIDE, mesh, chunks=count)
        assert {p: s.chunk for p, s in specs.items()} == {p: s.chunk for p, s in own.items()}
    prices = [space.price(Choice(mesh, 4, chunks=count)) for count in plans.chunks]
    assert prices[1].parts["pipeline"] < prices[0].parts["pipeline"]
    best = search_space(space, space.hardware.memory_bytes).chosen
    assert best.seconds <= min(each.seconds for each in prices)


@pytest.mark.long
def test_less_memory_is_a_smaller_peak_of_the_fullest_stage() -> None:
    space = make_wide_space()
    free = search_space(space, space.hardware.memory_bytes)
    tight = search_space(space, int(0.8 * free.peak_bytes))
    assert tight.peak_bytes <= 0.8 * free.peak_bytes
    with raises(BudgetError, says="nothing fits"):
        search_space(space, 1000)


@pytest.mark.long  # test_fit has them among its meshes
def test_meshes_with_a_pipeline_are_among_all_meshes() -> None:
    found = fs.fit(loss, WIDE, ranks=4, batch=(rows(16),))
    assert {str(m) for m, _ in found.meshes} | {str(found.mesh)} >= {
        "(pipeline=2, shard=2)", "(pipeline=4, shard=1)", "(pipeline=2, shard=1, tensor=2)", "(shard=4)",
    }  # fmt: skip
    few = fs.fit(loss, WIDE, ranks=4, batch=(rows(2),))
    why = {str(mesh): reason for mesh, reason in few.meshes}
    assert why["(pipeline=2, shard=2)"].startswith("2 stages, and rows for 1 micro-batch")


def test_tasks_are_put_in_order_by_the_flops_of_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []

    def count(kernel: Any, way: Any) -> float:
        counted.append(kernel_flops(kernel, way))
        return counted[-1]

    monkeypatch.setattr("fnshard.step.cache.kernel_flops", count)
    lower(loss, chain(4), torch.ones(8, WIDTH), ranks=4, accumulate=4)
    assert not counted  # one stage has one order
    how = {"ranks": {"pipeline": 2, "shard": 2}, "accumulate": 4}
    lower(loss, chain(4), torch.ones(8, WIDTH), **how)
    assert len(counted) == 8 and min(counted) > 0 and max(counted) >= 2 * min(counted)

    # With two chunks a stage, tasks of equal flops have another order.
    how["policy"] = {"chunks": 2}
    by_flops = lower(loss, chain(8), torch.ones(8, WIDTH), **how)
    monkeypatch.setattr("fnshard.step.cache.kernel_flops", lambda kernel, way: 1.0)
    assert lower(loss, chain(8), torch.ones(8, WIDTH), **how).as_text() != by_flops.as_text()


def test_a_message_shares_a_link_with_a_gather_and_does_not_queue_behind_it() -> None:
    clock = _OverlappedClock()
    flights = {name: ValueName(Kind.FLIGHT, name) for name in ("leaf", "message", "later")}
    gather = Gather("u", "forward", (), (flights["leaf"],), bucket="b")
    again = Gather("u", "forward", (), (flights["later"],), bucket="b")
    send = Send("u", "forward", (), (flights["message"],), stage=1)
    flies = {"lane": COMMUNICATION, "link_seconds": {"network": 1.0}, "flight_seconds": 1.0}
    short = {"lane": COMMUNICATION, "link_seconds": {"network": 0.1}, "flight_seconds": 0.1}
    clock.step(0, gather, Price(communicator="gathers", **flies))
    clock.step(1, send, Price(communicator="messages", **short))
    clock.step(2, again, Price(communicator="gathers", **flies))
    assert clock.landing(flights["leaf"]) == 1.0 and clock.landing(flights["message"]) == pytest.approx(0.2)
    assert clock.landing(flights["later"]) == pytest.approx(2.1)  # it waits for the bytes of both


# ------------------------------------------------------------------ pictures


def test_stages_are_drawn_a_lane_each(tmp_path: Any) -> None:
    lowered = lower(loss, chain(4), torch.ones(8, WIDTH), ranks={"pipeline": 2, "shard": 2}, accumulate=4)
    line = lowered.timeline("h100")
    shown = text.stages(line, width=60)
    assert shown.count("stage ") == 2 and f"bubble {line.bubble:.1%}" in shown
    for number, stage in enumerate(line.stages):
        tasks = [(phase, micro) for phase, micro, _, _ in tasks_of(stage) if phase != "update"]
        assert len(tasks) == 8 and len(set(tasks)) == 8
        assert f"{stage.bubble:.1%} idle" in shown.splitlines()[1 + 2 * number]
    assert fs.plot.stages(line, tmp_path / "stages.svg").stat().st_size > 1000
    alone = lower(loss, chain(4), torch.ones(8, WIDTH), ranks=2).timeline("h100")
    with raises(SpecError, leaves="pipeline", fix=["fs.plot.timeline", "fs.make_mesh(pipeline=2"]):
        text.stages(alone)


def test_a_stage_stands_still_for_no_reduction_between_its_kernels() -> None:
    """The stages that wait for what it makes would stand still, too."""
    axes = {"pipeline": 2, "shard": 2}
    lowered = lower(loss, chain(8), torch.ones(8, WIDTH), ranks=axes, accumulate=4, overlap=1)
    for schedule in lowered.schedules:
        lines = schedule.instructions
        last = max(number for number, line in enumerate(lines) if isinstance(line, Run))
        waits = [n for n, line in enumerate(lines) if isinstance(line, Wait) and line.is_for(ReduceScatter)]
        assert waits and min(waits) > last
