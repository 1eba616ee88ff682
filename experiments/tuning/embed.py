"""Embeddings: vectors of texts, near each other if the texts belong together and far from all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.lib.checks import ConfigError
from experiments.tuning.config import ObjectiveConfig
from experiments.tuning.heads import make_hidden, take_ends
from experiments.tuning.method import Tuning
from experiments.tuning.objectives import join_sides, split_sides
from fnshard.losses import Mean


def embed(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Callable[..., Any]:
    """Make InfoNCE (van den Oord et al. 2018) of each query among the positives of all ranks' rows.

    It is the mean over `config.dims`, for each of which only so many first dims count (Kusupati et al. 2022,
    Matryoshka). An embedding is the hidden state of a text's last token. A query has negatives only in its
    own micro-batch.

    The batch has `query` and `positive`, each int64 [B, T] `tokens` and `targets`, or packed pairs. Its int64
    `numbers` are those of the records; texts of equal numbers are no negatives of each other.
    """
    hidden = make_hidden(tuning, training=training)
    width = tuning.lm.head(tuning.lm.params).shape[1]
    dims = config.dims or (width,)
    if dims[-1] > width:
        raise ConfigError(
            f"objective.dims={list(dims)}: a hidden state has {width}. Fix: none above {width}."
        )

    def loss(params: Any, batch: Any) -> tuple[Mean, dict[str, Mean]]:
        both, counted = join_sides(batch)
        queries, positives = split_sides(take_ends(hidden(params, both), both), both)  # [N, D] each
        numbers = batch["numbers"].flatten()
        every, known = fs.all_gather(positives), fs.all_gather(numbers)  # those of all ranks
        count = counted.sum()
        is_mine = numbers[:, None] == known[None, :]  # [N, M]
        total, aux = torch.zeros((), dtype=queries.dtype, device=queries.device), {}
        for dim in dims:
            similar = config.scale * normalize(queries[:, :dim]) @ normalize(every[:, :dim]).T
            similar = similar.masked_fill(known[None, :] < 0, -1e9)  # padding is nobody's negative
            positive = similar.masked_fill(~is_mine, -1e9).logsumexp(1)
            losses = similar.logsumexp(1) - positive
            total = total + torch.where(counted, losses, 0.0).sum() / len(dims)
            is_right = known[similar.argmax(1)] == numbers
            name = "accuracy" if dim == dims[-1] else f"accuracy_{dim}"
            aux[name] = Mean((is_right & counted).sum().float(), count)
        return Mean(total, count, bound=float(counted.numel())), aux

    return loss


def normalize(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1. A vector of zeros stays as it is, and has a gradient."""
    return vectors * (vectors.square().sum(-1, keepdim=True) + 1e-12).rsqrt()
