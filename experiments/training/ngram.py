"""Bigram and trigram tables of bytes: what a model has to beat, counted in the same run."""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB = 256
STRENGTH = 16.0  # in counts: a larger one trusts the shorter context more; 4 to 64 hardly differ


def table_losses(train: Tensor, held_out: Tensor, at: Tensor) -> dict[str, float]:
    """Mean -log p of the bytes `held_out[at]`, in nats, by tables of pairs and of triples in `train`.

    p(c | ab) = (n(abc) + s p(c | b)) / (n(ab) + s), down to p(c) and 1 / V: a Dirichlet prior centred on the
    shorter context (MacKay and Peto, 1995), so a proper distribution for every context, seen or not.

    Args:
        train, held_out: uint8 [bytes].
        at: int64 positions, 2 or more: a table reads the bytes before them.
    """
    p = torch.full(at.shape, 1.0 / VOCAB, dtype=torch.float64)
    losses = {}
    for order, name in enumerate(("unigram", "bigram", "trigram"), 1):
        counts = count(train, order)
        index = tuple(held_out[at - back].long() for back in range(order - 1, -1, -1))
        here, total = counts[index].double(), counts.sum(-1)[index[:-1]].double()
        p = (here + STRENGTH * p) / (total + STRENGTH)
        losses[name] = -p.log().mean().item()
    return {name: losses[name] for name in ("bigram", "trigram")}


def count(stream: Tensor, order: int) -> Tensor:
    """How often each run of `order` bytes occurs; int32 [V] * order.

    >>> count(torch.tensor([1, 2, 1, 2], dtype=torch.uint8), 2)[1, 2].item()
    2
    """
    codes = torch.zeros(stream.numel() - order + 1, dtype=torch.int32)
    for back in range(order):
        codes.mul_(VOCAB).add_(stream[back : back + codes.numel()])
    return torch.bincount(codes, minlength=VOCAB**order).to(torch.int32).reshape((VOCAB,) * order)
