"""Bigram and trigram tables of bytes: what a model has to beat, counted in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB = 256
# In counts. A larger strength trusts the shorter context more.
STRENGTHS = tuple(2.0**k for k in range(-4, 13))
MOST_TUNED = 200_000  # positions the strengths are chosen on


@dataclass(frozen=True)
class Ngram:
    """Interpolated counts: p(c | ab) = (n(abc) + s p(c | b)) / (n(ab) + s), down to p(c) and 1 / V.

    That is a Dirichlet prior centred on the shorter context (MacKay and Peto, 1995): a proper
    distribution for every context, seen or not.
    """

    counts: tuple[Tensor, ...]
    strengths: tuple[float, ...]

    @property
    def order(self) -> int:
        return len(self.counts)

    def shortened(self, order: int) -> Ngram:
        return Ngram(self.counts[:order], self.strengths[:order])

    def probability(self, stream: Tensor, at: Tensor) -> Tensor:
        """p(stream[i] | the bytes before it) for each i of `at`; fp64, `at`'s shape; i >= order - 1."""
        p = torch.full(at.shape, 1.0 / VOCAB, dtype=torch.float64)
        for counts, strength in zip(self.counts, self.strengths, strict=True):
            p = _mix(*_seen(counts, stream, at), strength, p)
        return p

    def loss(self, stream: Tensor, at: Tensor) -> float:
        return -self.probability(stream, at).log().mean().item()


def count(stream: Tensor, order: int) -> Tensor:
    """How often each run of `order` bytes occurs; int32 [V] * order.

    >>> count(torch.tensor([1, 2, 1, 2], dtype=torch.uint8), 2)[1, 2].item()
    2
    """
    codes = torch.zeros(stream.numel() - order + 1, dtype=torch.int64)
    for back in range(order):
        codes = codes * VOCAB + stream[back : back + codes.numel()].long()
    return torch.bincount(codes, minlength=VOCAB**order).to(torch.int32).reshape((VOCAB,) * order)


def fit(stream: Tensor, order: int) -> Ngram:
    """Count `stream` (uint8) and choose the strengths, shortest context first.

    They are chosen by the loss on the last tenth of `stream` under counts of the rest, never on
    held-out text; then everything is counted.
    """
    cut = stream.numel() * 9 // 10
    at = torch.arange(cut, stream.numel())
    if cut <= order or not at.numel():
        raise ValueError(f"{stream.numel()} bytes are too few to fit a table of order {order}.")
    at = at[:: -(-at.numel() // MOST_TUNED)]
    strengths: list[float] = []
    p = torch.full(at.shape, 1.0 / VOCAB, dtype=torch.float64)
    for n in range(1, order + 1):
        seen = _seen(count(stream[:cut], n), stream, at)
        strengths.append(max(STRENGTHS, key=lambda s: _mix(*seen, s, p).log().mean().item()))
        p = _mix(*seen, strengths[-1], p)
    return Ngram(tuple(count(stream, n) for n in range(1, order + 1)), tuple(strengths))


def _seen(counts: Tensor, stream: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """n(abc) and n(ab .) at each position; fp64, `at`'s shape."""
    index = tuple(stream[at - back].long() for back in range(counts.dim() - 1, -1, -1))
    return counts[index].double(), counts.sum(-1)[index[:-1]].double()


def _mix(here: Tensor, total: Tensor, strength: float, shorter: Tensor) -> Tensor:
    return (here + strength * shorter) / (total + strength)
