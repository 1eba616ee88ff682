"""Your own research under `python -m experiments.train`: a classifier of drawn shapes.

    cd experiments/examples/own_research
    python -m experiments.train --config-dir conf experiment=shapes
    python -m experiments.train --config-dir conf --multirun experiment=shapes model.width=8,16,32

The file has a model, data and a loss, and nothing in it knows of ranks, shards, checkpoints or dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 16


class Classifier(nn.Module):
    """A convolutional network from pictures [B, 1, 16, 16] to logits [B, 3]."""

    def __init__(self, width: int, layers: int = 2):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(layers))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.stem(pictures)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = hidden + layer(F.gelu(norm(hidden)))
        return self.head(hidden.amax((2, 3)))


@dataclass(frozen=True)
class Shapes:
    """A data set of noisy pictures of a disc, a square or a cross, which are the same in every process."""

    count: int
    first: int
    noise: float

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + number)
        x, y = torch.randint(4, SIDE - 4, (2,), generator=draw)
        kind = int(torch.randint(3, (), generator=draw))
        down, right = torch.meshgrid(torch.arange(SIDE) - y, torch.arange(SIDE) - x, indexing="ij")
        down, right = down.abs(), right.abs()
        inside = (down**2 + right**2 <= 9, torch.maximum(down, right) <= 2, torch.minimum(down, right) == 0)
        drawn = inside[kind] & (torch.maximum(down, right) <= 3)
        return drawn[None].float() + self.noise * torch.randn(1, SIDE, SIDE, generator=draw), kind


def shapes(train: int, held_out: int, noise: float) -> tuple[Shapes, Shapes]:
    """Make the pictures to train on, and those to measure on; they share none."""
    return Shapes(train, 0, noise), Shapes(held_out, 10**9, noise)


def loss(
    model: Callable[[Tensor], Tensor], pictures: Tensor, kinds: Tensor, *, smoothing: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy and the accuracy, means over the batch's rows."""
    logits = model(pictures)
    right = (logits.argmax(-1) == kinds).float().mean()
    return F.cross_entropy(logits, kinds, label_smoothing=smoothing), {"accuracy": right.detach()}
