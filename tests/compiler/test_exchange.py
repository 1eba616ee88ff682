"""Exchanges inside `fn`: what ranks give is what one autograd graph over all ranks gives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor
from toys import chain, lower

import fnshard as fs
from fnshard import Mesh, TraceError
from fnshard.compiler.frontend.exchange import EXCHANGE
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segments import last_first
from fnshard.compiler.schedule.instructions import Exchange

Params = dict[str, Tensor]
WIDTH, ROWS = 4, 4
D = torch.float64


def params() -> Params:
    draw = torch.Generator().manual_seed(0)
    shapes = {"layers.0.w": (WIDTH, WIDTH), "layers.1.w": (WIDTH, WIDTH), "scale": (WIDTH,)}
    return {p: torch.randn(s, dtype=D, generator=draw) for p, s in shapes.items()}


def rows(ranks: int) -> Tensor:
    return torch.randn(ranks * ROWS, WIDTH, dtype=D, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------ programs; `on`: fs, or ranks as threads


def centred(on: Any, p: Params, x: Tensor) -> Tensor:
    """Normalise each layer over the batch by two sums; the loss is this rank's own."""
    for i in range(2):
        x = x @ p[f"layers.{i}.w"]
        count = on.psum(len(x))
        x = x - on.psum(x.sum(0)) / count
        x = x / (on.psum(x.square().sum(0)) / count + 1e-3).sqrt()
    return (x * p["scale"]).tanh().square().mean()


def nested(on: Any, p: Params, x: Tensor) -> Tensor:
    """Sum what was summed, views, a unit's middle, along another dim, and a value that is read twice."""
    h = (x @ p["layers.0.w"]).tanh()
    total = on.psum(h[1:].T)
    h = h + on.psum((total * h[1:].T).sum()) / 100 + total.mean()
    wide = on.all_gather(h.view(2, -1), dim=1)
    return ((h @ p["layers.1.w"]).square().mean() + wide.cos().mean()) * p["scale"].sum()


def of_leaves(on: Any, p: Params, x: Tensor) -> Tensor:
    """Exchange what depends on leaves alone, small and large, a leaf, a constant and the loss itself."""
    norm = on.psum(p["layers.0.w"].square().mean())
    w = on.psum(p["layers.1.w"] * 2) + on.all_gather(p["scale"])[: p["scale"].shape[0]]
    ones = on.psum(torch.ones((), dtype=D))
    return on.psum((x @ w).tanh().mean() * norm + p["layers.0.w"].sum() * ones)


def detached(on: Any, p: Params, x: Tensor) -> Tensor:
    """Exchange integers, in no_grad, and a sum that nobody uses: they send no cotangent."""
    h = x @ p["layers.0.w"]
    counted = on.psum((h > 0).sum(0))
    with torch.no_grad():
        mean = on.psum(h.sum(0))
    on.psum(h.exp())
    return ((h - mean) / counted.clamp(min=1)).square().mean() + (x @ p["layers.1.w"] * p["scale"]).mean()


def a_mean(on: Any, p: Params, x: Tensor) -> fs.Mean:
    h = (x @ p["layers.0.w"]).tanh()
    kept = x[:, 0] > 0
    h = h - on.psum(h.sum(0)) / on.psum(kept.sum()).clamp(min=1)
    return fs.Mean(((h @ p["layers.1.w"]).square().sum(1) * kept).sum() * p["scale"].sum(), kept.sum())


def by_axis(on: Any, p: Params, x: Tensor) -> Tensor:
    h = x @ p["layers.0.w"]
    h = h - on.psum(h.sum(0), "replicate").tanh() + on.all_gather(h, 0, ("shard",)).mean(0)
    return (h @ p["layers.1.w"] * on.psum(p["scale"], ["shard", "replicate"])).square().mean()


def complex_numbers(on: Any, p: Params, x: Tensor) -> Tensor:
    h = torch.view_as_complex((x @ p["layers.0.w"]).view(-1, 2, 2))
    h = h * on.psum(h.sum(0)) + on.all_gather(h, dim=-1).sum(-1, keepdim=True)
    return h.abs().mean() + (x @ p["layers.1.w"] * p["scale"]).mean()


def slopes_of_autograd(on: Any, p: Params, x: Tensor) -> Tensor:
    """Take an inner derivative next to exchanges, of which it sees none."""
    x = x.clone().requires_grad_()
    h = (x @ p["layers.0.w"]).tanh()
    (slope,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    h = h - on.psum(slope.sum(0)) * on.all_gather(h).mean(0)
    return (h @ p["layers.1.w"] * p["scale"]).square().mean()


def slope_of_a_sum(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fs.psum(x.sum()), x)[0]


class Summed(torch.autograd.Function):
    """A sum over ranks as it is written by hand for DDP."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return fs.psum(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return fs.psum(g)


PROGRAMS = [slopes_of_autograd, centred, nested, of_leaves, detached, a_mean, by_axis, complex_numbers]


# ------------------------------------------------------------------ the truth: ranks as threads of one graph


class Together:
    """An exchange: `psum` and `all_gather` of threads that build one autograd graph."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.barrier = mesh, threading.Barrier(mesh.size)
        self.given: list[Any] = [None] * mesh.size
        self.own = threading.local()

    def everyones(self, x: Tensor, axes: Any) -> list[Tensor]:
        axes = self.mesh.names if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        self.given[self.own.rank] = x
        self.barrier.wait(30)
        out = [self.given[r] for r in self.mesh.group_ranks(axes, self.own.rank)]
        self.barrier.wait(30)
        return out

    def psum(self, x: Any, axes: Any = None) -> Any:
        return x * self.mesh.size if isinstance(x, int) else sum(self.everyones(x, axes))

    def all_gather(self, x: Tensor, dim: int = 0, axes: Any = None) -> Tensor:
        return torch.cat(self.everyones(x, axes), dim)

    def run(self, fn: Callable[..., Any], p: Params, batches: list[Tensor]) -> list[Any]:
        results: list[Any] = [None] * self.mesh.size

        def one(rank: int) -> None:
            self.own.rank = rank
            results[rank] = fn(self, p, batches[rank])

        threads = [threading.Thread(target=one, args=(r,)) for r in range(self.mesh.size)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return results


def truth(program: Any, mesh: Mesh, x: Tensor, micros: int = 1) -> tuple[Tensor, Params]:
    """Compute the mean of all ranks' and micro-batches' losses, and its gradient by plain autograd."""
    leaves = {p: v.clone().requires_grad_() for p, v in params().items()}
    parts = [part.chunk(micros) for part in x.chunk(mesh.size)]
    losses = [
        loss
        for micro in range(micros)
        for loss in Together(mesh).run(program, leaves, [each[micro] for each in parts])
    ]
    if isinstance(losses[0], fs.Mean):
        loss = sum(m.total for m in losses) / sum(m.count for m in losses)
    else:
        loss = torch.stack(losses).mean()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    made = [torch.zeros_like(v) if g is None else g for v, g in zip(leaves.values(), grads, strict=True)]
    return loss.detach(), dict(zip(leaves, made, strict=True))


def run_sharded(
    rank: int, program: Any, mesh: Mesh, preset: str, step: Any = None, **options: Any
) -> tuple[Tensor, Params]:
    """Compute the loss and whole gradients of this rank's rows."""
    specs = fs.presets.PRESETS[preset](params(), mesh)
    step = step or make_step(program, mesh, preset, **options)
    loss, grads = step(step.init(params()), rows(mesh.size).chunk(mesh.size)[rank])
    return loss.detach(), fs.unshard(grads, specs, mesh, layout="gradient")


def make_step(program: Any, mesh: Mesh, preset: str, **options: Any) -> Any:
    specs = fs.presets.PRESETS[preset](params(), mesh)
    options = {"backend": "eager", **options}
    return fs.shard_step(lambda p, x: program(fs, p, x), specs, mesh=mesh, **options)


SETTINGS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "hybrid_shard": {},
    "no_shard": {"remat": "unit"},
    "zero2": {"accumulate": 2},
    "shard_grad_op": {"remat": 0.3, "prefetch": 0, "overlap": 0},
}


@pytest.mark.parametrize(("program", "preset"), [
    pytest.param(program, preset, marks=[pytest.mark.long] * ((i + j) % 5 > 0))
    for i, program in enumerate(PROGRAMS) for j, preset in enumerate(SETTINGS)
])  # fmt: skip
def test_ranks_equal_one_graph_over_all_of_them(program: Any, preset: str) -> None:
    mesh, options = fs.make_mesh(replicate=2, shard=2, simulated=True), SETTINGS[preset]
    expected = truth(program, mesh, rows(mesh.size), options.get("accumulate", 1))
    step = make_step(program, mesh, preset, **options)
    for got in fs.simulate(mesh, lambda rank: run_sharded(rank, program, mesh, preset, step)):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------ real ranks


ON_PROCESSES = (centred, nested, of_leaves)  # test_gloo compiles exchanges


def on_rank(rank: int) -> list[Any]:
    mesh = fs.make_mesh(replicate=1, shard=2, device="cpu")
    return [run_sharded(rank, program, mesh, "full_shard") for program in ON_PROCESSES]


def test_processes_equal_one_graph(ranks: Any) -> None:
    mesh = fs.make_mesh(replicate=1, shard=2, abstract=True)
    expected = [truth(program, mesh, rows(2)) for program in ON_PROCESSES]
    for got in ranks(2).run(on_rank):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------ without ranks


def own(x: Tensor) -> Tensor:
    return x


def swapped(x: Tensor) -> Tensor:
    return EXCHANGE(x, "all_to_all", "shard", 1, 4, 0)


def with_each(exchange: Callable[..., Tensor]) -> Callable[[Params, Tensor], Tensor]:
    def fn(p: Params, x: Tensor) -> Tensor:
        h = x @ p["layers.0.w"]
        return (exchange(h).sum(0) * (h @ p["layers.1.w"])).mean() * p["scale"].sum()

    return fn


def paper(fn: Callable[..., Any], **options: Any) -> Any:
    return lower(fn, params(), rows(1), ranks=4, **options)


@pytest.mark.parametrize(
    ("exchange", "kinds", "bytes_", "sent"),
    [
        (fs.psum, ["psum", "psum"], 2 * 128, 2 * 2 * 3 * 128 // 4),
        (fs.all_gather, ["all_gather", "reduce_scatter"], 2 * 512, 2 * 3 * 512 // 4),
        (swapped, ["all_to_all", "all_to_all"], 2 * 128, 2 * 3 * 128 // 4),
        (lambda x: swapped(x.detach()), ["all_to_all"], 128, 3 * 128 // 4),
        (lambda x: swapped((x > 0).long()), ["all_to_all"], 128, 3 * 128 // 4),
    ],
)
def test_each_has_its_dual_and_its_bytes(exchange: Any, kinds: list[str], bytes_: int, sent: int) -> None:
    lowered = paper(with_each(exchange))
    issued = [i for i in lowered.schedule.instructions if isinstance(i, Exchange)]
    assert [(i.kind, i.phase) for i in issued] == list(zip(kinds, ("forward", "backward"), strict=False))
    moved = [r for r in lowered.comm_analysis().rows if r.verb == "exchange"]
    assert (sum(r.bytes for r in moved), sum(r.sent_bytes for r in moved)) == (bytes_, sent)
    busy = [paper(with_each(e)).timeline("h100").busy_seconds["communication"] for e in (own, exchange)]
    assert busy[1] > busy[0]


def test_an_all_to_all_names_both_dims_and_its_dual_swaps_them() -> None:
    sent = [line for line in paper(with_each(swapped)).schedule.communication() if "all_to_all" in line]
    assert sent == [
        f"exchange ('shard',) all_to_all torch.float64 dim {dims}" for dims in ("1 to 0", "0 to 1")
    ]


def test_a_backward_runs_last_what_was_sent_first() -> None:
    """An exchange may send what another one after the same segment has received."""
    made = paper(with_each(swapped)).segments.exchanges[0]
    one, other, next_ = (
        replace(made, sent=ValueName(Kind.VALUE, a), received=ValueName(Kind.VALUE, b))
        for a, b in ("ab", "cd", "be")
    )
    assert last_first([one, other, next_]) == [next_, one, other]


@pytest.mark.parametrize(("exchange", "sums"), [(fs.psum, 0), (swapped, 1)])
def test_a_buffer_of_what_each_rank_has_for_itself_is_aggregated(exchange: Any, sums: int) -> None:
    def fn(p: Params, x: Tensor) -> Tensor:
        p["seen"].copy_(exchange(x.detach()).mean())
        return (x @ p["w"]).mean()

    leaves = {"w": torch.ones(WIDTH, 2, dtype=D), "seen": torch.zeros((), dtype=D)}
    mesh = fs.make_mesh(shard=4, abstract=True)
    specs = fs.match_specs(leaves, [("seen", fs.LayoutSpec(trainable=False)), ("*", fs.LayoutSpec())])
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1))
    assert step.lower(leaves, rows(1)).schedule.counts().get("aggregate_buffers", 0) == sums


def test_what_is_ready_goes_together_and_equal_blocks_share_kernels() -> None:
    def fn(p: Params, x: Tensor) -> Tensor:
        for w in p.values():
            x = x @ w
            mean, square = fs.psum(x.mean(0)), fs.psum(x.square().mean(0))
            x = (x - mean) / square
        return x.mean()

    made = {n: lower(fn, chain(n), torch.ones(2, 8), ranks=4, remat="unit") for n in (3, 12)}
    assert made[3].schedule.counts()["exchange"] == 3 * 2 * 2
    assert len(made[12].kernels) == len(made[3].kernels)
    assert len(made[3].segments.segments) == 4  # one after each pair of sums


@pytest.mark.parametrize(
    ("call", "leaves", "fix"),
    [
        (lambda x: fs.psum(x, "shrad"), ["fs.psum over 'shrad'", "(shard=4)"], "some of shard"),
        (lambda x: fs.psum(x, ("shard", "shard")), "fs.psum over 'shard', 'shard'", "once"),
        (lambda x: fs.psum(x > 0), "fs.psum of booleans", "x.int()"),
        (lambda x: fs.psum([x]), "fs.psum of list", "fs.tree.map"),
        (lambda x: x * fs.psum(torch.tensor(len(x))), "fs.psum of a tensor []", "fs.psum(y.numel"),
        (lambda x: fs.psum(x[x > 0].shape[0]), "fs.psum of SymInt", "fs.psum(mask.sum())"),
        (Summed.apply, "fs.psum in a gradient hook", "in `fn` itself"),
        (lambda x: fs.all_gather(x, 2), "fs.all_gather along dim 2 of [4, 4]", "a dim that it has"),
        (lambda x: fs.all_gather(x.sum()), "fs.all_gather along dim 0 of []", "x.reshape(1)"),
        (lambda x: torch.func.vmap(fs.psum)(x), "fs.psum inside a torch.func transform", "takes or gives"),
        (
            lambda x: torch.func.grad(lambda y: fs.psum(y.sum()))(x),
            "fs.psum inside a torch.func transform",
            "takes or gives",
        ),
        (slope_of_a_sum, "differentiates through fs.psum", "outside of it"),
    ],
)
def test_mistakes_are_named(call: Callable[[Tensor], Tensor], leaves: Any, fix: str) -> None:
    with raises(TraceError, leaves=leaves, fix=fix):
        paper(with_each(call))


def test_outside_of_a_step_and_on_one_rank_nothing_is_exchanged() -> None:
    x = rows(1)
    assert fs.psum(x) is x and fs.all_gather(x) is x and fs.psum(3) == 3
    counts = lower(with_each(fs.psum), params(), x, ranks=1).schedule.counts()
    assert counts == lower(with_each(own), params(), x, ranks=1).schedule.counts()


# ------------------------------------------------------------------ around a step


def test_a_sum_on_some_ranks_alone_is_refused() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)

    def run(rank: int) -> None:
        fn = with_each(fs.psum if rank else own)
        step = fs.shard_step(fn, fs.presets.full_shard(params(), mesh), mesh=mesh, backend="eager")
        step(step.init(params()), rows(1))

    with raises(fs.AgreementError, leaves="exchange ('shard',) psum torch.float64"):
        fs.simulate(mesh, run)


def test_batches_of_other_sizes_share_a_step_and_an_evaluation_exchanges_too() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params(), mesh)
    step = fs.shard_step(with_each(fs.all_gather), specs, mesh=mesh, backend="eager")
    forward = fs.shard_forward(
        lambda p, x: fs.all_gather(x @ p["layers.0.w"]), specs, mesh=mesh, backend="eager"
    )

    def run(rank: int) -> list[Tensor]:
        blocks = step.init(params())
        parts = [x.chunk(2)[rank] for x in (rows(2), rows(2)[:4])]
        return [*(step(blocks, x)[0] for x in parts), forward(blocks, parts[0])]

    for large, small, seen in fs.simulate(mesh, run):
        for loss, x in ((large, rows(2)), (small, rows(2)[:4])):
            torch.testing.assert_close(loss, with_each(own)(params(), x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(seen, rows(2) @ params()["layers.0.w"], rtol=1e-12, atol=1e-12)


def test_check_follows_exchanges() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs, fn = fs.presets.full_shard(params(), mesh), with_each(fs.psum)
    assert fs.debug.check(fn, params(), rows(2), specs, mesh)
