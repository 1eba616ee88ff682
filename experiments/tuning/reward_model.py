"""Reward models: a score of whole conversations that is higher for the better of two answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from experiments.tuning.config import ObjectiveConfig
from experiments.tuning.heads import make_hidden, score_of, take_ends
from experiments.tuning.method import Tuning
from experiments.tuning.objectives import join_sides, split_sides
from fnshard.losses import Mean


def reward(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Callable[..., Any]:
    """Make the loss -log sigmoid(c - r), of the scores of a pair's chosen and rejected answers.

    It is averaged over all pairs of all ranks. This is the loss of Bradley and Terry (1952) and Ouyang et al.
    (2022). The batch is as in `objectives.preference`, with targets of 0 at the end of each answer.
    """
    hidden = make_hidden(tuning, training=training)

    def loss(params: Any, batch: Any) -> tuple[Mean, dict[str, Mean]]:
        both, counted = join_sides(batch)
        scores = score_of(params, take_ends(hidden(params, both), both))[..., 0]
        chosen, rejected = split_sides(scores, both)
        margin, count, weights = chosen - rejected, counted.sum(), counted.to(scores.dtype)
        total = Mean((-F.logsigmoid(margin) * weights).sum(), count, bound=float(counted.numel()))
        margin = margin.detach()
        return total, {
            "margin": Mean((margin * weights).sum(), count),
            "accuracy": Mean(((margin > 0).to(margin.dtype) * weights).sum(), count),
        }

    return loss
