"""Storages: follow the memory that is alive while a schedule's lines run on tensors without data.

A `StorageTracker` is a dispatch mode. Like torch's own memory trackers, it follows every storage that an
operator makes by a weak reference until it dies. The purpose of a storage is known when the line that made it
has ended, from the name that refers to it. `footprint` and `updates` use a tracker for a single call.
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
        category: its purpose, or "" while that is not known.
        slot: the slot of shared memory that it lies in, which is free when the last of its tensors dies.
        reference: a weak reference to torch's own storage.
    """

    bytes: int
    category: str
    tier: str
    slot: Any = None
    reference: weakref.ref | None = None


@dataclass(frozen=True)
class Moment:
    """A line of the schedule at its worst moment: device bytes by category, and bytes in other tiers."""

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
    """A line's worst moment so far.

    Args:
        categories: the bytes of storages that earlier lines have made, by category.
        made: the storages that the line itself has made.
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

    `live` has the bytes that are alive now, by tier, and `categories` those on the device that earlier lines
    have made. `worst` has the most bytes so far on the host and on disk. `peak` is the worst moment of the
    current line, and `freed` has the older storages that have died in it.
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
        self._made: dict[int, Storage] = {}  # those of the current line that are alive, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_fused_"):
            return None  # such operators work in place, and fake tensors do not know them

        # Run the library's own operators as Python code, so that what that allocates is followed too.
        if (code := code_of(func, args, self.device)) is not None:
            with self:
                out = code()
        elif func in _IN_PLACE:
            out = args[0]  # a sum in place takes a "meta" tensor a millisecond
        elif func is torch.ops.aten.cat.default and len({(t.dtype, t.dim()) for t in args[0]}) == 1:
            out = _make_joined(*args)  # the operator itself takes a hundred times as long on "meta"
        else:
            out = func(*args, **(kwargs or {}))

        # Follow what it returns, and look at what it took besides.
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.follow(value)
        if self.tier == "device":
            self.look(workspace=workspace_bytes(func, args, kwargs or {}, out, self.device))
        return out

    def follow(self, value: Tensor) -> Storage:
        """Return the record of a tensor's storage. A storage that is unknown has just been made."""
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
        """Return the bytes of memory that an allocation takes."""
        size = storage.nbytes()
        on_cuda = tier == "device" and self.device == "cuda"
        return -(-size // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if on_cuda else size

    def _watch(self, address: int, storage: Any, record: Storage) -> None:
        """Count a storage as alive until torch frees it."""
        record.reference = weakref.ref(storage, lambda _: self._forget(address))
        self.alive[address] = record
        self.live[record.tier] += record.bytes

    def _forget(self, address: int) -> None:
        dead = self.alive.pop(address)
        self.live[dead.tier] -= dead.bytes
        if dead.slot is not None:
            dead.slot.let_go()
        # `categories` counts only storages of earlier lines.
        if self._made.pop(address, None) is None:
            self.freed.append(dead)
            self._count(dead, -dead.bytes)

    def _count(self, record: Storage, size: int) -> None:
        """Add to the bytes on the device that earlier lines have made."""
        if record.tier == "device":
            self.categories[record.category] += size

    def adopt(self, value: Tensor, category: str, tier: str = "device", size: int | None = None) -> Storage:
        """Follow memory that exists from the start. It counts as `size` bytes, by default its own size."""
        storage = value.untyped_storage()
        if storage._cdata not in self.alive:
            record = Storage(self._size(storage, tier) if size is None else size, category, tier)
            self._watch(storage._cdata, storage, record)
            self._count(record, record.bytes)
        return self.alive[storage._cdata]

    @contextmanager
    def place_in(self, tier: str, slot: Any = None) -> Iterator[None]:
        """Place storages that are made in this context in another tier, or in a slot of shared memory."""
        before, self.tier, self.slot = self.tier, tier, slot
        yield
        self.tier, self.slot = before, None

    def begin(self, line: Instruction) -> None:
        """Begin a line, whose worst moment so far is its start."""
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
        total = self.live["device"] + workspace
        if dead or unborn:
            total += sum(s.bytes for s in (*dead, *unborn) if s.tier == "device")
        if total <= self.peak.bytes:
            return

        # Storages without a category are this line's own.
        categories, uncategorised = dict(self.categories), []
        for storage in dead:
            if not storage.category:
                uncategorised.append(storage)
            elif storage.tier == "device":
                categories[storage.category] += storage.bytes
        made = (*self._made.values(), *uncategorised, *unborn)
        self.peak = Peak(total, categories, made, len(self.freed), workspace)

    def end(self, index: int, env: Mapping[str, Any]) -> None:
        """End the line, whose names say what its storages are for."""
        line = self.line
        for name in line.writes:
            if name in env:
                self.categorise(name, env[name])

        # Memory without a name is a workspace or a buffer, by the kind of line. What is alive counts from now
        # on as made by an earlier line.
        computes = line.lane in (COMPUTE, OPTIMIZER_LANE) and not isinstance(line, Wait)
        unnamed = WORKSPACES if computes else BUFFERS
        peak = self.peak
        for made in self._made.values():
            made.category = made.category or unnamed
            self._count(made, made.bytes)
        self._made = {}

        # The line's own storages at the worst moment, of which some have died since.
        peak.categories[unnamed] += peak.workspace
        for record in peak.made:
            record.category = record.category or unnamed
            if record.tier == "device":
                peak.categories[record.category] += record.bytes
        self.moments.append(Moment(index, line, peak.categories, self.live["host"], self.live["disk"]))

    def categorise(self, name: ValueName, value: Any) -> None:
        """Set the purpose of a value's memory by the value's name, if it is not known."""
        category = category_of(name)
        for tensor in tensors_of(value):
            record = self.follow(tensor)
            if record.category == BUFFERS != category:  # memory that was sent or received gets a name
                self._count(record, -record.bytes)
                record.category = category
                self._count(record, record.bytes)
            record.category = record.category or category


# Operators whose result is their first argument.
_IN_PLACE = (torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default)
# Kinds of values whose memory counts as buffers.
_SENT = (Kind.NORMS, Kind.UPDATED, Kind.WRITTEN, Kind.FLIGHT)


def _make_joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Make an empty tensor of the shape that `torch.cat` returns."""
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
    """Return the tensors in a value of an environment. Flights, and values that are no tensors, have none."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for leaf in optree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Reduced):
            found += leaf.blocks.values() if leaf.flat is None else [leaf.flat]
    return found
