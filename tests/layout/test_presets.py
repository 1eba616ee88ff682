"""Presets: strategies people know, nothing but specs."""

from __future__ import annotations

import pytest
import torch
from errors import raises
from torch import nn

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.layout.presets import best_split
from fnshard.layout.spec import from_plain

MESH = fs.make_mesh(shard=8, abstract=True)
HYBRID = fs.make_mesh(replicate=2, shard=4, abstract=True)
S = P("shard")


def test_over_all_data_axes_or_the_inner_ones() -> None:
    params = {"w": torch.zeros(16, 3)}
    assert fs.presets.full_shard(params, HYBRID)["w"].storage == P(("replicate", "shard"))
    assert fs.presets.hybrid_shard(params, HYBRID)["w"].storage == P("shard")
    tensor = fs.make_mesh(shard=4, tensor=2, data_axes=["shard"], abstract=True)
    assert fs.presets.full_shard(params, tensor)["w"].storage == P("shard")
    long = fs.make_mesh(replicate=2, shard=2, context=4, abstract=True)  # its ranks have the same leaves
    assert fs.presets.full_shard(params, long)["w"].storage == P(("replicate", "shard", "context"))
    assert fs.presets.hybrid_shard(params, long)["w"].storage == P(("shard", "context"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16, 8), S),
        ((50257, 768), P(None, "shard")),
        ((3, 5), P(None, "shard")),  # 5 of 8 rows are used, against 3 of 8
        ((), P()),
        ((7,), S),
        ((3, 3, 64), P(None, None, "shard")),
    ],
)
def test_the_dim_that_pads_least_is_split(shape: tuple[int, ...], expected: P) -> None:
    assert best_split(shape, ("shard",), MESH) == expected


def test_buffers_and_integers_are_whole_and_keep_their_dtype() -> None:
    params = {
        "w": torch.zeros(16),
        "ids": torch.zeros(16, dtype=torch.int64),
        "b": nn.Buffer(torch.zeros(16)),
    }
    bf16 = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
    specs = fs.presets.full_shard(params, MESH, **bf16)
    assert [specs[p].storage for p in params] == [S, P(), P()]
    assert [specs[p].storage_dtype for p in params] == [torch.bfloat16, torch.int64, torch.float32]
    assert [specs[p].compute_dtype for p in params] == [torch.bfloat16, torch.int64, torch.float32]
    assert [specs[p].trainable for p in params] == [True, False, False]


def test_the_callers_rules_come_first() -> None:
    params = {"a.w": torch.zeros(16), "b.w": torch.zeros(16)}
    specs = fs.presets.full_shard(params, MESH, rules=[("a.*", LayoutSpec(P(), reshard=False))])
    assert (specs["a.w"].storage, specs["b.w"].storage) == (P(), S)


def test_paths_with_glob_characters() -> None:
    params = {"a[0].w": torch.zeros(16), "a*.w": torch.zeros(8, 16)}
    specs = fs.presets.full_shard(params, MESH)
    assert [specs[p].shape for p in params] == [(16,), (8, 16)]


def test_policy_goes_to_all_leaves_and_an_unknown_field_is_refused() -> None:
    params = {"w": torch.zeros(16)}
    spec = fs.presets.zero2(params, MESH, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)["w"]
    assert (spec.compute_dtype, spec.reduce_dtype, spec.storage_dtype) == (
        torch.bfloat16, torch.float32, torch.float32,
    )  # fmt: skip
    with raises(fs.SpecError, leaves="'param_dtype'", fix="compute_dtype"):
        fs.presets.full_shard(params, MESH, param_dtype=torch.bfloat16)
    with raises(fs.SpecError, leaves="'shape'", fix="storage"):
        fs.presets.full_shard(params, MESH, shape=(9, 9))
    with raises(fs.SpecError, leaves="'shape'", fix="storage"):
        from_plain({"shape": [3, 4]})


def test_a_dtype_of_eight_bits_may_be_named() -> None:
    """Norms, embeddings and heads stay in bf16, whether the dtype is an object or its name."""
    params = {
        "embed.weight": torch.zeros(64, 32),
        "layers.0.up.weight": torch.zeros(256, 256),
        "norm.weight": torch.zeros(32),
    }
    one = fs.make_mesh(shard=1, abstract=True)
    with pytest.warns(UserWarning, match="stay in bf16"):
        by_name, by_dtype = (
            fs.presets.full_shard(params, one, compute_dtype=dtype)
            for dtype in ("float8_e4m3fn", torch.float8_e4m3fn)
        )
    assert by_name == by_dtype and by_name["norm.weight"].wire_dtype is None
    assert by_name["layers.0.up.weight"].wire_dtype == torch.float8_e4m3fn


def test_chunks_are_even_by_what_a_rank_has_of_the_experts() -> None:
    params = {
        "layers.0.experts": torch.empty(4, 4, 4),
        **{f"layers.{i}.w": torch.empty(4, 4) for i in (1, 2, 3)},
    }

    def chunks(expert: str | None) -> list[int]:
        mesh = fs.make_mesh(pipeline=2, expert=4, abstract=True)
        return [spec.chunk for spec in fs.presets.full_shard(params, mesh, expert=expert).values()]

    assert chunks(None) == [0, 1, 1, 1]
    assert chunks("expert") == [0, 0, 1, 1]
