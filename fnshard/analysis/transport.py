"""Transport: count what a collective allocates, without sending anything.

`Counting` has the interface of `runtime.collectives.base.Collectives`, on tensors without data. Memory that a
backend's library takes for itself (gloo's staging, NCCL's channels) is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fnshard.analysis.storages import UNCOUNTED, StorageTracker
from fnshard.analysis.workspace import HALVES
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import SUM_CHUNK, Done, Group, Handle
from fnshard.runtime.collectives.messages import Slots
from fnshard.runtime.collectives.shared_memory import (
    SMALL_BYTES,
    Shared,
    group_names,
    head_bytes,
    header_bytes,
)

TransportKind = Literal["local", "shared", "p2p", "native", "simulated"]
Axes = Sequence[str]


def transport_of(mesh: Mesh) -> TransportKind:
    """Return the way in which the mesh's ranks communicate, or will once `connect` has chosen it.

    CPU ranks that are not connected yet are taken to be on one host, where they share memory; for ranks on
    several hosts, use "p2p" instead. An abstract mesh is taken to have an accelerator's own collectives.
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
    """A user of a slot of shared memory, for `Slots`: the slot is free when its last tensor has died.

    Args:
        views: the number of its tensors that are alive.
    """

    views: int = 1
    finished = False

    def let_go(self) -> None:
        self.views -= 1

    def free(self) -> bool:
        return self.views == 0


class Flight:
    """A collective in flight. It holds some tensors until it is waited for, and others until its release."""

    def __init__(self, take: Callable[[], Any], until_wait: Any = None, until_release: Any = None) -> None:
        self._take, self._until_wait, self._until_release = take, until_wait, until_release

    def wait(self) -> Any:
        # Drop what the flight holds, so that the tracker sees it die.
        result, self._take, self._until_wait = self._take(), None, None
        return result

    def release(self) -> None:
        self._until_release = None


@dataclass
class Counting:
    """A stand-in for a rank's `Collectives`, which sends nothing.

    A group of one rank has its own message as the result.

    Args:
        gathers, reductions: the slots of shared memory for what is gathered, and for what is summed.
        units: the slots for leaves that are gathered in place, by the axes of the group.
    """

    mesh: Mesh
    kind: TransportKind
    tracker: StorageTracker
    gathers: Slots = field(default_factory=lambda: Slots(0))
    reductions: Slots = field(default_factory=lambda: Slots(0))
    units: dict[tuple[str, ...], Slots] = field(default_factory=dict)

    def transport_bytes(self) -> int:
        """Count the shared memory that the steps so far have touched."""
        if self.kind != "shared":
            return 0
        # The ranks of a group use the slots of units together, so each of them counts its share.
        words = head_bytes(len(group_names(self.mesh)))
        units = sum(-(-heap.top // self.mesh.axes_size(axes)) for axes, heap in self.units.items())
        return words + self.gathers.top + self.reductions.top + units

    def _count_ranks(self, axes: Axes) -> int:
        return 1 if self.kind == "local" else self.mesh.axes_size(axes)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.tracker.new((numel,), dtype)

    def _new_in_slot(self, slot: SharedSlot, numel: int, dtype: torch.dtype) -> Tensor:
        with self.tracker.place_in(UNCOUNTED, slot):
            return self._new(numel, dtype)

    def _pack(self, flat: Tensor, heap: Slots) -> Tensor:
        """Return the slot that `flat` was packed in, or one that it is copied to."""
        if isinstance(self.tracker.follow(flat).slot, SharedSlot):
            return flat
        return self._new_in_slot(_take_slot(heap, flat.nbytes), flat.numel(), flat.dtype)

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        nbytes = rows * numel * dtype.itemsize
        if nbytes and self.kind == "shared" and self._count_ranks(axes) > 1:
            heap = self.reductions if rows > 1 else self.gathers
            return self._new_in_slot(_take_slot(heap, nbytes), rows * numel, dtype)
        return self._new(rows * numel, dtype)

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[Any]:
        n = self._count_ranks(axes)
        if n == 1:
            return Done([flat])
        # One view serves for all rows, since nothing reads their values.
        rows = [flat] * n
        if self.kind == "shared":
            return Flight(lambda: rows, until_release=self._pack(flat, self.gathers))
        if self.kind == "native":
            received = self._new(n * flat.numel(), flat.dtype)
            return Flight(lambda: [received[: flat.numel()]] * n, until_wait=flat, until_release=received)
        others = [self._new(flat.numel(), flat.dtype) for _ in range(n - 1 if self.kind == "p2p" else 1)]
        return Flight(lambda: rows, until_release=(flat, others))

    def gather_blocks(self, blocks: Sequence[Tensor], axes: Axes) -> Handle[list[Tensor]] | None:
        n = self._count_ranks(axes)
        if self.kind != "native" or n == 1:
            return None
        leaves = [self._new(n * b.numel(), b.dtype) for b in blocks]
        return Flight(lambda: leaves, until_wait=blocks)

    def reduce_leaves(self, leaves: Sequence[Tensor], axes: Axes) -> Handle[Tensor] | None:
        n = self._count_ranks(axes)
        if self.kind != "native" or n == 1:
            return None
        out = self._new(sum(leaf.numel() for leaf in leaves) // n, leaves[0].dtype)
        return Flight(lambda: out, until_wait=leaves)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Any]:
        n = self._count_ranks(axes)
        if n == 1:
            return Done(rows)
        part, dtype = rows.numel() // n, rows.dtype
        if self.kind == "native":
            result = self._new(part, dtype)
            return Flight(lambda: result, until_wait=rows)
        if self.kind == "shared":
            kept: Any = self._pack(rows, self.reductions)
        elif self.kind == "p2p":
            kept = (rows, [self._new(part, dtype) for _ in range(n - 1)])
        else:
            kept = (rows, self._new(rows.numel(), rows.dtype))
        return self._issue(Flight(lambda: self._sum(part, dtype, n), until_release=kept))

    def _issue(self, flight: Flight) -> Handle[Any]:
        """Issue a flight. In shared memory its result is made at once, and otherwise by the wait."""
        return Done(flight.wait()) if self.kind == "shared" else flight

    def _sum(
        self, numel: int, dtype: torch.dtype, rows: int, pieces: int = 1, into: Tensor | None = None
    ) -> Tensor:
        """Take the memory of a sum. More than two halves are summed in fp32, a chunk at a time."""
        result = self._new(numel, dtype) if into is None else into
        if rows > 2 and dtype in HALVES:
            # A chunk of the sum, and the cast of a chunk that is added to it.
            self.tracker.look(workspace=2 * 4 * min(SUM_CHUNK, -(-numel // pieces)))
        return result

    def all_to_all(self, rows: Tensor, axes: Axes, distance: int = 0) -> Handle[Any]:
        if self._count_ranks(axes) == 1:
            return Done(rows)
        numel, dtype = rows.numel(), rows.dtype
        if self.kind in ("native", "p2p"):
            received = self._new(rows.numel(), rows.dtype)
            return Flight(lambda: received, until_wait=rows)
        shared = self.kind == "shared"
        kept = self._pack(rows, self.reductions) if shared else (rows, self._new(numel, dtype))
        return self._issue(Flight(lambda: self._new(numel, dtype), until_release=kept))

    permute = all_to_all  # as much is received as is sent

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Any]:
        """Sum over ranks in place, see `Collectives`, unless the values are in a slot that others read."""
        n = self._count_ranks(axes)
        if n == 1 or self.kind in ("p2p", "native"):
            return Done(flat)
        simulated, numel, dtype = self.kind == "simulated", flat.numel(), flat.dtype
        kept = self._new(numel, dtype) if simulated else self._pack(flat, self.gathers)
        into = None if kept is flat else flat
        pieces = n if self.kind == "shared" and flat.nbytes > SMALL_BYTES else 1
        return self._issue(Flight(lambda: self._sum(numel, dtype, n, pieces, into), until_release=kept))

    def send(self, tensors: Sequence[Tensor], rank: int, what: str) -> Handle[None]:
        """Send to another rank, see `Collectives`. The flight holds copies until it is waited for."""
        copies = [self._new(t.numel(), t.dtype) for t in tensors]
        return Flight(lambda: None, until_wait=copies)

    def recv(
        self, likes: Sequence[tuple[tuple[int, ...], torch.dtype]], rank: int, what: str
    ) -> Handle[list[Tensor]]:
        received = [self.tracker.new(shape, dtype) for shape, dtype in likes]
        return Flight(lambda: received)

    def gather_leaves(
        self, runs: Sequence[tuple[int, int]], total: int, dtype: torch.dtype, write: Any, axes: Axes,
        blocks: Any = (), move: Any = None,
    ) -> Handle[list[Tensor]] | None:  # fmt: skip
        """Gather leaves, see `Shared.gather_leaves`.

        A unit's slot is free when the last of its leaves dies. Leaves that are read where they are stored
        take no memory besides that of the stored blocks, which is counted already.
        """
        if self.kind != "shared" or self._count_ranks(axes) == 1:
            return None
        if blocks:
            with self.tracker.place_in(UNCOUNTED):
                return Done([self._new(size, dtype) for _, size in runs])
        slot = self._take_unit_slot(axes, total * dtype.itemsize, views=sum(size > 0 for _, size in runs))
        leaves = [self._new_in_slot(slot, size, dtype) for _, size in runs]
        write(leaves)
        return Done(leaves)

    def reduce_pair(
        self, numel: int, dtype: torch.dtype, pack: Any, add: Any, axes: Axes, in_place: bool
    ) -> Handle[Tensor] | None:
        """Sum over two ranks that keep their own rows, see `Shared.reduce_pair`."""
        if self.kind != "shared" or self._count_ranks(axes) != 2:
            return None
        slot = self._take_unit_slot(axes, 2 * numel * dtype.itemsize)
        result = self._new_in_slot(slot, numel, dtype)
        return Done(result if in_place else self._new(numel, dtype))  # in place, the slot has the sum

    def _take_unit_slot(self, axes: Axes, nbytes: int, views: int = 1) -> SharedSlot:
        """Take a slot for leaves that a group gathers in place, with room for the ranks' signatures."""
        heap = self.units.setdefault(tuple(axes), Slots(0))
        return _take_slot(heap, header_bytes(self.mesh) + nbytes, views)


def _take_slot(heap: Slots, nbytes: int, views: int = 1) -> SharedSlot:
    """Take a slot of a heap for so many tensors, and return its user."""
    slot = heap.take(nbytes)
    slot.use = user = SharedSlot(views)
    return user
