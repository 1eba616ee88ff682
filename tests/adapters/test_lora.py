"""LoRA: adapters of frozen weights of any pure function, sharded and coded like everything else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from lora_models import add_adapters, ids, llama, merge_naively
from safetensors.torch import load_file, save_file

import fnshard as fs
from fnshard import LayoutSpec, P, adapters
from fnshard.adapters.lora import with_adapters
from fnshard.compiler.frontend.decompositions import GROUPED
from fnshard.errors import StateError
from fnshard.layout.codecs import CODECS
from fnshard.layout.spec import is_buffer

transformers = pytest.importorskip("transformers")


# ------------------------------------------------------------------ what it computes


def test_at_first_it_changes_nothing_and_then_it_is_the_merged_weight() -> None:
    model = llama()
    apply, params = fs.make_functional(model)
    fn, tree = fs.lora(lambda p, x: apply(p, input_ids=x).logits, params, rank=3)
    assert torch.equal(fn(tree, ids()), apply(params, input_ids=ids()).logits)
    fn, tree, loss = add_adapters(model)
    naive = loss(merge_naively(tree["base"], fn.lora, tree["adapters"]), ids())
    torch.testing.assert_close(fn(tree, ids()), naive, atol=1e-12, rtol=0)
    assert len(fn.lora.targets) == 2 * 3


def test_matrices_that_are_multiplied_as_they_are() -> None:
    """GPT-2's addmm, x @ w, matmul and mm."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    fn, tree, loss = add_adapters(
        transformers.GPT2LMHeadModel(config).double(), "*.c_attn", transposed="*.c_attn"
    )
    naive = loss(merge_naively(tree["base"], fn.lora, tree["adapters"]), ids())
    torch.testing.assert_close(fn(tree, ids()), naive, atol=1e-12, rtol=0)
    x = torch.randn(5, 3)
    for multiply in (
        lambda x, w: x @ w,
        torch.matmul,
        torch.mm,
        lambda x, w: x.mm(w),
        lambda x, w: x.matmul(w),
    ):
        fn, tree = fs.lora(
            lambda p, x, m=multiply: m(x, p["w"]),
            {"w": torch.randn(3, 4)},
            rank=2,
            targets="w",
            transposed="w",
        )
        with torch.no_grad():
            tree["adapters"]["w"]["b"].normal_()
        torch.testing.assert_close(
            fn(tree, x), x @ merge_naively(tree["base"], fn.lora, tree["adapters"])["w"]
        )


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("multiply", "transposed"),
    [
        (F.linear, ""),
        (lambda x, w: x @ w, "w"),
        (lambda x, w: x @ w.mT, ""),
        (lambda x, w: F.linear(x, w.mT), "w"),
        (lambda x, w: F.linear(x, w.mT.mT), ""),
        (lambda x, w: x @ w.mT.mT, "w"),
    ],
)
@pytest.mark.parametrize("shape", [(4, 4), (5, 4)])
def test_transposes_in_fn_are_seen(multiply: Any, transposed: str, dora: bool, shape: tuple) -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, p["w"])

    weight = {"w": torch.randn(shape).T if transposed else torch.randn(shape)}
    tuned, tree = fs.lora(fn, weight, rank=2, targets="w", transposed=transposed, dora=dora)
    with torch.no_grad():
        tree["adapters"]["w"]["b"].normal_()
    merged, _ = adapters.merge(tree, tuned.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    x = torch.randn(3, 4)
    torch.testing.assert_close(tuned(tree, x), fn(merged, x), atol=1e-5, rtol=1e-4)
    # A square matrix that is multiplied the other way round has the shapes of one that is not.
    other, tree = fs.lora(fn, weight, rank=2, targets="w", transposed="" if transposed else "w")
    with raises(fs.TraceError, leaves="params['w']", fix="transposed=", says="nowhere"):
        other(tree, x)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("multiply", "transposed"),
    [
        (lambda x, w, b: F.linear(x, w, b), ""),
        (lambda x, w, b: F.linear(x, w, bias=b), ""),
        (lambda x, w, b: torch.ops.aten.linear(x, w, b), ""),
        (lambda x, w, b: torch.addmm(b, x, w.mT), ""),
        (lambda x, w, b: torch.addmm(b, x, mat2=w), "w"),
        (lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w), "w"),
    ],
)
def test_a_bias_is_added_once_and_not_scaled(multiply: Any, transposed: str, dora: bool) -> None:
    """However its function takes it: `nn.Linear` gives its bias by position."""
    torch.manual_seed(0)
    params, x = {"w": torch.randn(4, 4), "b": torch.randn(4)}, torch.randn(3, 4)
    fn = lambda p, x: multiply(x, p["w"], p["b"])  # noqa: E731
    tuned, tree = fs.lora(fn, params, rank=2, targets="w", transposed=transposed, dora=dora)
    assert torch.equal(tuned(tree, x), fn(params, x))
    with torch.no_grad():
        for leaf in tree["adapters"]["w"].values():
            leaf.uniform_(0.5, 1.5)
    merged, _ = adapters.merge(tree, tuned.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    torch.testing.assert_close(tuned(tree, x), fn(merged, x), atol=1e-5, rtol=1e-5)


def test_experts_whose_ends_are_given_by_position() -> None:
    torch.manual_seed(0)
    params, x = {"w": torch.randn(2, 8, 8).bfloat16()}, torch.randn(5, 8).bfloat16()
    ends = torch.tensor([2, 5], dtype=torch.int32)
    by_name, tree = fs.lora(lambda p, x: F.grouped_mm(x, p["w"].mT, offs=ends), params, rank=8, targets="w")
    by_position = with_adapters(lambda p, x: GROUPED[1](x, p["w"].mT, ends), by_name.lora)
    torch.nn.init.normal_(tree["adapters"]["w"]["b"])
    assert torch.equal(by_position(tree, x), by_name(tree, x))


def test_scales_and_dropout() -> None:
    params = {"w": torch.zeros(4, 8)}
    for stabilised, scale in ((False, 16 / 4), (True, 16 / math.sqrt(4))):
        fn, tree = fs.lora(
            lambda p, x: F.linear(x, p["w"]), params, rank=4, targets="w", rank_stabilised=stabilised
        )
        assert fn.lora.scale == scale
    fn, tree = fs.lora(lambda p, x: F.linear(x, p["w"]), params, rank=4, targets="w", dropout=0.5)
    torch.nn.init.ones_(tree["adapters"]["w"]["a"]), torch.nn.init.ones_(tree["adapters"]["w"]["b"])
    seen = fn(tree, torch.ones(2000, 8))[:, 0] / (4 * fn.lora.scale)
    assert set(seen.tolist()) <= {2.0 * n for n in range(9)}
    assert seen.mean().item() == pytest.approx(8, abs=0.3)
    assert (fn.eval(tree, torch.ones(3, 8)) == 8 * 4 * fn.lora.scale).all()


def leaf_specs(specs: Any) -> dict[str, LayoutSpec]:
    return fs.tree.flatten_with_paths(specs, is_leaf=lambda s: isinstance(s, LayoutSpec))[0]


@pytest.mark.long  # test_frozen_leaves counts collectives of units
def test_adapters_join_the_unit_of_their_leaf_and_they_alone_are_reduced() -> None:
    fn, tree, _ = add_adapters(llama())
    mesh = fs.make_mesh(shard=8, abstract=True)
    specs = fs.presets.full_shard(tree, mesh)
    assert {s.unit for p, s in leaf_specs(specs).items() if "layers.1." in p} == {"base.model.layers.1"}
    low = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(0.1)).lower(tree, ids(8))
    reduced = {p for line in low.schedule.instructions if line.verb == "reduce_scatter" for p in line.paths}
    assert reduced == {f"adapters.{p}" for p in leaf_specs(specs["adapters"])}


@pytest.mark.suite({
    "nf4": "codes below adapters",
})  # fmt: skip
@pytest.mark.parametrize("codec", [None, "nf4"])
def test_frozen_leaves_have_no_gradient_no_optimizer_state_and_no_collective(codec: str | None) -> None:
    """Counted on the schedule and in the ledger: LoRA and QLoRA pay for what trains, the rest is stored."""
    fn, tree, _ = add_adapters(llama())
    mesh = fs.make_mesh(shard=8, abstract=True)
    frozen = LayoutSpec(P("shard"), codec=codec, trainable=False)
    specs = fs.match_specs(tree, [("base.*_proj*", frozen), ("*", LayoutSpec(P("shard")))])
    low = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(0.1)).lower(tree, ids(8))
    trained = {f"adapters.{p}" for p in leaf_specs(specs["adapters"])}
    for verb in ("reduce_scatter", "update"):
        lines = [line for line in low.schedule.instructions if line.verb == verb]
        assert sorted(p for line in lines for p in line.paths) == sorted(trained), "each of them, and once"
    assert not [line for line in low.schedule.instructions if line.verb == "all_reduce"]
    ledger = low.memory_analysis()
    of = {p: (size["gradient"], size["optimizer"], size["stored"]) for p, size in ledger.leaves.items()}
    parts = [p for p in of if "_proj" in p and p.startswith("base.")]
    assert len(parts) == 14 * (3 if codec else 1)  # codes, scales and scales of scales
    assert {p for p, (gradient, state, _) in of.items() if gradient or state} == trained
    assert all(gradient == size and state == 2 * size for gradient, state, size in map(of.get, trained))
    # In all, and not by leaf alone: full gradients, shards and states are the adapters'.
    assert ledger.resident["optimizer state"] == 2 * sum(of[p][2] for p in trained)
    whole = sum(v.numel() * 8 for a in tree["adapters"].values() for v in a.values())
    assert ledger.peak.get("gradients", 0) <= 2 * whole
    sent = low.comm_analysis()["reduce_scatter"]["bytes"]
    assert whole <= sent < 2 * whole  # a bucket's leaves begin at multiples of 128 bytes


@pytest.mark.long
def test_some_of_the_base_may_train_beside_them() -> None:
    fn, tree, _ = add_adapters(llama(), train="*norm*|lm_head")
    trained = {p for p, v in tree["base"].items() if v.requires_grad}
    assert trained == {p for p in tree["base"] if "norm" in p or p == "lm_head.weight"}
    specs = fs.match_specs(tree, [("*", LayoutSpec())])
    step = fs.shard_step(fn, specs, optimizer=fs.optim.adamw(0.01), backend="eager")
    state = step.init({k: {p: v.detach() if k == "base" else v for p, v in tree[k].items()} for k in tree})
    before = {p: v.clone() for p, v in state.params["base"].items()}
    losses = []
    for _ in range(4):
        state, metrics = step(state, ids())
        losses.append(metrics["loss"].item())
    assert losses[-1] < losses[0]
    assert {p for p, v in state.params["base"].items() if not torch.equal(v, before[p])} == trained


def test_complex_leaves_of_the_base_are_frozen_too() -> None:
    """A spectral layer has them (FNO)."""
    torch.manual_seed(0)
    params = {"w": torch.randn(4, 4), "modes": torch.nn.Parameter(torch.randn(4, dtype=torch.cfloat))}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(F.linear(x, p["w"])) * p["modes"]).abs().square().mean()

    for train in ("", "modes"):
        fn, tree = fs.lora(loss, params, rank=2, targets="w", train=train)
        specs = fs.match_specs(tree, [("*", LayoutSpec())])
        step = fs.shard_step(fn, specs, optimizer=fs.optim.sgd(0.1), backend="eager")
        state, _ = step(step.init(tree), torch.randn(2, 4))
        assert specs["base"]["modes"].trainable is bool(train)
        assert torch.equal(state.params["base"]["modes"], params["modes"]) is not bool(train)


def test_other_names_of_tied_leaves_are_those_of_the_base() -> None:
    """Of buffers as well; the leaves that were given keep their own."""
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
    model[1].weight = model[0].weight
    index = torch.arange(3)
    for each in model:
        each.register_buffer("index", index)
    _, params = fs.make_functional(model)
    _, tree = fs.lora(lambda p, x: x, {**params, "w": torch.ones(4, 4)}, rank=2, targets="w")
    for path, other in (("0.weight", "1.weight"), ("0.index", "1.index")):
        assert params[path].tied_names == (other,)
        assert tree["base"][path].tied_names == (f"base.{other}",)
    assert is_buffer(tree["base"]["0.index"])


# ------------------------------------------------------------------ merged, and PEFT's files


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_merging_shards_is_merging_the_whole(codec: str | None, tmp_path: Path) -> None:
    model = llama().float()
    fn, tree, loss = add_adapters(model)
    mesh = fs.make_mesh(shard=3, simulated=True)
    frozen = LayoutSpec(P("shard"), codec=codec, trainable=False)
    specs = fs.match_specs(tree, [("base.*_proj*", frozen), ("*", LayoutSpec(P("shard")))])

    def work(rank: int) -> Any:
        blocks, plain = adapters.merge(fs.shard(tree, specs, mesh), fn.lora, specs, mesh)
        fs.hf.save(blocks, tmp_path / "merged", plain, mesh, model=model, config=model.config)
        return fs.unshard(blocks, plain, mesh)

    whole = fs.simulate(mesh, work)[0]
    seen = {p: v.detach() for p, v in tree["base"].items()}
    if codec:
        for p in [p for p in seen if "_proj" in p]:
            seen[p] = CODECS[codec].decode(CODECS[codec].encode(seen[p]), tuple(seen[p].shape), torch.float32)
    naive = merge_naively(
        seen, fn.lora, {p: {n: v.detach() for n, v in a.items()} for p, a in tree["adapters"].items()}
    )
    for path, value in naive.items():
        torch.testing.assert_close(whole[path], value, atol=1e-6, rtol=1e-5)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = served(ids()).logits
        loss_there = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())
        torch.testing.assert_close(loss_there, loss(naive, ids()), atol=1e-5, rtol=1e-5)


def test_adapters_go_out_and_in_in_pefts_format(tmp_path: Path) -> None:
    fn, tree, _ = add_adapters(llama().float(), dropout=0.1)
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.match_specs(tree, [("*", LayoutSpec(P("shard")))])
    fs.simulate(
        mesh,
        lambda rank: adapters.save(fs.shard(tree, specs, mesh), tmp_path, fn.lora, specs, mesh, base="tiny"),
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert torch.equal(tensors[name], tree["adapters"]["model.layers.1.self_attn.q_proj.weight"]["a"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8.0, 0.1)
    assert "model.layers.0.mlp.down_proj" in config["target_modules"]
    asked, again = adapters.load(tmp_path, tree["base"])
    assert asked == fn.lora
    for path, adapter in tree["adapters"].items():
        assert all(torch.equal(again[path][n], adapter[n]) for n in "ab")


def test_peft_opens_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = llama().float()
    fn, tree, _ = add_adapters(model)
    apply, _ = fs.make_functional(model)
    logits, _ = fs.lora(lambda p, x: apply(p, input_ids=x).logits, tree["base"], rank=4, alpha=8,
                        targets="*.q_proj|*.v_proj|*.down_proj")  # fmt: skip
    adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    mine = logits(tree, ids())
    opened = peft.PeftModel.from_pretrained(model, str(tmp_path))  # it takes the module apart
    torch.testing.assert_close(opened(ids()).logits, mine, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("ranks", "biases"), [(1, False), (2, False), (1, True)])
def test_dora_is_pefts(tmp_path: Path, ranks: int, biases: bool) -> None:
    """Forward and gradients are those of PEFT for the same numbers; shards are merged and exported."""
    peft = pytest.importorskip("peft")
    model, targets = llama(attention_bias=biases, mlp_bias=biases).float(), "*.q_proj|*.down_proj"
    apply, params = fs.make_functional(model)
    with torch.no_grad():
        for path in [path for path in params if path.endswith("bias")]:
            params[path].normal_(generator=torch.Generator().manual_seed(3))
    fn, tree = fs.lora(lambda p, x: apply(p, input_ids=x).logits, params, rank=4, targets=targets, dora=True)
    with torch.no_grad():
        for parts in tree["adapters"].values():
            parts["b"].normal_(generator=torch.Generator().manual_seed(1))
            parts["g"].uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(2))
    mine = fn(tree, ids())
    mesh = fs.make_mesh(shard=ranks, simulated=True)
    specs = fs.match_specs(tree, [("*", LayoutSpec(P("shard")))])

    def written(rank: int) -> dict[str, torch.Tensor]:
        blocks = fs.shard(tree, specs, mesh)
        adapters.save(blocks, tmp_path, fn.lora, specs, mesh, base="tiny")
        merged, plain = adapters.merge(blocks, fn.lora, specs, mesh)
        return fs.unshard(merged, plain, mesh)

    merged = fs.simulate(mesh, written)[0]
    torch.testing.assert_close(apply(merged, input_ids=ids()).logits, mine, atol=1e-4, rtol=1e-4)
    opened = peft.PeftModel.from_pretrained(model, str(tmp_path), is_trainable=True)
    theirs = opened(ids()).logits
    torch.testing.assert_close(theirs, mine, atol=1e-4, rtol=1e-4)
    theirs.square().mean().backward()
    expected = {n: p.grad for n, p in opened.named_parameters() if p.grad is not None}
    gradients = torch.autograd.grad(mine.square().mean(), [parts["b"] for parts in tree["adapters"].values()])
    for leaf, gradient in zip(tree["adapters"], gradients, strict=True):
        name = f"base_model.model.{leaf.removesuffix('.weight')}.lora_B.default.weight"
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)

    def read(rank: int) -> tuple[Any, Any]:
        return adapters.load(tmp_path, fs.shard(tree, specs, mesh)["base"], specs["base"], mesh)

    for asked, found in [*fs.simulate(mesh, read), adapters.load(tmp_path, tree["base"])]:
        assert asked == fn.lora
        for path, parts in tree["adapters"].items():
            for name, value in parts.items():
                torch.testing.assert_close(found[path][name], value.detach(), atol=1e-6, rtol=1e-6)
    with raises(StateError, leaves=["params[", "meta"], fix="fs.adapters.load(path, blocks, specs, mesh)"):
        adapters.load(tmp_path, {path: leaf.to("meta") for path, leaf in tree["base"].items()})


PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def make_peft_model(model: Any, **how: Any) -> Any:
    """Make a model with adapters of PEFT's, of random numbers."""
    peft = pytest.importorskip("peft")
    found = peft.get_peft_model(model, peft.LoraConfig(**{**PLAIN, **how}))
    with torch.no_grad():
        for name, leaf in found.named_parameters():
            if leaf.requires_grad:
                leaf.add_(0.1 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(len(name))))
    return found.eval()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian", "layers_to_transform": [1]},
        {"target_modules": "all-linear", "task_type": "CAUSAL_LM"},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ],
)
def test_what_peft_has_saved_comes_in_and_goes_out_again(tmp_path: Path, how: dict[str, Any]) -> None:
    """PEFT, this library and PEFT again give the same logits."""
    peft = pytest.importorskip("peft")
    gpt2 = "fan_in_fan_out" in how
    plain = gpt2_model if gpt2 else lambda: llama().float()
    theirs = make_peft_model(plain(), **how)
    expected = theirs(ids()).logits
    theirs.save_pretrained(tmp_path / "theirs")
    model = plain()
    apply, params = fs.make_functional(model)
    asked, values = adapters.load(tmp_path / "theirs", params)
    fn = with_adapters(lambda p, x: apply(p, input_ids=x).logits, replace(asked, dropout=0.0))
    tree = {"base": params, "adapters": values}
    torch.testing.assert_close(fn(tree, ids()), expected, atol=1e-4, rtol=1e-4)
    specs = fs.match_specs(tree, [("adapters.*", LayoutSpec()), ("*", LayoutSpec(trainable=False))])
    adapters.save(tree, tmp_path / "ours", asked, specs)
    assert adapters.load(tmp_path / "ours", params)[0] == asked
    again = peft.PeftModel.from_pretrained(model, str(tmp_path / "ours")).eval()
    torch.testing.assert_close(again(ids()).logits, expected, atol=1e-4, rtol=1e-4)


def gpt2_model() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 128}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


@pytest.mark.parametrize(
    ("how", "leaves"),
    [
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "whole modules"]),
        ({"bias": "all"}, ["bias", "biases of the base"]),
        ({"bias": "lora_only"}, ["bias", "biases of the base"]),
        ({"lora_bias": True}, ["lora_bias", "biases of adapters"]),
        ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices", "an embedding"]),
        ({"rank_pattern": {"down_proj": 2}}, ["rank_pattern", "ranks"]),
        ({"alpha_pattern": {"down_proj": 2}}, ["alpha_pattern", "alphas"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights", "the base"]),
        ({"layer_replication": [[0, 2], [1, 2]]}, ["layer_replication", "twice"]),
        ({"target_modules": ["embed_tokens"]}, ["lora_embedding_A", "an embedding"]),
        (
            {"target_modules": ["q_proj", "lm_head"], "use_new_kind": True},
            ["use_new_kind", "another kind"],
        ),
        ({"new_config": {"size": 2}}, ["new_config", "another kind"]),
    ],
)
def test_what_peft_has_and_this_has_not_is_refused_by_kind(
    tmp_path: Path, how: dict[str, Any], leaves: list[str]
) -> None:
    later = {key: how[key] for key in how if key.startswith(("new_", "use_new"))}
    known = {key: value for key, value in how.items() if key not in later}
    make_peft_model(llama().float(), **known).save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "new_size": 16, **later}))
    with raises(StateError, leaves=leaves, says="merge_and_unload"):
        adapters.load(tmp_path, fs.make_functional(llama().float())[1])


def test_rows_of_zeros_stay_zeros_under_dora(tmp_path: Path) -> None:
    """A padded vocabulary has such rows: their norm is 0, and so is that of what they become."""
    params = {"w": torch.nn.Parameter(torch.cat([torch.ones(2, 3), torch.zeros(1, 3)]))}
    fn, tree = fs.lora(lambda p, x: F.linear(x, p["w"]), params, rank=1, targets="w", dora=True)
    assert torch.equal(fn(tree, torch.ones(1, 3)), torch.tensor([[3.0, 3.0, 0.0]]))
    adapters.save(
        tree,
        tmp_path,
        fn.lora,
        fs.match_specs(tree, [("base.*", LayoutSpec(trainable=False)), ("*", LayoutSpec())]),
    )
    assert torch.equal(adapters.load(tmp_path, params)[1]["w"]["g"], torch.ones(3))


def test_a_norm_of_a_row_that_is_zero_in_the_base_is_refused(tmp_path: Path) -> None:
    """No share of 0 is the norm that PEFT's file holds."""
    params = {"w": torch.nn.Parameter(torch.ones(3, 3))}
    fn, tree = fs.lora(lambda p, x: F.linear(x, p["w"]), params, rank=1, targets="w", dora=True)
    specs = fs.match_specs(tree, [("base.*", LayoutSpec(trainable=False)), ("*", LayoutSpec())])
    adapters.save(tree, tmp_path, fn.lora, specs)
    padded = {"w": torch.cat([torch.ones(2, 3), torch.zeros(1, 3)])}
    with raises(StateError, leaves="params['w']", fix="merge_and_unload", says="1 of its rows"):
        adapters.load(tmp_path, padded)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    fn, tree, _ = add_adapters(llama().float())
    adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    shapes = {p: v for p, v in tree["base"].items() if "layers.1" not in p}
    shapes["model.layers.0.self_attn.q_proj.weight"] = torch.empty(64, 65)
    with raises(StateError, leaves=["layers.1", "[64, 65]"], says=["7 leaves", "no such leaf"]):
        adapters.load(tmp_path, shapes)
    with raises(StateError, leaves=str(tmp_path / "no")):
        adapters.load(tmp_path / "no", shapes)
    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with raises(StateError, leaves="'IA3'", says="LoRA"):
        adapters.load(tmp_path, shapes)
    with raises(StateError, leaves="fs.lora", fix=["specs=", "mesh="]):
        adapters.merge({"w": torch.zeros(2)}, fn.lora)
