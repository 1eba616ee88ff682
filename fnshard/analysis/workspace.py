"""Workspace: what torch's own operators allocate while they run, besides their results.

A table, read off torch's sources and compared with the profiler's memory events (torch 2.11 to 2.13). What
an operator calls several kernels for, what it must cast or make contiguous first, and scratch buffers
that it asks of torch's allocator. Not in it, because they depend on the processor or on a heuristic of a
library: oneDNN's convolutions, and the last tenth of its bf16 scratch; what cuBLAS and cuDNN take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.kernels.block_attention import CHUNK_bytes, fused_kernel
from fnshard.losses.linear import chunk_of, logit_bytes, run_of, sums_wide, wide

Args = Sequence[Any]
HALVES = (torch.bfloat16, torch.float16)
_CASTS = (
    "convert_element_type",
    "_to_copy",
    "copy",
    "copy_",
)  # element by element


def workspace_bytes(op: Any, args: Args, kwargs: Mapping[str, Any], out: Any, device: str) -> int:
    """Bytes that one call allocates and frees again, besides what it returns.

    Args:
        op: an `OpOverload`, or the name of an aten function that writes into a given buffer (`"mm"`).
        args, kwargs, out: tensors with or without data.
        device: the type of device that it runs on ("cpu", "cuda").
    """
    name = op if isinstance(op, str) else op.__name__.partition(".")[0]
    rule = _RULES.get((device, name))
    if rule is not None:
        return rule(args, kwargs, out)
    if device == "cpu" and name not in _CASTS and torch.Tag.pointwise in getattr(op, "tags", ()):
        return _promotion(args, out)
    return 0


def _promotion(args: Args, out: Any) -> int:
    """CPU loops take operands of one dtype; the others are cast as a whole first."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1 and (not isinstance(out, Tensor) or out.dtype in dtypes or out.dtype == torch.bool):
        return 0
    wide = [t for t in tensors if t.dim()] or tensors
    common = functools.reduce(torch.promote_types, [t.dtype for t in wide])
    if isinstance(out, Tensor) and out.dtype != torch.bool:
        common = out.dtype
    return sum(t.numel() * common.itemsize for t in tensors if t.dtype != common)


# ------------------------------------------------------------------ CPU


def _matmul(a: Tensor, b: Tensor) -> int:
    """oneDNN's scratch for half types: blocks of both operands and of an fp32 sum."""
    if a.dtype not in HALVES:
        return 0
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    block = min(rows, 64)
    turned = min(rows, 256) * min(inner, 928) * 2 if a.stride(-1) != 1 and inner > 1 else 0
    return 1024 + block * (min(columns, 256) * 4 + min(inner, 512) * 2) + turned


def _flash(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Per thread a block of scores, their maxima and sums, a block of results (FlashAttentionKernel.cpp)."""
    rows, columns, wide, half = _flash_blocks(args[0], args[1])
    scores = rows * columns
    each = (scores + 2 * rows + rows * args[0].shape[-1]) * wide + (scores * 2 if half else 0)
    return each * torch.get_num_threads()


def _flash_backward(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Per thread two blocks of scores and a row of sums."""
    rows, columns, wide, half = _flash_blocks(args[1], args[2])
    scores = rows * columns
    return ((2 * scores + rows) * wide + (2 * scores * 2 if half else 0)) * torch.get_num_threads()


def _flash_blocks(q: Tensor, k: Tensor) -> tuple[int, int, int, bool]:
    length = q.shape[-2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    half = q.dtype in HALVES
    return min(rows, length), min(512, k.shape[-2]), 4 if half else q.dtype.itemsize, half


def _masked_put(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Values and indices where the mask holds, zeros elsewhere."""
    into, _, indices, values = args[:4]
    return values.numel() * into.dtype.itemsize + sum(i.numel() * 8 for i in indices if i is not None)


def _summed(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Sums of bools and short integers are made in int64, those in fp64 of the input cast as a whole."""
    x, dtype = args[0], kwargs.get("dtype") or (out.dtype if isinstance(out, Tensor) else args[0].dtype)
    return x.numel() * dtype.itemsize if dtype != x.dtype and x.dtype not in HALVES else 0


def _mean(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    return args[0].numel() * 4 if args[0].dtype in HALVES and args[0].dim() else 0


def _embedding(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    return 0 if args[1].is_contiguous() else args[1].numel() * args[1].dtype.itemsize


def _columns(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """fp64 convolutions unfold their input; others are oneDNN's, and not known."""
    x, weight, transposed = args[0], args[1], args[6]
    if x.dtype != torch.float64:
        return 0
    return _unfolded(x, out, weight, transposed)


def _columns_backward(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    gradient, x, weight, transposed = args[0], args[1], args[2], args[7]
    if x.dtype != torch.float64 or transposed:
        return 0
    return _unfolded(x, gradient, weight, transposed)


def _unfolded(x: Tensor, out: Tensor, weight: Tensor, transposed: bool) -> int:
    window = math.prod(weight.shape[2:])
    if window == 1 and x.shape[2:] == out.shape[2:]:
        return 0
    narrow, channels = (x, out.shape[1]) if transposed else (out, x.shape[1])
    return x.shape[0] * channels * window * math.prod(narrow.shape[2:]) * x.dtype.itemsize


def _index_put(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    into, _, values = args[:3]
    return values.numel() * into.dtype.itemsize if values.dtype != into.dtype else 0


def _token_parts(device: str, args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """A chunk's logits, as they come and in fp32, and what a log-sum-exp makes of them."""
    hidden, weight, _, chunk = args[:4]
    numbers = chunk_of(hidden.shape[0], weight.shape[0], chunk, hidden.dtype, device) * weight.shape[0]
    return numbers * max(logit_bytes(hidden.dtype), 2 * wide(hidden.dtype).itemsize)


def _token_parts_backward(device: str, args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """A chunk's logits; of half types the sum of the weight's gradient, and a CPU's run that is added."""
    hidden, weight, _, chunk, of_weight = args[3:8]
    numbers = chunk_of(hidden.shape[0], weight.shape[0], chunk, hidden.dtype, device) * weight.shape[0]
    rows, columns = weight.shape
    own = 0
    if of_weight and hidden.dtype != wide(hidden.dtype):
        own = weight.numel() * wide(hidden.dtype).itemsize
        if not sums_wide(hidden.dtype, device):
            own += min(rows, run_of(columns)) * columns * hidden.dtype.itemsize
    return numbers * logit_bytes(hidden.dtype) + own


def _block_attention(device: str, args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Keys and values of all heads, what is added to scores; the kernel's scratch, or its narrow result."""
    query, key, value, _, mask = args[:5]
    heads, bias = _of_heads(query, key, value), _bias(query, key, mask)
    if fused_kernel(device, query.dtype, mask is not None, query.shape[-1]) == "":
        scores = query.numel() // query.shape[-1] * key.shape[-2] * wide(query.dtype).itemsize
        return heads + bias + 2 * min(CHUNK_bytes, scores)
    seen = bias // query.dtype.itemsize
    narrow = query.numel() // query.shape[-1] * value.shape[-1] * 2 if query.dtype in HALVES else 0
    return heads + bias + max(seen, narrow, _flash((query, key), kwargs, out) if device == "cpu" else 0)


def _block_attention_backward(device: str, args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """The same, and all heads' gradients as the kernel makes them; less what is returned later."""
    query, key, value, of_sums, _, _, before, _, mask = args[:9]
    group = query.shape[-3] // key.shape[-3]
    raw = (query.numel() + group * (key.numel() + value.numel())) * query.dtype.itemsize
    raw += raw // 2 if query.dtype in HALVES else 0  # what is cast for the kernel
    size = _of_heads(query, key, value) + _bias(query, key, mask) + raw
    size += key.numel() * key.dtype.itemsize if group > 1 else 0
    return size if before else size + of_sums.numel() * query.dtype.itemsize


def _of_heads(query: Tensor, key: Tensor, value: Tensor) -> int:
    group = query.shape[-3] // key.shape[-3]
    return 0 if group == 1 else group * (key.numel() + value.numel()) * query.dtype.itemsize


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    return 0 if mask is None else mask.numel() // mask.shape[-1] * key.shape[-2] * query.dtype.itemsize


# ------------------------------------------------------------------ CUDA


def _flash_backward_cuda(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """An fp32 sum of the query's gradient and a row of sums, lengths and heads rounded up (flash-attn 2)."""
    q = args[1]
    batch, heads, length, size = q.shape
    length, size = -(-length // 128) * 128, -(-size // 32) * 32
    return batch * heads * length * (size + 1) * 4


def _cudnn_backward_cuda(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """An fp32 sum of the query's gradient and a row of sums (read off cuDNN's front end, not measured)."""
    q = args[1]
    return q.numel() * 4 + q.numel() // q.shape[-1] * 4


def _efficient_backward_cuda(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """A row of sums, and fp32 sums of half types' gradients (mem_eff_attention's backward, not measured)."""
    q, k, v = args[1:4]
    wide = sum(t.numel() * 4 for t in (q, k, v)) if q.dtype in HALVES else 0
    return q.numel() // q.shape[-1] * 4 + wide


Rule = Callable[[Args, Mapping[str, Any], Any], int]
_RULES: dict[tuple[str, str], Rule] = {
    ("cpu", "mm"): lambda args, kwargs, out: _matmul(args[0], args[1]),
    ("cpu", "bmm"): lambda args, kwargs, out: _matmul(args[0], args[1]),
    ("cpu", "addmm"): lambda args, kwargs, out: _matmul(args[1], args[2]),
    ("cpu", "_scaled_dot_product_flash_attention_for_cpu"): _flash,
    ("cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"): _flash_backward,
    ("cpu", "_unsafe_masked_index_put_accumulate"): _masked_put,
    ("cpu", "sum"): _summed,
    ("cpu", "mean"): _mean,
    ("cpu", "embedding"): _embedding,
    ("cpu", "convolution"): _columns,
    ("cpu", "convolution_backward"): _columns_backward,
    ("cpu", "gather"): lambda args, kwargs, out: out.numel() * 4 if args[0].dtype in HALVES else 0,
    ("cpu", "scatter"): lambda args, kwargs, out: args[0].numel() * 4 if args[0].dtype in HALVES else 0,
    ("cpu", "where"): lambda args, kwargs, out: _promotion(args[1:], out),
    ("cpu", "index_put"): _index_put,
    ("cpu", "index_put_"): _index_put,
    **{
        (device, f"token_{name}"): functools.partial(rule, device)
        for device in ("cpu", "cuda")
        for name, rule in (
            ("parts", _token_parts),  # of a rank, which has one part
            ("parts_backward", _token_parts_backward),
        )
    },
    **{
        (device, f"block_attention{name}"): functools.partial(rule, device)
        for device in ("cpu", "cuda")
        for name, rule in (("", _block_attention), ("_backward", _block_attention_backward))
    },
    ("cuda", "_unsafe_masked_index_put_accumulate"): _masked_put,
    ("cuda", "_scaled_dot_product_flash_attention_backward"): _flash_backward_cuda,
    ("cuda", "_scaled_dot_product_cudnn_attention_backward"): _cudnn_backward_cuda,
    ("cuda", "_scaled_dot_product_efficient_attention_backward"): _efficient_backward_cuda,
}
