"""`torch.func` inside `fn`: sharded, recomputed and in micro-batches, it is what plain torch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import lower

import fnshard as fs
from fnshard import TraceError
from fnshard.compiler.schedule.instructions import Gather, ReduceScatter

Params = dict[str, Tensor]
Fn = Callable[[Params, Tensor], Tensor]
LAYERS, WIDTH, ROWS = 2, 4, 6


def params() -> Params:
    numbers = torch.Generator().manual_seed(0)
    shape = (WIDTH, WIDTH)
    return {
        f"layers.{i}.w": torch.randn(shape, dtype=torch.float64, generator=numbers) / 2 for i in range(LAYERS)
    }


def batches(count: int) -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(count, ROWS, WIDTH, dtype=torch.float64, generator=numbers)


def net(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        x = torch.tanh(x @ w)
    return x


def gradient_penalty(p: Params, x: Tensor) -> Tensor:
    slope = grad(lambda z: net(p, z).sum())(x)
    return (slope.norm(dim=-1) - 1).square().mean() + net(p, x).mean()


def maml(p: Params, x: Tensor) -> Tensor:
    def inner(q: Params) -> Tensor:
        return net(q, x[:3]).square().mean()

    for _ in range(2):
        slope = grad(inner)(p)
        p = {k: v - 0.1 * slope[k] for k, v in p.items()}
    return net(p, x[3:]).square().mean()


def per_sample_gradients(p: Params, x: Tensor) -> Tensor:
    each = vmap(grad(lambda q, z: net(q, z).square().sum()), in_dims=(None, 0))(p, x)
    return sum(g.flatten(1).norm(dim=1).mean() for g in each.values())


def ensemble(p: Params, x: Tensor) -> Tensor:
    stacked = torch.stack([*p.values()])
    return vmap(lambda w: torch.sin(x @ w).mean())(stacked).square().sum()


def pushed_forward(p: Params, x: Tensor) -> Tensor:
    out, tangent = jvp(lambda z: net(p, z), (x,), (x.cos(),))
    return (out * tangent).mean()


def pulled_back(p: Params, x: Tensor) -> Tensor:
    (out, scale), pull, aux = vjp(lambda z: ((net(p, z), z.sum()), z.sin()), x, has_aux=True)
    (slope,) = pull((out.sin(), scale))
    return slope.square().mean() + aux.mean() * out.mean()


def curvature(p: Params, x: Tensor) -> Tensor:
    return hessian(lambda z: net(p, z).square().sum())(x[0]).square().mean()


def jacobians(p: Params, x: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        return net(p, z)

    return (jacrev(f)(x[0]) * jacfwd(f)(x[1])).mean()


def hessian_vector(p: Params, x: Tensor) -> Tensor:
    slope = grad(lambda z: net(p, z).square().sum())
    return jvp(slope, (x,), (x.sin(),))[1].square().mean()


def value_and_gradient(p: Params, x: Tensor) -> Tensor:
    (slope, (value, aux)) = grad_and_value(lambda q: (net(q, x).sin().mean(), net(q, x)), has_aux=True)(p)
    return value + aux.mean() + sum(g.square().mean() for g in slope.values())


def mapped_twice(p: Params, x: Tensor) -> Tensor:
    eye = torch.eye(WIDTH, dtype=x.dtype)
    return vmap(grad(lambda z: vmap(lambda q: (net(p, z) * q).sum())(eye).square().sum()))(x).square().mean()


def physics(p: Params, x: Tensor) -> Tensor:
    """u'' + u = 0, where u is the network along its first input."""

    def u(t: Tensor) -> Tensor:
        return net(p, torch.stack([t, t * 0, t * 0, t * 0]))[0]

    t = x[:, 0]
    return (vmap(grad(grad(u)))(t) + vmap(u)(t)).square().mean()


def detached(p: Params, x: Tensor) -> Tensor:
    slope = grad(lambda z: (net(p, z).detach() * z).sum())(x)
    return slope.square().mean() + net(p, x).mean()


def norms_attention_and_losses(p: Params, x: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        z = F.gelu(F.layer_norm(z @ p["layers.0.w"], (WIDTH,))).view(1, 1, ROWS, WIDTH)
        z = F.scaled_dot_product_attention(z, z, z, is_causal=True).view(ROWS, WIDTH) @ p["layers.1.w"]
        return F.cross_entropy(z, torch.arange(ROWS) % WIDTH)

    return grad(f)(x).square().mean() + f(x)


def looked_up(p: Params, x: Tensor) -> Tensor:
    def f(q: Params) -> Tensor:
        return F.embedding(torch.arange(ROWS) % WIDTH, q["layers.0.w"]).square().mean() * net(q, x).mean()

    return sum(g.square().mean() for g in grad(f)(p).values())


def written_in_place(p: Params, x: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        h = z @ p["layers.0.w"]
        h[:, 0] = h[:, 1] * 2
        return h.mul_(2).tanh().square().sum()

    return grad(f)(x).square().mean() + net(p, x).mean()


LINEAR = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)


def of_a_module(p: Params, x: Tensor) -> Tensor:
    def f(q: Params, z: Tensor) -> Tensor:
        for w in q.values():
            z = functional_call(LINEAR, {"weight": w}, (z,)).relu()
        return z.square().mean()

    return sum(g.square().mean() for g in grad(f)(p, x).values())


PROGRAMS: list[Fn] = [
    gradient_penalty, maml, per_sample_gradients, ensemble, pushed_forward, pulled_back,
    curvature, jacobians, hessian_vector, value_and_gradient, mapped_twice, physics, detached,
    norms_attention_and_losses, looked_up, written_in_place, of_a_module,
]  # fmt: skip


def plain(fn: Fn, ranks: int) -> tuple[Tensor, list[Tensor]]:
    leaves = {k: v.requires_grad_() for k, v in params().items()}
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        loss = torch.stack([fn(leaves, x) for x in batches(ranks)]).mean()
    return loss, list(torch.autograd.grad(loss, leaves.values()))


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_sharded_gradients_are_those_of_plain_torch(fn: Fn) -> None:
    loss, expected = plain(fn, 2)
    mesh = fs.make_mesh(shard=2, simulated=True)
    for preset, options in (("full_shard", {}), ("zero2", {"remat": "unit"})):
        specs = fs.presets.PRESETS[preset](params(), mesh)
        step = fs.shard_step(fn, specs, mesh=mesh, backend="eager", **options)

        def work(rank: int, step: Any = step, specs: Any = specs) -> tuple[Tensor, Params]:
            value, grads = step(fs.shard(params(), specs, mesh), batches(2)[rank])
            return value, fs.unshard(grads, specs, mesh, layout="gradient")

        for value, grads in fs.simulate(mesh, work):
            torch.testing.assert_close(value, loss.detach(), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close([*grads.values()], expected, rtol=1e-10, atol=1e-10)


def test_inductor_compiles_it() -> None:
    loss, expected = plain(gradient_penalty, 1)
    mesh = fs.make_mesh(shard=1, simulated=True)
    specs = fs.presets.full_shard(params(), mesh)
    step = fs.shard_step(gradient_penalty, specs, mesh=mesh)
    ((value, grads),) = fs.simulate(mesh, lambda _: step(params(), batches(1)[0]))
    torch.testing.assert_close(value, loss.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close([*grads.values()], expected, rtol=1e-10, atol=1e-10)


def test_leaves_that_a_transform_reads_are_gathered_by_unit() -> None:
    """A slope of one layer after the other: each unit is gathered and reduced by itself."""

    def by_layer(p: Params, x: Tensor) -> Tensor:
        for w in p.values():
            x = x + grad(lambda z, w=w: torch.tanh(z @ w).square().sum())(x)
        return x.mean()

    low = lower(by_layer, params(), batches(1)[0], ranks=2)
    order = [
        (type(i).__name__, i.unit) for i in low.schedule.instructions if isinstance(i, Gather | ReduceScatter)
    ]
    units = ["layers.0", "layers.1"]
    assert order[:2] == [("Gather", u) for u in units]
    assert [u for kind, u in order if kind == "ReduceScatter"] == units[::-1]


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers_are_drawn_anew_in_every_step(randomness: str) -> None:
    def noisy(p: Params, x: Tensor) -> Tensor:
        def each(z: Tensor) -> Tensor:
            return (F.dropout(z, 0.5, training=True) + torch.rand_like(z)) @ p["layers.0.w"]

        rows = vmap(each, randomness=randomness)(torch.ones_like(x))
        spread = (rows - rows[0]).abs().sum().detach()
        return rows.square().mean() + net(p, x).mean() + 1000 * (spread > 0).double()

    mesh = fs.make_mesh(shard=1, simulated=True)
    specs = fs.presets.full_shard(params(), mesh)
    step = fs.shard_step(noisy, specs, mesh=mesh, backend="eager", optimizer=fs.optim.sgd(0.0), remat="unit")

    def work(_: int) -> list[float]:
        state, losses = step.init(params()), []
        for _ in range(3):
            state, metrics = step(state, batches(1)[0])
            losses.append(metrics.numbers()["loss"])
        return losses

    (losses,) = fs.simulate(mesh, work)
    assert len(set(losses)) == 3  # of three steps
    assert all((loss > 500) is (randomness == "different") for loss in losses)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda p, x: vmap(lambda z: z @ p["layers.0.w"][:2])(x).sum(), "`fn` fails in matmul"),
        (lambda p, x: grad(lambda z: net(p, z).sum().item())(x).sum(), "depends on a tensor's value"),
        (lambda p, x: torch.func.linearize(lambda z: net(p, z), x)[0].sum(), "differentiates inside itself"),
    ],
)
def test_a_mistake_inside_is_told_as_one_outside_is(fn: Fn, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        lower(fn, params(), batches(1)[0], ranks=2)
