"""Programs with functions, operators, checkpoints and hooks of their own; each has the leaves `params()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from own_functions import (
    Bilinear,
    Coupling,
    InPlace,
    LinearLoss,
    Nested,
    NoGradient,
    Reverse,
    Round,
    SavesIntermediates,
    Several,
    Summed,
    Swish,
    Unmaterialized,
    cube,
)
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Params = dict[str, Tensor]
Fn = Callable[[Params, Tensor], Tensor]
LAYERS, WIDTH, ROWS, SLICES = 3, 4, 3, 4


def params() -> Params:
    numbers = torch.Generator().manual_seed(0)
    shape = (WIDTH, WIDTH)
    return {
        f"layers.{i}.w": torch.randn(shape, dtype=torch.float64, generator=numbers) / 2 for i in range(LAYERS)
    }


def batches(count: int = SLICES) -> Tensor:
    """[count, ROWS, WIDTH]; equal slices are micro-batches or ranks."""
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(count, ROWS, WIDTH, dtype=torch.float64, generator=numbers)


PROGRAMS: dict[str, Fn] = {}


def program(fn: Fn) -> Fn:
    PROGRAMS[fn.__name__] = fn
    return fn


def between(each: Callable[[Tensor], Tensor]) -> Fn:
    """A chain of products, `each` behind every one of them."""

    def fn(p: Params, x: Tensor) -> Tensor:
        for w in p.values():
            x = each(x @ w)
        return (x * x.cos()).mean()

    return fn


# ------------------------------------------------------------------ functions


if torch.__version__ >= "2.12":  # before, torch takes no keywords
    PROGRAMS["gradient_reversal_by_name"] = between(lambda x: Reverse.apply(x, scale=2.0))
PROGRAMS |= {
    "straight_through": between(Round.apply),
    "gradient_reversal": between(Reverse.apply),
    "swish_recomputed": between(lambda x: Swish.apply(x, {"beta": 1.5})),
    "saves_intermediates": between(SavesIntermediates.apply),
    "an_output_unused": between(lambda x: Several.apply(x, x.sin())[0]),
    "outputs_used": between(lambda x: _combined(*Several.apply(x, x.cos()))),
    "unmaterialized": between(lambda x: Unmaterialized.apply(x)[1]),
    "once_differentiable": between(lambda x: NoGradient.apply(x, x)),
    "in_place": between(lambda x: InPlace.apply(x.sin()) + 1),
    "nested": between(Nested.apply),
    "custom_op": between(cube),
    "under_autocast": between(lambda x: _in_half(x).double()),
    "checkpoint_reentrant": between(lambda x: checkpoint(torch.sin, x, use_reentrant=True)),
    "checkpoint_not_reentrant": between(lambda x: checkpoint(torch.sin, x, use_reentrant=False)),
    "checkpoint_of_a_function": between(lambda x: checkpoint(Round.apply, x, use_reentrant=False)),
    "checkpoint_sequence": between(
        lambda x: checkpoint_sequential([torch.sin, Round.apply], 2, x, use_reentrant=True)
    ),
}  # fmt: skip


def _combined(product: Tensor, total: Tensor, text: str, fixed: Tensor, places: Tensor) -> Tensor:
    return product + total * fixed + places.unsqueeze(1)


def _in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Round.apply(x.float() @ torch.eye(WIDTH))


@program
def without_a_gradient(p: Params, x: Tensor) -> Tensor:
    """The first unit's alone is lost: nothing comes back from y."""
    a, b, c = p.values()
    return (NoGradient.apply(x @ b, (x @ a).sin()) @ c + x @ a).square().mean()


@program
def summed(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        x = Summed.apply(x @ w, w[0]).sin()
    return x.mean()


@program
def fused_linear_loss(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        hidden, x = x, torch.tanh(x @ w)
    return LinearLoss.apply(hidden, w, torch.arange(ROWS) % WIDTH, 2)


@program
def reversible(p: Params, x: Tensor) -> Tensor:
    half = WIDTH // 2
    for w in p.values():
        f, g = (lambda z, w=w, i=i: torch.tanh(z @ w[i : i + half, :half]) for i in (0, half))
        x = Coupling.apply(x @ w, f, g)
    return x.square().mean()


@program
def leaves_of_two_units(p: Params, x: Tensor) -> Tensor:
    a, b, c = p.values()
    return (Bilinear.apply(x, a, b).sin() @ c).square().mean()


@program
def quantized_leaves(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        x = torch.tanh(x @ Round.apply(w))
    return x.square().mean()


@program
def a_quantized_leaf_twice(p: Params, x: Tensor) -> Tensor:
    """One that two units read, with a backward that is not linear."""

    class Signed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round(decimals=1)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.sign()

    a, b, c = p.values()
    tied = Signed.apply(a)
    return (torch.tanh(torch.tanh(x @ tied) @ b + x) @ c @ tied.t()).square().mean()


# ------------------------------------------------------------------ hooks


@program
def hooks_of_tensors(p: Params, x: Tensor) -> Tensor:
    limit = x.abs().mean()
    for i, w in enumerate(p.values()):
        y = x @ w
        early = y.sin()
        mask = (y > 0).double()
        y.register_hook(lambda g, limit=limit: g.clamp(-0.01, 0.01) * limit)
        y.register_hook(lambda g, mask=mask, i=i: g.clone() + mask * (i + 1))
        y.register_hook(lambda g: g * 0).remove()
        x = y * early
    return x.mean()


@program
def hooks_of_leaves(p: Params, x: Tensor) -> Tensor:
    a, b, c = p.values()
    h = torch.tanh(x @ a) @ b
    a.register_hook(lambda g: g.clamp(-0.01, 0.01))
    c.register_hook(lambda g: g * 3)
    return (torch.tanh(h @ c) @ a.t()).square().mean()


@program
def a_hook_before_a_write(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        y = x @ w
        y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        y.mul_(2)
        y.register_hook(lambda g: g + 1)
        x = y.sin()
    return x.mean()


LINEAR = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
HOOKED = nn.Sequential(LINEAR, nn.Tanh())
HOOKED.register_full_backward_hook(lambda module, grads, _: (grads[0].clamp(-0.1, 0.1),))
HOOKED[1].register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,))
LINEAR.register_full_backward_pre_hook(lambda module, grads: (grads[0] + 0.1,))


@program
def hooks_of_modules(p: Params, x: Tensor) -> Tensor:
    x = x @ p["layers.0.w"]
    for w in p.values():
        x = functional_call(HOOKED, {"0.weight": w}, (x,))
    return x.square().mean()


# ------------------------------------------------------------------ within transforms


class Curved(Function):
    """With a second derivative that is not the forward's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return g * (2 * x + y)


@program
def differentiated_inside(p: Params, x: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        for w in p.values():
            z = Curved.apply(z @ w)
        return z.sum()

    return (grad(f)(x).square().mean() + vmap(grad(f))(x).square().mean()) + f(x)


@program
def differentiated_by_autograd(p: Params, x: Tensor) -> Tensor:
    """The whole of `fn` is traced on a level; so are the functions that are not differentiated twice."""
    x = x.clone().requires_grad_()
    y = x
    for w in p.values():
        y = Curved.apply(y @ w)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return slope.square().mean() + Reverse.apply(y).mean()
