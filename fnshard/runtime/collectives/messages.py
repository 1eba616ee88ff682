"""Messages between ranks that see each other's memory: processes of one host, or threads of one process.

A rank's memory holds *slots* (what it sends) and *pages* of control words. A *message* is a slot and a row
of control words in every rank of a group: a sender names the slot in its row, receivers look until it does,
read the slot in place, and mark the message done in rows of their own; the slot is free once all have.

Any number of messages may be in flight and they may be waited for in any order: the pages of one group form
a chain that grows when its last page is full. A page is used again when every rank is past it, and nobody
waits for that. So the one bound is memory, and a rank waits only for what its peers come to without it.

Every control word has one writer. `Memory` says where words and slots lie and `Meeting` how a rank waits.
Shared memory (`runtime.collectives.shared_memory`) and simulated ranks (`runtime.collectives.simulated`)
differ in these two alone; the collectives made of messages are in `runtime.collectives.endpoint`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import describe, lost

PAGE = 4096
REGION = 1 << 35  # bytes of address space for pages, for what is gathered, and for what is reduced
OFFSET, KIND, REDUCED, DONE = range(4)  # words of a row
ROWS = PAGE // 8 // 4 - 1  # messages of a page; its first row links the next page
FIRST, PAST = 0, 1  # the two words of a group at the head of a memory

OPERATIONS = (
    "all_gather", "reduce_scatter", "all_reduce", "gather_object", "gather_leaves", "all_to_all", "permute",
)  # fmt: skip
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)

_one, _two = threading.Lock(), threading.Lock()


def fence() -> None:
    """A full memory barrier: one lock is released before another is acquired.

    That data come before the word that announces them is the processor's promise on x86 (TSO), and this
    one's elsewhere.
    """
    with _one:
        pass
    with _two:
        pass


# ------------------------------------------------------------------ what the two kinds of ranks differ in


class Memory(Protocol):
    """One rank's memory, as another rank sees it."""

    rank: int

    def words(self, offset: int, count: int) -> np.ndarray:
        """Control words [count], int64; zero at first."""

    def put(self, offset: int, flat: Tensor) -> None:
        """Copy `flat` to a slot."""

    def get(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """What was packed or put there, flat, in place."""

    def drop(self, offset: int) -> None:
        """Nobody reads the slot any more."""

    def offset_of(self, flat: Tensor) -> int | None:
        """Where in this memory a tensor lies."""


class Meeting(Protocol):
    """How a rank waits for its peers; `timeout` in seconds."""

    timeout: float

    def announce(self) -> None:
        """A word has changed."""

    def wait(self, ready: Callable[[], bool], peer: Memory, deadline: float) -> str:
        """Until `ready()`, by `time.monotonic`; else why the peer will not come."""


# ------------------------------------------------------------------ slots


def whole_pages(nbytes: int) -> int:
    """Bytes of a slot for so many."""
    return max(-(-nbytes // PAGE), 1) * PAGE


@dataclass(eq=False)
class Slot:
    """A part of this rank's memory: being packed while `message` is None, else in flight."""

    start: int
    end: int
    message: Message | None = None


class Slots:
    """Slots of one region, by start. The lowest that fits is taken, so that memory is used again."""

    def __init__(self, start: int):
        self.floor = self.top = start  # memory beyond `top` was never used
        self.live: list[Slot] = []

    def take(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes`. Rather than use more memory, waits for slots that only peers hold.

        What this rank is done with, its peers come to without it (all ranks run one program), so that
        waiting for them cannot block anybody for good.
        """
        while (slot := self.fit(nbytes, grow=False)) is None:
            self._owed()[0].settle()
        return slot

    def fit(self, nbytes: int, grow: bool) -> Slot | None:
        """A slot of at least `nbytes`; None where it takes more memory, unless `grow`, and only peers hold
        some of what was used."""
        self.sweep()
        size = whole_pages(nbytes)
        place, start = self._fit(size)
        if start + size > self.top and not grow and self._owed():
            return None
        self.reach(start, nbytes)
        slot = Slot(start, start + size)
        self.live.insert(place, slot)
        return slot

    def reach(self, start: int, nbytes: int) -> None:
        """A slot that begins there is used."""
        end = start + whole_pages(nbytes)
        if end > self.floor // REGION * REGION + REGION:
            raise CollectiveError(f"more than {REGION >> 30} GiB are in flight between ranks of one host.")
        self.top = max(self.top, end)

    def _owed(self) -> list[Message]:
        """Messages that only peers are not done with."""
        return [s.message for s in self.live if s.message is not None and s.message.finished]

    def sweep(self) -> None:
        """Let go of slots that nobody will read any more."""
        self.live = [s for s in self.live if s.message is None or not s.message.free()]

    def packed_at(self, offset: int | None, nbytes: int) -> Slot | None:
        """The slot handed out at `offset` and not sent yet."""
        for slot in self.live:
            if slot.start == offset and slot.message is None and nbytes <= slot.end - slot.start:
                return slot
        return None

    def _fit(self, size: int) -> tuple[int, int]:
        start = self.floor
        for place, slot in enumerate(self.live):
            if slot.start - start >= size:
                return place, start
            start = slot.end
        return len(self.live), start


# ------------------------------------------------------------------ channels and messages


@dataclass(eq=False)
class Channel:
    """The messages between the ranks of one group, as this rank sees them; the k-th is each rank's k-th."""

    axes: tuple[str, ...]
    mesh: Mesh
    memories: list[Memory]  # in group order
    heads: list[np.ndarray]  # [2] of each: FIRST is where its first page lies, messages before PAST are over
    here: int  # this rank's place in the group
    meeting: Meeting
    own_pages: Slots
    sweep: Callable[[], None]  # lets go of messages that are over, in all groups
    sent: int = 0
    open: dict[int, None] = field(default_factory=dict)  # numbers of messages that are not over
    slots: dict[int, Slot] = field(default_factory=dict)  # of this rank's own pages, by the page's number

    def __post_init__(self) -> None:
        self.pages: list[dict[int, np.ndarray]] = [{} for _ in self.memories]  # [1 + ROWS, 4], by number

    def next(self) -> int:
        """The number of this rank's next message, with a row for it."""
        if self.sent % ROWS == 0:
            self._add_page(self.sent // ROWS)
        self.open[self.sent] = None
        self.sent += 1
        return self.sent - 1

    def row(self, place: int, number: int) -> np.ndarray | None:
        """The words of a message at a place of the group; None where it has no page for it yet."""
        index, pages = number // ROWS, self.pages[place]
        while index not in pages:
            last = max(pages, default=-1)
            start = pages[last][0, 0] if pages else self.heads[place][FIRST]
            if start == 0:
                return None
            fence()
            pages[last + 1] = self._page(place, int(start))
        return pages[index][1 + number % ROWS]

    def over(self, number: int) -> None:
        """This rank will look at no rank's row of the message any more."""
        del self.open[number]
        self.heads[self.here][PAST] = next(iter(self.open), self.sent)

    def _add_page(self, index: int) -> None:
        """Where all ranks have read a message of the page behind, they have followed the link to it."""
        self.sweep()
        past = min(int(head[PAST]) for head in self.heads)
        for old in [i for i in self.slots if (i + 1) * ROWS < past]:
            self.own_pages.live.remove(self.slots.pop(old))
            for pages in self.pages:
                pages.pop(old, None)
        slot = self.slots[index] = self.own_pages.take(PAGE)
        page = self._page(self.here, slot.start)
        page[:] = 0
        fence()
        if index == 0:
            self.heads[self.here][FIRST] = slot.start
        else:
            self.pages[self.here][index - 1][0, 0] = slot.start
        self.pages[self.here][index] = page

    def _page(self, place: int, start: int) -> np.ndarray:
        return self.memories[place].words(start, PAGE // 8).reshape(1 + ROWS, 4)


@dataclass(eq=False)
class Message:
    """One collective of one group, from this rank's side; `unsent` is copied to the slot at `publish`."""

    channel: Channel
    number: int
    name: str
    nbytes: int
    dtype: torch.dtype
    offset: int
    unsent: Tensor | None = None
    published: bool = False
    finished: bool = False  # this rank is done with it

    def __post_init__(self) -> None:
        self.rows: list[np.ndarray | None] = [None] * len(self.channel.memories)  # in group order

    def publish(self) -> None:
        """Show the slot to the peers. Once; again is nothing."""
        if self.published:
            return
        self.published = True
        if self.unsent is not None:
            self.channel.memories[self.channel.here].put(self.offset, self.unsent)
            self.unsent = None
        self.show_kind()
        self.mark(OFFSET, self.offset)

    @property
    def kind(self) -> int:
        """What all ranks must agree on: the operation, the dtype, the number of elements."""
        count = self.nbytes // self.dtype.itemsize
        return OPERATIONS.index(self.name) << 56 | DTYPES.index(self.dtype) << 48 | count

    def show_kind(self) -> None:
        """This rank has issued the message."""
        self.mark(KIND, self.kind)

    def parts(self) -> list[Tensor]:
        """What each rank sent, in place, in group order, once all have published."""
        self.poll(lambda place: self.reads(place, KIND) != 0)
        self.check_alike()
        self.poll(lambda place: self.reads(place, OFFSET) != 0)
        fence()
        memories = self.channel.memories
        return [m.get(self.reads(p, OFFSET), self.nbytes, self.dtype) for p, m in enumerate(memories)]

    def check_alike(self) -> None:
        """Refuse what is not the same collective on all ranks, once all of them have issued it."""
        memories, places = self.channel.memories, range(len(self.channel.memories))
        kinds = [self.reads(place, KIND) for place in places]
        if len(set(kinds)) > 1:
            ranks = {k: [str(memories[p].rank) for p in places if kinds[p] == k] for k in kinds}
            raise CollectiveError(
                f"{self.what()}: ranks issued different collectives or sizes.",
                [f"rank {', '.join(those)}: {_kind_text(kind)}" for kind, those in ranks.items()],
                "all ranks must run the same program on the same specs.",
            )

    def reduced(self, place: int) -> None:
        """Wait until the rank there has summed its piece."""
        self.poll(lambda at: at != place or self.reads(at, REDUCED) != 0)
        fence()

    def show_reduced(self) -> None:
        """This rank has summed its piece, and it lies in the slot."""
        self.mark(REDUCED, 1)

    def done(self) -> None:
        """This rank will read no slot of the message any more. Again is nothing."""
        if not self.finished:
            self.mark(DONE, 1)
            self.finished = True

    def free(self) -> bool:
        """Whether no rank will read this one's slot any more; if so, it is over for the channel."""
        if not self.finished or not all(self.reads(p, DONE) for p in range(len(self.channel.memories))):
            return False
        self.channel.memories[self.channel.here].drop(self.offset)
        self.channel.over(self.number)
        return True

    def settle(self) -> None:
        """Wait until nobody will read the slot any more."""
        self.poll(lambda place: self.reads(place, DONE) != 0)

    def poll(self, ready: Callable[[int], bool]) -> None:
        """Wait until `ready(place)` for every place of the group."""
        meeting, deadline = self.channel.meeting, None
        for place, memory in enumerate(self.channel.memories):
            if not ready(place):
                deadline = deadline or time.monotonic() + meeting.timeout
                cause = meeting.wait(lambda at=place: ready(at), memory, deadline)
                if cause:
                    raise CollectiveError(lost(self.what(), cause))

    def what(self) -> str:
        """The collective, for a message."""
        return describe(self.name, self.channel.mesh, self.channel.axes)

    def reads(self, place: int, word: int) -> int:
        """A word of the message at a place of the group; zero while it was not written."""
        if self.rows[place] is None:
            self.rows[place] = self.channel.row(place, self.number)
        row = self.rows[place]
        return 0 if row is None else int(row[word])

    def mark(self, word: int, value: int) -> None:
        """Tell the peers; whatever was written before is there for them."""
        fence()
        self.channel.row(self.channel.here, self.number)[word] = value
        self.channel.meeting.announce()


def _kind_text(kind: int) -> str:
    count, dtype = kind & ((1 << 48) - 1), DTYPES[kind >> 48 & 255]
    return f"{OPERATIONS[kind >> 56]} of [{count}] {dtype}"
