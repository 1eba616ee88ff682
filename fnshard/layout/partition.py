"""`P`, the split of a tensor's dims over mesh axes, and the blocks that ranks have by it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnshard.errors import SpecError
from fnshard.mesh import Mesh

__all__ = ["Fused", "P"]


@dataclass(frozen=True)
class Fused:
    """An axis in a `P` whose dim holds `count` equal matrices side by side, each of which the axis splits.

    A rank's block of a fused query, key and value [3 * d, d] is its part of each of the three, with the
    numbers that three separate leaves would have. `Fused` is the first axis of its dim, and the `compute` of
    a spec names it. It follows Megatron's `partition_stride`.

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
    """A partition spec: for each tensor dim the mesh axis, or the tuple of axes, that splits it, or None.

    A `P` is a pytree leaf. Trailing Nones may be left out: `P("shard") == P("shard", None)`. An axis may be
    `Fused`. It follows JAX's `PartitionSpec`; torch's placements are given per *mesh* dim, see
    `to_placements`.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: Axes):
        cleaned: list[Axes] = []
        for part in parts:
            if part is None:
                axes = ()
            elif isinstance(part, str) or not isinstance(part, Iterable):
                axes = (part,)
            else:
                axes = tuple(part)
            if not all(isinstance(_name(a), str) and _name(a) for a in axes):
                fix = "P('shard') splits dim 0, P(None, 'shard') dim 1."
                raise SpecError(
                    f"P{parts!r}: each dim takes an axis name, a tuple of names, or None.", fix=fix
                )
            if any(isinstance(a, Fused) and (i or a.count < 1) for i, a in enumerate(axes)):
                raise SpecError(
                    f"P{parts!r}: Fused(axis, count) stands first on its dim, with a count of 1 or more."
                )

            # One form for equal layouts: no count of 1, no tuple of one axis, no None at the end.
            axes = tuple(a.axis if isinstance(a, Fused) and a.count == 1 else a for a in axes)
            cleaned.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        while cleaned and cleaned[-1] is None:
            cleaned.pop()

        self.parts = tuple(cleaned)
        if len(set(self.axes)) != len(self.axes):
            raise SpecError(f"{self!r} names an axis twice; an axis splits one dim.")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the layout names, in the order of dims."""
        return tuple(a for dim in range(len(self.parts)) for a in self.of(dim))

    def of(self, dim: int) -> tuple[str, ...]:
        """Return the names of the axes that split `dim`, major first."""
        return tuple(map(_name, self.entries(dim)))

    def entries(self, dim: int) -> tuple[Axis, ...]:
        """Return the axes that split `dim`, major first; an axis that is `Fused` stays so."""
        part = self.parts[dim] if dim < len(self.parts) else None
        if part is None:
            return ()
        return part if isinstance(part, tuple) else (part,)

    def fused(self, dim: int) -> int:
        """Return the number of matrices that lie side by side along `dim`, each split by the first axis."""
        first = next(iter(self.entries(dim)), None)
        return first.count if isinstance(first, Fused) else 1

    @property
    def contiguous(self) -> P:
        """The layout without `Fused`: that of a tensor in which each rank's parts lie side by side."""
        return P(*map(self.of, range(len(self.parts))))

    def without(self, axes: Collection[str]) -> P:
        """Return the layout over the axes that are not among `axes`."""
        dims = range(len(self.parts))
        return P(*(tuple(a for a in self.entries(dim) if _name(a) not in axes) for dim in dims))

    def to_placements(self, mesh: Mesh) -> tuple[Any, ...]:
        """Return DTensor's form of the layout: one placement for each mesh dim.

        Raises:
            SpecError: an axis is `Fused`, for which DTensor has no public placement.

        >>> from fnshard.mesh import make_mesh
        >>> P(None, "shard").to_placements(make_mesh(replicate=2, shard=4, abstract=True))
        (Replicate(), Shard(dim=1))
        """
        from torch.distributed.tensor import Replicate, Shard

        if self != self.contiguous:
            raise SpecError(f"{self!r}: DTensor splits a dim in contiguous parts.")
        dim_of = {axis: dim for dim in range(len(self.parts)) for axis in self.of(dim)}
        return tuple(Shard(dim_of[n]) if n in dim_of else Replicate() for n in mesh.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(("P", self.parts))

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.parts))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return P, self.parts


def _name(axis: Axis) -> str:
    """Return the name of an axis, which may be `Fused`."""
    return axis.axis if isinstance(axis, Fused) else axis


def block_shape(shape: Sequence[int], layout: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of every rank's block, padded so that all are equal.

    >>> from fnshard.mesh import make_mesh
    >>> block_shape((50257, 768), P("shard"), make_mesh(shard=8, abstract=True))
    (6283, 768)
    """
    return tuple(-(-size // mesh.axes_size(layout.of(dim))) for dim, size in enumerate(shape))


def block_slices(
    shape: Sequence[int], layout: P, mesh: Mesh, coordinate: Mapping[str, int] | None = None
) -> tuple[slice, ...]:
    """Return the slices of the full tensor that a rank's block holds, without padding; they may be empty.

    Raises:
        ValueError: the layout is `Fused`, and a block lies at several places: see `boxes`.
    """
    if any(layout.fused(dim) > 1 for dim in range(len(layout.parts))):
        raise ValueError(f"{layout!r}: a block is not one slice of the tensor.")
    here = mesh.coordinate() if coordinate is None else coordinate
    slices = []
    for dim, (size, block) in enumerate(zip(shape, block_shape(shape, layout, mesh), strict=True)):
        index = 0
        for axis in layout.of(dim):
            # The first axis is major: its ranks have the largest parts, which the next axis cuts further.
            index = index * mesh.axis_size(axis) + here[axis]
        # Where all blocks together are longer than the dim, the last ones end early, or hold nothing.
        start = min(index * block, size)
        slices.append(slice(start, min(start + block, size)))
    return tuple(slices)


Slices = tuple[slice, ...]


def boxes(
    shape: Sequence[int], layout: P, mesh: Mesh, coordinate: Mapping[str, int] | None = None
) -> list[tuple[Slices, Slices]]:
    """Return where a rank's block lies in the full tensor, without padding, box by box.

    A box is the slices of the tensor and those of the block. Where nothing is `Fused` there is one box, which
    may be empty.

    >>> from fnshard.mesh import make_mesh
    >>> mesh = make_mesh(tensor=2, abstract=True)
    >>> [full for full, block in boxes((8,), P(Fused("tensor", 2)), mesh, {"tensor": 1})]
    [(slice(2, 4, None),), (slice(6, 8, None),)]
    """
    # Find where the block lies in a tensor whose parts are side by side, rank by rank, and from there dim by
    # dim where its runs lie in the tensor itself.
    slices = block_slices(shape, layout.contiguous, mesh, coordinate)
    runs = []
    for dim, (size, where) in enumerate(zip(shape, slices, strict=True)):
        count = layout.fused(dim)
        ranks = mesh.axis_size(layout.of(dim)[0]) if count > 1 else 1
        runs.append(list(_cut_into_runs(where, size, count, ranks)))
    # A tensor without dims has one box, with no slices: the product of no lists is one empty tuple.
    return [(tuple(f for f, _ in box), tuple(b for _, b in box)) for box in itertools.product(*runs)]


def _cut_into_runs(where: slice, size: int, count: int, ranks: int) -> Iterator[tuple[slice, slice]]:
    """Cut `where`, a slice of a dim whose parts were put side by side rank by rank, into runs that are
    contiguous in the dim as it is.

    Yields:
        For each run, its slice of the dim, and its slice of `where`.
    """
    if count == 1:
        yield where, slice(0, where.stop - where.start)
        return
    # Side by side, the dim is rank 0's part of each matrix, then rank 1's part of each, and so on.
    part = max(size // count // ranks, 1)
    cuts = range(where.start - where.start % part + part, where.stop, part)
    for first, last in itertools.pairwise((where.start, *cuts, where.stop)):
        rank, matrix = divmod(first // part, count)
        start = matrix * (size // count) + rank * part + first % part
        yield slice(start, start + last - first), slice(first - where.start, last - where.start)


def side_by_side(full: Tensor, layout: P, mesh: Mesh, inverse: bool = False) -> Tensor:
    """Move the parts of each rank side by side, so that `layout.contiguous` splits the tensor.

    Args:
        inverse: move them back.
    """
    for dim in range(full.dim()):
        count = layout.fused(dim)
        if count == 1:
            continue
        # The dim is [count, ranks, part]; side by side it is [ranks, count, part].
        ranks = mesh.axis_size(layout.of(dim)[0])
        part = full.shape[dim] // count // ranks
        sizes = (ranks, count, part) if inverse else (count, ranks, part)
        full = full.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return full


def slot_layout(slot: Sequence[int], shape: Sequence[int], layout: P, mesh: Mesh) -> P | None:
    """Return the layout of a slot: optimizer state of shape `slot`, of a leaf of `shape` that has `layout`.

    It is the layout that `like_leaf` finds. A slot of other matrices, one for each of the leaf's, is cut
    along its rows, by all axes that cut the rows or columns of the leaf. For yet another shape the layout is
    None.

    >>> from fnshard.mesh import make_mesh
    >>> slot_layout((6, 6), (6, 4), P(None, "shard"), make_mesh(shard=2, abstract=True))
    P('shard')
    """
    as_leaf = like_leaf(slot, shape, layout, mesh)
    if as_leaf is not None:
        return as_leaf
    if len(slot) != len(shape) or len(slot) < 2 or slot[:-2] != shape[:-2]:
        return None
    rows = mesh.ordered({axis for dim in (-2, -1) for axis in layout.of(len(shape) + dim)})
    return P(*(layout.entries(dim) for dim in range(len(shape) - 2)), rows)


def like_leaf(slot: Sequence[int], shape: Sequence[int], layout: P, mesh: Mesh) -> P | None:
    """Return the layout of state whose blocks an optimizer computes from blocks of a leaf, or None.

    The arguments are those of `slot_layout`. A dim of the leaf's size is cut as the leaf is. A dim of size 1
    is whole. A dim that is k times shorter, with one number for k of the leaf's, is cut as the leaf is,
    if every cut of the leaf falls between two of these numbers. A state of another shape has no such layout:
    None. State without dims is whole, and so is all state of a leaf that is whole.

    >>> from fnshard.mesh import make_mesh
    >>> like_leaf((1, 2), (6, 128), P("shard", "tensor"), make_mesh(shard=2, tensor=2, abstract=True))
    P(None, 'tensor')
    """
    if not slot or not mesh.ordered(layout.axes):
        return P()
    if len(slot) != len(shape):
        return None
    parts = []
    for dim, (slot_size, size) in enumerate(zip(slot, shape, strict=True)):
        if slot_size == size:
            parts.append(layout.entries(dim))
        elif slot_size == 1:
            parts.append(None)
        else:
            # One number for k of the leaf's: no cut of the leaf may fall inside of such a group.
            pieces = mesh.axes_size(layout.of(dim)) * layout.fused(dim)
            if slot_size == 0 or size % slot_size or slot_size % pieces:
                return None
            parts.append(layout.entries(dim))
    return P(*parts)


def every_rank_has_some(size: int, ranks: int) -> bool:
    """Return whether a dim that is cut in equal blocks, the last padded, leaves no rank without numbers."""
    return -(-size // ranks) * (ranks - 1) < size
