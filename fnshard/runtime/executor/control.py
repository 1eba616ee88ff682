"""Numbers of one step that its scalars and updates read besides tensors of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard.optim.optimizer import Step
from fnshard.runtime.executor.scalars import Summary


@dataclass(frozen=True)
class StepControl:
    """The numbers of one step, which lie in its environment under `CONTROL`.

    Args:
        gradient_factor: returns the factor of gradients, if any, given the step's scalars (None before they
            are known).
        skip_if: says by the scalars whether the step updates nothing; None if it always updates.
        flags: numbers that this rank reports with the step, by name.
        step: the Step that the optimizer reads; its norm is that of the scaled gradients.
        scale: the factor of gradients, 0-d; None if there is none.
        skip: whether the step updates nothing.
    """

    gradient_factor: Callable[[Summary | None], Tensor | None] = lambda summary: None
    skip_if: Callable[[Summary], bool] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    step: Step | None = None
    scale: Tensor | None = None
    skip: bool = False
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def with_count(self, count: Tensor) -> StepControl:
        """Return the control at the beginning of update number `count`."""
        return replace(self, step=Step(count), scale=self.gradient_factor(None), _memo={})

    def with_summary(self, summary: Summary) -> StepControl:
        """Return the control with the numbers of the whole step: norm, factor, and whether to skip."""
        scale, norm = self.gradient_factor(summary), summary.norm
        # The norm is that of unscaled gradients, and the optimizer clips the scaled ones.
        if scale is not None and norm is not None:
            norm = norm * scale
        skip = self.skip_if is not None and self.skip_if(summary)
        # The memo begins anew: its values were computed from a step without a norm.
        return replace(self, step=Step(self.step.count, norm), scale=scale, skip=skip, _memo={})

    def on_host(self) -> StepControl:
        """Return the control with its numbers on their way to the host.

        This does not wait for them: the caller records an event, after which they have arrived.
        """

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(torch.device("cpu"), non_blocking=True)

        # The count is on the host from the beginning.
        return replace(
            self, step=Step(self.step.count, move(self.step.norm)), scale=move(self.scale), _memo={}
        )

    def on_stream(self) -> StepControl:
        """Return the control for another stream, on which values that are made once a step are made anew."""
        return replace(self, _memo={})

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, which runs once a step, however many updates ask for it."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]
