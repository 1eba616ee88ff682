"""Windows of a stream of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


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


@dataclass(frozen=True)
class Windows:
    """The rows of a stream, `context` tokens each, for a `Loader`.

    A window's last token is the next one's first: every token but the first is a target once an epoch; what
    is left after the last window is none.

    Raises:
        ValueError: no window in the stream.
    """

    stream: TokenStream
    context: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.stream.tokens} tokens are too few: a window takes {self.context + 1}.")

    @property
    def count(self) -> int:
        return (self.stream.tokens - 1) // self.context

    @property
    def key(self) -> Mapping[str, Any]:
        return {"data": self.stream.key, "context": self.context}

    def batch(self, numbers: np.ndarray) -> Batch:
        """Windows by number; int64 [numbers, T] twice."""
        return cut(self.stream, numbers * self.context, self.context)
