"""Batches: samples of many lengths in rows of one length, as tensors; and every sample once, for evaluation.

A packed batch is a dict of int64 [B, T]: `tokens`; `targets`, already shifted (the token after each, or
IGNORE at prompts, padding and the end of a sample); `positions`, from 0 in every sample; and `documents`,
which of its row's samples a position belongs to, from 1, with 0 for padding. A position may attend to
earlier ones of its own document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fnshard as fs
from experiments.configs.train import MULTIPLE
from experiments.data.prepared import Prepared
from fnshard.losses import IGNORE

OPEN = 32  # rows; twice as many fill them by less than 1% more, and keep a sample waiting twice as long


@dataclass
class RowPacker:
    """Best fit among the few rows that are open.

    A sample goes where the least room is left after it. Where it fits nowhere it begins a row of its own;
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
        """Put a sample into a row; gives the samples of the row that this closes, if it closes one."""
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


Batch = dict[str, Tensor]


def width_of(prepared: Prepared) -> int:
    """Positions of a row that is not packed: the least multiple of 32 that holds every sample, at most the
    context."""
    return min(-(-prepared.longest // MULTIPLE) * MULTIPLE, prepared.context)


def fill(prepared: Prepared, rows: Sequence[Sequence[int]], width: int) -> Batch:
    """Rows of samples as a packed batch; int64 [rows, width] each."""
    tokens = np.full((len(rows), width), prepared.pad, np.int64)
    targets = np.full_like(tokens, IGNORE)
    documents = np.zeros_like(tokens)
    positions = np.zeros_like(tokens)
    for row, samples in enumerate(rows):
        end = 0
        for document, sample in enumerate(samples, 1):
            ids, learned = prepared.sample(sample)
            start, end = end, end + len(ids) - 1
            tokens[row, start:end] = ids[:-1]
            targets[row, start:end] = np.where(learned[1:], ids[1:].astype(np.int64), IGNORE)
            documents[row, start:end] = document
            positions[row, start:end] = np.arange(end - start)
        positions[row, end:] = np.arange(width - end)
    named = {"tokens": tokens, "targets": targets, "positions": positions, "documents": documents}
    return {name: torch.from_numpy(values) for name, values in named.items()}


def pair_batch(prepared: Prepared, pairs: Sequence[int], width: int) -> dict[str, Batch]:
    """Pairs by number, as `SampleLoader` yields them; a negative number is a row of padding."""
    sides = {"chosen": 0, "rejected": 1}
    return {
        name: {n: batch[n] for n in ("tokens", "targets")}
        for name, side in sides.items()
        for batch in [fill(prepared, [[2 * pair + side] if pair >= 0 else [] for pair in pairs], width)]
    }


# ------------------------------------------------------------------ once, for evaluation


def once(prepared: Prepared, rows: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """Every sample once, in the files' order, packed: batches for a held-out loss.

    All ranks get equally many batches; rows that nothing is left for are padding, which no mean counts.
    """
    check_rows(rows, rank, ranks)
    part = rows // ranks
    lengths = (int(prepared.lengths(np.int64(n))) for n in range(prepared.samples))
    for group in _grouped(pack(lengths, prepared.context), rows):
        yield fill(prepared, group[rank * part : (rank + 1) * part], prepared.context)


def _grouped(rows: Iterator[list[int]], size: int) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    for row in rows:
        group.append(row)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield [*group, *([] for _ in range(size - len(group)))]


def place_of(mesh: fs.Mesh) -> dict[str, int]:
    """Which part of a batch is this rank's; ranks that differ along other axes get the same."""
    return {"rank": mesh.data_rank, "ranks": mesh.data_size}


def check_rows(rows: int, rank: int, ranks: int) -> None:
    """Refuse rows that do not divide over the ranks."""
    if rows < 1 or rows % ranks:
        raise ValueError(f"{rows} rows do not divide over {ranks} ranks.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected 0 to {ranks - 1}.")


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any], drawn_by: Mapping[str, Any]) -> None:
    """Refuse the state of a loader that drew other batches.

    Raises:
        ValueError: it has other keys than `mine`, or another value of `drawn_by`.
    """
    if set(state) != set(mine):
        raise ValueError(f"a loader's state has the keys {sorted(mine)}; got {sorted(state)}.")
    differ = {k: f"{k}: saved {state[k]}, here {v}" for k, v in drawn_by.items() if state[k] != v}
    if "data" in differ:  # a key, which says nothing to a reader
        differ["data"] = "data: its files, the tokenizer, or how it is cut are not what they were"
    if differ:
        raise ValueError(
            f"the saved loader drew other batches ({'; '.join(differ.values())}). Fix: put back what was "
            "changed, or begin anew with run.resume=never."
        )
