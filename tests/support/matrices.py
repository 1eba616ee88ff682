"""Matrices: an embedding, matrices, a vector and a stack of experts'."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES = {"embed.weight": (7, 6), "a.weight": (6, 12), "b.weight": (9, 6), "b.bias": (6,),
          "experts.w": (3, 6, 5)}  # fmt: skip


def leaves() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {p: torch.randn(s, dtype=torch.float64, generator=draw) for p, s in SHAPES.items()}
