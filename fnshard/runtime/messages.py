"""Messages between processes of one host through shared memory: arenas, slots, control words.

Each rank owns one *arena*: an anonymous memory file (memfd, sparse; gone with its last process, so
that nothing is left even after SIGKILL), mapped by all ranks of the host. A *message* is a slot of
the sender's arena, published in a ring of control words: receivers poll, read the slot in place and
mark the message done; the slot is free again once all have.

Every control word has one writer and is an aligned int64 stored through numpy. That data come before
the word that announces them is the processor's promise on x86 (TSO) and `fence`'s elsewhere.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fnshard.errors import CollectiveError, report
from fnshard.runtime.collectives import lost

TOKEN, CLOSED, HEADER = 0, 1, 8  # the first control words of an arena
PUBLISHED, OFFSET, KIND, REDUCED, DONE = range(5)  # rows of a group's control words; a column a message
RING = 64  # messages of one group that may be in flight
PAGE = 4096
SPINS = 200  # polls that only yield the processor; then sleeps, and looks whether the peer lives
HALF = 1 << 35
ARENA_BYTES = 2 * HALF  # of address space; memory is used only where something was packed

_one, _two = threading.Lock(), threading.Lock()


def fence() -> None:
    """A full memory barrier: one lock is released before another is acquired."""
    with _one:
        pass
    with _two:
        pass


# ------------------------------------------------------------------ arenas


@dataclass(frozen=True, eq=False)
class Arena:
    """One rank's memory as this process maps it: control words, then slots."""

    rank: int
    pid: int
    memory: mmap.mmap
    words: np.ndarray  # int64
    address: int  # of the first byte

    def view(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        # A storage of just that size: a slice of one large tensor would be pickled with all of it.
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        count = nbytes // dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def table(self, index: int) -> np.ndarray:
        """The control words [5, RING] of group number `index`."""
        start = HEADER + index * 5 * RING
        return self.words[start : start + 5 * RING].reshape(5, RING)

    def left(self) -> bool:
        """Whether its process has closed it, ended, or is a zombie."""
        return bool(self.words[CLOSED]) or self._process() in "ZX"

    def stopped(self) -> bool:
        """Whether its process stands still (SIGSTOP, or a debugger)."""
        return self._process() in "Tt"

    def _process(self) -> str:
        """Its state, a letter as Linux has it; X where there is none."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]
        except OSError:
            return "X"


def control_bytes(groups: int) -> int:
    """Bytes at the head of an arena that hold the counters of so many groups, in whole pages."""
    return -(-8 * (HEADER + groups * 5 * RING) // PAGE) * PAGE


def map_arena(fd: int, rank: int, pid: int, control: int) -> Arena:
    """Map an open arena of `rank`, a process `pid`, with `control` bytes of counters."""
    memory = mmap.mmap(fd, ARENA_BYTES)
    words = np.frombuffer(memory, dtype=np.int64, count=control // 8)
    return Arena(rank, pid, memory, words, words.ctypes.data)


# ------------------------------------------------------------------ messages and slots


@dataclass(eq=False)
class Channel:
    """The messages between the ranks of one group, as this rank sees them."""

    axes: tuple[str, ...]
    arenas: list[Arena]  # in group order
    tables: list[np.ndarray]  # [5, RING] of each
    here: int  # this rank's place in the group
    sent: int = 0  # messages so far; the k-th uses column k % RING

    def done(self, number: int, members: Sequence[int] | None = None) -> bool:
        """Whether all ranks (or those at the places `members`) are done with a message."""
        column = number % RING
        tables = self.tables if members is None else [self.tables[m] for m in members]
        return all(table[DONE, column] >= number for table in tables)


@dataclass(eq=False)
class Slot:
    """A part of this rank's arena: being packed while `message` is None, else in flight."""

    start: int
    end: int
    message: Message | None = None


class Slots:
    """Slots of the own arena, by start. The lowest that fits is taken, so that memory is used again."""

    def __init__(self, start: int):
        self.floor = self.top = start  # memory beyond `top` was never used
        self.live: list[Slot] = []

    def take(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes`. Rather than use more memory, waits for slots that only peers hold.

        What this rank is done with, its peers come to without it (all ranks run one program), so that
        waiting for them cannot block anybody for good.
        """
        size = max(-(-nbytes // PAGE), 1) * PAGE
        while True:
            self.live = [s for s in self.live if s.message is None or not s.message.free()]
            place, start = self._fit(size)
            owed = [s.message for s in self.live if s.message is not None and s.message.owed()]
            if start + size <= self.top or not owed:
                break
            owed[0].settle()
        if start + size > self.floor // HALF * HALF + HALF:
            raise CollectiveError(f"more than {HALF >> 30} GiB are in flight in shared memory.")
        slot = Slot(start, start + size)
        self.live.insert(place, slot)
        self.top = max(self.top, slot.end)
        return slot

    def packed_at(self, offset: int, nbytes: int) -> Slot | None:
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


@dataclass(eq=False)
class Message:
    """One collective of one group, from this rank's side."""

    channel: Channel
    number: int
    what: Callable[[], str]
    timeout: float
    nbytes: int
    dtype: torch.dtype

    @property
    def column(self) -> int:
        return self.number % RING

    def publish(self, offset: int, kind: int) -> None:
        """Announce the slot at `offset`; first wait until the column's earlier message is over."""
        table, before = self.channel.tables[self.channel.here], self.number - RING
        if table[DONE, self.column] < before:
            raise CollectiveError(
                report(
                    f"{self.what()}: more than {RING} in flight.", fix="wait for, and release, earlier ones."
                )
            )
        self.poll(lambda j: self.channel.tables[j][DONE, self.column] >= before)
        table[OFFSET, self.column], table[KIND, self.column] = offset, kind
        self.mark(PUBLISHED)

    def mark(self, word: int) -> None:
        """Tell the peers; whatever was written before is there for them."""
        fence()
        self.channel.tables[self.channel.here][word, self.column] = self.number

    def parts(self) -> list[Tensor]:
        """What each rank sent, in place, in group order, once all have published."""
        tables, column = self.channel.tables, self.column
        self.poll(lambda j: tables[j][PUBLISHED, column] == self.number)
        fence()
        kinds = [int(table[KIND, column]) for table in tables]
        if len(set(kinds)) > 1:
            ranks = [str(a.rank) for a, k in zip(self.channel.arenas, kinds, strict=True) if k != kinds[0]]
            raise CollectiveError(
                report(
                    f"{self.what()}: ranks issued different collectives or sizes.",
                    [f"rank {', '.join(ranks)} differs from rank {self.channel.arenas[0].rank}"],
                    "all ranks must run the same program on the same specs.",
                )
            )
        return [
            arena.view(int(table[OFFSET, column]), self.nbytes, self.dtype)
            for arena, table in zip(self.channel.arenas, tables, strict=True)
        ]

    def poll(self, ready: Callable[[int], bool]) -> None:
        """Wait until `ready(place)` for every place of the group."""
        begun = None
        for place, arena in enumerate(self.channel.arenas):
            spins = 0
            while not ready(place):
                begun = begun or time.monotonic()
                spins += 1
                if spins <= SPINS:
                    os.sched_yield()
                    continue
                time.sleep(1e-4)
                if spins % 256 == 0:
                    gone = arena.left()  # before the last look: what it sent and then left is good
                    if not ready(place) and gone:
                        raise CollectiveError(lost(self.what(), f"rank {arena.rank} has left"))
                if time.monotonic() - begun > self.timeout:
                    still = f"; its process {arena.pid} is stopped" if arena.stopped() else ""
                    text = f"rank {arena.rank} did not come within {self.timeout:g} s{still}"
                    raise CollectiveError(lost(self.what(), text))

    def settle(self) -> None:
        """Wait until nobody will read the slot any more."""
        self.poll(lambda j: self.channel.tables[j][DONE, self.column] >= self.number)

    def free(self) -> bool:
        """Whether nobody will read the slot any more."""
        return self.channel.done(self.number)

    def owed(self) -> bool:
        """Whether this rank is done with it and only peers are not."""
        return self.channel.done(self.number, [self.channel.here])
