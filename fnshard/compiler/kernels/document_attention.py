"""Document attention: each document of a packed row attends to itself, and no tensor is [T, T].

This is packing without cross-contamination (Krell et al., 2021). On the CPU the fused kernel runs document by
document, and over windows block by block. On CUDA the variable-length flash kernel (Dao, 2023) takes all
documents at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.compiler.frontend.random import attention_like, gradients_like
from fnshard.compiler.kernels.block_attention import (
    attend_by_chunks,
    differentiate_by_chunks,
    pad_heads,
    repeat_heads,
    sum_shared_heads,
)  # fmt: skip
from fnshard.losses.linear import wide

__all__ = ["attention"]

aten = torch.ops.aten
BLOCK = 256  # the number of queries at once, where they see a part of their document
DOCUMENTS = 256  # documents a row, on average, that CUDA's kernel starts for; with more the result is NaN


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, documents: Tensor | None = None,
    window: int | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend within the documents of packed rows, in memory and time linear in their number.

    Without documents and window it is torch's `scaled_dot_product_attention`.

    Args:
        query: queries [B, H, T, D].
        key, value: keys [B, G, T, D] and values [B, G, T, V]; G divides H.
        causal: whether a query sees no later key.
        documents: integers [B, T]; a document is a run of equal ones. Padding is a document like any other.
        window: a query sees only keys that are less than so many places away.
        scale: the factor of scores; by default D ** -0.5.

    Returns:
        [B, H, T, V] in the query's dtype.

    Raises:
        ValueError: shapes do not fit, or the window is below 1.

    >>> import torch
    >>> import fnshard as fs
    >>> x = torch.randn(1, 2, 5, 4)
    >>> out = fs.attention(x, x, x, documents=torch.tensor([[1, 1, 1, 2, 2]]))
    >>> torch.allclose(out[:, :, 3:], fs.attention(x[:, :, 3:], x[:, :, 3:], x[:, :, 3:]), atol=1e-6)
    True
    """
    _check_arguments(query, key, value, documents, window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if documents is None and window is None:
        has_shared_heads = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=has_shared_heads
        )
    if documents is None:
        documents = torch.zeros(query.shape[0], query.shape[2], dtype=torch.int64, device=query.device)
    return document_attention(query, key, value, documents, None, causal, window or 0, scale)[0]


def _check_arguments(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, window: int | None
) -> None:
    """Refuse shapes that do not fit each other, naming all of them."""
    # Keys and values must fit the queries; a query of a wrong rank replaces these complaints by its own.
    rows, heads, length, size = query.shape if query.dim() == 4 else (0, 0, 0, 0)
    wrong = [
        f"{name} is {list(t.shape)}, expected [B={rows}, heads that divide {heads}, T={length}, "
        f"{size if name == 'key' else 'V'}]"
        for name, t in (("key", key), ("value", value))
        if t.dim() != 4
        or (t.shape[0], t.shape[2]) != (rows, length)
        or not t.shape[1]
        or heads % t.shape[1]
        or (name == "key" and t.shape[3] != size)
    ]

    if query.dim() != 4:
        wrong = [f"query is {list(query.shape)}, expected [B, H, T, D]"]
    elif documents is not None and (
        documents.shape != (rows, length) or documents.is_floating_point() or documents.is_complex()
    ):
        wrong += [
            f"documents are {documents.dtype} {list(documents.shape)}, expected integers [{rows}, {length}]"
        ]
    if window is not None and window < 1:
        wrong += [f"window is {window}, expected at least 1, the query's own place"]
    if wrong:
        raise ValueError("fs.attention: " + "; ".join(wrong))


# ------------------------------------------------------------------ the operator


@torch.library.custom_op("fnshard::document_attention", mutates_args=())
def document_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, offset: Tensor | None, is_causal: bool,
    window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention [B, H, T, V], and the log-sum-exp of each query's scores [B, H, T] in fp32 or fp64.

    The arguments are those of `attention`, except for these.

    Args:
        offset: the queries' position among the keys, where they are a part of the row; int64 0-d.
        window: the window, or 0 for none.
    """
    out, lse = attention_like(query, key, value)
    if _takes_all_at_once(query, offset):
        # The rows are laid end to end, and documents are given by the bounds between them.
        bounds, total = _find_bounds(documents)
        length = query.shape[2]
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in pad_heads("cuda", query, key, value))
        flat, flat_lse, *_ = aten._flash_attention_forward(
            q, k, v, bounds, bounds, length, length, 0.0, is_causal, False, scale=scale,
            **_make_window_arguments(window, is_causal),
        )  # fmt: skip
        rows = flat.unflatten(0, (query.shape[0], -1)).transpose(1, 2)[..., : value.shape[-1]]
        # Where there are more documents than the kernel was started for, the result is NaN, not wrong.
        out.copy_(torch.where(total < len(bounds), rows, torch.nan))
        lse.copy_(flat_lse.unflatten(-1, (query.shape[0], -1)).transpose(0, 1))
        return out, lse

    for row, queries, keys, bias, is_diagonal in _find_parts(query, documents, offset, is_causal, window):
        q = _select(row, queries, query)
        k, v = (repeat_heads(query, _select(row, keys, t)) for t in (key, value))
        part, top = _attend_part(q, k, v, bias, is_diagonal, scale)
        out[row, :, queries], lse[row, :, queries] = part[0], top[0]
    return out, lse


@torch.library.custom_op("fnshard::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, documents: Tensor,
    offset: Tensor | None, is_causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of query, key and value; scores are computed again."""
    if _takes_all_at_once(query, offset):
        bounds, _ = _find_bounds(documents)
        length = query.shape[2]
        flat = [t.transpose(1, 2).flatten(0, 1) for t in pad_heads("cuda", grad, query, key, value, out)]
        top = lse.transpose(0, 1).flatten(1).contiguous()
        none = torch.zeros(2, dtype=torch.int64, device=query.device)  # no random state: no dropout
        grads = aten._flash_attention_backward(
            *flat, top, bounds, bounds, length, length, 0.0, is_causal, none, none, scale=scale,
            **_make_window_arguments(window, is_causal),
        )  # fmt: skip
        return tuple(
            g.unflatten(0, (query.shape[0], -1)).transpose(1, 2)[..., : t.shape[-1]].contiguous()
            for g, t in zip(grads, (query, key, value), strict=True)
        )

    sums = wide(query.dtype)  # several blocks of queries add to the gradients of the same keys
    to_q = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    to_key, to_value = (torch.zeros(t.shape, dtype=sums, device=query.device) for t in (key, value))
    for row, queries, keys, bias, is_diagonal in _find_parts(query, documents, offset, is_causal, window):
        q = _select(row, queries, query)
        k, v = (repeat_heads(query, _select(row, keys, t)) for t in (key, value))
        g, o, top = (_select(row, queries, t) for t in (grad, out, lse))
        of_q, *of_others = _differentiate_part(g, q, k, v, o, top, bias, is_diagonal, scale)
        to_q[row, :, queries] = of_q[0]
        for total, part in zip((to_key, to_value), of_others, strict=True):
            total[row, :, keys] += sum_shared_heads(part, total[row : row + 1, :, keys].shape)[0]
    return to_q, to_key.to(key.dtype), to_value.to(value.dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, offset, *ctx.form = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, documents, offset)


def _compute_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, documents, offset = ctx.saved_tensors
    grads = document_attention_backward(grad, query, key, value, out, lse, documents, offset, *ctx.form)
    return *grads, *[None] * 5


document_attention.register_fake(attention_like)
document_attention_backward.register_fake(gradients_like)
document_attention.register_autograd(_compute_gradients, setup_context=_save_for_backward)


# ------------------------------------------------------------------ part by part, on the CPU


def _find_parts(
    query: Tensor, documents: Tensor, offset: Tensor | None, is_causal: bool, window: int
) -> Iterator[tuple[int, slice, slice, Tensor | None, bool]]:
    """Yield parts that are computed at once.

    Yields:
        The row, its queries, their keys, what is added to the scores, and whether torch's causal mask fits.
        Queries are counted from the offset of `query`, keys from the row's start.
    """
    start, length = (0 if offset is None else int(offset)), query.shape[2]
    for row, ids in enumerate(documents):
        changes = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
        for low, high in pairwise([0, *changes.tolist(), len(ids)]):
            begin, end = max(low, start), min(high, start + length)

            # A whole document within its window takes torch's own causal mask.
            is_whole = begin == low and (end == high or is_causal)
            if is_whole and (not window or high - low <= window):
                if begin < end:
                    keys = slice(low, end if is_causal else high)
                    yield row, slice(begin - start, end - start), keys, None, is_causal
                continue

            # Others go by blocks of queries, with the keys that some query of the block sees.
            block = max(BLOCK, window)
            for first in range(begin, end, block):
                stop = min(first + block, end)
                first_key, stop_key = low, high
                if window:
                    first_key, stop_key = max(low, first - window + 1), min(high, stop + window - 1)
                if is_causal:
                    stop_key = stop
                keys = slice(first_key, stop_key)
                bias = _make_bias(query, first, stop, keys, is_causal, window)
                yield row, slice(first - start, stop - start), keys, bias, False


def _make_bias(
    query: Tensor, first: int, stop: int, keys: slice, is_causal: bool, window: int
) -> Tensor | None:
    """Return what is added to scores [1, 1, queries, keys]: -inf where a query does not see a key."""
    positions = torch.arange(keys.start, keys.stop, device=query.device)
    distance = torch.arange(first, stop, device=query.device).unsqueeze(1) - positions
    # Hide keys after the query (without a causal mask: a window or more after), and a window or more before.
    hidden = distance < (0 if is_causal else -(window or len(positions)) + 1)
    hidden |= distance >= (window or stop)
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    return bias.masked_fill_(hidden, -torch.inf)[None, None]


def _select(row: int, positions: slice, x: Tensor) -> Tensor:
    """Return some positions of one row of a tensor, which keeps its dims."""
    return x[row : row + 1, :, positions]


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_diagonal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention [..., T, V] and the log-sum-exp of scores, of one part."""
    if q.device.type != "cpu":
        out, weight, top = attend_by_chunks(q, k, v, bias, is_diagonal, scale)
        return out, top + weight.log()
    size, (q, k, v) = v.shape[-1], pad_heads("cpu", q, k, v)
    run = aten._scaled_dot_product_flash_attention_for_cpu
    out, top = run(q, k, v, 0.0, is_diagonal, attn_mask=bias, scale=scale)
    return out[..., :size], top.reshape(q.shape[:-1])


def _differentiate_part(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
    is_diagonal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of queries, keys and values, of one part."""
    if q.device.type != "cpu":
        # Scores that are scaled by their log-sum-exp give probabilities, and a softmax subtracts the mean of
        # the gradients, grad * out, from each of them.
        grad, out = grad.to(lse.dtype), out.to(lse.dtype)
        of_weights = -(grad * out).sum(-1)
        return differentiate_by_chunks(q, k, v, bias, is_diagonal, scale, grad, of_weights, lse)
    sizes = [t.shape[-1] for t in (q, k, v)]
    grad, q, k, v, out = pad_heads("cpu", grad, q, k, v, out)
    run = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = run(grad, q, k, v, out, lse, 0.0, is_diagonal, attn_mask=bias, scale=scale)
    return tuple(g[..., :size] for g, size in zip(grads, sizes, strict=True))


# ------------------------------------------------------------------ all at once, on CUDA


def _takes_all_at_once(query: Tensor, offset: Tensor | None) -> bool:
    """Return whether the variable-length flash kernel takes all rows at once.

    It cannot take a part of a row's queries.
    """
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and is_half and query.shape[-1] <= 256 and offset is None


def _find_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return where documents of all rows begin and end, int32, and the number of documents.

    There are as many bounds as there may be documents, so that the host reads no value: those that are left
    over belong to empty documents.
    """
    rows, length = documents.shape
    is_first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True).flatten()
    most = rows * min(length, DOCUMENTS)

    # Write the position of each document's first token at the document's number. All other tokens, and
    # documents whose number has no slot, are written to one slot more, which is dropped.
    positions = torch.arange(rows * length, dtype=torch.int32, device=documents.device)
    numbers = torch.where(is_first, is_first.cumsum(0) - 1, most + 1).clamp(max=most + 1)
    bounds = torch.full((most + 2,), rows * length, dtype=torch.int32, device=documents.device)
    return bounds.scatter_(0, numbers, positions)[: most + 1], is_first.sum()


def _make_window_arguments(window: int, is_causal: bool) -> dict[str, int]:
    """Return the arguments of the flash kernel that give the two sides of a window."""
    if not window:
        return {}
    return {"window_size_left": window - 1, "window_size_right": 0 if is_causal else window - 1}
