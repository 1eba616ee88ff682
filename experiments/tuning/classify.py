"""Classifiers: predict the class of a text at its last token, or of each word at the word's last token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from experiments.tuning.config import ObjectiveConfig
from experiments.tuning.heads import make_hidden, score_of
from experiments.tuning.method import Tuning
from fnshard.losses import IGNORE, Mean


def classify(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Callable[..., Any]:
    """Make the loss -log p of each class, averaged over all texts, or words, of all ranks.

    The batch is as in `objectives.sft`, with classes as targets where a text or a word ends.
    """
    hidden = make_hidden(tuning, training=training)

    def loss(params: Any, batch: Any) -> tuple[Mean, dict[str, Mean]]:
        scores, targets = score_of(params, hidden(params, batch)), batch["targets"]
        counted = targets != IGNORE
        count = counted.sum()
        loss_sum = F.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        is_right = torch.where(counted, scores.argmax(-1) == targets, False)
        total = Mean(loss_sum, count, bound=float(targets.numel()))
        return total, {"accuracy": Mean(is_right.sum().float(), count)}

    return loss
