"""Find the axes over which an update is placed, and how its tensors are split over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fnshard.compiler.ir.program import tensors_in
from fnshard.compiler.place.placement import Split
from fnshard.compiler.update.trace import PARAM
from fnshard.layout.partition import P
from fnshard.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Splits:
    """A description of how the tensors of an update are split.

    Args:
        shapes, layouts: the whole shape and the layout of each tensor.
        flat: tuples of mesh axes, each of which is a single axis to `place`.
        of: the split of each tensor, by flat axis.
        apart: tensors whose blocks are no splits over these axes: only a rank that has the whole leaf can
            read them.
    """

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    layouts: Mapping[str, P]
    flat: tuple[tuple[str, ...], ...]
    of: Mapping[str, Mapping[str, Split]]
    apart: frozenset[str]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes that split something, in the mesh's order."""
        return self.mesh.ordered([a for layout in self.layouts.values() for a in layout.axes])

    @property
    def ranks(self) -> int:
        """The number of ranks that share a leaf."""
        return self.mesh.axes_size(self.axes)

    def size(self, flat: str) -> int:
        """Return the number of ranks along a flat axis."""
        return self.mesh.axes_size(flat.split(","))


def find_axes(shapes: Mapping[str, tuple[int, ...]], layouts: Mapping[str, P], mesh: Mesh) -> Splits:
    """Find the axes to place over: those that split one dim become one, unless slots are split otherwise."""
    # Axes that split one dim of the leaf. The first of a fused dim splits each matrix in it, and is alone.
    leaf, groups = layouts[PARAM], []
    for dim in range(len(leaf.parts)):
        axes = [a for a in leaf.of(dim) if mesh.axis_size(a) > 1]
        of_dim = [axes[:1], axes[1:]] if leaf.fused(dim) > 1 else [axes]
        groups += [tuple(g) for g in of_dim if g]
    rank_of = mesh.names.index
    together = sorted(groups, key=lambda g: rank_of(g[0]))
    alone = sorted(((a,) for g in together for a in g), key=lambda g: rank_of(g[0]))

    # Fewer axes mean fewer walks and exchanges, but slots may be split over some of them alone.
    candidates = []
    for flat in (tuple(together), tuple(alone)):
        of = {name: split_over(shapes[name], layout, flat, mesh) for name, layout in layouts.items()}
        apart = frozenset(name for name, each in of.items() if each is None)
        candidates.append(Splits(mesh, shapes, layouts, flat, {n: s or {} for n, s in of.items()}, apart))
    return min(candidates, key=lambda splits: len(splits.apart))


def split_over(
    shape: Sequence[int], layout: P, flat: Sequence[tuple[str, ...]], mesh: Mesh
) -> dict[str, Split] | None:
    """Return the splits of a tensor by flat axis; None if they do not give its blocks."""
    out = {}
    for dim, size in enumerate(shape):
        # The flat axes that split this dim, in the order in which they split it.
        remaining = tuple(a for a in layout.of(dim) if mesh.axis_size(a) > 1)
        fused = layout.fused(dim) if remaining and remaining[0] == layout.of(dim)[0] else 1
        parts = []
        for axes in flat:
            if remaining and remaining[: len(axes)] == axes:
                parts.append(axes)
                remaining = remaining[len(axes) :]

        # Blocks are padded at the end of a dim: several splits of an uneven dim would pad in its middle.
        ranks = mesh.axes_size([a for axes in parts for a in axes])
        if remaining or (len(parts) > 1 and size % ranks) or math.prod(shape) == 0:
            return None
        # The first axis alone cuts each matrix of a fused dim, and into equal parts.
        if fused > 1 and (len(parts[0]) > 1 or size % (fused * mesh.axes_size(parts[0]))):
            return None
        for number, axes in enumerate(parts):
            out[name_of(axes)] = Split(dim, 1 if number else fused)
    return out


def name_of(axes: Sequence[str]) -> str:
    """Return the name under which `place` knows axes that became one."""
    return ",".join(axes)


def bytes_of(value: Any) -> int:
    """Return the bytes of a value, or of several."""
    return sum(v.numel() * v.element_size() for v in tensors_in(value))
