"""Boxes: read a tensor that files hold in pieces, a box at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard.checkpoint.overlap import have_overlap
from fnshard.runtime.files.tensorfile import Corrupt

# Whatever gives a tensor's values for slices of it: a PlacedTensor, a slice of a safetensors file, a tensor.
Data = Any


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: where it begins, its shape, and a function that opens its data when needed."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    open: Callable[[], Data]


@dataclass(frozen=True)
class Pieces:
    """The data of a tensor of which files have boxes; `pieces[slices]` reads those that it touches."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[Piece]

    def __getitem__(self, slices: Any) -> Tensor:
        wanted = tuple(slice(0, size) for size in self.shape) if slices is ... else slices
        bounds = [s.indices(n)[:2] for s, n in zip(wanted, self.shape, strict=True)]
        out = torch.empty([max(0, last - first) for first, last in bounds], dtype=self.dtype)
        missing = out.numel()

        for piece in self.pieces:
            # The overlap of the piece with the wanted box, by its bounds in the full tensor.
            overlap = [
                (max(first, at), min(last, at + size))
                for (first, last), at, size in zip(bounds, piece.offset, piece.shape, strict=True)
            ]
            if any(low >= high for low, high in overlap):
                continue

            # The same box as slices of the piece and of the result.
            of_piece, of_out = [], []
            for (low, high), at, (first, _) in zip(overlap, piece.offset, bounds, strict=True):
                of_piece.append(slice(low - at, high - at))
                of_out.append(slice(low - first, high - first))
            out[tuple(of_out)] = piece.open()[tuple(of_piece)]
            missing -= math.prod(high - low for low, high in overlap)

        if missing:
            raise Corrupt(f"has {out.numel() - missing} of the {out.numel()} numbers that are read")
        return out


def check_pieces(name: str, shape: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Refuse pieces that are not the whole of a tensor, each part once."""
    is_inside = all(
        at >= 0 and at + size <= whole
        for piece in pieces
        for at, size, whole in zip(piece.offset, piece.shape, shape, strict=True)
    )
    count = sum(math.prod(piece.shape) for piece in pieces)
    if not is_inside or count != math.prod(shape):
        raise Corrupt(f"has {count} of the {math.prod(shape)} numbers of {name!r} {list(shape)}")
    if have_overlap((piece.offset, piece.shape) for piece in pieces):
        raise Corrupt(f"has some of the numbers of {name!r} {list(shape)} twice, and others not at all")


def boxes_of_run(
    shape: Sequence[int], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split elements `[first, last)` of a tensor, in the order of memory, into boxes in that order.

    Each is given by where it begins and by its shape.

    >>> list(boxes_of_run((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return

    # Rows of dim 0: the run begins in row `begin`, at place `start` of it, and ends in row `end`.
    row = math.prod(shape[1:])
    begin, start = divmod(first, row)
    end, stop = divmod(last, row)
    if begin == end:  # within one row
        for offset, size in boxes_of_run(shape[1:], start, stop):
            yield (begin, *offset), (1, *size)
        return

    # The end of the first row, whole rows in one box, and the beginning of the last row.
    if start:
        for offset, size in boxes_of_run(shape[1:], start, row):
            yield (begin, *offset), (1, *size)
        begin += 1
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    for offset, size in boxes_of_run(shape[1:], 0, stop):
        yield (end, *offset), (1, *size)
