"""Distillation: a student learns a teacher's next tokens, on data or on its own answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.tuning.config import ObjectiveConfig
from experiments.tuning.lm import LanguageModel
from experiments.tuning.method import Tuning
from fnshard.losses import IGNORE, Mean


def distill(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Callable[..., Any]:
    """Make the reverse KL from the student to the teacher, averaged over all learned tokens exactly.

    It is that of MiniLLM (Gu et al. 2024), and with `on_policy` that of GKD (Agarwal et al. 2024), whose
    student draws the answers itself. All logits of a micro-batch are in memory at once, so `data.tokens`
    should bound them. If one model has more rows of logits than the other, both distributions are over those
    that both have. `aux` has `agreement`, the share of tokens for which both have the same likeliest one.

    The batch is as in `objectives.sft`, or as in `objectives.policy_gradient`, whose rewards are not read.
    """
    teacher = tuning.teacher
    vocab = min(tuning.lm.vocab, teacher.vocab)

    def logprobs_of(lm: LanguageModel, params: Any, batch: Any) -> Tensor:
        hidden = lm.hidden(params, *(batch.get(n) for n in ("tokens", "positions", "documents")))
        hidden = torch.where((batch["targets"] != IGNORE).unsqueeze(-1), hidden, 0.0)  # padding may hold NaN
        logits = lm.unembed(params, hidden)[..., :vocab]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    student = tuning.policy(lambda params, batch: logprobs_of(tuning.lm, params, batch), training=training)

    def loss(params: Any, batch: Any) -> tuple[Mean, dict[str, Mean]]:
        ours = student(params, batch)
        with torch.no_grad():
            theirs = logprobs_of(teacher, params["teacher"], batch)
        mask = batch["targets"] != IGNORE
        divergence = torch.where(mask, (ours.exp() * (ours - theirs)).sum(-1), 0.0)  # [B, T]
        agree = mask & (ours.argmax(-1) == theirs.argmax(-1))
        count = mask.sum()
        total = Mean(divergence.sum(), count, bound=float(mask.numel()))
        return total, {"agreement": Mean(agree.sum().float(), count)}

    return loss
