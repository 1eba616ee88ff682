"""Expand: ops whose split arguments no rule takes, by their definitions in smaller ops, which rules do take.

So a softmax or a norm over a split dim, and a cross-entropy over a split vocabulary, become a few reductions
whose parts are summed: what Megatron-LM writes by hand (Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten, own = torch.ops.aten, torch.ops.fnshard

EXPANSIONS: dict[Any, Callable[..., Any]] = {}


def expansion(*targets: Any) -> Callable[[Callable], Callable]:
    """The definition of these ops: it takes what they take, or gives None where it does not hold."""

    def add(definition: Callable[..., Any]) -> Callable[..., Any]:
        EXPANSIONS.update(dict.fromkeys(targets, definition))
        return definition

    return add


@expansion(aten.linear.default)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return None if bias is None else aten.linear(x, weight) + bias


@expansion(aten.addmm.default)
def _addmm(bias: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = one @ other
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


@expansion(aten.logsumexp.default)
def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    top = _finite_top(x, dim)
    total = (x - top).exp().sum(dim, keepdim=True).log() + top
    return total if keepdim else total.squeeze(dim)


def _finite_top(x: Tensor, dim: Any) -> Tensor:
    top = x.detach().amax(dim, keepdim=True)
    return torch.where(top.abs() == torch.inf, 0.0, top)


def _wide(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In fp32 at least."""
    x = x if dtype is None else x.to(dtype)
    return x.to(torch.promote_types(x.dtype, torch.float32))


@expansion(aten.softmax.int)
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    wide = _wide(x, dtype)
    parts = (wide - wide.detach().amax(dim, keepdim=True)).exp()
    return (parts / parts.sum(dim, keepdim=True)).to(dtype or x.dtype)


@expansion(aten.log_softmax.int)
def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    wide = _wide(x, dtype)
    return (wide - _logsumexp(wide, dim, keepdim=True)).to(dtype or x.dtype)


@expansion(aten.layer_norm.default)
def _layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    wide, dims = _wide(x, None), list(range(-len(normalized_shape), 0))
    centred = wide - wide.mean(dims, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


@expansion(aten.rms_norm.default)
def _rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    wide, dims = _wide(x, None), list(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


@expansion(aten.cross_entropy_loss.default)
def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    if weight is not None or target.is_floating_point() or x.dim() != 2:
        return None
    wide = _wide(x, None)
    counted = target != ignore_index
    sums = _logsumexp(wide, 1)
    losses = sums - wide.gather(1, torch.where(counted, target, 0).unsqueeze(1)).squeeze(1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (sums - wide.mean(1))
    losses = torch.where(counted, losses, 0.0)
    if reduction == 1:
        losses = losses.sum() / counted.sum()
    elif reduction == 2:
        losses = losses.sum()
    return losses.to(x.dtype)


@expansion(own.token_losses.default)
def _token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, chunk: int
) -> tuple[Tensor, Tensor]:
    logits = _wide(aten.linear(hidden, weight), None)
    sums, counted = _logsumexp(logits, 1), targets != ignore
    chosen = logits.gather(1, torch.where(counted, targets, 0).unsqueeze(1)).squeeze(1)
    return torch.where(counted, sums - chosen, 0.0), sums.detach()
