"""Fused linear cross-entropy: a linear layer and its cross-entropy as one operator, in chunks of tokens.

Logits over a vocabulary of 128k are by far the largest tensor of a language model, and are needed for one
number per token. Here the logits of at most `chunk` tokens exist at once. The backward computes them again,
and their softmax by the log-sum-exp of each token, which the forward keeps (Liger kernels, Hsu et al. 2024;
Wijmans et al. 2024). The loss is a custom operator, since a compiler that takes it apart would hold all
chunks at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# The bytes of logits at once by default, in the product's dtype and fp32 together. A GPU is only fast with
# products of thousands of rows.
CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
RUN_NUMBERS = 1 << 22  # the numbers of a half-precision gradient at once, if it is added by runs of rows


def chunk_of(tokens: int, vocabulary: int, chunk: int, dtype: torch.dtype, device: str) -> int:
    """Return the number of tokens at once: `chunk`, or as many as have `CHUNK_BYTES` of logits.

    >>> [chunk_of(8192, 32_768, 0, torch.bfloat16, device) for device in ("cpu", "cuda")]
    [682, 5461]
    """
    most = CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"])
    return max(1, min(tokens, chunk or most // max(vocabulary * logit_bytes(dtype), 1)))


def sums_wide(dtype: torch.dtype, device: str) -> bool:
    """Return whether cuBLAS can accumulate and return a product of half-precision matrices in fp32."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16)


def logit_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one logit, in the dtype of the softmax and, if that differs, of the product."""
    return wide(dtype).itemsize + (dtype.itemsize if dtype != wide(dtype) else 0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the softmax: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _compute_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute the logits of a chunk, in fp32 or fp64."""
    if sums_wide(hidden.dtype, hidden.device.type):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).to(wide(hidden.dtype))


def _differentiate_logits(
    of_sums: Tensor, of_chosen: Tensor, sums: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor,
    counted: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of a chunk's logits, in the dtype of the product.

    Args:
        of_sums, of_chosen: gradients of the log-sum-exp, and of the target's logit if it is `counted`.
    """
    # The softmax, times the gradient of its log-sum-exp, plus the gradient of the target's own logit.
    logits = _compute_logits(hidden, weight)
    logits.sub_(sums.unsqueeze(1)).exp_().mul_(of_sums.unsqueeze(1))
    chosen = torch.where(counted, of_chosen, 0.0).unsqueeze(1)
    logits.scatter_add_(1, torch.where(counted, targets, 0).unsqueeze(1), chosen)
    return logits.to(hidden.dtype)


def _add_products(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add one @ other to total without another tensor of its size: in place, or by runs of rows."""
    if total.dtype == other.dtype:
        total.addmm_(one, other)
        return
    if sums_wide(other.dtype, other.device.type):
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
        return
    # A product of halves is of half precision here, and is widened as it is added.
    rows = max(1, RUN_NUMBERS // max(other.shape[1], 1))
    for low in range(0, total.shape[0], rows):
        total[low : low + rows].add_(one[low : low + rows] @ other)


@torch.library.custom_op("fnshard::token_parts", mutates_args=())
def token_parts(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, parts: int
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of logits, and the target's logit, for each token and part of the vocabulary.

    Args:
        hidden: [N, D].
        weight: [V, D]; parts are equal runs of its rows.
        targets: int64 [N]; the logit is 0 in parts that do not have the target.
        chunk: the tokens at once; 0 chooses.
        parts: the number of parts.

    Returns:
        Both are fp32 [parts, N] (fp64 for fp64).
    """
    sums = hidden.new_empty((parts, hidden.shape[0]), dtype=wide(hidden.dtype))
    chosen = torch.empty_like(sums)
    for p, rows, part in _each_part(hidden, weight, chunk, parts):
        here, inside = _find_in_part(targets[part], p, rows)
        logits = _compute_logits(hidden[part], rows)
        sums[p, part] = torch.logsumexp(logits, 1)
        chosen[p, part] = torch.where(inside, logits.gather(1, here.unsqueeze(1)).squeeze(1), 0.0)
        del logits  # before those of the next chunk are allocated
    return sums, chosen


def _each_part(hidden: Tensor, weight: Tensor, chunk: int, parts: int) -> Iterator[tuple[int, Tensor, slice]]:
    """Yield each part's number and rows of the weight, with the slice of each chunk of tokens."""
    for p, rows in enumerate(weight.chunk(parts)):
        count = chunk_of(hidden.shape[0], rows.shape[0], chunk, hidden.dtype, hidden.device.type)
        for low in range(0, hidden.shape[0], count):
            yield p, rows, slice(low, low + count)


def _find_in_part(targets: Tensor, part: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets as rows of a part, with 0 for those outside of it, and whether each is inside."""
    here = targets - part * rows.shape[0]
    inside = (here >= 0) & (here < rows.shape[0])
    return torch.where(inside, here, 0), inside


@token_parts.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, parts: int) -> tuple[Tensor, Tensor]:
    sums = hidden.new_empty((parts, hidden.shape[0]), dtype=wide(hidden.dtype))
    return sums, torch.empty_like(sums)


@torch.library.custom_op("fnshard::token_parts_backward", mutates_args=())
def token_parts_backward(
    of_sums: Tensor, of_chosen: Tensor, sums: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor,
    chunk: int, of_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `hidden` and of `weight`; the latter is empty if it is not needed.

    Args:
        of_sums, of_chosen: gradients of the forward's results.
        sums: the log-sum-exp that the forward kept.
    """
    # The gradient of the hidden states is a sum over parts; that of several is added up in the wide dtype.
    to_hidden = torch.empty_like(hidden, dtype=sums.dtype if sums.shape[0] > 1 else hidden.dtype)
    to_weight = torch.zeros(weight.shape if of_weight else (0,), dtype=sums.dtype, device=weight.device)
    count = weight.shape[0] // sums.shape[0]
    for p, rows, part in _each_part(hidden, weight, chunk, sums.shape[0]):
        here, inside = _find_in_part(targets[part], p, rows)
        slopes = _differentiate_logits(
            of_sums[p, part], of_chosen[p, part], sums[p, part], hidden[part], rows, here, inside
        )
        if p == 0:
            to_hidden[part] = slopes @ rows
        else:
            to_hidden[part] += slopes @ rows
        if of_weight:
            _add_products(to_weight[p * count : (p + 1) * count], slopes.t(), hidden[part])
        del slopes  # before those of the next chunk are allocated
    return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype)


@token_parts_backward.register_fake
def _(
    of_sums: Tensor, of_chosen: Tensor, sums: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor,
    chunk: int, of_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(hidden), weight.new_empty(weight.shape if of_weight else (0,))


def _run_backward(ctx: Any, of_sums: Tensor, of_chosen: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of `token_parts`; that of the weight only where it trains."""
    hidden, weight, targets, sums = ctx.saved_tensors
    of_weight = ctx.needs_input_grad[1]
    to_hidden, to_weight = token_parts_backward(
        of_sums, of_chosen, sums, hidden, weight, targets, ctx.chunk, of_weight
    )
    return to_hidden, to_weight if of_weight else None, None, None, None


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the inputs and the log-sum-exp, from which the backward computes the softmax again."""
    hidden, weight, targets, ctx.chunk, _ = inputs
    ctx.save_for_backward(hidden, weight, targets, output[0])


token_parts.register_autograd(_run_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.fnshard.token_parts)
def _(hidden: Any, weight: Any, *rest: Any, **more: Any) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0]


@register_flop_formula(torch.ops.fnshard.token_parts_backward)
def _(of_sums: Any, of_chosen: Any, sums: Any, hidden: Any, weight: Any, targets: Any, chunk: int,
      of_weight: bool, *rest: Any, **more: Any) -> int:  # fmt: skip
    return 2 * hidden[0] * hidden[1] * weight[0] * (3 if of_weight else 2)
