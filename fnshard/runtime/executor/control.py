"""Control: what the scalars and updates of one step read besides tensors of the schedule."""

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
    """One step's own numbers, in its environment under `CONTROL`.

    Args:
        rescale: from the step's scalars (None before they are known) to what gradients are multiplied by, if
            by anything.
        skip_if: whether the scalars say that the step updates nothing; None: it never does.
        flags: numbers that this rank reports with the step, by name.
        step: what the optimizer reads; its norm is that of the scaled gradients.
        scale: what gradients are multiplied by, 0-d; None: by nothing.
        skip: whether the step updates nothing.
    """

    rescale: Callable[[Summary | None], Tensor | None] = lambda summary: None
    skip_if: Callable[[Summary], bool] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    step: Step | None = None
    scale: Tensor | None = None
    skip: bool = False
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def started(self, count: Tensor) -> StepControl:
        """Return the control at the beginning of update number `count`."""
        return replace(self, step=Step(count), scale=self.rescale(None), _memo={})

    def arrived(self, summary: Summary) -> StepControl:
        """Return it with what the update reads of the whole step: norms, the factor, whether to skip."""
        scale, norm = self.rescale(summary), summary.norm
        if scale is not None and norm is not None:
            norm = norm * scale
        skip = self.skip_if is not None and self.skip_if(summary)
        return replace(self, step=Step(self.step.count, norm), scale=scale, skip=skip, _memo={})

    def on_host(self) -> StepControl:
        """Return it with its numbers on their way to the host. Nobody waits: they are there when a GPU has
        come so far."""

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(torch.device("cpu"), non_blocking=True)

        return replace(
            self, step=Step(self.step.count, move(self.step.norm)), scale=move(self.scale), _memo={}
        )

    def on_stream(self) -> StepControl:
        """Return it for another stream than the compute stream: what is made once a step is made there."""
        return replace(self, _memo={})

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, made once per step however many updates ask."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]
