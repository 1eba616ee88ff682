"""Pictures of layouts: what they say of blocks is what is stored; every one is drawn, and shown in text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plot import colours_of, size_of

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import SpecError
from fnshard.layout.partition import block_slices
from fnshard.plot import text
from fnshard.plot.blocks import grid_of, mesh_rows, node_rows, padding_text
from fnshard.plot.leaves import equal_units, leaves_of, together
from fnshard.plot.treemap import squarify


def paper(**axes: int) -> fs.Mesh:
    return fs.make_mesh(**axes, abstract=True, device="cpu")


ONE, EIGHT, TWO, THREE = paper(shard=1), paper(shard=8), paper(a=2, b=3), paper(a=2, b=3, c=2)
LAYOUTS = {
    "even": (P("shard"), (16, 4), EIGHT),
    "uneven": (P("shard"), (13, 4), EIGHT),
    "padding_alone": (P("shard"), (3, 4), EIGHT),
    "columns": (P(None, "shard"), (4, 17), EIGHT),
    "replicated": (P(), (16, 4), EIGHT),
    "one_rank": (P("shard"), (5,), ONE),
    "vector": (P("shard"), (9,), EIGHT),
    "scalar": (P(), (), EIGHT),
    "two_axes": (P("a", "b"), (5, 7), TWO),
    "two_axes_turned": (P("b", "a"), (5, 7), TWO),
    "one_of_two_axes": (P(None, "b"), (5, 7), TWO),
    "both_on_one_dim": (P(("b", "a")), (13, 2), TWO),
    "third_dim": (P(None, None, "b"), (4, 5, 6), TWO),
    "empty": (P("shard"), (0, 4), EIGHT),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_grid_says_of_every_rank_what_it_stores(name: str) -> None:
    layout, shape, mesh = LAYOUTS[name]
    grid = grid_of(layout, shape, mesh)
    seen = []
    for (i, j), ranks in grid.ranks.items():
        for rank in ranks:
            stored = block_slices(shape, layout, mesh, mesh.coordinate(rank))
            for dim, span in zip(grid.dims, (grid.rows[i], grid.columns[j]), strict=True):
                assert span == ((0, 1) if dim is None else (stored[dim].start, stored[dim].stop))
            full = [d for d in range(len(shape)) if d not in grid.dims]
            assert [stored[d] for d in full] == [slice(0, shape[d]) for d in full]
            seen.append(rank)
    assert sorted(seen) == list(range(mesh.size)) and grid.hidden == ()


def test_a_third_cut_dim_is_named() -> None:
    grid = grid_of(P("a", "b", "c"), (4, 6, 8), THREE)
    assert grid.hidden == (2,) and grid.ranks[1, 2] == (10, 11)
    assert "dim 2 is cut too" in text.leaf(P("a", "b", "c"), THREE, shape=(4, 6, 8))


def test_padding_is_counted() -> None:
    assert padding_text(grid_of(P("shard"), (16, 4), EIGHT)) == ""
    assert padding_text(grid_of(P("shard"), (13, 4), EIGHT)) == (
        "padding: 3 of 16 rows; 1 of 8 ranks hold nothing else"
    )
    assert padding_text(grid_of(P("a", "b"), (5, 7), TWO)) == "padding: 1 of 6 rows and 2 of 9 columns"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_leaf_is_drawn_and_written(name: str, tmp_path: Path) -> None:
    layout, shape, mesh = LAYOUTS[name]
    path = fs.plot.leaf(layout, mesh, tmp_path / "leaf.png", shape=shape)
    assert size_of(path)[0] > 600 and colours_of(path) > 3
    shown = text.leaf(layout, mesh, shape=shape)
    assert shown.splitlines()[0] == f"{list(shape)} on {mesh}" and max(map(len, shown.splitlines())) < 100


def test_a_large_mesh_is_written_in_short() -> None:
    shown = text.leaf(P("shard"), paper(shard=1024), shape=(128256, 8192)).splitlines()
    assert len(shown) < 50 and "1023" in shown[-3] and any("⋮" in line for line in shown)
    assert len(text.mesh(paper(replicate=128, shard=8)).splitlines()) <= 33


def test_layouts_that_differ_get_a_panel_each(tmp_path: Path) -> None:
    params = {"w": torch.ones(8, 4)}
    widths = {}
    for name in ("full_shard", "zero2", "zero1"):
        spec = fs.presets.PRESETS[name](params, EIGHT)["w"]
        widths[name] = size_of(fs.plot.leaf(spec, EIGHT, tmp_path / f"{name}.png"))[0]
    assert widths["full_shard"] < widths["zero2"] == widths["zero1"]
    assert "storage, gradient: P()\n" in text.leaf(spec, EIGHT)
    assert "optimizer: P('shard')\n" in text.leaf(spec, EIGHT)


@pytest.mark.parametrize("mesh", [ONE, EIGHT, TWO, THREE, paper(replicate=4, shard=256)], ids=str)
def test_a_mesh_is_drawn_and_written(mesh: fs.Mesh, tmp_path: Path) -> None:
    ranks = [rank for _, row in mesh_rows(mesh) for rank in row]
    assert ranks == list(range(mesh.size))
    path = fs.plot.mesh(mesh, tmp_path / "mesh.svg")
    assert path.read_text().lstrip().startswith("<?xml")
    assert str(mesh.size - 1) in text.mesh(mesh)


@pytest.mark.parametrize(
    "sizes", [[1], [5, 3, 2], [1, 1, 1, 1, 1], [0, 4, 1], [1e12, 1, 7e9, 3e8], list(range(50))]
)
def test_boxes_have_their_areas_and_fill_the_whole(sizes: list[float]) -> None:
    boxes = squarify(sizes, (1.0, 2.0, 6.0, 4.0))
    total = sum(sizes)
    for size, (left, bottom, width, height) in zip(sizes, boxes, strict=True):
        assert width * height == pytest.approx(24 * size / total, abs=1e-9)
        assert left >= 1 - 1e-9 and bottom >= 2 - 1e-9
        assert left + width <= 7 + 1e-9 and bottom + height <= 6 + 1e-9
    for a, b in itertools.combinations(boxes, 2):
        wide = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
        high = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
        assert min(wide, high) < 1e-9 or wide * high < 1e-9


def tree_of(layers: int) -> tuple[dict[str, Any], Any]:
    params = {"embed.weight": torch.empty(257, 8, device="meta")}
    for i in range(layers):
        params |= {
            f"layers.{i}.{n}": torch.empty(s, device="meta") for n, s in (("w", (8, 8)), ("norm", (8,)))
        }
    rules = [("*norm", LayoutSpec(P(), compute_dtype=torch.bfloat16)), ("*", LayoutSpec(P("shard")))]
    return params, rules


@pytest.mark.parametrize("layers", [0, 1, 60])
def test_a_tree_is_drawn_and_written(layers: int, tmp_path: Path) -> None:
    params, rules = tree_of(layers)
    specs = fs.match_specs(params, rules[1:] if not layers else rules)
    path = fs.plot.tree(specs, EIGHT, tmp_path / "tree.png")
    assert size_of(path)[1] > 600 and colours_of(path) > 3
    shown = text.tree(specs, EIGHT).splitlines()
    assert len(shown) == 1 + (1 if not layers else 3)
    assert shown[0].startswith(f"{1 + 2 * layers} lea")
    assert not layers or any("P() f32 → bf16" in line for line in shown)


def framed(path: Path) -> bool:
    """Whether nothing touches the border of a PNG."""
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    return all((edge == 1).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))


def test_equal_blocks_are_drawn_once_with_their_count(tmp_path: Path) -> None:
    boxes = {}
    for layers in (2, 80):
        params, rules = tree_of(layers)
        path = fs.plot.tree(fs.match_specs(params, rules), EIGHT, tmp_path / f"{layers}.svg")
        boxes[layers] = path.read_text().count('<g id="patch_')
        assert f"{layers} × layers.*" in path.read_text()
    assert boxes[2] == boxes[80] < 20


def test_equal_units_hold_all_bytes() -> None:
    params, rules = tree_of(5)
    params["layers.5.w"] = torch.empty(8, 9, device="meta")  # another shape: not equal to the others
    leaves = leaves_of(fs.match_specs(params, rules), EIGHT)
    units = equal_units(leaves)
    assert [(name, count) for name, _, count in units] == [("embed", 1), ("layers.*", 5), ("layers.5", 1)]
    assert sum(count * leaf.bytes for _, mine, count in units for leaf in mine) == sum(
        x.bytes for x in leaves
    )


def test_a_large_mesh_is_drawn_by_nodes(tmp_path: Path) -> None:
    text = fs.plot.mesh(paper(replicate=4, shard=256), tmp_path / "mesh.svg").read_text()
    assert text.count('<g id="patch_') < 150 and "1016-" in text and "a box is a node of 8" in text
    assert "a node of 4" in fs.plot.mesh(paper(shard=100), tmp_path / "4.svg", ranks_per_node=4).read_text()
    small = fs.plot.mesh(paper(shard=64), tmp_path / "small.svg").read_text()
    assert "node" not in small.partition("</metadata>")[2]
    for mesh in (paper(replicate=4, shard=256), paper(shard=100), paper(a=40, b=3)):
        firsts = [rank for _, row in node_rows(mesh, 8) for rank in row]
        assert firsts == list(range(0, mesh.size, 8))
    with pytest.raises(SpecError, match="at least one rank"):
        fs.plot.mesh(EIGHT, tmp_path / "no.png", ranks_per_node=0)


@pytest.mark.filterwarnings("error:constrained_layout")
def test_a_long_title_is_not_cut_off(tmp_path: Path) -> None:
    mesh = paper(replicate=2, a_long_name_of_an_axis=2, another_long_name_of_an_axis=2)
    shape = (128256, 8192)
    assert framed(fs.plot.leaf(P("replicate"), mesh, tmp_path / "leaf.png", shape=shape))
    assert framed(fs.plot.mesh(mesh, tmp_path / "mesh.png"))
    params, _ = tree_of(2)
    assert framed(fs.plot.tree(fs.match_specs(params, [("*", LayoutSpec(P()))]), mesh, tmp_path / "tree.png"))


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


def test_what_is_no_layout_says_what_is(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"not dict(.|\n)*one leaf of the spec tree"):
        fs.plot.leaf({}, EIGHT, tmp_path / "no.png")
    with pytest.raises(SpecError, match=r"no axis 'tensor'"):
        text.leaf(P("tensor"), EIGHT, shape=(4,))
    with pytest.raises(SpecError, match=r"2 dims, the leaf \[4\] has 1"):
        text.leaf(P(None, "shard"), EIGHT, shape=(4,))
    with pytest.raises(SpecError, match=r"\.png or \.svg"):
        fs.plot.mesh(EIGHT, tmp_path / "mesh.jpg")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_mesh_and_no_shape_is_refused(tmp_path: Path) -> None:
    paper = fs.make_mesh(shard=4, abstract=True)
    with pytest.raises(SpecError, match=r"a mesh is what fs\.make_mesh makes, not NoneType"):
        text.mesh(None)
    for shape in ("ab", 5, (-3, 4)):
        with pytest.raises(SpecError, match="a leaf's shape is its sizes"):
            text.leaf(P("shard"), paper, shape=shape)
    assert fs.plot.mesh(fs.make_mesh(shard=9000, abstract=True), tmp_path / "m.png").exists()


def test_a_leaf_that_a_tensor_axis_splits_shows_what_is_computed() -> None:
    spec = LayoutSpec(P("shard", "tensor"), compute=P(None, "tensor"))
    told = text.leaf(spec, paper(shard=2, tensor=2), shape=(4, 4))
    stored, computed = told.split("compute: ")
    assert "| 0 " in stored and "P(None, 'tensor')" in computed and "| 0, 2 | 1, 3 |" in computed
