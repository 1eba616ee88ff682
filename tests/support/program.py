"""A program as the text of a Python function, its leaves and its batch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import custom_functions
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

import fnshard as fs

BATCH = ("x", "ids", "m", "y")
SPACE = {"torch": torch, "F": F, "math": math, "fs": fs, "custom": custom_functions}
f64 = torch.float64


@dataclass(frozen=True)
class Program:
    """`source`: the lines of `program(p, x, ids, m, y)`; `shapes`: of its leaves, by path.

    Leaves are f64 and train, but for `buffers`, which the program may write to: their dtypes by path.

    One part of the batch is x f64 [B, T, D], ids i64 [B, T] below `vocab`, m bool [B, T] with a true one
    in it, y f32 [B, D]; `sizes` are B, T, D.
    """

    source: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    sizes: tuple[int, int, int] = (2, 3, 4)
    vocab: int = 5
    buffers: Mapping[str, torch.dtype] = field(default_factory=dict)
    rows: tuple[str, ...] = field(default=(), compare=False, repr=False)  # of the grammar, that wrote it

    @property
    def text(self) -> str:
        """The function, to be pasted into a test."""
        return "\n".join([f"def program(p, {', '.join(BATCH)}):", *(f"    {line}" for line in self.source)])

    def __call__(self, p: Mapping[str, Tensor], *batch: Tensor) -> Any:
        return _compiled(self.text)(p, *batch)

    @property
    def params(self) -> dict[str, Tensor]:
        """Values of the leaves: each depends on its own path, shape and dtype alone."""
        return {p: leaf_value(p, shape, self.buffers.get(p, f64)) for p, shape in self.shapes.items()}

    def leaves(self, frozen: Sequence[str] = ()) -> dict[str, Tensor]:
        """`params`, of which those that train require gradients."""
        fixed = {*frozen, *self.buffers}
        return {p: v.requires_grad_(p not in fixed) for p, v in self.params.items()}

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


def leaf_value(path: str, shape: Sequence[int], dtype: torch.dtype = f64) -> Tensor:
    """Of a normal distribution of width 0.5 (integers: of 5), always the same."""
    made = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    return (torch.randn(tuple(shape), generator=made, dtype=f64) * (0.5 if dtype == f64 else 5)).to(dtype)
