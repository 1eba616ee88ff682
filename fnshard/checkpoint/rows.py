"""Rows: a sharded leaf put together for one rank, a run of whole rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from fnshard.layout.spec import LayoutSpec, block_slices
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives

PIECE_bytes = 64 << 20  # of all ranks together, unless one row is more


def gather_rows(
    block: Tensor, spec: LayoutSpec, mesh: Mesh, comm: Collectives, *, receives: bool
) -> Iterator[tuple[int, Tensor]]:
    """A leaf in runs of whole rows, (index along dim 0, rows), in any order. A collective, to be run dry.

    The rows are to be read before the next are asked for. A leaf without dims is one row.

    Args:
        block: what this rank stores of it.
        receives: whether this rank gets the rows; all ranks take part.
    """
    axes = mesh.ordered(spec.storage.axes)
    ranks = mesh.group_ranks(axes)
    if not spec.shape:
        spec_slices, block = [(slice(0, 1),)] * len(ranks), block.view(1)
    else:
        spec_slices = [block_slices(spec.shape, spec.storage, mesh, mesh.coordinate(r)) for r in ranks]
    shape = spec.shape or (1,)
    row = math.prod(block.shape[1:])
    if 0 in shape:
        return
    step = max(1, PIECE_bytes // (len(ranks) * row * block.dtype.itemsize))
    for low in range(0, block.shape[0], step):
        piece = block[low : low + step]
        if not axes:
            if receives:
                yield low, piece
            continue
        flat = comm.send_buffer(piece.numel(), piece.dtype, axes)
        flat.view(piece.shape).copy_(piece)
        handle = comm.all_gather(flat, axes)
        parts = handle.wait()
        if receives:
            views = [part.view(piece.shape) for part in parts]
            yield from _joined(views, spec_slices, low, shape)
        handle.release()


def _joined(
    parts: list[Tensor], slices: list[tuple[slice, ...]], low: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """Of every rank's rows from `low` of its block on: whole rows, padding cut off."""
    runs: dict[int, Tensor] = {}
    for part, where in zip(parts, slices, strict=True):
        count = min(part.shape[0], where[0].stop - where[0].start - low)
        if count <= 0:
            continue
        first, columns = where[0].start + low, where[1:]
        valid = part[(slice(count), *(slice(s.stop - s.start) for s in columns))]
        if valid.shape[1:] == shape[1:]:
            runs[first] = valid
            continue
        if first not in runs:
            runs[first] = part.new_empty((count, *shape[1:]))
        runs[first][(slice(None), *columns)] = valid
    yield from runs.items()
