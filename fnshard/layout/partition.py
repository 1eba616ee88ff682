"""`P`: how a tensor's dims are split over mesh axes, and the blocks that ranks have then."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnshard.errors import SpecError
from fnshard.mesh import Mesh

__all__ = ["Fused", "P"]


@dataclass(frozen=True)
class Fused:
    """An axis in a `P` whose dim holds `count` equal matrices side by side, each of which the axis splits.

    A rank's block of a fused query, key and value [3 * d, d] is its part of each: the numbers of three
    leaves. It stands first on its dim, and in `LayoutSpec.compute`. After Megatron's `partition_stride`.

    >>> P(None, (Fused("tensor", 3), "shard")).of(1)
    ('tensor', 'shard')
    """

    axis: str
    count: int

    def __repr__(self) -> str:
        return f"Fused({self.axis!r}, {self.count})"


Axis = str | Fused
Axes = Axis | tuple[Axis, ...] | None


class P:
    """Partition spec: for each tensor dim the mesh axis, tuple of axes, or None that splits it.

    A pytree leaf. Trailing Nones may be left out: `P("shard") == P("shard", None)`. An axis may be `Fused`.
    After JAX's `PartitionSpec`; torch's placements are per *mesh* dim, see `to_placements`.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: Axes):
        cleaned: list[Axes] = []
        for part in parts:
            alone = isinstance(part, str) or not isinstance(part, Iterable)
            axes = () if part is None else (part,) if alone else tuple(part)
            if not all(isinstance(_name(a), str) and _name(a) for a in axes):
                fix = "P('shard') splits dim 0, P(None, 'shard') dim 1."
                raise SpecError(
                    f"P{parts!r}: each dim takes an axis name, a tuple of names, or None.", fix=fix
                )
            if any(isinstance(a, Fused) and (i or a.count < 1) for i, a in enumerate(axes)):
                raise SpecError(
                    f"P{parts!r}: Fused(axis, count) stands first on its dim, with a count of 1 or more."
                )
            axes = tuple(a.axis if isinstance(a, Fused) and a.count == 1 else a for a in axes)
            cleaned.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        while cleaned and cleaned[-1] is None:
            cleaned.pop()
        self.parts = tuple(cleaned)
        if len(set(self.axes)) != len(self.axes):
            raise SpecError(f"{self!r} names an axis twice; an axis splits one dim.")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes named, in order of dims."""
        return tuple(a for dim in range(len(self.parts)) for a in self.of(dim))

    def of(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, major first."""
        return tuple(map(_name, self.entries(dim)))

    def entries(self, dim: int) -> tuple[Axis, ...]:
        """The same, `Fused` as it is."""
        part = self.parts[dim] if dim < len(self.parts) else None
        return () if part is None else part if isinstance(part, tuple) else (part,)

    def fused(self, dim: int) -> int:
        """How many matrices lie side by side along `dim`, each of them split by the first axis."""
        first = next(iter(self.entries(dim)), None)
        return first.count if isinstance(first, Fused) else 1

    @property
    def contiguous(self) -> P:
        """The same axes, as of a tensor in which each rank's parts lie side by side."""
        return P(*map(self.of, range(len(self.parts))))

    def without(self, axes: Iterable[str]) -> P:
        """The same layout over the other axes."""
        dims = range(len(self.parts))
        return P(*(tuple(a for a in self.entries(dim) if _name(a) not in axes) for dim in dims))

    def to_placements(self, mesh: Mesh) -> tuple[Any, ...]:
        """DTensor's view: one placement per mesh dim.

        Raises:
            SpecError: it is `Fused`, for which DTensor has no public placement.

        >>> from fnshard.mesh import make_mesh
        >>> P(None, "shard").to_placements(make_mesh(replicate=2, shard=4, abstract=True))
        (Replicate(), Shard(dim=1))
        """
        from torch.distributed.tensor import Replicate, Shard

        if self != self.contiguous:
            raise SpecError(f"{self!r}: DTensor splits a dim in contiguous parts.")
        where = {axis: dim for dim in range(len(self.parts)) for axis in self.of(dim)}
        return tuple(Shard(where[n]) if n in where else Replicate() for n in mesh.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(("P", self.parts))

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.parts))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return P, self.parts


def _name(axis: Axis) -> str:
    return axis.axis if isinstance(axis, Fused) else axis


def block_shape(shape: Sequence[int], layout: P, mesh: Mesh) -> tuple[int, ...]:
    """Shape of every rank's block, padded so that all are equal.

    >>> from fnshard.mesh import make_mesh
    >>> block_shape((50257, 768), P("shard"), make_mesh(shard=8, abstract=True))
    (6283, 768)
    """
    return tuple(-(-size // mesh.axes_size(layout.of(dim))) for dim, size in enumerate(shape))


def block_slices(
    shape: Sequence[int], layout: P, mesh: Mesh, coordinate: Mapping[str, int] | None = None
) -> tuple[slice, ...]:
    """The slices of the full tensor that a rank's block holds, without padding (they may be empty).

    Raises:
        ValueError: a `Fused` layout, whose blocks are several: see `boxes`.
    """
    if any(layout.fused(dim) > 1 for dim in range(len(layout.parts))):
        raise ValueError(f"{layout!r}: a block is not one slice of the tensor.")
    here = mesh.coordinate() if coordinate is None else coordinate
    out = []
    for dim, (size, block) in enumerate(zip(shape, block_shape(shape, layout, mesh), strict=True)):
        index = 0
        for axis in layout.of(dim):
            index = index * mesh.axis_size(axis) + here[axis]
        start = min(index * block, size)
        out.append(slice(start, min(start + block, size)))
    return tuple(out)


Slices = tuple[slice, ...]


def boxes(
    shape: Sequence[int], layout: P, mesh: Mesh, coordinate: Mapping[str, int] | None = None
) -> list[tuple[Slices, Slices]]:
    """Where a rank's block lies in the full tensor, without padding, box by box: the slices of the tensor and
    those of the block. One box, which may be empty, where nothing is `Fused`.

    >>> from fnshard.mesh import make_mesh
    >>> mesh = make_mesh(tensor=2, abstract=True)
    >>> [full for full, block in boxes((8,), P(Fused("tensor", 2)), mesh, {"tensor": 1})]
    [(slice(2, 4, None),), (slice(6, 8, None),)]
    """
    slices = block_slices(shape, layout.contiguous, mesh, coordinate)
    dims = []
    for dim, (size, where) in enumerate(zip(shape, slices, strict=True)):
        count = layout.fused(dim)
        ranks = mesh.axis_size(layout.of(dim)[0]) if count > 1 else 1
        dims.append(list(_runs(where, size, count, ranks)))
    # Of no dims there is one box, of none.
    return [(tuple(f for f, _ in box), tuple(b for _, b in box)) for box in itertools.product(*dims)]


def _runs(where: slice, size: int, count: int, ranks: int) -> Iterator[tuple[slice, slice]]:
    """What a slice of a dim in which ranks' parts lie side by side is of the dim, and of the slice."""
    part = max(size // count // ranks, 1)
    cuts = range(where.start - where.start % part + part, where.stop, part) if count > 1 else ()
    for first, last in itertools.pairwise((where.start, *cuts, where.stop)):
        rank, matrix = divmod(first // part, count) if count > 1 else (0, 0)
        start = matrix * (size // count) + rank * part + first % part if count > 1 else first
        yield slice(start, start + last - first), slice(first - where.start, last - where.start)


def side_by_side(full: Tensor, layout: P, mesh: Mesh, inverse: bool = False) -> Tensor:
    """A tensor in which the parts of each rank lie side by side, which `layout.contiguous` splits; `inverse`:
    from there."""
    for dim in range(full.dim()):
        if (count := layout.fused(dim)) > 1:
            ranks = mesh.axis_size(layout.of(dim)[0])
            part = full.shape[dim] // count // ranks
            sizes = (ranks, count, part) if inverse else (count, ranks, part)
            full = full.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return full


def slot_layout(slot: Sequence[int], shape: Sequence[int], layout: P, mesh: Mesh) -> P | None:
    """How optimizer state of shape `slot` lies, of a leaf of `shape` whose blocks are of `layout`.

    As `like_leaf` says; what is of another shape, and has as many matrices as the leaf, is cut along its rows
    by all axes that cut matrices of the leaf. None: it is of yet another shape.

    >>> from fnshard.mesh import make_mesh
    >>> slot_layout((6, 6), (6, 4), P(None, "shard"), make_mesh(shard=2, abstract=True))
    P('shard')
    """
    found = like_leaf(slot, shape, layout, mesh)
    if found is not None or len(slot) != len(shape) or len(slot) < 2 or slot[:-2] != shape[:-2]:
        return found
    rows = mesh.ordered({axis for dim in (-2, -1) for axis in layout.of(len(shape) + dim)})
    return P(*(layout.entries(dim) for dim in range(len(shape) - 2)), rows)


def like_leaf(slot: Sequence[int], shape: Sequence[int], layout: P, mesh: Mesh) -> P | None:
    """How state lies whose blocks an optimizer makes of blocks of a leaf; arguments as of `slot_layout`.

    Along a dim of the leaf's size it is cut as the leaf; of size 1 it is whole; shorter by a whole factor, a
    number for so many of the leaf's, it is cut as the leaf, if no cut goes through these. None: it is of
    another shape. What has no dims is whole, and so is all state of a leaf that is.

    >>> from fnshard.mesh import make_mesh
    >>> like_leaf((1, 2), (6, 128), P("shard", "tensor"), make_mesh(shard=2, tensor=2, abstract=True))
    P(None, 'tensor')
    """
    if not slot or not mesh.ordered(layout.axes):
        return P()
    if len(slot) != len(shape):
        return None
    parts = []
    for dim, (own, size) in enumerate(zip(slot, shape, strict=True)):
        entries, pieces = layout.entries(dim), mesh.axes_size(layout.of(dim)) * layout.fused(dim)
        if own != size and own != 1 and (own == 0 or size % own or own % pieces):
            return None
        parts.append(None if own == 1 != size else entries)
    return P(*parts)


def every_rank_has_some(size: int, ranks: int) -> bool:
    """Whether a dim that is cut in equal blocks, the last of them padded, leaves no rank without numbers."""
    return -(-size // ranks) * (ranks - 1) < size
