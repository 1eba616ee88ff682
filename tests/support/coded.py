"""Coded weights beside adapters: what a value decodes to, a model of three layers, its specs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P, codecs

BOTH = ("int8", "nf4")


def decoded(value: Tensor, codec: str, dtype: torch.dtype | None = None) -> Tensor:
    chosen = codecs.CODECS[codec]
    return chosen.decode(chosen.encode(value), tuple(value.shape), dtype or value.dtype)


def loss_fn(p: Any, x: Tensor) -> Tensor:
    for i in range(3):
        y = F.linear(x, p[f"layers.{i}.w"])
        x = torch.tanh(y + F.linear(F.linear(x, p[f"layers.{i}.a"]), p[f"layers.{i}.b"]))
    return x.square().mean()


def full(width: int = 96, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = {}
    for i in range(3):
        out[f"layers.{i}.w"] = torch.randn(width, width, generator=generator, dtype=dtype) / 8
        out[f"layers.{i}.a"] = torch.randn(4, width, generator=generator, dtype=dtype) / 8
        out[f"layers.{i}.b"] = torch.randn(width, 4, generator=generator, dtype=dtype) / 8
    return out


def coded(params: Any, codec: str, **more: Any) -> Any:
    return fs.match_specs(
        params,
        [
            ("*.w", LayoutSpec(P("shard"), codec=codec, trainable=False, **more)),
            ("*", LayoutSpec(P("shard"), **{k: v for k, v in more.items() if k == "compute_dtype"})),
        ],
    )
