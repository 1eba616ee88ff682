"""Mixtures of experts, on one rank and over an axis: gradients, adapters, codes, files, balance, runs."""

from __future__ import annotations

import importlib
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import raises
from families import Wide
from runs import DOUBLE
from safetensors.torch import load_file
from torch import Tensor
from tuning import config_of, tune_on_rank

import fnshard as fs
from experiments import bases, finetune
from experiments.bases import make_base
from experiments.lib.checks import ConfigError
from experiments.tuning.lm import LanguageModel, from_model
from experiments.tuning.method import make_tuning
from experiments.tuning.model_directory import EXPORTED, find_directory
from fnshard.errors import SpecError, StateError, TraceError

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 3},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8,
                "layer_types": ["full_attention"] * 2},
}  # fmt: skip
# Few: some experts get none.
TOKENS = torch.randint(1, 61, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FAMILIES:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def built(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **FAMILIES[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def plainly(module: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute loss and gradients by the module itself, which loops over its experts."""
    module = deepcopy(module)
    module.set_experts_implementation("eager")
    loss = module(TOKENS).logits.logsumexp(-1).mean()
    loss.backward()
    return loss.detach(), {path: leaf.grad for path, leaf in module.named_parameters()}


def loss_of(model: LanguageModel) -> Any:
    return lambda params, tokens: model.logits(params, tokens).logsumexp(-1).mean()


MESHES = [{"shard": 1}, {"shard": 2}, {"tensor": 2}, {"expert": 2}, {"expert": 2, "tensor": 2}]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend", "axes"),
    [(name, backend, axes) for name in FAMILIES for backend in ("eager", "inductor") for axes in MESHES],
    ids=str,
)
def test_gradients_are_those_of_plain_autograd(name, backend, axes, wide):
    """Also of experts that no token meets: zero, and nobody waits."""
    module = built(name).double()
    expected, wanted = plainly(module)
    idle = [g for g in wanted.values() if g.dim() == 3 and (g.flatten(1).abs().amax(1) == 0).any()]
    assert idle
    model, mesh = from_model(module), fs.make_mesh(**axes, simulated=True)
    named = {axis: axis for axis in ("tensor", "expert") if axis in axes}
    specs = fs.presets.full_shard(model.params, mesh, **named)
    step = fs.shard_step(loss_of(model), specs, mesh=mesh, backend=backend)

    def on_rank(rank: int) -> Any:
        mine = TOKENS[mesh.data_rank :][:1] if mesh.data_size == 2 else TOKENS
        loss, gradients = step(fs.shard(model.params, specs, mesh), mine)
        there = {path: g for path, g in gradients.items() if g is not None}
        layouts = {p: fs.LayoutSpec(specs[p].gradient).resolve(model.params[p], "u") for p in there}
        return loss, fs.unshard(there, layouts, mesh)

    for loss, gradients in fs.simulate(mesh, on_rank):
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        assert gradients.keys() == {path for path, g in wanted.items() if g is not None}
        for path, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[path], atol=1e-10, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_experts_are_what_they_are_merged_to(name, wide):
    """Loss and gradients, next to those of a module with W + s B A in its experts."""
    module = built(name).double()
    model, mesh = from_model(deepcopy(module)), fs.make_mesh(shard=1, device="cpu")
    tuned, params = fs.lora(
        loss_of(model), model.params, rank=2, targets=[*model.experts(), *model.matrices()],
        transposed="|".join(model.transposed_matrices()),
    )  # fmt: skip
    for parts in params["adapters"].values():
        parts["b"].data.normal_(0, 0.1)
    specs = fs.presets.full_shard(params, mesh)
    blocks = fs.shard(params, specs, mesh)
    loss, gradients = fs.shard_step(tuned, specs, mesh=mesh, backend="eager")(blocks, TOKENS)
    merged, _ = fs.adapters.merge(blocks, tuned.lora, specs, mesh)
    with torch.no_grad():
        for path, leaf in module.named_parameters():
            leaf.copy_(merged[path])
    expected, wanted = plainly(module)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    assert model.experts()
    for path in model.experts():
        of_whole, parts = wanted[path], params["adapters"][path]
        of_whole = tuned.lora.scale * (of_whole.mT if path in tuned.lora.transposed else of_whole)
        found = gradients["adapters"][path]
        torch.testing.assert_close(found["b"], of_whole @ parts["a"].mT, atol=1e-10, rtol=0)
        torch.testing.assert_close(found["a"], parts["b"].mT @ of_whole, atol=1e-10, rtol=0)


def test_what_adapters_of_experts_cannot_be_is_said(tmp_path):
    model = from_model(built("qwen3_moe"))
    targets, loss = model.experts(), loss_of(model)
    with raises(SpecError, leaves="dora"):
        fs.lora(loss, model.params, targets=targets, dora=True)
    with raises(SpecError, leaves="rank=20", says="12"):
        fs.lora(loss, model.params, targets=targets, rank=20)
    tuned, params = fs.lora(loss, model.params, targets=targets, rank=2)
    specs = fs.presets.full_shard(params, fs.make_mesh(shard=1))
    with raises(StateError, leaves="experts", says="PEFT's"):
        fs.adapters.save(params, tmp_path, tuned.lora, specs, fs.make_mesh(shard=1))
    with raises(TraceError, leaves=["params['w']", "sum"]):
        fs.lora(lambda p, x: p["w"].sum() + x, {"w": torch.ones(2, 4, 4)}, rank=1, targets="w")[0](
            fs.lora(lambda p, x: x, {"w": torch.ones(2, 4, 4)}, rank=1, targets="w")[1], torch.ones(1)
        )


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_single_experts_are_read_and_written(name, tmp_path):
    """transformers writes such files; each rank reads its slices, also through the middle of an expert."""
    module = built(name)
    module.save_pretrained(tmp_path / "theirs")
    mesh = fs.make_mesh(shard=3, simulated=True)
    _, params = fs.make_functional(module)
    on_dim = {
        path: fs.P(None, "shard") if leaf.dim() == 3 else fs.P("shard") for path, leaf in params.items()
    }
    specs = fs.match_specs(params, [(path, fs.LayoutSpec(part)) for path, part in on_dim.items()])

    def on_rank(rank: int) -> Any:
        blocks = fs.hf.load(tmp_path / "theirs", specs, mesh, model=module)
        for path, block in fs.shard(params, specs, mesh).items():
            assert torch.equal(blocks[path], block), path
        fs.hf.save(blocks, tmp_path / "ours", specs, mesh, model=module, config=tmp_path / "theirs")

    fs.simulate(mesh, on_rank)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    for path, leaf in module.named_parameters():
        assert torch.equal(again.get_parameter(path), leaf), path


def test_an_expert_that_is_not_there_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    module, file = built("mixtral"), tmp_path / "model.safetensors"
    module.save_pretrained(tmp_path)
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    save_file(tensors, file, {"format": "pt"})
    _, params = fs.make_functional(module)
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    with pytest.raises(StateError) as caught:
        fs.hf.load(tmp_path, specs, fs.make_mesh(shard=1), model=module)
    assert "'model.layers.1.mlp.experts.gate_up_proj'] [8, 48, 16]: no tensor" in str(caught.value)
    assert "experts.0.w1.weight' [24, 16]" in str(caught.value)
    assert "layers.0" not in str(caught.value)


# ------------------------------------------------------------------ tuning


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mixture"))
        small = bases.RANDOM["tiny-moe"] | {"num_hidden_layers": 1, "hidden_size": 32}
        patch.setattr(bases, "RANDOM", {"tiny-moe": small})
        make_base(["tiny-moe"], [])
        return find_directory("tiny-moe").resolve()


@pytest.mark.long  # test_finetune tunes and exports; gradients and files: here
@pytest.mark.parametrize(
    "chosen",
    [
        ("method=qlora4", "method.targets=all-linear|experts", "export=merged"),
        ("method=lora", "method.targets=all-linear|experts"),
        ("method=qlora4", "objective=dpo", "export=merged"),
        ("method=full",),
        ("method=full", "objective=dpo"),
    ],
    ids=" ".join,
)
def test_a_mixture_is_tuned_exported_and_opened(mixture, data, tmp_path, chosen):
    config = config_of(mixture, data, tmp_path, *chosen, "optimizer.lr=0.01", "run.steps=3")
    folder = tmp_path / "run"
    tune_on_rank(0, config, folder)
    result, before = (json.loads((folder / name).read_text()) for name in ("result.json", finetune.BEFORE))
    assert result["held_out_loss"] < before["held_out_loss"]
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder / EXPORTED).eval()
    plain = dict(transformers.AutoModelForCausalLM.from_pretrained(mixture).named_parameters())
    changed = {path for path, leaf in opened.named_parameters() if not torch.equal(leaf, plain[path])}
    experts = {path for path in plain if path.split(".")[-2] == "experts"}
    assert experts and (experts <= changed)  # by their adapters, or by the rounding of their codes
    ours = from_model(deepcopy(opened))
    torch.testing.assert_close(ours.logits(dict(ours.params), TOKENS), opened(TOKENS).logits)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(("method=full", "objective.balance=0.1"), marks=pytest.mark.long),
        pytest.param(("method=lora", "method.targets=experts|all-linear"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_experts_on_two_ranks_are_tuned_as_on_one(ranks, mixture, data, tmp_path, chosen):
    """Rows go to their experts; losses, balance, answers and the exported model are those of one rank."""
    config = config_of(mixture, data, tmp_path, "export=merged", "run.steps=2", "run.sample_tokens=1",
                       *DOUBLE, *chosen)  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    tune_on_rank(0, config, one)
    ranks(2).run(tune_on_rank, replace(config, mesh=replace(config.mesh, expert=2)), str(two))
    assert "over expert" in (two / "schedule.txt").read_text()
    found, expected = (json.loads((folder / "result.json").read_text()) for folder in (two, one))
    same = [key for key in expected if key.startswith("held_out")]
    assert same and {k: found[k] for k in same} == pytest.approx({k: expected[k] for k in same}, rel=1e-9)
    assert (one / "samples.txt").read_text() == (two / "samples.txt").read_text()
    files = (load_file(folder / EXPORTED / "model.safetensors") for folder in (two, one))
    for (path, leaf), (_, other) in zip(*(sorted(f.items()) for f in files), strict=True):
        torch.testing.assert_close(leaf, other, rtol=0, atol=1e-9, msg=path)


def test_a_model_without_experts_has_no_expert_axis(model, data, tmp_path):
    config = config_of(model, data, tmp_path)
    config = replace(config, mesh=replace(config.mesh, expert=2))
    module = from_model(transformers.AutoModelForCausalLM.from_pretrained(model))
    with raises(ConfigError, leaves="mesh.expert=2", fix=["mesh.expert=1", "mesh.shard=2"]):
        make_tuning(config, module)


def test_adapters_of_experts_have_no_files_of_their_own(mixture, data, tmp_path):
    config = config_of(mixture, data, tmp_path, "method.targets=experts", "export=adapters")
    with raises(ConfigError, leaves="export=adapters", fix="export=merged"):
        finetune.build(config)


def test_the_load_balance_is_transformers_and_of_all_ranks():
    """Counts and probabilities of all rows, with uneven masks; gradients too."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    draw = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(12, 8, generator=draw).requires_grad_() for _ in range(2))
    mask = torch.rand(4, 3, generator=draw) < 0.6
    expected = load_balancing_loss_func(layers, 8, 2, mask)
    expected.backward()
    mesh = fs.make_mesh(shard=2, simulated=True)
    params = {"w": torch.stack([leaf.detach() for leaf in layers]).view(2, 2, 6, 8)}  # ranks' rows in turn
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(fs.P("shard")))])

    def fn(params, mine, counted):
        return fs.losses.load_balance(list((params["w"] * mine).sum(1)), 2, counted, fs.psum)

    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager")

    def on_rank(rank):
        mine = torch.nn.functional.one_hot(torch.tensor(rank), 2).view(1, 2, 1, 1).float()
        loss, gradients = step(fs.shard(params, specs, mesh), mine, mask.flatten()[6 * rank : 6 * rank + 6])
        layout = {"w": fs.LayoutSpec(specs["w"].gradient).resolve(params["w"], "u")}
        return loss, fs.unshard(gradients, layout, mesh)["w"]

    for loss, gradient in fs.simulate(mesh, on_rank):
        torch.testing.assert_close(loss, expected.detach())
        wanted = torch.stack([leaf.grad for leaf in layers]).view(2, 2, 6, 8)
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_are_those_that_the_model_balances(name):
    module = built(name)
    expected = module(TOKENS, output_router_logits=True, labels=TOKENS).aux_loss
    model, routers = from_model(module), []
    model.hidden(dict(model.params), TOKENS, routers=routers)
    found = fs.losses.load_balance(routers, module.config.num_experts_per_tok)
    torch.testing.assert_close(found.total / found.count, expected)


def test_padding_does_not_count_in_the_load_balance(mixture, data, tmp_path):
    parts = finetune.build(config_of(mixture, data, tmp_path, "method=full", "data.pack=false"))
    params, batch = parts.make_state().params, parts.batch
    tokens, targets = batch["tokens"], batch["targets"]
    # All after a row's last target is padding.
    width = torch.arange(tokens.shape[1])
    is_padding = width > torch.where(targets == -100, -1, width).amax(1, keepdim=True)
    assert is_padding.any()
    (_, first), (_, second) = (
        parts.held_out(params, {**batch, "tokens": torch.where(is_padding, pad, tokens)}) for pad in (65, 66)
    )
    assert first["balance"].total == second["balance"].total
    assert first["balance"].count == (~is_padding).sum()  # in one layer


@pytest.mark.long
def test_a_balanced_mixture_is_spread_more_evenly(mixture, data, tmp_path):
    found = {}
    for weight in (0, 3):
        config = config_of(mixture, data, tmp_path, "method=full", f"objective.balance={weight}",
                           "run.steps=3", "run.sample_tokens=0", "export=none")  # fmt: skip
        tune_on_rank(0, config, tmp_path / str(weight))
        found[weight] = json.loads((tmp_path / str(weight) / "result.json").read_text())["held_out_balance"]
    assert 2 <= found[3] < found[0]
