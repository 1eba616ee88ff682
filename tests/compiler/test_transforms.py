"""`torch.func` inside `fn`: sharded, recomputed and in micro-batches, it is what plain torch makes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.autograd import grad as autograd_grad
from torch.func import functional_call, grad, hessian, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint
from toys import lower, our_grads, plain_grads
from zoo import WIDTH, Fn, Params, batches, check_compiled, named, net, params, table

import fnshard as fs
from fnshard import TraceError
from fnshard.compiler.schedule.instructions import Gather, Run


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


def pulled_back(p: Params, x: Tensor) -> Tensor:
    (out, scale), pull, aux = vjp(lambda z: ((net(p, z), z.sum()), z.sin()), x, has_aux=True)
    (slope,) = pull((out.sin(), scale))
    return slope.square().mean() + aux.mean() * out.mean()


def curvature(p: Params, x: Tensor) -> Tensor:
    return hessian(lambda z: net(p, z).square().sum())(x[0]).square().mean()


def hessian_vector(p: Params, x: Tensor) -> Tensor:
    slope = grad(lambda z: net(p, z).square().sum())
    return jvp(slope, (x,), (x.sin(),))[1].square().mean()


LINEAR = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)


def detached(p: Params, x: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        with torch.no_grad():
            scale = net(p, z)
        return (scale * z + net(p, z).detach() * z.sin()).sum()

    return grad(f)(x).square().mean() + net(p, x).mean()


def penalty_of_autograd(p: Params, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    scores = net(p, x)
    (slope,) = autograd_grad(scores, x, torch.ones_like(scores), create_graph=True, retain_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean() + scores.mean()


def maml_of_autograd(p: Params, x: Tensor) -> Tensor:
    for first_order in (False, True):
        slopes = autograd_grad(net(p, x[:3]).square().mean(), p.values(), create_graph=not first_order)
        p = {k: v - 0.1 * slope for (k, v), slope in zip(p.items(), slopes, strict=True)}
    return net(p, x[3:]).square().mean()


def third_derivative(p: Params, x: Tensor) -> Tensor:
    t = x[:, :1].detach().requires_grad_()
    found = [net(p, t.expand(-1, WIDTH))[:, :1]]
    for _ in range(3):
        found += autograd_grad(found[-1], t, torch.ones_like(t), create_graph=True)
    return sum(u.square().mean() for u in found)


def without_a_graph(p: Params, x: Tensor) -> Tensor:
    x.requires_grad = True
    force = -autograd_grad(net(p, x).sum(), x)[0]
    assert not force.requires_grad
    with torch.no_grad():
        energy = net(p, x).mean()
    return (force * net(p, x)).mean() + energy * net(p, x.detach()).mean()


def writes_before_a_slope(p: Params, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    h = torch.zeros_like(x)
    h[:, 0] = (x @ p["layers.0.w"])[:, 1]
    h = (h + x).mul_(2).tanh()
    return autograd_grad(h.sum(), x, create_graph=True)[0].square().mean() + net(p, x).mean()


def a_write_to_an_unsafe_view(p: Params, x: Tensor) -> Tensor:
    """Write to an unsafe view, as `kron` makes one."""
    h = torch.kron(x, p["layers.0.w"][:2]).mul_(2)
    return autograd_grad(h.sin().sum(), h, create_graph=True)[0].square().mean() + net(p, x).mean()


def all_kinds_in_one(p: Params, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    rows = checkpoint(lambda z: vmap(lambda q: net(p, q).sum())(z), x, use_reentrant=False)
    y = rows.sum() + grad(lambda z: net(p, z).sum())(x).square().sum()
    (slope,) = autograd_grad(y, x, create_graph=True)
    return slope.square().mean() + jvp(lambda z: net(p, z), (x,), (x,))[1].mean()


def dual_numbers(p: Params, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(net(p, forward_ad.make_dual(x, x.cos())))
    return (out * tangent).mean()


def of_autograd_functional(p: Params, x: Tensor) -> Tensor:
    return functional.jacobian(lambda z: net(p, z[None])[0], x[0], create_graph=True).square().mean()


def ensemble(p: Params, x: Tensor) -> Tensor:
    """Stack `p` as `stack_module_state` stacks modules, and run all at once."""
    stacked = {"weight": torch.stack([*p.values()])}
    outs = vmap(lambda w: functional_call(LINEAR, w, (x,)))(stacked)
    return outs.tanh().mean(0).square().mean()


PROGRAMS = named(
    gradient_penalty, maml, per_sample_gradients, pulled_back, curvature, hessian_vector, detached,
    penalty_of_autograd, maml_of_autograd, third_derivative, without_a_graph, writes_before_a_slope,
    a_write_to_an_unsafe_view, all_kinds_in_one, dual_numbers, of_autograd_functional, ensemble,
)  # fmt: skip
test_sharded_gradients_are_those_of_plain_torch = pytest.mark.suite(
    but={
        "curvature-*": "all_kinds_in_one has products with Hessians",
        "third_derivative-*": "gradient_penalty has derivatives of derivatives",
        "of_autograd_functional-*": "maml_of_autograd differentiates by autograd inside",
        "maml-*": "maml_of_autograd",
        "hessian_vector-*": "all_kinds_in_one",
    }
)(table(PROGRAMS))


def written(p: Params, x: Tensor) -> Tensor:
    h = net(p, x)
    y = h.square().sum()
    h.add_(1)
    return y


@pytest.mark.long  # tests/step/test_gloo.py compiles a step
def test_inductor_compiles_it() -> None:
    check_compiled(penalty_of_autograd)


@pytest.mark.suite(but={
    "per_sample_gradients": "gradient_penalty gathers alike",
    "maml": "gradient_penalty gathers alike",
})  # fmt: skip
@pytest.mark.parametrize("fn", [gradient_penalty, maml, per_sample_gradients], ids=lambda f: f.__name__)
def test_a_transform_of_a_whole_model_gathers_one_unit_after_the_other(
    fn: Fn, recwarn: pytest.WarningsRecorder
) -> None:
    low = lower(fn, params(4), batches(1)[0], ranks=2)
    runs = [i for i in low.schedule.instructions if isinstance(i, Run)]
    gathers = [i for i in low.schedule.instructions if isinstance(i, Gather)]
    assert {i.unit for i in runs} == {f"layers.{i}" for i in range(4)}
    assert len(gathers) > 2 * 4  # forward, the slope, and backward of both
    assert not recwarn.list


@torch.library.custom_op("fnshard_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_custom_op_is_differentiated_inside() -> None:
    """Plain torch.func refuses custom ops: a power is what it is compared with."""

    def fn(p: Params, x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
        twice = grad(lambda z: grad(lambda q: op(net(p, q)).sum())(z).square().sum())(x)
        x = x.clone().requires_grad_()
        (slope,) = autograd_grad(op(net(p, x)).sum() + twice.sum(), x, create_graph=True)
        with torch.no_grad():
            scale = op(net(p, x))
        return slope.square().mean() + (scale * op(net(p, x))).mean()

    got = our_grads(lambda p, x: fn(p, x, cube), params(), batches(1)[0])
    expected = plain_grads(lambda p, x: fn(p, x, lambda z: z**3), params(), batches(1)[0])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_value_and_its_slope_share_one_mask() -> None:
    def of_a_pullback(p: Params, x: Tensor) -> Tensor:
        y, pull = vjp(lambda z: F.dropout(z.exp(), 0.5, training=True), x)
        return net(p, x).mean() + 1000 * ((y == 0) != (pull(torch.ones_like(y))[0] == 0)).double().sum()

    assert our_grads(of_a_pullback, params(), batches(1)[0])[0] < 500


def test_a_trace_that_begins_anew_leaves_the_module_as_it_was() -> None:
    class Cached(torch.nn.Module):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones_like(x).tril()
            return x * self.mask

    module = Cached()

    def masked(p: Params, x: Tensor) -> Tensor:
        x = module(x).requires_grad_()
        return autograd_grad(net(p, x).sum(), x, create_graph=True)[0].square().mean()

    expected = plain_grads(masked, params(), batches(1)[0])
    module.mask = None
    torch.testing.assert_close(our_grads(masked, params(), batches(1)[0]), expected, rtol=1e-10, atol=1e-10)
    assert module.mask is None


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
    ("fn", "leaves", "fix"),
    [
        (lambda p, x: vmap(lambda z: z @ p["layers.0.w"][:2])(x).sum(), "matmul", ()),
        (
            lambda p, x: grad(lambda z: z.sum() * float(net(p, z).sum()))(x).sum(),
            "value",
            (),
        ),
        (lambda p, x: linearize(lambda z: net(p, z), x)[1](x).sum(), (), "torch.func.jvp"),
        (lambda p, x: autograd_grad(net(p, x).sum(), x)[0].sum(), "differentiated Tensors", ()),
        (lambda p, x: autograd_grad(written(p, x), p.values())[0].sum(), "inplace operation", ()),
        (lambda p, x: vmap(lambda z: net(p, z).sum().backward())(x), "backward() called inside", ()),
    ],
)
def test_a_mistake_inside_is_refused_as_one_outside_is(fn: Fn, leaves, fix) -> None:
    with raises(TraceError, leaves=leaves, fix=fix):
        lower(fn, params(), batches(1)[0], ranks=2)
