"""A small Llama, LoRA adapters that are not zero, and the same merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnshard as fs

transformers = pytest.importorskip("transformers")


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def add_adapters(
    model: Any, targets: str = "*.q_proj|*.v_proj|*.down_proj", **more: Any
) -> tuple[Any, Any, Any]:
    """Return the function with adapters, its tree, in which B is not zero, and the function without."""
    apply, params = fs.make_functional(model)

    def loss(p: Any, ids: Tensor) -> Tensor:
        logits = apply(p, input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    fn, tree = fs.lora(loss, params, rank=4, alpha=8, targets=targets, **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in tree["adapters"].values():
            adapter["b"].normal_(std=0.2, generator=generator)
    return fn, tree, loss


def merge_naively(base: dict[str, Tensor], asked: Any, found: Any) -> dict[str, Tensor]:
    """Merge adapters in the naive way: W + s B A."""
    out = dict(base)
    for path, adapter in found.items():
        update = asked.scale * adapter["b"] @ adapter["a"]
        out[path] = base[path] + (update.t() if path in asked.transposed else update)
    return out


def ids(rows: int = 4) -> Tensor:
    return torch.randint(64, (rows, 12), generator=torch.Generator().manual_seed(2))
