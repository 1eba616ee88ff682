"""ExecutorContext: what a schedule's instructions are bound to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fnshard.compiler.kernels.inductor import Boxed
from fnshard.compiler.schedule.instructions import (
    Accumulate,
    Action,
    Free,
    Instruction,
    Norms,
    Update,
    UpdateBegin,
    UpdateSums,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.executor.scalars import Scalars
from fnshard.runtime.executor.update import Updater
from fnshard.runtime.host_worker import Worker
from fnshard.runtime.packing import Owners, Packer
from fnshard.runtime.tiers import Transfers

Watch = Callable[[int, Instruction, Action], Action]  # (line number, line, what it does) -> what is done


@dataclass(frozen=True)
class ExecutorContext:
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
    packers: dict[str, Packer | Owners] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.schedule.mesh

    @property
    def device(self) -> torch.device:
        return self.schedule.mesh.device

    @cached_property
    def worker(self) -> Worker | None:
        """Who runs what is `on_host`; nobody where lines are watched, or an update communicates."""
        owned = any(isinstance(line, UpdateBegin | UpdateSums) for line in self.schedule.instructions)
        alone = self.transfers is None or self.watch is not None or owned
        return None if alone else self.transfers.worker

    @property
    def update_stream(self) -> Any:
        return None if self.transfers is None else self.transfers.updates

    def later(self, line: Instruction) -> Callable[[Callable[[], None]], None]:
        """How a part of a line is run: by the worker where there is one and the line is `on_host`."""
        worker, heavy = self.worker, isinstance(line, Update | Norms | Accumulate)
        if worker is None or not (isinstance(line, Free) or line.on_host(self.schedule)):
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

    def owners(self, bucket: str) -> Owners:
        if bucket not in self.packers:
            self.packers[bucket] = Owners(self.schedule.buckets[bucket], self.mesh, self.rank)
        return self.packers[bucket]
