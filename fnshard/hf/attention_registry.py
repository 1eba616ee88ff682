"""`fs.attention` over packed documents for models of transformers, by its registry of attentions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fnshard.compiler.kernels.document_attention import attention
from fnshard.errors import MissingExtraError

NAME = "fnshard"


def register_attention() -> str:
    """Make `fs.attention` an implementation of transformers' attention, and return its name.

    A model with this implementation takes the documents of its rows as an attention mask of integers
    [B, 1, 1, T], and makes no mask of T x T; windows are the model's. With any other mask, and without one,
    it attends as with "sdpa".

    Raises:
        MissingExtraError: transformers is not installed.

    >>> import fnshard as fs
    >>> model.set_attn_implementation(fs.hf.register_attention())  # doctest: +SKIP
    >>> model(tokens, position_ids=positions, attention_mask=documents[:, None, None])  # doctest: +SKIP
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise MissingExtraError(
            "fs.hf.register_attention is for models of transformers 5 and later, which is not installed.",
            fix="pip install fnshard[finetune].",
        ) from error

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


_UNKNOWN = ("softcap", "s_aux", "position_bias")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend within documents where the mask is of integers, in the form that transformers calls.

    Raises:
        ValueError: the mask is of integers and of another shape than [B, 1, 1, T], or the model attends with
            something that `fs.attention` does not know.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = attention_mask
    if mask is None or mask.dtype == torch.bool or mask.is_floating_point():
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, sliding_window=sliding_window, **kwargs
        )
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"attention_mask is {mask.dtype} {list(mask.shape)}: integers are documents, [B, 1, 1, T]. "
            "Fix: pass a mask of T x T as mask.bool()."
        )

    # Refuse what would be left out: options that `fs.attention` lacks, and a window that a layer has and does
    # not pass on.
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    layer_type = layer_types[module.layer_idx] if layer_types else ""
    wrong = [f"{name}={kwargs[name]!r:.40}" for name in _UNKNOWN if kwargs.get(name) is not None]
    if dropout:
        wrong.append(f"dropout={dropout}")
    if "sliding" in layer_type and sliding_window is None:
        wrong.append("a window that it does not pass on")
    if wrong:
        raise ValueError(
            f"{type(module).__name__} attends with {', '.join(wrong)}, which fs.attention does not know: "
            "pass a mask of T x T, or set_attn_implementation('eager')."
        )

    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    documents = mask[:, 0, 0]
    out = attention(
        query, key, value, causal=causal, documents=documents, window=sliding_window, scale=scaling
    )
    # transformers expects [B, T, H, D], and the attention's weights, which are not computed.
    return out.transpose(1, 2).contiguous(), None
