"""Buckets: the leaves of one unit that travel together, and how they are packed flat.

A bucket's wire form is one flat tensor per rank; each leaf's block starts at a multiple of 128
bytes. Blocks are padded to equal size on all ranks; padding is zero wherever it is summed, and is
cut off before `fn`, a checkpoint or a norm can see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fnshard.mesh import Mesh
from fnshard.spec import LayoutSpec, P, block_shape, block_slices

ALIGN_bytes = 128


@dataclass(frozen=True)
class Piece:
    """One leaf's place in a bucket: full shape, padded block shape, offset in elements."""

    path: str
    shape: tuple[int, ...]
    layout: P
    block: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the padded block."""
        return math.prod(self.block)


@dataclass(frozen=True)
class Bucket:
    """One collective: leaves of `unit` exchanged over `axes` as `dtype`. `numel`: of one rank's row."""

    name: str
    unit: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    numel: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves in it."""
        return tuple(p.path for p in self.pieces)

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank's row on the wire."""
        return self.numel * self.dtype.itemsize


def make_buckets(
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    layout: Callable[[LayoutSpec], P],
    dtype: Callable[[LayoutSpec], torch.dtype],
    purpose: str,
) -> tuple[Bucket, ...]:
    """Group leaves by (unit, axes, dtype), in order of the tree.

    Args:
        layout, dtype: which of a spec's layouts and dtypes travel.
        purpose: first part of the buckets' names ("gather", "reduce", ...).
    """
    groups: dict[tuple[str, tuple[str, ...], torch.dtype], list[str]] = {}
    for path, spec in specs.items():
        key = (spec.unit, mesh.ordered(layout(spec).axes), dtype(spec))
        groups.setdefault(key, []).append(path)
    count: dict[str, int] = {}
    out = []
    for (unit, axes, wire), paths in groups.items():
        index = count[unit] = count.get(unit, -1) + 1
        pieces, numel = _place({p: specs[p] for p in paths}, mesh, layout, wire)
        name = f"{purpose}/{unit}" + (f".{index}" if index else "")
        out.append(Bucket(name, unit, axes, wire, pieces, numel))
    return tuple(out)


def _place(
    specs: Mapping[str, LayoutSpec], mesh: Mesh, layout: Callable[[LayoutSpec], P], dtype: torch.dtype
) -> tuple[tuple[Piece, ...], int]:
    step = max(1, ALIGN_bytes // dtype.itemsize)
    offset, pieces = 0, []
    for path, spec in specs.items():
        block = block_shape(spec.shape, layout(spec), mesh)
        pieces.append(Piece(path, spec.shape, layout(spec), block, offset))
        offset += -(-math.prod(block) // step) * step
    last = pieces[-1]
    return tuple(pieces), last.offset + last.numel if len(pieces) == 1 else offset


# ------------------------------------------------------------------ packing


@dataclass(frozen=True)
class _Part:
    """One rank's unpadded block of one leaf: where it lies in the full leaf and in that rank's row.

    Views are made with `as_strided` from these numbers: one call each, where slicing would take four.
    """

    path: str
    size: tuple[int, ...]
    full_stride: tuple[int, ...]
    full_offset: int
    row_stride: tuple[int, ...]
    row_offset: int

    def of_full(self, full: Tensor) -> Tensor:
        """The block inside a contiguous full leaf."""
        return full.as_strided(self.size, self.full_stride, self.full_offset + full.storage_offset())

    def of_row(self, row: Tensor, start: int = 0) -> Tensor:
        """The block inside a row (which begins `start` elements into `row`)."""
        return row.as_strided(self.size, self.row_stride, self.row_offset + start + row.storage_offset())


def _part(piece: Piece, slices: Sequence[slice]) -> _Part:
    strides = _strides(piece.shape)
    offset = sum(s.start * stride for s, stride in zip(slices, strides, strict=True))
    size = tuple(s.stop - s.start for s in slices)
    return _Part(piece.path, size, strides, offset, _strides(piece.block), piece.offset)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


class Packer:
    """Moves one bucket's leaves in and out of flat rows; what it needs of the mesh is worked out once."""

    def __init__(self, bucket: Bucket, mesh: Mesh, rank: int):
        self.bucket = bucket
        ranks = mesh.group_ranks(bucket.axes, rank)
        self.rows = len(ranks)
        self._parts = [  # [rank of the group][leaf]
            [_part(p, block_slices(p.shape, p.layout, mesh, mesh.coordinate(r))) for p in bucket.pieces]
            for r in ranks
        ]
        self._mine = {
            p.path: (block_slices(p.shape, p.layout, mesh, mesh.coordinate(rank)), p.block)
            for p in bucket.pieces
        }
        self._places = [(p.path, p.block, _strides(p.block), p.offset) for p in bucket.pieces]
        filled = sum(p.numel for p in bucket.pieces) * self.rows
        self._dense = filled == bucket.numel * self.rows
        self._unpadded = self._dense and filled == sum(math.prod(p.size) for row in self._parts for p in row)

    def blocks(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a row [numel], one padded block per leaf."""
        base = flat.storage_offset()
        return {path: flat.as_strided(block, stride, base + at) for path, block, stride, at in self._places}

    def pack_blocks(self, blocks: Mapping[str, Tensor], out: Tensor) -> None:
        """This rank's stored blocks -> a row [numel], cast to the wire dtype."""
        if not self._dense:
            out.zero_()
        for path, view in self.blocks(out).items():
            view.copy_(blocks[path])

    def unpack_rows(
        self, rows: Sequence[Tensor], dtype_of: Callable[[str], torch.dtype]
    ) -> dict[str, Tensor]:
        """One row per rank -> full leaves in their compute dtype, padding cut off."""
        device = rows[0].device
        out = {
            p.path: torch.empty(p.shape, dtype=dtype_of(p.path), device=device) for p in self.bucket.pieces
        }
        self.unpack_into(rows, out)
        return out

    def unpack_into(self, rows: Sequence[Tensor], fulls: Mapping[str, Tensor]) -> None:
        """One row per rank -> written into existing full leaves."""
        for row, parts in zip(rows, self._parts, strict=True):
            for part in parts:
                part.of_full(fulls[part.path]).copy_(part.of_row(row))

    def pack_fulls(self, fulls: Mapping[str, Tensor], out: Tensor) -> None:
        """Full gradients -> rows [n * numel], one row per rank; a missing leaf is zero."""
        if not self._unpadded or len(fulls) != len(self.bucket.pieces):
            out.zero_()
        for path, full in fulls.items():
            fulls = fulls if full.is_contiguous() else {**fulls, path: full.contiguous()}
        for index, parts in enumerate(self._parts):
            start = index * self.bucket.numel
            for part in parts:
                full = fulls.get(part.path)
                if full is not None:
                    part.of_row(out, start).copy_(part.of_full(full))

    def cut(self, fulls: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's blocks of full leaves: views where nothing is padded, else padded copies."""
        return {path: padded(fulls[path][slices], block) for path, (slices, block) in self._mine.items()}


def padded(block: Tensor, shape: Sequence[int]) -> Tensor:
    """`block` itself, or a zero-padded copy of the given shape."""
    if tuple(block.shape) == tuple(shape):
        return block
    out = block.new_zeros(tuple(shape))
    out[tuple(slice(0, n) for n in block.shape)] = block
    return out


def local_block(full: Tensor, layout: P, mesh: Mesh, rank: int | None = None) -> Tensor:
    """A rank's padded block of a full leaf, as a tensor of its own."""
    slices = block_slices(full.shape, layout, mesh, mesh.coordinate(rank))
    block = padded(full[slices], block_shape(full.shape, layout, mesh))
    return block.clone(memory_format=torch.contiguous_format)
