"""Losses: what `fn` may return beside a plain scalar, and losses of language models."""

from fnshard.losses.objectives import (
    IGNORE,
    Mean,
    Whole,
    dpo,
    linear_cross_entropy,
    linear_token_losses,
    next_token,
    sequence_logprobs,
)

__all__ = [
    "IGNORE",
    "Mean",
    "Whole",
    "dpo",
    "linear_cross_entropy",
    "linear_token_losses",
    "next_token",
    "sequence_logprobs",
]
