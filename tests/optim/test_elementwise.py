"""An optimizer of one's own on leaves that ranks have parts of: it is elementwise, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from optimizers import ALL, SHAPES
from torch import Tensor
from torch.nn.functional import one_hot

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.analysis import elementwise
from fnshard.analysis.elementwise import mixing_ops
from fnshard.errors import OptimizerError
from fnshard.optim import Optimizer, adamw, by_path, chain, clip_by_global_norm, ema, muon

W, X = torch.arange(48.0).view(6, 8).double().sin(), torch.arange(64.0).view(8, 8).double().cos()


def rule_of(update: Callable[..., Tensor], **more: Any) -> Optimizer:
    """-0.05 times a function of gradient, parameter and StepInfo."""
    return Optimizer(
        "own()", lambda path, grad, slots, param, info: (-0.05 * update(grad, param, info), {}), **more
    )


def lamb(path: str, grad: Tensor, slots: Any, param: Tensor, info: Any) -> Any:
    m, v = 0.9 * slots["m"] + 0.1 * grad, 0.99 * slots["v"] + 0.01 * grad * grad
    update = m / (v.sqrt() + 1e-6) + 0.01 * param
    return -0.05 * update * (param.norm() / update.norm()), {"m": m, "v": v}


def adam(path: str, grad: Tensor, slots: Any, param: Tensor, info: Any) -> Any:
    """Many operators, in place too, a choice by the step, and the rate from a schedule."""
    m = slots["m"].mul(0.9).add_(grad, alpha=0.1)
    v = torch.where(grad.isfinite(), torch.maximum(slots["v"] * 0.99, grad.square()), 0.0)
    step = torch.where(info.step > 1, m / v.sqrt().clamp_(min=1e-6), grad.sign())
    rate = fs.schedules.warmup_cosine(0.1, 1, 9)(info.step).to(param.dtype)
    return -rate * step.view(-1).tanh_().view_as(grad) * (1 + 0.1 * info.global_norm).rsqrt(), {
        "m": m,
        "v": v,
    }


def normalized(params: list[Tensor], grads: list[Tensor], *_: Any) -> None:
    for param, norm, grad in zip(params, torch._foreach_norm(grads), grads, strict=True):
        param.sub_(0.05 * grad / norm)


def averaging(path: str, grad: Tensor, slots: Any, param: Tensor, info: Any) -> Any:
    return -0.05 * grad / (1 + slots["sum"]), {}


def summed(total: Callable[[Tensor], Tensor]) -> Optimizer:
    """An update by sums over a leaf."""
    rule = lambda path, grad, slots, param, info: {"sum": total(grad).reshape([1] * grad.dim())}  # noqa: E731
    return Optimizer("own()", averaging, elementwise=False, sums=(rule,))


MOMENTS = {"m": torch.zeros_like, "v": torch.zeros_like}
LAMB = Optimizer("lamb()", lamb, MOMENTS)
MIXED: dict[str, tuple[Optimizer, str]] = {  # and what the error names
    "a trust ratio": (LAMB, "norm in leaf"),
    "a sum": (rule_of(lambda g, p, i: g - g.sum() / 48), "sum in leaf"),
    "a mean": (rule_of(lambda g, p, i: g - g.mean()), "mean in leaf"),
    "the largest": (rule_of(lambda g, p, i: g / g.abs().max()), "max in leaf"),
    "a quantile": (rule_of(lambda g, p, i: g.clamp(max=g.median())), "median in leaf"),
    "means of rows": (rule_of(lambda g, p, i: g - g.mean(0, keepdim=True)), "mean in leaf"),
    "running sums": (rule_of(lambda g, p, i: g.cumsum(0)), "cumsum in leaf"),
    "a softmax": (rule_of(lambda g, p, i: g.softmax(0)), "softmax in leaf"),
    "a matrix": (rule_of(lambda g, p, i: g @ (g.T @ g)), "mm in leaf"),
    "a factor": (rule_of(lambda g, p, i: torch.linalg.qr(g).Q @ torch.ones(8, 8).to(g)), "qr in leaf"),
    "the order": (rule_of(lambda g, p, i: g.flip(0)), "flip in leaf"),
    "neighbours": (rule_of(lambda g, p, i: g - g.roll(1, 0)), "roll in leaf"),
    "one element": (rule_of(lambda g, p, i: g - g[0, 0]), "select in leaf"),
    "a branch": (rule_of(lambda g, p, i: g if bool((g > 0).all()) else -g), "all in leaf"),
    "a number": (rule_of(lambda g, p, i: g / float(p.abs().max())), "max in leaf"),
    "its shape": (rule_of(lambda g, p, i: g / p.shape[0] ** 0.5), r"\[6, 8\] of the leaf"),
    "its size in a tensor": (rule_of(lambda g, p, i: g * torch.tensor(1 / p.numel())), "its shape"),
    "positions": (rule_of(lambda g, p, i: g * torch.arange(p.shape[0])[:, None]), "positions in mul"),
    "places in a view": (
        rule_of(lambda g, p, i: (g.view(-1, 2) * torch.tensor([1.0, 2.0])).view_as(g)), "positions in mul",
    ),
    "a table of the leaf": (rule_of(lambda g, p, i: g * X[:6]), r"\[3, 8\] \(RuntimeError"),
    "an array": (rule_of(lambda g, p, i: torch.from_numpy(g.numpy())), "numpy"),
    "random numbers": (rule_of(lambda g, p, i: g * torch.rand_like(g)), "random rand_like"),
    "later steps": (rule_of(lambda g, p, i: g / g.norm() if int(i.step) > 2000 else g), "torch.where"),
    "some steps": (
        rule_of(lambda g, p, i: g / g.norm() if (int(i.step) + 1) % 10 == 0 else g), "torch.where",
    ),
    "between steps": (rule_of(lambda g, p, i: g / g.norm() if 1 < i.step < 5 else g), "torch.where"),
    "a large norm": (
        rule_of(lambda g, p, i: g / g.norm() if i.global_norm > 9 else g, needs=frozenset({"global_norm"})),
        "torch.where",
    ),
    "a table as long": (
        rule_of(lambda g, p, i: g * torch.tensor([float(k) for k in range(g.shape[0])])[:, None]),
        "its shape",
    ),
    "a triangle": (rule_of(lambda g, p, i: g * torch.tril(torch.ones(g.shape))), "positions in mul"),
    "running sums of ones": (rule_of(lambda g, p, i: g * torch.ones(g.shape).cumsum(0)), "positions in mul"),
    "the first row": (
        rule_of(lambda g, p, i: g * one_hot(torch.tensor(0), g.shape[0])[:, None]), "positions in mul",
    ),
    "its size, filled": (rule_of(lambda g, p, i: g * torch.full((), 10 / g.numel())), "its shape"),
    "its size, filled anew": (rule_of(lambda g, p, i: g * g.new_full((), g.numel())), "its shape"),
    "its size, on a fill": (rule_of(lambda g, p, i: g * (torch.ones(()) * g.shape[0] ** 0.5)), "its shape"),
    "its size, a scalar": (rule_of(lambda g, p, i: g / torch.scalar_tensor(g.numel())), "its shape"),
    "its size, a bound": (rule_of(lambda g, p, i: g.clamp(max=torch.full((), 1 / g.numel()))), "its shape"),
    "its size, counted": (rule_of(lambda g, p, i: g / torch.ones(g.shape).sum()), "positions in div"),
    "its size, in a row": (rule_of(lambda g, p, i: g * torch.stack([torch.full((), p.numel())])), "shape"),
    "a branch on its shape": (rule_of(lambda g, p, i: g.sign() if g.shape[0] > 4 else g), "its shape"),
    "a slot": (
        Optimizer("own()", averaging, {"sum": lambda p: p.norm() * torch.ones_like(p)}), "norm in slots",
    ),
    "broadcast": (rule_of(lambda g, p, i: g * W[:, :1, None]), r"an update \[6, 6, 8\] of \[6, 8\]"),
    "a kernel": (rule_of(lambda g, p, i: g / 2, kernel=normalized), "_foreach_norm in kernel"),
    "a chain": (chain(clip_by_global_norm(1.0), LAMB, ema(0.9)), "norm in leaf"),
    "before an owner": (chain(rule_of(lambda g, p, i: g / g.norm()), muon(0.1)), "norm in leaf"),
    "what an owner gets": (
        Optimizer(
            "own()", lambda path, update, *_: (-update, {}), whole=lambda path, grad, *_: (grad, {}),
            before=lambda path, grad, *_: (grad / grad.norm(), {}),
        ),
        "norm in before",
    ),
    "after an owner": (
        Optimizer(
            "own()", lambda path, update, *_: (-update / update.norm(), {}), elementwise=False,
            whole=lambda path, grad, *_: (grad, {}),
        ),
        "norm in leaf",
    ),
    "beside a sum": (
        replace(summed(torch.sum), leaf=lambda path, g, slots, p, i: (-g / p.norm(), {})), "norm in leaf",
    ),
    "a sum of means": (summed(lambda g: g.mean()), "mean in sums"),
    "a sum of largest": (summed(lambda g: g.amax()), "amax in sums"),
    "a sum of roots": (summed(lambda g: g.square().sum().sqrt()), "of a sum, sqrt in sums"),
    "a sum and one": (summed(lambda g: g.square().sum() + 1.0), "of a sum, add in sums"),
    "a product of sums": (summed(lambda g: g.sum() * g.sum()), "of a sum, mul in sums"),
    "by a rule": (by_path(("w", LAMB), ("*", adamw(0.1))), "norm in leaf"),
    "it fails": (rule_of(lambda g, p, i: g.nothing), "AttributeError"),
}  # fmt: skip
ALONE: dict[str, Optimizer] = {
    "adam": Optimizer("own()", adam, MOMENTS, needs=frozenset({"global_norm"})),
    "its dims": rule_of(lambda g, p, i: g if p.dim() > 1 else g.sign()),
    "the whole shape": rule_of(lambda g, p, i: g / math.prod(i.shape("w" if p.dim() else "b", p)) ** 0.5),
    "a row of constants": rule_of(lambda g, p, i: g * (W[0] if p.dim() else 1.0)),
    "a constant": rule_of(lambda g, p, i: g * torch.tensor(0.5) + torch.zeros(p.shape, dtype=p.dtype)),
    "a kernel": rule_of(lambda g, p, i: g, kernel=lambda params, grads, *_: torch._foreach_add_(
        params, torch._foreach_mul(grads, -0.05))),
    "sums": summed(lambda g: -0.5 * g.square().sum() + g.abs().sum() / 2),
    "constants of constants": rule_of(
        lambda g, p, i: g * torch.ones(p.shape).mul(3.0).add(W[0] if p.dim() else torch.full((), 0.5))),
    "a promise": rule_of(lambda g, p, i: g.flip(0).flip(0), elementwise=True),
}  # fmt: skip
MESHES = {
    "full_shard": {"shard": 2},
    "shard_grad_op": {"shard": 3},
    "hybrid_shard": {"replicate": 2, "shard": 2},
}


def trained(
    optimizer: Optimizer, axes: dict[str, int], specs_of: Callable[..., Any], steps: int = 3
) -> Tensor:
    mesh, params = fs.make_mesh(**axes, simulated=True), {"w": W, "b": torch.ones(())}
    specs = specs_of(params, mesh)

    def on_rank(number: int) -> Tensor:
        loss = lambda p, x: ((x @ p["w"].T).sin() * p["b"]).square().mean()  # noqa: E731
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")
        state = step.init(params)
        for _ in range(steps):
            state, _ = step(state, X)
        return fs.unshard(state.params, specs, mesh)["w"]

    return fs.simulate(mesh, on_rank)[0]


def lowered(optimizer: Optimizer, spec: LayoutSpec, **axes: int) -> Any:
    mesh = fs.make_mesh(**axes, abstract=True)
    specs = {"w": spec, "b": LayoutSpec()}
    loss = lambda p, x: ((x @ p["w"].T) * p["b"]).square().mean()  # noqa: E731
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")
    return step.lower({"w": W, "b": torch.ones(())}, X)


@pytest.mark.parametrize("kind", MIXED)
def test_what_looks_at_more_than_one_element_is_refused_where_a_leaf_is_split(kind: str) -> None:
    optimizer, named = MIXED[kind]
    with pytest.raises(
        OptimizerError, match=rf"(?s)params\['w'\] \[6, 8\].*{named}.*optimizer=P\(\).*sums=.*whole="
    ):
        lowered(optimizer, LayoutSpec(P("shard")), shard=2)


@pytest.mark.parametrize("spec", [LayoutSpec(P(None, "shard")), LayoutSpec(P(), optimizer=P("shard")),
                                  LayoutSpec(P("tensor"), compute=P("tensor"))])  # fmt: skip
def test_it_is_refused_whatever_splits_the_leaf(spec: LayoutSpec) -> None:
    axes = {"tensor": 2} if "tensor" in spec.storage.axes else {"shard": 2}
    optimizer, named = MIXED["a trust ratio"]
    with pytest.raises(OptimizerError, match=rf"params\['w'\].*{named} \(.*test_elementwise\.py:\d+"):
        lowered(optimizer, spec, **axes)


def test_a_rule_that_branches_on_the_path_is_traced_for_each() -> None:
    """All leaves that are alike; and those alone are named that are refused."""

    def leaf(path: str, grad: Tensor, slots: Any, param: Tensor, info: Any) -> Any:
        return -(grad / grad.norm() if path == "c" else grad), {}

    params, mesh = dict.fromkeys("abc", W), fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(params, mesh)
    with pytest.raises(OptimizerError, match=r"1 leaf(?s:.*)params\['c'\]") as reported:
        fs.shard_step(lambda p: p["a"].sum(), specs, mesh=mesh, optimizer=Optimizer("own()", leaf))
    assert "params['a']" not in str(reported.value)


def test_it_is_right_where_each_rank_updates_the_whole_leaf() -> None:
    """On one rank, and with the layout that the error names."""
    optimizer = MIXED["a trust ratio"][0]
    alone = trained(optimizer, {"shard": 1}, fs.presets.full_shard)
    spec = LayoutSpec(P(), gradient=P(), optimizer=P())
    whole = lambda params, mesh: fs.match_specs(params, [("*", spec)])  # noqa: E731
    torch.testing.assert_close(trained(optimizer, {"shard": 2}, whole), alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("preset", MESHES)
@pytest.mark.parametrize("kind", ALONE)
def test_what_is_elementwise_is_the_same_on_all_layouts(kind: str, preset: str) -> None:
    specs_of = fs.presets.PRESETS[preset]
    alone = trained(ALONE[kind], {"shard": 1}, fs.presets.full_shard)
    torch.testing.assert_close(trained(ALONE[kind], MESHES[preset], specs_of), alone, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("clip", "ema")])
def test_all_of_ours_update_leaves_that_are_split(name: str) -> None:
    mesh, params = fs.make_mesh(shard=2, abstract=True), {p: torch.ones(s) for p, s in SHAPES.items()}
    specs = fs.presets.full_shard(params, mesh)
    fs.shard_step(lambda p: p["a.w"].sum(), specs, mesh=mesh, optimizer=ALL[name], backend="eager")


def test_ours_are_not_traced_where_a_step_is_made_but_what_is_put_into_them_is() -> None:
    mesh, params = fs.make_mesh(shard=2, abstract=True), {"w": W}
    specs, loss = fs.presets.full_shard(params, mesh), lambda p: p["w"].sum()
    with mock.patch.object(elementwise, "mixing_ops", side_effect=AssertionError("traced")):
        for rule in (muon(0.1), fs.optim.soap(0.1), fs.optim.lars(0.1), fs.optim.adafactor(0.1)):
            clipped = chain(clip_by_global_norm(1.0), rule, ema(0.9))
            fs.shard_step(loss, specs, mesh=mesh, optimizer=clipped)
    scaled = lambda path, grad, slots, param, info: (grad / grad.norm(), {})  # noqa: E731
    own = replace(fs.optim.sgd(0.1), leaf=scaled, elementwise=None)
    for rule in (own, chain(clip_by_global_norm(1.0), own), by_path(("*", own))):
        with pytest.raises(OptimizerError, match=r"(?s)params\['w'\].*norm in leaf"):
            fs.shard_step(loss, specs, mesh=mesh, optimizer=rule)


@pytest.mark.parametrize("name", [name for name in ALL if "8bit" not in name and "lars" not in name])
def test_our_optimizers_keep_what_they_promise(name: str) -> None:
    """Also those that say that they are elementwise, by their trace. The sums of `lars` are of pieces."""

    def traced(rule: Optimizer) -> Optimizer:
        return replace(rule, elementwise=None, members=tuple(map(traced, rule.members)))

    for path, shape in {**SHAPES, "experts.w": (4, 6, 6)}.items():
        rule = traced(ALL[name].of(path, len(shape)))
        for dim, size in enumerate(shape):
            block = [-(-size // 2) if d == dim else n for d, n in enumerate(shape)]
            assert 0 in shape or mixing_ops(rule, path, shape, block, torch.float32) == []


def test_settings_that_cannot_be_hashed_are_refused() -> None:
    own = replace(rule_of(lambda grad, param, info: grad), settings=lambda path: [path])
    with pytest.raises(OptimizerError, match=r"settings\('w'\).*(?s:.*)tuple"):
        lowered(own, LayoutSpec(P("shard")), shard=2)
