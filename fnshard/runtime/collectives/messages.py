"""Messages between ranks that see each other's memory: processes of one host, or threads of one process.

A rank's memory holds *slots* (what it sends) and, for each group, a ring of *rows* of control words (what it
says of its last messages). A sender names a slot in its row; receivers look until it does, read the slot in
place, and sign the slot; it is used again once all have signed.

Any number of messages may be in flight and they may be waited for in any order: a rank that comes round the
ring to a message of its own which it has not waited for takes its result then. All ranks run one program, so
that whatever a rank waits for comes without it. Memory is the one bound.

Every control word has one writer. `Memory` says where words and slots lie and `Meeting` how a rank waits.
Shared memory (`runtime.collectives.shared_memory`) and simulated ranks (`runtime.collectives.simulated`)
differ in these two alone; the collectives made of messages are in `runtime.collectives.endpoint`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import describe, lost, waited_twice

T = TypeVar("T")
Words = MutableSequence[int]  # 64 bits each

PAGE = 4096
REGION = 1 << 35  # bytes of address space for what is gathered, and for what is reduced
NUMBER, KIND, OFFSET, REDUCED = range(4)  # words of a row; all but the first are valid where that one is
ROWS, WIDTH = 255, 4  # of a ring; a row before them has the one word PAST
PAST = 0  # messages before this number are over for the rank
RING_BYTES = 8 * WIDTH * (1 + ROWS)

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

    def words(self, offset: int, count: int) -> Words:
        """Control words [count], zero at first."""

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


def header_bytes(mesh: Mesh) -> int:
    """Bytes at the start of a slot, for the signature of each rank that reads it; a multiple of 64."""
    return -(-mesh.size // 8) * 64


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

        Peers come to the end of what this rank has finished without it (all ranks run one program), so that
        waiting for them cannot block anybody for good.
        """
        while (slot := self.fit(nbytes)) is None:
            self._owed()[0].wait_until_free()
        return slot

    def fit(self, nbytes: int, grow: bool = False) -> Slot | None:
        """A slot of at least `nbytes`; None where it takes more memory, unless `grow`, and only peers hold
        some of what was used."""
        self.sweep()
        size = whole_pages(nbytes)
        place, start = self._gap(size)
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

    def sweep(self) -> None:
        """Let go of slots that nobody will read any more."""
        self.live = [s for s in self.live if s.message is None or not s.message.free()]

    def packed_at(self, offset: int | None, nbytes: int) -> Slot | None:
        """The slot handed out at `offset` and not sent yet."""
        for slot in self.live:
            if slot.start == offset and slot.message is None and nbytes <= slot.end - slot.start:
                return slot
        return None

    def _owed(self) -> list[Message]:
        """Messages that this rank has finished and a peer has not."""
        return [s.message for s in self.live if s.message is not None and s.message.finished]

    def _gap(self, size: int) -> tuple[int, int]:
        """Place among the live slots and start of the lowest gap that fits."""
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
    memories: Sequence[Memory]  # in group order
    rings: Sequence[Words]  # of each [(1 + ROWS) * WIDTH]
    here: int  # this rank's place in the group
    meeting: Meeting
    sent: int = 0
    open: dict[int, Message] = field(default_factory=dict)  # by number, those that are not over

    def __post_init__(self) -> None:
        self.ranks, self.header = self.mesh.size, header_bytes(self.mesh)

    def enter(self, message: Message) -> None:
        """Give this rank's next message its number. Its row says from now on that the rank has issued it."""
        number = message.number = self.sent
        old = number - ROWS  # had the row before
        if old in self.open:
            self.open[old].arrive()
        if old >= 0:
            message.poll(lambda place: self.rings[place][PAST] > old)
        self.sent += 1  # not before: PAST of a rank with nothing open is what it has sent
        self.open[number] = message
        ring, message.row = self.rings[self.here], WIDTH * (1 + number % ROWS)
        for word, value in ((KIND, message.kind), (OFFSET, 0), (REDUCED, 0)):
            ring[message.row + word] = value
        fence()
        ring[message.row + NUMBER] = number + 1
        self.meeting.announce()

    def over(self, number: int) -> None:
        """This rank will look at no rank's row of the message any more."""
        del self.open[number]
        self.rings[self.here][PAST] = next(iter(self.open), self.sent)
        self.meeting.announce()


@dataclass(eq=False)
class Message(Generic[T]):
    """One collective of one group, from this rank's side; the handle of what `take` makes of it.

    Args:
        slot: of this rank's memory, that is sent; None for leaves that are gathered in place.
        sent: what was handed over and is still to be read: it is copied to the slot at `publish`.
    """

    channel: Channel
    name: str
    nbytes: int
    dtype: torch.dtype
    take: Callable[[Message], T] | None = None
    slot: Slot | None = None
    sent: Tensor | None = None
    published: bool = False
    finished: bool = False  # this rank will read no slot of it any more
    number: int = 0
    row: int = 0  # where its words begin in each ring
    signatures: list[Words] = field(default_factory=list)  # of the slots that this rank reads
    _result: Any = None
    _given: bool = False

    def __post_init__(self) -> None:
        self.channel.enter(self)

    # -------------------------------------------------------------- the handle

    def wait(self) -> T:
        """The result. Once."""
        if self._given:
            waited_twice()
        self._given = True
        self.arrive()
        result, self._result = self._result, None
        return result

    def release(self) -> None:
        """The result was copied out."""
        if self.slot is not None:
            self.done()

    def arrive(self) -> None:
        """Make the result, if it is not there."""
        if self.take is None:
            return
        self.publish()
        self._result = self.take(self)
        self.take = None  # it may hold what was sent
        self.channel.over(self.number)

    # -------------------------------------------------------------- what is sent and what is read

    def publish(self) -> None:
        """Show the slot to the peers. Once; again is nothing."""
        if self.slot is None or self.published:
            return
        self.published = True
        own = self.channel.memories[self.channel.here]
        if self.sent is not None:
            own.put(self.payload, self.sent)
            self.sent = None
        self.show(self.slot.start)

    @property
    def payload(self) -> int:
        """Where in this rank's memory lies what it sends."""
        return self.slot.start + self.channel.header

    def show(self, start: int) -> None:
        """A slot of this rank's memory, with no signature on it, is what the message is about."""
        words = self.signatures_in(self.channel.here, start)
        for place in range(self.channel.ranks):
            words[place] = 0
        self.mark(OFFSET, start)

    def signatures_in(self, place: int, start: int) -> Words:
        """Of a slot in the memory of the rank at a place of the group."""
        return self.channel.memories[place].words(start, self.channel.ranks)

    def parts(self) -> list[Tensor]:
        """What each rank sent, in place, in group order, once all have published."""
        self.check_alike()
        self.poll(lambda place: self.reads(place, OFFSET) != 0)
        fence()
        starts = [self.reads(place, OFFSET) for place in range(len(self.channel.memories))]
        self.signatures = [self.signatures_in(place, start) for place, start in enumerate(starts)]
        return [
            memory.get(start + self.channel.header, self.nbytes, self.dtype)
            for memory, start in zip(self.channel.memories, starts, strict=True)
        ]

    @property
    def kind(self) -> int:
        """What all ranks must agree on, never zero: the operation, the dtype, the number of elements."""
        count = self.nbytes // self.dtype.itemsize
        return 1 + OPERATIONS.index(self.name) << 56 | DTYPES.index(self.dtype) << 48 | count

    def check_alike(self) -> None:
        """Refuse what is not the same collective on all ranks, once all of them have issued it."""
        self.poll(lambda place: self.reads(place, KIND) != 0)
        memories, places = self.channel.memories, range(len(self.channel.memories))
        kinds = [self.reads(place, KIND) for place in places]
        if len(set(kinds)) > 1:
            ranks = {k: [str(memories[p].rank) for p in places if kinds[p] == k] for k in kinds}
            raise CollectiveError(
                f"{self.what()}: ranks issued different collectives or sizes.",
                [f"rank {', '.join(those)}: {_kind_text(kind)}" for kind, those in ranks.items()],
                "all ranks must run the same program on the same specs.",
            )

    def done(self) -> None:
        """Sign what this rank has read. Again is nothing."""
        if not self.finished:
            fence()
            for words in self.signatures:
                words[self.channel.here] = 1
            self.finished = True
            self.channel.meeting.announce()

    def free(self) -> bool:
        """Whether no rank will read this one's slot any more."""
        if not self.finished:
            return False
        signed = self.signatures[self._own]
        if not all(signed[place] for place in range(len(self.channel.memories))):
            return False
        if self.slot is not None:
            self.channel.memories[self.channel.here].drop(self.payload)
        return True

    def wait_until_free(self) -> None:
        """Wait until nobody will read this rank's slot any more."""
        signed = self.signatures[self._own]
        self.poll(lambda place: signed[place] != 0)

    @property
    def _own(self) -> int:
        """Which of the slots that it reads is this rank's."""
        return self.channel.here if self.slot is not None else 0

    # -------------------------------------------------------------- words

    def poll(self, ready: Callable[[int], Any]) -> None:
        """Wait until `ready(place)` for every place of the group."""
        meeting, deadline = self.channel.meeting, None
        for place, memory in enumerate(self.channel.memories):
            if not ready(place):
                deadline = deadline or time.monotonic() + meeting.timeout
                cause = meeting.wait(lambda at=place: bool(ready(at)), memory, deadline)
                if cause:
                    raise CollectiveError(lost(self.what(), cause))

    def what(self) -> str:
        """The collective, for a message."""
        return describe(self.name, self.channel.mesh, self.channel.axes)

    def reads(self, place: int, word: int) -> int:
        """A word of the message at a place of the group; zero while it was not written."""
        ring = self.channel.rings[place]
        if ring[self.row + NUMBER] != self.number + 1:
            return 0
        fence()  # the word is no older than the number
        return int(ring[self.row + word])

    def mark(self, word: int, value: int) -> None:
        """Show the peers a word; whatever was written before is there for them."""
        fence()
        self.channel.rings[self.channel.here][self.row + word] = value
        self.channel.meeting.announce()


def _kind_text(kind: int) -> str:
    count, dtype = kind & ((1 << 48) - 1), DTYPES[kind >> 48 & 255]
    return f"{OPERATIONS[(kind >> 56) - 1]} of [{count}] {dtype}"
