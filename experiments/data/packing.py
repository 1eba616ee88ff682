"""Packing: samples of many lengths into rows of one length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

OPEN = 32  # rows; twice as many fill them by less than 1% more, and keep a sample waiting twice as long


@dataclass
class RowPacker:
    """Best fit among the few rows that are open.

    A sample goes where the least room is left behind it. Where it fits nowhere it begins a row of its own;
    is that one too many, the oldest is closed. So no sample waits for longer than `open_rows` rows.

    Args:
        context: room in a row.
        shortest: the least length that can come; a row with less room is closed at once.
        open_rows: at most so many rows are open.
        rows: the open ones, oldest first: the samples in each, and the room that is left.
    """

    context: int
    shortest: int = 1
    open_rows: int = OPEN
    rows: list[tuple[list[int], int]] = field(default_factory=list)

    def add(self, sample: int, length: int) -> list[int] | None:
        """Put a sample into a row; gives the samples of the row that this closes, if it closes one.

        Raises:
            ValueError: the sample is longer than a row.
        """
        if not 0 < length <= self.context:
            raise ValueError(f"sample {sample} of length {length} does not fit a row of {self.context}.")
        fits = [(room, at) for at, (_, room) in enumerate(self.rows) if room >= length]
        room, at = min(fits, default=(self.context, len(self.rows)))
        if not fits:
            self.rows.append(([], room))
        row = self.rows[at][0]
        row.append(sample)
        self.rows[at] = (row, room - length)
        if room - length < self.shortest:
            return self.rows.pop(at)[0]
        return self.rows.pop(0)[0] if len(self.rows) > self.open_rows else None


def pack(lengths: Iterable[int], context: int, *, open_rows: int = OPEN) -> Iterator[list[int]]:
    """Rows of sample numbers, each sample once, no row over `context`.

    >>> list(pack([3, 9, 6, 1, 4, 6], context=10))
    [[0, 2, 3], [4, 5], [1]]
    """
    packer = RowPacker(context, open_rows=open_rows)
    for sample, length in enumerate(lengths):
        closed = packer.add(sample, length)
        if closed is not None:
            yield closed
    yield from (row for row, _ in packer.rows)
