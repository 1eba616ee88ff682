"""LoRA: adapters beside frozen weights of any pure function, sharded and coded like everything else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P, adapters
from fnshard.errors import SpecError, StateError, TraceError
from fnshard.layout.codecs import CODECS

transformers = pytest.importorskip("transformers")


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def tuned(model: Any, targets: str = "*.q_proj|*.v_proj|*.down_proj", **more: Any) -> tuple[Any, Any, Any]:
    """The function with adapters, its tree with a B that is not zero, and the function without."""
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


def merged(base: dict[str, Tensor], asked: Any, found: Any) -> dict[str, Tensor]:
    """The naive way: W + s B A."""
    out = dict(base)
    for path, adapter in found.items():
        update = asked.scale * adapter["b"] @ adapter["a"]
        out[path] = base[path] + (update.t() if path in asked.transposed else update)
    return out


def ids(rows: int = 4) -> Tensor:
    return torch.randint(64, (rows, 12), generator=torch.Generator().manual_seed(2))


# ------------------------------------------------------------------ what it computes


def test_at_first_it_changes_nothing_and_then_it_is_the_merged_weight() -> None:
    model = llama()
    apply, params = fs.make_functional(model)
    fn, tree = fs.lora(lambda p, x: apply(p, input_ids=x).logits, params, rank=3)
    assert torch.equal(fn(tree, ids()), apply(params, input_ids=ids()).logits)
    fn, tree, loss = tuned(model)
    naive = loss(merged(tree["base"], fn.lora, tree["adapters"]), ids())
    torch.testing.assert_close(fn(tree, ids()), naive, atol=1e-12, rtol=0)
    assert len(fn.lora.targets) == 2 * 3


def test_matrices_that_are_multiplied_as_they_are() -> None:
    """GPT-2's addmm, x @ w, matmul and mm."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    fn, tree, loss = tuned(transformers.GPT2LMHeadModel(config).double(), "*.c_attn", transposed="*.c_attn")
    naive = loss(merged(tree["base"], fn.lora, tree["adapters"]), ids())
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
        torch.testing.assert_close(fn(tree, x), x @ merged(tree["base"], fn.lora, tree["adapters"])["w"])


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


@pytest.mark.parametrize("codec", [None, "int8", "nf4"])
@pytest.mark.parametrize("world", [2, 4])
def test_sharded_it_is_the_reference_and_the_base_has_no_gradient(codec: str | None, world: int) -> None:
    """Losses and adapter gradients, fp64 to 1e-10: of one process that decodes the same codes."""
    fn, tree, _ = tuned(llama(tie_word_embeddings=True))
    coded = [p for p in fs.make_functional(llama())[1] if "_proj" in p]

    def seen(path: str, value: Tensor) -> Tensor:
        if codec is None or path not in coded:
            return value.detach()
        chosen = CODECS[codec]
        return chosen.decode(chosen.encode(value.detach()), tuple(value.shape), torch.float64)

    base = {p: seen(p, v) for p, v in tree["base"].items()}
    wanted = {
        p: {n: v.detach().clone().requires_grad_() for n, v in a.items()} for p, a in tree["adapters"].items()
    }
    rows = ids(2 * world)
    loss = fn({"base": base, "adapters": wanted}, rows)
    loss.backward()
    mesh = fs.make_mesh(shard=world, simulated=True)
    frozen = LayoutSpec(P("shard"), codec=codec, trainable=False)
    specs = fs.match_specs(
        tree, [("base.*_proj*", frozen), ("base.*", LayoutSpec(P("shard"))), ("*", LayoutSpec(P("shard")))]
    )
    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager", remat="unit")

    def work(rank: int) -> Any:
        got, grads = step(fs.shard(tree, specs, mesh), rows[2 * rank : 2 * rank + 2])
        whole = {p: {n: v.grad for n, v in a.items()} for p, a in wanted.items()}
        cut = fs.shard(whole, specs["adapters"], mesh)
        worst = max((grads["adapters"][p][n] - cut[p][n]).abs().max().item() for p in cut for n in "ab")
        others = [g for g in fs.tree.flatten(grads["base"])[0] if g is not None]
        return abs(float(got) - loss.item()), worst, len(others)

    results = fs.simulate(mesh, work)
    for off, worst, others in results:
        assert off < 1e-10
        assert worst < 1e-10
        assert others == 0


def leaf_specs(specs: Any) -> dict[str, LayoutSpec]:
    return fs.tree.flatten_with_paths(specs, is_leaf=lambda s: isinstance(s, LayoutSpec))[0]


def test_adapters_join_the_unit_of_their_leaf_and_they_alone_are_reduced() -> None:
    fn, tree, _ = tuned(llama())
    mesh = fs.make_mesh(shard=8, abstract=True)
    specs = fs.presets.full_shard(tree, mesh)
    assert {s.unit for p, s in leaf_specs(specs).items() if "layers.1." in p} == {"base.model.layers.1"}
    low = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(0.1)).lower(tree, ids(8))
    reduced = {p for line in low.schedule.instructions if line.verb == "reduce_scatter" for p in line.paths}
    assert reduced == {f"adapters.{p}" for p in leaf_specs(specs["adapters"])}


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_frozen_leaves_have_no_gradient_no_optimizer_state_and_no_collective(codec: str | None) -> None:
    """Counted on the schedule and in the ledger: LoRA and QLoRA pay for what trains, the rest is stored."""
    fn, tree, _ = tuned(llama())
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
    assert 0 < ledger.peak["gradients"] <= 2 * whole
    sent = low.comm_analysis()["reduce_scatter"]["bytes"]
    assert whole <= sent < 2 * whole  # a bucket's leaves begin at multiples of 128 bytes


def test_some_of_the_base_may_train_beside_them() -> None:
    fn, tree, _ = tuned(llama(), train="*norm*|lm_head")
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


# ------------------------------------------------------------------ merged, and PEFT's files


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_merging_shards_is_merging_the_whole(codec: str | None, tmp_path: Path) -> None:
    model = llama().float()
    fn, tree, loss = tuned(model)
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
    naive = merged(
        seen, fn.lora, {p: {n: v.detach() for n, v in a.items()} for p, a in tree["adapters"].items()}
    )
    for path, value in naive.items():
        torch.testing.assert_close(whole[path], value, atol=1e-6, rtol=1e-5)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = served(ids()).logits
        loss_there = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())
        torch.testing.assert_close(loss_there, loss(naive, ids()), atol=1e-5, rtol=1e-5)


def test_merging_keeps_every_digit() -> None:
    fn, tree, _ = tuned(llama())  # fp64
    whole, _ = adapters.merge(tree, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    for path, value in merged(tree["base"], fn.lora, tree["adapters"]).items():
        torch.testing.assert_close(whole[path], value.detach(), atol=1e-14, rtol=0)


def test_adapters_go_out_and_in_in_pefts_format(tmp_path: Path) -> None:
    fn, tree, _ = tuned(llama().float(), dropout=0.1)
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
    fn, tree, _ = tuned(model)
    apply, _ = fs.make_functional(model)
    logits, _ = fs.lora(lambda p, x: apply(p, input_ids=x).logits, tree["base"], rank=4, alpha=8,
                        targets="*.q_proj|*.v_proj|*.down_proj")  # fmt: skip
    adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    mine = logits(tree, ids())
    opened = peft.PeftModel.from_pretrained(model, str(tmp_path))  # it takes the module apart
    torch.testing.assert_close(opened(ids()).logits, mine, atol=1e-5, rtol=1e-5)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    fn, tree, _ = tuned(llama().float())
    adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    shapes = {p: v for p, v in tree["base"].items() if "layers.1" not in p}
    shapes["model.layers.0.self_attn.q_proj.weight"] = torch.empty(64, 65)
    with pytest.raises(
        StateError, match=r"(?s)of another model, 7 leaves.*layers\.1.*no such leaf.*\[64, 65\]"
    ):
        adapters.load(tmp_path, shapes)
    with pytest.raises(StateError, match="holds no adapters"):
        adapters.load(tmp_path / "no", shapes)
    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(StateError, match="holds 'IA3' adapters"):
        adapters.load(tmp_path, shapes)
    with pytest.raises(StateError, match=r"not the base and adapters of fs\.lora"):
        adapters.merge({"w": torch.zeros(2)}, fn.lora)


# ------------------------------------------------------------------ what is refused


def test_mistakes_are_named() -> None:
    params = {"layers.0.q_proj.weight": torch.zeros(4, 4), "norm": torch.ones(4)}

    def fn(p: Any, x: Tensor) -> Tensor:
        return (x * p["norm"]).sum() + p["layers.0.q_proj.weight"].sum()

    with pytest.raises(
        SpecError, match=r"(?s)targets='\*\.k_proj\|\*\.q_proj' matches no leaf by:.*\*\.k_proj"
    ):
        fs.lora(fn, params, targets="*.k_proj|*.q_proj")
    with pytest.raises(
        SpecError, match=r"(?s)1 leaf cannot have an adapter.*params\['norm'\] \[4\].*no matrix"
    ):
        fs.lora(fn, params, targets="norm")
    with pytest.raises(SpecError, match="trains and has an adapter"):
        fs.lora(fn, params, targets="*.q_proj", train="*.q_proj")
    tuned_fn, tree = fs.lora(fn, params, rank=4, targets="*.q_proj")
    with pytest.raises(
        TraceError, match=r"(?s)q_proj.*multiplies by it nowhere.*gives it to sum.*transposed="
    ):
        tuned_fn(tree, torch.ones(4))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rank": 0}, "rank=0: a whole number from 1"),
        ({"rank": -2}, "rank=-2"),
        ({"rank": 2.0}, r"rank=2\.0"),
        ({"rank": True}, "rank=True"),
        ({"rank": "8"}, "rank='8'"),
        ({"rank": 5}, r"(?s)2 leaves.*'a'\] \[4, 9\]: rank=5 is more than 4.*'b'\] \[9, 4\].*smaller rank"),
        ({"alpha": 0}, "alpha=0: a number above 0"),
        ({"alpha": -1.0}, r"alpha=-1\.0"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"alpha": "16"}, "alpha='16'"),
        ({"alpha": None}, "alpha=None"),
        ({"dropout": 1.0}, r"dropout=1\.0: a share from 0, below 1"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"dropout": "0.1"}, r"dropout='0\.1'"),
        ({"rank": 0, "alpha": 0, "dropout": -1}, "(?s)rank=0.*alpha=0.*dropout=-1"),
        ({"targets": 5}, "targets=5: globs of leaves"),
        ({"targets": ["a", 5]}, r"targets=\['a', 5\]: globs"),
        ({"targets": []}, "targets='' matches no leaf"),
        ({"transposed": 5}, "transposed=5: globs"),
        ({"train": 5}, "train=5: globs"),
    ],
)
def test_numbers_and_globs_that_are_none(wrong: dict[str, Any], says: str) -> None:
    params = {"a": torch.zeros(4, 9), "b": torch.zeros(9, 4)}
    with pytest.raises(SpecError, match=says):
        fs.lora(lambda p, x: x, params, **{"rank": 2, "targets": "a|b", **wrong})


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ([], "holds 'list' adapters; only LoRA"),
        ({"peft_type": None}, "holds None adapters"),
        ({"r": ...}, "(?s)is not one that can be read here.*r is missing, wanted is a whole number"),
        ({"r": "4", "lora_alpha": ...}, '(?s)r is "4".*lora_alpha is missing'),
        ({"r": True}, "r is true"),
        ({"r": None}, "r is null"),
        ({"r": 4.0}, r"r is 4\.0"),
        ({"lora_alpha": math.nan}, "lora_alpha is NaN, wanted is a number above 0"),
        ({"lora_alpha": [8]}, r"lora_alpha is \[8\]"),
        ({"lora_dropout": 1}, "lora_dropout is 1, wanted is a share"),
        ({"use_rslora": "yes"}, 'use_rslora is "yes"'),
        ({"fan_in_fan_out": 1}, "fan_in_fan_out is 1, wanted is true or false"),
        ({"use_dora": True}, "use_dora is true, which is not known here"),
        (
            {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 9}},
            "(?s)rank_pattern is.*alpha_pattern is",
        ),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa", wanted is one that leaves the base'),
        ({"r": 8}, "(?s)of another model, 6 leaves.*a, b are"),
    ],
)
def test_odd_configurations_of_adapters_are_refused(odd: Any, says: str, saved_adapters: Any) -> None:
    folder, shapes = saved_adapters
    config = odd if isinstance(odd, list) else {k: v for k, v in {**CONFIG, **odd}.items() if v is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(StateError, match=says):
        adapters.load(folder, shapes)


@pytest.mark.parametrize("modules", ["all-linear", r".*\.(q|v)_proj", None, ["q_proj"], {"a": 1}])
def test_the_tensors_say_what_is_targeted_whatever_the_configuration_matches_by(
    modules: Any, saved_adapters: Any
) -> None:
    folder, shapes = saved_adapters
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": modules}))
    asked, found = adapters.load(folder, shapes)
    assert asked.targets == tuple(found) and len(found) == 6
    assert (asked.rank, asked.alpha, asked.dropout, asked.rank_stabilised) == (4, 8.0, 0.0, False)


@pytest.fixture
def saved_adapters(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    fn, tree, _ = tuned(llama().float())
    adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    return tmp_path, tree["base"]


def test_files_of_adapters_that_are_broken_or_empty(saved_adapters: Any) -> None:
    folder, shapes = saved_adapters
    kept = load_file(folder / "adapter_model.safetensors")
    first, *_ = kept
    save_file({n: v for n, v in kept.items() if n != first}, folder / "adapter_model.safetensors")
    with pytest.raises(StateError, match=r"(?s)1 leaf.*: a, b are \{'[ab]'"):
        adapters.load(folder, shapes)
    vector = {
        n.replace("self_attn.q_proj", "input_layernorm"): v
        for n, v in kept.items()
        if "layers.0.self_attn.q" in n
    }
    save_file(vector, folder / "adapter_model.safetensors")
    with pytest.raises(StateError, match=r"(?s)1 leaf.*input_layernorm.*\[64\].*not of a matrix"):
        adapters.load(folder, shapes)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(StateError, match="holds no tensors"):
        adapters.load(folder, shapes)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(StateError, match=r"holds no adapters of PEFT's.*Expecting"):
        adapters.load(folder, shapes)
    (folder / "adapter_config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(StateError, match=r"holds no adapters of PEFT's"):
        adapters.load(folder, shapes)


def test_which_leaves_are_in_out_is_read_from_their_shapes(tmp_path: Path) -> None:
    """PEFT says it of all or none; a square leaf goes by what it says."""
    tensors = {}
    for leaf, rows, columns in (("straight", 6, 9), ("turned", 9, 6), ("square", 6, 6)):
        name = f"base_model.model.{leaf}.lora_"
        tensors |= {f"{name}A.weight": torch.ones(2, columns), f"{name}B.weight": torch.ones(rows, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    shapes = {n: torch.empty(*s) for n, s in (("straight", (6, 9)), ("turned", (6, 9)), ("square", (6, 6)))}
    for said, wanted in ((False, ("turned",)), (True, ("turned", "square"))):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": 2, "fan_in_fan_out": said}))
        assert adapters.load(tmp_path, shapes)[0].transposed == wanted


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.mid = nn.Linear(4, 4)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mid(self.embed(x)))

    apply, params = fs.make_functional(Tied())
    _, tree = fs.lora(lambda p, x: apply(p, x).sum(), params, rank=2, targets="mid")
    specs = fs.match_specs(tree, [("base.head.weight", LayoutSpec()), ("*", LayoutSpec())])
    assert list(specs["base"]) == ["embed.weight", "mid.weight", "mid.bias"]


def test_a_target_that_is_used_twice_is_refused() -> None:
    """What is merged would be another function."""

    def fn(p: Any, x: Tensor) -> Tensor:
        return F.linear(F.embedding(x, p["w"]), p["w"])

    tuned_fn, tree = fs.lora(fn, {"w": torch.randn(5, 4)}, rank=4, targets=["w"])
    with pytest.raises(TraceError, match=r"(?s)1 leaf cannot.*`fn` also gives it to embedding.*tied"):
        tuned_fn(tree, torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda x, w: torch.cat([w, w]).sum(), "cat"),
        (lambda x, w: torch.stack(tensors=[w]).sum(), "stack"),
        (lambda x, w: torch.add(x.sum(), other=w).sum(), "add"),
        (lambda x, w: torch.einsum("bi,oi->bo", x, w).sum(), "einsum"),
        (lambda x, w: torch.where(w > 0, w, 0.0).sum(), "where"),
        (lambda x, w: w.unbind(0)[0].sum(), "unbind"),
        (lambda x, w: F.linear(w, w).sum(), "linear"),
        (lambda x, w: F.linear(input=w, weight=x).sum(), "linear"),
        (lambda x, w: torch.mm(x, w.t()).sum(), "t"),
    ],
)
def test_a_target_that_also_goes_elsewhere_is_refused_in_whatever_it_lies(use: Any, told: str) -> None:
    """In lists, by keyword, beside itself, or where a tuple comes of it."""
    tuned_fn, tree = fs.lora(
        lambda p, x: F.linear(x, p["w"]).sum() + use(x, p["w"]), {"w": torch.randn(4, 4)}, rank=2, targets="w"
    )
    with pytest.raises(TraceError, match=rf"(?s)1 leaf cannot.*`fn` also gives it to .*\b{told}\b"):
        tuned_fn(tree, torch.ones(3, 4))
    plain, tree = fs.lora(
        lambda p, x: F.linear(x, p["w"]) * len(p["w"].shape) * p["w"].numel(),
        tree["base"],
        rank=2,
        targets="w",
    )
    plain(tree, torch.ones(3, 4))  # asking for a shape is no use


def test_a_product_that_does_more_is_refused() -> None:
    """Of `alpha` and `out` the update would know nothing."""
    for more in ({"alpha": 2.0}, {"beta": 0.5}, {"out": torch.empty(3, 4)}):

        def fn(p: Any, x: Tensor, more: Any = more) -> Tensor:
            with torch.no_grad():
                return torch.addmm(torch.zeros(4), x, p["w"], **more)

        tuned_fn, tree = fs.lora(fn, {"w": torch.randn(4, 4)}, rank=2, targets="w", transposed="w")
        with pytest.raises(TraceError, match=r"(?s)multiplies by it nowhere.*also gives it to addmm"):
            tuned_fn(tree, torch.ones(3, 4))


def test_what_pefts_files_have_no_place_for_is_refused(tmp_path: Path) -> None:
    fn, tree, _ = tuned(llama().float(), train="*norm*")
    with pytest.raises(StateError, match=r"(?s)train beside the adapters:.*norm.*fs\.adapters\.merge"):
        adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    assert list(tmp_path.iterdir()) == []
