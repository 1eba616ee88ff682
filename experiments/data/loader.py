"""Samples in batches without end, the same global one on any mesh, and exact resume on any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.data.batches import (
    OPEN,
    RowPacker,
    check_rows,
    check_state,
    fill,
    pair_batch,
    width_of,
)
from experiments.data.permutation import order
from experiments.data.prepared import Prepared

DRAWN = 1024  # samples whose order is computed together


@dataclass
class SampleLoader:
    """Batches without end: `for batch in loader`, epoch after epoch, each in an order of its own.

    Samples come in an order drawn from (seed, epoch) alone, go into the rows of global batches, and rank r
    takes its equal part of the rows. A row that has room left at the end of an epoch is filled from the next:
    no batch is partial, and every sample is seen as often as every other.

    A batch of pairs is `{"chosen": {tokens, targets}, "rejected": {tokens, targets}}`, int64 [B, T] each,
    padded on the right to the one width of all batches; it is never packed.

    Args:
        prepared: the samples.
        rows: of the *global* batch; a multiple of `ranks`.
        seed: of the orders.
        rank, ranks: which part of the rows this loader yields.
        pack: several samples a row, of the context's width; else one, of `width_of(prepared)`.
        open_rows: how many rows a sample can be put into; more pack tighter, and keep samples waiting longer.
        step: the next step to yield; read only.
    """

    prepared: Prepared
    rows: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    pack: bool = True
    open_rows: int = OPEN
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_rows(self.rows, self.rank, self.ranks)
        self.pack = self.pack and self.prepared.kind != "pairs"
        self.width = self.prepared.context if self.pack else width_of(self.prepared)
        self._stream = Stream(self.prepared.records, self.seed)
        self._packer = RowPacker(self.width, self.prepared.shortest, self.open_rows)

    @property
    def epoch(self) -> float:
        return self._stream.drawn / self.prepared.records

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        rows = [self._row() for _ in range(self.rows)]
        self.step += 1
        part = self.rows // self.ranks
        mine = rows[self.rank * part : (self.rank + 1) * part]
        if self.prepared.kind == "pairs":
            return pair_batch(self.prepared, [pair for (pair,) in mine], self.width)
        return fill(self.prepared, mine, self.width)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in JSON's values; independent of the mesh."""
        rows = [list(samples) for samples, _ in self._packer.rows]
        return {**self._drawn_by(), "step": self.step, "drawn": self._stream.drawn, "open": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        check_state(state, self.state_dict(), self._drawn_by())
        rows = [[int(sample) for sample in row] for row in state["open"]]
        known = all(0 <= sample < self.prepared.samples for row in rows for sample in row)
        rooms = (
            [self.width - int(self.prepared.lengths(np.array(row, np.int64)).sum()) for row in rows]
            if known
            else []
        )
        if not known or not all(rows) or any(room < 0 for room in rooms) or len(rows) > self.open_rows:
            raise ValueError("the saved loader's open rows are none of this data's.")
        self._packer.rows = list(zip(rows, rooms, strict=True))
        self._stream.drawn, self.step = int(state["drawn"]), int(state["step"])

    def _drawn_by(self) -> dict[str, Any]:
        data = {"data": self.prepared.key, "context": self.prepared.context}
        return {**data, "seed": self.seed, "rows": self.rows, "pack": self.pack, "open_rows": self.open_rows}

    def _row(self) -> list[int]:
        if not self.pack:
            return [self._stream.next()]
        while True:
            sample = self._stream.next()
            closed = self._packer.add(sample, int(self.prepared.lengths(np.int64(sample))))
            if closed is not None:
                return closed


# ------------------------------------------------------------------ order and state


@dataclass
class Stream:
    """Sample numbers without end, each epoch in its own order; `drawn` is all its state."""

    count: int
    seed: int
    drawn: int = 0

    def __post_init__(self) -> None:
        self._block, self._start = np.empty(0, np.int64), 0

    def next(self) -> int:
        place = self.drawn - self._start
        if not 0 <= place < len(self._block):
            self._start, place = self.drawn, 0
            left = self.count - self.drawn % self.count  # of this epoch
            self._block = order(self.count, self.seed, self.drawn, self.drawn + min(left, DRAWN))
        self.drawn += 1
        return int(self._block[place])
