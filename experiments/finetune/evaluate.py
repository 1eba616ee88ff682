"""Evaluate: the loss of held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fnshard.losses import Mean

Forward = Callable[..., Any]


def mean_over(
    forward: Forward, params: Any, batches: Iterable[Any], device: torch.device
) -> tuple[float, dict[str, float]]:
    """The loss of all batches of all ranks, and the means of its `aux`; exact means, not means of means."""
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        loss, aux = forward(params, batch)  # which sends it to the device
        for name, mean in {"": loss, **aux}.items():
            sums[name] = sums.get(name, torch.zeros((), device=device)) + _both(mean, device)
    sums = {name: both.cpu() for name, both in sums.items()}
    if dist.is_initialized():
        for both in sums.values():
            dist.all_reduce(both)
    means = {name: (both[0] / both[1].clamp(min=1)).item() for name, both in sums.items()}
    return means.pop("", math.nan), means


def _both(mean: Mean, device: torch.device) -> torch.Tensor:
    both = mean.total, mean.count
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in both])
