"""Sharding: pictures of a mesh, and of one leaf on it: which rank holds which rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fnshard.errors import SpecError
from fnshard.layout.spec import LayoutSpec, P
from fnshard.mesh import Mesh
from fnshard.plot.blocks import Grid, grid_of, layouts_of, mesh_rows, node_rows, padding_text
from fnshard.plot.canvas import colour_map, figure_of, save, text_on
from fnshard.plot.scales import ranks_text

PALE = "#f2f2f2"
TICKS = 12  # block borders that are numbered
BY_RANK = 64  # ranks that have a box each; of larger meshes every node has one
MOST = 4096  # boxes; more rows than these are stripes
HIGHEST = 24.0  # inches
FEW = 16  # blocks that differ in hue; more are a gradient


def mesh(mesh: Mesh, path: str | Path, *, ranks_per_node: int = 8) -> Path:
    """Draw a mesh's ranks on its axes, the last one across; rows of other outer axes have other colours.

    A mesh of more than 64 ranks has one box per node, labelled with its ranks.

    Args:
        mesh: may be abstract.
        path: of the picture, .png or .svg; its folder is made.
        ranks_per_node: consecutive ranks that share a machine.

    Raises:
        SpecError: something other than a mesh, nodes without ranks, or another kind of picture.
    """
    if ranks_per_node < 1:
        raise SpecError(f"ranks_per_node={ranks_per_node}: a node has at least one rank.")
    rows = mesh_rows(mesh)
    per_box = 1 if mesh.size <= BY_RANK else min(ranks_per_node, mesh.size)
    rows = rows if per_box == 1 else node_rows(mesh, per_box)
    boxes = sum(len(row) for _, row in rows)
    across = max(len(row) for _, row in rows)
    cell = min(0.75, 14 / across, max(24 / len(rows), 0.05))  # inches
    label = max(len(name) for name, _ in rows)
    title = f"{mesh}: {mesh.size:,} rank{'s' if mesh.size > 1 else ''}"
    title += f", the batch is split over {', '.join(mesh.data_axes) or 'no axis'}"
    title += f"; a box is a node of {per_box}" if per_box > 1 else ""
    wide = 0.11 * label + max(cell * across, 0.11 * len(mesh.names[-1])) + 0.8
    figure, axes = figure_of(wide, min(max(cell * len(rows), 0.5), HIGHEST) + 1.2)
    shades = _shades(len(rows))
    letters = len(str(mesh.size - 1)) + (per_box > 1)
    size = min(10.0, 72 * cell / (0.75 * letters))
    if boxes > MOST:  # one stripe per row
        axes.imshow(
            [[s] for s in shades], extent=(0, across, len(rows), 0), aspect="auto", interpolation="none"
        )
    for down, (_, row) in enumerate(rows if boxes <= MOST else ()):
        for place, rank in enumerate(row):
            _box(axes, (place, down, 1, 1), shades[down])
            named = _box_text(rank, per_box, mesh.size) if size >= 5 else ""
            _write(axes, (place, down, 1, 1), shades[down], named, size)
    high = min(max(cell * len(rows), 0.5), HIGHEST)
    step = max(1, round(len(rows) * 0.18 / high))  # rows to a readable name
    axes.set_yticks([i + 0.5 for i in range(0, len(rows), step)], [n for n, _ in rows[::step]])
    wrapped = per_box > 1 or (len(mesh.names) == 1 and len(rows) > 1)
    _across(axes, across, mesh.names[-1] if not wrapped else "")
    axes.set(xlim=(0, across), ylim=(len(rows), 0))
    _bare(axes)
    axes.set_title(title, fontsize=11, loc="left")
    return save(figure, path)


def _box_text(rank: int, count: int, size: int) -> str:
    """The ranks of a box, from its first; a range on two lines."""
    last = min(rank + count, size) - 1
    return str(rank) if last == rank else f"{rank}-\n{last}"


def leaf(spec: LayoutSpec | P, mesh: Mesh, path: str | Path, *, shape: Sequence[int] | None = None) -> Path:
    """Draw which rank holds which rows and columns of a leaf; padding is hatched.

    A leaf whose gradient, optimizer state or computed part lies otherwise than its storage gets a panel for
    each.

    Args:
        spec: one leaf's; or a P, with `shape`.
        mesh: may be abstract.
        path: of the picture, .png or .svg; its folder is made.
        shape: of the whole leaf, where the spec does not know it.

    Raises:
        SpecError: no layout, no shape, or they do not fit each other and the mesh.
    """
    layouts, full = layouts_of(spec, shape)
    figure, panels = figure_of(1.2 + 5.4 * len(layouts), 5.2, 1, len(layouts), squeeze=False)
    for axes, (layout, fields) in zip(panels.flat, layouts.items(), strict=True):
        grid = grid_of(layout, full, mesh)
        named = _draw(axes, grid)
        axes.set_title(f"{fields}: {layout!r}", fontsize=11, loc="left")
        notes = [padding_text(grid), "" if named else "ranks rise from dark to bright"]
        notes += [f"dim {d} is cut too: the ranks of a block hold pieces of it" for d in grid.hidden]
        across = "" if grid.dims[1] is None else f"dim {grid.dims[1]}"
        axes.set_xlabel("\n".join(filter(None, [across, *notes])))
        axes.set_ylabel("" if grid.dims[0] is None else f"dim {grid.dims[0]}")
    figure.suptitle(f"{list(full)} on {mesh}: which rank holds what", fontsize=12)
    return save(figure, path)


def _draw(axes: Any, grid: Grid) -> bool:
    """Draw the blocks of a padded leaf; return whether there was room for the names of their ranks."""
    down, across = grid.block
    full, inches = grid.padded, (3.9, 4.6)  # about what the axes have
    shades = _shades(len(grid.ranks))
    # What a block has of the picture, in points; its border must leave most of it.
    high, wide = (
        72 * n * edge / (total or 1) for n, edge, total in zip(grid.block, inches, full, strict=True)
    )
    border = min(0.8, 0.1 * min(high, wide))
    texts = {place: ranks_text(ranks) for place, ranks in grid.ranks.items()}
    letters = max(map(len, texts.values()))  # all of one size, or none
    size = min(11.0, wide / (0.68 * max(letters, 1)), high / 1.3)
    for shade, (i, j) in zip(shades, sorted(grid.ranks), strict=True):
        box = (j * across, i * down, across, down)
        valid = (grid.rows[i][1] - grid.rows[i][0], grid.columns[j][1] - grid.columns[j][0])
        _box(axes, box, shade, border)
        _hatch(axes, box, valid)
        _write(axes, box, shade if all(valid) else PALE, texts[i, j] if size >= 5 else "", size)
    for axis, spans, block in ((axes.yaxis, grid.rows, down), (axes.xaxis, grid.columns, across)):
        borders = [i * block for i in range(len(spans)) if spans[i][0] < spans[i][1] or i == 0]
        step = max(1, -(-len(borders) // TICKS))
        shown = [*borders[::step], spans[-1][1]]
        near = (
            len(spans) * block * (0.04 if axis is axes.yaxis else 0.11)
        )  # the end's number would lie on the one before
        axis.set_ticks([*(b for b in shown[:-1] if shown[-1] - b > near or b == 0), shown[-1]])
        axis.set_major_formatter("{x:.0f}")
    for which, dim in (("y", grid.dims[0]), ("x", grid.dims[1])):
        if dim is None:
            axes.tick_params(
                axis=which, left=False, bottom=False, labelleft=which != "y", labelbottom=which != "x"
            )
    axes.set(xlim=(0, full[1] or 1), ylim=(full[0] or 1, 0))
    axes.spines[:].set_visible(False)
    return size >= 5


def _box(axes: Any, box: tuple[float, ...], colour: Any, border: float = 0.8) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(box[:2], *box[2:], facecolor=colour, edgecolor="white", linewidth=border))


def _write(axes: Any, box: tuple[float, ...], colour: Any, text: str, size: float) -> None:
    left, top, width, height = box
    if text:
        axes.text(
            left + width / 2, top + height / 2, text, ha="center", va="center", fontsize=size,
            color=text_on(colour),
        )  # fmt: skip


def _hatch(axes: Any, box: tuple[float, ...], valid: tuple[int, int]) -> None:
    """Hatch the padding of a block."""
    from matplotlib.patches import Rectangle

    left, top, width, height = box
    parts = [(left, top, width, height)] if not all(valid) else [
        (left, top + valid[0], width, height - valid[0]),
        (left + valid[1], top, width - valid[1], valid[0]),
    ]  # fmt: skip
    for x, y, w, h in parts:
        if w > 0 and h > 0:
            look = {"facecolor": PALE, "edgecolor": "#555555", "linewidth": 0.0, "hatch": "////"}
            axes.add_patch(Rectangle((x, y), w, h, **look, alpha=0.8))


def _shades(count: int) -> list[Any]:
    """`count` colours in order: distinct hues if they are few, else a gradient."""
    if count <= FEW:
        few = colour_map("tab20")
        return [few((2 * i + 1) % 20 if i < 10 else 2 * (i - 10)) for i in range(count)]  # pale ones first
    many = colour_map("viridis")
    return [many(0.15 + 0.85 * i / (count - 1)) for i in range(count)]


def _across(axes: Any, count: int, name: str) -> None:
    step = max(1, -(-count // TICKS))
    axes.set_xticks([i + 0.5 for i in range(0, count, step)], [str(i) for i in range(0, count, step)])
    axes.xaxis.tick_top()
    axes.set_xlabel(name)
    axes.xaxis.set_label_position("top")
    if not name:
        axes.set_xticks([])


def _bare(axes: Any) -> None:
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
