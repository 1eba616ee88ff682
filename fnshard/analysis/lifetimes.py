"""Walk: which storages are alive as a schedule runs, by name, category, unit and tier.

The bookkeeping beneath `effects`: blocks of memory with reference counts, names that hold them as the
executor's environment does, and the worst moment of every line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fnshard.analysis.footprint import rounded
from fnshard.compiler.schedule.instructions import Instruction, Schedule
from fnshard.runtime.host_worker import PENDING

PARAMETERS, GATHERED, GRADIENTS = "parameter shards", "gathered units", "gradients"
OPTIMIZER, ACTIVATIONS = "optimizer state", "saved activations"
WORKSPACES, BUFFERS, INPUTS = "kernel workspaces", "transfer and bucket buffers", "inputs"
CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, WORKSPACES, BUFFERS, INPUTS)
TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Held:
    """A tensor: the block it lies in (None: memory that is counted elsewhere), and what is known of it."""

    block: int | None
    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Parts:
    """Several tensors under one name: reduced gradients (`flat`: the row they are views of), slots."""

    parts: Mapping[str, Held]
    flat: Held | None = None


@dataclass(frozen=True)
class Flight:
    """A collective or transfer under way: what it holds, its slot in shared memory, what it will give.

    `pieces`: in how many a rank's part of a sum is made. `rows`: how many are summed.
    """

    holds: tuple[Held, ...] = ()
    slot: Any = None
    result: Any = None
    pieces: int = 1
    rows: int = 2


def held_in(value: Any) -> Iterable[Held]:
    """The tensors of a value."""
    if isinstance(value, Held):
        return (value,)
    if isinstance(value, Flight):
        inner = value.result if isinstance(value.result, Sequence) else (value.result,)
        return (*value.holds, *(h for v in inner if v is not None for h in held_in(v)))
    return (*value.parts.values(), *((value.flat,) if value.flat else ()))


@dataclass
class Block:
    """A storage. `refs`: names, and the line under way, that hold it. `slot`: of shared memory, whose bytes
    are counted there; it is free when the last of its views dies."""

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
class Walk:
    """The state of a walk; `effects` changes it line by line.

    `totals`: bytes on the device by (category, unit). `units`: those of the worst moment so far.
    """

    schedule: Schedule
    device: torch.device
    blocks: list[Block] = field(default_factory=list)
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
    _most: int = -1

    # -------------------------------------------------------------- blocks

    def new(self, size: int, category: str, tier: str = "device") -> int:
        """A block that the line under way holds until its end."""
        size = rounded(size, self.device.type) if tier == "device" else size
        self.blocks.append(Block(size, category, self.line.unit if self.line else "-", tier, 1))
        self._mine.append(len(self.blocks) - 1)
        self._count(self.blocks[-1], size)
        self.look()
        return len(self.blocks) - 1

    def tensor(self, numel: int, dtype: torch.dtype, category: str, tier: str = "device") -> Held:
        """A contiguous tensor of its own."""
        return Held(self.new(numel * dtype.itemsize, category, tier), numel, dtype)

    def view_of(self, slot: Any, numel: int, dtype: torch.dtype) -> Held:
        """A leaf that lies in a slot of shared memory."""
        block = self.new(0, GATHERED)
        self.blocks[block].slot = slot
        return Held(block, numel, dtype)

    def like(self, held: Held, category: str, dtype: torch.dtype | None = None) -> Held:
        """A dense tensor of another's shape."""
        dtype = dtype or held.dtype
        return Held(self.new(held.numel * dtype.itemsize, category), held.numel, dtype, held.shape)

    def take_host(self, held: Held, category: str) -> Held:
        """A host buffer from the pool, which only grows."""
        if self.pool.get(held.bytes):
            self.pool[held.bytes] -= 1
            block = Block(0, category, "-", "host", 1)
            self.blocks.append(block)
            self._mine.append(len(self.blocks) - 1)
            return Held(len(self.blocks) - 1, held.numel, held.dtype, held.shape, held.stride)
        block = self.new(held.bytes, category, "host")
        self.hold(block)  # for good: it goes back to the pool, not to the system
        return Held(block, held.numel, held.dtype, held.shape, held.stride)

    def give_host(self, value: Any, *, late: bool = False) -> None:
        """Buffers of a dying value go back to the pool; `late`, when the worker is done with it."""
        if late:
            self.late.append(value)
            if len(self.late) <= PENDING:
                return
            value = self.late.pop(0)
        whole = (value.flat,) if isinstance(value, Parts) and value.flat else held_in(value)
        for held in whole:
            self.pool[held.bytes] = self.pool.get(held.bytes, 0) + 1

    def hold(self, block: int | None) -> None:
        if block is not None:
            self.blocks[block].refs += 1

    def release(self, block: int | None) -> None:
        """One holder less; the last one frees it."""
        if block is None:
            return
        held = self.blocks[block]
        held.refs -= 1
        if held.refs == 0:
            self._count(held, -held.bytes)
            if held.slot is not None:
                held.slot.views -= 1
                held.slot.alive = held.slot.views > 0

    def let_go(self, held: Held) -> None:
        """The line under way lets go of what it made before it ends."""
        if held.block in self._mine:
            self._mine.remove(held.block)
            self.release(held.block)

    def turn(self, value: Any, category: str) -> None:
        """What was one kind of memory has become another."""
        for held in held_in(value):
            if held.block is not None:
                block = self.blocks[held.block]
                self._count(block, -block.bytes)
                block.category = category
                self._count(block, block.bytes)

    def spike(self, size: int, category: str = WORKSPACES) -> None:
        """Memory that is taken and given back at once."""
        if size:
            block = self.new(size, category)
            self._mine.pop()
            self.release(block)

    def _count(self, block: Block, size: int) -> None:
        self.live[block.tier] += size
        if block.tier == "device":
            self.categories[block.category] += size
            key = block.category, block.unit
            self.totals[key] = self.totals.get(key, 0) + size

    # -------------------------------------------------------------- names

    def set(self, name: str, value: Any) -> None:
        """`env[name] = value`."""
        for held in held_in(value):
            self.hold(held.block)
        if name in self.names:
            self.drop(name)
        self.names[name] = value

    def drop(self, name: str) -> Any:
        """`env.pop(name)`."""
        value = self.names.pop(name)
        for held in held_in(value):
            self.release(held.block)
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
        """The line has ended: what only it held is freed."""
        text = f"{self.line.phase} {self.line.unit} {self.line.verb} {self.line.detail}"
        self.moments.append(Moment(index, text, self._here, self.live["host"], self.live["disk"]))
        for block in self._mine:
            self.release(block)
        self._mine.clear()
