"""Storages: follow the memory that is alive while a schedule's lines run on tensors without data.

A `StorageTracker` is a dispatch mode, which follows every storage that an operator makes by a weak reference
until it dies, as torch's own memory trackers do. The purpose of a storage is known when the line that made it
has ended, from the name that refers to it. `footprint` and `updates` follow one call with it, without lines.
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
CUDA_BLOCK_BYTES = 512  # torch's caching allocator rounds sizes up to it, and counts the rounded ones
UNCOUNTED = "uncounted"  # slots of shared memory, which are counted together, and tensors of no memory


@dataclass(eq=False)
class Storage:
    """The memory of one allocation.

    Args:
        slot: the slot of shared memory that it lies in, which is free when the last of its tensors dies.
    """

    bytes: int
    category: str
    tier: str
    slot: Any = None
    reference: weakref.ref | None = None


@dataclass(frozen=True)
class Moment:
    """A line of the schedule at its worst moment: device bytes by category, and bytes of the other tiers."""

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
        """Count the bytes on the device in all categories."""
        return sum(self.device.values())


@dataclass
class Peak:
    """The worst moment of a line.

    Args:
        categories: the bytes of older storages, by category.
        made: the storages that the line has made.
        freed: the number of older storages that had died in the line by then.
        workspace: the bytes that an operator takes and gives back.
    """

    bytes: int = -1
    categories: dict[str, int] = field(default_factory=dict)
    made: tuple[Storage, ...] = ()
    freed: int = 0
    workspace: int = 0


class StorageTracker(TorchDispatchMode):
    """A tracker of the storages that are alive, line by line.

    Args:
        device: the type of device that the lines are for. The tensors themselves have no data.

    Its `categories` are the bytes on the device that earlier lines have made, and `worst` the most so far on
    the host and on disk. `peak` is the worst moment of the line under way, and `freed` has the older storages
    that have died in it.
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
        self.tier, self.slot = "device", None  # where new storages lie
        self.peak, self.freed = Peak(), []
        self._made: dict[int, Storage] = {}  # those of the line under way that are alive, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_fused_"):
            return None  # such operators work in place, and fake tensors do not know them
        if (code := code_of(func, args, self.device)) is not None:
            with self:
                out = code()
        elif func in _IN_PLACE:
            out = args[0]  # a sum in place takes a "meta" tensor a millisecond
        elif func is torch.ops.aten.cat.default and len({(t.dtype, t.dim()) for t in args[0]}) == 1:
            out = _join(*args)  # the operator itself takes a hundred times as long on "meta"
        else:
            out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.follow(value)
        if self.tier == "device":
            self.look(workspace=workspace_bytes(func, args, kwargs or {}, out, self.device))
        return out

    def follow(self, value: Tensor) -> Storage:
        """Return the record of a tensor's storage. One that is unknown has just been made."""
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
        """Return the bytes that an allocation takes of memory."""
        size = storage.nbytes()
        on_cuda = tier == "device" and self.device == "cuda"
        return -(-size // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if on_cuda else size

    def _watch(self, address: int, storage: Any, record: Storage) -> None:
        record.reference = weakref.ref(storage, lambda _: self._forget(address))
        self.alive[address] = record
        self.live[record.tier] += record.bytes

    def _forget(self, address: int) -> None:
        dead = self.alive.pop(address)
        self.live[dead.tier] -= dead.bytes
        if dead.slot is not None:
            dead.slot.let_go()
        if self._made.pop(address, None) is None:
            self.freed.append(dead)
            self._count(dead, -dead.bytes)

    def _count(self, record: Storage, size: int) -> None:
        """Add to the bytes that earlier lines have made."""
        if record.tier == "device":
            self.categories[record.category] += size

    def adopt(self, value: Tensor, category: str, tier: str = "device", size: int | None = None) -> Storage:
        """Follow memory that is there from the start. It counts as `size` bytes, or else as what it takes."""
        storage = value.untyped_storage()
        if storage._cdata not in self.alive:
            record = Storage(self._size(storage, tier) if size is None else size, category, tier)
            self._watch(storage._cdata, storage, record)
            self._count(record, record.bytes)
        return self.alive[storage._cdata]

    @contextmanager
    def place_in(self, tier: str, slot: Any = None) -> Iterator[None]:
        """Let storages that are made within lie in another tier, or in a slot of shared memory."""
        before, self.tier, self.slot = self.tier, tier, slot
        yield
        self.tier, self.slot = before, None

    def begin(self, line: Instruction) -> None:
        self.line, self.peak, self.freed = line, Peak(), []
        self.look()

    def look(self, workspace: int = 0, dead: Sequence[Storage] = (), unborn: Sequence[Storage] = ()) -> None:
        """Note this moment if it is the worst of the line.

        Args:
            workspace: the bytes that are taken and given back at once.
            dead: storages that are alive at this moment, but not followed any more.
            unborn: storages that are alive at this moment, but not followed yet.
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
        """End the line, whose names say what its storages are for."""
        line = self.line
        for name in line.writes:
            if name in env:
                self.categorise(name, env[name])

        computes = line.lane in (COMPUTE, OPTIMIZER_LANE) and not isinstance(line, Wait)
        rest = WORKSPACES if computes else BUFFERS  # the purpose of memory that dies in the line that took it
        peak = self.peak
        for made in self._made.values():
            made.category = made.category or rest
            self._count(made, made.bytes)
        self._made = {}
        peak.categories[rest] += peak.workspace

        # What was there at the worst moment, some of which has died since: now it is known what it was for.
        for record in peak.made:
            record.category = record.category or rest
            if record.tier == "device":
                peak.categories[record.category] += record.bytes
        self.moments.append(Moment(index, line, peak.categories, self.live["host"], self.live["disk"]))

    def categorise(self, name: ValueName, value: Any) -> None:
        """Say by a value's name what its memory is for, if nothing has said so."""
        category = category_of(name)
        for tensor in tensors_of(value):
            record = self.follow(tensor)
            if record.category == BUFFERS != category:  # memory that was sent or received gets a name
                self._count(record, -record.bytes)
                record.category = category
                self._count(record, record.bytes)
            record.category = record.category or category


_IN_PLACE = (torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default)
_SENT = (Kind.NORMS, Kind.UPDATED, Kind.WRITTEN, Kind.FLIGHT)


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return an empty tensor of the shape that joining some gives."""
    first, shape = parts[0], list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(shape, dtype=first.dtype, device=first.device)


def category_of(name: ValueName) -> str:
    """Return the category of the memory in which a schedule's value of this name lies."""
    kind = name.original.kind
    if kind in (Kind.GRADIENT, Kind.REDUCED, Kind.ACCUMULATED):
        return GRADIENTS
    if kind is Kind.GATHERED:
        return GATHERED
    if kind in _SENT or name == SCALARS or name.original.is_state:
        return BUFFERS
    return ACTIVATIONS


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value in an environment. Flights, and values that are no tensors, have none."""
    found: list[Tensor] = []
    for leaf in optree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Reduced):
            found += leaf.blocks.values() if leaf.flat is None else [leaf.flat]
    return found
