"""Context: what a schedule's instructions are bound to, and what they hand each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnshard.compiler.kernels import Boxed
from fnshard.compiler.scalars import Scalars
from fnshard.compiler.schedule import Instruction, Schedule
from fnshard.compiler.update import Updater
from fnshard.mesh import Mesh
from fnshard.runtime.buckets import Packer
from fnshard.runtime.collectives import Collectives
from fnshard.runtime.memory import Transfers

Env = dict[str, Any]
Action = Callable[[Env], None]
Watch = Callable[[int, Instruction, Action], Action]  # (line number, line, what it does) -> what is done


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


@dataclass(frozen=True)
class Context:
    """What instructions are bound to. `freed`: called with each value that dies (tests poison it).

    `transfers`: needed where something rests on the host or on disk. `watch`: wraps every instruction, once,
    when it is bound (`fs.debug`).
    """

    schedule: Schedule
    kernels: Mapping[str, tuple[Boxed, Boxed | None]]
    comm: Collectives
    rank: int
    scalars: Scalars | None = None
    updater: Updater | None = None
    freed: Callable[[str, Any], None] | None = None
    transfers: Transfers | None = None
    watch: Watch | None = None
    packers: dict[str, Packer] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.schedule.mesh

    def packer(self, bucket: str) -> Packer:
        if bucket not in self.packers:
            self.packers[bucket] = Packer(self.schedule.buckets[bucket], self.mesh, self.rank)
        return self.packers[bucket]
