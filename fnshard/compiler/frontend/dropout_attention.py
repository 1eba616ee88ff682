"""Dropout attention: a long row's scores are dropped block by block, and drawn again in the backward.

Flash kernels draw their masks from hidden state. A mask here is a hash of a key and an element's place, so
that any block of it can be made by itself (`random`), and nothing is [T, S].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fnshard.compiler.frontend.random import LIB, dropout_factors, key_at
from fnshard.losses.linear import wide

BLOCK_bytes = 1 << 24  # of scores at once; random bits of them take several times as many
LONG = 1 << 20  # scores of a row and head, from which on they are made block by block


@torch.library.custom_op("fnshard::dropout_attention", mutates_args=())
def dropout_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, draw: Tensor, p: float, is_causal: bool,
    scale: float, strides: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[..., T, V], and the log-sum-exp of each query's scores [..., T] in fp32 or fp64.

    Args:
        query, key, value: [..., T, D], [..., S, D], [..., S, V].
        mask: what is added to the scores, or bool; with no gradient.
        draw: the key of the random numbers, of scores with these `strides`.
    """
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    lse = query.new_empty(query.shape[:-1], dtype=wide(query.dtype))
    for rows in _blocks(query, key):
        scores = _scores(query, key, mask, is_causal, scale, rows)
        top = scores.logsumexp(-1)
        lse[..., rows] = top
        shares = _shares(scores, top)
        out[..., rows, :] = (shares * _kept(shares, draw, p, strides, rows)).to(value.dtype) @ value
    return out, lse


@torch.library.custom_op("fnshard::dropout_attention_backward", mutates_args=())
def dropout_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, mask: Tensor | None, draw: Tensor,
    p: float, is_causal: bool, scale: float, strides: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    to_query = query.new_empty(query.shape)
    to_key, to_value = (t.new_zeros(t.shape, dtype=wide(t.dtype)) for t in (key, value))
    for rows in _blocks(query, key):
        shares = _shares(_scores(query, key, mask, is_causal, scale, rows), lse[..., rows])
        kept = _kept(shares, draw, p, strides, rows)
        g = grad[..., rows, :]
        to_value += (shares * kept).to(g.dtype).mT @ g
        slope = (g @ value.mT) * kept
        slope = (shares * (slope - (slope * shares).sum(-1, keepdim=True)) * scale).to(key.dtype)
        to_query[..., rows, :] = slope @ key
        to_key += slope.mT @ query[..., rows, :]
    return to_query, to_key.to(key.dtype), to_value.to(value.dtype)


@dropout_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


@dropout_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.form = inputs[5:]
    ctx.save_for_backward(*inputs[:3], output[1], *inputs[3:5])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, lse, mask, draw = ctx.saved_tensors
    return *dropout_attention_backward(grad, query, key, value, lse, mask, draw, *ctx.form), *[None] * 6


dropout_attention.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.fnshard.dropout_attention)
def _flops(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@register_flop_formula(torch.ops.fnshard.dropout_attention_backward)
def _flops_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **more: Any
) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


# ------------------------------------------------------------------ a block of queries


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    length = query.shape[-2]
    row = math.prod(query.shape[:-2]) * key.shape[-2] * query.element_size()
    rows = max(1, min(length, BLOCK_bytes // max(row, 1)))
    return (slice(at, min(at + rows, length)) for at in range(0, length, rows))


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float, rows: slice
) -> Tensor:
    scores = ((query[..., rows, :] * scale) @ key.mT).to(wide(query.dtype))
    if is_causal:
        places = torch.arange(key.shape[-2], device=key.device)
        own = torch.arange(rows.start, rows.stop, device=key.device)
        scores.masked_fill_(places > own[:, None], -math.inf)
    if mask is None:
        return scores
    part = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]
    return scores.masked_fill_(~part, -math.inf) if part.dtype == torch.bool else scores + part


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    """Zero for a query that sees nothing, as in torch."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()


def _kept(shares: Tensor, draw: Tensor, p: float, strides: list[int], rows: slice) -> Tensor:
    return dropout_factors(shares, key_at(draw, rows.start * strides[-2]), p, strides)


# ------------------------------------------------------------------ the op of a program


LIB.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor key, float p, bool is_causal, "
    "float? scale, bool enable_gqa, int[]? strides=None) -> Tensor"
)


def _attention(q, k, v, mask, key, p, is_causal, scale, enable_gqa, strides=None):
    """SDPA with dropout: spelled out where it is short, or where a mask has a gradient."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    size = q.shape[-2] * k.shape[-2]
    if size >= LONG and not (mask is not None and mask.requires_grad) and q.shape[:-2] == k.shape[:-2]:
        if strides is None:
            strides = list(torch.empty(*q.shape[:-1], k.shape[-2], device="meta").stride())
        return dropout_attention(q, k, v, mask, key, p, is_causal, scale, strides)[0]
    scores = (q * scale) @ k.transpose(-2, -1)  # [..., T, S]
    if is_causal:
        t, s = scores.shape[-2:]
        ok = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~ok, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        # A query that may look at nothing gives zero, as in torch; zero scores keep its gradient finite.
        blind = (scores == -math.inf).all(-1, keepdim=True)
        shares = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    else:
        shares = torch.softmax(scores, -1)
    return (shares * dropout_factors(shares, key, p, strides)) @ v


LIB.impl("attention", _attention, "CompositeImplicitAutograd")
