"""Messages between processes of one host that see each other's memory.

A rank's memory is an anonymous memory file (memfd: sparse, and gone with its last process, so that nothing is
left even after SIGKILL), mapped by all ranks of the host. It holds *slots* with the rank's data and, for each
group, control words: how many messages the rank has reached, how many it has finished, and two *rows* that
describe its last two messages. To meet, a rank names a slot in its row, counts up, and polls until all have
done so; then it reads their slots in place. No rank reaches a message before all have reached the one before
it, so that two rows are enough.

A message runs on the thread that issues it. All ranks issue their messages in one order, across groups too.
Every control word has a single writer.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh
from fnshard.mesh.deadlock import Missing, Peers, PeerWait, RankStatus, lost, process_stat
from fnshard.runtime.collectives.base import check_alike, collective_text, describe

Words = MutableSequence[int]  # 64 bits each

PAGE = 4096
REGION = 1 << 35  # bytes of address space for gathers, and for reductions
WAITS = 0  # a memory's own word: 1 + the rank it waits for; negative once it gave up, or has closed
REACHED, FINISHED = range(2)  # a group's words: how many messages the rank has reached, and has finished
KIND, OFFSET, REDUCED, RESIDENT = range(4)  # words of a row, which come after these
ROWS, WIDTH = 2, 4
GROUP_BYTES = 8 * (2 + ROWS * WIDTH)
SPINS = 200  # looks that only yield the processor; later ones sleep, and check whether the peer lives

OPERATIONS = (
    "all_gather", "reduce_scatter", "all_reduce", "gather_leaves", "reduce_pair", "all_to_all", "permute",
)  # fmt: skip
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)

_one, _two = threading.Lock(), threading.Lock()


def fence() -> None:
    """Issue a full memory barrier, by releasing one lock before acquiring another.

    Data must be visible before the word that announces them. On x86 the processor guarantees that (TSO), and
    elsewhere this barrier does.
    """
    with _one:
        pass
    with _two:
        pass


# ------------------------------------------------------------------ the ranks of a host
@dataclass(frozen=True, eq=False)
class Memory:
    """A rank's memory as this process maps it."""

    rank: int
    pid: int
    file: mmap.mmap
    address: int  # of the first byte

    @staticmethod
    def of(fd: int, rank: int, pid: int) -> Memory:
        """Map the open memory file of `rank`, whose process is `pid`."""
        file = mmap.mmap(fd, os.fstat(fd).st_size)
        return Memory(rank, pid, file, np.frombuffer(file, dtype=np.int8, count=1).ctypes.data)

    def words(self, offset: int, count: int) -> Words:
        """Return control words [count], which are zero at first."""
        return memoryview(self.file)[offset : offset + 8 * count].cast("q")

    def flat(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers at a place of this memory as a flat tensor, without a copy."""
        # Its storage has just that size: a slice of one large tensor would be pickled with all of it.
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.file, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def offset_of(self, flat: Tensor) -> int | None:
        """Return where in this memory a tensor begins, or None if it lies elsewhere."""
        offset = flat.data_ptr() - self.address
        return offset if 0 <= offset < len(self.file) else None

    def has_left(self) -> bool:
        """Return whether its process has closed it, has given up waiting, has ended, or is a zombie."""
        return self.words(WAITS, 1)[0] < 0 or process_stat(self.pid)[0] in "ZX"


@dataclass(frozen=True, eq=False)
class Host:
    """The ranks whose memory this rank sees, and for which it waits by polling.

    A rank's memory says for which rank it waits and, after it has given up, which one failed it. So an error
    names the rank that died, and not a peer that waits for it. A rank that has given up counts as gone.
    """

    rank: int
    memories: dict[int, Memory]
    timeout: float
    name: str  # of the connection
    peers: Peers

    def meet(self, missing: Missing, status: RankStatus, what: Callable[[], str]) -> None:
        """Wait until nobody is missing.

        Raises:
            CollectiveError: `what` failed, because somebody will not come.
        """
        for _ in range(SPINS):
            if not missing():
                return
            os.sched_yield()
        with PeerWait(self.peers, status, self.timeout) as wait:
            if cause := self.wait(missing, wait):
                raise CollectiveError(lost(what(), cause))

    def wait(self, missing: Missing, wait: PeerWait) -> str:
        """Wait until nobody is missing and return "", or return why somebody will not come."""
        waits = self.memories[self.rank].words(WAITS, 1)
        try:
            for looks in itertools.count():
                if not (absent := missing()):
                    waits[0] = 0
                    return ""

                # Look rarely whether the peer lives: that reads a file of the system.
                peer = self.memories[absent[0]]
                waits[0] = 1 + peer.rank
                has_left = False
                if looks % 256 == 255:
                    has_left = peer.has_left()
                    wait.look(missing, now=has_left)
                is_late = time.monotonic() > wait.began + self.timeout
                # A peer may have sent its data and then left.
                if (has_left or is_late) and peer.rank in missing():
                    return self._blame(peer)
                time.sleep(1e-4)
        finally:
            waits[0] = -waits[0]  # a rank that gives up shows it, with the rank that failed it

    def _blame(self, peer: Memory) -> str:
        """Return who is to blame, and for what: the peer, or the rank that it waits for, and so on."""
        # Follow who waits for whom, up to a rank that waits for none, or that was passed before.
        culprit, seen = peer, {self.rank}
        while culprit.rank not in seen:
            seen.add(culprit.rank)
            waits = culprit.words(WAITS, 1)[0]
            # A rank that was killed while it waited is itself to blame.
            if waits < 0 or (waits and not culprit.has_left()):
                culprit = self.memories[abs(waits) - 1]
        culprit = peer if culprit.rank == self.rank else culprit
        if culprit.has_left():
            return f"rank {culprit.rank} has left"
        stopped = process_stat(culprit.pid)[0] in "Tt"  # by SIGSTOP, or a debugger
        still = f"; its process {culprit.pid} is stopped" if stopped else ""
        return f"rank {culprit.rank} did not come within {self.timeout:g} s{still}"


# ------------------------------------------------------------------ slots
def whole_pages(nbytes: int) -> int:
    """Return the bytes of a slot that holds `nbytes`."""
    return max(-(-nbytes // PAGE), 1) * PAGE


@dataclass(eq=False)
class Use:
    """The use of a slot by a message; `over` says whether the rank at a place of the group has finished."""

    message: Message
    over: Callable[[int], Any]

    @property
    def finished(self) -> bool:
        """Return whether this rank will not read the slot any more."""
        return bool(self.over(self.message.channel.here))

    def free(self) -> bool:
        """Return whether no rank will read the slot any more."""
        return all(map(self.over, range(len(self.message.channel.memories))))


@dataclass(eq=False)
class Slot:
    """A part of this rank's memory, which is being packed while it has no `use`."""

    start: int
    end: int
    use: Use | None = None


class Slots:
    """The slots of one region, by start. A new one takes the lowest gap that fits: memory is used again."""

    def __init__(self, start: int):
        self.floor = self.top = start  # memory beyond `top` was never used
        self.live: list[Slot] = []

    def take(self, nbytes: int) -> Slot:
        """Take a slot of at least `nbytes`; wait for slots that only peers hold rather than use more memory.

        That cannot deadlock: all ranks run one program, and what this rank has finished, its peers can finish
        without it.
        """
        while (slot := self.fit(nbytes)) is None:
            use = self._find_owed()[0]
            use.message.poll(use.over)
        return slot

    def fit(self, nbytes: int, grow: bool = False) -> Slot | None:
        """Find a slot of at least `nbytes`.

        Return None if it would take more memory while peers alone hold some slots, unless `grow`.
        """
        self.sweep()
        size = whole_pages(nbytes)
        place, start = self._find_gap(size)
        if start + size > self.top and not grow and self._find_owed():
            return None
        self.reach(start, nbytes)
        slot = Slot(start, start + size)
        self.live.insert(place, slot)
        return slot

    def reach(self, start: int, nbytes: int) -> None:
        """Note that a slot of `nbytes` at `start` is in use."""
        end = start + whole_pages(nbytes)
        if end > self.floor // REGION * REGION + REGION:
            raise CollectiveError(f"more than {REGION >> 30} GiB are in flight between ranks of one host.")
        self.top = max(self.top, end)

    def sweep(self) -> None:
        """Free slots that nobody will read any more."""
        self.live = [s for s in self.live if s.use is None or not s.use.free()]

    def find_packed(self, offset: int | None, nbytes: int) -> Slot | None:
        """Return the slot that was handed out at `offset` and not sent yet, or None."""
        for slot in self.live:
            if slot.start == offset and slot.use is None and nbytes <= slot.end - slot.start:
                return slot
        return None

    def _find_owed(self) -> list[Use]:
        """Return the uses that this rank has finished, and some peer has not."""
        return [s.use for s in self.live if s.use is not None and s.use.finished]

    def _find_gap(self, size: int) -> tuple[int, int]:
        """Return the place among the live slots, and the start, of the lowest gap that fits."""
        start = self.floor
        for place, slot in enumerate(self.live):
            if slot.start - start >= size:
                return place, start
            start = slot.end
        return len(self.live), start


# ------------------------------------------------------------------ channels and messages
@dataclass(eq=False)
class Channel:
    """The messages between a group's ranks, as this rank sees them; the k-th is the k-th of all ranks."""

    name: str  # the same on all its ranks
    axes: tuple[str, ...]
    mesh: Mesh
    host: Host
    memories: Sequence[Memory]  # in group order
    words: Sequence[Words]  # of each rank
    here: int  # this rank's place in the group
    issued: int = 0
    open: set[int] = field(default_factory=set)  # numbers of messages that run or whose rows are read


@dataclass(eq=False)
class Message:
    """A collective of one group, from this rank's side; making it announces that the rank has reached it.

    Args:
        slot: the slot of this rank's memory that is sent; None for leaves that are gathered in place.
        resident: where in the leader's memory these leaves lie already, as far as this rank's blocks tell; 0
            if they lie elsewhere.
    """

    channel: Channel
    name: str
    nbytes: int
    dtype: torch.dtype
    slot: Slot | None = None
    resident: int = 0

    def __post_init__(self) -> None:
        channel, self.number = self.channel, self.channel.issued
        channel.issued += 1
        channel.open.add(self.number)

        # Describe the message, and then count it: a peer that reads the new count may read the rest.
        words = channel.words[channel.here]
        for word, value in ((KIND, self.kind), (OFFSET, 0), (REDUCED, 0), (RESIDENT, self.resident)):
            words[self._locate(word)] = value
        if self.slot is not None:
            self.slot.use = Use(self, lambda place: channel.words[place][FINISHED] > self.number)
            words[self._locate(OFFSET)] = self.slot.start
        fence()
        words[REACHED] = channel.host.peers.counts[channel.name] = self.number + 1

    def release(self) -> None:
        """Say that this rank reads no slot of the message any more; a second call does nothing."""
        channel = self.channel
        if self.number in channel.open:
            channel.open.remove(self.number)
            fence()
            # Messages may be released in any order; the word counts those before the first that is open.
            words = channel.words[channel.here]
            words[FINISHED] = min(channel.open, default=words[REACHED])

    def parts(self) -> list[Tensor]:
        """Wait for all ranks, and return what each has sent, in place, in group order."""
        self.meet()
        return [
            memory.flat(self.read(place, OFFSET), self.nbytes, self.dtype)
            for place, memory in enumerate(self.channel.memories)
        ]

    def meet(self) -> None:
        """Wait for all ranks, and refuse a collective that is not the same on all."""
        self.poll(lambda place: self.read(place, KIND))
        kinds = [self.read(place, KIND) for place in range(len(self.channel.memories))]
        if len(set(kinds)) > 1:
            texts = map(_describe_kind, kinds)
            check_alike(self.what(), {m.rank: t for m, t in zip(self.channel.memories, texts, strict=True)})

    @property
    def kind(self) -> int:
        """The operation, dtype and number of elements as a number, on which ranks must agree; never zero."""
        count = self.nbytes // self.dtype.itemsize
        return 1 + OPERATIONS.index(self.name) << 56 | DTYPES.index(self.dtype) << 48 | count

    def agrees_on(self, word: int) -> bool:
        """Wait for all ranks, and return whether a word of their rows is the same on all."""
        self.meet()
        return len({self.read(place, word) for place in range(len(self.channel.memories))}) == 1

    def poll(self, ready: Callable[[int], Any]) -> None:
        """Wait until `ready(place)` for every place of the group."""
        memories, host = self.channel.memories, self.channel.host

        def missing() -> list[int]:
            return [memory.rank for place, memory in enumerate(memories) if not ready(place)]

        status = RankStatus("", "", self.channel.name, self.number, [m.rank for m in memories])
        host.meet(missing, status, self.what)

    def what(self) -> str:
        """Describe the collective for an error."""
        return describe(self.name, self.channel.mesh, self.channel.axes)

    def read(self, place: int, word: int) -> int:
        """Read a word of the message at a place of the group; zero while that rank has not reached it."""
        words = self.channel.words[place]
        if words[REACHED] <= self.number:
            return 0
        fence()  # the word must not be older than the count
        return words[self._locate(word)]

    def mark(self, word: int, value: int) -> None:
        """Show the peers a word; they see it no earlier than whatever was written before it."""
        fence()
        self.channel.words[self.channel.here][self._locate(word)] = value

    def _locate(self, word: int) -> int:
        """Return where a word of the message lies among a rank's words for the group."""
        return 2 + WIDTH * (self.number % ROWS) + word


def _describe_kind(kind: int) -> str:
    """Describe the operation, dtype and number of elements that `Message.kind` packs into a number."""
    return collective_text(OPERATIONS[(kind >> 56) - 1], kind & ((1 << 48) - 1), DTYPES[kind >> 48 & 255])
