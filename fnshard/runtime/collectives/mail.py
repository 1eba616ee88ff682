"""Send messages from one rank to another of a host, through memory that both see.

A sender writes a message into a slot of its own memory, notes in a *ring* where it lies, and goes on. The
receiver copies the message out when it waits for it, and counts it. Both ends count the messages of each
ordered pair of ranks. A ring has so many rows that no pipeline fills it; a slot is used again when its
message was taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fnshard.errors import CollectiveError
from fnshard.mesh.deadlock import RankStatus
from fnshard.runtime.collectives.base import Likes, check_alike, describe_message, likes_of, message_text
from fnshard.runtime.collectives.messages import PAGE, Host, Memory, Slots, Words, fence

TAKEN, SENT = range(2)  # words before a ring's rows: how many messages this rank took from the peer, and sent
OFFSET, KIND = range(2)  # words of a row
RING = 4096  # the most messages of a pair under way at once
RING_BYTES = -(-8 * (2 + 2 * RING) // PAGE) * PAGE
ALIGNED = 64  # bytes: kernels may rely on tensors to begin at multiples of this


@dataclass(frozen=True)
class Letter:
    """The use of a slot by a message that is under way; `taken` says whether its receiver has it."""

    taken: Callable[[], bool]
    finished: bool = False  # never True: a sender takes more memory rather than wait for a receiver

    def free(self) -> bool:
        """Return whether no rank will read the slot any more."""
        return self.taken()


@dataclass(eq=False)
class Mailbox:
    """The messages between one rank and the other ranks of its host.

    Args:
        host: the ranks of the host, and their memory.
        start: where in each memory the rings begin, one for each rank of the mesh; slots lie behind them.
        ranks: the number of ranks of the mesh.
        sent, received: how many messages there were so far, by the other rank.
        awaited: the numbers of messages to receive that were not taken yet, by the other rank.
    """

    host: Host
    start: int
    ranks: int
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    awaited: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = Slots(self.start + self.ranks * RING_BYTES)

    def send(self, tensors: Sequence[Tensor], rank: int, what: str) -> None:
        """Copy a message to where its receiver finds it."""
        memory, number = self.host.memories[self.host.rank], self.sent.get(rank, 0)
        mine = self._view_words(memory, rank)
        theirs = self._view_words(self.host.memories[rank], self.host.rank)
        if number - theirs[TAKEN] >= RING:
            text = describe_message("send", what, self.host.rank, rank)
            raise CollectiveError(
                f"{text}: {RING} messages before it were not taken.", fix="fewer micro-batches."
            )

        # Copy the tensors into a slot. A sender that waited for room could wait for a receiver that waits for
        # it, so that the slots grow instead.
        likes = likes_of(tensors)
        starts, nbytes = _place_tensors(likes)
        slot = self.slots.fit(nbytes, grow=True)
        for at, tensor in zip(starts, tensors, strict=True):
            flat = memory.flat(slot.start + at, tensor.nbytes, tensor.dtype)
            flat.view(tensor.shape).copy_(tensor.detach())
        slot.use = Letter(lambda: theirs[TAKEN] > number)

        # Note where they lie, and then count the message.
        row = 2 + 2 * (number % RING)
        mine[row + OFFSET], mine[row + KIND] = slot.start, _hash_kind(likes, what)
        fence()
        self.sent[rank] = mine[SENT] = number + 1
        self.host.peers.counts[self._name_channel(self.host.rank, rank)] = number + 1

    def recv(self, likes: Likes, rank: int, what: str) -> Callable[[], list[Tensor]]:
        """Count the next message from a rank, and return a function that waits for it and copies it out."""
        here, sender = self.host.rank, self.host.memories[rank]
        number = self.received.get(rank, 0)
        self.received[rank] = number + 1
        awaited = self.awaited.setdefault(rank, set())
        awaited.add(number)
        theirs, mine = self._view_words(sender, here), self._view_words(self.host.memories[here], rank)
        text = describe_message("recv", what, rank, here)

        def take() -> list[Tensor]:
            status = RankStatus("", channel=self._name_channel(rank, here), number=number, ranks=[rank])
            self.host.meet(lambda: [] if theirs[SENT] > number else [rank], status, lambda: text)
            fence()  # the row must not be older than the count
            row = 2 + 2 * (number % RING)
            if theirs[row + KIND] != _hash_kind(likes, what):
                check_alike(text, {rank: "another message", here: message_text(likes, what)})

            # Copy them out, and then say so: the sender uses the slot again.
            starts, _ = _place_tensors(likes)
            out = [torch.empty(shape, dtype=dtype) for shape, dtype in likes]
            for at, tensor in zip(starts, out, strict=True):
                tensor.view(-1).copy_(sender.flat(theirs[row] + at, tensor.nbytes, tensor.dtype))
            fence()
            # Messages may be taken in any order; the word counts those before the first one that was not.
            awaited.remove(number)
            mine[TAKEN] = min(awaited, default=self.received[rank])
            self.host.peers.counts[f"{self._name_channel(rank, here)} taken"] = mine[TAKEN]
            return out

        return take

    def flush(self) -> None:
        """Wait until the receivers have taken all messages."""
        here = self.host.rank
        for rank, number in self.sent.items():
            theirs = self._view_words(self.host.memories[rank], here)
            channel = f"{self._name_channel(here, rank)} taken"
            status = RankStatus("", channel=channel, number=number - 1, ranks=[rank])
            text = describe_message("send", f"message {number}", here, rank)

            def missing(theirs: Words = theirs, rank: int = rank, number: int = number) -> list[int]:
                return [] if theirs[TAKEN] >= number else [rank]

            self.host.meet(missing, status, lambda text=text: text)

    def bytes_used(self) -> int:
        """Return the bytes of memory that were ever touched.

        A rank writes a ring for each receiver, and one word, in a page, for each sender.
        """
        rings = len(self.sent) * RING_BYTES + len(self.received.keys() - self.sent.keys()) * PAGE
        return self.slots.top - self.slots.floor + rings

    def _view_words(self, memory: Memory, peer: int) -> Words:
        """Return the words in which a memory's rank counts its messages with a peer."""
        return memory.words(self.start + peer * RING_BYTES, RING_BYTES // 8)

    def _name_channel(self, sender: int, receiver: int) -> str:
        """Name the channel in which both ends count the messages of a pair."""
        return f"{self.host.name} {sender}>{receiver}"


def _place_tensors(likes: Likes) -> tuple[list[int], int]:
    """Return where each tensor of a message begins in its slot, and the bytes of the message."""
    starts, end = [], 0
    for shape, dtype in likes:
        starts.append(end)
        size = torch.Size(shape).numel() * dtype.itemsize
        end += -(-size // ALIGNED) * ALIGNED
    return starts, end


def _hash_kind(likes: Likes, what: str) -> int:
    """Hash the text of a message, on which both ends must agree."""
    return zlib.crc32(message_text(likes, what).encode())
