"""Hugging Face models, unmodified, tiny and random: the gradients of plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sharded
import torch
import torch.nn.functional as F
from torch import nn

import fnshard as fs

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
ROWS, TIME = 4, 7


def build(name: str, **config: Any) -> nn.Module:
    made = getattr(transformers, f"{name}Config")(**config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = "ConditionalGeneration" if name == "T5" else "LMHeadModel" if name == "GPT2" else "CausalLM"
        return (
            getattr(transformers, f"{name}{'For' if kind != 'LMHeadModel' else ''}{kind}")(made)
            .double()
            .eval()
        )


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build("Llama", **SMALL, tie_word_embeddings=False),
    "qwen2": lambda: build("Qwen2", **SMALL),
    "gpt2": lambda: build("GPT2", vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=32),
    "t5": lambda: build("T5", vocab_size=61, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
                        decoder_start_token_id=0),
}  # fmt: skip
TIED = {
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "t5": ("shared.weight", "encoder.embed_tokens.weight"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_an_unmodified_model(family: str) -> None:
    module = FAMILIES[family]()
    apply, params = fs.make_functional(module)
    if family in TIED:
        first, other = TIED[family]
        assert first in params and other not in params

    def cross_entropy(output: Any, labels: torch.Tensor) -> torch.Tensor:
        # The models' own loss rounds to fp32, which would hide what is to be shown here.
        return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    def loss(params: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(apply(params, input_ids=ids, labels=labels, use_cache=False), labels)

    drawn = torch.randint(1, 61, (2, ROWS, TIME), generator=torch.Generator().manual_seed(1))
    value = cross_entropy(module(input_ids=drawn[0], labels=drawn[1], use_cache=False), drawn[1])
    value.backward()
    expected = {p: v.grad for p, v in module.named_parameters()}
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        got, grads = step(fs.shard(params, specs, mesh), *sharded.part(tuple(drawn), rank, 2))
        held = {p: g for p, g in grads.items() if g is not None}
        return got, fs.unshard(held, {p: specs[p] for p in held}, mesh)

    for got, grads in fs.simulate(mesh, run):
        torch.testing.assert_close(got, value.detach(), rtol=0, atol=1e-10)
        assert grads.keys() == expected.keys()
        for path, grad in expected.items():
            torch.testing.assert_close(grads[path], grad, rtol=0, atol=1e-10, msg=path)
    units = {s.unit for s in specs.values()}
    assert sum(any(part.isdigit() for part in u.split(".")) for u in units) == (4 if family == "t5" else 2), (
        units
    )
