"""Reduced: the value of a bucket's reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Reduced:
    """A bucket's reduced gradients: one block per leaf; `flat` is the row they are views of, if any."""

    blocks: Mapping[str, Tensor]
    flat: Tensor | None = None

    def each(self, make: Callable[[Tensor], Tensor]) -> Reduced:
        """The same on other tensors: one for the row, or one a block."""
        if self.flat is None:
            return Reduced({p: make(b) for p, b in self.blocks.items()})
        flat, start = make(self.flat), self.flat.storage_offset()
        return Reduced(
            {
                p: flat.as_strided(b.shape, b.stride(), b.storage_offset() - start + flat.storage_offset())
                for p, b in self.blocks.items()
            },
            flat,
        )

    def pairs(self, other: Reduced) -> list[tuple[Tensor, Tensor]]:
        """Tensors of the two that are to be alike."""
        if self.flat is not None:
            return [(self.flat, other.flat)]
        return [(b, other.blocks[p]) for p, b in self.blocks.items()]
