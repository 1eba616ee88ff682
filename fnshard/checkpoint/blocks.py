"""Leaves of a state as one rank has them: the blocks that checkpoints write and fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fnshard.checkpoint.manifest_file import Chunk, SavedLeaf
from fnshard.layout.spec import P, block_slices
from fnshard.mesh import Mesh
from fnshard.runtime.files.tensorfile import NAMES


@dataclass(frozen=True)
class LocalLeaf:
    """One rank's block of a leaf: `block`, padded, is the box of the full tensor that `layout` says; `shape`
    is the full tensor's."""

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

    def saved_as(self, chunks: Sequence[Chunk] = ()) -> SavedLeaf:
        """The full leaf as a manifest names it."""
        return SavedLeaf(self.shape, NAMES[self.block.dtype], repr(self.layout), tuple(chunks))


@dataclass(frozen=True)
class RestoreTarget(LocalLeaf):
    """A leaf to be filled from the saved leaf of the name `source`."""

    source: str = ""
