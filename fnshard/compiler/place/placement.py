"""Placements: what each rank along a mesh axis has of a value. They are types, and do not exist at run time.

There are three, after JAX's explicit sharding and torch's DTensor: the same on all ranks, split along a dim,
or a part of a sum. There is one rule for gradients: each rank's loss is its own, and the mean of all ranks'
losses is minimised. So the cotangent of a replicated value is a part of a sum on each rank, and that of a
split value is split like it. A leaf's gradient is summed over every axis along which the leaf is not split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Replicated:
    """A value that is the same on all ranks."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Split:
    """A value of which each rank has its part along `dim`.

    The dim, seen as [outer, ranks, rest], is cut in the middle.

    `outer` is 1 if the parts are contiguous. Otherwise dims were merged (a batch and a sequence that is
    split), or matrices lie side by side, each of them split (a fused query, key, value). Uneven parts are
    padded on the last ranks by numbers that count for nothing: ops that sum or contract along the dim mask
    them.
    """

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}, outer={self.outer})"


@dataclass(frozen=True)
class Partial:
    """A value of which each rank has a part: it is the sum of all parts, or their maximum."""

    how: Literal["sum", "max"] = "sum"

    def __str__(self) -> str:
        return "P" if self.how == "sum" else "P(max)"


Placement = Replicated | Split | Partial
REPLICATED, PARTIAL = Replicated(), Partial()


def fits(shape: Sequence[int], split: Split, ranks: int, empty: bool = False) -> bool:
    """Return whether a tensor can be split so that each rank has some of it, or if `empty` padding alone."""
    if split.dim >= len(shape) or shape[split.dim] % split.outer or math.prod(shape) == 0:
        return False
    # Parts are as long as the first. So the ranks before the last must not take all of the dim.
    size = shape[split.dim] // split.outer
    return empty or -(-size // ranks) * (ranks - 1) < size


def divides(shape: Sequence[int], split: Split, ranks: int) -> bool:
    """Return whether a tensor can be split in this way into equal parts."""
    return fits(shape, split, ranks) and shape[split.dim] % (split.outer * ranks) == 0


def local_shape(shape: Sequence[int], placement: Placement, ranks: int) -> tuple[int, ...]:
    """Return the shape of each rank's part of a tensor, padded where the parts are not even.

    >>> local_shape((4, 6), Split(1), 2), local_shape((4, 6), PARTIAL, 2)
    ((4, 3), (4, 6))
    """
    if not isinstance(placement, Split):
        return tuple(shape)
    dim, outer = placement.dim, placement.outer
    part = outer * -(-shape[dim] // outer // ranks)
    return tuple(part if d == dim else s for d, s in enumerate(shape))


def local_value(whole: Tensor, placement: Placement, ranks: int) -> Tensor:
    """Make a fake tensor of the size of each rank's part of another."""
    return whole.new_empty(local_shape(whole.shape, placement, ranks)).requires_grad_(whole.requires_grad)


def through_view(
    split: Split, before: Sequence[int], after: Sequence[int], ranks: int, empty: bool = False
) -> Split | None:
    """Return the split after a `view` to another shape, or None if no dim of that can hold it.

    Args:
        empty: as in `fits`.

    >>> through_view(Split(1), (4, 6), (24,), 2), through_view(Split(0, outer=4), (24,), (4, 6), 2)
    (Split(dim=0, outer=4), Split(dim=1, outer=1))
    """
    # Look at the run of dims that the split dim is in: a view mixes no dims of different runs.
    for first, last, into in _group_dims(before, after):
        if not first <= split.dim < last:
            continue
        # Seen as one dim, the run is split into `outer` blocks of all ranks.
        outer = math.prod(before[first : split.dim]) * split.outer
        below, even = math.prod(before[split.dim + 1 : last]), divides(before, split, ranks)

        # The dim after the view whose parts hold the same elements.
        for dim in into:
            above = math.prod(after[into[0] : dim])
            if outer % above:
                continue
            after_view = Split(dim, outer // above)
            if even and divides(after, after_view, ranks):
                return after_view
            # Uneven parts stay the same only if an index of the dim spans as many elements as before.
            if (
                not even
                and math.prod(after[dim + 1 : into[-1] + 1]) == below
                and fits(after, after_view, ranks, empty)
            ):
                return after_view
        return None
    return None


def _group_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Return runs of dims of equal product: first and last (exclusive) dim before, and the dims after."""
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        # Take one dim of each side, and more of the side whose product is smaller, until both are equal.
        first, start, size_before, size_after = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while size_before != size_after:
            if size_before < size_after:
                size_before, i = size_before * before[i], i + 1
            else:
                size_after, j = size_after * after[j], j + 1
        groups.append((first, i, list(range(start, j))))
    return groups
