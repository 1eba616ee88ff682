"""Transport: what a collective allocates, by the collectives that carry it.

What `fnshard.runtime` does, line by line, without doing it. Memory that a backend's library takes for
itself (gloo's staging, NCCL's channels) is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fnshard.analysis.live_memory import LiveMemory
from fnshard.compiler.schedule.paper import BUFFERS, PaperFlight, PaperTensor
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Group
from fnshard.runtime.collectives.endpoint import SMALL_BYTES, group_names, head_bytes
from fnshard.runtime.collectives.messages import PAGE, header_bytes
from fnshard.runtime.collectives.shared_memory import Shared

SUM_CHUNK = 1 << 16  # elements that `runtime.collectives.base.sum_rows` adds up in fp32 at a time

TransportKind = Literal["local", "shared", "p2p", "native", "simulated"]


def kind_of(mesh: Mesh) -> TransportKind:
    """How the mesh's ranks will talk: as they do, if connected; else what `connect` will choose.

    CPU ranks on one host choose shared memory; where they are spread over hosts, say "p2p". An abstract mesh
    stands for an accelerator's own collectives.
    """
    if mesh.kind == "simulated":
        return "simulated"
    if mesh.size == 1:
        return "local"
    for known in mesh.connections.values():
        if isinstance(known, Shared):
            return "shared"
        if isinstance(known, Group):
            return "p2p" if known.peer_to_peer else "native"
    return "shared" if mesh.kind == "group" and mesh.device_type == "cpu" else "native"


@dataclass(eq=False)
class SharedSlot:
    """A part of the arena between taking and release."""

    start: int
    end: int
    alive: bool = True
    views: int = 0  # of a unit gathered in place: leaves that are alive


@dataclass
class SharedHeap:
    """`runtime.collectives.messages.Slots`, where every peer is done as soon as this rank is."""

    top: int = 0
    live: list[SharedSlot] = field(default_factory=list)

    def take(self, nbytes: int) -> SharedSlot:
        """The lowest gap that fits."""
        size = max(-(-nbytes // PAGE), 1) * PAGE
        self.live = [s for s in self.live if s.alive]
        start = place = 0
        for place, slot in enumerate([*self.live, SharedSlot(1 << 62, 1 << 62)]):  # noqa: B007
            if slot.start - start >= size:
                break
            start = slot.end
        made = SharedSlot(start, start + size)
        self.live.insert(place, made)
        self.top = max(self.top, made.end)
        return made


@dataclass
class Transport:
    """One rank's collectives on paper."""

    mesh: Mesh
    kind: TransportKind
    gathers: SharedHeap = field(default_factory=SharedHeap)
    reductions: SharedHeap = field(default_factory=SharedHeap)
    units: dict[tuple[str, ...], SharedHeap] = field(default_factory=dict)  # gathered in place, by axes
    packing: SharedSlot | None = None

    def resident_bytes(self) -> int:
        """Shared memory that the steps so far have touched."""
        if self.kind != "shared":
            return 0
        words = head_bytes(len(group_names(self.mesh)))
        units = sum(-(-heap.top // self.mesh.axes_size(axes)) for axes, heap in self.units.items())
        return words + self.gathers.top + self.reductions.top + units

    def send_buffer(
        self, live: LiveMemory, numel: int, dtype: torch.dtype, axes: Sequence[str], rows: int = 1
    ) -> PaperTensor:
        """Where a bucket is packed."""
        nbytes = rows * numel * dtype.itemsize
        if nbytes and self.shares_memory(axes):
            self.packing = self._taken(self.reductions if rows > 1 else self.gathers, nbytes)
            return PaperTensor(None, rows * numel, dtype)
        return live.tensor(rows * numel, dtype, BUFFERS)

    def all_gather(self, live: LiveMemory, flat: PaperTensor, axes: Sequence[str]) -> PaperFlight:
        """Issue; the flight holds the rows."""
        n = self.mesh.axes_size(axes)
        if n == 1 or self.kind == "local":
            return PaperFlight((flat,))
        if self.kind == "shared":
            return PaperFlight(slot=self._slot(flat, self.gathers))
        if self.kind == "p2p":
            return PaperFlight((flat, *(live.like(flat, BUFFERS) for _ in range(n - 1))))
        count = n if self.kind == "native" else 1
        return PaperFlight((flat, live.tensor(count * flat.numel, flat.dtype, BUFFERS)))

    def shares_memory(self, axes: Sequence[str]) -> bool:
        """Whether these ranks write to one memory."""
        return self.kind == "shared" and self.mesh.axes_size(axes) > 1

    def gather_leaves(self, nbytes: int, count: int, axes: Sequence[str]) -> PaperFlight:
        """Issue a gather of so many leaves in place: their slot is free when the last of them dies."""
        slot = self._taken(self.units.setdefault(tuple(axes), SharedHeap()), nbytes)
        slot.views = count
        return PaperFlight(slot=slot)

    def reduce_scatter(self, live: LiveMemory, rows: PaperTensor, axes: Sequence[str]) -> PaperFlight:
        """Issue; `reduced` gives the result."""
        n = self.mesh.axes_size(axes)
        if n == 1 or self.kind == "local":
            return PaperFlight(result=rows)
        part = rows.numel // n
        if self.kind == "shared":
            slot = self._slot(rows, self.reductions)
            return PaperFlight(slot=slot, result=PaperTensor(None, part, rows.dtype), rows=n)
        if self.kind == "p2p":
            parts = [live.tensor(part, rows.dtype, BUFFERS) for _ in range(n - 1)]
            return PaperFlight((rows, *parts), result=PaperTensor(None, part, rows.dtype), rows=n)
        if self.kind == "native":
            return PaperFlight((rows,), result=live.tensor(part, rows.dtype, BUFFERS))
        return PaperFlight(
            (rows, live.like(rows, BUFFERS)), result=PaperTensor(None, part, rows.dtype), rows=n
        )

    def all_to_all(self, live: LiveMemory, rows: PaperTensor, axes: Sequence[str]) -> PaperFlight:
        """Issue; `reduced` gives the rows that were received."""
        if self.mesh.axes_size(axes) == 1 or self.kind == "local":
            return PaperFlight(result=rows)
        received = PaperTensor(None, rows.numel, rows.dtype)
        if self.kind == "shared":
            return PaperFlight(slot=self._slot(rows, self.reductions), result=received)
        if self.kind == "simulated":
            return PaperFlight((rows, live.like(rows, BUFFERS)), result=received)
        return PaperFlight((rows,), result=live.like(rows, BUFFERS))

    permute = all_to_all  # as much is received as is sent

    def reduce_pair(
        self, numel: int, dtype: torch.dtype, axes: Sequence[str], own: Sequence[PaperTensor], in_place: bool
    ) -> PaperFlight:
        """Issue a reduction of two ranks that keep their own rows, in gradients that live till then."""
        flight = self.gather_leaves(2 * numel * dtype.itemsize, int(in_place), axes)
        return replace(flight, keeps=tuple(own), result=PaperTensor(None, numel, dtype))

    def all_reduce(self, live: LiveMemory, flat: PaperTensor, axes: Sequence[str]) -> PaperFlight:
        """Issue; the sum is made in place, but not in a shared slot."""
        n = self.mesh.axes_size(axes)
        if n == 1 or self.kind in ("local", "p2p", "native"):
            return PaperFlight(result=flat)
        if self.kind == "shared":
            pieces = n if flat.bytes > SMALL_BYTES else 1
            return PaperFlight(slot=self._slot(flat, self.gathers), result=flat, pieces=pieces, rows=n)
        return PaperFlight((live.like(flat, BUFFERS),), result=flat, rows=n)

    def reduced(self, live: LiveMemory, flight: PaperFlight) -> PaperTensor:
        """Wait for a sum, or rows: where it is not there yet, it is made now."""
        result: PaperTensor = flight.result
        if self.kind in ("local", "native") or (not flight.keeps and flight.slot is None):
            return result  # summed where it lay, or by the library
        if flight.slot is not None and flight.slot.views:  # summed there, and held till the sum dies
            return live.view_of(flight.slot, result.numel, result.dtype)
        if result.storage is None:
            result = live.tensor(result.numel, result.dtype, BUFFERS)
        if flight.rows > 2 and result.dtype in (torch.bfloat16, torch.float16):  # summed in fp32, by pieces
            live.spike(2 * 4 * min(SUM_CHUNK, -(-result.numel // flight.pieces)), BUFFERS)
        self.release(flight)
        return result

    def release(self, flight: PaperFlight) -> None:
        """The slot may be used again."""
        if flight.slot is not None:
            flight.slot.alive = False

    def _slot(self, flat: PaperTensor, heap: SharedHeap) -> SharedSlot:
        """The slot that `flat` was packed in, or one that it is copied to."""
        if flat.storage is None and self.packing is not None:
            slot, self.packing = self.packing, None
            return slot
        return self._taken(heap, flat.bytes)

    def _taken(self, heap: SharedHeap, nbytes: int) -> SharedSlot:
        """A slot with its header."""
        return heap.take(header_bytes(self.mesh) + nbytes)
