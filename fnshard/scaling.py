"""Loss scaling for fp16: constant, or dynamic as in Micikevicius et al. 2018 (and torch's GradScaler)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fnshard.errors import SpecError

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class LossScale:
    """The policy; its state (`TrainState.loss_scale`) holds scale, good_steps and skipped_steps.

    Args:
        initial: the first scale, or the constant one.
        dynamic: halve on overflow and skip the update; double after `growth_interval` good steps.
    """

    initial: float = 1.0
    dynamic: bool = False
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    @staticmethod
    def choose(given: float | Literal["dynamic"] | None, fp16: bool) -> LossScale:
        """From `shard_step(loss_scale=)`; None is dynamic where a leaf trains in fp16."""
        if given == "dynamic" or (given is None and fp16):
            return LossScale(2.0**16, dynamic=True)
        if given is None:
            return LossScale()
        if not isinstance(given, int | float) or not given > 0:
            raise SpecError(f"loss_scale={given!r}: a positive number, 'dynamic', or None.")
        return LossScale(float(given))

    @property
    def active(self) -> bool:
        """Whether gradients must be unscaled at all."""
        return self.dynamic or self.initial != 1.0

    def init(self) -> dict[str, Tensor]:
        """State before the first step; empty unless dynamic."""
        if not self.dynamic:
            return {}
        return {
            "scale": torch.tensor(self.initial, dtype=torch.float32),
            "good_steps": torch.zeros((), dtype=torch.int64),
            "skipped_steps": torch.zeros((), dtype=torch.int64),
        }

    def scale(self, state: State) -> Tensor:
        """0-d fp32, what the loss is multiplied by."""
        return state["scale"] if state else torch.tensor(self.initial, dtype=torch.float32)

    def after(self, state: State, skipped: bool) -> dict[str, Tensor]:
        """The state behind a step."""
        if not self.dynamic:
            return dict(state)
        if skipped:
            return {
                "scale": (state["scale"] * self.backoff).clamp(min=1.0),
                "good_steps": torch.zeros_like(state["good_steps"]),
                "skipped_steps": state["skipped_steps"] + 1,
            }
        good = state["good_steps"] + 1
        grown = int(good) % self.growth_interval == 0
        scale = state["scale"] * self.growth if grown else state["scale"]
        return {"scale": scale, "good_steps": good, "skipped_steps": state["skipped_steps"]}

    def metrics(self, state: State) -> dict[str, Tensor]:
        """What a step's metrics say of it."""
        if not self.dynamic:
            return {}
        return {"loss_scale": state["scale"], "skipped_steps": state["skipped_steps"]}
