"""Blocks: leaves of a state as one rank holds them, which checkpoints write and fill."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fnshard.layout.spec import P, block_slices
from fnshard.mesh import Mesh


@dataclass(frozen=True)
class Held:
    """A leaf of a state as one rank holds it: `block`, padded, is the box of the full tensor that `layout`
    says; `shape` is the full tensor's."""

    shape: tuple[int, ...]
    layout: P
    block: Tensor

    def box(self, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where this rank's part begins in the full tensor, and its shape without padding."""
        here = block_slices(self.shape, self.layout, mesh)
        return tuple(s.start for s in here), tuple(s.stop - s.start for s in here)

    def part(self, mesh: Mesh) -> Tensor:
        """The block without its padding; a view."""
        part = self.block
        for dim, size in enumerate(self.box(mesh)[1]):
            part = part.narrow(dim, 0, size)
        return part


@dataclass(frozen=True)
class Wanted(Held):
    """A leaf to be filled: from which of the saved ones."""

    source: str = ""
