"""Live memory: which storages are alive as a schedule runs, by name, category, unit and tier.

What `Instruction.memory` changes: storages with reference counts, names that refer to them as the executor's
environment does, and the worst moment of every line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fnshard.analysis.footprint import rounded
from fnshard.compiler.schedule.instructions import Instruction
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.schedule.paper import (
    CATEGORIES,
    GATHERED,
    WORKSPACES,
    PaperGroup,
    PaperTensor,
    tensors_in,
)
from fnshard.runtime.host_worker import PENDING

TIERS = ("device", "host", "disk")


@dataclass
class Storage:
    """Memory of one allocation. `refs`: names, and the line under way, that refer to it. `slot`: of shared
    memory, whose bytes are counted there; it is free when the last of its views dies."""

    bytes: int
    category: str
    unit: str
    tier: str
    refs: int = 0
    slot: Any = None


@dataclass(frozen=True)
class Moment:
    """A line of the schedule at its worst: device bytes by category, bytes of the other tiers."""

    index: int
    line: str
    device: Mapping[str, int]
    host: int
    disk: int

    @property
    def bytes(self) -> int:
        """On the device, all categories."""
        return sum(self.device.values())


@dataclass
class LiveMemory:
    """What is alive, line by line.

    `totals`: bytes on the device by (category, unit). `units`: those of the worst moment so far.
    """

    schedule: Schedule
    device: torch.device
    storages: list[Storage] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    totals: dict[tuple[str, str], int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    worst: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    units: dict[tuple[str, str], int] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)  # bytes of transfers, by the number of their line
    pool: dict[int, int] = field(default_factory=dict)  # host buffers to be used again: how many of a size
    late: list[Any] = field(default_factory=list)  # those that the worker may still read
    line: Instruction | None = None
    _mine: list[int] = field(default_factory=list)
    _here: dict[str, int] = field(default_factory=dict)

    # -------------------------------------------------------------- storages

    def new(self, size: int, category: str, tier: str = "device") -> int:
        """A storage that the line under way holds until its end."""
        size = rounded(size, self.device.type) if tier == "device" else size
        self.storages.append(Storage(size, category, self.line.unit if self.line else "-", tier, 1))
        self._mine.append(len(self.storages) - 1)
        self._count(self.storages[-1], size)
        self.look()
        return len(self.storages) - 1

    def tensor(self, numel: int, dtype: torch.dtype, category: str, tier: str = "device") -> PaperTensor:
        """A contiguous tensor of its own."""
        return PaperTensor(self.new(numel * dtype.itemsize, category, tier), numel, dtype)

    def view_of(self, slot: Any, numel: int, dtype: torch.dtype) -> PaperTensor:
        """A leaf that lies in a slot of shared memory."""
        storage = self.new(0, GATHERED)
        self.storages[storage].slot = slot
        return PaperTensor(storage, numel, dtype)

    def like(self, tensor: PaperTensor, category: str, dtype: torch.dtype | None = None) -> PaperTensor:
        """A dense tensor of another's shape."""
        dtype = dtype or tensor.dtype
        return PaperTensor(
            self.new(tensor.numel * dtype.itemsize, category), tensor.numel, dtype, tensor.shape
        )

    def take_host(self, tensor: PaperTensor, category: str) -> PaperTensor:
        """A host buffer from the pool, which only grows."""
        if self.pool.get(tensor.bytes):
            self.pool[tensor.bytes] -= 1
            storage = self.new(0, category, "host")
        else:
            storage = self.new(tensor.bytes, category, "host")
            self.keep(storage)  # for good: it goes back to the pool, not to the system
        return replace(tensor, storage=storage)

    def give_host(self, value: Any, *, late: bool = False) -> None:
        """Buffers of a dying value go back to the pool; `late`, when the worker is done with it."""
        if late:
            self.late.append(value)
            if len(self.late) <= PENDING:
                return
            value = self.late.pop(0)
        buffers = (value.flat,) if isinstance(value, PaperGroup) and value.flat else tensors_in(value)
        for tensor in buffers:
            self.pool[tensor.bytes] = self.pool.get(tensor.bytes, 0) + 1

    def keep(self, storage: int | None) -> None:
        if storage is not None:
            self.storages[storage].refs += 1

    def release(self, storage: int | None) -> None:
        """One reference less; the last one frees it."""
        if storage is None:
            return
        freed = self.storages[storage]
        freed.refs -= 1
        if freed.refs == 0:
            self._count(freed, -freed.bytes)
            if freed.slot is not None:
                freed.slot.views -= 1
                freed.slot.alive = freed.slot.views > 0

    def release_early(self, tensor: PaperTensor) -> None:
        """The line under way releases what it made before it ends."""
        if tensor.storage in self._mine:
            self._mine.remove(tensor.storage)
            self.release(tensor.storage)

    def recategorise(self, value: Any, category: str) -> None:
        """What was one kind of memory has become another."""
        for tensor in tensors_in(value):
            if tensor.storage is not None:
                storage = self.storages[tensor.storage]
                self._count(storage, -storage.bytes)
                storage.category = category
                self._count(storage, storage.bytes)

    def spike(self, size: int, category: str = WORKSPACES) -> None:
        """Memory that is taken and given back at once."""
        if size:
            storage = self.new(size, category)
            self._mine.pop()
            self.release(storage)

    def _count(self, storage: Storage, size: int) -> None:
        self.live[storage.tier] += size
        if storage.tier == "device":
            self.categories[storage.category] += size
            key = storage.category, storage.unit
            self.totals[key] = self.totals.get(key, 0) + size

    # -------------------------------------------------------------- names

    def set(self, name: str, value: Any) -> None:
        """`env[name] = value`."""
        for tensor in tensors_in(value):
            self.keep(tensor.storage)
        if name in self.names:
            self.drop(name)
        self.names[name] = value

    def drop(self, name: str) -> Any:
        """`env.pop(name)`."""
        value = self.names.pop(name)
        for tensor in tensors_in(value):
            self.release(tensor.storage)
        return value

    # -------------------------------------------------------------- moments

    def begin(self, line: Instruction | None) -> None:
        """A line begins."""
        self.line, self._here = line, {}
        self.look()

    def look(self) -> None:
        """Is this the worst moment of the line, and of the step?"""
        for tier in ("host", "disk"):
            self.worst[tier] = max(self.worst[tier], self.live[tier])
        here = self.live["device"]
        if not self._here or here > sum(self._here.values()):
            self._here = dict(self.categories)
        if here > self.worst["device"]:
            self.worst["device"] = here
            self.units = dict(self.totals)

    def end(self, index: int) -> None:
        """The line has ended: what only this line refers to is freed."""
        text = f"{self.line.phase} {self.line.unit} {self.line.verb} {self.line.detail}"
        self.moments.append(Moment(index, text, self._here, self.live["host"], self.live["disk"]))
        for storage in self._mine:
            self.release(storage)
        self._mine.clear()
