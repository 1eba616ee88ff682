"""Endpoint: collectives made of messages, for groups whose ranks see each other's memory.

One code for processes that share memory and for simulated ranks: order, limits and errors are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Axes, Handle, sum_rows, waited_twice
from fnshard.runtime.collectives.in_place_gather import Add, Pair, Runs, Units, Write
from fnshard.runtime.collectives.messages import PAGE, REGION, Channel, Meeting, Memory, Message, Slots

T = TypeVar("T")

OWN = 8  # words at the head of a memory that are its own; two of each group are behind them
SMALL_BYTES = 64 << 10  # an all-reduce below this is summed whole by every rank: one meeting, not two
SCATTERED = ("reduce_scatter", "all_to_all")  # of what is sent each rank reads its own row


def group_names(mesh: Mesh) -> list[tuple[str, ...]]:
    """All ordered groups of the mesh's axes: a group's words have its place here, on every rank."""
    axes = mesh.ordered(mesh.names)
    return [names for count in range(1, len(axes) + 1) for names in permutations(axes, count)]


def address_space(mesh: Mesh) -> int:
    """Bytes of a memory's address space: control words, what is packed to be gathered and to be reduced, and
    the leaves that each group gathers in place."""
    return (3 + len(group_names(mesh))) * REGION


def head_bytes(groups: int) -> int:
    """Bytes at the start of a memory that hold the words of so many groups, in whole pages."""
    return -(-8 * (OWN + 2 * groups) // PAGE) * PAGE


class InFlight(Generic[T]):
    """A handle: `take` makes the result of a message."""

    def __init__(self, message: Message, take: Callable[[Message], T]):
        self._message, self._take = message, take

    @property
    def sent(self) -> Tensor | None:
        """What was handed over and is still to be read."""
        return self._message.unsent

    def wait(self) -> T:
        take, self._take = self._take, waited_twice
        if take is not waited_twice:
            self._message.publish()
        return take(self._message)

    def release(self) -> None:
        self._message.done()


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
        self.head = head_bytes(len(group_names(self.mesh)))
        self.pages, self.gathers, self.reductions = Slots(self.head), Slots(REGION), Slots(2 * REGION)
        self.own = self.memories[self.mesh.rank]

    def send_buffer(self, nbytes: int, dtype: torch.dtype, rows: int) -> Tensor:
        """A slot to pack."""
        slots = self.reductions if rows > 1 else self.gathers
        return self.own.get(slots.take(nbytes).start, nbytes, dtype)

    def all_gather(self, flat: Tensor, axes: Axes, name: str = "all_gather") -> Handle[list[Tensor]]:
        """See `Collectives`."""
        return InFlight(self._send(name, flat, axes)[0], Message.parts)

    def gather_leaves(
        self, runs: Runs, total: int, dtype: torch.dtype, write: Write, axes: Axes
    ) -> Handle[list[Tensor]]:
        """See `in_place_gather`; only of memories of processes, whose words die one by one."""
        return self._units(axes).gather(runs, total, dtype, write)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        """See `Collectives`."""
        return self._scatter("reduce_scatter", rows, axes, _sum)

    def all_to_all(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        """See `Collectives`."""
        return self._scatter("all_to_all", rows, axes, torch.cat)

    def permute(self, flat: Tensor, axes: Axes, distance: int) -> Handle[Tensor]:
        """See `Collectives`."""
        message, _ = self._send("permute", flat, axes)
        source = (message.channel.here - distance) % len(message.channel.memories)

        def take(message: Message) -> Tensor:
            result = message.parts()[source].clone()
            message.done()
            return result

        return InFlight(message, take)

    def _scatter(
        self, name: str, rows: Tensor, axes: Axes, make: Callable[[list[Tensor]], Tensor]
    ) -> Handle[Tensor]:
        """Give what `make` makes of this rank's row of each rank."""
        message, _ = self._send(name, rows, axes)
        count = rows.numel() // len(message.channel.memories)
        first = message.channel.here * count

        def take(message: Message) -> Tensor:
            result = make([part[first : first + count] for part in message.parts()])
            message.done()
            return result

        return InFlight(message, take)

    def reduce_pair(
        self,
        numel: int,
        dtype: torch.dtype,
        pack: Callable[[Tensor], None],
        add: Add,
        axes: Axes,
        in_place: bool,
    ) -> Handle[Tensor]:
        """See `Shared`."""
        units = self._units(axes)
        here = units.channel.here
        runs = [(0, numel), (numel, numel)]  # what the first rank is to read, and the second
        rows = units.gather(runs, 2 * numel, dtype, lambda rows: pack(rows[1 - here]), "reduce_scatter")
        return Pair(rows, here, add, in_place)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        """See `Collectives`."""
        message, copied = self._send("all_reduce", flat, axes)
        into = flat if copied else None  # a slot is no place for a result

        def take(message: Message) -> Tensor:
            parts = message.parts()
            result = torch.empty_like(parts[0]) if into is None else into
            if message.nbytes <= SMALL_BYTES:
                sum_rows(parts, result)
            else:
                _sum_by_pieces(message, parts, result)
            message.done()
            return result

        return InFlight(message, take)

    def sweep(self) -> None:
        """Let go of all that nobody will read any more."""
        self.gathers.sweep()
        self.reductions.sweep()
        for units in self.units.values():
            units.sweep()

    def close(self) -> None:
        """Let go of all memory."""
        self.channels.clear()
        self.units.clear()
        self.memories.clear()

    def bytes_used(self) -> int:
        """What was ever touched of this rank's memory, and its part of leaves gathered in place."""
        own = sum(s.top - s.floor for s in (self.pages, self.gathers, self.reductions))
        return self.head + own + sum(units.bytes_used() for units in self.units.values())

    def _send(self, name: str, flat: Tensor, axes: Axes) -> tuple[Message, bool]:
        """Issue a message, from where `flat` lies if that is a slot; and whether it is copied."""
        channel, nbytes = self._channel(axes), flat.numel() * flat.dtype.itemsize
        offset = self.own.offset_of(flat)
        slot = self.gathers.packed_at(offset, nbytes) or self.reductions.packed_at(offset, nbytes)
        copied = slot is None
        if slot is None:
            slot = (self.reductions if name in SCATTERED else self.gathers).take(nbytes)
        unsent = flat.detach() if copied else None
        slot.message = Message(channel, channel.next(), name, nbytes, flat.dtype, slot.start, unsent)
        if not self.late:
            slot.message.publish()
        return slot.message, copied

    def _units(self, axes: Axes) -> Units:
        channel = self._channel(axes)
        if channel.axes not in self.units:
            floor = (3 + group_names(self.mesh).index(channel.axes)) * REGION
            self.units[channel.axes] = Units(channel, Slots(floor))
        return self.units[channel.axes]

    def _channel(self, axes: Axes) -> Channel:
        named = tuple(a for a in axes if self.mesh.axis_size(a) > 1)
        if named not in self.channels:
            ranks = self.mesh.group_ranks(named)
            memories = [self.memories[rank] for rank in ranks]
            start = 8 * (OWN + 2 * group_names(self.mesh).index(named))
            heads = [memory.words(start, 2) for memory in memories]
            self.channels[named] = Channel(
                named, self.mesh, memories, heads, ranks.index(self.mesh.rank), self.meeting, self.pages,
                self.sweep,
            )  # fmt: skip
        return self.channels[named]


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
    message.show_reduced()
    for place, piece in enumerate(pieces):
        if place != here:
            message.reduced(place)
            result[piece] = parts[place][piece]
