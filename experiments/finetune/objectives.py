"""Objectives: the loss of a batch, as a pure function of a `Tuning`'s tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.finetune.config import ObjectiveConfig
from experiments.finetune.lm import LanguageModel
from experiments.finetune.tuning import Tuning
from fnshard.losses import IGNORE, Mean

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], tuple[Mean, dict[str, Mean]]]


def sft(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """-log p of the learned tokens, averaged over all of them exactly.

    The batch: int64 [B, T] `tokens`, `targets`, `positions`, and `documents` if rows are packed.
    """

    def losses(params: Any, batch: Batch) -> Tensor:
        return tuning.lm.token_losses(
            params, batch["tokens"], batch["positions"], batch.get("documents"), batch["targets"]
        )

    policy = tuning.policy(losses, training=training)

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        counted = (batch["targets"] != IGNORE).sum()
        bound = float(batch["targets"].numel())
        return Mean(policy(params, batch).sum(), counted, bound=bound), {}

    return loss


def dpo(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """Direct preference optimisation; the reference is the same base without its adapters.

    The batch: `chosen` and `rejected`, each int64 [B, T] `tokens` and `targets`.
    """

    def logprobs(params: Any, batch: Batch) -> Tensor:
        return row_logprobs(tuning.lm, params, batch)

    policy, reference = tuning.policy(logprobs, training=training), tuning.reference(logprobs)

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        both = {n: torch.cat([batch["chosen"][n], batch["rejected"][n]]) for n in ("tokens", "targets")}
        ours = policy(params, both).chunk(2)
        with torch.no_grad():
            theirs = reference(params, both).chunk(2)
        counted = (batch["chosen"]["targets"] != IGNORE).any(1)
        how = {"beta": config.beta, "label_smoothing": config.label_smoothing, "counted": counted}
        return fs.losses.dpo(*ours, *theirs, **how)

    return loss


def row_logprobs(lm: LanguageModel, params: Any, batch: Batch) -> Tensor:
    """log p of each row's learned tokens, fp32 [B]; rows are padded at the end, not packed."""
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return -lm.token_losses(params, tokens, positions, None, batch["targets"]).sum(-1)


OBJECTIVES: Mapping[str, Callable[..., Loss]] = {"sft": sft, "dpo": dpo}
