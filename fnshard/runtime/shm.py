"""Collectives through shared memory, for CPU ranks of one host: peers read what they need in place.

A gather costs one pack and one unpack, a reduction one pass over the peers' rows, both on the caller's
thread, so nothing overlaps with compute; gloo over loopback copies everything through the kernel and
stages it in temporaries (figures: `connect`). `messages` is what it stands on.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Generic, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from fnshard.mesh import Mesh
from fnshard.runtime.collectives import (
    Axes,
    Done,
    Group,
    Handle,
    describe,
    empty,
    forget,
    sum_rows,
    waited_twice,
)
from fnshard.runtime.messages import (
    ARENA_BYTES,
    CLOSED,
    DONE,
    HALF,
    REDUCED,
    TOKEN,
    Arena,
    Channel,
    Message,
    Slots,
    control_bytes,
    fence,
    map_arena,
)

T = TypeVar("T")

SMALL_BYTES = 64 << 10  # an all-reduce below this is summed whole by every rank: one meeting, not two


# ------------------------------------------------------------------ meeting


def _host() -> str:
    """Equal for processes that see each other's `/proc`: same boot, same process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def connect_shared(base: Group) -> Shared | None:
    """Shared memory over the ranks of `base`, or None, on all ranks alike, where it cannot be had.

    Every rank offers an arena, opens those of its host, and says whether that worked.
    """
    mesh, rank = base.mesh, base.mesh.rank
    control = control_bytes(len(_group_names(mesh)))
    token, fd, offer = secrets.randbits(62), -1, ""
    try:
        fd = os.memfd_create("fnshard")
        os.ftruncate(fd, ARENA_BYTES)
        own = map_arena(fd, rank, os.getpid(), control)
        own.words[TOKEN] = token
        offer = json.dumps({"host": _host(), "pid": os.getpid(), "fd": fd, "token": token})
    except (OSError, ValueError, AttributeError):  # no Linux, no memfd, a limit on address space
        pass
    try:
        texts = base.gather_object(offer)
        if not all(texts):
            return None
        offers = [json.loads(text) for text in texts]
        hosts = tuple(each["host"] for each in offers)
        arenas = {rank: own}
        try:
            for peer, each in enumerate(offers):
                if peer != rank and each["host"] == hosts[rank]:
                    arenas[peer] = _open(peer, each, control)
            answer = "yes"
        except (OSError, ValueError) as error:
            answer = str(error)
        if set(base.gather_object(answer)) != {"yes"} or len(set(hosts)) == mesh.size:
            return None
    finally:
        if fd >= 0:
            os.close(fd)
    return Shared(base, hosts, arenas, control)


def _open(peer: int, offer: dict[str, Any], control: int) -> Arena:
    fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR)
    try:
        arena = map_arena(fd, peer, offer["pid"], control)
    finally:
        os.close(fd)
    if arena.words[TOKEN] != offer["token"]:
        raise ValueError(f"rank {peer}'s memory is another process's")
    return arena


def _group_names(mesh: Mesh) -> list[tuple[str, ...]]:
    """All ordered groups of the mesh's axes: a group's place here is its number on every rank."""
    axes = mesh.ordered(mesh.names)
    return [names for count in range(1, len(axes) + 1) for names in permutations(axes, count)]


# ------------------------------------------------------------------ the collectives


class _InFlight(Generic[T]):
    """A handle: `take` makes the result of a message."""

    def __init__(self, message: Message, take: Callable[[Message], T]):
        self._message, self._take = message, take

    def wait(self) -> T:
        take, self._take = self._take, waited_twice
        return take(self._message)

    def release(self) -> None:
        self._message.mark(DONE)


@dataclass(eq=False)
class Shared:
    """Shared memory for groups whose ranks share a host; what spans hosts goes through `base`."""

    base: Group
    hosts: tuple[str, ...]
    arenas: dict[int, Arena]
    control: int
    channels: dict[tuple[str, ...], Channel | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rows to be reduced lie apart from rows to be gathered: they come and go in another rhythm, and
        # in one heap would leave gaps in each other's way. The arena is sparse, gaps between cost nothing.
        self.gathers, self.reductions = Slots(self.control), Slots(HALF)
        self.own = self.arenas[self.mesh.rank]

    @property
    def mesh(self) -> Mesh:
        return self.base.mesh

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        nbytes = rows * numel * dtype.itemsize
        if nbytes == 0 or self.mesh.axes_size(axes) == 1 or self._channel(axes) is None:
            return empty(self.mesh, rows * numel, dtype)
        slots = self.reductions if rows > 1 else self.gathers
        return self.own.view(slots.take(nbytes).start, nbytes, dtype)

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        if self.mesh.axes_size(axes) == 1:
            return Done([flat])
        channel = self._channel(axes)
        if channel is None:
            return self.base.all_gather(flat, axes)
        return _InFlight(self._send("all_gather", flat, channel)[0], Message.parts)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        n = self.mesh.axes_size(axes)
        if n == 1:
            return Done(rows)
        channel = self._channel(axes)
        if channel is None:
            return self.base.reduce_scatter(rows, axes)
        out = rows.numel() // n

        def take(message: Message) -> Tensor:
            first = channel.here * out
            mine = [part[first : first + out] for part in message.parts()]
            result = sum_rows(mine, torch.empty(out, dtype=message.dtype))
            message.mark(DONE)
            return result

        return _InFlight(self._send("reduce_scatter", rows, channel)[0], take)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        if self.mesh.axes_size(axes) == 1:
            return Done(flat)
        channel = self._channel(axes)
        if channel is None:
            return self.base.all_reduce(flat, axes)
        message, copied = self._send("all_reduce", flat, channel)
        into = flat if copied else None  # a slot is no place for a result

        def take(message: Message) -> Tensor:
            parts = message.parts()
            result = torch.empty_like(parts[0]) if into is None else into
            if message.nbytes <= SMALL_BYTES:
                sum_rows(parts, result)
            else:
                _sum_by_pieces(message, parts, result)
            message.mark(DONE)
            return result

        return _InFlight(message, take)

    def gather_object(self, text: str) -> list[str]:
        return self.base.gather_object(text)

    def barrier(self) -> None:
        self.base.barrier()

    def transport_bytes(self) -> int:
        return self.control + sum(s.top - s.floor for s in (self.gathers, self.reductions))

    def close(self) -> None:
        forget(self)
        self.own.words[CLOSED] = 1
        self.channels.clear()
        self.arenas.clear()
        self.base.close()

    def _send(self, name: str, flat: Tensor, channel: Channel) -> tuple[Message, bool]:
        """Publish `flat`, from where it lies if that is a slot; and whether it was copied."""
        nbytes = flat.numel() * flat.dtype.itemsize
        offset = flat.data_ptr() - self.own.address
        slot = self.gathers.packed_at(offset, nbytes) or self.reductions.packed_at(offset, nbytes)
        copied = slot is None
        if slot is None:
            slot = (self.reductions if name == "reduce_scatter" else self.gathers).take(nbytes)
            self.own.view(slot.start, nbytes, flat.dtype).copy_(flat.detach())
        channel.sent += 1
        what = lambda: describe(name, self.mesh, channel.axes)  # noqa: E731
        slot.message = Message(channel, channel.sent, what, self.base.timeout, nbytes, flat.dtype)
        slot.message.publish(slot.start, crc32(f"{name} {nbytes} {flat.dtype}".encode()))
        return slot.message, copied

    def _channel(self, axes: Axes) -> Channel | None:
        """The group's messages; None if any group over these axes spans hosts."""
        axes = tuple(axes)
        if axes not in self.channels:
            self.channels[axes] = self._make_channel(axes)
        return self.channels[axes]

    def _make_channel(self, axes: tuple[str, ...]) -> Channel | None:
        groups = {self.mesh.group_ranks(axes, rank) for rank in range(self.mesh.size)}
        if any(len({self.hosts[rank] for rank in group}) > 1 for group in groups):
            return None
        number = _group_names(self.mesh).index(tuple(a for a in axes if self.mesh.axis_size(a) > 1))
        ranks = self.mesh.group_ranks(axes)
        arenas = [self.arenas[rank] for rank in ranks]
        return Channel(axes, arenas, [a.table(number) for a in arenas], ranks.index(self.mesh.rank))


def _sum_by_pieces(message: Message, parts: list[Tensor], result: Tensor) -> None:
    """Each rank sums one piece of all parts and shows it in its own slot; all read the pieces there."""
    channel, count = message.channel, result.numel()
    step = -(-count // len(parts))
    pieces = [slice(min(j * step, count), min((j + 1) * step, count)) for j in range(len(parts))]
    mine = pieces[channel.here]
    sum_rows([part[mine] for part in parts], result[mine])
    parts[channel.here][mine] = result[mine]
    message.mark(REDUCED)
    for place, piece in enumerate(pieces):
        if place != channel.here:
            table = channel.tables[place]
            message.poll(lambda j, at=place, t=table: j != at or t[REDUCED, message.column] == message.number)
            fence()
            result[piece] = parts[place][piece]
