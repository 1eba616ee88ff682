"""Paper: what a schedule's values are where nothing runs: tensors with sizes and storages, without data.

`Instruction.memory` reads and writes them through the ledger's `LiveMemory` (`analysis.live_memory`), as
`Instruction.bind` does with tensors in the executor's environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PARAMETERS, GATHERED, GRADIENTS = "parameter shards", "gathered units", "gradients"
OPTIMIZER, ACTIVATIONS = "optimizer state", "saved activations"
WORKSPACES, BUFFERS, INPUTS = "kernel workspaces", "transfer and bucket buffers", "inputs"
CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, WORKSPACES, BUFFERS, INPUTS)


@dataclass(frozen=True)
class PaperTensor:
    """A tensor: the storage it lies in (None: memory that is counted elsewhere), and what is known of it."""

    storage: int | None
    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether it is dense and in order; True where nothing is known."""
        if self.stride is None or self.shape is None:
            return True
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True)
class PaperGroup:
    """Several tensors under one name: reduced gradients (`flat`: the row they are views of), slots."""

    parts: Mapping[str, PaperTensor]
    flat: PaperTensor | None = None


@dataclass(frozen=True)
class PaperFlight:
    """A collective or transfer under way: what it keeps alive, its slot in shared memory, what it will give.

    `pieces`: in how many a rank's part of a sum is made. `rows`: how many are summed.
    """

    keeps: tuple[PaperTensor, ...] = ()
    slot: Any = None
    result: Any = None
    pieces: int = 1
    rows: int = 2


PaperValue = PaperTensor | PaperGroup | PaperFlight


def tensors_in(value: PaperValue) -> Iterable[PaperTensor]:
    """The tensors of a value."""
    if isinstance(value, PaperTensor):
        return (value,)
    if isinstance(value, PaperFlight):
        inner = value.result if isinstance(value.result, Sequence) else (value.result,)
        return (*value.keeps, *(t for v in inner if v is not None for t in tensors_in(v)))
    return (*value.parts.values(), *((value.flat,) if value.flat else ()))


def storage_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to the last element of a strided tensor."""
    if 0 in shape:
        return 0
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return span * dtype.itemsize
