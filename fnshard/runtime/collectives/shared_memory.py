"""Collectives through shared memory, for CPU ranks of one host: peers read what they need in place.

A gather of leaves writes them where all ranks read them (`endpoint`); any other costs one pack and one
unpack, a reduction one pass over the peers' rows. All of it runs on the caller's thread, so that nothing
overlaps with compute; gloo over loopback copies everything through the kernel and stages it in temporaries
(figures: `connect`). `messages` says how ranks read each other's memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard.mesh import Mesh
from fnshard.mesh.waits import host, peers
from fnshard.runtime.collectives.base import (
    Axes,
    Group,
    Handle,
    disconnect,
    from_place,
    rows_of_place,
    sum_rows,
    summed_row,
)
from fnshard.runtime.collectives.endpoint import SMALL_BYTES, Add, Endpoint, Runs, Write, address_space
from fnshard.runtime.collectives.messages import REDUCED, Host, Memory, Message, fence


def connect_shared(base: Group) -> Shared | None:
    """Shared memory over the ranks of `base`, or None, on all ranks alike, where it cannot be had.

    Every rank offers its memory, opens that of its host's ranks, and says whether that worked.
    """
    mesh, rank = base.mesh, base.mesh.rank
    fd, offer = -1, ""
    try:
        fd = os.memfd_create("fnshard")
        os.ftruncate(fd, address_space(mesh))  # memory is used only where something was written
        own = Memory.of(fd, rank, os.getpid())
        offer = json.dumps({"host": host(), "pid": os.getpid(), "fd": fd})
    except (OSError, ValueError, AttributeError):  # no Linux, no memfd, a limit on address space
        pass
    try:
        texts = base.gather_object(offer)
        if not all(texts):
            return None
        offers = [json.loads(text) for text in texts]
        hosts = tuple(each["host"] for each in offers)
        memories = {rank: own}
        try:
            for peer, each in enumerate(offers):
                if peer != rank and each["host"] == hosts[rank]:
                    memories[peer] = _open(peer, each)
            answer = "yes"
        except (OSError, ValueError) as error:
            answer = str(error)
        if set(base.gather_object(answer)) != {"yes"} or len(set(hosts)) == mesh.size:
            return None
    finally:
        if fd >= 0:
            os.close(fd)
    return Shared(base, hosts, Endpoint(mesh, Host(rank, memories, base.timeout, base.name, peers())))


def _open(peer: int, offer: dict[str, Any]) -> Memory:
    fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR)
    try:
        return Memory.of(fd, peer, offer["pid"])
    finally:
        os.close(fd)


def _sent(
    name: str, make: Callable[..., Any], scattered: bool = False, released: bool = True
) -> Callable[..., Any]:
    """A collective whose result `make` makes of what each rank has sent and of this one's place in the group.

    Args:
        scattered: each rank reads its own row of what is sent.
        released: when the result is made, nothing of it lies in a slot.
    """

    def collective(shared: Shared, flat: Tensor, axes: Axes, *how: int) -> Handle[Any]:
        if not shared.shares_memory(axes):
            return getattr(shared.base, name)(flat, axes, *how)

        def run(message: Message) -> Any:
            result = make(message.parts(), message.channel.here, *how)
            if released:
                message.release()
            return result

        return shared.endpoint.send(name, flat, axes, scattered, run)

    return collective


@dataclass(eq=False)
class Shared:
    """Shared memory for groups whose ranks share a host; what spans hosts goes through `base`."""

    base: Group
    hosts: tuple[str, ...]
    endpoint: Endpoint
    spans: dict[tuple[str, ...], bool] = field(default_factory=dict)

    all_gather = _sent("all_gather", lambda parts, here: parts, released=False)
    reduce_scatter = _sent("reduce_scatter", summed_row, scattered=True)
    all_to_all = _sent("all_to_all", rows_of_place, scattered=True)
    permute = _sent("permute", from_place)

    @property
    def mesh(self) -> Mesh:
        return self.base.mesh

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        if numel == 0 or not self.shares_memory(axes):
            return self.base.send_buffer(numel, dtype, axes, rows)
        nbytes = rows * numel * dtype.itemsize
        return self.endpoint.own.flat(self.endpoint.slots(rows > 1).take(nbytes).start, nbytes, dtype)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        if not self.shares_memory(axes):
            return self.base.all_reduce(flat, axes)
        into = flat if self.endpoint.packed(flat) is None else None  # a slot is no place for a result

        def run(message: Message) -> Tensor:
            parts = message.parts()
            result = torch.empty_like(parts[0]) if into is None else into
            if message.nbytes <= SMALL_BYTES:
                sum_rows(parts, result)
            else:
                _sum_by_pieces(message, parts, result)
            message.release()
            return result

        return self.endpoint.send("all_reduce", flat, axes, False, run)

    def gather_leaves(
        self, runs: Runs, total: int, dtype: torch.dtype, write: Write, axes: Axes
    ) -> Handle[list[Tensor]] | None:
        """Gather leaves in place, see `endpoint`; None where the ranks share no memory.

        Args:
            total: elements of all leaves together.
            write: copies this rank's blocks into flat leaves, one a run; called at the wait.
        """
        if total == 0 or not self.shares_memory(axes):
            return None
        return self.endpoint.gather("gather_leaves", runs, total, dtype, write, axes, lambda leaves: leaves)

    def reduce_pair(
        self, numel: int, dtype: torch.dtype, pack: Callable[[Tensor], None], add: Add, axes: Axes,
        in_place: bool,
    ) -> Handle[Tensor] | None:  # fmt: skip
        """A reduce-scatter of two ranks in which each keeps its own row; None where they are not two.

        Args:
            pack: fills a flat [numel], the peer's row; called at the wait.
            add: the peer's row for this rank, and a flat [numel] for the sum; called at the wait.
            in_place: the sum is made in the peer's row; it must die before the next collective.
        """
        if numel == 0 or self.mesh.axes_size(axes) != 2 or not self.shares_memory(axes):
            return None
        here = self.endpoint.channel(axes).here
        runs = [(0, numel), (numel, numel)]  # what the first rank is to read, and the second

        def added(rows: list[Tensor]) -> Tensor:
            out = rows[here] if in_place else torch.empty_like(rows[here])
            add(rows[here], out)
            return out

        def write(rows: list[Tensor]) -> None:
            pack(rows[1 - here])

        return self.endpoint.gather("reduce_pair", runs, 2 * numel, dtype, write, axes, added)

    def gather_object(self, text: str) -> list[str]:
        return self.base.gather_object(text)

    def barrier(self) -> None:
        self.base.barrier()

    def transport_bytes(self) -> int:
        return self.endpoint.bytes_used()

    def close(self) -> None:
        disconnect(self)
        self.endpoint.close()
        self.base.close()

    def spans_hosts(self, axes: Axes) -> bool:
        """Whether any group over these axes does."""
        axes = tuple(axes)
        if axes not in self.spans:
            groups = {self.mesh.group_ranks(axes, rank) for rank in range(self.mesh.size)}
            self.spans[axes] = any(len({self.hosts[rank] for rank in group}) > 1 for group in groups)
        return self.spans[axes]

    def shares_memory(self, axes: Axes) -> bool:
        """Whether groups over these axes are of several ranks of one host."""
        return self.mesh.axes_size(axes) > 1 and not self.spans_hosts(axes)


def _sum_by_pieces(message: Message, parts: list[Tensor], result: Tensor) -> None:
    """Each rank sums one piece of all parts and shows it in its own slot; all read the pieces there."""
    here, count = message.channel.here, result.numel()
    step = math.ceil(count / len(parts))
    pieces = [slice(min(j * step, count), min((j + 1) * step, count)) for j in range(len(parts))]
    mine = pieces[here]
    sum_rows([part[mine] for part in parts], result[mine])
    parts[here][mine] = result[mine]
    message.mark(REDUCED, 1)
    for place, piece in enumerate(pieces):
        if place != here:
            message.poll(lambda at, place=place: at != place or message.reads(at, REDUCED))
            fence()
            result[piece] = parts[place][piece]
