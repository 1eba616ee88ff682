"""`experiments.tuning.lm`: causal language models of transformers as pure functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from errors import raises
from families import FAMILIES, GPT2, LOCAL, SMALL, transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fnshard as fs
from experiments.lib.checks import ConfigError
from experiments.tuning import lm
from fnshard.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt2"]
TOKENS = torch.randint(1, 61, (2, 11), generator=torch.Generator().manual_seed(0))
# Two documents and padding in the first row, one in the second.
DOCUMENTS = torch.tensor([[1] * 3 + [2] * 6 + [0] * 2, [5] * 11])
POSITIONS = torch.tensor([[*range(3), *range(6), 0, 0], [*range(11)]])
ALONE = [(0, 0, 3), (0, 3, 9), (1, 0, 11)]  # (row, from, to)


def close(got: Tensor, wanted: Tensor, atol: float = 1e-10) -> None:
    """Assert that two tensors are equal as far as fp64 goes."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("name", DECODERS)
def test_documents_of_a_row_do_not_see_each_other(name: str) -> None:
    """Each is as it is alone, in the module itself; padding is finite, and so are the gradients."""
    family = FAMILIES[name]
    module, atol = family.build(), family.atol  # the softmax of some is in fp32
    model = lm.from_model(module)
    params = {p: v.detach().requires_grad_(v.is_floating_point()) for p, v in model.params.items()}
    got = model.logits(params, TOKENS, POSITIONS, DOCUMENTS)
    for row, low, high in ALONE:
        close(got[row, low:high], module(input_ids=TOKENS[row : row + 1, low:high]).logits[0], atol)
    assert got.isfinite().all()
    got.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in params.values() if p.grad is not None)
    swapped = TOKENS.clone()
    swapped[0, :3] = TOKENS[0, [1, 2, 0]]
    other = model.logits(params, swapped, POSITIONS, DOCUMENTS)
    close(other[0, 3:9], got[0, 3:9], atol)
    assert (model.logits(params, swapped)[0, 3:9] - model.logits(params, TOKENS)[0, 3:9]).abs().max() > 1e-6


def test_a_window_that_a_model_does_not_look_at() -> None:
    """Many a config.json has one."""
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, sliding_window=2)).double()
    model = lm.from_model(module)
    assert model.windows == {"full_attention": None}
    got = model.logits(model.params, TOKENS, POSITIONS, DOCUMENTS)
    close(got[1], module(input_ids=TOKENS[1:]).logits[0])


def test_padding_sees_itself_and_no_more() -> None:
    """Attention is eager, since its scores have a cap: a softmax over nothing is NaN in some kernels."""
    model = lm.from_model(FAMILIES["gemma2"].build())
    with mock.patch.object(lm.LanguageModel, "run") as run:
        model.hidden(model.params, TOKENS, POSITIONS, DOCUMENTS)
    masks = run.call_args.args[3]
    assert masks.keys() == {"full_attention", "sliding_attention"}
    for mask in masks.values():
        assert mask.shape == (2, 1, 11, 11)
        assert torch.equal(mask[0, 0, 9:] == 0, torch.eye(11, dtype=torch.bool)[9:])
        assert not (mask[0, 0, :9, 9:] == 0).any()


def test_what_document_attention_does_not_know_is_refused() -> None:
    """A window that the layer does not pass on, dropout, a cap of scores."""
    model = lm.from_model(FAMILIES["gemma3"].build())
    layer = next(m for m in model.model.modules() if getattr(m, "sliding_window", None))
    attend = ALL_ATTENTION_FUNCTIONS["fnshard"]
    x, documents = torch.randn(2, 2, 11, 8), DOCUMENTS[:, None, None]
    for given, text in (
        ({}, "a window"),
        ({"softcap": 3.0}, "softcap=3.0"),
        ({"dropout": 0.1}, "dropout=0.1"),
    ):
        with raises(ValueError, leaves=text, says="'eager'"):
            attend(layer, x, x, x, documents, **given)


@pytest.mark.parametrize("shape", [(2, 1, 11, 11), (2, 2, 11, 11), (2, 2, 1, 11), (2, 11)])
def test_integers_that_are_no_documents_are_refused(shape: tuple[int, ...]) -> None:
    """Their first row is not taken for documents. As booleans they are a mask of T x T."""
    attend = ALL_ATTENTION_FUNCTIONS[fs.hf.register_attention()]
    module, x = torch.nn.Module(), torch.randn(2, 2, 11, 8)
    with raises(ValueError, leaves=["attention_mask", str([*shape])], fix="mask.bool()"):
        attend(module, x, x, x, torch.ones(shape, dtype=torch.int64))
    mask = torch.ones(11, 11, dtype=torch.int64).tril()[None, None]
    seen = attend(module, x, x, x, mask.bool())[0]
    close(seen, F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2), 1e-6)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_documents_in_a_sharded_program(name: str) -> None:
    model = lm.from_model(FAMILIES[name].build())
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(model.params, mesh)
    forward = fs.shard_forward(model.logits, specs, mesh=mesh, backend="eager")
    whole = model.logits(model.params, TOKENS, POSITIONS, DOCUMENTS).detach()

    def run(rank: int) -> Tensor:
        rows = (each[rank : rank + 1] for each in (TOKENS, POSITIONS, DOCUMENTS))
        return forward(fs.shard(model.params, specs, mesh), *rows)

    close(torch.cat(fs.simulate(mesh, run)), whole)


def attention_of(model: lm.LanguageModel, *batch: Tensor) -> list[tuple[Any, Any]]:
    """Return (has a mask, is causal) of each attention of a forward; ("documents", window) of documents'."""
    specs = fs.presets.full_shard(model.params, fs.make_mesh(shard=2, abstract=True))
    forward = fs.shard_forward(model.hidden, specs, mesh=fs.make_mesh(shard=2, abstract=True))
    graph = forward.lower(model.params, *batch).program.graph
    found = []
    for node in graph.nodes:
        if node.target is torch.ops.fnshard.document_attention.default:
            found.append(("documents", node.args[6]))
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            args = dict(zip(("q", "k", "v", "mask", "dropout", "causal"), node.args, strict=False))
            args |= {
                {"is_causal": "causal", "attn_mask": "mask"}.get(n, n): v for n, v in node.kwargs.items()
            }
            found.append((args.get("mask") is not None, bool(args.get("causal"))))
    return found


@pytest.mark.long
def test_one_document_a_row_keeps_the_causal_kernel() -> None:
    model = lm.from_model(FAMILIES["llama"].build())
    assert attention_of(model, TOKENS) == [(False, True)] * 2
    assert attention_of(model, TOKENS, POSITIONS) == [(False, True)] * 2, "positions are not documents"
    assert attention_of(model, TOKENS, POSITIONS, DOCUMENTS) == [("documents", 0)] * 2
    # A window that is as long as the row is none.
    wide = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=11))
    assert attention_of(lm.from_model(wide), TOKENS) == [(False, True)] * 2


# ------------------------------------------------------------------ heads and losses


def make_module(name: str, **config: Any) -> Any:
    """Make a module in fp64, all its leaves random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
        module = module.double()
        with torch.no_grad():
            for leaf in module.parameters():
                leaf.add_(torch.randn_like(leaf) * 0.2)
    return module


HEADS = {
    "llama": (True, lambda: make_module("Llama", **SMALL)),
    "tied": (True, lambda: make_module("Gemma", **LOCAL)),
    "softcap": (False, lambda: make_module("Gemma2", **LOCAL, final_logit_softcapping=0.5)),
    "no softcap": (True, lambda: make_module("Gemma2", **LOCAL, final_logit_softcapping=None)),
    "scaled": (False, lambda: make_module("Granite", **SMALL, logits_scaling=8.0)),
    "multiplied": (False, lambda: make_module("Cohere", **SMALL, logit_scale=0.25)),
    "bias": (False, lambda: make_module("Phi", **{**SMALL, "num_key_value_heads": 4})),
}


@pytest.mark.parametrize("head", HEADS)
def test_losses_are_those_of_the_modules_own_logits(head: str) -> None:
    """Whatever it does to them; with the chunked loss where that is the same."""
    plain, make = HEADS[head]
    module = make()
    model = lm.from_model(module)
    assert model.plain_head is plain
    logits = module(input_ids=TOKENS).logits
    targets = TOKENS.roll(-1, 1).masked_fill(TOKENS % 3 == 0, -100)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(TOKENS.shape)
    close(model.losses(model.params, model.hidden(model.params, TOKENS), targets), wanted)
    matrix = model.head(model.params).detach().requires_grad_()
    hidden = model.hidden(model.params, TOKENS).detach().masked_fill((targets == -100)[..., None], torch.nan)
    spoiled = model.losses({**model.params, model._head: matrix}, hidden.requires_grad_(), targets)
    close(spoiled, wanted)  # what does not count may hold anything
    assert all(each.isfinite().all() for each in torch.autograd.grad(spoiled.sum(), (hidden, matrix)))
    half = {p: v.bfloat16() if v.is_floating_point() else v for p, v in model.params.items()}
    assert model.losses(half, model.hidden(half, TOKENS), targets).dtype == torch.float32
    close(model.logits(model.params, TOKENS), logits)
    product = model.hidden(model.params, TOKENS) @ model.head(model.params).T
    assert torch.allclose(product, logits) is plain


def test_matrices() -> None:
    model = lm.from_model(FAMILIES["llama"].build())
    assert len(model.matrices()) == 14 and model.transposed_matrices() == []
    assert {p.split(".")[-2] for p in model.matrices()} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    old = lm.from_model(FAMILIES["gpt2"].build())
    assert old.matrices() == old.transposed_matrices() and len(old.matrices()) == 8
    assert (old.context, old.vocab) == (32, 61)


# ------------------------------------------------------------------ from files


def test_from_a_directory(tmp_path: Path) -> None:
    module = make_module("Llama", **SMALL).float()
    module.save_pretrained(tmp_path / "model")
    model = lm.from_directory(tmp_path / "model")
    assert all(leaf.is_meta for leaf in model.params.values()) and not model.model.training
    assert model.params["lm_head.weight"].dtype == torch.float32
    mesh = fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(model.params, mesh)
    blocks = fs.hf.load(tmp_path / "model", specs, mesh, model=model.model)
    forward = fs.shard_forward(model.logits, specs, mesh=mesh, backend="eager")
    close(forward(blocks, TOKENS), module.eval()(input_ids=TOKENS).logits.detach(), 1e-5)


def write(folder: Path, config: dict[str, Any] | None, weights: bool = True) -> Path:
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_directories_that_are_none(tmp_path: Path) -> None:
    llama = {"model_type": "llama", **SMALL}
    foreign = {
        "model_type": "none_of_ours",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    with raises(ConfigError, leaves=["nowhere'", "no directory"], fix="local directory"):
        lm.from_directory(tmp_path / "nowhere")
    with raises(ConfigError, leaves=["empty'", "no config.json", "no *.safetensors"], fix="save_pretrained"):
        lm.from_directory(write(tmp_path / "empty", None, weights=False))
    with raises(ConfigError, leaves=["bare'", "no *.safetensors"], fix="save_pretrained"):
        lm.from_directory(write(tmp_path / "bare", llama, weights=False))
    with raises(ConfigError, leaves="config.json"):
        lm.from_directory(write(tmp_path / "odd", {"model_type": "none_of_ours"}))
    ran = write(tmp_path / "code", foreign)
    (ran / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with raises(ConfigError, leaves="config.json"):
        lm.from_directory(ran)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "odd/config.json").write_text("{")
    with raises(ConfigError, leaves="config.json"):
        lm.from_directory(tmp_path / "odd")


@pytest.mark.parametrize("end", ["absmax", "quant_map", "SCB", "qweight"])
def test_a_directory_of_codes_is_one_error(tmp_path: Path, end: str) -> None:
    """Before a rank starts; and in the library."""
    folder = write(tmp_path / "codes", {"model_type": "llama", **SMALL, "quantization_config": {"bits": 4}})
    names = [f"model.layers.{n}.mlp.up_proj.weight{dot}" for n in range(9) for dot in ("", f".{end}")]
    safetensors.torch.save_file({name: torch.zeros(2) for name in names}, folder / "model.safetensors")
    with pytest.raises(ConfigError) as refused:
        lm.from_directory(folder)
    with pytest.raises(StateError) as raised:
        fs.hf.load(folder, {"a": fs.LayoutSpec().resolve(torch.zeros(2), "a")})
    for error, lines in ((refused, 1), (raised, 2)):
        assert len(str(error.value).splitlines()) == lines
        assert ("bitsandbytes" in str(error.value)) == (end != "qweight") and "Fix: name the dir" in str(
            error.value
        )


# ------------------------------------------------------------------ what is refused


def test_models_that_are_no_decoders() -> None:
    small = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2}
    cases = [
        (transformers.BertConfig(**small, num_attention_heads=2), "an encoder"),
        (transformers.T5Config(vocab_size=61, d_model=16, num_layers=1), "encoder with a decoder"),
        (transformers.MambaConfig(**small), "2 of its layers"),
        (transformers.OPTConfig(**small, num_attention_heads=2), "its head"),
        (transformers.ViTConfig(hidden_size=16), "no model of it"),
        (transformers.Gemma3TextConfig(**LOCAL, use_bidirectional_attention=True), "an encoder"),
        (
            transformers.BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2),
            "position_ids",
        ),
    ]
    for config, why in cases:
        with raises(ConfigError, leaves=why, fix="a decoder"):
            lm.from_config(config)
    with raises(ConfigError, leaves=["LlamaModel", "head"], fix="a decoder"):
        lm.from_model(transformers.LlamaModel(transformers.LlamaConfig(**SMALL)))
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    module.config._attn_implementation_internal = "flash_attention_2"
    with raises(ConfigError, leaves="'flash_attention_2'", fix="a decoder", says="'eager'"):
        lm.from_model(module)


def test_experts_of_another_kind_are_refused() -> None:
    """Which of them a token meets is a length of data there."""
    small = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.JetMoeConfig(**small, num_attention_heads=4, num_key_value_heads=2)
    first = "layers.0.mlp.input_linear.weight [8, 48, 16]"
    with raises(ConfigError, leaves=first, fix="a decoder", says="7 more"):
        lm.from_config(config)
    one = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    one.transformer.h[0].odd = torch.nn.Parameter(torch.zeros(2, 2, 2))
    with raises(ConfigError, leaves="h.0.odd [2, 2, 2]", fix="a decoder"):
        lm.from_model(one)
