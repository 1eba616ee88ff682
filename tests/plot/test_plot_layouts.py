"""Layouts in characters: what they say of blocks is what is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import SpecError
from fnshard.layout.partition import Fused
from fnshard.plot import text
from fnshard.plot.layouts import blocks_of, leaves_of, together


def paper(**axes: int) -> fs.Mesh:
    return fs.make_mesh(**axes, abstract=True, device="cpu")


EIGHT, TWO = paper(shard=8), paper(a=2, b=3)
LAYOUTS = {
    "padding alone": (P("shard"), (3, 4), EIGHT, {"[0:1, 0:4]": [0], "padding": [3, 4, 5, 6, 7]}),
    "a scalar": (P(), (), EIGHT, {"[]": [*range(8)]}),
    "both axes on one dim": (P(("b", "a")), (13, 2), TWO, {"[0:3, 0:2]": [0], "[12:13, 0:2]": [2]}),
    "fused": (P(Fused("shard", 2)), (16, 1), EIGHT, {"[0:1, 0:1]": [0], "[8:9, 0:1]": [0]}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_and_the_ranks_that_hold_them(name: str) -> None:
    layout, shape, mesh, expected = LAYOUTS[name]
    assert expected.items() <= blocks_of(layout, shape, mesh).items()
    shown = text.leaf(layout, mesh, shape=shape)
    assert shown.splitlines()[0] == f"{list(shape)} on {mesh}" and max(map(len, shown.splitlines())) < 100


def test_a_large_mesh_is_written_in_short() -> None:
    shown = text.leaf(P("shard"), paper(shard=1024), shape=(128256, 8192)).splitlines()
    assert len(shown) < 50 and "1023" in shown[-1] and any("⋮" in line for line in shown)


def test_layouts_that_differ_have_lines_of_their_own() -> None:
    spec = fs.presets.zero1({"w": torch.ones(8, 4)}, EIGHT)["w"]
    assert "storage, gradient: P()\n" in text.leaf(spec, EIGHT)
    assert "optimizer: P('shard')\n" in text.leaf(spec, EIGHT)


def tree_of(layers: int) -> tuple[dict[str, Any], Any]:
    params = {"embed.weight": torch.empty(257, 8, device="meta")}
    for i in range(layers):
        params |= {
            f"layers.{i}.{n}": torch.empty(s, device="meta") for n, s in (("w", (8, 8)), ("norm", (8,)))
        }
    rules = [("*norm", LayoutSpec(P(), compute_dtype=torch.bfloat16)), ("*", LayoutSpec(P("shard")))]
    return params, rules


def test_bytes_of_a_tree_are_those_of_its_blocks() -> None:
    params, rules = tree_of(3)
    specs = fs.match_specs(params, rules)
    leaves = leaves_of(specs, EIGHT)
    assert sum(x.bytes for x in leaves) == 4 * sum(p.numel() for p in params.values())
    assert sum(x.mine for x in leaves) == 4 * (33 * 8 + 3 * (8 + 8))  # 257 rows on 8 ranks: 33
    rows = together(leaves)
    assert [(x.path, x.count) for x in rows] == [
        ("embed.weight", 1), ("layers.*.w", 3), ("layers.*.norm", 3)]  # fmt: skip
    assert sum(x.bytes for x in rows) == sum(x.bytes for x in leaves)


def test_specs_by_hand_need_their_leaves() -> None:
    bare = {"w": LayoutSpec(P("shard"))}
    assert "1 leaf, 64 B" in text.tree(bare, EIGHT, params={"w": torch.ones(8, 2)})
    with pytest.raises(SpecError, match="knows no shape"):
        text.leaf(bare["w"], EIGHT)
    with pytest.raises(SpecError, match=r"specs\['w'\] knows no shape"):
        text.tree(bare, EIGHT)


def test_a_leaf_that_a_tensor_axis_splits_shows_what_is_computed() -> None:
    spec = LayoutSpec(P("shard", "tensor"), compute=P(None, "tensor"))
    stored, computed = text.leaf(spec, paper(shard=2, tensor=2), shape=(4, 4)).split("compute: ")
    assert "[0:2, 0:2]  ranks 0\n" in stored
    assert "P(None, 'tensor')" in computed and "[0:4, 0:2]  ranks 0, 2\n" in computed


@pytest.mark.parametrize("layers", [0, 1, 60])
def test_a_tree_in_characters(layers: int) -> None:
    params, rules = tree_of(layers)
    shown = text.tree(fs.match_specs(params, rules[1:] if not layers else rules), EIGHT).splitlines()
    assert len(shown) == 1 + (1 if not layers else 3)
    assert shown[0].startswith(f"{1 + 2 * layers} lea")
    assert not layers or any("P() f32 → bf16" in line for line in shown)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        ({}, None, r"not dict(.|\n)*one leaf of the spec tree"),
        (P("tensor"), (4,), "no axis 'tensor'"),
        (P(None, "shard"), (4,), r"2 dims, the leaf \[4\] has 1"),
        (P("shard"), "ab", "a leaf's shape is its sizes"),
        (P("shard"), (-3, 4), "a leaf's shape is its sizes"),
    ],
)
def test_what_is_no_layout_is_refused(layout: Any, shape: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        text.leaf(layout, EIGHT, shape=shape)
