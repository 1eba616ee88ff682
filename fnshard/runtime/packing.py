"""Pack the leaves of a bucket into flat rows, and unpack them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.schedule.buckets import Bucket, Piece, row_of_rank
from fnshard.compiler.schedule.instructions import Parts
from fnshard.layout.partition import P, block_shape, block_slices, side_by_side
from fnshard.mesh import Mesh

MOST_GAPS = 16  # gaps that are cleared one by one, each by a launch of its own


class Packer:
    """A packer of a bucket's leaves into flat rows, and out of them; sizes and places are computed once.

    A leaf that is split along dim 0 alone is, rank by rank, a run of its elements. Such runs are cut out of
    rows and leaves by one `split_with_sizes` each, and copied by one `_foreach_copy_`, as in FSDP2's copy-in
    and copy-out. Leaves that are split along other dims are copied through strided views.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, rank: int):
        self.bucket = bucket

        # Where each rank's blocks lie in the full leaves, and in its row of the bucket.
        ranks = mesh.group_ranks(bucket.axes, rank)
        self.rows = len(ranks)
        slices = [
            [block_slices(p.shape, p.layout, mesh, mesh.coordinate(r)) for p in bucket.pieces] for r in ranks
        ]
        self._here = ranks.index(rank)
        pieces_here = list(zip(bucket.pieces, slices[self._here], strict=True))
        self._mine = {piece.key: (where, piece.block) for piece, where in pieces_here}
        self._blocks = _Cuts.of([(p.offset, p.numel) for p in bucket.pieces], bucket.numel)

        # Find the leaves that `split_with_sizes` cuts, and the runs of each rank's row that they have.
        extents = [  # [rank][leaf]: elements that are not padding
            [math.prod(s.stop - s.start for s in leaf) for leaf in row] for row in slices
        ]
        has_runs = [  # a leaf of which several ranks have the same part consists of no such runs
            all(not p.layout.of(d) for d in range(1, len(p.shape))) and sum(counts) == math.prod(p.shape)
            for p, counts in zip(bucket.pieces, zip(*extents, strict=True), strict=True)
        ]
        self._runs = [i for i, is_cut in enumerate(has_runs) if is_cut]
        self._row_runs = [
            _Cuts.of([(bucket.pieces[i].offset, row[i]) for i in self._runs], bucket.numel) for row in extents
        ]

        # Blocks lie in a leaf in the order of its own axes, and rows in the order of the group's.
        self._order = {
            i: sorted(range(self.rows), key=lambda r: slices[r][i][0].start if slices[r][i] else 0)
            for i in self._runs
        }
        self._leaf_runs = {i: [extents[r][i] for r in self._order[i]] for i in self._runs}

        # The other leaves, as strided views; and this rank's own blocks of all leaves.
        self._strided = [
            (i, [_Window.of(bucket.pieces[i], row[i]) for row in slices])
            for i, is_cut in enumerate(has_runs)
            if not is_cut
        ]
        self._windows = [_Window.of(piece, where) for piece, where in pieces_here]
        # Where no block is padded, only the gaps between blocks have to be cleared.
        filled = sum(p.numel for p in bucket.pieces)
        self._unpadded = self.rows * filled == sum(map(sum, extents))

    def blocks(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a row [numel], one padded block per leaf."""
        parts = self._blocks.of_flat(flat)
        return {p.key: part.view(p.block) for p, part in zip(self.bucket.pieces, parts, strict=True)}

    def pack_blocks(self, blocks: Mapping[str, Tensor], out: Tensor) -> None:
        """Copy this rank's stored blocks into a row [numel], cast to the wire dtype."""
        self._clear(out, [out])
        sources = [blocks[p.key].reshape(-1) for p in self.bucket.pieces]
        torch._foreach_copy_(self._blocks.of_flat(out), sources)

    def write_blocks(self, blocks: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> None:
        """Copy this rank's stored blocks to their places in flat full leaves, cast to the leaves' dtype."""
        # A window's strides are those of a contiguous block.
        contiguous = [blocks[p.key].contiguous() for p in self.bucket.pieces]
        torch._foreach_copy_(
            [w.of_full(leaf) for w, leaf in zip(self._windows, leaves, strict=True)],
            [w.of_block(block) for w, block in zip(self._windows, contiguous, strict=True)],
        )

    def unpack_rows(self, rows: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Make full leaves in `dtype` from one row per rank, padding cut off.

        Each is a tensor of its own, so that a backward kernel can free one leaf while it makes the gradient
        of the next.
        """
        device = rows[0].device
        leaves = {p.key: torch.empty(p.shape, dtype=dtype, device=device) for p in self.bucket.pieces}
        self.unpack_into(rows, leaves)
        return leaves

    def unpack_into(self, rows: Sequence[Tensor], full_leaves: Mapping[str, Tensor]) -> None:
        """Copy one row per rank into existing, contiguous full leaves."""
        pieces = self.bucket.pieces
        targets, sources = self._pair_runs([full_leaves[p.key] for p in pieces], rows)
        for i, windows in self._strided:
            targets += [w.of_full(full_leaves[pieces[i].key]) for w in windows]
            sources += [w.of_row(row) for w, row in zip(windows, rows, strict=True)]
        torch._foreach_copy_(targets, sources)

    def pack_full(self, full_leaves: Mapping[str, Tensor], out: Tensor) -> None:
        """Copy full gradients into rows [n * numel], one per rank; a missing leaf is zero."""
        self._pack(full_leaves, out, out.view(self.rows, -1).unbind(0))

    def pack_for_peer(self, full_leaves: Mapping[str, Tensor], out: Tensor) -> None:
        """Copy the other rank's part of full gradients, in a group of two, into a row [numel]."""
        self._pack(full_leaves, out, [None, out] if self._here == 0 else [out, None])

    def add_to_own(self, full_leaves: Mapping[str, Tensor], got: Tensor, out: Tensor) -> None:
        """Add a peer's row [numel] to this rank's blocks of full gradients, into `out`, perhaps that row."""
        if out is not got:  # the peer's row is zero already where no block lies
            self._clear(out, [out], everywhere=not self._unpadded)
        for piece, window in zip(self.bucket.pieces, self._windows, strict=True):
            torch.add(window.of_full(full_leaves[piece.key]), window.of_row(got), out=window.of_row(out))

    def _pack(self, full_leaves: Mapping[str, Tensor], out: Tensor, rows: Sequence[Tensor | None]) -> None:
        """Copy full gradients into the ranks' rows that make up `out`; those that are None are left out."""
        pieces = self.bucket.pieces
        sent = [row for row in rows if row is not None]
        self._clear(out, sent, everywhere=not self._unpadded or len(full_leaves) != len(pieces))
        contiguous = [full_leaves[p.key].contiguous() if p.key in full_leaves else None for p in pieces]
        sources, targets = self._pair_runs(contiguous, rows)
        for i, windows in self._strided:
            if contiguous[i] is not None:
                pairs = [(w, row) for w, row in zip(windows, rows, strict=True) if row is not None]
                sources += [w.of_full(contiguous[i]) for w, _ in pairs]
                targets += [w.of_row(row) for w, row in pairs]
        torch._foreach_copy_(targets, sources)

    def _clear(self, out: Tensor, rows: Sequence[Tensor], everywhere: bool = False) -> None:
        """Write zeros where no block lies, which for most buckets is after the last one; or everywhere."""
        gaps = [] if everywhere else [gap for row in rows for gap in self._blocks.gaps_of(row)]
        if everywhere or len(gaps) > MOST_GAPS:
            out.zero_()
            return
        for gap in gaps:
            gap.zero_()

    def _pair_runs(
        self, full_leaves: Sequence[Tensor | None], rows: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return matching 1-d views of leaves and of rows, for leaves that are split along dim 0.

        A leaf or a row that is None is left out.
        """
        cut_rows = [row if row is None else cuts.of_flat(row)
                    for cuts, row in zip(self._row_runs, rows, strict=True)]  # fmt: skip
        of_leaves: list[Tensor] = []
        of_rows: list[Tensor] = []
        for place, i in enumerate(self._runs):
            full = full_leaves[i]
            if full is None:
                continue
            runs = full.view(-1).split_with_sizes(self._leaf_runs[i])
            for run, r in zip(runs, self._order[i], strict=True):
                if cut_rows[r] is not None:
                    of_leaves.append(run)
                    of_rows.append(cut_rows[r][place])
        return of_leaves, of_rows

    def cut(self, full_leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's blocks of full leaves: views, or copies where they are padded."""
        return {
            path: pad_to(full_leaves[path][slices], block) for path, (slices, block) in self._mine.items()
        }


class Stacks:
    """A packer of leaves that single ranks compute whole: each gets a row [numel / n] from every rank.

    Tensors are named by path and name.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, rank: int):
        self.bucket = bucket
        ranks = mesh.group_ranks(bucket.axes, rank)
        self._ranks, self._mine = len(ranks), row_of_rank(bucket, ranks.index(rank), len(ranks))
        self._packer = Packer(self._mine, mesh, rank)

    def blocks(self, flat: Tensor) -> Parts:
        """Return views of all rows, one padded block per value of a leaf."""
        views = {p.key: flat[p.offset : p.offset + p.numel].view(p.block) for p in self.bucket.pieces}
        return parts_of(self.bucket, views)

    def pack_blocks(self, blocks: Parts, out: Tensor) -> None:
        """Copy this rank's padded blocks of all leaves into rows, cast to the wire dtype."""
        views, pieces = self.blocks(out), self.bucket.pieces
        torch._foreach_copy_(
            [views[p.path][p.slot] for p in pieces], [blocks[p.path][p.slot] for p in pieces]
        )

    def wholes(self, rows: Tensor) -> Parts:
        """Make the whole leaves that this rank computes from every rank's row of them."""
        if not self._mine.pieces:
            return {}
        leaves = self._packer.unpack_rows(rows.view(self._ranks, -1).unbind(0), rows.dtype)
        return parts_of(self._mine, leaves)

    def pack_wholes(self, leaves: Parts, out: Tensor) -> None:
        """Copy whole leaves that this rank has computed into a row for every rank."""
        if self._mine.pieces:
            flat = {p.key: leaves[p.path][p.slot] for p in self._mine.pieces}
            self._packer.pack_full(flat, out)


def parts_of(bucket: Bucket, tensors: Mapping[Any, Tensor]) -> Parts:
    """Sort the tensors of pieces by path and name."""
    out: Parts = {path: {} for path in bucket.paths}
    for piece in bucket.pieces:
        out[piece.path][piece.slot] = tensors[piece.key]
    return out


@dataclass(frozen=True)
class _Cuts:
    """Runs of a flat tensor, cut out by one call.

    Args:
        sizes: the sizes of all runs and gaps, in order.
        data, gaps: which of them are runs, and which gaps.
    """

    sizes: tuple[int, ...]
    data: tuple[int, ...]
    gaps: tuple[int, ...]

    @staticmethod
    def of(runs: Sequence[tuple[int, int]], total: int) -> _Cuts:
        """Make cuts from (start, length) of each run, in order."""
        sizes, data, at = [], [], 0
        for start, length in runs:
            if start > at:
                sizes.append(start - at)
            data.append(len(sizes))
            sizes.append(length)
            at = start + length
        if total > at:
            sizes.append(total - at)
        return _Cuts(tuple(sizes), tuple(data), tuple(sorted({*range(len(sizes))} - {*data})))

    def of_flat(self, flat: Tensor) -> Sequence[Tensor]:
        """Return views of the runs."""
        parts = flat.split_with_sizes(self.sizes)
        return [parts[i] for i in self.data] if self.gaps else parts

    def gaps_of(self, flat: Tensor) -> Sequence[Tensor]:
        """Return views of the gaps."""
        parts = flat.split_with_sizes(self.sizes) if self.gaps else ()
        return [parts[i] for i in self.gaps]


@dataclass(frozen=True)
class _Window:
    """A rank's unpadded block of a leaf, as strided views of the full leaf and of that rank's row."""

    size: tuple[int, ...]
    full_stride: tuple[int, ...]
    full_offset: int
    row_stride: tuple[int, ...]
    row_offset: int

    @staticmethod
    def of(piece: Piece, slices: Sequence[slice]) -> _Window:
        """Make a window from a piece, and from where a rank's block lies in the full leaf."""
        strides = contiguous_strides(piece.shape)
        offset = sum(s.start * stride for s, stride in zip(slices, strides, strict=True))
        size = tuple(s.stop - s.start for s in slices)
        return _Window(size, strides, offset, contiguous_strides(piece.block), piece.offset)

    def of_full(self, full: Tensor) -> Tensor:
        """View the block in a contiguous full leaf."""
        return full.as_strided(self.size, self.full_stride, self.full_offset + full.storage_offset())

    def of_block(self, block: Tensor) -> Tensor:
        """View a contiguous padded block without its padding."""
        return block.as_strided(self.size, self.row_stride, block.storage_offset())

    def of_row(self, row: Tensor) -> Tensor:
        """View the block in its rank's row."""
        return row.as_strided(self.size, self.row_stride, self.row_offset + row.storage_offset())


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor in row-major order."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def pad_to(block: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `block` itself, or a zero-padded copy of the given shape."""
    if tuple(block.shape) == tuple(shape):
        return block
    out = block.new_zeros(tuple(shape))
    out[tuple(slice(0, n) for n in block.shape)] = block
    return out


def local_block(full: Tensor, layout: P, mesh: Mesh, rank: int | None = None) -> Tensor:
    """Return a rank's padded block of a full leaf, as a tensor of its own."""
    full = side_by_side(full, layout, mesh)
    slices = block_slices(full.shape, layout.contiguous, mesh, mesh.coordinate(rank))
    block = pad_to(full[slices], block_shape(full.shape, layout, mesh))
    # A view would keep the memory of the whole leaf.
    return block.clone(memory_format=torch.contiguous_format)
