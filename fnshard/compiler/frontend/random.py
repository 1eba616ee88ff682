"""Counter-based random ops: a value is a hash of (key, element index), never of hidden state.

So a mask that is drawn again under recompute is the same mask, on any backend. And equal blocks stay equal
code, since the key is an input. The hash is splitmix64's finaliser (Steele, Lea & Flood 2014). The ops are
composite: autograd and Inductor see plain integer arithmetic, which fuses into its consumer. An op that is
given `strides` draws a part of a larger tensor, which has these strides (`key_at`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fnshard.compiler.ir.bits import GOLDEN, mix, shift
from fnshard.losses.linear import wide

_LIB = torch.library.Library("fnshard", "DEF")

Strides = list[int] | None  # the distances of a part's elements in the whole draw
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # of a significand
_STREAMS = 2  # independent hashes for each element: a normal number takes two


def key_at(key: Tensor, element: Tensor | int) -> Tensor:
    """Return the key under which a draw begins with the element that `key` draws at `element`.

    With it and the whole draw's strides, a part is drawn by itself. Integers cannot be drawn so.
    """
    return key + element * _STREAMS


def _draw_bits(
    key: Tensor, shape: list[int], stream: int, streams: int = _STREAMS, strides: Strides = None
) -> Tensor:
    """Return 64 random bits for each element, as int64; `stream` is one of `streams` independent hashes."""
    if strides is None:
        index = torch.arange(math.prod(shape), dtype=torch.int64, device=key.device).reshape(shape)
    else:
        index = torch.zeros((), dtype=torch.int64, device=key.device)
        for size, stride in zip(shape, strides, strict=True):
            along = torch.arange(size, dtype=torch.int64, device=key.device) * stride
            index = index.unsqueeze(-1) + along
    # Consecutive counters from a well-mixed key: the finaliser alone decorrelates them. (A large constant
    # factor, as `GOLDEN`, is not needed: Inductor would fold it into an index expression that overflows.)
    return mix(key + (index * streams + stream))


def _draw_unit(
    key: Tensor, shape: list[int], stream: int = 0, dtype: torch.dtype = torch.float32,
    strides: Strides = None,
) -> Tensor:  # fmt: skip
    """Draw multiples of 2^-digits in [0, 1), exact in `dtype`; half types are returned in fp32."""
    digits = _DIGITS[dtype]
    wide_dtype = torch.promote_types(dtype, torch.float32)
    return shift(_draw_bits(key, shape, stream, strides=strides), 64 - digits).to(wide_dtype) * 2.0**-digits


def _draw_complex(draw: Callable[..., Tensor], key: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Draw complex numbers whose real and imaginary parts come from `draw`."""
    return torch.view_as_complex(draw(key, [*shape, 2], dtype.to_real()))


def _uniform(key: Tensor, shape: list[int], dtype: torch.dtype, low: float = 0.0, high: float = 1.0):
    """Draw uniform numbers in [low, high)."""
    if dtype.is_complex:
        return _draw_complex(lambda *a: _uniform(*a, low, high), key, shape, dtype)
    value = _draw_unit(key, shape, 0, dtype)
    if (low, high) == (0.0, 1.0):
        return value.to(dtype)
    value = (value * (high - low) + low).to(dtype)
    return torch.where(value >= high, low, value)  # rounding may reach `high`


def _normal(key: Tensor, shape: list[int], dtype: torch.dtype, mean: float = 0.0, std: float = 1.0):
    """Draw normal numbers."""
    if dtype.is_complex:
        return _draw_complex(_normal, key, shape, dtype) * (std * 0.5**0.5) + mean
    wide_dtype = torch.promote_types(dtype, torch.float32)
    u1 = 1.0 - _draw_unit(key, shape, 0, wide_dtype)  # in (0, 1]: its log is finite
    u2 = _draw_unit(key, shape, 1, wide_dtype)
    value = torch.sqrt(-2.0 * torch.log(u1)) * torch.cos(2.0 * math.pi * u2)  # Box & Muller 1958
    return (value if (mean, std) == (0.0, 1.0) else value * std + mean).to(dtype)


def _exponential(key: Tensor, shape: list[int], dtype: torch.dtype, rate: float) -> Tensor:
    """Draw exponential numbers, by inverting the distribution function."""
    wide_dtype = torch.promote_types(dtype, torch.float32)
    value = -torch.log(1.0 - _draw_unit(key, shape, 0, wide_dtype))
    # A draw of 0 counts as half of the smallest step.
    value = value.clamp(min=0.5 ** (_DIGITS[wide_dtype] + 1)) / rate
    return value.clamp(min=torch.finfo(dtype).tiny).to(dtype)  # never zero, as in torch: users take its log


def _integers(key: Tensor, low: int, high: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Draw each of low, ..., high - 1 equally often, to within one part in 2^32."""
    if dtype.is_floating_point:
        # Of a float type only numbers are drawn that it has.
        low, high = -_round_down(-low, dtype), _round_down(high - 1, dtype) + 1
    span, half = high - low, 1 << 63

    # Rejection sampling with a fixed number of draws, of which the last hit counts. Bits below `even` hit,
    # and give all remainders equally often. Where a span has more than 63 bits, `even` is 0, and bits that
    # lie in it hit as they are.
    even = half - half % span if span < half else 0
    missed = 1 - (even / half if even else span / (2 * half))
    draws = math.ceil(32 / -math.log2(missed)) if missed > 0 else 1

    value = None
    for stream in range(draws):
        bits = _draw_bits(key, shape, stream, draws)
        last = value
        value = shift(bits, 1) % span + low if even else bits.clamp(low, high - 1)
        if last is not None:  # a miss keeps the value of the draw before it
            hit = shift(bits, 1) < even if even else value == bits
            value = torch.where(hit, value, last)
    return value.to(dtype)


def _round_down(value: int, dtype: torch.dtype) -> int:
    """Return the largest number of a float type that is at most `value`."""
    drop = max(0, abs(value).bit_length() - _DIGITS[dtype])
    return value >> drop << drop


def _dropout(
    x: Tensor, key: Tensor, p: float, strides: Strides = None, shape: list[int] | None = None
) -> Tensor:
    """Zero elements with probability p, and scale the others so that the mean stays."""
    if p >= 1.0:
        return x * 0
    keep = _draw_unit(key, shape or list(x.shape), strides=strides) >= p
    return x * keep.to(x.dtype) * (1.0 / (1.0 - p))  # a factor in x's dtype would be rounded before


def _dropout_factors(x: Tensor, key: Tensor, p: float, strides: Strides = None) -> Tensor:
    """Return the factors by which dropout multiplies `x`: 0 or 1 / (1 - p)."""
    return _dropout(torch.ones_like(x), key, p, strides)


def _feature_dropout(x: Tensor, key: Tensor, p: float, strides: Strides = None) -> Tensor:
    """Zero whole channels, [B, C, ...]."""
    return _dropout(x, key, p, strides, _get_feature_shape(x))


def _get_feature_shape(x: Tensor) -> list[int]:
    """Return the shape of one number for each channel."""
    return list(x.shape[:2]) + [1] * (x.dim() - 2)


def _alpha_dropout(x: Tensor, key: Tensor, p: float, features: bool, strides: Strides = None) -> Tensor:
    """Drop as in Klambauer et al. 2017: dropped elements take SELU's lower limit; mean and variance stay."""
    if p >= 1.0:
        return x * 0
    shape = _get_feature_shape(x) if features else list(x.shape)
    keep = (_draw_unit(key, shape, strides=strides) >= p).to(x.dtype)
    a = ((_SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5
    return x * (keep * a) + (keep - 1 + p) * (_SELU_LIMIT * a)


_SELU_LIMIT = 1.7580993408473766


def _bernoulli(
    p: Tensor | float, key: Tensor, shape: list[int], dtype: torch.dtype, strides: Strides = None
) -> Tensor:
    """Draw ones with probability p, else zeros; p is compared in fp64, in which it is exact."""
    return (_draw_unit(key, shape, 0, torch.float64, strides) < p).to(dtype)


# ------------------------------------------------------------------ attention
# Flash kernels draw their masks from hidden state. A mask here is a hash of a key and an element's place, so
# that any block of it can be made by itself, and drawn again in the backward: no tensor is [T, S].

BLOCK_BYTES = 1 << 24  # the scores of one block; their random bits take several times as many
LONG = 1 << 20  # with at least so many scores of one batch row and head, attention works block by block


def attention_like(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocate attention's output [..., T, V], and the log-sum-exp of scores [..., T] in fp32 or fp64."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


def gradients_like(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Allocate the gradients of query, key and value."""
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


@torch.library.custom_op("fnshard::dropout_attention", mutates_args=())
def dropout_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, draw: Tensor, p: float, is_causal: bool,
    scale: float, strides: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with dropout, block by block; return the output and the log-sum-exp of each query's scores.

    Args:
        query, key, value: [..., T, D], [..., S, D], [..., S, V].
        mask: bool, or numbers to add to the scores; it gets no gradient.
        draw: the key of the random numbers, which are those of scores with these `strides`.
    """
    out, lse = attention_like(query, key, value)
    for rows in _cut_blocks(query, key):
        scores = _compute_scores(query, key, mask, is_causal, scale, rows)
        top = scores.logsumexp(-1)
        lse[..., rows] = top
        shares = _compute_shares(scores, top)
        kept = shares * _draw_factors(shares, draw, p, strides, rows)
        out[..., rows, :] = kept.to(value.dtype) @ value
    return out, lse


@torch.library.custom_op("fnshard::dropout_attention_backward", mutates_args=())
def dropout_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, mask: Tensor | None, draw: Tensor,
    p: float, is_causal: bool, scale: float, strides: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value; scores and masks are computed again, block by block."""
    to_query = query.new_empty(query.shape)
    # Every block of queries adds to the gradients of all keys and values: they are summed wide.
    to_key, to_value = (t.new_zeros(t.shape, dtype=wide(t.dtype)) for t in (key, value))
    for rows in _cut_blocks(query, key):
        shares = _compute_shares(_compute_scores(query, key, mask, is_causal, scale, rows), lse[..., rows])
        factors = _draw_factors(shares, draw, p, strides, rows)
        grad_rows = grad[..., rows, :]
        to_value += (shares * factors).to(grad_rows.dtype).mT @ grad_rows

        # Through the softmax: the slope of each share, less their mean that is weighted by the shares.
        slope = (grad_rows @ value.mT) * factors
        slope = (shares * (slope - (slope * shares).sum(-1, keepdim=True)) * scale).to(key.dtype)
        to_query[..., rows, :] = slope @ key
        to_key += slope.mT @ query[..., rows, :]
    return to_query, to_key.to(key.dtype), to_value.to(value.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.form = inputs[5:]
    ctx.save_for_backward(*inputs[:3], output[1], *inputs[3:5])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, lse, mask, draw = ctx.saved_tensors
    return *dropout_attention_backward(grad, query, key, value, lse, mask, draw, *ctx.form), *[None] * 6


dropout_attention.register_fake(attention_like)
dropout_attention_backward.register_fake(gradients_like)
dropout_attention.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.fnshard.dropout_attention)
def _flops(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Count the FLOPs of attention for torch's flop counter, by shapes."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@register_flop_formula(torch.ops.fnshard.dropout_attention_backward)
def _flops_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **more: Any
) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


# ------------------------------------------------------------------ a block of queries


def _cut_blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Yield slices of queries whose scores take about `BLOCK_BYTES`."""
    length = query.shape[-2]
    row = math.prod(query.shape[:-2]) * key.shape[-2] * query.element_size()
    rows = max(1, min(length, BLOCK_BYTES // max(row, 1)))
    return (slice(start, min(start + rows, length)) for start in range(0, length, rows))


def _compute_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float, rows: slice
) -> Tensor:
    """Return the scores of a slice of queries, with the mask of all queries applied."""
    scores = ((query[..., rows, :] * scale) @ key.mT).to(wide(query.dtype))
    if is_causal:
        key_places = torch.arange(key.shape[-2], device=key.device)
        query_places = torch.arange(rows.start, rows.stop, device=key.device)
        scores.masked_fill_(key_places > query_places[:, None], -math.inf)
    if mask is None:
        return scores
    # A mask of one row is that of all queries.
    part = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]
    return scores.masked_fill_(~part, -math.inf) if part.dtype == torch.bool else scores + part


def _compute_shares(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax of scores, given their log-sum-exp; 0 for a query that sees nothing, as in torch."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()


def _draw_factors(shares: Tensor, draw: Tensor, p: float, strides: list[int], rows: slice) -> Tensor:
    """Return dropout's factors for a slice of queries: in the whole draw they begin at its first element."""
    return _dropout_factors(shares, key_at(draw, rows.start * strides[-2]), p, strides)


# ------------------------------------------------------------------ the op of a program


def _attention(q, k, v, mask, key, p, is_causal, scale, enable_gqa, strides=None):
    """Attend with dropout: in plain ops where scores are few or the mask has a gradient, else in blocks."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)

    # Where scores are many, no tensor of all of them is made; the gradient of a mask would need one.
    size = q.shape[-2] * k.shape[-2]
    if size >= LONG and not (mask is not None and mask.requires_grad) and q.shape[:-2] == k.shape[:-2]:
        if strides is None:
            strides = list(torch.empty(*q.shape[:-1], k.shape[-2], device="meta").stride())
        return dropout_attention(q, k, v, mask, key, p, is_causal, scale, strides)[0]

    scores = (q * scale) @ k.transpose(-2, -1)  # [..., T, S]
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        # A query that may look at nothing gives zero, as in torch; zero scores keep its gradient finite.
        blind = (scores == -math.inf).all(-1, keepdim=True)
        shares = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    else:
        shares = torch.softmax(scores, -1)
    return (shares * _dropout_factors(shares, key, p, strides)) @ v


for _schema, _impl in {
    "uniform(Tensor key, int[] shape, ScalarType dtype, float low=0.0, float high=1.0)": _uniform,
    "normal(Tensor key, int[] shape, ScalarType dtype, float mean=0.0, float std=1.0)": _normal,
    "exponential(Tensor key, int[] shape, ScalarType dtype, float rate)": _exponential,
    "integers(Tensor key, int low, int high, int[] shape, ScalarType dtype)": _integers,
    "dropout(Tensor x, Tensor key, float p, int[]? strides=None)": _dropout,
    "feature_dropout(Tensor x, Tensor key, float p, int[]? strides=None)": _feature_dropout,
    "alpha_dropout(Tensor x, Tensor key, float p, bool features, int[]? strides=None)": _alpha_dropout,
    "bernoulli_below(float p, Tensor key, int[] shape, ScalarType dtype)": _bernoulli,
    "bernoulli(Tensor p, Tensor key, int[] shape, ScalarType dtype, int[]? strides=None)": _bernoulli,
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor key, float p, bool is_causal, "
    "float? scale, bool enable_gqa, int[]? strides=None)": _attention,
}.items():
    _LIB.define(f"{_schema} -> Tensor")
    _LIB.impl(_schema.partition("(")[0], _impl, "CompositeImplicitAutograd")

ops = torch.ops.fnshard


def derive_keys(seed: int, step: int, data_rank: int, micro: int, count: int) -> Tensor:
    """Return int64[count] on the host: a key for each random op, a function of the arguments alone.

    Ranks that split the same rows have one data rank, and draw from the same keys.
    """
    # Each number is mixed into the key of those before it, so that (1, 2) and (2, 1) have different keys.
    numbers = torch.tensor([seed, step, data_rank, micro], dtype=torch.int64)
    key = torch.tensor(0, dtype=torch.int64)
    for part in numbers:
        key = mix(key * GOLDEN + part + 1)
    return mix(torch.arange(1, count + 1, dtype=torch.int64) * GOLDEN + key)
