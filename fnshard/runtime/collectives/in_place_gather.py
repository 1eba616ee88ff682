"""In-place gather: a unit's leaves lie once in memory that all ranks of a group see, whole and contiguous.

Each rank writes its own blocks to their places in the leaves, and every rank's leaves are views of that one
memory: nothing is unpacked, and a host holds a gathered unit once instead of once a rank.

The group's first rank, its leader, chooses the slot in its memory; a follower that comes before the leader
writes when it waits. A slot is used again once no rank holds a view of it: each rank marks a message done
when the storages that it made of the slot have died, and before it issues a gather it marks all that died by
then. So where all ranks have issued a gather, a slot that only peers still hold is held for longer
(somebody kept a leaf), and the leader takes more memory instead of waiting. Hence no rank waits for anything
but its peers' issue of, and wait for, the same gather.

Two ranks that reduce send each other rows the same way (`Pair`): in the backward, a unit's gradients travel
in the slot that its leaves have just left.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fnshard.runtime.collectives.base import waited_twice
from fnshard.runtime.collectives.messages import KIND, OFFSET, REDUCED, Channel, Message, Slots, fence

LEADER = 0  # its place in the group
Runs = Sequence[tuple[int, int]]  # start and length of each leaf, in elements
Write = Callable[[list[Tensor]], None]
Add = Callable[[Tensor, Tensor], None]


class InPlace:
    """A handle: flat leaves, one per run, that are views of memory which the group's ranks share."""

    def __init__(self, units: Units, message: Message, runs: Runs, write: Write):
        self._units, self._message, self._runs, self._write = units, message, runs, write
        self._leaves: list[Tensor] = []
        self._take: Callable[[], list[Tensor]] = self._arrived

    def begin(self) -> bool:
        """Write this rank's blocks, if the slot is known by now."""
        offset = self._units.offset_of(self._message)
        if offset == 0:
            return False
        self._leaves = self._units.views(self._message, offset, self._runs)
        self._write(self._leaves)
        self._write = waited_twice
        self._message.mark(REDUCED, 1)
        return True

    def wait(self) -> list[Tensor]:
        """The leaves, once all ranks have written. Once."""
        take, self._take = self._take, waited_twice
        return take()

    def _arrived(self) -> list[Tensor]:
        units, message = self._units, self._message

        def shown(word: int) -> Callable[[int], bool]:
            return lambda place: (units.advance(), message.reads(place, word) != 0)[1]

        message.poll(shown(KIND))
        message.check_alike()
        message.poll(shown(REDUCED))
        fence()
        leaves, self._leaves = self._leaves, []
        return leaves

    def release(self) -> None:
        """The leaves are not copied out; their death releases the slot."""


class Pair:
    """A handle: the peer's row of a reduction, with this rank's own added to it.

    Args:
        add: the peer's row for this rank, and a flat for the sum, which may be that row.
        in_place: the sum stays in the slot, and takes no memory of its own; it must die soon.
    """

    def __init__(self, rows: InPlace, here: int, add: Add, in_place: bool):
        self._rows, self._here, self._add, self._in_place = rows, here, add, in_place

    def wait(self) -> Tensor:
        got = self._rows.wait()[self._here]
        out = got if self._in_place else torch.empty_like(got)
        self._add(got, out)
        del self._add  # it holds the gradients
        return out

    def release(self) -> None:
        """As with leaves."""


@dataclass(eq=False)
class Units:
    """The units that one group gathers in place, as this rank sees them.

    Args:
        slots: of the leader's memory; what a follower knows of them is how far they reach.
    """

    channel: Channel
    slots: Slots
    pending: deque[InPlace] = field(default_factory=deque)  # this rank has not written to them yet
    dead: deque[int] = field(default_factory=deque)  # numbers of messages whose views have died
    held: dict[int, tuple[Message, weakref.ref]] = field(default_factory=dict)  # those whose views live

    def gather(
        self, runs: Runs, total: int, dtype: torch.dtype, write: Write, name: str = "gather_leaves"
    ) -> InPlace:
        """Issue a gather of leaves that take `total` elements together.

        Args:
            write: copies this rank's blocks into flat leaves; called now, or while this rank waits.
            name: of the collective, in messages.
        """
        self.sweep()
        message = Message(self.channel, self.channel.next(), name, total * dtype.itemsize, dtype, 0)
        message.show_kind()
        handle = InPlace(self, message, runs, write)
        self.pending.append(handle)
        self.advance()
        return handle

    def advance(self) -> None:
        """Do what can be done without waiting for anybody, in the order of issue."""
        self.sweep()
        while self.pending and self.pending[0].begin():
            self.pending.popleft()

    def sweep(self) -> None:
        """Tell the peers whose views have died here."""
        while self.dead:
            message, _ = self.held.pop(self.dead.popleft())
            message.done()
            if self.channel.here != LEADER:
                self.channel.over(message.number)
        self.slots.sweep()

    def bytes_used(self) -> int:
        """This rank's part of the memory: it writes as much of each slot."""
        return -(-(self.slots.top - self.slots.floor) // len(self.channel.memories))

    def offset_of(self, message: Message) -> int:
        """Where the message's slot lies, zero while it is not chosen. The leader chooses it."""
        if self.channel.here == LEADER:
            places = range(len(self.channel.memories))
            slot = self.slots.fit(message.nbytes, grow=all(message.reads(p, KIND) for p in places))
            if slot is None:
                return 0
            slot.message, message.offset = message, slot.start
            message.mark(OFFSET, slot.start)
            return slot.start
        if message.reads(LEADER, KIND) != message.kind:  # not there, or another program's: `wait` tells
            return 0
        offset = message.reads(LEADER, OFFSET)
        fence()
        if offset:
            self.slots.reach(offset, message.nbytes)
        return offset

    def views(self, message: Message, offset: int, runs: Runs) -> list[Tensor]:
        """The leaves in the slot. When the last of their storages dies, this rank is done with it."""
        words = self.channel.memories[LEADER].words(offset, -(-message.nbytes // 8))
        number, dead = message.number, self.dead
        self.held[number] = message, weakref.ref(words, lambda _: dead.append(number))
        size, dtype = message.dtype.itemsize, message.dtype
        return [
            torch.frombuffer(words, dtype=dtype, count=count, offset=start * size)
            if count
            else torch.empty(0, dtype=dtype)
            for start, count in runs
        ]
