"""Attention backends: fix which of torch's kernels a `scaled_dot_product_attention` becomes.

Torch chooses the kernel for the tensors' device when an attention is differentiated. A step for CUDA may be
traced on the CPU of another machine. Then the choice is made here, as torch 2.11 makes it on a Hopper GPU, so
that the planned kernel is the one that will run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fnshard.compiler.ir.program import arguments_of
from fnshard.compiler.kernels import block_attention  # noqa: F401  (its operators)
from fnshard.compiler.kernels.segment_source import SegmentSource

_lock = threading.RLock()  # torch's switch for cuDNN is one for all threads
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_FUSED = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_flash_attention_for_cpu": "flash on the CPU",
    "block_attention": "by blocks",
    "document_attention": "by documents",
    "dropout_attention": "with dropout, by blocks",
}


def count_backends(source: fx.Graph, forward: fx.Graph) -> Counter[str]:
    """Return how many attentions of a kernel run on which backend; "math" is plain products.

    Args:
        source: the graph in which attentions are as `fn` has them.
        forward: the graph in which they are as they will run.
    """
    names = [getattr(n.target, "__name__", "").partition(".")[0] for n in forward.nodes]
    fused = Counter(_FUSED[n] for n in names if n in _FUSED)

    # An attention that has no fused kernel in the forward was decomposed into plain products.
    ops = torch.ops.fnshard
    operators = (
        _ATTENTION, ops.attention.default, ops.attention_turn.default, ops.document_attention.default,
    )  # fmt: skip
    attentions = sum(n.target in operators for n in source.nodes)
    return fused + Counter(math=attentions - fused.total())


@contextmanager
def choose_kernels(source: SegmentSource, target: str) -> Iterator[None]:
    """Let attentions become the kernels that they are on the target, while a source is decomposed.

    Args:
        target: the type of device that the kernels are for.
    """
    is_elsewhere = target == "cuda" and all(a.device.type == "cpu" for a in source.inputs)
    with _OnCuda() if is_elsewhere else _avoid_cudnn(source):
        yield


@contextmanager
def _avoid_cudnn(source: SegmentSource) -> Iterator[None]:
    """Switch cuDNN off for a source in which its gradients would be wrong."""
    nodes = source.graph.find_nodes(op="call_function", target=_ATTENTION)
    calls = [arguments_of(n.target, n.args, n.kwargs) for n in nodes]
    is_wrong = any(
        c["attn_mask"] is not None and _has_half_tile_length(c["query"].meta["val"], c["key"].meta["val"])
        for c in calls
    )
    with _lock:
        was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(was_enabled and not is_wrong)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def _has_half_tile_length(*sequences: Tensor) -> bool:
    """Return whether a length is 64 beyond a multiple of 128.

    For such a length and an explicit mask, cuDNN's gradient of the query was NaN.
    """
    return any(s.shape[-2] % 128 == 64 for s in sequences)


class _OnCuda(TorchFunctionMode):
    """A mode in which attention becomes what it is on a Hopper GPU, for tensors that lie elsewhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attend_on_cuda if func is _ATTENTION else func)(*args, **(kwargs or {}))


def choose_hopper_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """Return the kernel that torch takes on a Hopper GPU: "cudnn", "flash", "efficient" or "math"."""
    is_half, head = q.dtype in (torch.float16, torch.bfloat16), max(q.shape[-1], v.shape[-1])
    is_regular = q.dim() == 4 and q.shape[-1] == k.shape[-1] and q.dtype == k.dtype == v.dtype
    if not is_regular or not (is_half or q.dtype == torch.float32):
        return "math"

    # cuDNN gives a mask no gradient, and is switched off for some lengths (`_avoid_cudnn`).
    rules_out_cudnn = mask is not None and (mask.requires_grad or _has_half_tile_length(q, k))
    if is_half and head <= 128 and q.shape[-1] % 8 == v.shape[-1] % 8 == 0 and not rules_out_cudnn:
        return "cudnn"
    if is_half and mask is None and head <= 256 and q.shape[-1] == v.shape[-1]:
        return "flash"

    # The memory-efficient kernel needs heads whose rows are aligned to 16 bytes.
    multiple = 8 if is_half else 4
    is_aligned = q.shape[-1] % multiple == v.shape[-1] % multiple == 0
    return "efficient" if is_aligned and not enable_gqa else "math"


def _attend_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attend by the kernel that torch would choose for a GPU, whatever device the trace is on."""
    aten, name = torch.ops.aten, choose_hopper_kernel(q, k, v, mask, enable_gqa)
    if name == "math":
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]

    # Flash takes heads of a multiple of eight. Zeros add nothing to the scores, and the default scale is
    # that of the head without them.
    if name == "flash":
        head = q.shape[-1]
        q, k, v = (F.pad(t, (0, -head % 8)) if head % 8 else t for t in (q, k, v))
        scale = head**-0.5 if scale is None else scale
        flash = aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0][..., :head]

    # The other two take a mask that is added to the scores, expanded to all queries and keys.
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    if name == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention
        return cudnn(q, k, v, mask, True, dropout_p, is_causal, False, scale=scale)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, mask, True, dropout_p, is_causal, scale=scale)[0]
