"""Endpoint: collectives made of messages, for groups whose ranks see each other's memory.

One code for processes that share memory and for simulated ranks: order, limits and errors are the same.

Leaves that are *gathered in place* lie once in memory that all ranks of a group see, whole and contiguous.
Each rank writes its own blocks to their places, and every rank's leaves are views of that one memory:
nothing is unpacked, and a host holds a gathered unit once instead of once a rank. The group's first rank,
its leader, chooses the slot in its memory; a follower waits for that at the issue. A slot is used again once
no rank holds a view of it: each rank signs it when the storages that it made of it have died, and before it
issues a gather it signs all that died by then. So where all ranks have issued a gather, a slot that only
peers still hold is kept for longer (somebody kept a leaf), and the leader takes more memory instead of
waiting. Hence no rank waits for anything but its peers' issue of, and wait for, the same gather.

Two ranks that reduce send each other rows the same way: in the backward, a unit's gradients travel in the
slot that its leaves have just left.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TypeVar

import torch
from torch import Tensor

from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Axes, Handle, sum_rows
from fnshard.runtime.collectives.messages import (
    KIND,
    OFFSET,
    PAGE,
    REDUCED,
    REGION,
    RING_BYTES,
    Channel,
    Meeting,
    Memory,
    Message,
    Slot,
    Slots,
    fence,
    header_bytes,
)

T = TypeVar("T")
Runs = Sequence[tuple[int, int]]  # start and length of each leaf, in elements
Write = Callable[[list[Tensor]], None]
Add = Callable[[Tensor, Tensor], None]

SMALL_BYTES = 64 << 10  # an all-reduce below this is summed whole by every rank: one meeting, not two
SCATTERED = ("reduce_scatter", "all_to_all")  # of what is sent each rank reads its own row
LEADER = 0  # its place in the group


def group_names(mesh: Mesh) -> list[tuple[str, ...]]:
    """All ordered groups of the mesh's axes: a group's ring has its place here, on every rank."""
    axes = mesh.ordered(mesh.names)
    return [names for count in range(1, len(axes) + 1) for names in permutations(axes, count)]


def address_space(mesh: Mesh) -> int:
    """Bytes of a memory's address space: control words, what is packed to be gathered and to be reduced, and
    the leaves that each group gathers in place."""
    return (3 + len(group_names(mesh))) * REGION


def head_bytes(groups: int) -> int:
    """Bytes at the start of a memory for the memory's own words and the rings of so many groups."""
    return PAGE + groups * RING_BYTES


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
    alive: dict[int, tuple[Message, weakref.ref]] = field(default_factory=dict)

    def sweep(self) -> None:
        """Show the peers whose views have died here."""
        while self.dead:
            self.alive.pop(self.dead.popleft())[0].done()
        self.slots.sweep()

    def bytes_used(self) -> int:
        """This rank's part of the memory: it writes as much of each slot."""
        return -(-(self.slots.top - self.slots.floor) // len(self.channel.memories))

    def start_of(self, message: Message) -> int:
        """Where the message's slot begins. The leader chooses it."""
        nbytes = self.channel.header + message.nbytes
        if self.channel.here != LEADER:
            message.poll(lambda place: place != LEADER or message.reads(place, KIND))
            if message.reads(LEADER, KIND) != message.kind:
                message.check_alike()
            message.poll(lambda place: place != LEADER or message.reads(place, OFFSET))
            start = message.reads(LEADER, OFFSET)
            fence()
            self.slots.reach(start, nbytes)
            return start
        found: list[Slot] = []

        def ready(place: int) -> bool:
            if not found and (slot := self.slots.fit(nbytes)) is not None:
                found.append(slot)
            return bool(found or message.reads(place, KIND))

        message.poll(ready)
        slot = found[0] if found else self.slots.fit(nbytes, grow=True)
        slot.message = message
        message.show(slot.start)
        return slot.start

    def views(self, message: Message, runs: Runs) -> list[Tensor]:
        """The leaves in the slot. When the last of their storages dies, this rank signs it."""
        start, memory = self.start_of(message), self.channel.memories[LEADER]
        message.signatures = [message.signatures_in(LEADER, start)]
        words = memory.words(start + self.channel.header, -(-message.nbytes // 8))
        number, dead = message.number, self.dead
        self.alive[number] = message, weakref.ref(words, lambda _: dead.append(number))
        size, dtype = message.dtype.itemsize, message.dtype
        return [
            torch.frombuffer(words, dtype=dtype, count=count, offset=start * size)
            if count
            else torch.empty(0, dtype=dtype)
            for start, count in runs
        ]


@dataclass(eq=False)
class Endpoint:
    """One rank's side of all messages, and the collectives made of them, for groups of several ranks.

    Args:
        memories: by rank, of those whose memory this rank sees.
        late: what is sent is read at this rank's Wait, not at the issue.
    """

    mesh: Mesh
    memories: dict[int, Memory]
    meeting: Meeting
    late: bool = False
    channels: dict[tuple[str, ...], Channel] = field(default_factory=dict)
    units: dict[tuple[str, ...], Units] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rows of which each rank reads its own lie apart from what all read: they come and go in another
        # rhythm, and in one heap would leave gaps in each other's way. Memory is sparse, gaps cost nothing.
        self.gathers, self.reductions = Slots(REGION), Slots(2 * REGION)
        self.own, self.header = self.memories[self.mesh.rank], header_bytes(self.mesh)

    def send_buffer(self, nbytes: int, dtype: torch.dtype, rows: int) -> Tensor:
        """A slot to pack."""
        slots = self.reductions if rows > 1 else self.gathers
        return self.own.get(slots.take(self.header + nbytes).start + self.header, nbytes, dtype)

    def all_gather(self, flat: Tensor, axes: Axes, name: str = "all_gather") -> Handle[list[Tensor]]:
        """See `Collectives`."""
        return self._send(name, flat, self._channel(axes), Message.parts)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        """See `Collectives`."""
        return self._scatter("reduce_scatter", rows, axes, _sum)

    def all_to_all(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        """See `Collectives`."""
        return self._scatter("all_to_all", rows, axes, torch.cat)

    def permute(self, flat: Tensor, axes: Axes, distance: int) -> Handle[Tensor]:
        """See `Collectives`."""
        channel = self._channel(axes)
        source = (channel.here - distance) % len(channel.memories)
        return self._send("permute", flat, channel, _finishing(lambda parts: parts[source].clone()))

    def _scatter(
        self, name: str, rows: Tensor, axes: Axes, make: Callable[[list[Tensor]], Tensor]
    ) -> Handle[Tensor]:
        """Give what `make` makes of this rank's row of each rank."""
        channel = self._channel(axes)
        count = rows.numel() // len(channel.memories)
        mine = slice(channel.here * count, (channel.here + 1) * count)
        return self._send(name, rows, channel, _finishing(lambda parts: make([part[mine] for part in parts])))

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        """See `Collectives`."""
        into = flat if self._packed(flat) is None else None  # a slot is no place for a result

        def take(message: Message) -> Tensor:
            parts = message.parts()
            result = torch.empty_like(parts[0]) if into is None else into
            if message.nbytes <= SMALL_BYTES:
                sum_rows(parts, result)
            else:
                _sum_by_pieces(message, parts, result)
            message.done()
            return result

        return self._send("all_reduce", flat, self._channel(axes), take)

    def gather_leaves(
        self, runs: Runs, total: int, dtype: torch.dtype, write: Write, axes: Axes,
        name: str = "gather_leaves", make: Callable[[list[Tensor]], T] = lambda leaves: leaves,
    ) -> Handle[T]:  # fmt: skip
        """Gather leaves in place; only of memories of processes, whose words die one by one.

        Args:
            total: elements of all leaves together.
            write: copies this rank's blocks into flat leaves, one a run.
            make: the result, of the leaves that all ranks have written.
        """
        channel = self._channel(axes)
        if channel.axes not in self.units:
            floor = (3 + group_names(self.mesh).index(channel.axes)) * REGION
            self.units[channel.axes] = Units(channel, Slots(floor))
        units = self.units[channel.axes]
        units.sweep()
        message: Message = Message(channel, name, total * dtype.itemsize, dtype)
        leaves = units.views(message, runs)
        write(leaves)
        message.mark(REDUCED, 1)

        def take(message: Message) -> T:
            message.check_alike()
            message.poll(lambda place: message.reads(place, REDUCED))
            fence()
            return make(leaves)

        message.take = take
        return message

    def reduce_pair(
        self, numel: int, dtype: torch.dtype, pack: Callable[[Tensor], None], add: Add, axes: Axes,
        in_place: bool,
    ) -> Handle[Tensor]:  # fmt: skip
        """See `Shared`."""
        here = self._channel(axes).here
        runs = [(0, numel), (numel, numel)]  # what the first rank is to read, and the second

        def added(rows: list[Tensor]) -> Tensor:
            out = rows[here] if in_place else torch.empty_like(rows[here])
            add(rows[here], out)
            return out

        def write(rows: list[Tensor]) -> None:
            pack(rows[1 - here])

        return self.gather_leaves(runs, 2 * numel, dtype, write, axes, "reduce_scatter", added)

    def close(self) -> None:
        """Let go of all memory."""
        self.channels.clear()
        self.units.clear()
        self.memories.clear()

    def bytes_used(self) -> int:
        """What was ever touched of this rank's memory, and its part of leaves gathered in place."""
        own = sum(s.top - s.floor for s in (self.gathers, self.reductions))
        head = head_bytes(len(group_names(self.mesh)))
        return head + own + sum(units.bytes_used() for units in self.units.values())

    def _send(self, name: str, flat: Tensor, channel: Channel, take: Callable[[Message], T]) -> Message[T]:
        """Issue a message, from where `flat` lies if that is a slot."""
        nbytes, slot = flat.numel() * flat.dtype.itemsize, self._packed(flat)
        sent = flat.detach() if slot is None else None
        if slot is None:
            slot = (self.reductions if name in SCATTERED else self.gathers).take(self.header + nbytes)
        message = Message(channel, name, nbytes, flat.dtype, take, slot, sent)
        slot.message = message
        if not self.late:
            message.publish()
        return message

    def _packed(self, flat: Tensor) -> Slot | None:
        """The slot that was handed out as this tensor."""
        offset = self.own.offset_of(flat)
        if offset is None:
            return None
        start, nbytes = offset - self.header, self.header + flat.numel() * flat.dtype.itemsize
        return self.gathers.packed_at(start, nbytes) or self.reductions.packed_at(start, nbytes)

    def _channel(self, axes: Axes) -> Channel:
        named = tuple(a for a in axes if self.mesh.axis_size(a) > 1)
        if named not in self.channels:
            ranks = self.mesh.group_ranks(named)
            memories = [self.memories[rank] for rank in ranks]
            start = head_bytes(group_names(self.mesh).index(named))
            rings = [m.words(start, RING_BYTES // 8) for m in memories]
            here = ranks.index(self.mesh.rank)
            self.channels[named] = Channel(named, self.mesh, memories, rings, here, self.meeting)
        return self.channels[named]


def _finishing(make: Callable[[list[Tensor]], Tensor]) -> Callable[[Message], Tensor]:
    """What `make` makes of the parts, which are not read afterwards."""

    def take(message: Message) -> Tensor:
        result = make(message.parts())
        message.done()
        return result

    return take


def _sum(parts: list[Tensor]) -> Tensor:
    return sum_rows(parts, torch.empty_like(parts[0]))


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
