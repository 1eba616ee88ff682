"""Batches of bytes: deterministic in (seed, step, rank), and the same global batch on any mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from experiments.configs.train import DataConfig
from experiments.data.batches import check_rows, check_state
from experiments.data.stdlib_text import Corpus, load_corpus

Batch = tuple[Tensor, Tensor]


def corpus_of(chosen: DataConfig, context: int) -> Corpus:
    """The text that a configuration names.

    Raises:
        ValueError: there is too little of it for one window of `context`.
    """
    return load_corpus(
        Path(chosen.root) if chosen.root else None,
        suffix=chosen.suffix,
        held_out_percent=chosen.held_out_percent,
        least=context + 3,
    )


def cut_windows(stream: Tensor, starts: Tensor, context: int) -> Batch:
    """Inputs and the bytes that follow them; int64 [rows, T] each.

    >>> inputs, targets = cut_windows(torch.arange(9, dtype=torch.uint8), torch.tensor([0, 5]), 3)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [5, 6, 7]], [[1, 2, 3], [6, 7, 8]])
    """
    rows = stream[starts[:, None] + torch.arange(context + 1)].long()  # [rows, T + 1]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def held_out_starts(length: int, rows: int, context: int) -> Tensor:
    """`rows` windows spread evenly over a stream of `length`, the same in every run; int64 [rows].

    Starts at 2 or later, so that a trigram table has its context at every target.
    """
    return torch.linspace(2, length - context - 1, rows, dtype=torch.float64).long()


@dataclass
class Loader:
    """Random windows of a stream, without end: `for inputs, targets in loader`.

    The global batch of step s is drawn from (seed, s) alone; rank r takes its equal part of the
    rows. So a run on 1, 2 or 4 ranks sees the same batches, and a resumed run the same as an
    uninterrupted one.

    Args:
        stream: uint8 [bytes].
        rows: rows of the *global* batch; a multiple of `ranks`.
        context: T.
        seed: of the draw.
        rank, ranks: which part of the rows this loader yields.
        step: the next step to yield.
    """

    stream: Tensor
    rows: int
    context: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    step: int = 0

    def __post_init__(self) -> None:
        check_rows(self.rows, self.rank, self.ranks)
        self._text = crc32(self.stream.numpy())

    def batch(self, step: int) -> Batch:
        """This rank's part of one step's batch; int64 [rows / ranks, T] twice."""
        random = np.random.default_rng((self.seed, step))
        starts = random.integers(0, self.stream.numel() - self.context, size=self.rows)
        part = self.rows // self.ranks
        mine = torch.from_numpy(starts[self.rank * part : (self.rank + 1) * part])
        return cut_windows(self.stream, mine, self.context)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands; independent of the mesh, so another one can resume it.

        `text`: a checksum of the stream.
        """
        drawn = {"seed": self.seed, "rows": self.rows, "context": self.context}
        return {"step": self.step, **drawn, "text": self._text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Where the text has changed since (another Python's library),
        with a warning: at the same places of the new one.
        """
        mine = self.state_dict()
        check_state(state, mine, {name: mine[name] for name in ("seed", "rows", "context")})
        if state["text"] != mine["text"]:
            warnings.warn("the text is not what it was when this was saved.", stacklevel=2)
        self.step = int(state["step"])
