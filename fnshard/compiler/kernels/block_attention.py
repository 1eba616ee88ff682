"""Block attention: attention of queries to one block of keys and values, added to that of other blocks.

Blocks are merged by the sums of their weights (Milakov & Gimelshein 2018; Liu, Zaharia & Abbeel 2023). From
block to block, queries carry a sum of weighted values and a sum of weights, scaled by the largest exponent so
far: a block's log-sum-exp, or its largest score. The result does not depend on that scale, which has no
gradient, and the sums are linear in what comes before. So the backward of a block needs the queries, the
block and the scale, and computes probabilities again.

Forward and backward are custom operators: if a compiler decomposed them, it would keep scores, masks and
copies of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.losses.linear import wide

aten = torch.ops.aten
_NEVER = -torch.inf
LARGEST = 64.0  # a mask may add this much to all scores of a query: their log-sum-exp then loses six bits
CHUNK_BYTES = 1 << 28  # the bytes of scores that are computed at once, where no fused kernel runs

_LIB = torch.library.Library("fnshard", "FRAGMENT")
_LIB.define(
    "attention_turn(Tensor q, Tensor kv, Tensor[] carry, Tensor source, Tensor? mask, int blocks, "
    "bool is_causal, float scale) -> Tensor[]"
)
_LIB.define("attention_merged(Tensor sums, Tensor weights, ScalarType dtype) -> Tensor")


def _attend_to_block(
    q: Tensor, kv: Tensor, carry: list[Tensor], source: Tensor, mask: Tensor | None, blocks: int,
    is_causal: bool, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Return the carry with one more block: sums [..., T, V], weights and largest exponents [..., T].

    All are fp32, or fp64 where the queries are.

    Args:
        q: the queries [..., H, T, D].
        kv: keys and values side by side [..., G, S, D + V]; G divides H.
        carry: the carry of the blocks before; the first block, which is the queries' own, has none.
        source: the block's position in the sequence, int64 0-d. A negative position is counted from the end,
            and lies after the queries'.
        mask: a mask over the keys of all blocks, boolean or added to scores.
        blocks: the number of blocks.
    """
    return list(_Turn.apply((blocks, is_causal, scale), q, kv, source, mask, *carry))


class _Turn(torch.autograd.Function):
    """An autograd function for the turn of one block, whose backward computes probabilities again."""

    @staticmethod
    def forward(form: tuple, q: Tensor, kv: Tensor, source: Tensor, mask: Tensor | None, *carry: Tensor):
        blocks, is_causal, scale = form
        out, weight, top = block_attention(
            q, *_split_keys_and_values(q, kv), source, mask, blocks, is_causal, scale, not carry
        )
        if not carry:
            return out * weight.unsqueeze(-1), weight, top
        sums, weights, before = carry
        # Both parts are scaled to the larger exponent, so that neither overflows.
        now = torch.maximum(before, top)
        old, new = (torch.exp(t - _make_finite(now)) for t in (before, top))
        new = new * weight
        return sums * old.unsqueeze(-1) + out * new.unsqueeze(-1), weights * old + new, now

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.form, q, kv, source, mask, *carry = inputs
        # The result does not depend on the scale; of the carry's inputs the backward needs the scale alone.
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(q, kv, source, mask, output[2], *carry[2:])

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor, of_weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, source, mask, now, *before = ctx.saved_tensors
        to_q, to_key, to_value, *of_carry = block_attention_backward(
            q, *_split_keys_and_values(q, kv), of_sums, of_weights, now, before, source, mask, *ctx.form
        )
        return None, to_q, torch.cat([to_key, to_value], -1), None, None, *of_carry, *[None] * len(before)


def _make_finite(top: Tensor) -> Tensor:
    """Replace the exponents of queries that have seen nothing, which are -inf, by zero."""
    return torch.where(top == _NEVER, 0.0, top)  # -inf - -inf would be NaN


def _split_keys_and_values(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
    """Split keys from the values that lie next to them along the last dim."""
    return kv.split([q.shape[-1], kv.shape[-1] - q.shape[-1]], -1)


class _Merged(torch.autograd.Function):
    """An autograd function for the weighted mean of all blocks' values; zero for queries that see nothing."""

    @staticmethod
    def forward(sums: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return (sums / torch.where(weights == 0, 1.0, weights).unsqueeze(-1)).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, out = ctx.saved_tensors
        of_sums = grad.to(weights.dtype) / torch.where(weights == 0, 1.0, weights).unsqueeze(-1)
        return of_sums, -(of_sums * out).sum(-1), None


_LIB.impl("attention_turn", _attend_to_block, "CompositeImplicitAutograd")
_LIB.impl("attention_merged", lambda *args: _Merged.apply(*args), "CompositeImplicitAutograd")


@torch.library.custom_op("fnshard::block_attention", mutates_args=())
def block_attention(
    query: Tensor, key: Tensor, value: Tensor, source: Tensor, mask: Tensor | None, blocks: int,
    is_causal: bool, scale: float, first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute attention to one block.

    Returns:
        The attention [..., T, V]; the sum of each query's weights [..., T]; and the exponent that they are
        scaled by [..., T]. All are fp32 or fp64.

    Args:
        query, key, value: [..., H, T, D], [..., G, S, D] and [..., G, S, V]; G divides H.
        source, mask, blocks: the arguments of `_attend_to_block`.
        first: whether it is the queries' own block.
    """
    is_diagonal = is_causal and first  # a causal mask cuts through the queries' own block alone
    key, value = (repeat_heads(query, t) for t in (key, value))
    bias, size = _make_bias(query, key, mask, source, blocks), value.shape[-1]
    kind = _choose_fused(query, mask)
    if not kind:
        out, weight, top = attend_by_chunks(query, key, value, bias, is_diagonal, scale)
        return out, weight, _hide_later(top, source, is_causal, first)

    # Fused kernels return the mean of the values and the log-sum-exp of the scores.
    tensors = pad_heads(kind, query, key, value)
    if kind == "cpu":
        run = aten._scaled_dot_product_flash_attention_for_cpu
        out, top = run(*tensors, 0.0, is_diagonal, attn_mask=bias, scale=scale)
    else:
        run = aten._scaled_dot_product_flash_attention
        out, top = run(*tensors, 0.0, is_diagonal, False, scale=scale)[:2]

    if bias is not None:  # the kernel returns 0 for queries that see nothing, and -inf is right
        top = torch.where((bias > _NEVER).any(-1), top, _NEVER)

    # Scaled by their log-sum-exp, the weights of a query sum to 1, or to 0 where it sees nothing.
    out, top = out[..., :size].reshape(*query.shape[:-1], size), top.reshape(query.shape[:-1])
    weight, top = (top > _NEVER).to(top.dtype), _hide_later(top, source, is_causal, first)
    return out.to(wide(query.dtype)).contiguous(), weight.contiguous(), top.contiguous()


def _hide_later(top: Tensor, source: Tensor, is_causal: bool, first: bool) -> Tensor:
    """Return the largest scores that queries see in a block.

    With a causal mask they see all of another block, or nothing of one that lies after their own.
    """
    return torch.where(source >= 0, top, _NEVER) if is_causal and not first else top


@block_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, source: Tensor, mask: Tensor | None, blocks: int,
    is_causal: bool, scale: float, first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, rows = wide(query.dtype), query.shape[:-1]
    return tuple(query.new_empty(shape, dtype=dtype) for shape in ((*rows, value.shape[-1]), rows, rows))


@torch.library.custom_op("fnshard::block_attention_backward", mutates_args=())
def block_attention_backward(
    query: Tensor, key: Tensor, value: Tensor, of_sums: Tensor, of_weights: Tensor, now: Tensor,
    before: list[Tensor], source: Tensor, mask: Tensor | None, blocks: int, is_causal: bool, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Compute the gradients of queries, keys and values, and of the sums and weights that came before.

    Args:
        of_sums, of_weights: the gradients of the sums and weights with this block, which `now` scales.
        before: the scale before this block; empty for the first block.
    """
    scaled_by, first, shapes = _make_finite(now), not before, (query.shape, key.shape, value.shape)
    is_diagonal, kind = is_causal and first, _choose_fused(query, mask)
    k, v = (repeat_heads(query, t) for t in (key, value))
    bias = _make_bias(query, k, mask, source, blocks)

    if not kind:
        grads = differentiate_by_chunks(query, k, v, bias, is_diagonal, scale, of_sums, of_weights, scaled_by)
    else:
        # A fused backward computes probabilities as exp(scores - top): it takes any scale for the
        # log-sum-exp, and a stand-in for the result.
        result = _make_stand_in(of_sums, of_weights)
        q, k, v, grad, result = pad_heads(kind, query, k, v, *(t.to(query.dtype) for t in (of_sums, result)))
        top = scaled_by.reshape(q.shape[:-1]).contiguous()
        if kind == "cpu":
            run = aten._scaled_dot_product_flash_attention_for_cpu_backward
            grads = run(grad, q, k, v, result, top, 0.0, is_diagonal, attn_mask=bias, scale=scale)
        else:
            run, sizes = aten._scaled_dot_product_flash_attention_backward, (q.shape[-2], k.shape[-2])
            none = torch.zeros(2, dtype=torch.int64, device=q.device)  # no random state: no dropout
            grads = run(
                grad, q, k, v, result, top, None, None, *sizes, 0.0, is_diagonal, none, none, scale=scale
            )

    # Undo the padding and the repetition of heads.
    grads = [
        sum_shared_heads(g[..., : shape[-1]], shape).to(query.dtype)
        for g, shape in zip(grads, shapes, strict=True)
    ]
    if first:
        return grads
    if is_causal:  # a block after the queries', which they do not see, gets no gradient
        grads = [torch.where(source >= 0, g, 0) for g in grads]

    # What came before counts by its share of the new scale.
    old = torch.exp(before[0] - scaled_by)
    return [*grads, (of_sums * old.unsqueeze(-1)).contiguous(), (of_weights * old).contiguous()]


@block_attention_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, of_sums: Tensor, of_weights: Tensor, now: Tensor,
    before: list[Tensor], *rest: Any, **more: Any,
) -> list[Tensor]:  # fmt: skip
    carry = [of_sums, of_weights] if before else []
    return [t.new_empty(t.shape) for t in (query, key, value, *carry)]


def repeat_heads(query: Tensor, x: Tensor) -> Tensor:
    """Repeat heads of keys or values, so that each of the queries' heads has its own."""
    group = query.shape[-3] // x.shape[-3]
    return x if group == 1 else x.repeat_interleave(group, -3)


def sum_shared_heads(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient over the queries' heads that share a head of keys or values."""
    grad = grad.reshape(*shape[:-3], -1, *shape[-2:])
    if grad.shape != shape:
        grad = grad.unflatten(-3, (shape[-3], -1)).sum(-3)
    return grad.clone(memory_format=torch.contiguous_format)


def _make_bias(query: Tensor, key: Tensor, mask: Tensor | None, source: Tensor, blocks: int) -> Tensor | None:
    """Return what is added to the scores of a block [.., .., T, S]."""
    if mask is None:
        return None
    if mask.shape[-1] > 1:
        # The mask's columns for this block; a negative position counts from the end.
        position = (source % blocks).reshape(1)
        mask = mask.unflatten(-1, (blocks, -1)).index_select(-2, position).squeeze(-2)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, _NEVER)
    mask = mask.to(query.dtype).expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])
    return mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)


def fused_kernel(device: str, dtype: torch.dtype, masked: bool, head: int) -> str:
    """Return "cpu" or "cuda" where torch has a fused kernel that returns the log-sum-exp, else ""."""
    if device == "cpu":
        return "cpu"
    is_half = dtype in (torch.float16, torch.bfloat16)
    return "cuda" if device == "cuda" and is_half and not masked and head <= 256 else ""


def _choose_fused(query: Tensor, mask: Tensor | None) -> str:
    """Return the fused kernel that is exact for a mask, or "" if there is none.

    No fused kernel is exact where finite numbers mask all keys of a query: the log-sum-exp of n scores of
    -1e9 has lost log n, and probabilities are computed from it again.
    """
    kind = fused_kernel(query.device.type, query.dtype, mask is not None, query.shape[-1])
    if kind and mask is not None and mask.dtype != torch.bool:
        largest = mask.amax(-1).abs()
        if bool(((largest > LARGEST) & (largest < torch.inf)).any()):
            return ""
    return kind


def pad_heads(kind: str, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with four dims and one head size: heads are padded by zeros."""
    most = max(t.shape[-1] for t in tensors)
    if kind == "cuda":  # its flash kernels take heads of multiples of eight
        most += -most % 8
    wider = (t if t.shape[-1] == most else F.pad(t, (0, most - t.shape[-1])) for t in tensors)
    return [t.reshape(-1, *t.shape[-3:]) for t in wider]


def _make_stand_in(of_sums: Tensor, of_weights: Tensor) -> Tensor:
    """Return a stand-in for the result, for the backward of a fused kernel.

    That backward needs nothing of the result but its product with its gradient, which here is minus the
    gradient of the weights.
    """
    # Dividing by the largest number first keeps the squares in range.
    largest = of_sums.abs().amax(-1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    unit = of_sums / largest
    return unit * (-of_weights.unsqueeze(-1) / largest / unit.square().sum(-1, keepdim=True).clamp_min(1.0))


def _compute_scores(
    query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield runs of queries with their scores, as many at once as `CHUNK_BYTES` has room for."""
    dtype = wide(query.dtype)
    row_bytes = query.shape[:-2].numel() * key.shape[-2] * dtype.itemsize
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
    columns = torch.arange(key.shape[-2], device=key.device)
    for low in range(0, query.shape[-2], step):
        rows = slice(low, low + step)
        scores = (query[..., rows, :] @ key.mT).to(dtype) * scale
        if is_causal:
            is_seen = columns[rows].unsqueeze(1) >= columns
            scores.masked_fill_(~is_seen, _NEVER)
        if bias is not None:
            bias_rows = bias[..., rows, :]  # a bias always has four dims, queries perhaps three
            scores += bias_rows if scores.dim() == 4 else bias_rows.squeeze(0)
        yield rows, scores


def attend_by_chunks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `block_attention` does by plain products, some queries at a time."""
    dtype = wide(query.dtype)
    out = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    weight, top = (query.new_empty(query.shape[:-1], dtype=dtype) for _ in range(2))
    for rows, scores in _compute_scores(query, key, bias, is_causal, scale):
        # A stable softmax in place; a query that sees no key has no weights, and the result 0.
        top[..., rows] = scores.amax(-1)
        shares = scores.sub_(_make_finite(top[..., rows]).unsqueeze(-1)).exp_()
        total = weight[..., rows] = shares.sum(-1)
        shares /= torch.where(total == 0, 1.0, total).unsqueeze(-1)
        out[..., rows, :] = shares.to(value.dtype) @ value
    return out, weight, top


def differentiate_by_chunks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    of_sums: Tensor, of_weights: Tensor, top: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of query, key and value, where probabilities are exp(scores - top)."""
    to_q, dtype = torch.empty_like(query), query.dtype
    to_key, to_value = (torch.zeros_like(t, dtype=of_sums.dtype) for t in (key, value))
    for rows, scores in _compute_scores(query, key, bias, is_causal, scale):
        shares, grad = scores.sub_(top[..., rows].unsqueeze(-1)).exp_(), of_sums[..., rows, :].to(dtype)
        to_value += shares.to(dtype).mT @ grad
        of_scores = grad @ value.mT + of_weights[..., rows].unsqueeze(-1)
        of_scores = of_scores.mul_(shares).mul_(scale).to(dtype)
        to_q[..., rows, :] = of_scores @ key
        to_key += of_scores.mT @ query[..., rows, :]
    return to_q, to_key, to_value
