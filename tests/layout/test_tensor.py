"""Tensor: which leaves a tensor axis splits, what presets make of it, and blocks of blocks."""

from __future__ import annotations

import fnmatch
import math
import warnings
from typing import Any

import pytest
import torch
from errors import raises
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fnshard as fs
from experiments.lib.decoder import Decoder, DecoderConfig
from fnshard import LayoutSpec, P, SpecError
from fnshard.layout.partition import Fused, block_shape, block_slices, boxes, side_by_side
from fnshard.layout.presets import PRESETS
from fnshard.layout.spec import check_specs
from fnshard.layout.tensor import split_dims
from fnshard.runtime.packing import local_block

MESH = fs.make_mesh(shard=2, tensor=2, abstract=True)

# ------------------------------------------------------------------ by name

ATTENTION = {"*.q_proj.*": 0, "*.k_proj.*": 0, "*.v_proj.*": 0, "*.o_proj.weight": 1}
LLAMA = {
    "*.embed_tokens.weight": 0, **ATTENTION, "*.gate_proj.weight": 0, "*.up_proj.weight": 0,
    "*.down_proj.weight": 1,
}  # fmt: skip
HEAD = {"lm_head.*": 0}
NAMED: dict[str, dict[str, int]] = {
    "llama": LLAMA | HEAD,
    "qwen2": LLAMA | HEAD,
    "qwen3": LLAMA,
    "mistral": LLAMA | HEAD,
    "gemma": LLAMA,
    "gemma2": LLAMA,
    "phi": {"*.embed_tokens.weight": 0, **dict(list(ATTENTION.items())[:3]), "*.dense.weight": 1,
            "*.fc1.*": 0, "*.fc2.weight": 1, **HEAD},
    "gpt2": {"*.wte.weight": 0, "*.c_attn.weight": 1, "*.c_attn.bias": 0, "*.attn.c_proj.weight": 0,
             "*.c_fc.weight": 1, "*.c_fc.bias": 0, "*.mlp.c_proj.weight": 0},
    "t5": {"shared.weight": 0, "*.q.weight": 0, "*.k.weight": 0, "*.v.weight": 0, "*.o.weight": 1,
           "*.relative_attention_bias.weight": 1, "*.wi.weight": 0, "*.wo.weight": 1},
    "bert": {"*.word_embeddings.weight": 0, "*.query.*": 0, "*.key.*": 0, "*.value.*": 0,
             "*.output.dense.weight": 1, "*.intermediate.dense.*": 0, "*.transform.dense.weight": 1,
             "cls.predictions.bias": 0},
    "vit": {**ATTENTION, "*.fc1.*": 0, "*.fc2.weight": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_leaves_of_known_families(name: str) -> None:
    check_dims(fs.make_functional(FAMILIES[name].build())[1], NAMED[name])


@pytest.mark.parametrize("tied", [True, False])
def test_leaves_of_the_decoder(tied: bool) -> None:
    expected = {
        "embed.weight": 0, "*.wq.weight": 0, "*.wk.weight": 0, "*.wv.weight": 0, "*.wo.weight": 1,
        "*.gate.weight": 0, "*.up.weight": 0, "*.down.weight": 1, **({} if tied else {"head.weight": 0}),
    }  # fmt: skip
    config = DecoderConfig(width=16, layers=2, heads=2, kv_heads=1, context=8, tied=tied)
    check_dims(fs.make_functional(Decoder(config))[1], expected)


def check_dims(params: dict[str, Tensor], expected: dict[str, int]) -> None:
    found = split_dims(params)
    for glob in expected:
        assert fnmatch.filter(params, glob), f"{glob} is no leaf of {list(params)}"
    for path in params:
        dims = {dim for glob, dim in expected.items() if fnmatch.fnmatchcase(path, glob)}
        assert {found.get(path)} - {None} == dims, path


# ------------------------------------------------------------------ by pairs

PAIRED: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, int]]] = {  # shapes, dims
    "sequential": (
        {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (6, 8), "2.bias": (6,), "4.weight": (3, 6)},
        {"0.weight": 0, "0.bias": 0, "2.weight": 1},
    ),
    "of equal sizes": (
        {f"{i}.weight": (4, 4) for i in range(5)},
        {"0.weight": 0, "1.weight": 1, "2.weight": 0, "3.weight": 1},
    ),
    "two that feed one": (
        {f"layers.0.{n}.weight": s for n, s in {"a": (6, 4), "norm": (4,), "b": (6, 4), "c": (4, 6)}.items()},
        {"layers.0.a.weight": 0, "layers.0.b.weight": 0, "layers.0.c.weight": 1},
    ),
    "one that feeds rows by name": (
        {"layers.0.gate.weight": (6, 4), "layers.0.up.weight": (6, 4), "layers.0.down.weight": (4, 6)},
        {"layers.0.gate.weight": 0, "layers.0.up.weight": 0, "layers.0.down.weight": 1},
    ),
    "a router feeds none": (
        {"layers.0.gate.weight": (3, 4), "layers.0.up.weight": (6, 4), "layers.0.down.weight": (4, 6)},
        {"layers.0.up.weight": 0, "layers.0.down.weight": 1},
    ),
    "inputs first": (
        {"h.0.a.weight": (4, 6), "h.0.a.bias": (6,), "h.0.b.weight": (6, 4), "h.0.b.bias": (4,)},
        {"h.0.a.weight": 1, "h.0.a.bias": 0, "h.0.b.weight": 0},
    ),
    "the encoder layer of torch": (
        {n: tuple(p.shape) for n, p in nn.TransformerEncoderLayer(8, 2, 16).named_parameters()},
        {
            "self_attn.in_proj_weight": 0,
            "self_attn.in_proj_bias": 0,
            "self_attn.out_proj.weight": 1,
            "linear1.weight": 0,
            "linear1.bias": 0,
            "linear2.weight": 1,
        },
    ),
    "blocks apart": ({"layers.0.a.weight": (6, 4), "layers.1.b.weight": (5, 3)}, {}),
    "convolutions and tables": ({"conv.weight": (8, 4, 3), "pos": (4, 8), "out": (8, 4)}, {"out": 1}),
}


@pytest.mark.parametrize("case", PAIRED)
def test_matrices_in_pairs(case: str) -> None:
    shapes, expected = PAIRED[case]
    assert split_dims({path: torch.empty(shape) for path, shape in shapes.items()}) == expected


def test_buffers_and_integers_are_whole() -> None:
    params = {"up.weight": torch.ones(4, 4, dtype=torch.int64), "down.weight": nn.Buffer(torch.ones(4, 4))}
    assert split_dims(params) == {}


def test_adapters_follow_their_matrices() -> None:
    """B has a part where outputs are split, and A where inputs are."""
    base = {"up_proj.weight": torch.randn(8, 4), "down_proj.weight": torch.randn(4, 8)}
    _, params = fs.lora(lambda p, x: x, base, rank=2, targets="*")
    assert split_dims(fs.tree.flatten_with_paths(params)[0]) == {
        "base.up_proj.weight": 0, "base.down_proj.weight": 1,
        "adapters.up_proj.weight.b": 0, "adapters.down_proj.weight.a": 1,
    }  # fmt: skip


# ------------------------------------------------------------------ presets

T, S, TS = P("tensor"), P("shard"), P(("tensor", "shard"))
FIELDS = {  # storage, gradient, optimizer of a leaf whose dim 0 is split
    "full_shard": (TS, TS, TS),
    "zero3": (TS, TS, TS),
    "shard_grad_op": (TS, TS, TS),
    "zero2": (T, TS, TS),
    "zero1": (T, T, TS),
    "no_shard": (T, T, T),
    "hybrid_shard": (TS, TS, TS),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_lay_the_data_axes_within_the_parts(name: str) -> None:
    params = {"up_proj.weight": torch.zeros(8, 3), "norm.weight": torch.zeros(4)}
    specs = PRESETS[name](params, MESH, tensor="tensor")
    check_specs(specs, MESH)
    up, norm = specs.values()
    assert (up.storage, up.gradient, up.optimizer, up.compute) == (*FIELDS[name], T)
    assert norm == PRESETS[name](params, MESH)["norm.weight"]
    local = up.local(MESH)
    assert local.shape == (4, 3) and local.compute == T
    assert [p.without(["tensor"]) for p in FIELDS[name]] == [local.storage, local.gradient, local.optimizer]


def test_another_dim_is_sharded_where_parts_are_uneven() -> None:
    specs = fs.presets.full_shard(
        {"up.weight": torch.zeros(6, 4), "up.bias": torch.zeros(6)}, MESH, tensor="tensor"
    )
    assert [s.storage for s in specs.values()] == [P("tensor", "shard"), T]
    assert fs.presets.hybrid_shard(
        {"up.weight": torch.zeros(8, 4)},
        fs.make_mesh(replicate=2, shard=2, tensor=2, abstract=True),
        tensor="tensor",
    )["up.weight"].storage == TS  # fmt: skip
    alone = fs.make_mesh(tensor=2, abstract=True)
    assert (
        fs.presets.full_shard({"up.weight": torch.zeros(6, 4)}, alone, tensor="tensor")["up.weight"].storage
        == T
    )


def test_rules_and_layouts_by_path() -> None:
    params = {"up_proj.weight": torch.zeros(5, 3), "w": torch.zeros(4, 4)}
    rules = [("up*", LayoutSpec(S))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a leaf that a rule takes is no concern of the preset
        specs = fs.presets.full_shard(params, MESH, rules=rules, tensor="tensor")
    assert [s.compute for s in specs.values()] == [P(), P()]
    specs = fs.presets.full_shard(params, MESH, tensor={"w": P(None, "tensor")})
    assert [s.compute for s in specs.values()] == [P(), P(None, "tensor")]


def test_what_does_not_divide_stays_whole_with_a_warning() -> None:
    params = {"up.weight": torch.zeros(61, 4), "gate_proj.weight": torch.zeros(8, 4)}
    with pytest.warns(
        UserWarning, match=r"(?s)1 leaf of 0.00 MB.*'tensor'.*2 ranks.*'up.weight'\] \[61, 4\].*pad"
    ):
        specs = fs.presets.full_shard(params, MESH, tensor="tensor")
    assert [s.compute for s in specs.values()] == [P(), T]


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    """Its rows are split over tensor alone; the data axes take columns."""
    specs = fs.presets.full_shard({"embed.weight": torch.zeros(61, 4)}, MESH, tensor="tensor")
    assert (specs["embed.weight"].compute, specs["embed.weight"].storage) == (T, P("tensor", "shard"))
    assert specs["embed.weight"].local(MESH).shape == (31, 4)


def test_coded_leaves_are_split_by_rows() -> None:
    params = {"up.weight": torch.zeros(8, 64), "down.weight": torch.zeros(64, 8)}
    with pytest.warns(UserWarning, match=r"(?s)'down.weight'.*rows are coded whole"):
        specs = fs.presets.full_shard(params, MESH, tensor="tensor", codec="int8", trainable=False)
    assert [(s.compute, s.storage) for s in specs.values()] == [(T, TS), (P(), S)]


def test_matrices_side_by_side_are_split_each() -> None:
    """Fused q, k and v are split each if keys have as many heads as queries; else the leaf is whole."""
    params = {"qkv_proj.weight": torch.zeros(12, 4), "qkv_proj.bias": torch.zeros(12)}
    params |= {"gate_up_proj.weight": torch.zeros(8, 4), "1.qkv_proj.weight": torch.zeros(8, 4)}
    specs = fs.presets.full_shard(params, MESH, tensor="tensor")
    fused = Fused("tensor", 3)
    assert [s.compute for s in specs.values()] == [P(fused), P(fused), P(Fused("tensor", 2)), P()]
    assert [s.storage for s in specs.values()][:2] == [P((fused, "shard"))] * 2


BAD: dict[str, tuple[Any, str, str]] = {
    "no axis": ("tensr", "tensor='tensr'", "make_mesh"),
    "a data axis": ("shard", "tensor='shard'", "same rows"),
    "no leaf": ({"x": P("tensor")}, "tensor['x']", "leaves of the tree"),
}


@pytest.mark.parametrize("case", BAD)
def test_axes_that_split_nothing_are_refused(case: str) -> None:
    value, leaf, fix = BAD[case]
    with raises(SpecError, leaves=leaf, fix=fix):
        fs.presets.full_shard({"up.weight": torch.zeros(8, 4)}, MESH, tensor=value)


# ------------------------------------------------------------------ blocks


@st.composite
def computed(draw: Any) -> tuple[LayoutSpec, fs.Mesh]:
    """Draw a mesh of up to four axes, and a leaf split over some, computed over the compute axes alone."""
    sizes = {
        n: draw(st.integers(1, 3)) for n in draw(st.permutations(["replicate", "shard", "tensor", "context"]))
    }
    mesh = fs.make_mesh(**sizes, abstract=True)
    dims = draw(st.integers(1, 3))
    parts: list[list[str]] = [[] for _ in range(dims)]
    for axis in ["tensor"]:
        if draw(st.booleans()):
            parts[draw(st.integers(0, dims - 1))].append(Fused(axis, draw(st.integers(1, 3))))
    compute = P(*map(tuple, parts))
    for axis in draw(st.permutations(["replicate", "shard", "context"])):
        if draw(st.booleans()):
            parts[draw(st.integers(0, dims - 1))].append(axis)
    storage = P(*map(tuple, parts))
    shape = tuple(
        draw(st.integers(1, 3)) * mesh.axes_size(storage.of(d)) * compute.fused(d)
        if compute.of(d)
        else draw(st.integers(1, 5))
        for d in range(dims)
    )
    return LayoutSpec(storage, compute=compute).resolve(torch.zeros(shape), "unit"), mesh


@given(computed())
@settings(max_examples=80, deadline=None)
def test_a_block_is_the_local_spec_s_block_of_the_computed_part(case: tuple[LayoutSpec, fs.Mesh]) -> None:
    spec, mesh = case
    check_specs({"w": spec}, mesh)
    full = torch.arange(math.prod(spec.shape)).view(spec.shape)
    local, times = spec.local(mesh), torch.zeros(spec.shape)
    assert block_shape(local.shape, local.storage, mesh) == block_shape(spec.shape, spec.storage, mesh)
    for rank, coordinate in enumerate(map(mesh.coordinate, range(mesh.size))):
        part = torch.empty(local.shape, dtype=full.dtype)
        for there, here in boxes(spec.shape, spec.compute, mesh, coordinate):
            part[here] = full[there]
            times[there] += 1
        block = local_block(full, spec.storage, mesh, rank)
        assert torch.equal(local_block(part, local.storage, mesh, rank), block)
        stored = boxes(spec.shape, spec.storage, mesh, coordinate)
        assert all(torch.equal(block[here], full[there]) for there, here in stored)
        assert sum(full[there].numel() for there, _ in stored) == math.prod(
            s.stop - s.start for s in block_slices(spec.shape, spec.storage.contiguous, mesh, coordinate)
        )
    sides = side_by_side(full, spec.storage, mesh)
    assert torch.equal(side_by_side(sides, spec.storage, mesh, inverse=True), full)
    assert (times == mesh.size // mesh.axes_size(spec.compute.axes)).all()
