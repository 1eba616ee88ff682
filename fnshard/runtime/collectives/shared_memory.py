"""Collectives through shared memory, for CPU ranks of one host: peers read what they need in place.

A gather of leaves writes them where all ranks read them; any other costs one pack and one unpack, a
reduction one pass over the peers' rows. All of it runs on the caller's thread, so that nothing overlaps with
compute; gloo over loopback copies everything through the kernel and stages it in temporaries (figures:
`connect`). `messages` says how ranks read each other's memory.

Leaves that are *gathered in place* lie once in memory that all ranks of a group see, whole and contiguous.
Each rank writes its own blocks to their places, and every rank's leaves are views of that one memory:
nothing is unpacked, and a host holds a gathered unit once instead of once a rank. The group's first rank,
its leader, chooses the slot in its memory; a follower waits for that. A slot is used again once no rank holds
a view of it: each rank signs it when the storages that it made of it have died, and before it comes to a
gather it signs all that died by then. So where all ranks have come to a gather, a slot that only peers still
hold is kept for longer (somebody kept a leaf), and the leader takes more memory instead of waiting. Hence no
rank waits for anything but that its peers come to, and write, the same gather.

Two ranks that reduce send each other rows the same way: in the backward, a unit's gradients travel in the
slot that its leaves have just left.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, TypeVar

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
    several,
    sum_rows,
    summed_row,
)
from fnshard.runtime.collectives.messages import (
    CLOSED,
    GROUP_BYTES,
    KIND,
    OFFSET,
    PAGE,
    REDUCED,
    REGION,
    Channel,
    Host,
    Memory,
    Message,
    Slot,
    Slots,
    Words,
    fence,
)

T = TypeVar("T")
Runs = Sequence[tuple[int, int]]  # start and length of each leaf, in elements
Write = Callable[[list[Tensor]], None]
Add = Callable[[Tensor, Tensor], None]

SMALL_BYTES = 64 << 10  # an all-reduce below this is summed whole by every rank: one meeting, not two
LEADER = 0  # its place in the group


def group_names(mesh: Mesh) -> list[tuple[str, ...]]:
    """All ordered groups of the mesh's axes: a group's words have their place here, on every rank."""
    axes = mesh.ordered(mesh.names)
    return [names for count in range(1, len(axes) + 1) for names in permutations(axes, count)]


def address_space(mesh: Mesh) -> int:
    """Bytes of a memory's address space: control words, what is packed to be gathered and to be reduced, and
    the leaves that each group gathers in place."""
    return (3 + len(group_names(mesh))) * REGION


def head_bytes(groups: int) -> int:
    """Bytes at the start of a memory for the memory's own words and those of so many groups."""
    return PAGE + groups * GROUP_BYTES


def header_bytes(mesh: Mesh) -> int:
    """Bytes at the start of a slot of leaves, for the signature of each rank; a multiple of 64."""
    return -(-mesh.size // 8) * 64


@dataclass(eq=False)
class Lease:
    """The use of a slot of leaves. `signed`: by each rank, when its views have died."""

    signed: Words
    here: int

    @property
    def finished(self) -> bool:
        """Whether this rank has no view of it any more."""
        return bool(self.signed[self.here])

    def free(self) -> bool:
        """Whether no rank has."""
        return all(self.signed)


@dataclass(eq=False)
class Units:
    """What one group gathers in place, as this rank sees it.

    Args:
        slots: of the leader's memory; what a follower knows of them is how far they reach.
        dead: numbers of messages whose views have died; `alive`: those whose views live.
    """

    channel: Channel
    slots: Slots
    dead: deque[int] = field(default_factory=deque)
    alive: dict[int, tuple[Words, weakref.ref]] = field(default_factory=dict)

    def sweep(self) -> None:
        """Show the peers whose views have died here."""
        fence()
        while self.dead:
            self.alive.pop(self.dead.popleft())[0][self.channel.here] = 1
        self.slots.sweep()

    def bytes_used(self) -> int:
        """This rank's part of the memory: it writes as much of each slot."""
        return -(-(self.slots.top - self.slots.floor) // len(self.channel.memories))

    def gather(self, message: Message, runs: Runs, write: Write) -> list[Tensor]:
        """The leaves, once all ranks have written their blocks."""
        leaves = self._views(message, runs)
        write(leaves)
        message.mark(REDUCED, 1)
        message.meet()
        message.poll(lambda place: message.reads(place, REDUCED))
        fence()
        message.release()
        return leaves

    def _start_of(self, message: Message) -> int:
        """Where the message's slot begins. The leader chooses it."""
        nbytes = header_bytes(self.channel.mesh) + message.nbytes
        if self.channel.here != LEADER:
            message.poll(lambda place: place != LEADER or message.reads(place, KIND))
            if message.reads(LEADER, KIND) != message.kind:
                message.meet()
            message.poll(lambda place: place != LEADER or message.reads(place, OFFSET))
            self.slots.reach(message.reads(LEADER, OFFSET), nbytes)
            return message.reads(LEADER, OFFSET)
        found: list[Slot] = []

        def ready(place: int) -> bool:
            if not found and (slot := self.slots.fit(nbytes)) is not None:
                found.append(slot)
            return bool(found or message.reads(place, KIND))

        message.poll(ready)
        slot = found[0] if found else self.slots.fit(nbytes, grow=True)
        slot.message = Lease(self._signatures(slot.start), self.channel.here)
        for place in range(len(self.channel.memories)):
            slot.message.signed[place] = 0
        message.mark(OFFSET, slot.start)
        return slot.start

    def _views(self, message: Message, runs: Runs) -> list[Tensor]:
        """The leaves in the slot. When the last of their storages dies, this rank signs it."""
        start = self._start_of(message)
        place = start + header_bytes(self.channel.mesh)
        words = self.channel.memories[LEADER].words(place, -(-message.nbytes // 8))
        number, dead = message.number, self.dead
        died = weakref.ref(words, lambda _: dead.append(number))
        self.alive[number] = self._signatures(start), died
        size, dtype = message.dtype.itemsize, message.dtype
        return [
            torch.frombuffer(words, dtype=dtype, count=count, offset=start * size)
            if count
            else torch.empty(0, dtype=dtype)
            for start, count in runs
        ]

    def _signatures(self, start: int) -> Words:
        return self.channel.memories[LEADER].words(start, len(self.channel.memories))


@dataclass(eq=False)
class Endpoint:
    """One rank's side of all messages."""

    mesh: Mesh
    host: Host
    channels: dict[tuple[str, ...], Channel] = field(default_factory=dict)
    units: dict[tuple[str, ...], Units] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rows of which each rank reads its own lie apart from what all read: they come and go in another
        # rhythm, and in one heap would leave gaps in each other's way. Memory is sparse, gaps cost nothing.
        self.gathers, self.reductions = Slots(REGION), Slots(2 * REGION)

    @property
    def own(self) -> Memory:
        """This rank's memory."""
        return self.host.memories[self.host.rank]

    def slots(self, scattered: bool) -> Slots:
        """Those for what is sent. `scattered`: each rank reads its own row of it."""
        return self.reductions if scattered else self.gathers

    def send(
        self, name: str, flat: Tensor, axes: Axes, scattered: bool, run: Callable[[Message], T]
    ) -> Message[T]:
        """Issue a message, from where `flat` lies if that is a slot."""
        nbytes, slot = flat.numel() * flat.dtype.itemsize, self.packed(flat)
        if slot is None:
            slot = self.slots(scattered).take(nbytes)
            self.own.flat(slot.start, nbytes, flat.dtype).copy_(flat.detach())
        return Message(self.channel(axes), name, nbytes, flat.dtype, run, slot)

    def packed(self, flat: Tensor) -> Slot | None:
        """The slot that was handed out as this tensor."""
        start, nbytes = self.own.offset_of(flat), flat.numel() * flat.dtype.itemsize
        return self.gathers.packed_at(start, nbytes) or self.reductions.packed_at(start, nbytes)

    def gather(
        self, name: str, runs: Runs, numel: int, dtype: torch.dtype, write: Write, axes: Axes,
        make: Callable[[list[Tensor]], T],
    ) -> Message[T]:  # fmt: skip
        """Issue a gather in place. `make`: the result, of the leaves that all ranks have written."""
        channel = self.channel(axes)
        if channel.axes not in self.units:
            floor = (3 + group_names(self.mesh).index(channel.axes)) * REGION
            self.units[channel.axes] = Units(channel, Slots(floor))
        units = self.units[channel.axes]
        run = lambda message: make(units.gather(message, runs, write))  # noqa: E731
        # Signed before peers see that this rank has come: else its slots look as if somebody kept a leaf.
        return Message(channel, name, numel * dtype.itemsize, dtype, run, before=units.sweep)

    def channel(self, axes: Axes) -> Channel:
        """That of the ranks along these axes."""
        named = several(self.mesh, axes)
        if named not in self.channels:
            ranks = self.mesh.group_ranks(named)
            memories = [self.host.memories[rank] for rank in ranks]
            start = head_bytes(group_names(self.mesh).index(named))
            words = [m.words(start, GROUP_BYTES // 8) for m in memories]
            here = ranks.index(self.mesh.rank)
            name = f"{self.host.name} {','.join(named)}"
            self.channels[named] = Channel(name, named, self.mesh, self.host, memories, words, here)
        return self.channels[named]

    def bytes_used(self) -> int:
        """What was ever touched of this rank's memory, and its part of leaves gathered in place."""
        own = sum(s.top - s.floor for s in (self.gathers, self.reductions))
        head = head_bytes(len(group_names(self.mesh)))
        return head + own + sum(units.bytes_used() for units in self.units.values())

    def close(self) -> None:
        """Show the peers that this rank leaves, and let go of all memory: it is unmapped when the last view
        of it dies."""
        if self.host.memories:
            self.own.words(8 * CLOSED, 1)[0] = 1
        for kept in (self.channels, self.units, self.host.memories, self.gathers.live, self.reductions.live):
            kept.clear()


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
        """Gather leaves in place, see the module; None where the ranks share no memory.

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
