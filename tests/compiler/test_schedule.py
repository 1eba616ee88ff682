"""The schedule: what is gathered, reduced and updated, when and how many bytes, on meshes of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toys import WIDTH, chain, llama, lower, rows, run_chain

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.compiler.schedule.instructions import (
    AllReduce,
    Gather,
    Instruction,
    Local,
    OverlappedUpdate,
    Publish,
    ReduceScatter,
    ReduceUpdate,
    Run,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.step.lowered import Lowered

WIDE = 64  # divides by every world


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


def lines(low: Lowered, kind: type, phase: str = "") -> list[Any]:
    return [i for i in low.schedule.instructions if isinstance(i, kind) and i.phase.startswith(phase)]


def units_of(found: list[Instruction]) -> list[str]:
    return [i.unit for i in found]


# ------------------------------------------------------------------ full_shard


def test_full_shard_gathers_twice_and_reduces_once() -> None:
    low = lower(*llama(4))
    inner = [f"layers.{i}" for i in range(4)]
    assert units_of(lines(low, Gather, "forward")) == ["embed", *inner, "norm", "head"]
    # The head is still there from the forward; the backward of an embedding reads no weight.
    assert units_of(lines(low, Gather, "backward")) == ["norm", *inner[::-1]]
    assert units_of(lines(low, ReduceScatter)) == ["head", "norm", *inner[::-1], "embed"]
    assert not lines(low, AllReduce) and not lines(low, Publish)
    assert sorted(units_of(lines(low, Update))) == sorted(["embed", *inner, "norm", "head"])


@pytest.mark.parametrize("world", [2, 64])
def test_bytes_are_exact(world: int) -> None:
    params = chain(4, WIDE)
    policy = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    low = lower(loss, params, rows(WIDE).bfloat16(), ranks=world, policy=policy)
    one = WIDE * WIDE
    moved = low.comm_analysis()
    # Four units forward; two again in the backward (not the last, and the first's inputs need no gradient).
    assert moved["gather"] == {"count": 6, "bytes": 6 * one * 2}
    assert moved["reduce_scatter"] == {"count": 4, "bytes": 4 * one * 4}


def test_bytes_of_uneven_leaves_count_their_padding() -> None:
    params = {"a.w": torch.zeros(7, 5), "b.w": torch.zeros(5, 3)}
    low = lower(lambda p, x: (x @ p["a.w"] @ p["b.w"]).sum(), params, torch.zeros(2, 7), ranks=4)
    numel_a, numel_b = 2 * 5, 5 * 1  # of 7 x 5 by rows: padded to 8; of 5 x 3: 3 -> 4 columns pad least
    assert low.comm_analysis()["reduce_scatter"] == {"count": 2, "bytes": 4 * 4 * (numel_a + numel_b)}


# ------------------------------------------------------------------ presets: what is resident, what moves

PARTS = {  # what DeepSpeed (ZeRO 1, 2, 3), FSDP and DDP document: True is sharded, False is whole
    # preset: (parameters, gradients, optimizer state and master weights)
    "no_shard": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "shard_grad_op": (True, True, True),
    "full_shard": (True, True, True),
    "hybrid_shard": (True, True, True),
}


@pytest.mark.parametrize("preset", PARTS)
@pytest.mark.parametrize("world", [1, 8])
def test_resident_bytes(preset: str, world: int) -> None:
    """One rank's bytes: bf16 parameters, fp32 gradients, fp32 master weights and two slots of Adam."""
    params = {p: v.bfloat16() for p, v in chain(3, WIDE).items()}
    mesh = fs.make_mesh(shard=world, abstract=True, device="cpu")
    specs = fs.presets.PRESETS[preset](
        params, mesh, optimizer_dtype=torch.float32, reduce_dtype=torch.float32
    )
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), backend="eager")
    state = step.init(params)
    low = step.lower(params, rows(WIDE).bfloat16())
    numel = 3 * WIDE * WIDE
    stored, gradients, optimizer = (world if sharded else 1 for sharded in PARTS[preset])

    def bytes_of(tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    assert bytes_of(state.params.values()) == 2 * numel // stored
    for slot in state.opt_state["layers.0.w"]:
        assert bytes_of(slots[slot] for slots in state.opt_state.values()) == 4 * numel // optimizer
    assert all(len(slots) == 3 for slots in state.opt_state.values())
    reduced = [low.schedule.buckets[name] for name in low.schedule.reduced]
    assert sum(b.row_bytes for b in reduced) == 4 * numel // gradients


@pytest.mark.parametrize("world", [2, 8])
def test_collectives_of_every_preset(world: int) -> None:
    found = {}
    for preset in PARTS:
        axes = {"replicate": 2, "shard": world // 2} if preset == "hybrid_shard" else {"shard": world}
        low = lower(loss, chain(4, WIDE), rows(WIDE), ranks=axes, preset=preset)
        counts = low.schedule.counts()
        verbs = ("gather", "reduce_scatter", "all_reduce", "publish", "reduce_scalars")
        found[preset] = tuple(counts.get(verb, 0) for verb in verbs)
    inner = world // 2 > 1
    assert found == {
        #               gather        scatter        sum publish scalars
        "no_shard": (0, 0, 4, 0, 1),
        "zero1": (0, 0, 4, 4, 1),
        "zero2": (0, 4, 0, 4, 1),
        "shard_grad_op": (4, 4, 0, 0, 1),
        "full_shard": (6, 4, 0, 0, 1),
        "hybrid_shard": (6 * inner, 4 * inner, 4, 0, 1),
    }


# ------------------------------------------------------------------ prefetch, overlap, reshard


def most_alive(plan: Schedule, phase: str) -> int:
    """Return the most units whose leaves are gathered or on the way while a kernel runs."""
    alive: dict[str, str] = {}
    most = 0
    for line in plan.instructions:
        if isinstance(line, Gather):
            alive[line.writes[0]] = line.unit
        if isinstance(line, Wait) and line.reads[0] in alive:
            unit = alive.pop(line.reads[0])
            alive |= dict.fromkeys(line.writes, unit)
        if isinstance(line, Run) and line.phase == phase:
            most = max(most, len(set(alive.values())))
        for name in line.drops:
            alive.pop(name, None)
    return most


@pytest.mark.parametrize(
    ("depth", "forward", "backward"),
    # The unit that runs, and `depth` units ahead of it.
    [(0, 1, 1), (1, 2, 2), (3, 4, 4), ((3, 0), 4, 1)],
)
def test_prefetch_depth_bounds_what_is_alive(depth: Any, forward: int, backward: int) -> None:
    low = lower(loss, chain(8), rows(), prefetch=depth)
    assert most_alive(low.schedule, "forward") == forward
    assert most_alive(low.schedule, "backward") == backward
    assert low.schedule.planned == max(forward, backward)
    # The same collectives in the same order, whatever the depth.
    none = lower(loss, chain(8), rows(), prefetch=0)
    assert [i.bucket for i in lines(low, Gather)] == [i.bucket for i in lines(none, Gather)]


def test_a_gather_passes_one_tiny_kernel_besides() -> None:
    """A norm's kernel hides no gather of the head; the memory that its unit takes is nothing."""
    widths = {"a.w": (64, 64), "norm.w": (64,), "middle.w": (64,), "head.w": (64, 64)}
    params = {path: torch.ones(shape) for path, shape in widths.items()}

    def scaled(p: Any, x: Any) -> Any:
        hidden = ((x @ p["a.w"]).relu() * p["norm.w"]).tanh() * p["middle.w"]
        return (hidden.sin() @ p["head.w"]).sum()

    low = lower(scaled, params, torch.ones(4, 64))
    order = [(i.verb, i.unit) for i in low.schedule.instructions if isinstance(i, Run | Gather)]
    forward = order[: order.index(("run", "head"))]
    # It passes `middle`, by the depth of 1, and `norm`, which is tiny.
    assert forward.index(("gather", "head")) < forward.index(("run", "norm"))
    assert forward.index(("gather", "head")) > forward.index(("run", "a"))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_overlap_waits_for_reductions_later(depth: int) -> None:
    low = lower(loss, chain(6), rows(), overlap=depth)
    for number, line in enumerate(low.schedule.instructions):
        if isinstance(line, ReduceScatter):
            wait = next(
                i
                for i, w in enumerate(low.schedule.instructions)
                if isinstance(w, Wait) and w.reads == line.writes
            )
            between = [i for i in low.schedule.instructions[number:wait] if isinstance(i, Run)]
            later = [i for i in low.schedule.instructions[number:] if isinstance(i, Run)]
            assert len(between) == min(depth, len(later))


@pytest.mark.parametrize(
    ("remat", "depth", "accumulate"),
    [("offload", (0, 0), 2), ("offload", (1, 1), 1), ({"layers.*": "unit+offload"}, (1, 1), 2)],
)
def test_overlap_moves_no_kernel(remat: Any, depth: tuple[int, int], accumulate: int) -> None:
    """Activations on their way to the host are waited for before the kernel that loads them again."""
    options = {"remat": remat, "prefetch": depth, "accumulate": accumulate, "ranks": 2}
    early, late = (lower(loss, chain(5), rows(), overlap=n, **options) for n in (0, 5))

    def kernels_and_gathers(low: Lowered) -> list[tuple[str, str]]:
        return [(i.unit, i.verb) for i in low.schedule.instructions if isinstance(i, Run | Gather)]

    assert kernels_and_gathers(late) == kernels_and_gathers(early)


def test_reshard_per_unit() -> None:
    keep = ("layers.2.*", LayoutSpec(P("shard"), reshard=False))
    low = lower(loss, chain(5), rows(), policy={"rules": [keep]})
    assert units_of(lines(low, Gather, "forward")) == [f"layers.{i}" for i in range(5)]
    assert units_of(lines(low, Gather, "backward")) == ["layers.3", "layers.1"]


# ------------------------------------------------------------------ accumulation


@pytest.mark.parametrize(
    ("mode", "preset", "gathers", "reduces"),
    [
        ("reduce", "full_shard", 3 * 6, 3 * 4),
        ("local", "full_shard", 3 * 6, 4),
        ("reduce", "shard_grad_op", 3 * 4, 3 * 4),
        ("local", "shard_grad_op", 3 * 4, 4),
        ("reduce", "zero2", 0, 3 * 4),
        ("local", "no_shard", 0, 4),
        ("reduce", "no_shard", 0, 3 * 4),
        ("breadth", "full_shard", 6, 4),
        ("breadth", "shard_grad_op", 4, 4),
        ("breadth", "zero2", 0, 4),
        ("breadth", "no_shard", 0, 4),
    ],
)
def test_collectives_under_accumulation(mode: str, preset: str, gathers: int, reduces: int) -> None:
    how = {"micro_order": mode} if mode == "breadth" else {"accumulate_mode": mode}
    low = lower(loss, chain(4), torch.zeros(6, WIDTH), ranks=2, preset=preset, accumulate=3, **how)
    counts = low.schedule.counts()
    assert counts.get("gather", 0) == gathers
    assert counts.get("reduce_scatter", 0) + counts.get("all_reduce", 0) == reduces
    assert counts["accumulate"] == 3 * 4
    assert counts["update"] == 4
    assert counts["reduce_scalars"] == 1


# ------------------------------------------------------------------ updates


def test_units_are_updated_while_the_backward_goes_on() -> None:
    low = lower(loss, chain(6), rows())
    order = [i for i in low.schedule.instructions if isinstance(i, Update | Run)]
    first_update = next(n for n, i in enumerate(order) if isinstance(i, Update))
    runs_after = [i for i in order[first_update:] if isinstance(i, Run)]
    assert len(runs_after) >= 3
    assert units_of([i for i in order if isinstance(i, Update)]) == [
        f"layers.{i}" for i in reversed(range(6))
    ]


@pytest.mark.parametrize(("ranks", "depth"), [(1, 1), (8, 1), (2, 3)])
def test_updates_overlap_kernels_on_a_gpu(ranks: int, depth: int) -> None:
    """All but those that no kernel follows; their gradients live until they are waited for."""
    low = lower(loss, chain(6), rows(), ranks=ranks, overlap=depth, device="cuda")
    order, issued = list(low.schedule.instructions), lines(low, OverlappedUpdate)
    assert len(lines(low, Update)) == 6 and len(issued) >= max(2, 6 - 2 * depth)
    for line in issued:
        start = order.index(line)
        end = next(n for n, i in enumerate(order) if isinstance(i, Wait) and i.reads == line.writes)
        freed = next(n for n, i in enumerate(order) if line.reads[0] in i.drops)
        kernels, later = ([i for i in order[start:stop] if isinstance(i, Run)] for stop in (end, None))
        assert len(kernels) == min(depth, len(later)) > 0 and freed > end


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"}, {"overlap": 0}, {"optimizer": fs.optim.muon(1e-3)},
        {"policy": {"optimizer_memory": "host"}}, {"preset": "zero1", "ranks": 8},  # published at once
        {"optimizer": fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))},
    ],
)  # fmt: skip
def test_what_is_updated_in_the_order_of_the_schedule(options: dict[str, Any]) -> None:
    low = lower(loss, chain(6), rows(), **{"device": "cuda", "ranks": 1, **options})
    assert lines(low, Update) and not lines(low, OverlappedUpdate)


def test_one_bucket_holds_leaves_of_optimizers_that_sum_and_of_others() -> None:
    """Leaves of one optimizer and shape are updated by one line."""
    params = {"a.w": torch.ones(16, 8), "a.bias": torch.ones(8), "a.v": torch.ones(16, 8, 8)}
    rules = ("*bias", fs.optim.adamw(1e-3)), ("*v", fs.optim.lars(1e-3)), ("*", fs.optim.adafactor(1e-3))
    low = lower(lambda p, x: (x @ p["a.w"] + p["a.bias"] + p["a.v"].sum()).sum(), params, torch.ones(8, 16),
                ranks=2, optimizer=fs.optim.by_path(*rules))  # fmt: skip
    updates = lines(low, Update)
    assert len({line.bucket for line in updates}) == 1 and len({line.paths for line in updates}) == 3
    summed = [line.paths for line in lines(low, ReduceUpdate)]
    assert {path for paths in summed for path in paths} == {"a.w", "a.v"}


def _mean(p: Any, x: Any) -> fs.Mean:
    y = run_chain(p, x)
    return fs.Mean(y.sum(), (x > 0).sum())


CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))


@pytest.mark.parametrize(
    ("fn", "optimizer", "dtype"),
    [
        (loss, CLIPPED, torch.float32),
        (_mean, fs.optim.adamw(1e-3), torch.float32),
        (loss, fs.optim.adamw(1e-3), torch.float16),  # whose overflow all ranks must know of
    ],
    ids=["clip", "Mean", "fp16"],
)
def test_what_is_global_stands_before_all_updates(
    fn: Callable[..., Any], optimizer: Any, dtype: torch.dtype
) -> None:
    params = {p: v.to(dtype) for p, v in chain(5).items()}
    low = lower(fn, params, rows().to(dtype), optimizer=optimizer)
    found = list(low.schedule.instructions)
    arrived = next(n for n, i in enumerate(found) if isinstance(i, Wait) and i.of.verb == "reduce_scalars")
    updates = [n for n, i in enumerate(found) if isinstance(i, Update)]
    assert len(updates) == 5 and min(updates) > arrived
    assert all("scalars" in found[n].reads for n in updates)


def test_clipping_costs_no_collective_of_its_own() -> None:
    plain, clipped = (lower(loss, chain(5), rows(), optimizer=o) for o in (fs.optim.adamw(1e-3), CLIPPED))

    def collectives(low: Lowered) -> list[str]:
        return sorted(line.split(" values")[0].rstrip("0123456789 ") for line in low.schedule.communication())

    assert collectives(plain) == collectives(clipped)  # the scalars' vector is longer, that is all
    assert clipped.schedule.counts()["norms"] == 5


def test_without_an_optimizer_gradients_are_outputs() -> None:
    low = lower(loss, chain(3), rows(), optimizer=None)
    assert "update" not in low.schedule.counts()
    assert {n for n in low.schedule.outputs if n.startswith("r:")} == set(low.schedule.reduced.values())


# ------------------------------------------------------------------ frozen, unused and tied leaves


def test_frozen_leaves_are_gathered_and_nothing_else() -> None:
    frozen = ("layers.1.*", LayoutSpec(P("shard"), trainable=False))
    low = lower(loss, chain(4), rows(), policy={"rules": [frozen]})
    assert units_of(lines(low, Gather, "forward")) == [f"layers.{i}" for i in range(4)]
    for kind in (ReduceScatter, Update, Local):
        assert "layers.1" not in units_of(lines(low, kind))


def test_unused_leaves_get_a_zero_gradient_and_no_collective() -> None:
    params = {**chain(2), "spare.w": torch.ones(WIDTH, WIDTH)}

    def fn(p, x):
        return run_chain({k: v for k, v in p.items() if k.startswith("layers")}, x).sum()

    low = lower(fn, params, rows())
    assert "spare" not in units_of(lines(low, Gather)) + units_of(lines(low, ReduceScatter))
    (local,) = lines(low, Local)
    assert local.unit == "spare" and local.reads == ()
    assert "spare" in units_of(lines(low, Update))  # weight decay still acts on it


# ------------------------------------------------------------------ text, collectives, values


def test_text_is_stable_and_says_what_happens() -> None:
    texts = {lower(loss, chain(3), rows()).as_text() for _ in range(3)}
    (text,) = texts
    first, *rest = text.splitlines()
    assert first.startswith("# schedule on mesh (shard=8):")
    assert [int(line.split()[0]) for line in rest] == list(range(len(rest)))
    gather = next(line for line in rest if " gather " in line)
    assert "layers.0" in gather and "f32" in gather and "MB" in gather
    assert str(lower(loss, chain(3), rows())) == text


def test_what_ranks_compare_are_the_collectives_not_the_batch() -> None:
    def sent(batch: int = 4, **options: Any) -> tuple[str, ...]:
        return lower(loss, chain(3), torch.zeros(batch, WIDTH), **options).schedule.communication()

    assert sent(4) == sent(12)
    others = [
        sent(),
        sent(ranks=4),
        sent(preset="zero2"),
        sent(policy={"compute_dtype": torch.float16}, optimizer=None),
        sent(policy={"rules": [("layers.1.*", LayoutSpec(P("shard"), trainable=False))]}),
        sent(policy={"units": lambda params: dict.fromkeys(params, "all")}),
    ]
    assert len(set(others)) == len(others)


def test_forward_alone() -> None:
    params = chain(4)
    mesh = fs.make_mesh(shard=8, abstract=True, device="cpu")
    forward = fs.shard_forward(lambda p, x: run_chain(p, x), fs.presets.full_shard(params, mesh), mesh=mesh)
    low = forward.lower(params, rows())
    assert low.schedule.counts() == {"gather": 4, "wait": 4, "run": 4}
    assert all(not k.saved and k.backward is None for k in low.kernels.values())
