"""Blocks: how a leaf is split and which ranks hold which block; how a mesh is laid out in rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fnshard.errors import SpecError
from fnshard.layout.partition import P, block_shape, boxes
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh

FIELDS = ("storage", "gradient", "optimizer")
WRAP = 32  # ranks in a row, where the mesh has but one axis
NODES = 16  # nodes in a row, where an axis does not fill rows of whole nodes


@dataclass(frozen=True)
class Grid:
    """A leaf as a matrix of blocks, two of its dims drawn.

    Args:
        layout: what cuts it.
        shape: of the whole leaf.
        dims: which of its dims goes down, and which across; None where it has none left.
        rows: (start, stop) of each block down, padding left out: empty where a block is nothing else.
        columns: the same across.
        block: rows and columns of a block, padding counted; of its pieces, where it is `Fused`.
        ranks: by row and column, who holds the block.
        hidden: further dims that are cut; the ranks of a block hold pieces of it.
    """

    layout: P
    shape: tuple[int, ...]
    dims: tuple[int | None, int | None]
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    block: tuple[int, int]
    ranks: Mapping[tuple[int, int], tuple[int, ...]]
    hidden: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the leaf, without padding."""
        return self.rows[-1][1], self.columns[-1][1]

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns that are stored, padding counted."""
        return self.block[0] * len(self.rows), self.block[1] * len(self.columns)


def grid_of(layout: P, shape: Sequence[int], mesh: Mesh) -> Grid:
    """Compute the blocks into which a layout splits a shape, and the ranks that hold each.

    >>> from fnshard.layout.partition import Fused
    >>> from fnshard.mesh import make_mesh
    >>> grid = grid_of(P("shard"), (10, 4), make_mesh(shard=4, abstract=True))
    >>> grid.rows, grid.ranks[1, 0]
    (((0, 3), (3, 6), (6, 9), (9, 10)), (1,))
    >>> list(grid_of(P(Fused("shard", 2)), (8, 1), make_mesh(shard=2, abstract=True)).ranks.values())
    [(0,), (0,), (1,), (1,)]

    Raises:
        SpecError: an axis that the mesh does not have, or more dims than the leaf has.
    """
    shape = tuple(shape)
    wrong = [f"it has no axis {axis!r}" for axis in layout.axes if axis not in mesh.names]
    if len(layout.parts) > len(shape):
        wrong.append(f"{layout!r} names {len(layout.parts)} dims, the leaf {list(shape)} has {len(shape)}")
    if wrong:
        raise SpecError(f"{layout!r} does not fit mesh {mesh}:", wrong, "fs.match_specs checks both.")
    cut = [dim for dim in range(len(shape)) if layout.of(dim)]
    first = cut[0] if cut else 0
    across = next((d for d in cut[1:]), next((d for d in range(len(shape)) if d != first), None))
    down: int | None = first if shape else None
    if down is not None and across is not None and across < down:  # as a matrix is written
        down, across = across, down
    hidden = tuple(dim for dim in cut if dim not in (down, across))
    blocks = tuple(_block(d, shape, layout, mesh) for d in range(len(shape)))
    holders: dict[tuple[int, int], list[int]] = {}
    for rank in range(mesh.size):
        here = mesh.coordinate(rank)
        places = [_indices(d, shape, blocks, layout, mesh, here) for d in (down, across)]
        for place in product(*places):
            holders.setdefault(place, []).append(rank)
    spans = [_spans(d, shape, blocks, layout, mesh) for d in (down, across)]
    block = tuple(1 if d is None else blocks[d] for d in (down, across))
    ranks = {place: tuple(found) for place, found in holders.items()}
    return Grid(layout, shape, (down, across), *spans, block, ranks, hidden)


def _block(dim: int, shape: tuple[int, ...], layout: P, mesh: Mesh) -> int:
    """The length of a dim's blocks; of pieces that all of them are made of, where it is `Fused`."""
    block, count = block_shape(shape, layout, mesh)[dim], layout.fused(dim)
    return math.gcd(block, shape[dim] // count // mesh.axis_size(layout.of(dim)[0])) if count > 1 else block


def _indices(
    dim: int | None, shape: tuple[int, ...], blocks: tuple[int, ...], layout: P, mesh: Mesh,
    here: Mapping[str, int],
) -> list[int]:  # fmt: skip
    """Which of a dim's blocks a rank has; several pieces where they are `Fused`."""
    if dim is None:
        return [0]
    if layout.fused(dim) > 1:
        runs = {full[dim].start: full[dim].stop for full, _ in boxes(shape, layout, mesh, here)}
        return [i // blocks[dim] for first, last in runs.items() for i in range(first, last, blocks[dim])]
    index = 0
    for axis in layout.of(dim):
        index = index * mesh.axis_size(axis) + here[axis]
    return [index]


def _spans(
    dim: int | None, shape: tuple[int, ...], blocks: tuple[int, ...], layout: P, mesh: Mesh
) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every block of a dim."""
    if dim is None:
        return ((0, 1),)
    size, block = shape[dim], blocks[dim]
    ways = mesh.axes_size(layout.of(dim)) if layout.fused(dim) == 1 else size // block
    return tuple((min(i * block, size), min((i + 1) * block, size)) for i in range(ways))


def layouts_of(spec: LayoutSpec | P, shape: Sequence[int] | None) -> tuple[dict[P, str], tuple[int, ...]]:
    """The layouts of a spec with the names of the fields that have each, and the leaf's shape.

    Raises:
        SpecError: neither a spec nor a P; no shape.
    """
    if not isinstance(spec, LayoutSpec | P):
        raise SpecError(
            f"a leaf's layout is a LayoutSpec or a P, not {type(spec).__name__}.",
            fix='pass one leaf of the spec tree, such as specs["layers.0.attn.wq.weight"].',
        )
    full = getattr(spec, "shape", None) if shape is None else shape
    if full is None:
        raise SpecError(
            f"{spec!r} knows no shape.",
            fix="shape=leaf.shape; or a spec of fs.match_specs or a preset, which know theirs.",
        )
    if (
        isinstance(full, str)
        or not isinstance(full, Sequence)
        or not all(isinstance(size, int) and size >= 0 for size in full)
    ):
        raise SpecError(f"shape={full!r}: a leaf's shape is its sizes, such as (4096, 64).")
    if isinstance(spec, P):
        return {spec: "layout"}, tuple(full)
    named: dict[P, list[str]] = {}
    for field in FIELDS if spec.trainable is not False else FIELDS[:1]:
        value = getattr(spec, field)
        named.setdefault(spec.storage if value is None else value, []).append(field)
    if spec.compute.axes:
        named.setdefault(spec.compute, []).append("compute")
    return {layout: ", ".join(fields) for layout, fields in named.items()}, tuple(full)


def padding_text(grid: Grid) -> str:
    """The amount of padding as text; empty if there is none."""
    size, padded = grid.size, grid.padded
    count = padded[0] * padded[1] - size[0] * size[1]
    if not count:
        return ""
    parts = [
        f"{p - s} of {p} {name}"
        for s, p, name in zip(size, padded, ("rows", "columns"), strict=True)
        if p > s
    ]
    idle = [r for (i, j), ranks in grid.ranks.items() if _empty(grid, i, j) for r in ranks]
    more = f"; {len(idle)} of {sum(map(len, grid.ranks.values()))} ranks hold nothing else" if idle else ""
    return f"padding: {' and '.join(parts)}{more}"


def _empty(grid: Grid, i: int, j: int) -> bool:
    return grid.rows[i][0] == grid.rows[i][1] or grid.columns[j][0] == grid.columns[j][1]


def mesh_rows(mesh: Mesh) -> list[tuple[str, tuple[int, ...]]]:
    """Ranks in rows along the last axis, each named by its other coordinates; a single axis is wrapped.

    >>> from fnshard.mesh import make_mesh
    >>> mesh_rows(make_mesh(replicate=2, shard=2, abstract=True))
    [('replicate 0', (0, 1)), ('replicate 1', (2, 3))]

    Raises:
        SpecError: `mesh` is no Mesh.
    """
    if not isinstance(mesh, Mesh):
        raise SpecError(f"a mesh is what fs.make_mesh makes, not {type(mesh).__name__}.")
    if len(mesh.names) == 1:
        name, starts = mesh.names[0], range(0, mesh.size, WRAP)
        rows = [tuple(range(s, min(s + WRAP, mesh.size))) for s in starts]
        return [(f"{name} {row[0]}-{row[-1]}" if len(row) > 1 else f"{name} {row[0]}", row) for row in rows]
    outer, last = mesh.names[:-1], mesh.sizes[-1]
    places = product(*(range(size) for size in mesh.sizes[:-1]))
    return [
        (
            ", ".join(f"{n} {i}" for n, i in zip(outer, place, strict=True)),
            tuple(range(k * last, (k + 1) * last)),
        )
        for k, place in enumerate(places)
    ]


def node_rows(mesh: Mesh, ranks_per_node: int) -> list[tuple[str, tuple[int, ...]]]:
    """The first rank of every node, in rows: by the outer axes where each of their rows fills whole nodes.

    >>> from fnshard.mesh import make_mesh
    >>> node_rows(make_mesh(replicate=2, shard=32, abstract=True), 8)
    [('replicate 0', (0, 8, 16, 24)), ('replicate 1', (32, 40, 48, 56))]
    >>> [name for name, _ in node_rows(make_mesh(shard=256, abstract=True), 8)]
    ['ranks 0-127', 'ranks 128-255']

    Raises:
        SpecError: `mesh` is no Mesh.
    """
    rows = mesh_rows(mesh)
    if len(mesh.names) > 1 and mesh.sizes[-1] % ranks_per_node == 0:
        return [(name, row[::ranks_per_node]) for name, row in rows]
    firsts, across = range(0, mesh.size, ranks_per_node), NODES * ranks_per_node
    starts = range(0, mesh.size, across)
    return [
        (f"ranks {s}-{min(s + across, mesh.size) - 1}", tuple(firsts[i * NODES : (i + 1) * NODES]))
        for i, s in enumerate(starts)
    ]
