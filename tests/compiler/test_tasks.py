"""Tasks: which micro-batch runs through which stretch of a program when, and what a round shares."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import WIDTH, chain, lower, run_chain

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segments import Segment
from fnshard.compiler.schedule.instructions import Accumulate, Gather, ReduceScatter, Run, ToDevice, Wait
from fnshard.compiler.schedule.tasks import make_chunks, order_tasks


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


def tied(p: Any, x: Any) -> Any:
    """Read the first leaf in the last unit, too."""
    first = next(iter(p.values()))
    return (run_chain(p, x) @ first.T).square().mean()


def lower_tasks(fn: Any, accumulate: int, **options: Any) -> Any:
    how = {"micro_order": "breadth", "accumulate": accumulate, **options}
    return lower(fn, chain(4), torch.zeros(2 * accumulate, WIDTH), ranks=2, **how)


@st.composite
def programs(draw: Any) -> tuple[list[Segment], list[tuple[str, int]]]:
    """Draw segments of few units, and leaves that some of them write to."""
    count, segments = draw(st.integers(1, 8)), []
    for index in range(count):
        units = tuple(draw(st.lists(st.sampled_from("abcd"), max_size=2, unique=True)))
        read = tuple(ValueName(Kind.LEAF, p) for p in draw(st.lists(st.sampled_from("xyz"), unique=True)))
        segments.append(Segment(index, units, read, (), "k"))
    writers = draw(st.dictionaries(st.sampled_from("xyz"), st.integers(0, count - 1)))
    return segments, list(writers.items())


@given(program=programs(), accumulate=st.integers(1, 4), order=st.sampled_from(["depth", "breadth"]))
def test_every_segment_runs_once_for_each_micro_batch_and_way_behind_what_it_reads(
    program: Any, accumulate: int, order: Any
) -> None:
    segments, written = program
    chunks = make_chunks(segments, written)
    assert [s for chunk in chunks for s in chunk] == segments
    where = {s.index: number for number, chunk in enumerate(chunks) for s in chunk}
    for path, writer in written:
        assert {where[s.index] for s in segments if path in s.leaves} <= {where[writer]}
    for one, other in itertools.pairwise(segments):
        units, more = set(one.units), set(other.units)
        assert where[one.index] == where[other.index] or not (more <= units or (units and units <= more))

    ran = []
    for task in itertools.chain.from_iterable(order_tasks(segments, written, accumulate, order)):
        stretch = reversed(task.segments) if task.backward else task.segments
        ran += [(s.index, task.micro, task.backward) for s in stretch]
        left = any(m > task.micro for m in range(accumulate))
        assert task.is_last is not left
    places = {each: number for number, each in enumerate(ran)}
    assert len(places) == len(ran) == 2 * accumulate * len(segments)
    for index, micro, backward in ran:
        if index:
            one, other = (index, micro, backward), (index - 1, micro, backward)
            assert (places[one] < places[other]) is backward
        assert places[index, micro, False] < places[index, micro, True]
    for path, writer in written:  # a micro-batch reads what the one before has written
        for s in segments:
            if path in s.leaves:
                for micro in range(1, accumulate):
                    assert places[writer, micro - 1, False] < places[s.index, micro, False]


@pytest.mark.parametrize("preset", ["full_shard", "shard_grad_op"])
def test_bytes_do_not_grow_with_micro_batches(preset: str) -> None:
    def wire(accumulate: int) -> dict[str, int]:
        low, out = lower_tasks(loss, accumulate, preset=preset), {}
        for line in low.schedule.instructions:
            if isinstance(line, Gather | ReduceScatter):
                out[line.verb] = out.get(line.verb, 0) + line.wire_bytes(low.schedule)
        return out

    one = wire(1)
    assert one["gather"] and one == wire(2) == wire(8)
    depth, breadth = (lower_tasks(loss, 8, micro_order=o).schedule.counts() for o in ("depth", "breadth"))
    assert (
        depth["gather"] == 8 * breadth["gather"] and depth["reduce_scatter"] == 8 * breadth["reduce_scatter"]
    )


def test_the_last_unit_runs_back_before_its_next_micro_batch() -> None:
    """So the values of one micro-batch's loss are alive at a time."""
    runs = [i for i in lower_tasks(loss, 3).schedule.instructions if isinstance(i, Run)]
    ways = ["back" if r.backward else "forth" for r in runs if r.segment == 3]
    assert ways == ["forth", "back"] * 3
    assert [(r.segment, r.phase) for r in runs[:6]] == [(s, f"forward.{m}") for s in (0, 1) for m in range(3)]


def test_gathers_are_issued_a_round_ahead_and_reductions_waited_for_a_round_later() -> None:
    lines = list(lower_tasks(loss, 3, prefetch=1, overlap=1).schedule.instructions)
    runs = [i for i in lines if isinstance(i, Run)]

    def runs_before(line: Any) -> list[Run]:
        return [i for i in lines[: lines.index(line)] if isinstance(i, Run)]

    gather = next(i for i in lines if isinstance(i, Gather) and i.unit == "layers.2")
    assert runs_before(gather) == [r for r in runs if r.segment == 0 and not r.backward]
    reduced = next(i for i in lines if isinstance(i, ReduceScatter) and i.unit == "layers.2")
    wait = next(i for i in lines if reduced.writes[0] in i.reads)
    passed = runs_before(wait)[len(runs_before(reduced)) :]
    assert [r.segment for r in passed] == [1, 1, 1]


def test_one_gradient_of_a_tied_leaf_is_alive_at_a_time() -> None:
    """It is summed as it comes, from either end of the program, and reduced once."""
    lines = lower_tasks(tied, 4, prefetch=0, overlap=0).schedule.instructions
    alive, most, path = set(), 0, next(iter(chain(4)))
    for line in lines:
        alive |= {n for n in line.writes if n.kind is Kind.GRADIENT and n.path == path}
        most = max(most, len(alive))
        alive -= set(line.drops)
    own = [i for i in lines if isinstance(i, Accumulate) and path in i.paths]
    assert most == 1 and len(own) == 8 and own[0].first and not any(i.first for i in own[1:])


def shared(p: Any, x: Any) -> Any:
    """Let every unit read one leaf besides its own."""
    for path in list(p)[:-1]:
        x = torch.tanh(x @ (p[path] * p["scale"]))
    return x.square().mean()


def test_units_that_share_a_leaf_are_chunks_of_their_own() -> None:
    params = {f"layers.{i}.w": torch.zeros(WIDTH, WIDTH) for i in range(3)} | {"scale": torch.ones(WIDTH)}
    how = {"accumulate": 2, "micro_order": "breadth", "ranks": 2}
    low = lower(shared, params, torch.zeros(4, WIDTH), **how)
    runs = [(i.segment, i.backward) for i in low.schedule.instructions if isinstance(i, Run)]
    assert runs[:4] == [(0, False), (0, False), (1, False), (1, False)]


def test_what_a_micro_batch_keeps_on_the_host_comes_back_for_its_own_kernel() -> None:
    """A load is issued one kernel ahead, and not a round."""
    low = lower_tasks(loss, 4, remat="unit+offload", prefetch=1, overlap=1)
    flying, most = set(), 0
    for line in low.schedule.instructions:
        flying |= set(line.writes) if isinstance(line, ToDevice) else set()
        most = max(most, len(flying))
        flying -= set(line.reads) if isinstance(line, Wait) else set()
    assert 0 < most <= 2
