"""Evaluate: the loss of held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

import fnshard as fs
from experiments.data.batches import once, pair_batch, place_of, width_of
from experiments.data.prepared import Prepared
from fnshard.losses import Mean

Forward = Callable[..., Any]


def held_out_batches(prepared: Prepared, most: int, rows: int, mesh: fs.Mesh) -> Iterator[Any]:
    """This rank's held-out batches, equally many on every rank: of `most` global rows or pairs, and what
    fills the last batch; rows of padding, which no mean counts, where there are no more.

    Args:
        rows: of a global batch.
    """
    if prepared.kind == "pairs":
        width, part = width_of(prepared), rows // mesh.data_size
        for low in range(0, min(most, prepared.records), rows):
            mine = range(low + mesh.data_rank * part, low + (mesh.data_rank + 1) * part)
            yield pair_batch(prepared, [n if n < prepared.records else -1 for n in mine], width)
        return
    yield from islice(once(prepared, rows, **place_of(mesh)), math.ceil(most / rows))


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
