"""Plan: what a step is to do beside running `fn`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

AccumulateMode = Literal["reduce", "local"]


@dataclass(frozen=True)
class Plan:
    """What the step is to do beside running `fn`.

    Args:
        accumulate: micro-batches in one step.
        accumulate_mode: "reduce" each micro-batch's gradients into the sharded accumulator, or
            accumulate "local" full gradients and reduce once.
        update: run the optimizer (else return the gradients).
        norms: reduce squared norms with the scalars.
        scalars: how many numbers ride on ReduceScalars beside what `fn` returns.
        barrier: something global that is made of gradients (a norm, an overflow flag) stands between the
            last of them and the first update.
        gathers: by path, the dtypes of what the optimizer gathers of a leaf in one update, in its order.
        rows: of this rank's batch, by which the new values of buffers are averaged.
        counted: updates need the scalars of the forward (a Mean's count), which are summed before the
            backward, so that updates stay in it.
    """

    accumulate: int = 1
    accumulate_mode: AccumulateMode = "reduce"
    update: bool = True
    norms: bool = False
    barrier: bool = False
    counted: bool = False
    gathers: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    scalars: int = 0
    differentiate: bool = True
    rows: int = 1
