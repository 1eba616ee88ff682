"""Expand ops whose split arguments no rule takes into smaller ops, which have rules.

A softmax or a norm over a split dim, and a cross-entropy over a split vocabulary, become a few reductions
whose parts are summed, as Megatron-LM writes them by hand (Shoeybi et al. 2019). A composite op without a
rule is expanded by torch's own definition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from fnshard.compiler.ir.program import mutated_args
from fnshard.compiler.place.reductions import LOSSES
from fnshard.compiler.place.strategies import RULES, Call, dims_of, is_list
from fnshard.compiler.place.windows import CONVOLUTIONS

aten, own = torch.ops.aten, torch.ops.fnshard

EXPANSIONS: dict[Any, Callable[..., Any]] = {}


def expansion(*targets: Any) -> Callable[[Callable], Callable]:
    """Register a function as the definition of these ops.

    It takes the call and the op's arguments, and returns None if it does not hold for them.
    """

    def add(definition: Callable[..., Any]) -> Callable[..., Any]:
        EXPANSIONS.update(dict.fromkeys(targets, definition))
        return definition

    return add


def expand_call(call: Call, autocast: bool) -> fx.Graph | None:
    """Return a call in smaller ops, as a graph of its tensors; None if there is no definition.

    Args:
        autocast: whether the call runs under autocast. The graph does not, and casts its tensors to the dtype
            of the result instead.
    """
    # The definition: one of this module, or torch's own for an op that no rule takes as it is.
    is_registered = call.target in EXPANSIONS
    if not is_registered and call.target in RULES:
        return None
    definition = partial(EXPANSIONS[call.target], call) if is_registered else call.target.decompose
    args, kwargs = call.rebuild({})
    if definition(*args, **kwargs) in (None, NotImplemented):
        return None
    results = call.value if is_list(call.value) else [call.value]
    dtype = next((v.dtype for v in results if v.is_floating_point()), None) if autocast else None

    def compute(*tensors: Tensor) -> Any:
        feed = iter(t.to(dtype) if dtype and t.is_floating_point() else t for t in tensors)

        def take(value: Any) -> Any:
            return next(feed) if isinstance(value, Tensor) else value

        return definition(*map_aggregate(args, take), **map_aggregate(kwargs, take))

    # make_fx takes a tensor that comes twice for one input, so that each gets a tensor of its own.
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in call.tensors]
    # A trace before dispatch sees composite ops as they are, and one after it takes them apart.
    graph = make_fx(compute, {}, tracing_mode="fake", pre_dispatch=is_registered)(*inputs).graph

    # The walk can place nothing but ops from tensors to tensors that write to none.
    graph.eliminate_dead_code()
    for node in graph.nodes:
        has_no_value = node.op == "call_function" and node.meta.get("val") is None
        if has_no_value or node.op == "get_attr" or mutated_args(node):
            return None
    return graph


# ------------------------------------------------------------------ products
@expansion(aten.linear.default)
def _linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return None if bias is None else aten.linear(x, weight) + bias


@expansion(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def _add_product(
    call: Call, bias: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    product = one @ other
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


@expansion(*CONVOLUTIONS)
def _conv(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any) -> Tensor | None:
    if bias is None or x.dim() != weight.dim():
        return None
    return call.target(x, weight, None, *more) + bias.reshape(-1, *[1] * (x.dim() - 2))


# ------------------------------------------------------------------ parts
@expansion(aten.split_with_sizes.default, aten.split.sizes)
def _split_sizes(call: Call, x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Split matrices that lie side by side.

    A piece may hold several matrices: one the queries, and another keys and values.
    """
    ends = list(itertools.accumulate(sizes))
    return [aten.slice(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


# ------------------------------------------------------------------ reductions
@expansion(aten.logsumexp.default)
def _logsumexp(call: Call | None, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    # The maximum is subtracted for the range of exp alone, so that it needs no gradient.
    top = x.detach().amax(dim, keepdim=True)
    # An infinite maximum would make NaN of the difference.
    top = torch.where(top.abs() == torch.inf, 0.0, top)
    total = (x - top).exp().sum(dim, keepdim=True).log() + top
    return total if keepdim else total.squeeze(dim)


@expansion(aten.amax.default, aten.max.default)
def _amax(call: Call | None, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    return _take_maximum(x, dims_of(dim, x.dim()), keepdim) if x.requires_grad else None


def _take_maximum(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return the maximum; equal ones share its gradient equally, on whichever rank they are."""
    if not x.requires_grad:
        return x.amax(dims, keepdim)
    equal = x.detach() == x.detach().amax(dims, keepdim=True)
    return torch.where(equal, x, 0).sum(dims, keepdim) / equal.sum(dims, keepdim)


@expansion(aten.amin.default, aten.min.default)
def _amin(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return -_take_maximum(-x, dims_of(dim, x.dim()), keepdim)


@expansion(aten.all.default, aten.all.dim)
def _all(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    none = x == 0
    return ~(none.any() if dim is None else none.any(dim, keepdim))


@expansion(aten.argmax.default, aten.argmin.default)
def _argmax(call: Call | None, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the largest number, of the first if several are equal."""
    least = call is not None and call.target is aten.argmin.default
    values, along = (x.detach().reshape(-1), 0) if dim is None else (x.detach(), dim)
    values = -values if least else values
    size = values.shape[along]
    # Of the places of the maximum the first is the largest negated index; all others count as past the end.
    index = torch.arange(size, device=x.device).reshape(-1, *[1] * (values.dim() - along % values.dim() - 1))
    first = -torch.where(values == values.amax(along, keepdim=True), -index, -size).amax(along, keepdim)
    return first.reshape([1] * x.dim()) if dim is None and keepdim else first


@expansion(aten.max.dim, aten.min.dim)
def _max_dim(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    index = _argmax(None, -x if call.target is aten.min.dim else x, dim, True)
    value = x.gather(dim, index)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@expansion(aten.var.correction, aten.std.correction, aten.var.dim, aten.std.dim)
def _var(call: Call, x: Tensor, dim: Any = None, *more: Any, **named: Any) -> Tensor:
    dims, keep = dims_of(dim, x.dim()), call["keepdim"]
    # Some overloads have `correction`, which may be None, and some the older `unbiased`.
    correction = call["correction"] if "correction" in call.arguments else int(call["unbiased"])
    count = math.prod(x.shape[d] for d in dims)
    var = (x - x.mean(dims, keepdim=True)).square().sum(dims, keepdim=keep)
    var = var / (count - (1 if correction is None else correction))
    return var.sqrt() if call.target in (aten.std.correction, aten.std.dim) else var


@expansion(aten.linalg_vector_norm.default)
def _vector_norm(
    call: Call, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor | None:
    """Return a vector norm, whose gradient at zero is zero."""
    if ord not in (1, 2, float("inf")):
        return None
    dims = dims_of(dim, x.dim())
    size = (x if dtype is None else x.to(dtype)).abs()
    if ord != 2:
        return size.sum(dims, keepdim) if ord == 1 else _take_maximum(size, dims, keepdim)
    total = size.square().sum(dims, keepdim)
    # The inner `where` keeps the root's infinite slope at zero from making NaN of a gradient of zero.
    zero = total == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, total).sqrt())


@expansion(aten.cumsum.default)
def _cumsum(call: Call, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor | None:
    """Sum each rank's run, and add the sums of those before it."""
    # The totals below have an entry for each rank. They are gathered: to expand them, too, would never end.
    if x.dim() == 0 or x.shape[dim] % call.ranks or x.shape[dim] == call.ranks:
        return None
    dim = dim % x.dim()
    runs = x.unflatten(dim, (call.ranks, -1))
    totals = runs.sum(dim + 1, dtype=dtype)
    before = aten.cumsum(totals, dim, dtype=dtype) - totals
    return (aten.cumsum(runs, dim + 1, dtype=dtype) + before.unsqueeze(dim + 1)).flatten(dim, dim + 1)


# ------------------------------------------------------------------ softmax and norms
def _widen(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Cast to `dtype`, and to fp32 if it is narrower."""
    x = x if dtype is None else x.to(dtype)
    return x.to(torch.promote_types(x.dtype, torch.float32))


@expansion(aten.softmax.int)
def _softmax(call: Call, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the softmax by sums, and with wide numbers, as torch's own kernels do."""
    wide = _widen(x, dtype)
    parts = (wide - wide.detach().amax(dim, keepdim=True)).exp()
    return (parts / parts.sum(dim, keepdim=True)).to(dtype or x.dtype)


@expansion(aten.log_softmax.int)
def _log_softmax(call: Call, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the log-softmax by a log-sum-exp, which ranks can share."""
    wide = _widen(x, dtype)
    return (wide - _logsumexp(None, wide, dim, keepdim=True)).to(dtype or x.dtype)


@expansion(aten.layer_norm.default)
def _layer_norm(
    call: Call, x: Tensor, normalized_shape: list[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """Compute the norm by means over the normalized dims, in wide numbers."""
    wide, dims = _widen(x), list(range(-len(normalized_shape), 0))
    centred = wide - wide.mean(dims, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


@expansion(aten.rms_norm.default)
def _rms_norm(
    call: Call, x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    wide, dims = _widen(x), list(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


# ------------------------------------------------------------------ losses
@expansion(*LOSSES)
def _loss(call: Call, *args: Any, **kwargs: Any) -> Tensor | None:
    """Compute the loss of each element, and reduce it by an op of its own."""
    if call["reduction"] == 0:
        return None
    each = call.on([v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)], reduction=0)
    return each.mean() if call["reduction"] == 1 else each.sum()


@expansion(aten.cross_entropy_loss.default)
def _cross_entropy(
    call: Call, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """Compute the cross-entropy by a log-sum-exp and the targets' scores."""
    if weight is not None or target.is_floating_point():
        return None
    wide, dim = _widen(x), min(x.dim() - 1, 1)
    sums = _logsumexp(None, wide, dim)
    losses = sums - _choose_targets(wide, target, ignore_index)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (sums - wide.mean(dim))
    return _reduce_counted(losses, target != ignore_index, reduction).to(x.dtype)


def _choose_targets(x: Tensor, target: Tensor, ignore: int) -> Tensor:
    """Return the number of each row's target, and any number for an ignored one."""
    dim = min(x.dim() - 1, 1)
    # An ignored target may be no index at all, so that 0 is looked up in its place.
    return x.gather(dim, torch.where(target != ignore, target, 0).unsqueeze(dim)).squeeze(dim)


def _reduce_counted(losses: Tensor, counted: Tensor, reduction: int) -> Tensor:
    """Reduce the losses of rows: 0 leaves them, 1 is the mean of those that count, 2 the sum."""
    losses = torch.where(counted, losses, 0.0)
    if reduction == 0:
        return losses
    return losses.sum() / counted.sum() if reduction == 1 else losses.sum()


@expansion(aten.nll_loss.default, aten.nll_loss_nd.default)
def _nll_loss(
    call: Call, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor | None:  # fmt: skip
    if weight is not None:
        return None
    return _reduce_counted(-_choose_targets(x, target, ignore_index), target != ignore_index, reduction)


@expansion(own.token_parts.default)
def _token_parts(
    call: Call, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, parts: int
) -> tuple[Tensor, Tensor] | None:
    """Compute one part from the ranks' parts of it, without all logits at once if these are even."""
    if parts != 1:
        return None
    # If ranks do not divide the vocabulary, compute all logits at once. A target outside has the logit 0.
    if weight.shape[0] % call.ranks:
        logits, inside = _widen(aten.linear(hidden, weight)), (targets >= 0) & (targets < weight.shape[0])
        chosen = logits.gather(1, torch.where(inside, targets, 0).unsqueeze(1)).squeeze(1)
        sums, chosen = _logsumexp(None, logits, 1), torch.where(inside, chosen, 0.0)
        return sums.unsqueeze(0), chosen.unsqueeze(0)
    # Otherwise the op computes a part for each rank without all logits, and the parts are summed.
    sums, chosen = own.token_parts(hidden, weight, targets, chunk, call.ranks)
    return _logsumexp(None, sums, 0, keepdim=True), chosen.sum(0, keepdim=True)
