"""Treemap: a tree's leaves as boxes whose areas are bytes, coloured by spec, grouped by unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fnshard.errors import leaves as count_of
from fnshard.mesh import Mesh
from fnshard.plot.canvas import COLOURS, figure_of, save, text_on
from fnshard.plot.leaves import LeafBytes, equal_units, labels_of, leaves_of
from fnshard.plot.scales import byte_text

WIDTH, HEIGHT = 11.0, 6.5  # inches
CHARACTER, LINE = 0.62, 1.35  # of a font's size: how wide a letter is, how far lines are apart
LEGEND = 8  # specs that are named
Box = tuple[float, float, float, float]  # left, bottom, width, height


def tree(specs: Any, mesh: Mesh, path: str | Path, *, params: Any = None) -> Path:
    """Draw a tree's layout: one box per leaf, its area is bytes, its colour the spec; small ones are unnamed.

    Equal units, such as the blocks of a model, are one group with their count; its area is that of all.

    Args:
        specs: a tree of LayoutSpecs.
        mesh: may be abstract.
        path: of the picture, .png or .svg; its folder is made.
        params: for specs that were written by hand, and know no shapes yet.

    Raises:
        SpecError: specs without shapes, or that do not fit the mesh.
    """
    leaves = leaves_of(specs, mesh, params)
    sums = labels_of(leaves)
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(sums)}
    figure, axes = figure_of(WIDTH, HEIGHT + 0.35 + 0.22 * min(len(sums), LEGEND))
    units = equal_units(leaves)
    areas = [count * sum(leaf.bytes for leaf in mine) for _, mine, count in units]
    for (unit, mine, count), box in zip(units, squarify(areas, (0, 0, WIDTH, HEIGHT)), strict=True):
        if box[2] * box[3] > 0:
            _draw_unit(axes, f"{count} × {unit}" if count > 1 else unit, mine, box, colours)
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    full, one = sum(leaf.bytes for leaf in leaves), sum(leaf.mine for leaf in leaves)
    axes.set_title(
        f"{count_of(len(leaves))}, {byte_text(full)} stored; {byte_text(one)} on one rank of {mesh}",
        fontsize=11, loc="left",
    )  # fmt: skip
    _legend(figure, sums, colours)
    return save(figure, path)


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Divide a box into boxes of these areas, as square as possible, the largest at the left and top.

    Squarified treemaps (Bruls, Huizing and van Wijk, 2000). Boxes come in the order of `sizes`.

    >>> squarify([1, 3], (0, 0, 4, 1))
    [(3.0, 0.0, 1.0, 1.0), (0, 0.0, 3.0, 1.0)]
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    rest, (left, bottom, width, height) = sum(sizes), box
    out = [(left, bottom, 0.0, 0.0)] * len(sizes)
    while order and rest:
        side, scale = min(width, height), width * height / rest
        count = _strip([sizes[i] * scale for i in order], side)
        strip = sum(sizes[i] for i in order[:count])
        last = count == len(order)
        # Shares of what is left, not areas over lengths: small leaves stay inside though all is rounded.
        thick = max(width, height) * (1.0 if last else min(strip / rest, 1.0))
        at = 0.0
        for i in order[:count]:
            long = side * sizes[i] / strip if strip else 0.0
            if width >= height:  # a column at the left, from the top
                out[i] = (left, bottom + height - at - long, thick, long)
            else:  # a row at the top, from the left
                out[i] = (left + at, bottom + height - thick, long, thick)
            at += long
        if width >= height:
            left, width = left + thick, width - thick
        else:
            height -= thick
        order = order[count:]
        rest = sum(sizes[i] for i in order)
    return out


def _strip(areas: Sequence[float], side: float) -> int:
    """The number of areas, largest first, to place in one strip along `side`."""
    worst = _worst(areas[:1], side)
    for count in range(1, len(areas)):
        more = _worst(areas[: count + 1], side)
        if more > worst:
            return count
        worst = more
    return len(areas)


def _worst(areas: Sequence[float], side: float) -> float:
    """The largest aspect ratio of boxes of these areas in one strip along `side`."""
    total, least, most = sum(areas), min(areas), max(areas)
    if not least or not side:
        return float("inf")
    return max(side * side * most / total**2, total**2 / (side * side * least))


def _draw_unit(axes: Any, unit: str, leaves: Sequence[LeafBytes], box: Box, colours: dict[str, str]) -> None:
    """Draw a unit's leaves, and a frame with its name around them."""
    from matplotlib.patches import Rectangle

    left, bottom, width, height = box
    size = min(9.0, max(5.0, 72 * width / (CHARACTER * max(len(unit), 1)) * 0.9))
    titled = len(leaves) > 1 and height > 0.5 and _fits(unit, size, width, height)
    head = size * LINE / 72 if titled else 0.0
    inner = (left, bottom, width, height - head)
    for leaf, inside in zip(leaves, squarify([x.bytes for x in leaves], inner), strict=True):
        if inside[2] * inside[3] <= 0:
            continue
        colour = colours[leaf.label]
        axes.add_patch(Rectangle(inside[:2], *inside[2:], facecolor=colour, edgecolor="white", linewidth=0.5))
        _name(axes, leaf, inside, colour, within=titled)
    axes.add_patch(Rectangle((left, bottom), width, height, fill=False, edgecolor="#222222", linewidth=0.9))
    if titled:
        axes.text(left + width / 2, bottom + height - head / 2, unit, fontsize=size, ha="center", va="center")


def _name(axes: Any, leaf: LeafBytes, box: Box, colour: str, *, within: bool) -> None:
    """Write the longest form of a leaf's name that fits into its box, if any does."""
    left, bottom, width, height = box
    shape = " × ".join(map(str, leaf.shape)) or "scalar"
    short = leaf.path.removeprefix(f"{leaf.unit}.") if within else leaf.path
    full, _, last = short.rpartition(".")
    tails = _tails(short)[:-1] + _tails(full) if full else [last]  # "weight" alone would say nothing
    texts = [f"{tail}\n{more}" for tail in tails for more in (f"{shape}\n{byte_text(leaf.bytes)}", shape)]
    for size in (9.0, 7.5, 6.0):
        text = next((t for t in [*texts, *tails] if _fits(t, size, width, height)), None)
        if text is not None:
            axes.text(
                left + width / 2, bottom + height / 2, text, fontsize=size, color=text_on(colour),
                ha="center", va="center", linespacing=1.15,
            )  # fmt: skip
            return


def _tails(path: str) -> list[str]:
    """The suffixes of a dotted path, the longest first."""
    return [path.split(".", n)[-1] for n in range(path.count(".") + 1)]


def _fits(text: str, size: float, width: float, height: float) -> bool:
    lines = text.split("\n")
    return (
        max(map(len, lines)) * CHARACTER * size / 72 <= width - 0.06
        and len(lines) * LINE * size / 72 <= height - 0.03
    )


def _legend(figure: Any, sums: dict[str, tuple[int, int]], colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colours[label], label=f"{label}: {byte_text(full)}, {byte_text(mine)} on one rank")
        for label, (full, mine) in list(sums.items())[:LEGEND]
    ]
    if len(sums) > LEGEND:
        handles[-1].set_label(f"... and {len(sums) - LEGEND + 1} more specs")
    if handles:
        figure.legend(handles=handles, loc="outside lower left", frameon=False)
