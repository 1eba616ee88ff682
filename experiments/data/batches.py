"""Batches of samples: many lengths in rows of one length, as tensors; and every sample once, for evaluation.

A packed batch is a dict of int64 [B, T]: `tokens`; `targets`, already shifted (the token after each, or
IGNORE at prompts, padding and the end of a sample); `positions`, from 0 in every sample; and `documents`,
which of its row's samples a position belongs to, from 1, with 0 for padding. A position may attend to
earlier ones of its own document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.loader import order
from experiments.data.prepared import Prepared
from experiments.lib.config import MULTIPLE
from fnshard.losses import IGNORE

Batch = dict[str, Tensor]


def pack(lengths: np.ndarray, context: int) -> list[list[int]]:
    """Rows of sample numbers, each sample once, no row over `context`: best fit, longest samples first.

    >>> pack(np.array([3, 9, 6, 1, 4, 6]), context=10)
    [[1], [2, 0, 3], [5, 4]]
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(context + 1)]  # the rows that have so much room left
    some = 0  # a bit for every room that a row has
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        fits = some >> length
        if fits:  # the lowest bit is the least room
            room = length + (fits & -fits).bit_length() - 1
            row = by_room[room].pop()
            some ^= 0 if by_room[room] else 1 << room
        else:
            room, row = context, len(rows)
            rows.append([])
        rows[row].append(sample)
        if room > length:
            by_room[room - length].append(row)
            some |= 1 << (room - length)
    return rows


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


@dataclass(frozen=True)
class Samples:
    """The rows of prepared data, for a `Loader`.

    A batch of pairs is `{"chosen": {tokens, targets}, "rejected": {tokens, targets}}`, int64 [B, T] each,
    padded on the right to the one width of all batches; it is never packed. Rows of one sample each have no
    `documents`: attention keeps its causal kernel without.

    Args:
        pack: several samples a row, of the context's width; else one, of `width_of(prepared)`. Which samples
            share a row is the same in every epoch.
        images: `fn(paths of each row's images, tokens)`: what a batch has as `images`. Its rows have one
            sample each.
    """

    prepared: Prepared
    pack: bool = True
    images: Callable[[list[list[str]], Tensor], Batch] | None = None

    @property
    def packed(self) -> bool:
        return self.pack and self.prepared.kind != "pairs" and self.images is None

    @property
    def width(self) -> int:
        return self.prepared.context if self.packed else width_of(self.prepared)

    @property
    def count(self) -> int:
        return len(self._rows) if self.packed else self.prepared.records

    @property
    def key(self) -> Mapping[str, Any]:
        return {"data": self.prepared.key, "context": self.prepared.context, "pack": self.pack}

    def batch(self, numbers: np.ndarray) -> tuple[Any]:
        """Rows by number; a negative one is padding."""
        if self.prepared.kind == "pairs":
            sides = {"chosen": 0, "rejected": 1}
            return ({name: self._side(numbers, side) for name, side in sides.items()},)
        if self.packed:
            rows = [self._rows[n] if n >= 0 else [] for n in numbers.tolist()]
            return (fill(self.prepared, rows, self.width),)
        batch = fill(self.prepared, [[n] if n >= 0 else [] for n in numbers.tolist()], self.width)
        batch = {name: part for name, part in batch.items() if name != "documents"}
        if self.images is not None:
            paths = [self.prepared.images_of(n) if n >= 0 else [] for n in numbers.tolist()]
            batch["images"] = self.images(paths, batch["tokens"])
        return (batch,)

    def once(self, rows: int, most: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        """At most `most` rows, each once, for a held-out loss: batches of `rows`, equally many on every rank.

        Rows of padding, which no mean counts, fill the last one.
        """
        part, numbers = rows // ranks, order(self.count, 0, 0, min(most, self.count))
        for low in range(0, len(numbers), rows):
            mine = numbers[low : low + rows][rank * part : (rank + 1) * part]
            yield self.batch(np.pad(mine, (0, part - len(mine)), constant_values=-1))[0]

    def _side(self, pairs: np.ndarray, side: int) -> Batch:
        batch = fill(self.prepared, [[2 * n + side] if n >= 0 else [] for n in pairs.tolist()], self.width)
        return {name: batch[name] for name in ("tokens", "targets")}

    @cached_property
    def _rows(self) -> list[list[int]]:
        return pack(self.prepared.lengths(np.arange(self.prepared.samples)), self.prepared.context)
