"""Weight gradients apart: a backward in two halves, the orders that they allow, schedules, and numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import sharded
import torch
import torch.nn.functional as F
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from models import model_of
from torch import Tensor
from toys import ROWS, WIDTH, chain, llama, lower, rows, run_chain

import fnshard as fs
from fnshard import ScheduleError, SpecError
from fnshard.compiler.kernels.differentiate import differentiate
from fnshard.compiler.kernels.kernel import Backward, Kernel
from fnshard.compiler.kernels.remat import NAMED, Policy
from fnshard.compiler.kernels.segment_source import SegmentSource
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.instructions import Accumulate, ReduceScatter, Run
from fnshard.compiler.schedule.kept_bytes import KeptBytes
from fnshard.compiler.schedule.tasks import ScheduledTask, bubble, count_kept, order_stages, usual_room
from fnshard.compiler.schedule.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:accumulate=")  # few micro-batches, on purpose
APART = (Way.FORWARD, Way.BACKWARD, Way.WEIGHTS)
LR, DECAY = 3e-3, 0.1
ADAMW = fs.optim.adamw(LR, weight_decay=DECAY)
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.2), fs.optim.sgd(0.1))

# ------------------------------------------------------------------ kernels


def conv_block() -> tuple[Callable[..., Any], dict[str, Tensor], Tensor]:
    """Make two convolutions with a norm between them; the first one's input needs no gradient."""
    shapes = {"a.w": (6, 3, 3, 3), "a.b": (6,), "n.w": (6,), "c.w": (4, 6, 3, 3), "c.b": (4,)}
    draw = torch.Generator().manual_seed(0)
    params = {p: torch.randn(s, generator=draw, dtype=torch.float64) / 3 for p, s in shapes.items()}

    def fn(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, p["a.w"], p["a.b"]))
        x = F.group_norm(x, 2, p["n.w"])
        return F.conv2d(x, p["c.w"], p["c.b"], padding=1).square().mean()

    return fn, params, torch.randn(2, 3, 8, 8, generator=draw, dtype=torch.float64)


def expert_block() -> tuple[Callable[..., Any], dict[str, Tensor], Tensor]:
    """Make a router and a stack of experts between two linear layers."""
    shapes = {"a.w": (8, 8), "e.router": (8, 3), "e.up": (3, 8, 16), "e.down": (3, 16, 8), "z.w": (8, 8)}
    draw = torch.Generator().manual_seed(0)
    params = {p: torch.randn(s, generator=draw, dtype=torch.float64) / 3 for p, s in shapes.items()}

    def fn(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        x = torch.tanh(x @ p["a.w"])
        share = (x @ p["e.router"]).softmax(-1)
        made = F.silu(torch.einsum("bi,eio->ebo", x, p["e.up"])) @ p["e.down"]
        x = x + torch.einsum("be,ebo->bo", share, made)
        return (x @ p["z.w"]).square().mean()

    return fn, params, torch.randn(ROWS, 8, generator=draw, dtype=torch.float64)


def transformer() -> tuple[Any, ...]:
    fn, params, *batch = llama(1)
    return fn, {p: v.double() for p, v in params.items()}, *batch


BLOCKS = {"transformer": transformer, "convolutions": conv_block, "experts": expert_block}


@cache
def sources(block: str) -> tuple[SegmentSource, ...]:
    fn, params, *batch = BLOCKS[block]()
    return tuple(lower(fn, params, *batch, ranks=1).segments.sources.values())


@cache
def pairs(block: str, policy: Policy) -> list[tuple[Kernel, Kernel]]:
    """Return each kernel in one, and with weight gradients apart."""
    return [
        tuple(
            differentiate(source, policy, trainable=True, target="cpu", apart=apart)
            for apart in (False, True)
        )
        for source in sources(block)
    ]


def products(*halves: Backward | None) -> Counter[str]:
    """Count the products of some graphs; a convolution's backward is as many as it has of `mask`."""
    found: Counter[str] = Counter()
    for node in [n for half in halves if half for n in half.graph.nodes]:
        name = str(node.target)
        if name == "aten.convolution_backward.default":
            found[name] += sum(node.args[-1][:2])
        elif name.split(".")[1:2] and name.split(".")[1] in ("mm", "bmm", "addmm", "baddbmm", "convolution"):
            found[name] += 1
    return found


def values_of(source: SegmentSource) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 8, a.shape, generator=draw) if not a.dtype.is_floating_point
        else torch.randn(a.shape, generator=draw, dtype=a.dtype).as_strided(a.shape, a.stride)
        for a in source.inputs
    ]  # fmt: skip


def gradients(kernel: Kernel) -> dict[int, Tensor]:
    """Run the forward of a kernel and the halves of its backward, one after another."""
    source, inputs = kernel.source, values_of(kernel.source)
    flat = kernel.forward(*inputs)
    outputs, saved = flat[: len(source.outputs)], flat[len(source.outputs) :]
    draw = torch.Generator().manual_seed(1)
    tangents = {
        i: torch.randn(outputs[i].shape, generator=draw, dtype=outputs[i].dtype) for i in kernel.tangents
    }
    known: dict[str, Any] = {"input": inputs, "output": outputs, "saved": saved, "tangent": tangents}
    made: dict[int, Tensor] = {}
    for half in kernel.halves.values():
        results = half.module(*[known[ref.kind][ref.index] for ref in half.inputs])
        made |= dict(zip(half.grads, results, strict=False))
        known["between"] = results[len(half.grads) :]
    return made


@pytest.mark.suite(but={
    "transformer-unit": "experts have products, convolutions their own",
})  # fmt: skip
@pytest.mark.parametrize(
    ("block", "policy"),
    [
        ("transformer", "unit"), ("convolutions", "none"), ("experts", "none"),
        pytest.param("transformer", "none", marks=pytest.mark.long),
        pytest.param("convolutions", "unit", marks=pytest.mark.long),
        pytest.param("experts", "unit", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_both_halves_make_the_gradients_of_the_whole_with_as_many_products(block: str, policy: str) -> None:
    apart = 0
    for whole, halves in pairs(block, NAMED[policy]):
        expected, got = gradients(whole), gradients(halves)
        assert got.keys() == expected.keys()
        for index, value in expected.items():
            assert torch.equal(got[index], value), (block, index)
        assert products(halves.backward, halves.weights) == products(whole.backward)
        apart += sum(products(halves.weights).values())
    assert apart == {"transformer": 8, "convolutions": 2, "experts": 5}[block]  # matrices that products read


@pytest.mark.parametrize(("block", "policy"), [("transformer", "unit"), ("experts", "none")])
def test_the_second_half_reads_no_leaf_and_makes_no_cotangent(block: str, policy: str) -> None:
    kernels = [kernel for _, kernel in pairs(block, NAMED[policy]) if kernel.weights]
    assert kernels
    for kernel in kernels:
        half, kinds = kernel.weights, [a.kind for a in kernel.source.inputs]
        assert {kinds[index] for index in half.grads} == {"leaf"}
        assert not [ref for ref in half.inputs if ref.kind == "input" and kinds[ref.index] == "leaf"]
        assert products(half).total() > 0


def bytes_between(kernel: Kernel) -> int:
    return sum(torch.Size(a.shape).numel() * a.dtype.itemsize for a in kernel.between)


def test_what_is_handed_on_is_the_cheapest_cut() -> None:
    """Two leaves of products read one value by views of it; a cast is made again."""

    def fn(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        x = torch.tanh(x @ p["u.a"])
        x = torch.tanh((x @ p["v.a"]).float()).to(torch.float64)
        return (x @ p["w.a"]).sum() + (x.view(2, 2, WIDTH) @ p["w.b"]).square().sum()

    params = {n: torch.randn(WIDTH, WIDTH, dtype=torch.float64) for n in ("u.a", "v.a", "w.a", "w.b")}
    found = lower(
        fn,
        params,
        rows().double(),
        ranks={"pipeline": 3, "shard": 1},
        accumulate=1,
        micro_order="zero_bubble",
    )
    first, middle, last = found.kernels.values()
    assert first.backward is None and first.between == ()  # x came with the batch
    assert bytes_between(middle) <= 4 * ROWS * WIDTH  # the cotangent before it is cast
    shapes = [tuple(a.shape) for a in last.between]
    assert len(shapes) <= 2 and all(torch.Size(s).numel() <= ROWS * WIDTH for s in shapes)


def test_frozen_leaves_have_no_second_half_and_equal_blocks_share_one() -> None:
    frozen = ("layers.1.*", fs.LayoutSpec(fs.P("shard"), trainable=False, chunk=0))
    how = {"ranks": {"pipeline": 2, "shard": 1}, "accumulate": 2, "micro_order": "zero_bubble"}
    low = lower(lambda p, x: run_chain(p, x).sum(), chain(6), rows(), policy={"rules": [frozen]}, **how)
    kernels = {s.units[0]: low.kernels[f"{s.source} apart"] for s in low.segments.segments}
    assert kernels["layers.1"].weights is None and kernels["layers.1"].backward is not None
    assert kernels["layers.2"] is kernels["layers.3"] is kernels["layers.4"]
    assert kernels["layers.2"].weights is not None


# ------------------------------------------------------------------ the order of tasks


@settings(deadline=None)
@given(
    stages=st.integers(1, 4), each=st.integers(1, 3), micros=st.integers(1, 9), limited=st.booleans(),
    costs=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3),
)  # fmt: skip
def test_every_task_runs_once_behind_what_it_reads(
    stages: int, each: int, micros: int, limited: bool, costs: tuple[float, ...]
) -> None:
    stage_of = [c % stages for c in range(stages * each)]
    room = usual_room(stages, len(stage_of)) if limited else None
    slots = order_stages(stage_of, micros, room, lambda chunk, way: costs[APART.index(way)], APART)
    place = {(s.chunk, s.micro, s.way): n for n, s in enumerate(slots)}
    assert len(place) == len(slots) == 3 * micros * len(stage_of)
    for (chunk, micro, way), number in place.items():
        before = {
            Way.FORWARD: [(chunk - 1, micro, way)],
            Way.BACKWARD: [(chunk, micro, Way.FORWARD), (chunk + 1, micro, way)],
            Way.WEIGHTS: [(chunk, micro, Way.BACKWARD)],
        }[way]
        assert all(place[b] < number for b in [*before, (chunk, micro - 1, way)] if b in place)
    for stage in range(stages):  # a stage does one thing at a time
        own = sorted((s.start, s.end) for s in slots if stage_of[s.chunk] == stage)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))


def most_kept(slots: Sequence[ScheduledTask], stage_of: Sequence[int], stage: int) -> int:
    """Return how many forwards of a stage wait for their last reader, at most."""
    own = sorted((s for s in slots if stage_of[s.chunk] == stage), key=lambda s: s.start)
    kept = [(s.way is Way.FORWARD) - (s.way is Way.WEIGHTS) for s in own]
    return max(itertools.accumulate(kept))


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 4), (8, 16)])
def test_the_bubble_is_zb_h1s_and_no_stage_keeps_more_than_the_first_one_of_1f1b(
    stages: int, micros: int
) -> None:
    stage_of, room = list(range(stages)), usual_room(stages, stages)
    together = order_stages(stage_of, micros, room)
    apart = order_stages(stage_of, micros, room, ways=APART)
    # (p - 1)(F + I + W) and (p - 1)(F + I - W), of p stages that compute 3m.
    assert bubble(together, stage_of) == pytest.approx((stages - 1) / (micros + stages - 1))
    assert bubble(apart, stage_of) == pytest.approx((stages - 1) / (3 * micros + stages - 1))
    assert max(most_kept(apart, stage_of, stage) for stage in stage_of) == stages


def test_a_limit_of_bytes_makes_gradients_of_leaves_earlier() -> None:
    """Stages keep as much as the fullest one of 1F1B, and what one backward hands on.

    Here that is more than a forward keeps.
    """
    stage_of, room, keeps = list(range(4)), usual_room(4, 4), [KeptBytes(1.0, 2.5)] * 4
    together = order_stages(stage_of, 8, room)
    most = max(count_kept(together, stage_of, keeps).values())
    free, wide, tight = (
        order_stages(stage_of, 8, room, None, APART, keeps, limit) for limit in (math.inf, 2 * most, most)
    )
    assert most == 4 and max(count_kept(free, stage_of, keeps).values()) == 10
    assert max(count_kept(wide, stage_of, keeps).values()) <= 8 + 1.5
    assert max(count_kept(tight, stage_of, keeps).values()) <= 4 + 1.5
    idle = [bubble(slots, stage_of) for slots in (free, wide, tight, together)]
    assert idle == sorted(idle) and idle[0] < idle[2] < idle[3]


def test_interleaved_chunks_have_a_smaller_bubble_too_and_keep_less() -> None:
    stage_of = [c % 4 for c in range(8)]
    slots = order_stages(stage_of, 8, usual_room(4, 8), ways=APART)
    assert bubble(slots, stage_of) == pytest.approx(3 / (48 + 3))
    assert max(most_kept(slots, stage_of, stage) for stage in range(4)) == 8 < max(usual_room(4, 8))


# ------------------------------------------------------------------ schedules on paper


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


@cache
def stages(order: str = "zero_bubble", accumulate: int = 4, **options: Any) -> Any:
    batch, axes = torch.zeros(accumulate * 2, WIDTH), {"pipeline": 2, "shard": 2}
    how = {"accumulate": accumulate, "micro_order": order, **options}
    return lower(loss, chain(4), batch, ranks=axes, **how)


def test_weight_gradients_read_no_leaf_and_are_reduced_behind_the_last() -> None:
    apart, together = stages(), stages("depth")
    for one, other in zip(apart.schedules, together.schedules, strict=True):
        counts, usual = one.counts(), other.counts()
        for verb in ("reduce_scatter", "send", "recv"):
            assert counts[verb] == usual[verb], verb
        runs = [i for i in one.instructions if isinstance(i, Run)]
        ways = Counter(run.way for run in runs)
        assert ways[Way.WEIGHTS] == ways[Way.FORWARD] == 8
        readers = {run.way for run in runs if any(n.startswith("p:") for n in run.reads)}
        assert readers == {Way.FORWARD, Way.BACKWARD}
    gathers = [[schedule.counts()["gather"] for schedule in low.schedules] for low in (apart, together)]
    assert gathers == [[9, 12], [9, 9]]  # a leaf is freed where a second half runs before its next reader
    assert apart.communication() and apart.comm_analysis()["send"] == together.comm_analysis()["send"]


def test_a_smaller_bubble_takes_memory_as_far_as_it_is_allowed() -> None:
    """Gradients of leaves are made of twice the bytes that a forward keeps."""
    params = {f"layers.{i}.w": torch.empty(4096, 4096, device="meta") for i in range(8)}

    def price(order: str, memory: float = 1.0) -> tuple[float, int]:
        batch = torch.empty(8 * 4096, 4096, device="meta")
        how = {"ranks": {"pipeline": 4, "shard": 1}, "device": "cuda", "accumulate": 8, "micro_order": order}
        low = lower(loss, params, batch, **how, zero_bubble_memory=memory)
        timeline = low.timeline("h100")
        assert timeline.model_flops == pytest.approx(timeline.hardware_flops)
        kept = max(low.memory_analysis(stage=s).peak["saved activations"] for s in range(4))
        return timeline.bubble, kept

    (depth, usual), (tight, as_much), (wide, more) = (
        price("depth"), price("zero_bubble"), price("zero_bubble", 3)
    )  # fmt: skip
    assert wide < 0.6 * depth and wide < tight < 0.8 * depth
    assert as_much <= 1.15 * usual < 2 * usual < more


def test_the_ledger_knows_that_recomputed_inputs_live_until_their_weight_gradients() -> None:
    depth, apart = stages("depth", remat="unit"), stages(remat="unit")
    kept, longer = (a.memory_analysis(stage=1).peak["saved activations"] for a in (depth, apart))
    assert longer > kept
    for schedule in apart.schedules:
        runs = [line for line in schedule.instructions if isinstance(line, Run)]
        made = {n: run.way for run in runs for n in run.writes}
        for run in [run for run in runs if run.way is Way.WEIGHTS]:
            between = [n for n in run.reads if n.path.startswith(f"w{run.segment}.")]
            assert {made[n] for n in between} <= {Way.BACKWARD}
            assert set(between) <= set(run.drops), "it dies with its last reader"
    assert any(kernel.between for kernel in apart.kernels.values())


# ------------------------------------------------------------------ planted faults

Lines = list[Any]


def find(lines: Lines, kind: type, number: int = 0, **values: Any) -> int:
    """Return where the line of this number and class stands."""
    return [
        n for n, i in enumerate(lines)
        if isinstance(i, kind) and all(getattr(i, k) == v for k, v in values.items())
    ][number]  # fmt: skip


def drop_a_weight_gradient(lines: Lines) -> None:
    """Drop it with all that reads what it makes, so that nothing else misses it."""
    at = find(lines, Run, 2, way=Way.WEIGHTS)
    made = lines.pop(at).writes
    reader = next(n for n, i in enumerate(lines) if isinstance(i, Accumulate) and set(made) & set(i.reads))
    old, new = (n for n in lines[reader].reads if n not in made), lines[reader].writes[0]
    before = next(old, None)
    del lines[reader]
    for number, line in enumerate(lines):
        renamed = {new: before}
        lines[number] = replace(
            line, reads=tuple(renamed.get(n, n) for n in line.reads),
            drops=tuple(renamed.get(n, n) for n in line.drops if n not in made),
        )  # fmt: skip


def double_a_weight_gradient(lines: Lines) -> None:
    at = find(lines, Run, 0, way=Way.WEIGHTS)
    again = tuple(n.of(n.micro, f"{n.version}!") for n in lines[at].writes)
    lines.insert(at, replace(lines[at], writes=again, drops=()))


def reduce_before_the_last(lines: Lines) -> None:
    """Let the reduction send the sum before the last micro-batch's gradient is added."""
    scatter = find(lines, ReduceScatter)
    add = [
        n
        for n, i in enumerate(lines[:scatter])
        if isinstance(i, Accumulate) and i.bucket == lines[scatter].bucket
    ][-1]
    before = next(n for n in lines[add].reads if n.kind is lines[scatter].reads[0].kind)
    moved = replace(lines.pop(scatter), reads=(before,))
    lines.insert(add, moved)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (drop_a_weight_gradient, ["wgrad of segment", "0 times"]),
        (double_a_weight_gradient, ["wgrad of segment", "2 times"]),
        (reduce_before_the_last, "is in no sum"),
    ],
)  # fmt: skip
def test_faults_of_weight_gradients_are_found(plant: Callable[[Lines], None], said: str) -> None:
    schedule = stages().schedules[0]
    lines = list(schedule.instructions)
    plant(lines)
    with raises(ScheduleError, says=said):
        verify(schedule.with_instructions(lines))
    assert verify(schedule)


def test_a_mesh_without_a_pipeline_is_refused_with_the_ways_out() -> None:
    with raises(SpecError, leaves='micro_order="zero_bubble"', fix="make_mesh(pipeline=4") as error:
        lower(loss, chain(2), rows(), ranks=2, micro_order="zero_bubble")
    assert "make_mesh(pipeline=4" in str(error.value) and '"depth"' in str(error.value)


# ------------------------------------------------------------------ numbers


@cache
def truth(name: str, optimizer: str = "adamw") -> reference.Trained:
    """Train in a naive loop over whole global batches."""
    model = model_of(name)
    steps = [[batch] for batch in model.batches(sharded.STEPS)]
    made, clip = {"adamw": (reference.adamw(LR, DECAY), None), "clipped": (reference.sgd(0.1), 0.2)}[
        optimizer
    ]
    return reference.train(model.loss, model.params, steps, made, frozen=model.frozen, clip=clip)


CASES: list[tuple[str, str, dict[str, int], int, dict[str, Any]]] = [
    ("gpt", "full_shard", {"pipeline": 2, "shard": 2}, 6, {"chunks": 2}),
    ("gpt", "zero2", {"pipeline": 4}, 3, {"remat": "unit"}),
    ("tied", "full_shard", {"pipeline": 2}, 3, {"rules": [("embed.weight", fs.LayoutSpec(chunk="all"))]}),
    ("frozen", "full_shard", {"pipeline": 2, "shard": 2}, 3, {"remat": "unit+offload"}),
    ("dense_skips", "zero2", {"pipeline": 4}, 3, {"remat": 0.5}),
]  # fmt: skip
POLICY = ("chunks", "rules")


def train_model(
    name: str, preset: str, axes: Mapping[str, int], accumulate: int, options: Mapping[str, Any],
    optimizer: Any = ADAMW, order: str = "zero_bubble", **more: Any,
) -> list[reference.Trained]:  # fmt: skip
    policy = {k: v for k, v in options.items() if k in POLICY}
    rest = {k: v for k, v in options.items() if k not in POLICY}
    return sharded.simulate(
        model_of(name), preset, axes, optimizer,
        policy=policy, accumulate=accumulate, micro_order=order, **rest, **more,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "preset", "axes", "accumulate", "options"),
    CASES,
)
def test_training_equals_the_naive_loop(
    name: str, preset: str, axes: dict[str, int], accumulate: int, options: dict[str, Any]
) -> None:
    expected = truth(name)
    for got in train_model(name, preset, axes, accumulate, options):
        sharded.assert_same(got, expected)


@pytest.mark.parametrize("adversary", ["late", pytest.param("early", marks=pytest.mark.long)])
def test_clipped_training_on_ranks_that_read_early_or_late(adversary: Any) -> None:
    expected = truth("gpt", "clipped")
    how = {"optimizer": CLIPPED, "adversary": adversary}
    for got in train_model("gpt", "full_shard", {"pipeline": 2, "shard": 2}, 3, {"remat": "unit"}, **how):
        sharded.assert_same(got, expected)
        sharded.assert_floats(got.norms, expected.norms)


def test_it_is_bitwise_what_backwards_in_one_give() -> None:
    """Also where dropout draws again what it has drawn."""

    def noisy(p: Any, x: Any) -> Any:
        return run_chain(p, x, lambda x, i: F.dropout(x, 0.3)).square().mean()

    params, x = {p: v.double() for p, v in chain(4).items()}, torch.randn(8, WIDTH, dtype=torch.float64)
    mesh = fs.make_mesh(pipeline=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh, chunks=2)

    def params_after(order: str, remat: str) -> dict[str, Tensor]:
        step = fs.shard_step(
            noisy, specs, mesh=mesh, optimizer=ADAMW, backend="eager", accumulate=4, micro_order=order,
            remat=remat,
        )  # fmt: skip

        def run(rank: int) -> Any:
            state = step.init(params)
            for _ in range(2):
                state, _ = step(state, x)
            return fs.unshard(state.params, specs, mesh)

        return fs.simulate(mesh, run)[0]

    for remat in ("none", "unit"):
        depth, apart = (params_after(order, remat) for order in ("depth", "zero_bubble"))
        assert all(torch.equal(depth[p], apart[p]) for p in depth)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "unit"])
@pytest.mark.parametrize("preset", ["full_shard", "zero1"])
@pytest.mark.parametrize("micros", [4, 8])
@pytest.mark.parametrize(("pipeline", "chunks"), [(2, 1), (2, 2), (4, 1)])
def test_orders_train_alike_everywhere(
    pipeline: int, chunks: int, micros: int, preset: str, remat: str
) -> None:
    """A chain of eight, on simulated ranks, clipped: bitwise what 1F1B gives."""
    params, x = {p: v.double() for p, v in chain(8).items()}, torch.randn(16, WIDTH, dtype=torch.float64)
    mesh = fs.make_mesh(pipeline=pipeline, shard=2, simulated=True)
    specs = fs.presets.PRESETS[preset](params, mesh, chunks=chunks)

    def after(order: str) -> dict[str, Tensor]:
        step = fs.shard_step(
            loss, specs, mesh=mesh, optimizer=CLIPPED, backend="eager", accumulate=micros, micro_order=order,
            remat=remat,
        )  # fmt: skip

        def run(rank: int) -> Any:
            state = step.init(params)
            for _ in range(2):
                state, _ = step(state, sharded.part([x], mesh.data_rank, 2)[0])
            return fs.unshard(state.params, specs, mesh)

        return fs.simulate(mesh, run)[0]

    depth, apart = after("depth"), after("zero_bubble")
    assert all(torch.equal(depth[p], apart[p]) for p in depth)


@pytest.mark.long
def test_both_halves_compile_once_for_equal_blocks() -> None:
    params, x = chain(6), rows()
    mesh = fs.make_mesh(pipeline=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)

    def run_with(backend: str) -> Any:
        step = fs.shard_step(
            lambda p, x: run_chain(p, x).square().mean(), specs, mesh=mesh, optimizer=fs.optim.sgd(0.1),
            backend=backend, accumulate=2, micro_order="zero_bubble",
        )  # fmt: skip

        def run(rank: int) -> Any:
            state, _ = step(step.init(params), x)
            return fs.unshard(state.params, specs, mesh)

        return step, fs.simulate(mesh, run)[0]

    step, compiled = run_with("inductor")
    _, eager = run_with("eager")
    for path, value in eager.items():
        torch.testing.assert_close(compiled[path], value)
    kernels = step.lower(params, x).kernels.values()
    assert len(kernels) == 3  # the first, the last, and those between
    assert step.compile_stats.compiles == sum(len(k.modules) for k in kernels)
