"""Buckets: the leaves of one unit that travel together, and how they are packed flat.

A bucket's wire form is one flat tensor per rank; each leaf's block starts at a multiple of 128
bytes. Blocks are padded to equal size on all ranks; padding is zero wherever it is summed, and is
cut off before `fn`, a checkpoint or a norm can see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    @property
    def dense(self) -> bool:
        """Whether blocks fill the row and pad nothing, on every rank."""
        return self._filled

    def __post_init__(self) -> None:
        filled = sum(p.numel for p in self.pieces) == self.numel
        object.__setattr__(self, "_filled", filled)


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


class Packer:
    """Moves one bucket's leaves in and out of flat rows; what it needs of the mesh is worked out once."""

    def __init__(self, bucket: Bucket, mesh: Mesh, rank: int):
        self.bucket = bucket
        ranks = mesh.group_ranks(bucket.axes, rank)
        here = [mesh.coordinate(r) for r in ranks]
        self._slices = [[block_slices(p.shape, p.layout, mesh, c) for c in here] for p in bucket.pieces]
        self._mine = [block_slices(p.shape, p.layout, mesh, mesh.coordinate(rank)) for p in bucket.pieces]
        self.rows = len(ranks)
        self._whole = all(
            all(s.stop - s.start == b for s, b in zip(slices, p.block, strict=True))
            for p, per_rank in zip(bucket.pieces, self._slices, strict=True)
            for slices in per_rank
        )

    def blocks(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a row [numel], one padded block per leaf."""
        return {p.path: flat.narrow(0, p.offset, p.numel).view(p.block) for p in self.bucket.pieces}

    def pack_blocks(self, blocks: Mapping[str, Tensor], out: Tensor) -> None:
        """This rank's stored blocks -> a row [numel], cast to the wire dtype."""
        if not self.bucket.dense:
            out.zero_()
        for path, view in self.blocks(out).items():
            view.copy_(blocks[path])

    def unpack_rows(
        self, rows: Sequence[Tensor], dtype_of: Callable[[str], torch.dtype]
    ) -> dict[str, Tensor]:
        """One row per rank -> full leaves in their compute dtype, padding cut off."""
        out: dict[str, Tensor] = {}
        for piece, per_rank in zip(self.bucket.pieces, self._slices, strict=True):
            full = torch.empty(piece.shape, dtype=dtype_of(piece.path), device=rows[0].device)
            self._fill(full, piece, per_rank, rows)
            out[piece.path] = full
        return out

    def unpack_into(self, rows: Sequence[Tensor], fulls: Mapping[str, Tensor]) -> None:
        """One row per rank -> written into existing full leaves."""
        for piece, per_rank in zip(self.bucket.pieces, self._slices, strict=True):
            self._fill(fulls[piece.path], piece, per_rank, rows)

    def _fill(self, full: Tensor, piece: Piece, per_rank: list, rows: Sequence[Tensor]) -> None:
        for slices, row in zip(per_rank, rows, strict=True):
            block = row.narrow(0, piece.offset, piece.numel).view(piece.block)
            full[slices].copy_(block[_extent(slices)])

    def pack_fulls(self, fulls: Mapping[str, Tensor], out: Tensor) -> None:
        """Full gradients -> rows [n * numel], one row per rank; a missing leaf is zero."""
        if not (self._whole and self.bucket.dense and len(fulls) == len(self.bucket.pieces)):
            out.zero_()
        numel = self.bucket.numel
        for piece, per_rank in zip(self.bucket.pieces, self._slices, strict=True):
            full = fulls.get(piece.path)
            if full is None:
                continue
            for i, slices in enumerate(per_rank):
                row = out.narrow(0, i * numel + piece.offset, piece.numel).view(piece.block)
                row[_extent(slices)].copy_(full[slices])

    def cut(self, fulls: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's blocks of full leaves: views where nothing is padded, else padded copies."""
        out = {}
        for piece, slices in zip(self.bucket.pieces, self._mine, strict=True):
            out[piece.path] = padded(fulls[piece.path][slices], piece.block)
        return out


def _extent(slices: Iterable[slice]) -> tuple[slice, ...]:
    return tuple(slice(0, s.stop - s.start) for s in slices)


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
