"""Storages: which memory is alive as a schedule's lines run on tensors without data, and what it is for.

A `StorageTracker` is a dispatch mode: every storage that an operator makes is followed by a weak reference
until it dies (as torch's own memory trackers do). What it is for is known when the line that made it has
ended, from the name that refers to it. `footprint` and `slots` follow one call with it, without lines.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fnshard.analysis.workspace import code_of, workspace_bytes
from fnshard.compiler.ir.values import SCALARS, Kind, ValueName
from fnshard.compiler.schedule.instructions import COMPUTE, Instruction, Reduced, Wait
from fnshard.compiler.schedule.instructions import OPTIMIZER as OPTIMIZER_LANE

PARAMETERS, GATHERED, GRADIENTS = "parameter shards", "gathered units", "gradients"
OPTIMIZER, ACTIVATIONS = "optimizer state", "saved activations"
WORKSPACES, BUFFERS, INPUTS = "kernel workspaces", "transfer and bucket buffers", "inputs"
CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, WORKSPACES, BUFFERS, INPUTS)
TIERS = ("device", "host", "disk")
CUDA_BLOCK_bytes = 512  # torch's caching allocator rounds up to it, and counts what it rounded
UNCOUNTED = "uncounted"  # slots of shared memory, which are counted together, and tensors of no memory


@dataclass(eq=False)
class Storage:
    """The memory of one allocation. `slot`: of shared memory; it is free when the last of its tensors
    dies."""

    bytes: int
    category: str
    tier: str
    slot: Any = None
    reference: weakref.ref | None = None


@dataclass(frozen=True)
class Moment:
    """A line of the schedule at its worst: device bytes by category, bytes of the other tiers."""

    index: int
    instruction: Instruction
    device: Mapping[str, int]
    host: int
    disk: int

    @property
    def line(self) -> str:
        """Return the instruction in words."""
        line = self.instruction
        return f"{line.phase} {line.unit} {line.verb} {line.detail}"

    @property
    def bytes(self) -> int:
        """Return the bytes on the device, of all categories."""
        return sum(self.device.values())


@dataclass
class Peak:
    """The worst moment of a line: what older storages came to, by category, and those that the line made.

    `freed`: how many older storages had died in the line by then.
    """

    bytes: int = -1
    categories: dict[str, int] = field(default_factory=dict)
    made: tuple[Storage, ...] = ()
    freed: int = 0
    workspace: int = 0


class StorageTracker(TorchDispatchMode):
    """A tracker of the storages that are alive, line by line.

    `device`: the type of device that the lines are for; the tensors have no data. `categories`: bytes on the
    device of what earlier lines made. `worst`: the most so far on the host and on disk. `peak`: the worst
    moment of the line under way. `freed`: what older storages have died in it.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.alive: dict[int, Storage] = {}  # by address
        self.live = dict.fromkeys((*TIERS, UNCOUNTED), 0)
        self.worst = dict.fromkeys(TIERS[1:], 0)
        self.categories = dict.fromkeys(CATEGORIES, 0)
        self.moments: list[Moment] = []
        self.line: Instruction | None = None
        self.tier, self.slot = "device", None  # of what is made now
        self.peak, self.freed = Peak(), []
        self._made: dict[int, Storage] = {}  # by the line under way, still alive, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_fused_"):
            return None  # in place on everything, and unknown to fake tensors
        if (code := code_of(func, args, self.device)) is not None:
            with self:
                out = code()
        else:
            out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.follow(value)
        if self.tier == "device":
            self.look(workspace=workspace_bytes(func, args, kwargs or {}, out, self.device))
        return out

    def follow(self, value: Tensor) -> Storage:
        """Return what is known of a tensor's storage; an unknown one has just been made."""
        storage = value.untyped_storage()
        address = storage._cdata
        if address not in self.alive:
            made = Storage(self._size(storage, self.tier), "", self.tier, self.slot)
            self._made[address] = made
            self._watch(address, storage, made)
        return self.alive[address]

    def new(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
        """Make a tensor on "meta", and follow it."""
        if stride is None:
            value = torch.empty(shape, dtype=dtype, device="meta")
        else:
            value = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self.follow(value)
        self.look()
        return value

    def _size(self, storage: Any, tier: str) -> int:
        """Return what an allocation takes of memory."""
        size = storage.nbytes()
        on_cuda = tier == "device" and self.device == "cuda"
        return -(-size // CUDA_BLOCK_bytes) * CUDA_BLOCK_bytes if on_cuda else size

    def _watch(self, address: int, storage: Any, record: Storage) -> None:
        record.reference = weakref.ref(storage, lambda _: self._died(address))
        self.alive[address] = record
        self.live[record.tier] += record.bytes

    def _died(self, address: int) -> None:
        dead = self.alive.pop(address)
        self.live[dead.tier] -= dead.bytes
        if dead.slot is not None:
            dead.slot.let_go()
        if self._made.pop(address, None) is None:
            self.freed.append(dead)
            self._count(dead, -dead.bytes)

    def _count(self, record: Storage, size: int) -> None:
        """Add to what earlier lines made."""
        if record.tier == "device":
            self.categories[record.category] += size

    def adopt(self, value: Tensor, category: str, tier: str = "device", size: int | None = None) -> Storage:
        """Follow memory that is there from the start; it counts as `size` bytes, or as what it takes."""
        storage = value.untyped_storage()
        if storage._cdata not in self.alive:
            record = Storage(self._size(storage, tier) if size is None else size, category, tier)
            self._watch(storage._cdata, storage, record)
            self._count(record, record.bytes)
        return self.alive[storage._cdata]

    @contextmanager
    def placed(self, tier: str, slot: Any = None) -> Iterator[None]:
        """Let what is made in here lie in another tier, or in a slot of shared memory."""
        before, self.tier, self.slot = self.tier, tier, slot
        yield
        self.tier, self.slot = before, None

    def begin(self, line: Instruction) -> None:
        self.line, self.peak, self.freed = line, Peak(), []
        self.look()

    def look(self, workspace: int = 0, dead: Sequence[Storage] = (), unborn: Sequence[Storage] = ()) -> None:
        """Note this moment, if it is the worst of the line.

        Args:
            workspace: bytes that are taken and given back at once.
            dead: storages that were alive then, and are no more.
            unborn: those that were alive then, and will be followed.
        """
        for tier, most in self.worst.items():
            self.worst[tier] = max(most, self.live[tier])
        here = self.live["device"] + workspace
        if dead or unborn:
            here += sum(s.bytes for s in (*dead, *unborn) if s.tier == "device")
        if here > self.peak.bytes:
            categories = dict(self.categories)
            ours = [s for s in dead if not s.category]
            for gone in dead:
                if gone.tier == "device" and gone.category:
                    categories[gone.category] += gone.bytes
            made = (*self._made.values(), *ours, *unborn)
            self.peak = Peak(here, categories, made, len(self.freed), workspace)

    def end(self, index: int, env: Mapping[str, Any]) -> None:
        """End the line: what it made is known by its names."""
        line = self.line
        for name in line.writes:
            if name in env:
                self.categorise(name, env[name])
        computes = line.lane in (COMPUTE, OPTIMIZER_LANE) and not isinstance(line, Wait)
        rest = WORKSPACES if computes else BUFFERS  # what memory is for that dies in the line that took it
        peak = self.peak
        for made in self._made.values():
            made.category = made.category or rest
            self._count(made, made.bytes)
        self._made = {}
        peak.categories[rest] += peak.workspace
        for record in peak.made:
            record.category = record.category or rest
            if record.tier == "device":
                peak.categories[record.category] += record.bytes
        self.moments.append(Moment(index, line, peak.categories, self.live["host"], self.live["disk"]))

    def categorise(self, name: ValueName, value: Any) -> None:
        """Say by its name what a value's memory is for, if nothing has said so."""
        category = category_of(name)
        for tensor in tensors_of(value):
            record = self.follow(tensor)
            if record.category == BUFFERS != category:  # what was sent or received has got a name
                self._count(record, -record.bytes)
                record.category = category
                self._count(record, record.bytes)
            record.category = record.category or category


_SENT = (Kind.NORMS, Kind.UPDATED, Kind.WRITTEN, Kind.FLIGHT)


def category_of(name: ValueName) -> str:
    """Return what memory is for that a schedule's value of this name lies in."""
    kind = name.original.kind
    if kind in (Kind.GRADIENT, Kind.REDUCED, Kind.ACCUMULATED):
        return GRADIENTS
    if kind is Kind.GATHERED:
        return GATHERED
    if kind in _SENT or name == SCALARS or name.original.is_state:
        return BUFFERS
    return ACTIVATIONS


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value in an environment; of a flight, or what is no tensor, none."""
    found: list[Tensor] = []
    for leaf in optree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Reduced):
            found += leaf.blocks.values() if leaf.flat is None else [leaf.flat]
    return found
