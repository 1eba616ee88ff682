"""What programs call as `custom`: functions with backwards of their own, an operator, checkpoints, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.utils import checkpoint

Fn = Callable[..., Any]


def function(forward: Fn, backward: Fn, options: str = "") -> Fn:
    """Return `apply` of a Function from the tensors that `forward(*v)` takes to `y`, or to several.

    `backward(g, y, *v)` gives the gradient of the first of `v`, or a tuple of all. `g` is 0.7 times the
    gradient of `y`, or of the first of several, so that a gradient shows whether `backward` was called.
    Options: "setup" (a setup_context in the place of a forward with a context), "attribute" (tensors are kept
    on the context as they are), "once" (once_differentiable), "aside" (a second result that is not
    differentiable), "two" (a second one that is), "unmaterialized" (None for no gradient), "dirty" (the first
    of `v` is written to).
    """
    flags = set(options.split())

    def run(*v: Tensor) -> Any:
        if "dirty" in flags:
            return v[0].copy_(forward(*v))
        y = forward(*v)
        return (y, y.sign()) if "aside" in flags else (y, y.cos()) if "two" in flags else y

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scale, *v = inputs
        first = output[0] if isinstance(output, tuple) else output
        if "attribute" in flags:
            ctx.kept = [each * 1.0 for each in (first, *v)]
        else:
            ctx.save_for_backward(first, *v)
        if "aside" in flags:
            ctx.mark_non_differentiable(output[1])
        if "dirty" in flags:
            ctx.mark_dirty(v[0])
        ctx.set_materialize_grads("unmaterialized" not in flags)

    def old_forward(ctx: Any, scale: dict[str, float], *v: Tensor) -> Any:
        output = run(*v)
        keep(ctx, (scale, *v), output)
        return output

    def back(ctx: Any, g: Tensor | None, second: Tensor | None = None) -> Any:
        y, *v = ctx.kept if "attribute" in flags else ctx.saved_tensors
        if "two" in flags and second is not None:
            g = -0.3 * second if g is None else g - 0.3 * second
        if g is None:
            return (None,) * (1 + len(v))
        found = backward(g * ctx.scale["scale"], y, *v)
        found = found if isinstance(found, tuple) else (found,)
        found = [*found, *[None] * (len(v) - len(found))]
        return None, *(d if needs else None for d, needs in zip(found, ctx.needs_input_grad[1:], strict=True))

    members: dict[str, Any] = {"backward": once_differentiable(back) if "once" in flags else back}
    if "setup" in flags:
        members |= {"forward": lambda scale, *v: run(*v), "setup_context": keep}
    else:
        members["forward"] = old_forward
    methods = {name: staticmethod(method) for name, method in members.items()}
    made = type("Custom", (Function,), {**methods, "generate_vmap_rule": "setup" in flags})
    return lambda *v: made.apply({"scale": 0.7}, *v)


@torch.library.custom_op("fnshard_fuzz::scaled_square", mutates_args=())
def scaled_square(x: Tensor, scale: float) -> Tensor:
    """Compute a square by an operator whose backward is half its true derivative."""
    return x.square() * scale


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


scaled_square.register_fake(lambda x, scale: torch.empty_like(x))
scaled_square.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0] * ctx.scale, None), setup_context=_keep
)


def reentrant(fn: Fn, *v: Tensor) -> Any:
    """Run a checkpoint that calls backward in its backward."""
    return checkpoint.checkpoint(fn, *v, use_reentrant=True)


def recomputed(fn: Fn, *v: Tensor) -> Any:
    """Run a checkpoint that saves what it recomputes."""
    return checkpoint.checkpoint(fn, *v, use_reentrant=False)


def hooked(v: Tensor, hook: Fn) -> Tensor:
    """Give a value a hook, if it has a gradient."""
    if v.requires_grad:
        v.register_hook(hook)
    return v
