"""A program as the text of a Python function, its leaves and its batch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

import fnshard as fs

BATCH = ("x", "ids", "m", "y")
SPACE = {"torch": torch, "F": F, "math": math, "fs": fs}
f64 = torch.float64


@dataclass(frozen=True)
class Program:
    """`source`: the lines of `program(p, x, ids, m, y)`; `shapes`: of its leaves, f64, by path.

    One part of the batch is x f64 [B, T, D], ids i64 [B, T] below `vocab`, m bool [B, T] with a true one
    in it, y f32 [B, D]; `sizes` are B, T, D.
    """

    source: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    sizes: tuple[int, int, int] = (2, 3, 4)
    vocab: int = 5
    rows: tuple[str, ...] = field(default=(), compare=False, repr=False)  # of the grammar, that wrote it

    @property
    def text(self) -> str:
        """The function, to be pasted into a test."""
        return "\n".join([f"def program(p, {', '.join(BATCH)}):", *(f"    {line}" for line in self.source)])

    def __call__(self, p: Mapping[str, Tensor], *batch: Tensor) -> Any:
        return _compiled(self.text)(p, *batch)

    @property
    def params(self) -> dict[str, Tensor]:
        """Values of the leaves: each depends on its own path and shape alone."""
        return {path: leaf_value(path, shape) for path, shape in self.shapes.items()}

    def part(self, seed: int) -> tuple[Tensor, ...]:
        """One rank's micro-batch."""
        b, t, d = self.sizes
        made = torch.Generator().manual_seed(seed + 1)
        x = torch.randn(b, t, d, generator=made, dtype=f64)
        ids = torch.randint(self.vocab, (b, t), generator=made)
        mask = torch.rand(b, t, generator=made) < 0.6
        mask[0, 0] = True
        return x, ids, mask, torch.randn(b, d, generator=made)


@cache
def _compiled(text: str) -> Callable[..., Any]:
    space = dict(SPACE)
    exec(compile(text, "<program>", "exec"), space)
    return space["program"]


def leaf_value(path: str, shape: Sequence[int]) -> Tensor:
    """Of a normal distribution of width 0.5, always the same."""
    made = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    return torch.randn(tuple(shape), generator=made, dtype=f64) * 0.5
