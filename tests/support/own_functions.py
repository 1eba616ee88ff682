"""Subclasses of `torch.autograd.Function`, one for each thing that torch lets one do, and an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Round(Function):
    """Straight-through: rounds, and passes gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reverse(Function):
    @staticmethod
    def forward(x: Tensor, scale: float = 0.5) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.scale * g, None


class Swish(Function):
    """Keeps its input alone, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, info: dict[str, float]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.info = info
        return x * torch.sigmoid(x * info["beta"])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x * ctx.info["beta"])
        return g * (gate + x * ctx.info["beta"] * gate * (1 - gate)), None


class SavesIntermediates(Function):
    """Tensors on the context, saved outputs, in-place inside, a view as its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.new_zeros(2, *x.shape)
        wide[0] = x.sin()
        wide[1].add_(x).mul_(2)
        ctx.wide = wide
        out = (wide[0] * wide[1]).view(-1)
        ctx.save_for_backward(out, None)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        out, nothing = ctx.saved_tensors
        assert nothing is None
        slope = torch.empty_like(g)
        slope.copy_(ctx.wide[1] * g)
        slope.add_(out.view(g.shape).cos())
        return slope.mul_(2)


class Several(Function):
    """Two outputs that may be read, one that is no tensor, one without derivative, one of integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        fixed = x.sign()
        ctx.mark_non_differentiable(fixed)
        return x * y, x + y, "text", fixed, x.argmax(-1)

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor, text: None, fixed: Tensor, place: Tensor) -> Any:
        x, y = ctx.saved_tensors
        assert text is None and fixed.shape == x.shape
        to_y = 2 * product * x + total if ctx.needs_input_grad[1] else None
        return 3 * product * y + total + fixed, to_y


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        found = [g * k for g, k in ((a, 2.0), (b, 3.0)) if g is not None]
        return sum(found) if found else None


class NoGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2, None


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 7


class Summed(Function):
    """A gradient of a shape that is summed to its input's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, g


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Round.apply(x) + Swish.apply(x, {"beta": 2.0})

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Round.apply(g * ctx.saved_tensors[0])


class LinearLoss(Function):
    """Liger's fused linear cross-entropy: a loop over chunks, whose gradients the forward computes."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
        to_hidden, to_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        loss = torch.zeros((), dtype=hidden.dtype)
        for low in range(0, len(hidden), chunk):
            part = slice(low, low + chunk)
            logits = hidden[part] @ weight
            slope = logits.softmax(-1)
            chosen = target[part].unsqueeze(1)
            loss += (torch.logsumexp(logits, -1) - logits.gather(1, chosen).squeeze(1)).sum()
            slope.scatter_add_(1, chosen, -torch.ones_like(chosen, dtype=slope.dtype))
            to_hidden[part] = slope @ weight.t()
            to_weight.addmm_(hidden[part].t(), slope)
        ctx.save_for_backward(to_hidden.detach(), to_weight.detach() if weight.requires_grad else None)
        return loss

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> Any:
        to_hidden, to_weight = ctx.saved_tensors
        to_hidden.mul_(g)  # as Liger does
        return to_hidden, to_weight.mul_(g), None, None


class Coupling(Function):
    """A reversible block (Gomez et al. 2017): its backward recomputes, and differentiates by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Callable[..., Tensor], g: Callable[..., Tensor]) -> Tensor:
        one, two = x.chunk(2, -1)
        one = one + f(two)
        two = two + g(one)
        ctx.functions, ctx.out = (f, g), torch.cat([one, two], -1).detach()
        return ctx.out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        f, g = ctx.functions
        (one, two), (to_one, to_two) = ctx.out.chunk(2, -1), slope.chunk(2, -1)
        with torch.enable_grad():
            one = one.detach().requires_grad_()
            moved = g(one)
            moved.backward(to_two)  # and into the leaves that g reads
        with torch.no_grad():
            two, to_one = two - moved, to_one + one.grad
        with torch.enable_grad():
            two.requires_grad_()
            torch.autograd.backward(f(two), to_one)
        return torch.cat([to_one, to_two + two.grad], -1), None, None


class Bilinear(Function):
    """A backward that reads leaves, of another unit too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        ctx.save_for_backward(x, one, two)
        return x @ one @ two

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, one, two = ctx.saved_tensors
        back = g @ two.t()
        return back @ one.t(), x.t() @ back, 2 * (x @ one).t() @ g


@torch.library.custom_op("fnshard_test::rounded_cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, g: 2 * g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
