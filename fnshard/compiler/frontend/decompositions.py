"""Decompositions of torch functions that a trace cannot keep, each with the same result.

While `fn` is traced, `compiler.frontend.unsupported` calls the entry of `DECOMPOSITIONS` in place of torch's
function, and `skip_checks` keeps linear algebra from looking at values where composite operators are taken
apart. Draws are written with `torch.rand` and the like, which `compiler.frontend.random` makes functions of a
key.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fnshard.compiler.frontend.size_bounds import require
from fnshard.compiler.ir.source_lines import user_line


# ------------------------------------------------------------------ products of groups
@torch.library.custom_op("fnshard::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiply group by group, in any dtype and on any device; rows after the last group are 0.

    Args:
        a: [M, K], or [G, M, K] where the groups are columns of `b`.
        b: [K, N], or [G, K, N] where the groups are rows of `a`; if both are 2-d, groups are parts of K.
        ends: int32 [G], the end of each group.

    Returns:
        [M, N], or [G, M, N] if both are 2-d.
    """
    if a.device.type != "cpu":
        return grouped_by_blocks(a, b, ends)
    stops = ends.tolist()
    parts = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    out = torch.zeros(_get_grouped_shape(a, b, ends), dtype=a.dtype, device=a.device)
    for g, part in enumerate(parts):
        if a.dim() == b.dim():
            out[g] = a[:, part] @ b[part]
        elif a.dim() == 2:
            out[part] = a[part] @ b[g]
        else:
            out[:, part] = a[g] @ b[:, part]
    return out


GROUP_BLOCK, BLOCKS_AT_ONCE = 128, 16  # rows of a block; blocks that are multiplied at once


def grouped_by_blocks(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_mm` by blocks of rows of one group each; the host reads no value, and never waits.

    Groups are padded to whole blocks, whose greatest number is known without the groups' sizes.
    """
    if a.dim() == 3:  # groups are columns of `b`: compute the transposed product, where they are rows
        return grouped_by_blocks(b.mT, a.mT, ends).mT.contiguous()
    sums_groups = a.dim() == b.dim()  # groups are parts of the dim that is summed over
    rows = a.mT if sums_groups else a

    # Number the blocks, find the group of each, and the rows that it takes.
    counts = ends - torch.cat([ends.new_zeros(1), ends[:-1]])
    blocks = (counts + GROUP_BLOCK - 1) // GROUP_BLOCK
    last = blocks.cumsum(0)
    number = torch.arange(-(-len(rows) // GROUP_BLOCK) + len(ends), device=a.device)
    group = torch.searchsorted(last, number, right=True).clamp(max=len(ends) - 1)
    first = (ends - counts)[group] + (number - (last - blocks)[group]) * GROUP_BLOCK
    index = first[:, None] + torch.arange(GROUP_BLOCK, device=a.device)
    # Padding reads a row of zeros, which is appended to the rows.
    index = torch.where(index < ends[group, None], index, len(rows))
    rows, other = (F.pad(t, (0, 0, 0, 1)) for t in (rows, b if sums_groups else rows))

    # Multiply some blocks at a time, and put their rows where they belong.
    if sums_groups:
        out = a.new_zeros(len(ends), a.shape[0], b.shape[1])
    else:
        out = a.new_zeros(len(rows), b.shape[2])
    groups = torch.arange(len(ends), device=a.device)
    for some, where in zip(group.split(BLOCKS_AT_ONCE), index.split(BLOCKS_AT_ONCE), strict=True):
        if sums_groups:  # by a product, which sums in one order; atomic additions do not
            of_group = (groups[:, None] == some).to(a.dtype)
            out += torch.tensordot(of_group, rows[where].mT @ other[where], 1)
        else:
            out.index_put_((where,), rows[where] @ b[some])
    return out if sums_groups else out[:-1]


def _get_grouped_shape(a: Tensor, b: Tensor, ends: Tensor) -> list[int]:
    """Return the shape of the products: with groups as first dim where both tensors are 2-d."""
    groups = list(ends.shape) if a.dim() == b.dim() else []
    return [*groups, a.shape[-2], b.shape[-1]]


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(_get_grouped_shape(a, b, ends))


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return both gradients, of which the second sums over each group's rows."""
    a, b, ends = ctx.saved_tensors
    to_a = grouped_mm(grad, b.mT, ends) if ctx.needs_input_grad[0] else None
    return to_a, grouped_mm(a.mT, grad, ends) if ctx.needs_input_grad[1] else None, None


grouped_mm.register_autograd(
    _grouped_mm_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@register_flop_formula(torch.ops.fnshard.grouped_mm)
def _flops(a: Any, b: Any, ends: Any, out_shape: Any = None, **_: Any) -> int:
    """Count the FLOPs for torch's flop counter: each row meets one group's matrix."""
    return 2 * a[-2] * a[-1] * b[-1]


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Stand in for `torch.nn.functional.grouped_mm`, which on fake tensors takes bfloat16 alone."""
    # In this case alone torch's own operator both runs and passes the tracer.
    if a.device.type == "cuda" and a.dtype == b.dtype == torch.bfloat16:
        return torch._grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    product = torch.matmul(a, b) if offs is None else grouped_mm(a, b, offs)
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


GROUPED = (F.grouped_mm, torch._grouped_mm)  # a function mode sees a call of the first as the second


# ------------------------------------------------------------------ losses
@torch.library.custom_op("fnshard::ctc_loss", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int, zero: bool
) -> Tensor:
    """Return -log p of each target by connectionist temporal classification (Graves et al., ICML 2006), [B].

    Args:
        log_probs: [T, B, C].
        targets: int64 [B, S], or flat, one target after the other.
        lengths, target_lengths: integers [B].
        zero: whether the gradients of infinite losses are zero.
    """
    return _run_ctc(log_probs, targets, lengths, target_lengths, blank, zero)[0].clone()


def _run_ctc(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int, zero: bool
) -> tuple[Tensor, Tensor]:
    """Compute the losses and the sums that their gradient reads, by torch's op for lengths on the host."""
    return torch._ctc_loss(log_probs, targets, lengths.tolist(), target_lengths.tolist(), blank, zero)


@ctc_losses.register_fake
def _(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("fnshard::ctc_loss_backward", mutates_args=())
def ctc_losses_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero: bool,
) -> Tensor:
    """Return the gradient of `log_probs`; the sums of the forward are computed again."""
    # Between the passes a program keeps tensors of known shapes alone, and these sums are as long as the
    # longest target.
    losses_and_sums = _run_ctc(log_probs, targets, lengths, target_lengths, blank, zero)
    counts = lengths.tolist(), target_lengths.tolist()
    return torch.ops.aten._ctc_loss_backward(grad, log_probs, targets, *counts, *losses_and_sums, blank, zero)


@ctc_losses_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save_ctc(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero = inputs
    ctx.save_for_backward(*tensors)


def _ctc_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ctc_losses_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero), *[None] * 5


ctc_losses.register_autograd(_ctc_backward, setup_context=_save_ctc)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Stand in for `F.ctc_loss`, which reads lengths from tensors when it is called."""
    device, is_batched = log_probs.device, log_probs.dim() == 3
    lengths, target_lengths = (
        torch.as_tensor(n).to(device).reshape(-1) for n in (input_lengths, target_lengths)
    )
    rows = log_probs if is_batched else log_probs.unsqueeze(1)
    losses = ctc_losses(rows, targets.to(device).long(), lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == "mean":  # torch divides each loss by its target's length first
        losses = losses / target_lengths.to(losses.dtype).clamp(min=1)
    return _reduce(losses if is_batched else losses.squeeze(0), reduction)


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    """Reduce losses as torch's losses do."""
    reduce = {"none": lambda x: x, "mean": torch.mean, "sum": torch.sum}
    if reduction not in reduce:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduce[reduction](losses)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Stand in for `F.gaussian_nll_loss`, which raises for a negative variance; here it counts as `eps`."""
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape:
        differing = [n for size, n in zip(input.shape, var.shape, strict=False) if n != size]
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.dim() != input.dim() or differing != [1]:
            raise ValueError("var is of incorrect size")
    # The clamp does not stop the gradient of small variances, as in torch.
    var = var.detach().clamp(min=eps) + (var - var.detach())
    losses = 0.5 * (var.log() + (input - target) ** 2 / var)
    return _reduce(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Stand in for `torch.bincount` of numbers below `minlength`; a step reports larger ones."""
    if not minlength:
        return torch.bincount(input, weights, minlength)
    index = input.long()
    if weights is None:
        weights = torch.ones_like(index)
    elif weights.dtype != torch.float32:  # torch sums all others in fp64
        weights = weights.double()
    # The greatest of no numbers is an error; a length that depends on data is not known to be 0.
    if isinstance(index.numel(), torch.SymInt) or index.numel():
        require(index.max().clamp(min=0) + 1 - minlength, minlength, "bincount", user_line())
    return weights.new_zeros(minlength).index_add(0, index.clamp(max=minlength - 1), weights)


# ------------------------------------------------------------------ draws
def _write_out(value: Tensor, out: Tensor | None) -> Tensor:
    """Return a value, written to `out` if the caller has given one."""
    return value if out is None else out.copy_(value)


def _randperm(
    n: int,
    *,
    generator: Any = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
    **_: Any,
) -> Tensor:
    """Stand in for `torch.randperm`: sort n random numbers, of which two are equal once in 2^53 / n^2."""
    numbers = torch.rand(n, generator=generator, dtype=torch.float64, device=device)
    return _write_out(numbers.argsort().to(dtype), out)


def _multinomial(
    input: Tensor, num_samples: int, replacement: bool = False, *,
    generator: Any = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Stand in for `torch.multinomial`; without replacement by Efraimidis & Spirakis 2006."""
    weights = input.detach().double()
    shape = weights.shape if not replacement else (*weights.shape[:-1], num_samples)
    shares = torch.rand(shape, generator=generator, dtype=weights.dtype, device=weights.device)

    # Without replacement: exponential waiting times, of which the shortest, divided by weights, are taken.
    if not replacement:
        times = -torch.log1p(-shares)
        scores = weights / times.clamp(min=torch.finfo(times.dtype).tiny)
        return _write_out(scores.topk(num_samples).indices, out)

    # With replacement: the place of a uniform number among the cumulative weights.
    sums = weights.cumsum(-1)
    drawn = torch.searchsorted(sums, shares * sums[..., -1:], right=True)
    return _write_out(drawn.clamp(max=weights.shape[-1] - 1), out)


def _normal(
    mean: Tensor | float, std: Tensor | float = 1.0, *size: Any, generator: Any = None, **options: Any
) -> Tensor:
    """Stand in for `torch.normal`, of tensors too; their gradients are zero, as in torch."""
    tensors = [v.detach() for v in (mean, std) if isinstance(v, Tensor)]
    if not tensors:
        return torch.normal(mean, std, *size, generator=generator, **options)
    shape, first = torch.broadcast_shapes(*(v.shape for v in tensors)), tensors[0]
    drawn = torch.randn(shape, generator=generator, dtype=first.dtype, device=first.device)
    mean, std = (v.detach() if isinstance(v, Tensor) else v for v in (mean, std))
    return _write_out((drawn * std + mean).to(first.dtype), options.get("out"))


# ------------------------------------------------------------------ factors and inverses
_CHECK = torch.ops.aten._linalg_check_errors.default
_lock = threading.RLock()  # one thread at a time replaces torch's function, and puts it back
LEFT_OUT = {_CHECK: lambda *_, **__: None}  # a decomposition to nothing


@contextmanager
def skip_checks() -> Iterator[None]:
    """Leave out torch's checks of factors and inverses: those of a singular matrix are not finite then.

    Such a check is control flow on values, which no kernel has. torch decomposes it to nothing only while the
    check counts as an op without effects.
    """
    import torch._higher_order_ops.effects as effects  # here: it brings Dynamo, which takes seconds

    thread = threading.get_ident()  # what other threads compile meanwhile keeps its check

    def has_other_effects(op: Any, *more: Any) -> bool:
        is_skipped = op is _CHECK and threading.get_ident() == thread
        return not is_skipped and has_effects(op, *more)

    with _lock:
        has_effects = effects.has_effects
        with mock.patch.object(effects, "has_effects", has_other_effects):
            yield


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Stand in for `F.one_hot`, which on a functorch level reads the least value."""
    if num_classes < 0 or tensor.dtype != torch.int64:
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _make_foreach(name: str) -> Callable[..., Any]:
    """Return `torch._foreach_mul_`, say, as one write after another: two may go to the same memory."""

    def write_each(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        select = lambda v, i: v[i] if isinstance(v, list | tuple) else v  # noqa: E731
        for i, tensor in enumerate(tensors):
            method = getattr(tensor, _METHODS.get(name, name))
            method(*(select(v, i) for v in args), **{k: select(v, i) for k, v in kwargs.items()})
        return list(tensors)

    return write_each


_METHODS = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}  # a tensor has no methods of the former names


# ------------------------------------------------------------------ the table
DECOMPOSITIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(GROUPED, _grouped_mm),
    F.ctc_loss: _ctc_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount,
    torch.randperm: _randperm,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.normal: _normal,
    F.one_hot: _one_hot,
    **{
        getattr(torch, name): _make_foreach(name.removeprefix("_foreach_"))
        for name in dir(torch)
        if name.startswith("_foreach_") and name.endswith("_")
    },
}


# ------------------------------------------------------------------ masks of Python bools in an index
def mask_positions(index: Any, shape: Sequence[int]) -> Any:
    """Return an index of a tensor of this shape with lists of integers in place of lists of bools.

    A mask of Python values is known while tracing; a tensor made of it would not be.

    Raises:
        IndexError: a mask is not as long as its dim.

    >>> mask_positions((slice(None), [True, False, True]), (2, 3))
    (slice(None, None, None), [0, 2])
    >>> mask_positions([False, True], (2, 3))
    [1]
    """
    parts = index if isinstance(index, tuple) else (index,)
    replaced: list[Any] = []
    for place, part in enumerate(parts):
        # Every part but None and ... indexes one dim; behind an ellipsis they are counted from the last dim.
        before, behind = parts[:place], parts[place:]
        if any(p is ... for p in before):
            dim = len(shape) - sum(p is not None for p in behind)
        else:
            dim = sum(p is not None for p in before)
        is_mask = _is_mask(part, dim, shape)
        replaced.append([i for i, v in enumerate(part) if v] if is_mask else part)
    return tuple(replaced) if isinstance(index, tuple) else replaced[0]


def _is_mask(part: Any, dim: int, shape: Sequence[int]) -> bool:
    """Return whether a part of an index, which indexes this dim, is a list of bools.

    Raises:
        IndexError: it is one, and not as long as the dim.
    """
    if not isinstance(part, list) or not part or not all(isinstance(v, bool) for v in part):
        return False
    if dim >= len(shape) or len(part) != shape[dim]:
        raise IndexError(f"a mask of {len(part)} for dim {dim} of a tensor of shape {list(shape)}")
    return True
