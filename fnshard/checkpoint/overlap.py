"""Overlap: find whether boxes of a tensor share elements, without a look at each pair of boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

Box = tuple[Sequence[int], Sequence[int]]  # where it begins, and its shape


def have_overlap(boxes: Iterable[Box]) -> bool:
    """Return whether an element is in two boxes of a tensor.

    Boxes of a grid, which ranks write, take time in proportion to their number, times the tensor's dims.

    >>> have_overlap([((0, 0), (2, 2)), ((0, 2), (2, 2))]), have_overlap([((0, 0), (2, 2)), ((1, 1), (2, 2))])
    (False, True)
    """
    return _meet([box for box in boxes if math.prod(box[1])], 0)


def _meet(boxes: list[Box], dim: int) -> bool:
    """Return whether two boxes, which share an index of each dim before `dim`, share an element."""
    if len(boxes) < 2:
        return False
    if dim == len(boxes[0][0]):
        return True
    # Go along the dim, and keep the boxes that it is in. Two boxes that share an index share that at which
    # the later one begins, so that there is nothing to compare elsewhere.
    inside: list[Box] = []
    for start, beginning in groupby(sorted(boxes, key=lambda b: b[0][dim]), key=lambda b: b[0][dim]):
        inside = [b for b in inside if b[0][dim] + b[1][dim] > start] + list(beginning)
        if _meet(inside, dim + 1):
            return True
    return False
