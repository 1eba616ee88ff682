"""`fs.hf` with models of transformers, tiny and random: from meta to shards, and out to be opened there."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor, nn
from weights import same, tensors_of

import fnshard as fs
from fnshard.errors import StateError
from fnshard.hf.names import config_of_tensors
from fnshard.runtime.files.tensorfile import TensorToWrite

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL = {"vocab_size": 61, "hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=4, tie_word_embeddings=False),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=20, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
    ),
}
IDS = torch.randint(0, 61, (4, 7), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Saved:
    """A model that transformers saved, in several files; its leaves on meta, and what it says."""

    folder: Path
    meta: nn.Module
    apply: Callable[..., Any]
    params: Mapping[str, Tensor]
    logits: Tensor

    def forward(self, params: Any, ids: Tensor) -> Tensor:
        """Compute logits as a function of the leaves."""
        return self.apply(params, input_ids=ids, use_cache=False).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function that makes a family's model once."""
    made: dict[str, Saved] = {}

    def of(family: str) -> Saved:
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / "model"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
            with torch.no_grad():
                for leaf in model.parameters():  # norms and biases too
                    leaf.add_(torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
            model.save_pretrained(folder, max_shard_size="8KB")
            assert len(list(folder.glob("*.safetensors"))) > 2
            with fs.deferred():
                meta = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
            assert all(leaf.is_meta for leaf in (*meta.parameters(), *meta.buffers()))
            made[family] = Saved(folder, meta, *fs.make_functional(meta), logits(folder))
        return made[family]

    return of


def logits(folder: Path) -> Tensor:
    """Return the logits of transformers' own model of these files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def one_file(folder: Path) -> dict[str, Tensor]:
    """Remove a model's weight files, and return their tensors."""
    tensors = tensors_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return tensors


CASES = [
    ("llama", "hybrid_shard", {"replicate": 2, "shard": 2}),
    pytest.param("qwen2", "no_shard", {"shard": 1}, marks=pytest.mark.long),
    pytest.param("mistral", "zero1", {"shard": 2}, marks=pytest.mark.long),
    ("gpt2", "full_shard", {"shard": 2, "tensor": 2}),
]


@pytest.mark.suite({
    "llama-*": "two axes",
})  # fmt: skip
@pytest.mark.parametrize(("family", "preset", "axes"), CASES)
def test_in_and_out_again(
    saved: Callable[[str], Saved], tmp_path: Path, family: str, preset: str, axes: dict[str, int]
) -> None:
    """Equal logits when loaded, equal bits when saved, equal logits where transformers opens that."""
    of = saved(family)
    mesh = fs.make_mesh(**axes, simulated=True)
    tensor = "tensor" if "tensor" in axes else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*cannot be split")
        specs = fs.presets.PRESETS[preset](of.params, mesh, tensor=tensor)
    forward = fs.shard_forward(of.forward, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Tensor:
        blocks = fs.hf.load(of.folder, specs, mesh, model=of.meta)
        fs.hf.save(
            blocks, tmp_path / "out", specs, mesh, model=of.meta, config=of.folder, max_file_bytes=6000
        )
        return forward(blocks, IDS)

    with torch.no_grad():
        for got in fs.simulate(mesh, run):
            torch.testing.assert_close(got, of.logits, rtol=0, atol=1e-5)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    same(tensors_of(tmp_path / "out"), tensors_of(of.folder))
    torch.testing.assert_close(logits(tmp_path / "out"), of.logits, rtol=0, atol=1e-5)
    files = {"config.json", "generation_config.json"}
    assert {f.name for f in (tmp_path / "out").glob("*config.json")} == files


def test_a_module_brings_its_configuration_and_one_that_does_not_fit_is_refused(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    of, mesh = saved("llama"), fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(of.params, mesh)
    blocks = fs.hf.load(of.folder, specs, mesh, model=of.meta)
    values = of.meta.config.to_dict()
    wider = {name: values[name] * 2 for name in ("vocab_size", "num_hidden_layers", "intermediate_size")}
    for name, value in {**wider, "tie_word_embeddings": True, "model_type": "qwen2"}.items():
        with raises(fs.StateError, leaves="config.json", fix="config=model.config"):
            fs.hf.save(blocks, tmp_path / "out", specs, mesh, model=of.meta, config=values | {name: value})
    assert not list(tmp_path.iterdir())
    fs.hf.save(blocks, tmp_path / "out", specs, mesh, model=of.meta)
    torch.testing.assert_close(logits(tmp_path / "out"), of.logits, rtol=0, atol=1e-5)


def test_a_step_from_meta_to_a_tuned_model(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """The losses of a step of the whole model; what is saved is what transformers then trains on."""
    of = saved("llama")
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(of.params, mesh)

    def loss(params: Any, ids: Tensor) -> Tensor:
        return F.cross_entropy(of.forward(params, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.5), backend="eager")

    def run(rank: int) -> Tensor:
        state = step.adopt(fs.hf.load(of.folder, specs, mesh, model=of.meta), seed=3)
        assert int(state.seed) == 3
        state, metrics = step(state, IDS[rank * 2 : rank * 2 + 2])
        fs.hf.save(state, tmp_path / "tuned", model=of.meta, config=of.meta.config)
        return metrics["loss"]

    losses = fs.simulate(mesh, run)
    plain = transformers.AutoModelForCausalLM.from_pretrained(of.folder)
    expected = F.cross_entropy(plain(IDS, use_cache=False).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    expected.backward()
    for got in losses:
        torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-5, check_dtype=False)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    before = dict(plain.named_parameters())
    for path, leaf in tuned.named_parameters():
        wanted = (before[path] - 0.5 * before[path].grad).detach()
        torch.testing.assert_close(leaf.detach(), wanted, rtol=0, atol=1e-5)
        assert not torch.equal(wanted, before[path].detach()), path


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_files_as_others_write_them(saved: Callable[[str], Saved], tmp_path: Path, family: str) -> None:
    """Others write one file without the prefix, with old buffers, and with the tied head once more."""
    of = saved(family)
    folder = tmp_path / "hub"
    shutil.copytree(of.folder, folder)
    tensors = one_file(folder)
    start = {"gpt2": "transformer.", "qwen2": "model."}[family]
    table = next(
        t for n, t in tensors.items() if n in ("transformer.wte.weight", "model.embed_tokens.weight")
    )
    other = {n.removeprefix(start): t for n, t in tensors.items()} | {"lm_head.weight": table.clone()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    rotary = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    other |= masks if family == "gpt2" else rotary
    safetensors.save_file(other, folder / "model.safetensors", {"format": "pt"})
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(of.params, mesh)
    got = fs.hf.load(folder, specs, mesh, model=of.meta)
    expected = fs.shard(tensors | {p: got[p] for p in got if "inv_freq" in p}, specs, mesh)
    same(got, expected)
    # Only the head has the tied weight, as some write it.
    del other[next(n for n, t in other.items() if t is table)]
    safetensors.save_file(other, folder / "model.safetensors", {"format": "pt"})
    same(fs.hf.load(folder, specs, mesh, model=of.meta), expected)
    other["lm_head.weight"] = table + 1
    safetensors.save_file(other | {"extra": table}, folder / "model.safetensors", {"format": "pt"})
    with raises(StateError, leaves=["'extra' [61, 20] torch.float32", "model.safetensors"], says="1 problem"):
        fs.hf.load(folder, specs, mesh, model=of.meta)


def test_an_untied_head_does_not_fit_a_tied_model(saved: Callable[[str], Saved]) -> None:
    of = saved("llama")
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    with fs.deferred():
        model = transformers.AutoModelForCausalLM.from_config(config)
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(fs.make_functional(model)[1], mesh)
    with raises(StateError, leaves=["'lm_head.weight'", "'model.embed_tokens.weight'"]):
        fs.hf.load(of.folder, specs, mesh, model=model)
    with raises(fs.SpecError, leaves="params['lm_head.weight']"):
        fs.hf.load(of.folder, specs, mesh, model=of.meta)


def test_a_head_is_not_taken_for_an_embedding_that_is_missing(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """The model has both, whether it is given or not."""
    of = saved("llama")
    shutil.copytree(of.folder, tmp_path / "model")
    tensors = one_file(tmp_path / "model")
    del tensors["model.embed_tokens.weight"]
    safetensors.save_file(tensors, tmp_path / "model/model.safetensors")
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(of.params, mesh)
    missing = {p: torch.ones(s.shape) for p, s in specs.items() if "inv_freq" in p}
    for how in ({"model": of.meta}, {"missing": missing}):
        with raises(StateError, leaves="params['model.embed_tokens.weight'] [61, 20]", says="1 problem"):
            fs.hf.load(tmp_path / "model", specs, mesh, **how)


def test_a_base_model_of_a_whole_one(saved: Callable[[str], Saved]) -> None:
    """Its leaves have no prefix; the head is left out by name."""
    of = saved("llama")
    with fs.deferred():
        model = transformers.AutoModel.from_config(FAMILIES["llama"]())
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(fs.make_functional(model)[1], mesh)
    with raises(StateError, leaves="'lm_head.weight'", says=["1 problem", "no leaf"]):
        fs.hf.load(of.folder, specs, mesh, model=model)
    got = fs.hf.load(of.folder, specs, mesh, model=model, ignore="lm_head.*")
    whole = {n.removeprefix("model."): t for n, t in tensors_of(of.folder).items() if n != "lm_head.weight"}
    same({p: got[p] for p in whole}, fs.shard(whole, {p: specs[p] for p in whole}, mesh))


def test_buffers_are_made_by_their_module(saved: Callable[[str], Saved]) -> None:
    """Rotary frequencies, as the real module has them; without a module it is an error."""
    of = saved("llama")
    mesh = fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(of.params, mesh)
    real = transformers.AutoModelForCausalLM.from_pretrained(of.folder)
    wanted = dict(real.named_buffers())
    assert wanted.keys() == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    for model in (of.meta, real, torch.compile(real)):
        got = fs.hf.load(of.folder, specs, mesh, model=model)
        same({p: got[p] for p in wanted}, wanted)
    with raises(
        StateError, leaves="params['model.rotary_emb.inv_freq'] [5]", fix="model=", says="2 problems"
    ):
        fs.hf.load(of.folder, specs, mesh)
    got = fs.hf.load(of.folder, specs, mesh, missing=wanted)
    same({p: got[p] for p in wanted}, wanted)
    assert of.meta.model.rotary_emb.inv_freq.is_meta, "the module was changed"


def test_what_a_module_cannot_make_is_told(tmp_path: Path) -> None:
    """A bare meta module, whose constructor is lost, and a buffer that depends on the seed."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    class Drawn(Table):
        def __init__(self) -> None:
            super().__init__()
            self.table.normal_()

    safetensors.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for kind, context, way in (
        (Table, torch.device("meta"), "fs.deferred"),
        (Drawn, fs.deferred(), "missing="),
    ):
        with context:
            model = kind()
        specs = fs.match_specs(fs.make_functional(model)[1], [("*", fs.LayoutSpec())])
        with raises(StateError, leaves="params['table']", says=way):
            fs.hf.load(tmp_path, specs, model=model)
        got = fs.hf.load(tmp_path, specs, model=model, missing={"table": torch.arange(3.0)})
        same(got, {"w": torch.ones(2), "table": torch.arange(3.0)})
    with raises(fs.SpecError, leaves="model= is dict", fix="nn.Module"):
        fs.hf.load(tmp_path, specs, model={})


# ------------------------------------------------------------------ what is written beside the tensors
def written(of: Saved, folder: Path, **options: Any) -> dict[str, Any]:
    mesh = fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(of.params, mesh)
    blocks = fs.hf.load(of.folder, specs, mesh, model=of.meta)
    fs.hf.save(blocks, folder, specs, mesh, **options)
    return json.loads((folder / "config.json").read_text())


SOURCES: dict[str, Callable[[Saved], Any]] = {  # where the configuration comes from
    "a folder": lambda of: of.folder,
    "a file": lambda of: of.folder / "config.json",
    "a dict": lambda of: of.meta.config.to_dict() | {"architectures": ["LlamaForCausalLM"]},
    "a configuration": lambda of: of.meta.config,
    "the module": lambda of: None,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("source", SOURCES)
def test_the_configuration_has_the_dtype_of_what_is_written(
    saved: Callable[[str], Saved], tmp_path: Path, source: str, dtype: torch.dtype | None
) -> None:
    of = saved("llama")
    found = written(of, tmp_path / "out", model=of.meta, config=SOURCES[source](of), dtype=dtype)
    name = str(dtype or torch.float32).removeprefix("torch.")
    assert {found[key] for key in ("dtype", "torch_dtype") if key in found} == {name}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == (
        dtype or torch.float32
    )


def test_parts_and_older_names_of_the_dtype_and_a_quantization_that_is_gone() -> None:
    entries = [TensorToWrite("w", (4, 4), torch.bfloat16), TensorToWrite("norm", (4,), torch.float32)]
    values = {
        "model_type": "x", "torch_dtype": "float32", "text_config": {"dtype": "float32", "vocab_size": 3},
        "vision_config": {"dtype": None}, "quantization_config": {"load_in_4bit": True},
    }  # fmt: skip
    assert config_of_tensors(values, entries) == {
        "model_type": "x", "torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "vocab_size": 3},
        "vision_config": {"dtype": None},
    }  # fmt: skip
    kept = config_of_tensors(values, [*entries, TensorToWrite("codes", (4,), torch.uint8)])
    assert "quantization_config" in kept
    assert config_of_tensors({"mine": 1}, entries) == {"mine": 1}


CHANGED = {
    "vocab_size": 126, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 999,
    "tie_word_embeddings": True, "num_key_value_heads": 2, "num_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("known", ["by the module", "by its class", "by its kind"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_configuration_of_other_tensors_is_refused(
    saved: Callable[[str], Saved], tmp_path: Path, name: str, known: str
) -> None:
    of = saved("llama")
    values = of.meta.config.to_dict() | {name: CHANGED[name]}
    values |= {"architectures": ["LlamaForCausalLM"]} if known == "by its class" else {}
    model = {"model": of.meta} if known == "by the module" else {}
    with raises(fs.StateError, leaves="config.json", fix="config=model.config") as error:
        written(of, tmp_path / "out", config=values, **model)
    if name in ("vocab_size", "tie_word_embeddings"):
        assert "lm_head.weight" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["wider", "deeper", "no transformer"])
def test_another_model_is_refused_and_says_what_differs(
    saved: Callable[[str], Saved], tmp_path: Path, kind: str
) -> None:
    of = saved("llama")
    sizes = {"wider": {"intermediate_size": 999}, "deeper": {"num_hidden_layers": 3}}.get(kind, {})
    config = transformers.LlamaConfig(**{**of.meta.config.to_dict(), **sizes})
    with fs.deferred():
        other = transformers.LlamaForCausalLM(config) if sizes else torch.nn.Linear(3, 3)
    leaf = {"wider": "mlp.gate_proj.weight", "deeper": "layers.2.", "no transformer": "weight"}[kind]
    with raises(fs.SpecError, leaves=["model=", leaf], fix="make_functional"):
        written(of, tmp_path / "out", model=other)
    assert not list(tmp_path.iterdir())
