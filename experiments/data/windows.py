"""Windows of a stream of tokens in a seeded order, prepared ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from experiments.data.batches import check_rows, check_state
from experiments.data.permutation import order

Batch = tuple[Tensor, Tensor]
AHEAD = 4  # batches


class TokenStream(Protocol):
    """Tokens one after the other: `Shards`, `ByteStream`.

    `key`: equal for equal tokens. `tokens`: how many.
    """

    key: str
    tokens: int

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of `starts` on; int64 [starts, length]."""


def cut(stream: TokenStream, starts: np.ndarray, context: int) -> Batch:
    """Inputs and the tokens that follow them; int64 [starts, T] each."""
    rows = torch.from_numpy(stream.windows(starts, context + 1))  # [rows, T + 1]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def held_out_starts(length: int, rows: int, context: int) -> Tensor:
    """`rows` windows spread evenly over a stream of `length`, the same in every run; int64 [rows].

    Starts at 2 or later, so that a trigram table has its context at every target.
    """
    return torch.linspace(2, length - context - 1, rows, dtype=torch.float64).long()


@dataclass
class WindowLoader:
    """Windows without end: `for inputs, targets in loader`, epoch after epoch, each in an order of its own.

    A window's last token is the next one's first: every token but the first is a target once an epoch; what
    is left after the last window is none. The global batch of step s depends on (seed, s) alone, and rank r
    takes its equal part of the rows: 1, 2 or 4 ranks see the same batches, a resumed run those of an
    uninterrupted one.

    Batches are cut by a thread, some steps ahead. It begins with the first batch, and ends with the
    process or the loader.

    Args:
        stream: the tokens.
        rows: of the *global* batch; a multiple of `ranks`.
        context: T.
        seed: of the orders.
        rank, ranks: which part of the rows this loader yields: the place along the mesh's data axes.
        ahead: batches that are prepared ahead of time; 0: none.
        step: the next step to yield: it counts what was handed out, not what is ready; read only.

    Raises:
        ValueError: rows that do not divide over the ranks, or no window in the stream.
    """

    stream: TokenStream
    rows: int
    context: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    ahead: int = AHEAD
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_rows(self.rows, self.rank, self.ranks)
        if self.windows < 1:
            raise ValueError(f"{self.stream.tokens} tokens are too few: a window takes {self.context + 1}.")
        self._ready: deque[Future[Batch]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def windows(self) -> int:
        return (self.stream.tokens - 1) // self.context

    @property
    def epoch(self) -> float:
        return self.step * self.rows / self.windows

    def batch(self, step: int) -> Batch:
        """This rank's part of one step's batch; int64 [rows / ranks, T] twice."""
        part = self.rows // self.ranks
        first = step * self.rows + self.rank * part
        windows = order(self.windows, self.seed, first, first + part)
        return cut(self.stream, windows * self.context, self.context)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.ahead:
            self._prepare()
            batch = self._ready[0].result()  # where it fails, so it does when asked again
            self._ready.popleft()
        else:
            batch = self.batch(self.step)
        self.step += 1
        return batch

    def close(self) -> None:
        """End the thread; the next batch starts another."""
        for future in self._ready:
            future.cancel()
        self._ready.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in JSON's values; independent of the mesh, so another one can resume."""
        return {**self._drawn_by(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        check_state(state, self.state_dict(), self._drawn_by())
        self.close()
        self.step = int(state["step"])

    def _prepare(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "windows")
        while len(self._ready) < 1 + self.ahead:
            self._ready.append(self._thread.submit(self.batch, self.step + len(self._ready)))

    def _drawn_by(self) -> dict[str, Any]:
        own = {"context": self.context, "seed": self.seed, "rows": self.rows}
        return {"data": self.stream.key, **own}
