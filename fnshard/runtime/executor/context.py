"""Context: what a schedule's instructions are bound to, and what they hand each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnshard.compiler.ir.values import Kind
from fnshard.compiler.kernels.inductor import Boxed
from fnshard.compiler.schedule.instructions import (
    Accumulate,
    Free,
    Instruction,
    Norms,
    Schedule,
    ToDevice,
    Update,
    Wait,
)
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.executor.scalars import Scalars
from fnshard.runtime.executor.update import Updater
from fnshard.runtime.host_worker import Worker
from fnshard.runtime.packing import Packer
from fnshard.runtime.tiers import Transfers

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


def on_host(line: Instruction, schedule: Schedule) -> bool:
    """Whether an instruction computes on the host beside a device, or sends what such a one has made."""
    if isinstance(line, Update):
        return schedule.specs[line.paths[0]].updated_on == "host"
    if isinstance(line, Norms | Accumulate):
        return line.reads[0].kind is Kind.HOST
    restored = line.into if isinstance(line, ToDevice) else line.writes if isinstance(line, Wait) else ()
    return bool(restored) and all(n.kind is Kind.STORED for n in restored) and line.verb != "to_host"


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

    @property
    def worker(self) -> Worker | None:
        """Who runs what is `on_host`; nobody where lines are watched, or an update communicates."""
        gathers = self.updater is not None and "gather" in self.updater.optimizer.needs
        leaf_norms = self.scalars is not None and self.scalars.leaf_norms  # of leaves on the device
        alone = self.transfers is None or self.watch is not None or gathers or leaf_norms
        return None if alone else self.transfers.worker

    def later(self, line: Instruction) -> Callable[[Callable[[], None]], None]:
        """How a part of a line is run: by the worker where there is one and the line is `on_host`."""
        worker, heavy = self.worker, isinstance(line, Update | Norms | Accumulate)
        if worker is None or not (isinstance(line, Free) or on_host(line, self.schedule)):
            return lambda call: call()

        def run(call: Callable[[], None]) -> None:
            try:
                call()
            except Exception as error:
                error.add_note(f"It was in {line.phase} {line.unit} {line.verb}, on the host's thread.")
                raise

        return lambda call: worker.submit(lambda: run(call), heavy=heavy)

    def packer(self, bucket: str) -> Packer:
        if bucket not in self.packers:
            self.packers[bucket] = Packer(self.schedule.buckets[bucket], self.mesh, self.rank)
        return self.packers[bucket]
