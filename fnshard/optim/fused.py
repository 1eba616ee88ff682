"""AdamW and SGD as one operator each, with torch's fused kernels as their in-place form.

A traced update contains `fnshard::adamw`, `fnshard::sgd` and `fnshard::sgd_momentum`. A compiler takes them
apart by `DECOMPOSITIONS`. An executor that runs them on stored leaves uses `IN_PLACE`, where many leaves are
one call and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ADAMW", "DECOMPOSITIONS", "IN_PLACE", "SGD", "SGD_MOMENTUM", "is_fusable", "prepare_gradients"]

LIBRARY = torch.library.Library("fnshard", "FRAGMENT")

# ------------------------------------------------------------------ AdamW

LIBRARY.define(
    "adamw(Tensor param, Tensor grad, Tensor mu, Tensor nu, Tensor lr, Tensor count, Tensor bias1, "
    "Tensor bias2, float decay, float b1, float b2, float eps) -> (Tensor update, Tensor mu, Tensor nu)"
)


def decompose_adamw(
    param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, lr: Tensor, count: Tensor, bias1: Tensor,
    bias2: Tensor, decay: float, b1: float, b2: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the update of `torch.optim.AdamW`, and the new moments.

    Args:
        param, grad, mu, nu: tensors of one dtype, and of the leaf's shape.
        lr: the rate.
        count: how many updates were made before. Only the fused kernel needs it, not the formula.
        bias1, bias2: 1 - b1 ** (count + 1), and the square root of 1 - b2 ** (count + 1).
        decay: the update also subtracts lr * decay * param.
    """
    lr, bias1, bias2 = (number.to(param.dtype) for number in (lr, bias1, bias2))
    mu = mu.lerp(grad, 1 - b1)
    nu = (nu * b2).addcmul(grad, grad, value=1 - b2)
    update = mu / (nu.sqrt() / bias2 + eps) * (-lr / bias1)
    return (update - lr * decay * param if decay else update), mu, nu


def adamw_(
    params: list[Tensor], grads: list[Tensor], mu: list[Tensor], nu: list[Tensor], lr: float, count: float,
    bias1: float, bias2: float, decay: float, b1: float, b2: float, eps: float,
) -> None:  # fmt: skip
    """Update many leaves of one device, in place; see `IN_PLACE`."""

    def update_fused(params: list[Tensor], grads: list[Tensor], mu: list[Tensor], nu: list[Tensor]) -> None:
        # The kernel wants one fp32 count per leaf, on its device, and only reads it: all leaves share one.
        counts = [torch.full((), count + 1, dtype=torch.float32, device=params[0].device)] * len(params)
        # The kernel would read a tensor as rate through an fp32 pointer; a Python number is exact.
        torch._fused_adamw_(
            params, grads, mu, nu, [], counts, lr=lr, beta1=b1, beta2=b2, weight_decay=decay, eps=eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def update_plain(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers = [torch.tensor(number, dtype=torch.float64) for number in (lr, count, bias1, bias2)]
        return decompose_adamw(param, grad, mu, nu, *numbers, decay, b1, b2, eps)

    _update_in_place([params, grads, mu, nu], update_fused, update_plain, lambda param: True)


# ------------------------------------------------------------------ SGD

LIBRARY.define("sgd(Tensor param, Tensor grad, Tensor lr, float decay) -> Tensor")
LIBRARY.define(
    "sgd_momentum(Tensor param, Tensor grad, Tensor momentum, Tensor lr, float decay, float factor, "
    "bool nesterov) -> (Tensor update, Tensor momentum)"
)


def decompose_sgd(param: Tensor, grad: Tensor, lr: Tensor, decay: float) -> Tensor:
    """Return the update of `torch.optim.SGD`, which adds `decay * param` to the gradient."""
    step = grad + decay * param if decay else grad
    return step * -lr.to(param.dtype)


def decompose_sgd_momentum(
    param: Tensor, grad: Tensor, momentum: Tensor, lr: Tensor, decay: float, factor: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Return the update of `torch.optim.SGD` with momentum, and the new momentum."""
    step = grad + decay * param if decay else grad
    momentum = factor * momentum + step
    step = step + factor * momentum if nesterov else momentum
    return step * -lr.to(param.dtype), momentum


def sgd_(params: list[Tensor], grads: list[Tensor], lr: float, decay: float) -> None:
    """Update many leaves of one device, in place; see `IN_PLACE`."""

    def update_fused(params: list[Tensor], grads: list[Tensor]) -> None:
        torch._fused_sgd_(
            params, grads, [], lr=lr, weight_decay=decay, momentum=0.0, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        )  # fmt: skip

    def update_plain(param: Tensor, grad: Tensor) -> tuple[Tensor]:
        return (decompose_sgd(param, grad, torch.tensor(lr, dtype=torch.float64), decay),)

    _update_in_place([params, grads], update_fused, update_plain, _fused_sgd_is_right)


def sgd_momentum_(
    params: list[Tensor], grads: list[Tensor], momentum: list[Tensor], lr: float, decay: float, factor: float,
    nesterov: bool,
) -> None:  # fmt: skip
    """Update many leaves of one device, in place; see `IN_PLACE`."""

    def update_fused(params: list[Tensor], grads: list[Tensor], momentum: list[Tensor]) -> None:
        torch._fused_sgd_(
            params, grads, momentum, lr=lr, weight_decay=decay, momentum=factor, dampening=0.0,
            nesterov=nesterov, maximize=False, is_first_step=False,
        )  # fmt: skip

    def update_plain(param: Tensor, grad: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        rate = torch.tensor(lr, dtype=torch.float64)
        return decompose_sgd_momentum(param, grad, momentum, rate, decay, factor, nesterov)

    _update_in_place([params, grads, momentum], update_fused, update_plain, _fused_sgd_is_right)


def _fused_sgd_is_right(param: Tensor) -> bool:
    """Return whether torch's fused kernel computes what SGD is."""
    # On a CPU, up to torch 2.13 at least, the fused kernel silently skips whole vectors of fp16 and bf16
    # parameters and spoils their momentum (pytorch issue 191763).
    return not param.is_cpu or param.dtype in (torch.float32, torch.float64)


# ------------------------------------------------------------------ the operators

ADAMW = torch.ops.fnshard.adamw.default
SGD = torch.ops.fnshard.sgd.default
SGD_MOMENTUM = torch.ops.fnshard.sgd_momentum.default

# Each operator as a function in plain ops.
DECOMPOSITIONS: dict[Any, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    ADAMW: decompose_adamw,
    SGD: decompose_sgd,
    SGD_MOMENTUM: decompose_sgd_momentum,
}

# Each operator in place on many leaves of one device and dtype. The functions take the operator's arguments
# in order, with a list of tensors, one for each leaf, for a leaf's tensor, and a Python number for a 0-d
# tensor. They add updates to parameters, write new values to slots, and may overwrite gradients.
IN_PLACE: dict[Any, Callable[..., None]] = {
    ADAMW: adamw_,
    SGD: sgd_,
    SGD_MOMENTUM: sgd_momentum_,
}


def _update_in_place(
    leaves: Sequence[list[Tensor]],
    update_fused: Callable[..., None],
    update_plain: Callable[..., tuple[Tensor, ...]],
    is_right: Callable[[Tensor], bool],
) -> None:
    """Update leaves by the fused kernel, or by the formula where the kernel would be wrong.

    Args:
        leaves: lists of parameters, gradients and slots.
        is_right: says whether the kernel is right for a parameter.
    """
    fused = []
    for param, grad, *slots in zip(*leaves, strict=True):
        if not param.numel():
            continue
        if is_right(param) and is_fusable(param, slots):
            fused.append((param, grad, *slots))
            continue

        # Short dtypes are computed in fp32, as in all updates.
        wide = [t.to(torch.promote_types(param.dtype, torch.float32)) for t in (param, grad, *slots)]
        update, *new = update_plain(*wide)
        param.add_(update.to(param.dtype))
        for slot, value in zip(slots, new, strict=True):
            slot.copy_(value)

    if fused:
        params, grads, *slots = map(list, zip(*fused, strict=True))
        update_fused(params, prepare_gradients(grads, params), *slots)


def is_fusable(param: Tensor, slots: Sequence[Tensor]) -> bool:
    """Return whether torch's fused kernels, which ignore strides, can update a leaf."""
    if not ((param.is_cpu or param.is_cuda) and param.is_contiguous()):
        return False
    return all(slot.dtype == param.dtype and slot.is_contiguous() for slot in slots)


def prepare_gradients(grads: list[Tensor], params: list[Tensor], scale: Tensor | None = None) -> list[Tensor]:
    """Return gradients in the parameters' dtype, contiguous and scaled, in place if possible.

    The kernels' own `grad_scale` is not used: it divides, is read as fp32, and writes the quotient back, so
    that it costs the same traffic as one foreach multiplication and loses digits in fp64.
    """
    if scale is not None and grads and grads[0].dtype.itemsize > params[0].dtype.itemsize:
        # Scale before the cast: a short dtype would overflow while the loss scale is still in the gradients.
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
        scale = None
    # Cast or copy the gradients that the kernels cannot read, all in one call.
    out = [
        g if g.dtype == p.dtype and g.is_contiguous() else torch.empty_like(p)
        for g, p in zip(grads, params, strict=True)
    ]
    copies = [(o, g) for o, g in zip(out, grads, strict=True) if o is not g]
    if copies:
        torch._foreach_copy_(*map(list, zip(*copies, strict=True)))
    if scale is not None:
        # A factor of another dtype costs CUDA a kernel per leaf; one of 16 bits would lose digits.
        dtype = out[0].dtype
        torch._foreach_mul_(out, scale.to(dtype) if dtype.itemsize >= 4 else scale)
    return out


for _operator, _function in DECOMPOSITIONS.items():
    LIBRARY.impl(_operator, _function, "CompositeExplicitAutograd")
