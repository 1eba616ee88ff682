"""Matrices: a small model of matrices, a vector and a stack, and its training in any layout."""

from __future__ import annotations

from typing import Any

import sharded
import torch
from models import Model
from torch import Tensor

import fnshard as fs

SHAPES = {"embed.weight": (7, 6), "a.weight": (6, 12), "b.weight": (9, 6), "b.bias": (6,),
          "experts.w": (3, 6, 5)}  # fmt: skip
ROWS = torch.randn(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
COMPUTES = {"embed.weight": fs.P("tensor"), "a.weight": fs.P("tensor"), "b.weight": fs.P(None, "tensor")}


def leaves() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {p: torch.randn(s, dtype=torch.float64, generator=draw) for p, s in SHAPES.items()}


def loss(params: Any, x: Tensor) -> fs.Mean:
    hidden = torch.tanh(x @ params["embed.weight"])
    hidden = torch.tanh(hidden @ params["a.weight"])[:, :6] + params["b.bias"]
    each = torch.einsum("bi,eio->beo", hidden, params["experts.w"]).square().sum()
    return fs.Mean((hidden @ params["b.weight"].T).square().sum() + each, torch.tensor(float(len(x))))


def trained(
    axes: dict[str, int], preset: str, optimizer: Any, policy: dict[str, Any] | None = None, **options: Any
) -> list[dict[str, Tensor]]:
    """The parameters of each rank after three steps."""
    model = Model(leaves(), loss, lambda seed: (ROWS,))
    policy = ({"tensor": COMPUTES} if "tensor" in axes else {}) | (policy or {})
    ranks = sharded.simulate(model, preset, axes, optimizer, policy=policy, **options)
    return [each.params for each in ranks]
