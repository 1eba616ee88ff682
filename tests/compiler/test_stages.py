"""Stages of a pipeline: orders of tasks, chunks, messages and their proof; training equals the naive loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import sharded
import torch
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from models import WIDTH as WIDE
from models import model_of
from torch import Tensor, nn
from toys import WIDTH, chain, lower, run_chain

import fnshard as fs
from fnshard import LayoutSpec, P, ScheduleError, SpecError, TraceError
from fnshard.compiler.ir.values import Kind, stored_names
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.instructions import (
    AllReduce,
    Gather,
    Local,
    Norms,
    Recv,
    ReduceScalars,
    ReduceScatter,
    Run,
    Send,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.schedule.tasks import bubble, order_stages, usual_room
from fnshard.compiler.schedule.together import together
from fnshard.compiler.schedule.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:accumulate=")  # few micro-batches, on purpose
LR, DECAY = 3e-3, 0.1
ADAMW = fs.optim.adamw(LR, weight_decay=DECAY)


# ------------------------------------------------------------------ the order of tasks


@settings(deadline=None)
@given(
    stages=st.integers(1, 4), each=st.integers(1, 3), micros=st.integers(1, 9), limited=st.booleans(),
    backward=st.sampled_from([0.5, 1.0, 2.0, 3.7]),
)  # fmt: skip
def test_every_task_runs_once_behind_what_it_reads(
    stages: int, each: int, micros: int, limited: bool, backward: float
) -> None:
    stage_of = [c % stages for c in range(stages * each)]
    room = usual_room(stages, len(stage_of)) if limited else None
    slots = order_stages(stage_of, micros, room, lambda chunk, way: backward if way is Way.BACKWARD else 1.0)
    place = {(s.chunk, s.micro, s.backward): n for n, s in enumerate(slots)}
    assert len(place) == len(slots) == 2 * micros * len(stage_of)
    for (chunk, micro, back), number in place.items():
        assert not micro or place[chunk, micro - 1, back] < number
        assert not back or place[chunk, micro, False] < number
        neighbour = (chunk + 1 if back else chunk - 1, micro, back)
        assert neighbour not in place or place[neighbour] < number
    for stage in range(stages):  # a stage does one thing at a time
        own = sorted((s.start, s.end) for s in slots if stage_of[s.chunk] == stage)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))


def text_of(slots: Any, stage_of: list[int], stage: int) -> str:
    own = sorted((s for s in slots if stage_of[s.chunk] == stage), key=lambda s: s.start)
    return " ".join(f"{'B' if s.backward else 'F'}{s.micro}" for s in own)


def test_the_usual_room_is_1f1b_and_none_is_gpipe() -> None:
    stage_of = [0, 1, 2]
    one = order_stages(stage_of, 4, usual_room(3, 3))
    assert [text_of(one, stage_of, s) for s in stage_of] == [
        "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3",
    ]  # fmt: skip
    free = order_stages(stage_of, 4, None)
    assert text_of(free, stage_of, 0) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert bubble(one, stage_of) == bubble(free, stage_of) == pytest.approx(2 / 6)


@pytest.mark.parametrize(("stages", "each", "micros"), [(2, 2, 4), (4, 2, 8), (4, 4, 8), (4, 2, 16)])
def test_several_chunks_a_stage_are_interleaved(stages: int, each: int, micros: int) -> None:
    stage_of = [c % stages for c in range(stages * each)]
    slots = order_stages(stage_of, micros, usual_room(stages, len(stage_of)))
    assert bubble(slots, stage_of) == pytest.approx((stages - 1) / (micros * each + stages - 1))


# ------------------------------------------------------------------ schedules on paper


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


def tied(p: Any, x: Any) -> Any:
    """Read the first leaf in the last unit, too."""
    first = next(iter(p.values()))
    return (run_chain(p, x) @ first.T).square().mean()


ALL = [("layers.0.w", LayoutSpec(P("shard"), chunk="all"))]


@cache
def stages(fn: Any = loss, accumulate: int = 4, pipeline: int = 2, **options: Any) -> tuple[Schedule, ...]:
    """Return the schedules of a chain of four, whose first leaf is of all stages where `fn` ties it."""
    policy = {"rules": ALL} if fn is tied else {}
    batch, axes = torch.zeros(accumulate * 2, WIDTH), {"pipeline": pipeline, "shard": 2}
    return lower(fn, chain(4), batch, ranks=axes, policy=policy, accumulate=accumulate, **options).schedules


def test_each_stage_has_its_own_leaves_and_runs_its_own_segments() -> None:
    first, last = stages()
    assert list(first.specs) == ["layers.0.w", "layers.1.w"] and list(last.specs) == [
        "layers.2.w",
        "layers.3.w",
    ]
    for schedule in (first, last):
        read = {n.path for line in schedule.instructions for n in line.reads if n.leaf}
        assert read == set(schedule.specs)
        gathered = [i for i in schedule.instructions if isinstance(i, Gather)]
        assert all(i.axes_of(schedule) == ("shard",) for i in gathered)
    runs = [[i.segment for i in s.instructions if isinstance(i, Run) and not i.backward] for s in stages()]
    assert runs == [[0, 1] * 4, [2, 3] * 4]


def test_gradients_are_reduced_once_and_messages_are_the_boundary_once_a_micro_batch() -> None:
    for schedule in stages():
        counts = schedule.counts()
        assert counts["reduce_scatter"] == 2 and counts["send"] == counts["recv"] == 4
        size = sum(i.wire_bytes(schedule) for i in schedule.instructions if isinstance(i, Send))
        assert size == 4 * (2 * WIDTH * 4)  # rows of a micro-batch, fp32


def test_breadth_runs_all_forwards_first() -> None:
    first, _ = stages(micro_order="breadth")
    ways = [i.backward for i in first.instructions if isinstance(i, Run)]
    assert ways == sorted(ways)


def test_the_merge_holds_every_line_once_and_both_ends_of_messages_in_order() -> None:
    schedules = stages()
    order = together(schedules)
    assert sorted(order) == [(s, n) for s in (0, 1) for n in range(len(schedules[s].instructions))]
    place = {each: number for number, each in enumerate(order)}
    ends: dict[Any, dict[type, tuple[int, str]]] = {}
    for stage, schedule in enumerate(schedules):
        for number, line in enumerate(schedule.instructions):
            if isinstance(line, Send | Recv):
                ends.setdefault(line.values, {})[type(line)] = stage, line.writes[0]
            if isinstance(line, Wait) and line.is_for(Recv):
                value = next(v for v, e in ends.items() if e.get(Recv) == (stage, line.reads[0]))
                ends[value][Wait] = stage, number
    for each in ends.values():
        stage, flight = each[Send]
        sent = next(n for n, i in enumerate(schedules[stage].instructions) if flight in i.writes)
        assert place[stage, sent] < place[each[Wait]]


def test_a_mesh_without_a_pipeline_knows_no_chunks() -> None:
    params, x = chain(4), torch.zeros(4, WIDTH)
    mesh = fs.make_mesh(shard=2, abstract=True)
    plain = fs.presets.full_shard(params, mesh)
    chunked = {p: replace(s, chunk=n) for n, (p, s) in enumerate(plain.items())}
    texts = [
        fs.shard_step(loss, specs, mesh=mesh, optimizer=ADAMW, backend="eager", accumulate=2)
        .lower(params, x).as_text()
        for specs in (plain, chunked)
    ]  # fmt: skip
    assert texts[0] == texts[1] and {s.chunk for s in plain.values()} == {"all"}


def test_what_a_step_takes_is_of_the_fullest_stage() -> None:
    params = {"layers.0.w": torch.zeros(WIDTH, 64)} | {f"layers.{i}.w": torch.zeros(64, 64) for i in (1, 2)}
    low = lower(loss, params, torch.zeros(4, WIDTH), ranks={"pipeline": 2, "shard": 2}, accumulate=2)
    each = [low.memory_analysis(stage=s) for s in (0, 1)]
    assert low.memory_analysis().peak_bytes == max(a.peak_bytes for a in each)
    assert sum(sum(leaf["stored"] for leaf in a.leaves.values()) for a in each) == 4 * (WIDTH + 128) * 64 // 2
    assert low.comm_analysis(stage=0)["send"] == {"count": 2, "bytes": 2 * 64 * 4 * 2}
    with raises(SpecError, leaves="stage=2"):
        low.memory_analysis(stage=2)


def test_the_timeline_has_a_bubble_that_more_micro_batches_make_smaller() -> None:
    params = {f"layers.{i}.w": torch.empty(4096, 4096, device="meta") for i in range(4)}

    def bubble_of(accumulate: int) -> float:
        batch = torch.empty(accumulate * 4096, 4096, device="meta")
        axes = {"pipeline": 4, "shard": 1}
        timeline = lower(loss, params, batch, ranks=axes, device="cuda", accumulate=accumulate).timeline(
            "h100"
        )
        assert len(timeline.stages) == 4 and f"{timeline.bubble:.1%}" in str(timeline)
        assert timeline.step_seconds == max(s.step_seconds for s in timeline.stages)
        return timeline.bubble

    few, many = bubble_of(4), bubble_of(16)
    assert 0 < many < few < 1


# ------------------------------------------------------------------ planted faults

Lines = list[Any]


def find(lines: Lines, kind: type, number: int = 0, **values: Any) -> int:
    """Return where the line of this number and class stands."""
    return [
        n for n, i in enumerate(lines)
        if isinstance(i, kind) and all(getattr(i, k) == v for k, v in values.items())
    ][number]  # fmt: skip


def drop_flight(lines: Lines, at: int) -> None:
    """Take out a line and its Wait."""
    flight = lines.pop(at).writes[0]
    del lines[next(n for n, i in enumerate(lines) if flight in i.reads)]


def swap_sends(first: Lines, last: Lines) -> None:
    one, other = (find(first, Send, n) for n in (0, 1))
    first[one], first[other] = first[other], first[one]


def receive_in_a_circle(first: Lines, last: Lines) -> None:
    """Let the first stage wait for a cotangent before it has sent the value."""
    come = find(first, Recv)
    wait = find(first, Wait, reads=first[come].writes)
    moved = [first.pop(wait), first.pop(come)]
    at = find(first, Send)
    first[at:at] = moved[::-1]


def forget_a_send(first: Lines, last: Lines) -> None:
    drop_flight(first, find(first, Send))


def forget_a_recv(first: Lines, last: Lines) -> None:
    first.append(
        replace(first[find(first, Send)], writes=(first[find(first, Send)].writes[0].of(None, "!"),))
    )


def meet_on_one_stage(first: Lines, last: Lines) -> None:
    drop_flight(first, find(first, ReduceScalars))


def meet_in_another_order(first: Lines, last: Lines) -> None:
    one, other = find(first, AllReduce), find(first, ReduceScalars)
    first[one], first[other] = first[other], first[one]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (swap_sends, "stage 1 receives"), (receive_in_a_circle, "for ever"),
        (forget_a_send, "for ever"), (forget_a_recv, "no other end"), (meet_on_one_stage, "for ever"),
        (meet_in_another_order, "stage 0 comes to"),
    ],
)  # fmt: skip
def test_together_finds_what_one_stage_cannot_see(plant: Callable[..., None], said: str) -> None:
    schedules = stages(tied)
    lines = [list(s.instructions) for s in schedules]
    plant(*lines)
    with raises(ScheduleError, says=said):
        together([s.with_instructions(i) for s, i in zip(schedules, lines, strict=True)])
    assert together(schedules)


def test_a_missing_dual_is_found() -> None:
    schedule = stages()[1]
    lines = list(schedule.instructions)
    drop_flight(lines, find(lines, Send))
    with raises(ScheduleError, says="not sent back"):
        verify(schedule.with_instructions(lines))


def test_a_foreign_leaf_that_is_read_is_found() -> None:
    schedule = stages()[1]
    lines = list(schedule.instructions)
    at = find(lines, Run)
    lines[at] = replace(lines[at], reads=(*lines[at].reads[:-1], *stored_names(["layers.0.w"])))
    with raises(ScheduleError, leaves="s:layers.0.w", says="another stage"):
        verify(schedule.with_instructions(lines))


def test_a_collective_of_another_stages_leaves_is_found() -> None:
    first, last = stages()
    at = find(first.instructions, Gather)
    lines = [*first.instructions[at : at + 2], *last.instructions]
    with raises(ScheduleError, leaves="s:layers.0.w", says="another stage"):
        verify(last.with_instructions(lines))


def test_a_reduction_before_the_last_backward_is_found() -> None:
    """It sums all micro-batches but the last."""
    schedule = stages()[0]
    lines = list(schedule.instructions)
    at = find(lines, ReduceScatter)
    before = max(n for n, i in enumerate(lines[:at]) if set(i.writes) & set(lines[at].reads))
    earlier = next(n for n in lines[before].reads if n.kind is Kind.ACCUMULATED)
    reduction, wait = lines[at], find(lines, Wait, reads=lines[at].writes)
    moved = [replace(reduction, reads=(earlier,)), lines[wait]]
    lines = [i for i in lines if i not in (reduction, lines[wait])]
    lines[before:before] = moved
    with raises(ScheduleError, says="in no sum"):
        verify(schedule.with_instructions(lines))


@pytest.mark.parametrize(("copies", "said"), [(0, "not alive"), (2, "again")])
def test_a_backward_that_is_dropped_or_doubled_is_found(copies: int, said: str) -> None:
    schedule = stages()[1]
    lines = list(schedule.instructions)
    at = find(lines, Run, 3, backward=True)
    lines[at : at + 1] = [lines[at]] * copies
    with raises(ScheduleError, says=said):
        verify(schedule.with_instructions(lines))


def test_a_tie_that_is_not_summed_over_stages_is_found() -> None:
    schedule = stages(tied, grad_norm=True)[1]
    lines = list(schedule.instructions)
    at = find(lines, AllReduce)
    assert lines[at].axes == ("pipeline",)
    scatter = find(lines, ReduceScatter, bucket=lines[at].bucket)
    assert lines[scatter].axes_of(schedule) == ("shard",)
    lines[at] = replace(lines[at], axes=("shard",))
    with raises(ScheduleError, says="pipeline, shard is due"):
        verify(schedule.with_instructions(lines))
    lines = list(schedule.instructions)
    norm = find(lines, Norms, bucket=lines[at].bucket)
    assert lines[norm].replicas == 2
    lines[norm] = replace(lines[norm], replicas=1)
    with raises(ScheduleError, says="1 replicas of 2"):
        verify(schedule.with_instructions(lines))


def test_a_tie_that_nothing_sums_is_found() -> None:
    params, axes = chain(2), {"pipeline": 2}
    rules = [("layers.0.w", LayoutSpec(chunk="all")), ("layers.1.w", LayoutSpec(chunk=1))]
    specs = fs.match_specs(
        params | {"layers.2.w": params["layers.1.w"]}, [*rules, ("*", LayoutSpec(chunk=0))]
    )
    specs["layers.1.w"], specs["layers.2.w"] = specs["layers.2.w"], specs["layers.1.w"]
    mesh = fs.make_mesh(**axes, abstract=True)
    step = fs.shard_step(tied, specs, mesh=mesh, optimizer=ADAMW, backend="eager")
    schedule = step.lower(params | {"layers.2.w": params["layers.1.w"]}, torch.zeros(4, WIDTH)).schedules[1]
    lines = list(schedule.instructions)
    at = find(lines, AllReduce)
    wait = find(lines, Wait, reads=lines[at].writes)
    summed, result = lines[at], lines[wait].writes
    lines[at] = Local(
        summed.unit, summed.phase, summed.reads, result, bucket=summed.bucket, paths=summed.paths
    )
    del lines[wait]
    with raises(ScheduleError, says=["over no axis", "pipeline is due"]):
        verify(schedule.with_instructions(lines))


# ------------------------------------------------------------------ what users get wrong


def test_a_leaf_that_two_stages_read_is_named_with_its_line_and_the_way_out() -> None:
    with pytest.raises(SpecError) as error:
        lower(tied, chain(4), torch.zeros(8, WIDTH), ranks={"pipeline": 2, "shard": 2}, accumulate=4)
    text = str(error.value)
    assert "params['layers.0.w'] of chunk 0" in text and "after params['layers.3.w'] of chunk 1" in text
    assert "return (run_chain(p, x) @ first.T)" in text and 'chunk="all"' in text


def test_a_program_that_reads_its_units_backwards_is_refused_with_all_leaves() -> None:
    def backwards(p: Any, x: Any) -> Any:
        return run_chain(dict(reversed(p.items())), x).sum()

    with pytest.raises(SpecError) as error:
        lower(backwards, chain(4), torch.zeros(4, WIDTH), ranks={"pipeline": 2, "shard": 1})
    text = str(error.value)
    for number in (0, 1):
        assert f"params['layers.{number}.w'] of chunk 0 is read at " in text
    assert (
        "after params['layers.2.w'] of chunk 1" in text and "torch.tanh(" in text and "number chunks" in text
    )


def test_a_unit_of_two_stages_is_named_with_its_leaves() -> None:
    params = {f"layers.{i}.{n}": torch.zeros(4, 4) for i in range(2) for n in "ab"}
    rules = [("layers.0.b", LayoutSpec(chunk=1))]
    with pytest.raises(SpecError) as error:
        lower(loss, params, torch.zeros(4, 4), ranks={"pipeline": 2, "shard": 1}, policy={"rules": rules})
    text = str(error.value)
    assert "unit 'layers.0': params['layers.0.a'] of chunk 0, params['layers.0.b'] of chunk 1" in text
    assert "LayoutSpec(unit=...)" in text and "layers.1" not in text


def test_a_length_that_a_call_on_the_host_decides_is_refused_with_its_line() -> None:
    """The trace refuses it, as on any mesh: no shape that depends on data comes to a cut."""

    def some_rows(p: Any, x: Any) -> Any:
        first, *rest = p.values()
        kept = (x @ first)[: int((x > 0).sum())]
        return run_chain(dict(enumerate(rest)), kept).sum()

    with raises(TraceError, leaves="test_stages.py:") as caught:
        lower(some_rows, chain(4), torch.zeros(4, WIDTH), ranks={"pipeline": 2, "shard": 1})
    assert "int((x > 0).sum())" in str(caught.value) and "Fix: " in str(caught.value)


def test_leaves_of_two_chunks_that_one_segment_reads_are_named() -> None:
    rules = [(f"layers.{i}.w", LayoutSpec(P("shard"), chunk=c)) for i, c in enumerate((0, 0, 1, 1))]

    def both(p: Any, x: Any) -> Any:
        first, second, third, fourth = p.values()
        return (x @ (first @ second) @ (second * third) @ fourth).sum()

    with raises(SpecError, leaves=["params['layers.1.w'] of chunk 0", "params['layers.2.w']"]):
        lower(
            both, chain(4), torch.zeros(4, WIDTH), ranks={"pipeline": 2, "shard": 1}, policy={"rules": rules}
        )


def test_a_stage_that_has_nothing_to_run_is_named() -> None:
    rules = [("*", LayoutSpec(P("shard"), chunk=0))]
    with raises(SpecError, leaves="stage 1", fix="LayoutSpec(chunk=0)"):
        lower(
            loss, chain(4), torch.zeros(4, WIDTH), ranks={"pipeline": 2, "shard": 1}, policy={"rules": rules}
        )


def test_fewer_units_than_chunks_are_refused_and_fewer_micro_batches_than_stages_warned_of() -> None:
    with raises(SpecError, says="6 units"):
        lower(loss, chain(4), torch.zeros(4, WIDTH), ranks={"pipeline": 3, "shard": 1}, policy={"chunks": 2})
    with raises(SpecError, leaves="chunks=0"):
        lower(loss, chain(4), torch.zeros(4, WIDTH), policy={"chunks": 0})
    with pytest.warns(UserWarning, match=r"(?s)nothing to do for 50%.*accumulate=8 leaves 11%"):
        lower(loss, chain(4), torch.zeros(4, WIDTH), ranks={"pipeline": 2, "shard": 1}, accumulate=1)


def test_a_written_leaf_of_all_stages_is_refused() -> None:
    params = chain(2) | {"seen": nn.Buffer(torch.zeros(WIDTH))}

    def counts(p: Any, x: Any) -> Any:
        p["seen"].add_(x.detach().sum(0))
        return run_chain({k: v for k, v in p.items() if k != "seen"}, x).sum()

    with raises(SpecError, leaves=["params['seen']", 'chunk="all"'], fix="LayoutSpec(chunk=...)"):
        lower(counts, params, torch.zeros(4, WIDTH), ranks={"pipeline": 2, "shard": 1})


# ------------------------------------------------------------------ numbers


@cache
def truth(name: str, optimizer: str = "adamw") -> reference.Trained:
    """Train in a naive loop over whole global batches, where checkpoints would be wrong (test_numerics)."""
    model = model_of("gpt" if name == "checkpoint" else name)
    steps = [[batch] for batch in model.batches(sharded.STEPS)]
    made, clip = {"adamw": (reference.adamw(LR, DECAY), None), "clipped": (reference.sgd(0.1), 0.2)}[
        optimizer
    ]
    return reference.train(model.loss, model.params, steps, made, frozen=model.frozen, clip=clip)


CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.2), fs.optim.sgd(0.1))
CASES: list[tuple[str, str, dict[str, int], int, dict[str, Any]]] = [
    # model, preset, axes, micro-batches, options and a preset's policy
    ("gpt", "full_shard", {"pipeline": 2}, 1, {}),
    ("gpt", "full_shard", {"pipeline": 2, "shard": 2}, 6, {"chunks": 2}),
    ("gpt", "shard_grad_op", {"shard": 2, "pipeline": 2}, 3, {"micro_order": "breadth"}),
    ("gpt", "zero1", {"pipeline": 4}, 3, {"remat": "unit", "prefetch": 2}),
    ("gpt", "hybrid_shard", {"replicate": 2, "pipeline": 2, "shard": 2}, 3, {}),
    ("gpt", "full_shard", {"pipeline": 2, "tensor": 2}, 3, {"tensor": "tensor"}),
    ("gpt", "full_shard", {"pipeline": 2, "shard": 2}, 3,
     {"memory": "host", "optimizer_memory": "host", "remat": "unit+offload"}),
    ("tied", "full_shard", {"pipeline": 2, "shard": 2}, 3, {}),
    ("dense_skips", "zero2", {"pipeline": 4}, 3, {}),  # every stage reads of every other
    ("unet", "no_shard", {"pipeline": 2, "shard": 2}, 3, {}),
    ("masked_mean", "full_shard", {"pipeline": 2, "shard": 2}, 3, {}),
    ("odd_leaves", "full_shard", {"pipeline": 2, "shard": 2}, 3, {}),
    ("frozen", "full_shard", {"pipeline": 2, "shard": 2}, 3, {}),
    ("complex_leaves", "full_shard", {"pipeline": 2, "shard": 2}, 3, {}),
    *((name, "full_shard", {"pipeline": 2, "shard": 2}, 3, {})
      for name in ("checkpoint", "detached_early", "several_outputs", "in_place")),
]  # fmt: skip
POLICY = ("chunks", "rules", "tensor", "memory", "optimizer_memory")


@pytest.mark.suite({
    "gpt-full_shard-axes0-*": "one micro-batch",
    "tied-*": "a leaf of two stages",
    "dense_skips-*": "every stage reads of every other",
    "odd_leaves-*": "leaves that ranks do not divide",
})  # fmt: skip
@pytest.mark.parametrize(("name", "preset", "axes", "accumulate", "options"), CASES)
def test_training_equals_the_naive_loop(
    name: str, preset: str, axes: dict[str, int], accumulate: int, options: dict[str, Any]
) -> None:
    policy = {k: v for k, v in options.items() if k in POLICY}
    rest = {k: v for k, v in options.items() if k not in POLICY}
    ranks = sharded.simulate(
        model_of(name), preset, axes, ADAMW, policy=policy, accumulate=accumulate, grad_norm=True, **rest
    )
    expected = truth(name)
    for got in ranks:
        sharded.assert_same(got, expected)
        sharded.assert_floats(got.norms, expected.norms)


@pytest.mark.suite({"derived_weights": "one line reads leaves of two stages"})
@pytest.mark.parametrize("name", ["shared_blocks", "early_and_late", "penalty", "islands", "derived_weights"])
def test_a_model_that_reads_its_units_in_no_order_of_stages_is_refused(name: str) -> None:
    with raises(SpecError, leaves=["of chunk 0", "of chunk 1"], fix='chunk="all"'):
        sharded.simulate(model_of(name), "full_shard", {"pipeline": 2, "shard": 2}, ADAMW, accumulate=3)


def test_rows_that_data_select_cross_a_cut() -> None:
    """They are as many as there can be at most, and those that are not there count nothing."""
    base = model_of("dense_skips")

    def loss(p: Any, x: Tensor, y: Tensor) -> fs.Mean:
        first, *rest = (w[:WIDE] for w in p.values())
        chosen = x.sum(1) > 0
        x = torch.tanh(x @ first)[chosen]
        for w in rest:
            x = torch.tanh(x @ w)
        return fs.Mean((x - y[chosen]).square().sum(), chosen.sum())

    model = replace(base, loss=loss)
    expected = reference.train(loss, model.params, sharded.by_steps(model), reference.sgd(0.1))
    axes = {"pipeline": 2, "shard": 2}
    for got in sharded.simulate(model, "full_shard", axes, fs.optim.sgd(0.1), accumulate=3):
        sharded.assert_same(got, expected)


@pytest.mark.long
def test_clipping_counts_a_tied_leaf_once() -> None:
    """Ranks that read early or late get the same bits."""
    axes = {"pipeline": 2, "shard": 2}
    plain, *others = (
        sharded.simulate(
            model_of("tied"), "full_shard", axes, CLIPPED, accumulate=3, grad_norm=True, adversary=mode
        )
        for mode in (None, "early", "late")
    )
    expected = truth("tied", "clipped")
    for got in plain:
        sharded.assert_same(got, expected)
        sharded.assert_floats(got.norms, expected.norms)
    first, *rest = itertools.chain(plain, *others)
    for got in rest:
        assert got.losses == first.losses and got.norms == first.norms
        assert all(torch.equal(got.params[path], value) for path, value in first.params.items())


class Normed(nn.Module):
    """A module of matrices and batch norms, whose statistics depend on the order of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_buffers_are_written_in_order_of_micro_batches() -> None:
    torch.manual_seed(0)
    module, micros = Normed().double(), 4
    plain = copy.deepcopy(module)
    batch = torch.randn(4 * micros, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part in batch.chunk(micros):
            (plain(part) / micros).backward()
        optimizer.step()
    mesh = fs.make_mesh(pipeline=2, simulated=True)
    apply, params = fs.make_functional(module)
    specs = fs.presets.full_shard(params, mesh, chunks=2)
    step = fs.shard_step(
        apply, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager", accumulate=micros
    )

    def run(rank: int) -> Any:
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, batch)
        return fs.unshard(state.params, specs, mesh)

    for got in fs.simulate(mesh, run):
        for path, value in plain.state_dict().items():
            torch.testing.assert_close(got[path].to(value.dtype), value, rtol=0, atol=1e-10)


def test_a_forward_and_aux_give_the_same_on_all_stages() -> None:
    params, x = chain(4), torch.randn(4, WIDTH)
    mesh = fs.make_mesh(pipeline=2, shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)

    def outputs(p: Any, x: Any) -> Any:
        first, second, third, fourth = p.values()
        middle = torch.tanh(x @ first) @ second
        end = torch.tanh(middle @ third) @ fourth
        return {"middle": middle, "end": end, "mean": fs.Mean(end.sum(), end.numel())}

    def objective(p: Any, x: Any) -> Any:
        made = outputs(p, x)
        return made["end"].square().mean(), {"middle": made["middle"], "size": made["middle"].abs().mean()}

    forward = fs.shard_forward(outputs, specs, mesh=mesh, backend="eager")
    step = fs.shard_step(objective, specs, mesh=mesh, backend="eager", accumulate=2)

    def run(rank: int) -> Any:
        shards, rows = fs.shard(params, specs, mesh), sharded.part([x], mesh.data_rank, 2)[0]
        (loss, aux), _ = step(shards, rows)
        return forward(shards, rows), loss, aux

    results = fs.simulate(mesh, run)
    want, mean = outputs(params, x), objective(params, x)[1]["size"]
    for rank, (made, _, aux) in enumerate(results):
        rows = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        for name in ("middle", "end"):
            torch.testing.assert_close(made[name], want[name][rows])
        torch.testing.assert_close(made["mean"].total, want["end"][rows].sum())
        torch.testing.assert_close(aux["middle"], want["middle"][rows][1:])  # the last micro-batch's
        torch.testing.assert_close(aux["size"].float(), mean)
