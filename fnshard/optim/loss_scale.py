"""Loss scaling for fp16, constant or dynamic (Micikevicius et al. 2018, as torch's GradScaler)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fnshard.errors import SpecError, StateError, is_number

State = Mapping[str, Tensor]
GROWTH_INTERVAL = 2000  # the good steps after which a dynamic scale doubles


@dataclass(frozen=True)
class LossScale:
    """A policy of loss scaling; its state (`TrainState.loss_scale`) has scale, good_steps and skipped_steps.

    A skipped step is no update: bias corrections do not advance (as with torch's GradScaler), nor does the
    rate's schedule (as in DeepSpeed, Megatron and Accelerate; torch leaves the schedule to the loop).
    `TrainState.step` counts it, since its batch is used up.

    Args:
        initial: the first scale, or the constant one.
        dynamic: whether to halve the scale on overflow and skip the update, and to double it after
            `GROWTH_INTERVAL` good steps.
    """

    initial: float = 1.0
    dynamic: bool = False

    @staticmethod
    def choose(given: float | Literal["dynamic"] | None, fp16: bool, has_optimizer: bool = True) -> LossScale:
        """Return the policy for `shard_step(loss_scale=)`; None is dynamic if a leaf trains in fp16.

        Without an optimizer no state could keep a dynamic scale, and None is a scale of 1.

        Raises:
            SpecError: it is no positive finite number, or "dynamic" without an optimizer.
        """
        if given is None:
            return LossScale(2.0**16, dynamic=True) if fp16 and has_optimizer else LossScale()
        if isinstance(given, str) and given == "dynamic":
            if not has_optimizer:
                raise SpecError(
                    "loss_scale='dynamic' needs a state to live in, and this step has no optimizer.",
                    fix="pass optimizer=, or a number as loss_scale.",
                )
            return LossScale(2.0**16, dynamic=True)
        if not is_number(given) or given <= 0:
            raise SpecError(f"loss_scale={given!r}: a positive finite number, 'dynamic', or None.")
        return LossScale(float(given))

    def init(self) -> dict[str, Tensor]:
        """Return the state before the first step, which is empty unless dynamic."""
        if not self.dynamic:
            return {}
        return {
            "scale": torch.tensor(self.initial, dtype=torch.float32),
            "good_steps": torch.zeros((), dtype=torch.int64),
            "skipped_steps": torch.zeros((), dtype=torch.int64),
        }

    def scale(self, state: State) -> Tensor:
        """Return the factor of the loss, 0-d fp32."""
        return state["scale"] if self.dynamic else torch.tensor(self.initial, dtype=torch.float32)

    def check(self, state: State) -> None:
        """Refuse a `TrainState.loss_scale` that another policy made.

        Raises:
            StateError: the step needs a dynamic scale and the state has none, or the other way round.
        """
        expected = set(self.init())
        if set(state) == expected:
            return
        raise StateError(
            f"the state's loss_scale holds {', '.join(sorted(state)) or 'nothing'}; this step's is "
            f"{'dynamic' if self.dynamic else f'constant ({self.initial:g})'} and needs "
            f"{', '.join(sorted(expected)) or 'nothing'}.",
            fix="make the step with the loss_scale= that the state was made with, or carry on from "
            "a TrainState of the old fields and a new step.init(...).loss_scale.",
        )

    def updates(self, step: int, state: State) -> int:
        """Return the number of updates among `step` steps."""
        return step - int(state["skipped_steps"]) if self.dynamic else step

    def after(self, state: State, skipped: bool) -> dict[str, Tensor]:
        """Return the scale's state after a step."""
        if not self.dynamic:
            return dict(state)
        if skipped:
            return {
                "scale": (state["scale"] / 2).clamp(min=1.0),
                "good_steps": torch.zeros_like(state["good_steps"]),
                "skipped_steps": state["skipped_steps"] + 1,
            }
        good = state["good_steps"] + 1
        is_due = int(good) % GROWTH_INTERVAL == 0
        scale = state["scale"] * 2 if is_due else state["scale"]
        return {"scale": scale, "good_steps": good, "skipped_steps": state["skipped_steps"]}

    def metrics(self, state: State) -> dict[str, Tensor]:
        """Return the scale's entries of a step's metrics."""
        if not self.dynamic:
            return {}
        return {"loss_scale": state["scale"], "skipped_steps": state["skipped_steps"]}


def exact_seed(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return `(seed, rest)`, whose product is `value`: a backward starts from `seed` in the loss's dtype.

    A dtype of less than 32 bits would round the value, and all gradients with it. There the seed is a power
    of two, which is exact.

    >>> exact_seed(1 / 3, torch.bfloat16)
    (0.25, 1.3333333333333333)
    >>> exact_seed(1 / 3, torch.float32)
    (0.3333333333333333, 1.0)
    """
    info = torch.finfo(dtype)
    if info.bits >= 32:
        return value, 1.0
    # The power of two at or below the value, within the range of the dtype, denormals included.
    seed = 2.0 ** (math.frexp(value)[1] - 1)
    largest, smallest = 2.0 ** (math.frexp(info.max)[1] - 1), info.smallest_normal * info.eps
    seed = min(max(seed, smallest), largest)
    return seed, value / seed
