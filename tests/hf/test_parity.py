"""Parity: the same numbers as one process, PEFT and bitsandbytes give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, codecs
from fnshard.adapters.lora import with_adapters
from fnshard.runtime.packing import local_block

# ------------------------------------------------------------------ sharded, and one process

WIDTH, WORDS, LAYERS = 70, 24, 2  # 70 is no multiple of a block, nor of 4 ranks
ROWS = 2  # of a rank and micro-batch


def model() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    out = {"embed": noise(WORDS, WIDTH) * 4}
    for i in range(LAYERS):
        out[f"layers.{i}.q_proj.weight"] = noise(WIDTH, WIDTH)
        out[f"layers.{i}.q_proj.bias"] = noise(WIDTH)
        out[f"layers.{i}.down"] = noise(WIDTH, WIDTH)  # [in, out]
    return out


def next_word(p: Any, words: Tensor, targets: Tensor) -> Tensor:
    x = F.embedding(words, p["embed"])
    for i in range(LAYERS):
        y = F.linear(x, p[f"layers.{i}.q_proj.weight"], p[f"layers.{i}.q_proj.bias"])
        x = x + torch.tanh(y) @ p[f"layers.{i}.down"]
    return F.cross_entropy(F.linear(x, p["embed"]).flatten(0, 1), targets.flatten())


def tuned(dropout: float = 0.0) -> tuple[Any, Any]:
    fn, tree = fs.lora(
        next_word, model(), rank=3, alpha=5, targets="*.q_proj|*.down", transposed="*.down", dropout=dropout
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in tree["adapters"].values():
            adapter["b"].normal_(std=0.3, generator=generator)
    return fn, tree


def is_coded(path: str) -> bool:
    return path.startswith("base.layers") and not path.endswith("bias")


def as_decoded(tree: Any, codec: str | None) -> Any:
    """Return full leaves; coded ones as their codes say."""

    def seen(path: str, value: Tensor) -> Tensor:
        if codec is None or not is_coded(path):
            return value.detach().clone()
        return codecs.CODECS[codec].decode(
            codecs.CODECS[codec].encode(value.detach()), tuple(value.shape), torch.float64
        )

    named, structure = fs.tree.flatten_with_paths(tree)
    return fs.tree.unflatten([seen(p, v) for p, v in named.items()], structure)


def specs_of(tree: Any, preset: str, mesh: fs.Mesh, codec: str | None, **policy: Any) -> Any:
    """Return a preset's specs, with codes where the base has them."""
    plain = fs.presets.PRESETS[preset](tree, mesh)
    coded = fs.presets.PRESETS[preset](tree, mesh, codec=codec, trainable=False, **policy)
    named, structure = fs.tree.flatten_with_paths(plain, is_leaf=lambda s: isinstance(s, LayoutSpec))
    others = fs.tree.flatten_with_paths(coded, is_leaf=lambda s: isinstance(s, LayoutSpec))[0]
    return fs.tree.unflatten([others[p] if is_coded(p) else s for p, s in named.items()], structure)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randint(WORDS, (rows, 5), generator=generator) for _ in range(2))


def gradients(
    mesh: fs.Mesh, rank: int, fn: Any, tree: Any, specs: Any, **options: Any
) -> tuple[float, dict[str, Tensor], list[str]]:
    """Return the loss, this rank's blocks of adapters' gradients, and the base's leaves that have one."""
    rows = ROWS * options.get("accumulate", 1)
    words, targets = batch(rows * mesh.size)
    mine = slice(rows * rank, rows * (rank + 1))
    step = fs.shard_step(fn, specs, mesh=mesh, **{"backend": "eager", **options})
    loss, grads = step(fs.shard(tree, specs, mesh), words[mine], targets[mine])
    named = fs.tree.flatten_with_paths(grads)[0]
    surplus = [p for p, g in named.items() if p.startswith("base") and g is not None]
    return float(loss), {p: g for p, g in named.items() if p.startswith("adapters")}, surplus


# Ranks, preset, codec, options of the step, policy of the codes.
CASES: list[Any] = [
    (2, "full_shard", "nf4", {"remat": "unit", "accumulate": 2}, {}),
    (2, "zero1", "nf4", {"remat": "unit", "accumulate": 2}, {"memory": "host"}),
    (2, "full_shard", "int8", {"remat": "unit+offload"}, {"memory": "host"}),
    (4, "hybrid_shard", "nf4", {}, {}),
    (2, "full_shard", "nf4", {"backend": "inductor"}, {}),
]


@pytest.mark.suite({
    "2-full_shard-int8-*": "of one byte",
})  # fmt: skip
@pytest.mark.parametrize(("world", "preset", "codec", "options", "policy"), CASES)
def test_qlora_sharded_is_one_process_that_decodes_the_same_codes(
    world: int, preset: str, codec: str, options: Any, policy: Any
) -> None:
    """Losses and adapter gradients, fp64 to 1e-10; the base has no gradient."""
    axes = {"replicate": 2, "shard": world // 2} if preset == "hybrid_shard" else {"shard": world}
    mesh = fs.make_mesh(**axes, simulated=True)
    fn, tree = tuned()
    whole = as_decoded(tree, codec)
    for adapter in whole["adapters"].values():
        for part in adapter.values():
            part.requires_grad_()
    known = fn(whole, *batch(ROWS * options.get("accumulate", 1) * world))
    known.backward()
    expected = fs.tree.flatten_with_paths(whole)[0]
    specs = specs_of(tree, preset, mesh, codec, **policy)
    layout = fs.tree.flatten_with_paths(specs, is_leaf=lambda s: isinstance(s, LayoutSpec))[0]

    def work(rank: int) -> tuple[float, float, list[str]]:
        loss, grads, surplus = gradients(mesh, rank, fn, tree, specs, **options)
        off = [
            (g - local_block(expected[p].grad, layout[p].gradient, mesh)).abs().max()
            for p, g in grads.items()
        ]
        return abs(loss - known.item()), float(torch.stack(off).max()), surplus

    for off, worst, surplus in fs.simulate(mesh, work):
        assert off < 1e-10 and worst < 1e-10
        assert surplus == []


@pytest.mark.long  # test_tensor_axis and test_remat have masks
def test_dropout_in_adapters_is_the_same_under_any_layout() -> None:
    """Masks depend on seed, step and rank alone: codes, sharded and recomputed, against whole weights."""
    mesh, (fn, tree) = fs.make_mesh(shard=2, simulated=True), tuned(dropout=0.4)
    decoded = as_decoded(tree, "nf4")
    specs = specs_of(tree, "full_shard", mesh, "nf4")
    plain = specs_of(tree, "no_shard", mesh, None)

    def work(rank: int) -> Any:
        one = gradients(mesh, rank, fn, tree, specs, remat="unit", accumulate=2)
        other = gradients(mesh, rank, fn, decoded, plain, accumulate=2)
        without = gradients(mesh, rank, fn.eval, decoded, plain, accumulate=2)
        layout = fs.tree.flatten_with_paths(specs, is_leaf=lambda s: isinstance(s, LayoutSpec))[0]
        off = [
            (g - local_block(other[1][p], layout[p].gradient, mesh)).abs().max() for p, g in one[1].items()
        ]
        return abs(one[0] - other[0]), float(torch.stack(off).max()), abs(one[0] - without[0])

    for off, worst, drawn in fs.simulate(mesh, work):
        assert off < 1e-10 and worst < 1e-10
        assert drawn > 1e-3


# ------------------------------------------------------------------ PEFT


def peft_models(name: str) -> tuple[Any, Any, str, str]:
    """Return a model, its LoRA by PEFT, our targets, and those that are [in, out]."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 48}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=2, vocab_size=48, n_positions=16,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        made, targets, turned = transformers.GPT2LMHeadModel(config), ["c_attn", "mlp.c_proj"], "*"
    else:  # with biases
        config = transformers.Qwen2Config(**sizes, intermediate_size=48, num_key_value_heads=2)
        made, targets, turned = transformers.Qwen2ForCausalLM(config), ["q_proj", "v_proj", "down_proj"], ""
        for n, p in made.named_parameters():
            if n.endswith("bias"):
                torch.nn.init.normal_(p)
    asked = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, use_rslora=name == "rslora", fan_in_fan_out=name == "gpt2",
        lora_dropout=0.0, task_type="CAUSAL_LM",
    )  # fmt: skip
    apply, params = fs.make_functional(copy.deepcopy(made))  # theirs is taken apart
    params = {p: v.detach().clone() for p, v in params.items()}
    theirs = peft.get_peft_model(made, asked)
    for n, p in theirs.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p, std=0.2)
    return (apply, params), theirs, "|".join(f"*.{t}" for t in targets), turned


@pytest.mark.parametrize("name", ["qwen2", "rslora", "gpt2"])
def test_losses_and_adapter_gradients_are_pefts(name: str, tmp_path: Any) -> None:
    (apply, params), theirs, targets, turned = peft_models(name)
    theirs.save_pretrained(tmp_path)
    words = torch.randint(48, (3, 9), generator=torch.Generator().manual_seed(3))

    def loss(p: Any, words: Tensor) -> Tensor:
        logits = apply(p, input_ids=words, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    fn, _ = fs.lora(
        loss, params, rank=4, alpha=6, targets=targets, transposed=turned, rank_stabilised=name == "rslora"
    )
    asked, adapters = fs.adapters.load(tmp_path, params)
    assert asked == fn.lora
    mine = {p: {n: v.requires_grad_() for n, v in a.items()} for p, a in adapters.items()}
    ours = with_adapters(loss, asked)({"base": params, "adapters": mine}, words)
    ours.backward()
    logits = theirs(input_ids=words).logits
    known = F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
    known.backward()
    torch.testing.assert_close(ours, known, atol=1e-6, rtol=1e-6)
    assert known.item() != pytest.approx(loss(params, words).item(), abs=1e-3)  # the adapters do something
    wanted = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert len(wanted) == 2 * len(asked.targets)
    for path, parts in mine.items():
        for part, value in parts.items():
            name_there = f"base_model.model.{path.removesuffix('.weight')}.lora_{part.upper()}.default.weight"
            torch.testing.assert_close(value.grad, wanted[name_there], atol=1e-6, rtol=1e-4)


# ------------------------------------------------------------------ bitsandbytes


def rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


def theirs_nf4(rows: Tensor, double: bool) -> tuple[Tensor, Tensor]:
    """Return bitsandbytes' codes, two a byte, and what those decode to."""
    reference = pytest.importorskip("bitsandbytes.functional")
    codes, state = reference.quantize_4bit(rows, blocksize=64, quant_type="nf4", compress_statistics=double)
    return codes, reference.dequantize_4bit(codes, state)


def ours(rows: Tensor, codec: str) -> tuple[dict[str, Tensor], Tensor]:
    chosen = codecs.CODECS[codec]
    parts = chosen.encode(rows)
    return parts, chosen.decode(parts, tuple(rows.shape), torch.float32)


def unlike(seed: int = 0) -> Tensor:
    """Draw rows of blocks of different sizes, some of them with one weight far out."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(32, 64 * 20, generator=generator) * torch.rand(32, 1, generator=generator).exp()
    rows[::4, 7] *= 50
    return rows


def test_nf4_is_the_reference_quantisers_where_scales_are_exact() -> None:
    """Blocks of one largest weight: the second quantisation has nothing to round."""
    reference = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(reference.get_4bit_type("nf4", device="cpu"), torch.tensor(codecs.NF4))
    rows = torch.rand(8, 20, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    rows[:, :, 11] = 0.5
    rows = rows.view(8, -1)
    codes, values = theirs_nf4(rows, double=False)
    parts, decoded = ours(rows, "nf4")
    assert torch.equal(parts["codes"].flatten(), codes.flatten())
    assert torch.equal(decoded, values)


def test_int8_is_the_reference_quantisers() -> None:
    reference = pytest.importorskip("bitsandbytes.functional")
    rows = unlike()
    parts, decoded = ours(rows, "int8")
    codes, sizes, _ = reference.int8_vectorwise_quant(rows.view(-1, 64))
    assert torch.equal(parts["codes"], codes.view(32, -1))
    torch.testing.assert_close(parts["scales"] * 127, sizes.view(32, -1), atol=0, rtol=1e-6)
    linear = reference.create_linear_map(True, 8)
    blocks = reference.dequantize_blockwise(*reference.quantize_blockwise(rows, code=linear, blocksize=64))
    assert rms(decoded - rows) == pytest.approx(rms(blocks - rows), rel=1e-4)
