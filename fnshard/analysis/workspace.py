"""Workspace: count what torch's own operators allocate while they run, besides their results.

The table was read off torch's sources and compared with the profiler's memory events (torch 2.11 to 2.13). It
has the intermediate results of an operator, the operands that it casts or makes contiguous first, and the
scratch buffers that it takes from torch's allocator. The library's own operators run instead (`code_of`).

Some memory depends on the processor or on a library's heuristic, and is not in the table: oneDNN's
convolutions and the last tenth of its bf16 scratch, and what cuBLAS and cuDNN take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.frontend import random
from fnshard.compiler.ir.program import OpOverload
from fnshard.compiler.kernels import block_attention
from fnshard.losses import linear
from fnshard.optim.fused import DECOMPOSITIONS

Args = Sequence[Any]
HALVES = (torch.bfloat16, torch.float16)
_CASTS = ("convert_element_type", "_to_copy", "copy", "copy_")  # these cast element by element


def workspace_bytes(op: Any, args: Args, kwargs: Mapping[str, Any], out: Any, device: str) -> int:
    """Count the bytes that one call allocates and frees again, besides what it returns.

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
        return _count_promotion(args, out)
    return 0


def _count_promotion(args: Args, out: Any) -> int:
    """Count casts of operands. CPU loops take operands of one dtype, and others are cast as a whole first."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    dtypes = {t.dtype for t in tensors}
    # A comparison of operands of one dtype casts nothing, though its result is of another.
    if len(dtypes) == 1 and (not isinstance(out, Tensor) or out.dtype in dtypes or out.dtype == torch.bool):
        return 0

    # The common dtype is that of the result, and in comparisons that of the operands that are no scalars.
    deciding = [t for t in tensors if t.dim()] or tensors
    common = functools.reduce(torch.promote_types, [t.dtype for t in deciding])
    if isinstance(out, Tensor) and out.dtype != torch.bool:
        common = out.dtype
    return sum(t.numel() * common.itemsize for t in tensors if t.dtype != common)


def _matmul(a: Tensor, b: Tensor) -> int:
    """Count oneDNN's scratch for half types: blocks of both operands and of an fp32 sum."""
    if a.dtype not in HALVES:
        return 0
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    block = min(rows, 64)
    # A transposed first operand is copied in blocks, too.
    transposed = min(rows, 256) * min(inner, 928) * 2 if a.stride(-1) != 1 and inner > 1 else 0
    return 1024 + block * (min(columns, 256) * 4 + min(inner, 512) * 2) + transposed


def _flash(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count each thread's block of scores, their maxima and sums, and its block of results.

    These are read off FlashAttentionKernel.cpp.
    """
    rows, columns, wide, half = _size_flash_blocks(args[0], args[1])
    scores = rows * columns
    each = (scores + 2 * rows + rows * args[0].shape[-1]) * wide + (scores * 2 if half else 0)
    return each * torch.get_num_threads()


def _flash_backward(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count each thread's two blocks of scores and its row of sums."""
    rows, columns, wide, half = _size_flash_blocks(args[1], args[2])
    scores = rows * columns
    return ((2 * scores + rows) * wide + (2 * scores * 2 if half else 0)) * torch.get_num_threads()


def _size_flash_blocks(q: Tensor, k: Tensor) -> tuple[int, int, int, bool]:
    """Return the rows and columns of a block of scores, their item size, and whether inputs are halves."""
    length = q.shape[-2]
    rows = 32
    if length >= 192:
        rows = 256 if length >= 768 else 64
    half = q.dtype in HALVES
    return min(rows, length), min(512, k.shape[-2]), 4 if half else q.dtype.itemsize, half


def _masked_put(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the masked values, which are zeros where the mask does not hold, and the masked indices."""
    into, _, indices, values = args[:4]
    return values.numel() * into.dtype.itemsize + sum(i.numel() * 8 for i in indices if i is not None)


def _sum(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count casts of a sum's input, which is cast as a whole to int64 or fp64 if the sum has that dtype."""
    x, dtype = args[0], kwargs.get("dtype") or (out.dtype if isinstance(out, Tensor) else args[0].dtype)
    return x.numel() * dtype.itemsize if dtype != x.dtype and x.dtype not in HALVES else 0


def _mean(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count a copy of half types in fp32."""
    x = args[0]
    return x.numel() * 4 if x.dtype in HALVES and x.dim() else 0


def _columns(x: Tensor, out: Tensor, weight: Tensor, transposed: bool) -> int:
    """Count the unfolded input of fp64 convolutions. Others are oneDNN's, and not known."""
    window = math.prod(weight.shape[2:])
    if x.dtype != torch.float64 or (window == 1 and x.shape[2:] == out.shape[2:]):
        return 0
    narrow, channels = (x, out.shape[1]) if transposed else (out, x.shape[1])
    return x.shape[0] * channels * window * math.prod(narrow.shape[2:]) * x.dtype.itemsize


def _index(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count copies of indices in int64."""
    return sum(i.numel() * 8 for i in args[1] if i is not None and i.dtype == torch.int32)


def _index_put(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count a cast of the values."""
    into, _, values = args[:3]
    return values.numel() * into.dtype.itemsize if values.dtype != into.dtype else 0


def _flash_backward_cuda(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count an fp32 sum of the query's gradient and a row of sums, lengths and heads rounded up.

    So does flash-attn 2.
    """
    q = args[1]
    batch, heads, length, size = q.shape
    length, size = -(-length // 128) * 128, -(-size // 32) * 32
    return batch * heads * length * (size + 1) * 4


def _cudnn_backward_cuda(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count an fp32 sum of the query's gradient and a row of sums.

    It was read in cuDNN's front end, and not measured.
    """
    q = args[1]
    return q.numel() * 4 + q.numel() // q.shape[-1] * 4


def _efficient_backward_cuda(args: Args, kwargs: Mapping[str, Any], out: Any) -> int:
    """Count a row of sums, and fp32 sums of half types' gradients, as in mem_eff_attention (not measured)."""
    q, k, v = args[1:4]
    wide = sum(t.numel() * 4 for t in (q, k, v)) if q.dtype in HALVES else 0
    return q.numel() // q.shape[-1] * 4 + wide


def _chunk_of_scores(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """Count a chunk of scores where CUDA has no fused kernel.

    On paper the code runs as on a CPU, which has a fused kernel for all inputs.
    """
    fused = block_attention.fused_kernel("cuda", query.dtype, mask is not None, query.shape[-1])
    if fused or query.device.type == "cuda":
        return 0
    scores = query.numel() // query.shape[-1] * key.shape[-2] * linear.wide(query.dtype).itemsize
    return 2 * min(block_attention.CHUNK_BYTES, scores)


def _document(query: Tensor, *tensors: Tensor) -> int:
    """Count a row of results, and its keys and values for each of the queries' heads.

    A document may be as long as a row.
    """
    shared = [t for t in tensors if t.shape[1] != query.shape[1]]
    row = sum(query.shape[1] // t.shape[1] * t[0].numel() for t in shared)
    return (row + query[0].numel()) * query.element_size()


def _document_backward(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Count what `_document` does, one row's gradients of all three, and sums of those of keys and values."""
    wide = linear.wide(query.dtype).itemsize
    row = 2 * query[0].numel() * query.element_size()
    return _document(query, key, value) + row + (key.numel() + value.numel()) * wide


Rule = Callable[[Args, Mapping[str, Any], Any], int]
# By device and operator, the rule that counts the bytes of a call from its arguments and its result.
_RULES: dict[tuple[str, str], Rule] = {
    ("cpu", "mm"): lambda args, kwargs, out: _matmul(args[0], args[1]),
    ("cpu", "bmm"): lambda args, kwargs, out: _matmul(args[0], args[1]),
    ("cpu", "addmm"): lambda args, kwargs, out: _matmul(args[1], args[2]),
    ("cpu", "_scaled_dot_product_flash_attention_for_cpu"): _flash,
    ("cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"): _flash_backward,
    ("cpu", "document_attention"): lambda args, kwargs, out: _document(*args[:3]),
    ("cpu", "document_attention_backward"): lambda args, kwargs, out: _document_backward(*args[1:4]),
    ("cpu", "_unsafe_masked_index_put_accumulate"): _masked_put,
    ("cpu", "sum"): _sum,
    ("cpu", "mean"): _mean,
    ("cpu", "embedding"): lambda args, kwargs, out: 0 if args[1].is_contiguous() else args[1].nbytes,
    ("cpu", "convolution"): lambda args, kwargs, out: _columns(args[0], out, args[1], args[6]),
    ("cpu", "convolution_backward"): lambda args, kwargs, out: (
        0 if args[7] else _columns(args[1], args[0], args[2], False)
    ),
    ("cpu", "gather"): lambda args, kwargs, out: out.numel() * 4 if args[0].dtype in HALVES else 0,
    ("cpu", "scatter"): lambda args, kwargs, out: args[0].numel() * 4 if args[0].dtype in HALVES else 0,
    ("cpu", "where"): lambda args, kwargs, out: _count_promotion(args[1:], out),
    ("cpu", "index"): _index,
    ("cuda", "index"): _index,
    ("cpu", "index_put"): _index_put,
    ("cpu", "index_put_"): _index_put,
    ("cpu", "logsumexp"): lambda args, kwargs, out: args[0].nbytes,  # the exponentials
    ("cuda", "logsumexp"): lambda args, kwargs, out: args[0].nbytes,
    ("cuda", "block_attention"): lambda args, kwargs, out: _chunk_of_scores(*args[:2], args[4]),
    ("cuda", "block_attention_backward"): lambda args, kwargs, out: _chunk_of_scores(*args[:2], args[8]),
    ("cuda", "_unsafe_masked_index_put_accumulate"): _masked_put,
    ("cuda", "_scaled_dot_product_flash_attention_backward"): _flash_backward_cuda,
    ("cuda", "_scaled_dot_product_cudnn_attention_backward"): _cudnn_backward_cuda,
    ("cuda", "_scaled_dot_product_efficient_attention_backward"): _efficient_backward_cuda,
}


_OPERATORS = (
    linear.token_parts, linear.token_parts_backward,
    block_attention.block_attention, block_attention.block_attention_backward,
    random.dropout_attention, random.dropout_attention_backward,
)  # fmt: skip
_CODE: dict[OpOverload, Callable[..., Any]] = {
    **{each._opoverload: each._init_fn for each in _OPERATORS},
    **DECOMPOSITIONS,  # next to other operators, an update by AdamW or SGD runs by its formula
}
# The positions of the hidden states, and of the number of tokens at once, among the arguments.
_CHUNKS = {
    linear.token_parts._opoverload: (0, 3),
    linear.token_parts_backward._opoverload: (3, 6),
}


def code_of(op: Any, args: Args, device: str) -> Callable[[], Any] | None:
    """Return the Python code of an operator of this library on its arguments; None for any other operator.

    The arguments may be on another device; the code takes as many tokens at once as it would on `device`.
    """
    if op not in _CODE:
        return None
    args = list(args)
    if op in _CHUNKS:
        at, chunk_at = _CHUNKS[op]
        hidden, weight = args[at : at + 2]
        args[chunk_at] = linear.chunk_of(
            hidden.shape[0], weight.shape[0], args[chunk_at], hidden.dtype, device
        )
    return functools.partial(_CODE[op], *args)
