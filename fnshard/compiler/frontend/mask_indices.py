"""Mask indices: a mask of Python bools in an index, as the integers it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def positions(index: Any, shape: Sequence[int]) -> Any:
    """An index of a tensor of this shape, in which lists of bools are lists of integers.

    A mask of Python values is known while tracing; a tensor made of it would not be.

    Raises:
        IndexError: a mask that is not as long as its dim.

    >>> positions((slice(None), [True, False, True]), (2, 3))
    (slice(None, None, None), [0, 2])
    >>> positions([False, True], (2, 3))
    [1]
    """
    parts = index if isinstance(index, tuple) else (index,)
    found = tuple(
        [i for i, v in enumerate(part) if v] if _masks(part, _dim(parts, k, len(shape)), shape) else part
        for k, part in enumerate(parts)
    )
    return found if isinstance(index, tuple) else found[0]


def _masks(part: Any, dim: int, shape: Sequence[int]) -> bool:
    if not isinstance(part, list) or not part or not all(isinstance(v, bool) for v in part):
        return False
    if dim >= len(shape) or len(part) != shape[dim]:
        raise IndexError(f"a mask of {len(part)} for dim {dim} of a tensor of shape {list(shape)}")
    return True


def _dim(parts: Sequence[Any], place: int, dims: int) -> int:
    """Which dim the part at a place indexes, where every part but None and ... indexes one."""
    before, behind = parts[:place], parts[place:]
    if any(p is ... for p in before):
        return dims - sum(p is not None for p in behind)
    return sum(p is not None for p in before)
