"""Control: what the scalars and updates of one step read besides tensors of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard.optim.contract import StepInfo
from fnshard.runtime.executor.scalars import Summary


@dataclass(frozen=True)
class StepControl:
    """One step's own numbers, in its environment under `CONTROL`.

    Args:
        rescale: from the step's scalars (None before they are known) to what gradients are multiplied by, if
            by anything.
        skip_if: whether the scalars say that the step updates nothing; None: it never does.
        flags: numbers that this rank reports with the step, by name.
        info: what the optimizer reads.
        skip: whether the step updates nothing.
    """

    rescale: Callable[[Summary | None], Tensor | None] = lambda summary: None
    skip_if: Callable[[Summary], bool] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    info: StepInfo | None = None
    skip: bool = False

    def started(self, step: Tensor) -> StepControl:
        """At the beginning of update number `step`."""
        return replace(self, info=self._scaled(StepInfo(step), None))

    def arrived(self, summary: Summary) -> StepControl:
        """With what the update reads of the whole step: norms, the factor, whether to skip."""
        info = StepInfo(self.info.step, global_norm=summary.norm)
        skip = self.skip_if is not None and self.skip_if(summary)
        return replace(self, info=self._scaled(info, summary), skip=skip)

    def on_host(self) -> StepControl:
        """With the optimizer's numbers on their way to the host."""
        return replace(self, info=self.info.to(torch.device("cpu")))

    def on_stream(self) -> StepControl:
        """For another stream than the compute stream: what is made once a step is made there."""
        return replace(self, info=replace(self.info))

    def _scaled(self, info: StepInfo, summary: Summary | None) -> StepInfo:
        factor = self.rescale(summary)
        return info if factor is None else info.scaled(factor)
