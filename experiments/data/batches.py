"""Batches: rows of prepared samples as tensors, and every sample once, for evaluation.

A packed batch is a dict of int64 [B, T]: `tokens`; `targets`, already shifted (the token behind each, or
IGNORE at prompts, padding and the end of a sample); `positions`, from 0 in every sample; and `documents`,
which of its row's samples a position belongs to, from 1, with 0 for padding. A position may attend to
earlier ones of its own document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from experiments.data.packing import pack
from experiments.data.prepared import Prepared
from fnshard.losses.objectives import IGNORE

Batch = dict[str, Tensor]
MULTIPLE = 32  # of padded widths


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
    """Pairs by number, as `PairLoader` yields them; a negative number is a row of padding."""
    sides = {"chosen": 0, "rejected": 1}
    return {
        name: _plain(fill(prepared, [[2 * pair + side] if pair >= 0 else [] for pair in pairs], width))
        for name, side in sides.items()
    }


# ------------------------------------------------------------------ once, for evaluation


def once(
    prepared: Prepared, rows: int, *, rank: int = 0, ranks: int = 1, packed: bool = True
) -> Iterator[Batch]:
    """Every sample once, in the files' order: batches for a held-out loss.

    All ranks get equally many batches; rows that nothing is left for are padding, which no mean counts.

    Args:
        prepared: the samples.
        rows: of the *global* batch; a multiple of `ranks`.
        rank, ranks: which part of the rows is yielded.
        packed: several samples a row; else one, and the batch also holds `samples`: int64 [B], the number of
            each row's sample, -1 for padding. So scores of choices and pairs are put in their places.
    """
    check_rows(rows, rank, ranks)
    part = rows // ranks
    width = prepared.context if packed else width_of(prepared)
    for group in _grouped(_rows_once(prepared, packed), rows):
        mine = group[rank * part : (rank + 1) * part]
        batch = fill(prepared, mine, width)
        if not packed:
            batch = _plain(batch) | {"samples": torch.tensor([row[0] if row else -1 for row in mine])}
        yield batch


def _rows_once(prepared: Prepared, packed: bool) -> Iterator[list[int]]:
    numbers = range(prepared.samples)
    if not packed:
        return ([number] for number in numbers)
    return pack((int(prepared.lengths(np.int64(n))) for n in numbers), prepared.context)


def _grouped(rows: Iterator[list[int]], size: int) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    for row in rows:
        group.append(row)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield [*group, *([] for _ in range(size - len(group)))]


def _plain(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("tokens", "targets")}


def check_rows(rows: int, rank: int, ranks: int) -> None:
    """Refuse rows that do not divide over the ranks.

    Raises:
        ValueError: they do not, or there is no such rank.
    """
    if rows < 1 or rows % ranks:
        raise ValueError(f"{rows} rows do not divide over {ranks} ranks.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected 0 to {ranks - 1}.")
