"""What a step can do, on a mesh with a tensor axis: presets, remat, accumulation, tiers, optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import optimizers
import pytest
import reference
import torch
import torch.nn.functional as F
from models import Model
from sharded import as_float, assert_floats, assert_same, by_steps, make_step, specs_of, train
from tensor_models import decoder, logits
from torch import Tensor

import fnshard as fs

AXES = {"shard": 2, "tensor": 2}
ADAMW = fs.optim.adamw(1e-2, weight_decay=0.1)
CLIP = 0.05
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(CLIP), fs.optim.sgd(0.1))
HOST = {"memory": "host", "optimizer_memory": "host"}


def counted(model: Model) -> Model:
    """The loss as a Mean over tokens that are not 0, which ranks have in different numbers."""

    def loss(params: Any, tokens: Tensor) -> fs.Mean:
        mask = tokens[:, 1:] != 0
        scores = logits(params, tokens)[:, :-1]
        each = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return fs.Mean((each * mask.flatten()).sum(), mask.sum())

    return replace(model, loss=loss)


def tuned() -> Model:
    """Adapters beside frozen matrices, B not zero."""
    model = decoder()
    loss, params = fs.lora(model.loss, model.params, rank=2, targets="*.q_proj|*.down_proj|*.up_proj")
    named = fs.tree.flatten_with_paths(params)[0]
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path in [p for p in named if p.endswith(".b")]:
            named[path].normal_(std=0.2, generator=draw)
    structure = fs.tree.flatten_with_paths(params)[1]
    flat = lambda p, *batch: loss(fs.tree.unflatten(list(p.values()), structure), *batch)  # noqa: E731
    return Model(named, flat, model.batch, tuple(p for p in named if p.startswith("base.")))


MODELS = {
    "decoder": decoder,
    "untied": lambda: decoder(tied=False),
    "one key head": lambda: decoder(kv_heads=1),
    "uneven vocabulary": lambda: decoder(vocab=19),
    "lora": tuned,
    "fused": lambda: decoder(fused=True),
    "one block": lambda: decoder(layers=1, fused=True),
}


@dataclass(frozen=True)
class Row:
    """How both sides train."""

    model: str = "decoder"
    preset: str = "full_shard"
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=lambda: AXES)
    clip: bool = False
    tensor: str | None = "tensor"


ROWS = {
    "shard_grad_op": Row(preset="shard_grad_op"),
    "zero2": Row(preset="zero2"),
    "zero1": Row(preset="zero1", clip=True),
    "no_shard": Row(preset="no_shard", clip=True),
    "hybrid_shard": Row(preset="hybrid_shard", axes={"replicate": 2, "tensor": 2, "shard": 1}),
    "hybrid_shard in the middle": Row(preset="hybrid_shard", axes={"replicate": 2, "tensor": 2, "shard": 2}),
    "untied": Row("untied"),
    "one key head": Row("one key head"),
    "uneven vocabulary": Row("uneven vocabulary", clip=True),
    "uneven vocabulary, whole": Row("uneven vocabulary", options={"residual": "whole"}, axes={"tensor": 4}),
    "lora": Row("lora"),
    "lora, one axis": Row("lora", axes={"tensor": 2}),
    "clip": Row(clip=True),
    "clip, one axis": Row(clip=True, axes={"tensor": 2}),
    "norm": Row(options={"grad_norm": True}),
    "remat": Row(options={"remat": "unit"}),
    "remat, whole": Row(options={"remat": "unit", "residual": "whole"}),
    "remat, a half": Row(options={"remat": 0.5}),
    "offload": Row(options={"remat": "unit+offload"}),
    "accumulate": Row(options={"accumulate": 2}),
    "accumulate, local": Row("untied", "zero2", {}, {"accumulate": 2, "accumulate_mode": "local"}, clip=True),
    "host": Row(policy=HOST),
    "host, streamed": Row(policy={"optimizer_memory": "host", "update_on": "device"}, clip=True),
    "loss scale": Row(options={"loss_scale": 128.0}, clip=True),
    "deep prefetch": Row(options={"prefetch": 2, "overlap": 2}),
    "nothing is split": Row(options={}, tensor=None),
    "fused": Row("fused", options={"accumulate": 2, "remat": "unit"}, clip=True),
    "fused, zero1": Row("fused", "zero1", {"optimizer_memory": "host"}),
    "fused, zero2": Row("fused", "zero2", axes={"shard": 1, "tensor": 4}),
}  # fmt: skip
LONG = (
    "hybrid_shard", "lora, one axis", "clip, one axis", "norm", "remat, a half", "deep prefetch", "untied",
    "shard_grad_op", "no_shard", "remat, whole", "host, streamed", "clip", "uneven vocabulary, whole",
    "zero2", "remat", "accumulate",
)  # fmt: skip


@cache
def model_of(name: str) -> Model:
    return MODELS[name]()


@cache
def truth(name: str, clip: bool) -> reference.Trained:
    model = model_of(name)
    rule = reference.sgd(0.1) if clip else reference.adamw(1e-2)
    limit = CLIP if clip else None
    return reference.train(model.loss, model.params, by_steps(model), rule, frozen=model.frozen, clip=limit)


def trained(
    model: Model, axes: Mapping[str, int], preset: str, optimizer: Any, policy: Any = None, **options: Any
) -> list[reference.Trained]:
    mesh = fs.make_mesh(**axes, simulated=True)
    policy = {"tensor": "tensor" if "tensor" in axes else None, **(policy or {})}
    specs = specs_of(model, preset, mesh, **policy)
    return on_mesh(model, mesh, specs, optimizer, **options)


def on_mesh(
    model: Model, mesh: fs.Mesh, specs: Any, optimizer: Any, **options: Any
) -> list[reference.Trained]:
    step = make_step(mesh, model, specs, optimizer, **options)
    return fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, optimizer, step=step))


@pytest.mark.parametrize("row", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in ROWS])
def test_training_equals_one_process(row: str) -> None:
    chosen = ROWS[row]
    expected = truth(chosen.model, chosen.clip)
    optimizer = CLIPPED if chosen.clip else ADAMW
    model = model_of(chosen.model)
    policy = {"tensor": chosen.tensor, **chosen.policy}
    for got in trained(model, chosen.axes, chosen.preset, optimizer, policy, **chosen.options):
        assert_same(got, expected)
        if got.norms:
            assert_floats(got.norms, expected.norms)
    assert bool(got.norms) == (chosen.clip or "grad_norm" in chosen.options)


QUICK = ("sgd_rules", "adamw_rules", "lars", "clip_lars", "two_clips_two_emas", "row_sgd")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.long) for n in optimizers.ALL if n not in QUICK)]
)
def test_optimizers_see_each_element_once(name: str) -> None:
    """All are what they are on one rank."""
    model, optimizer = model_of("decoder"), optimizers.ALL[name]
    if name in ("clip", "ema"):  # which train nothing alone
        optimizer = fs.optim.chain(*((optimizer, fs.optim.sgd(0.1))[:: 1 if name == "clip" else -1]))
    expected = trained(model, {"shard": 1}, "full_shard", optimizer)[0]
    for got in trained(model, AXES, "full_shard", optimizer):
        assert_same(got, expected)


def test_an_optimizer_that_gathers_sees_fused_leaves_in_their_order() -> None:
    model, optimizer = model_of("fused"), optimizers.ALL["row_sgd"]
    expected = trained(model, {"shard": 1}, "full_shard", optimizer)[0]
    for got in trained(model, AXES, "full_shard", optimizer):
        assert_same(got, expected)


@pytest.mark.parametrize(("axes", "residual"), [({"tensor": 2}, "split"), (AXES, "whole")], ids=str)
def test_a_mean_counts_items_once(axes: dict[str, int], residual: str) -> None:
    model = counted(model_of("decoder"))
    expected = reference.train(model.loss, model.params, by_steps(model), reference.sgd(0.1), clip=CLIP)
    for got in trained(model, axes, "full_shard", CLIPPED, residual=residual):
        assert_same(got, expected)
        assert_floats(got.norms, expected.norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_narrow_dtypes_follow_one_process(dtype: torch.dtype) -> None:
    model = as_float(model_of("decoder"))
    policy = {"compute_dtype": dtype, "reduce_dtype": torch.float32}
    expected = trained(model, {"shard": 1}, "full_shard", CLIPPED, policy)[0]
    for got in trained(model, AXES, "full_shard", CLIPPED, policy):
        assert_same(got, expected, atol=3e-2)
        assert got.losses[-1] < got.losses[0]


def test_a_forward_and_gradients_alone() -> None:
    model = model_of("decoder")
    mesh = fs.make_mesh(**AXES, simulated=True)
    specs = specs_of(model, "full_shard", mesh, tensor="tensor")
    tokens = model.batch(0)[0]
    grads, value = reference.gradients(model.loss, model.params, tokens)
    step = fs.shard_step(model.loss, specs, mesh=mesh, backend="eager")
    forward = fs.shard_forward(logits, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        stored = fs.shard(model.params, specs, mesh)
        mine = tokens[2 * (rank // 2) :][:2]
        loss, found = step(stored, mine)
        return loss, fs.unshard(found, specs, mesh, layout="gradient"), forward(stored, mine), mine

    for loss, found, made, mine in fs.simulate(mesh, run):
        torch.testing.assert_close(loss, value, rtol=0, atol=1e-10)
        torch.testing.assert_close(found, grads, rtol=0, atol=1e-10)
        torch.testing.assert_close(made, logits(model.params, mine), rtol=0, atol=1e-10)


def test_leaves_that_are_stored_over_an_axis_and_computed_whole() -> None:
    model, mesh = model_of("untied"), fs.make_mesh(**AXES, simulated=True)
    even = {p: not v.shape[0] % 2 for p, v in model.params.items()}
    rules = [(p, fs.LayoutSpec(fs.P("tensor"))) for p in even if even[p]]
    for got in on_mesh(model, mesh, fs.presets.zero2(model.params, mesh, rules=rules), ADAMW):
        assert_same(got, truth("untied", False))


@pytest.mark.parametrize("codec", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_frozen_codes_are_split_by_rows(codec: str) -> None:
    """The codes of a rank's rows are rows of the codes; a matrix whose inputs would be split stays whole."""
    model = replace(model_of("untied"), frozen=("layers.0.up_proj.weight", "layers.1.down_proj.weight"))
    runs = []
    for axes in ({"shard": 1}, AXES):
        mesh = fs.make_mesh(**axes, simulated=True)
        tensor = "tensor" if "tensor" in axes else None
        coded = {p: model.params[p] for p in model.frozen}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            parts = fs.presets.full_shard(coded, mesh, tensor=tensor, codec=codec, trainable=False)
        specs = {**specs_of(model, "full_shard", mesh, tensor=tensor), **parts}
        assert specs[model.frozen[0]].compute.axes == tuple(a for a in axes if a == "tensor")
        runs.append(on_mesh(model, mesh, specs, ADAMW))
    for got in runs[1]:
        assert_same(got, runs[0][0])


# ------------------------------------------------------------------ real ranks


def on_ranks(rank: int, model: Model, **options: Any) -> reference.Trained:
    mesh = fs.make_mesh(tensor=2, device="cpu")
    return train(rank, mesh, model, specs_of(model, "full_shard", mesh, tensor="tensor"), CLIPPED, **options)


def exact_on_ranks(rank: int) -> reference.Trained:
    return on_ranks(rank, decoder(layers=1, fused=True), overlap=1)


def test_processes(ranks: Any) -> None:
    for got in ranks(2).run(exact_on_ranks):
        assert_same(got, truth("one block", True))
        assert_floats(got.norms, truth("one block", True).norms)


def narrow_on_ranks(rank: int) -> list[reference.Trained]:
    model = as_float(decoder(layers=1))
    return [on_ranks(rank, model), on_ranks(rank, model, backend="inductor", overlap=1)]


@pytest.mark.long  # test_context_attention compiles in the suite
def test_compiled_kernels_of_processes(ranks: Any) -> None:
    for eager, compiled in ranks(2).run(narrow_on_ranks, timeout=300.0):
        assert_same(compiled, eager, atol=2e-5)
        assert compiled.losses[-1] < compiled.losses[0]
