"""Families of models that transformers has, as small as they get: how to make one, what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import sharded
import torch
import torch.nn.functional as F
from models import Model
from torch import Tensor, nn

import fnshard as fs

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
GEMMA = {**SMALL, "head_dim": 8}
LOCAL = {**GEMMA, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
         "query_pre_attn_scalar": 8}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
ENCODER = {n: SMALL[n] for n in SMALL if n != "num_key_value_heads"}
IMAGES = {**ENCODER, "image_size": 12, "patch_size": 4, "num_labels": 5}


@dataclass(frozen=True)
class Family:
    """A family of models: how to make one, and what is known of its leaves.

    Args:
        head: the class's name after the family's.
        config: of that name, if it is not the family's.
        atol: of gradients. Gemma's norms and Gemma 2's softmax compute in fp32 whatever they are given, so
            that sums over a half of the rows are rounded otherwise than those over all.
    """

    name: str
    head: str
    sizes: dict[str, Any]
    config: str = ""
    atol: float = sharded.ATOL

    def build(self) -> nn.Module:
        """Make the module, in fp64."""
        config = getattr(transformers, f"{self.config or self.name}Config")(**self.sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return getattr(transformers, self.name + self.head)(config).double().eval()


FAMILIES = {
    "llama": Family("Llama", "ForCausalLM", {**SMALL, "tie_word_embeddings": False}),
    "qwen2": Family("Qwen2", "ForCausalLM", SMALL),
    "qwen3": Family("Qwen3", "ForCausalLM", {**GEMMA, "tie_word_embeddings": True}),
    "mistral": Family("Mistral", "ForCausalLM", {**SMALL, "sliding_window": 4}),
    "gemma": Family("Gemma", "ForCausalLM", GEMMA, atol=1e-6),
    # Softcapped attention, which has no fused kernel; windows in every other layer.
    "gemma2": Family("Gemma2", "ForCausalLM", LOCAL, atol=1e-6),
    "gemma3": Family("Gemma3", "ForCausalLM", LOCAL, config="Gemma3Text", atol=1e-6),
    "gpt2": Family("GPT2", "LMHeadModel", GPT2),
    "t5": Family(
        "T5", "ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
    ),
    "bert": Family("Bert", "ForMaskedLM", ENCODER),
    "vit": Family("ViT", "ForImageClassification", IMAGES),
    "phi": Family("Phi", "ForCausalLM", SMALL),
}  # fmt: skip

# Whose experts take parts of rows that are sorted by expert, of lengths that the router decides.
FAMILIES["jetmoe"] = Family(
    "JetMoe", "ForCausalLM",
    {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 4, "num_key_value_heads": 4},
    atol=1e-6,
)  # fmt: skip


class Wide:
    """A stand-in for torch in which float32 is float64, since fp32 would round away what a test compares."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# ------------------------------------------------------------------ what they compute

ROWS, TIME = 4, 7


def model_of(module: nn.Module, time: int = TIME) -> Model:
    """Return a module with tokens, or images, and labels; its loss is computed in fp64, unlike its own."""
    generator = torch.Generator().manual_seed(1)
    images = module.main_input_name == "pixel_values"
    shape = (ROWS,) if images else (ROWS, time)
    labels = torch.randint(1, 5 if images else 61, shape, generator=generator)
    if images:
        inputs = torch.randn(ROWS, 3, 12, 12, dtype=torch.float64, generator=generator)
    else:
        inputs = torch.randint(1, 61, shape, generator=generator)
    apply, params = fs.make_functional(module)

    def loss(params: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        extra = {"labels": labels} if module.config.is_encoder_decoder else {}
        logits = apply(params, **{module.main_input_name: inputs, **extra, "return_dict": True}).logits
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    frozen = tuple(p for p, v in params.items() if not isinstance(v, nn.Parameter))
    return Model(params, loss, lambda seed: (inputs, labels), frozen)
