"""Rules of reductions, and of ops that work along a dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fnshard.compiler.place.elementwise import elementwise
from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Partial, Split, divides
from fnshard.compiler.place.strategies import Call, OpStrategy, dims_of, move_dims, rule

aten, own = torch.ops.aten, torch.ops.fnshard


def _reduce(call: Call, over: Partial | None = None) -> Iterator[OpStrategy]:
    """Split along dims that stay, and with `over` along others: the result is then of that placement."""
    rank, keep = call.tensors[0].dim(), bool(call.arguments.get("keepdim", False))
    dims = dims_of(call.arguments.get("dim"), rank)
    for split in call.splits(call.tensors[0].shape):
        if split.dim not in dims:
            removed = 0 if keep else sum(d < split.dim for d in dims)
            yield OpStrategy((split,), Split(split.dim - removed, split.outer))
        elif over is not None:
            even = divides(call.tensors[0].shape, split, call.ranks)
            yield OpStrategy((split,), over, run=None if even else _mask_padding(call, split, over))


def _mask_padding(call: Call, split: Split, over: Partial) -> Callable[..., Tensor]:
    """Return the op with a number that is neutral to it in the place of padding."""
    value, size = call.tensors[0], call.tensors[0].shape[split.dim] // split.outer
    part, trailing = call.part(value.shape, split), [1] * (value.dim() - split.dim - 1)
    neutral = 0 if over == PARTIAL or call.value.dtype == torch.bool else _find_lowest(value.dtype)

    def run(index: Tensor, x: Tensor) -> Tensor:
        inside = torch.arange(part, device=x.device) + index * part < size
        inside = inside.expand(split.outer, part).reshape(-1, *trailing)
        return call.on([torch.where(inside, x, neutral)])

    return run


def _find_lowest(dtype: torch.dtype) -> float:
    """Return the number that no maximum is below."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(call: Call) -> Iterator[OpStrategy]:
    """Split along any dim; parts of a sum stay parts."""
    yield from _reduce(call, PARTIAL)
    if call["dtype"] is None:
        yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> Iterator[OpStrategy]:
    """Weigh each part's mean by its share of a split dim."""
    for strategy in _reduce(call, PARTIAL):
        if strategy.output != PARTIAL:
            yield strategy
            continue
        # A mean divides by the length of the part, padding included, which the share takes into account.
        (split,), shape = strategy.inputs, call.tensors[0].shape
        share = call.part(shape, split) * split.outer / shape[split.dim]

        def run(index: Tensor, x: Tensor, masked=strategy.run, share=share) -> Tensor:
            return (masked(index, x) if masked is not None else call.on([x])) * share

        yield replace(strategy, run=run)
    if call["dtype"] is None:
        yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.amax.default, aten.max.default, aten.any.default, aten.any.dim)
def _amax(call: Call) -> Iterator[OpStrategy]:
    """Split a maximum, unless it has a gradient: equal maxima on all ranks share that, so it is expanded."""
    yield from _reduce(call, None if call.value.requires_grad else Partial("max"))


@rule(
    aten.logsumexp.default, aten.amin.default, aten.prod.default, aten.prod.dim_int, aten.all.default,
    aten.all.dim, aten.argmax.default, aten.argmin.default, aten.var.correction, aten.std.correction,
    aten.var.dim, aten.std.dim, aten.var_mean.correction, aten.max.dim, aten.min.dim, aten.min.default,
    aten.linalg_vector_norm.default, aten.count_nonzero.dim_IntList, aten.median.dim,
)  # fmt: skip
def _other_reductions(call: Call) -> Iterator[OpStrategy]:
    """Split along dims that stay."""
    yield from _reduce(call)


# The ops below that are linear, so that parts of a sum may pass.
_LINEAR = {aten.cumsum.default, aten.flip.default, aten.roll.default}


@rule(
    aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default,
    aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.flip.default, aten.sort.default,
    aten.sort.stable, aten.argsort.default, aten.topk.default, aten.roll.default, aten.logcumsumexp.default,
    aten.glu.default, aten.kthvalue.default,
)  # fmt: skip
def _along_dims(call: Call) -> Iterator[OpStrategy]:
    """Split along dims that the op does not work along."""
    rank, named = call.tensors[0].dim(), call.arguments
    worked_on = dims_of(named["dims"] if "dims" in named else named["dim"], rank)
    order = [None if d in worked_on else d for d in range(rank)]
    if len(call.shape) < rank:
        order = [d for d in order if d is not None]
    linear = call.target in _LINEAR and named.get("dtype") is None
    yield from move_dims(call, order, linear)


LOSSES = (
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
    aten.soft_margin_loss.default, aten.poisson_nll_loss.default,
)  # fmt: skip


@rule(*LOSSES)
def _loss(call: Call) -> Iterator[OpStrategy]:
    """Split the loss of each element; one that is reduced is expanded."""
    if call["reduction"] == 0:
        yield from elementwise(call)


@rule(aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default)
def _target_loss(call: Call) -> Iterator[OpStrategy]:
    """Split the loss of each row; one that is reduced is expanded."""
    value, target = call.tensors[:2]
    probabilities = target.shape == value.shape  # and not numbers of classes
    # Dim 1 is that of the classes, which the result does not have.
    if call["reduction"] == 0 and call["weight"] is None and value.dim() > 1:
        for split in call.splits(value.shape, [d for d in range(value.dim()) if d != 1]):
            rows = Split(split.dim - (split.dim > 1), split.outer)
            yield OpStrategy((split, split if probabilities else rows), rows)


@rule(own.token_parts.default)
def _token_parts(call: Call) -> Iterator[OpStrategy]:
    """Split along tokens, or along parts of the vocabulary; a single part is expanded."""
    hidden, weight, parts = call["hidden"], call["weight"], call["parts"]
    for split in call.splits(hidden.shape, [0]):
        yield OpStrategy((split, REPLICATED, split), Split(1, split.outer))
    if parts % call.ranks == 0:
        rows, local_parts = weight.shape[0] // call.ranks, parts // call.ranks

        def run(index: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            # Targets count from the first row of a rank's vocabulary.
            return call.on([hidden, weight, targets - index * rows], parts=local_parts)

        yield OpStrategy((REPLICATED, Split(0), REPLICATED), Split(0), run=run)
