"""Heads: a reward model's score, classes or embeddings, which hidden states give instead of next tokens.

A batch's `targets` say where these are read: they are a class, or 0, at the positions that count, and IGNORE
elsewhere. A head is a leaf of the tree beside the model's, `{"score": {"weight": [C, D]}}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.tuning.lm import LanguageModel
from experiments.tuning.method import Tuning
from experiments.tuning.objectives import Batch, one_hot_documents
from fnshard.losses import IGNORE


def make_hidden(tuning: Tuning, *, training: bool) -> Callable[[Any, Batch], Tensor]:
    """Make `fn(params, batch)`, which gives hidden states [B, T, D] in fp32 or wider.

    They are 0 at positions without a target.
    """
    lm: LanguageModel = tuning.lm

    def hidden(params: Any, batch: Batch) -> Tensor:
        states = lm.hidden(params, *(batch.get(n) for n in ("tokens", "positions", "documents")))
        states = torch.where((batch["targets"] != IGNORE).unsqueeze(-1), states, 0.0)  # padding may hold NaN
        return states.to(torch.promote_types(states.dtype, torch.float32))

    return tuning.policy(hidden, training=training)


def score_of(params: Any, hidden: Tensor) -> Tensor:
    """Compute the head's numbers [..., C] of hidden states [..., D]."""
    return hidden @ params["score"]["weight"].to(hidden.dtype).T


def take_ends(hidden: Tensor, batch: Batch) -> Tensor:
    """Take the hidden state at each document's end, where its one target is.

    `hidden` is 0 elsewhere, so that a sum finds it. The result is [B, D] if each row is a document,
    and [B, 2 N, D] for packed pairs.
    """
    if "pairs" not in batch:
        return hidden.sum(1)
    member = one_hot_documents(batch["documents"], 2 * batch["pairs"].shape[1], hidden.dtype)
    return torch.einsum("bts,btd->bsd", member, hidden)
