"""Collectives through shared memory, for CPU ranks of one host: peers read in place.

A gather of leaves writes them where all ranks read them. Any other gather costs one pack and one unpack, and
a reduction one pass over the peers' rows. All of it runs on the caller's thread, so that nothing overlaps
with compute. gloo over loopback, by contrast, copies everything through the kernel and stages it in
temporaries (figures are in `experiments/LOG.md`). `messages` describes how ranks read each other's memory.

Leaves that are *gathered in place* lie once in memory that all ranks of a group see, whole and contiguous.
Each rank writes its own blocks to their places, and every rank's leaves are views of that one memory:
nothing is unpacked, and a host holds a gathered unit once instead of once a rank. The group's first rank,
its leader, chooses the slot in its memory, and followers wait for that.

A slot is used again once no rank holds a view of it. Each rank signs a slot when the storages that it made of
it have died, and before it issues a gather it signs all slots whose storages have died by then. So when all
ranks have issued a gather, a peer that has not signed a slot has kept one of its leaves, and the leader takes
more memory instead of waiting. Hence a rank waits only until its peers have issued the same gather and have
written their blocks.

Leaves that a training step gathers are *resident*: each rank's stored blocks move to that memory at the first
gather, and updates change them there. From then on a gather copies nothing: ranks meet, see that the blocks
of all of them lie in one place, and read the leaves there. `Gather.keeps_place` says when that is safe.

Two ranks that reduce send each other rows as they gather leaves, in a slot that both write to.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from fnshard.mesh import PIPELINE, Mesh
from fnshard.mesh.deadlock import host, peers
from fnshard.runtime.collectives.base import (
    Axes,
    Done,
    Group,
    Handle,
    Likes,
    Pending,
    all_to_all_at,
    disconnect,
    drop_axes_of_one,
    permute_at,
    reduce_scatter_at,
    sum_rows,
)
from fnshard.runtime.collectives.mail import Mailbox
from fnshard.runtime.collectives.messages import (
    GROUP_BYTES,
    KIND,
    OFFSET,
    PAGE,
    REDUCED,
    REGION,
    RESIDENT,
    WAITS,
    Channel,
    Host,
    Memory,
    Message,
    Slot,
    Slots,
    Use,
    Words,
    fence,
)

Runs = Sequence[tuple[int, int]]  # start and length of each leaf, in elements
Blocks = Sequence[tuple[Tensor, int]]  # stored blocks, and where each begins among all leaves, in elements
Write = Callable[[list[Tensor]], None]
Add = Callable[[Tensor, Tensor], None]

SMALL_BYTES = 64 << 10  # every rank sums a smaller all-reduce whole, which takes one meeting instead of two
LEADER = 0  # the leader's place in the group


def group_names(mesh: Mesh) -> list[tuple[str, ...]]:
    """Return all ordered groups of the mesh's axes.

    At every rank, a group's words have the place that the group has in this list.
    """
    axes = mesh.ordered(mesh.names)
    return [names for count in range(1, len(axes) + 1) for names in permutations(axes, count)]


def address_space(mesh: Mesh) -> int:
    """Return the bytes of a memory's address space.

    It has regions for control words, for slots of gathers and of reductions, for leaves that each group
    gathers in place, and for messages to other stages.
    """
    return (3 + len(group_names(mesh)) + (mesh.stages > 1)) * REGION


def head_bytes(groups: int) -> int:
    """Return the bytes at the start of a memory, which hold its own words and those of so many groups."""
    return PAGE + groups * GROUP_BYTES


def header_bytes(mesh: Mesh) -> int:
    """Return the bytes at the start of a slot of leaves that hold each rank's signature: a multiple of 64."""
    return -(-mesh.size // 8) * 64


@dataclass(eq=False)
class SharedLeaves:
    """Leaves that the ranks of a group gather in place, as one rank sees them.

    Args:
        channel: the group's messages.
        slots: the slots of the leader's memory.
        dead: numbers of messages whose views have died, and whose slots are not signed yet.
        alive: the signatures of messages whose views live, with a reference that notices their death.
        residents: the memory of leaves that may be resident, by where it begins in the leader's memory.
    """

    channel: Channel
    slots: Slots
    dead: deque[int] = field(default_factory=deque)
    alive: dict[int, tuple[Words, weakref.ref]] = field(default_factory=dict)
    residents: weakref.WeakValueDictionary[int, Words] = field(default_factory=weakref.WeakValueDictionary)

    def sweep(self) -> None:
        """Sign the slots whose views have died here, so that peers see it."""
        # Whatever this rank reads of these slots, it must have read before a peer may write there.
        fence()
        while self.dead:
            self.alive.pop(self.dead.popleft())[0][self.channel.here] = 1
        self.slots.sweep()

    def bytes_used(self) -> int:
        """Return this rank's share of the memory, which is what it writes of each slot."""
        return -(-(self.slots.top - self.slots.floor) // len(self.channel.memories))

    def gather(
        self, name: str, runs: Runs, total: int, dtype: torch.dtype, write: Write, blocks: Blocks = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gather leaves, and return them with this rank's blocks as parts of them.

        Ranks write their blocks, unless these lie in place already on all ranks.

        Args:
            blocks: this rank's stored blocks, if they may be parts of resident leaves.
        """
        # Sign before peers see that this rank has issued the gather, or it would seem to have kept leaves.
        self.sweep()

        # Find where in the leader's memory the leaves begin, if these blocks are parts of resident leaves.
        memory, starts = self.channel.memories[LEADER], set()
        for block, start in blocks:
            offset = memory.offset_of(block)
            starts.add(0 if offset is None else offset - start * block.itemsize)
        resident = starts.pop() if len(starts) == 1 else 0
        if resident not in self.residents:
            resident = 0

        # Read them there if those of all ranks are; otherwise let each rank write its blocks to a new slot.
        message = Message(self.channel, name, total * dtype.itemsize, dtype, resident=resident)
        if resident and message.agrees_on(RESIDENT):
            leaves = self._cut_runs(self.residents[resident], dtype, runs)
            own = [block for block, _ in blocks]
        else:
            words = self._take_memory(message)
            leaves = self._cut_runs(words, dtype, runs)
            write(leaves)
            # In an all-reduce this word says that a piece is summed; here, that a rank's blocks are written.
            message.mark(REDUCED, 1)
            message.meet()
            message.poll(lambda place: message.read(place, REDUCED))
            moved = self._cut_runs(words, dtype, [(start, block.numel()) for block, start in blocks])
            own = [new.view(block.shape) for new, (block, _) in zip(moved, blocks, strict=True)]
        fence()
        message.release()
        return leaves, own

    def _agree_on_start(self, message: Message) -> int:
        """Return where the message's slot begins: the leader chooses it, and the others wait for that."""
        nbytes = header_bytes(self.channel.mesh) + message.nbytes
        if self.channel.here != LEADER:
            message.poll(lambda place: place != LEADER or message.read(place, KIND))
            # If the leader issued another collective, `meet` raises the error that says so.
            if message.read(LEADER, KIND) != message.kind:
                message.meet()
            message.poll(lambda place: place != LEADER or message.read(place, OFFSET))
            self.slots.reach(message.read(LEADER, OFFSET), nbytes)
            return message.read(LEADER, OFFSET)

        # The leader looks for a slot in which no rank holds a leaf. If all ranks have come and there is none,
        # they have kept leaves in all slots, and the memory grows.
        slot = None

        def can_go_on(place: int) -> bool:
            nonlocal slot
            if slot is None:
                slot = self.slots.fit(nbytes)
            return slot is not None or bool(message.read(place, KIND))

        message.poll(can_go_on)
        if slot is None:
            slot = self.slots.fit(nbytes, grow=True)

        # Clear the signatures of the slot's last use before the followers see where it is.
        signed = self._view_signatures(slot.start)
        for place in range(len(self.channel.memories)):
            signed[place] = 0
        slot.use = Use(message, signed.__getitem__)
        message.mark(OFFSET, slot.start)
        return slot.start

    def _take_memory(self, message: Message) -> Words:
        """Take memory for the message's leaves. When the last tensor in it has died, this rank signs it."""
        start = self._agree_on_start(message)
        place = start + header_bytes(self.channel.mesh)

        # The storages of all leaves keep this one object alive, so that its death is that of the last one.
        words = self.channel.memories[LEADER].words(place, -(-message.nbytes // 8))
        number, dead = message.number, self.dead
        died = weakref.ref(words, lambda _: dead.append(number))
        self.alive[number] = self._view_signatures(start), died
        self.residents[place] = words
        return words

    def _cut_runs(self, words: Words, dtype: torch.dtype, runs: Runs) -> list[Tensor]:
        """Return flat parts of a memory, each with a storage of its own, so that it is pickled alone."""
        return [
            torch.frombuffer(words, dtype=dtype, count=count, offset=start * dtype.itemsize)
            if count
            else torch.empty(0, dtype=dtype)
            for start, count in runs
        ]

    def _view_signatures(self, start: int) -> Words:
        """View the words of a slot in which each rank says that its views have died."""
        return self.channel.memories[LEADER].words(start, len(self.channel.memories))


def _make_collective(name: str, make: Callable[..., Any], scattered: bool = False) -> Callable[..., Any]:
    """Return a collective whose result is `make(what each rank has sent, this one's place in the group)`.

    Args:
        scattered: whether each rank reads only its own row of what is sent.
    """

    def collective(shared: Shared, flat: Tensor, axes: Axes, *how: int) -> Handle[Any]:
        if not shared.shares_memory(axes):
            return getattr(shared.base, name)(flat, axes, *how)
        message = shared.issue(name, flat, axes, scattered)
        result = make(message.parts(), message.channel.here, *how)
        message.release()
        return Done(result)

    return collective


@dataclass(eq=False)
class Shared:
    """Collectives through shared memory for groups whose ranks share a host; others go through `base`.

    Reductions, of which each rank reads its own row, have slots apart from those of gathers. They are taken
    and freed in another rhythm, and in one heap the two would fragment it. Memory is sparse, so that gaps
    between the regions cost nothing.

    Args:
        base: the collectives of groups that span hosts.
        hosts: the host of each rank.
        host: the ranks of this rank's host.
        gathers, reductions: the slots of this rank's memory.
        channels: the channels of groups, by axes.
        shared_leaves: the leaves that groups gather in place, by axes.
        together: whether the ranks along some axes share a host, by axes.
        mail: the messages to other stages.
    """

    base: Group
    hosts: tuple[str, ...]
    host: Host
    gathers: Slots = field(default_factory=lambda: Slots(REGION))
    reductions: Slots = field(default_factory=lambda: Slots(2 * REGION))
    channels: dict[tuple[str, ...], Channel] = field(default_factory=dict)
    shared_leaves: dict[tuple[str, ...], SharedLeaves] = field(default_factory=dict)
    together: dict[tuple[str, ...], bool] = field(default_factory=dict)
    mail: Mailbox = field(init=False)

    def __post_init__(self) -> None:
        self.mail = Mailbox(self.host, (3 + len(group_names(self.mesh))) * REGION, self.mesh.size)

    reduce_scatter = _make_collective("reduce_scatter", reduce_scatter_at, scattered=True)
    all_to_all = _make_collective("all_to_all", all_to_all_at, scattered=True)
    permute = _make_collective("permute", permute_at)

    @property
    def mesh(self) -> Mesh:
        return self.base.mesh

    @property
    def own(self) -> Memory:
        """This rank's memory."""
        return self.host.memories[self.host.rank]

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        if numel == 0 or not self.shares_memory(axes):
            return self.base.send_buffer(numel, dtype, axes, rows)
        nbytes = rows * numel * dtype.itemsize
        return self.own.flat(self.slots(rows > 1).take(nbytes).start, nbytes, dtype)

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        if not self.shares_memory(axes):
            return self.base.all_gather(flat, axes)
        message = self.issue("all_gather", flat, axes)
        return Done(message.parts(), message.release)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        if not self.shares_memory(axes):
            return self.base.all_reduce(flat, axes)
        is_slot = self.find_slot(flat) is not None  # a slot is reused, and cannot hold the result
        message = self.issue("all_reduce", flat, axes)
        parts, result = message.parts(), torch.empty_like(flat) if is_slot else flat
        if message.nbytes <= SMALL_BYTES:
            sum_rows(parts, result)
        else:
            _sum_by_pieces(message, parts, result)
        message.release()
        return Done(result)

    def gather_leaves(
        self, runs: Runs, total: int, dtype: torch.dtype, write: Write, axes: Axes, blocks: Blocks = (),
        move: Write | None = None,
    ) -> Handle[list[Tensor]] | None:  # fmt: skip
        """Gather leaves in place, see the module; return None if the ranks share no memory.

        Args:
            total: the elements of all leaves together.
            write: copies this rank's blocks into flat leaves, one for each run.
            blocks: this rank's stored blocks, if they may be parts of resident leaves.
            move: takes the blocks that replace these, which are parts of the leaves.
        """
        if total == 0 or not self.shares_memory(axes):
            return None
        leaves, own = self.leaves_of(axes).gather("gather_leaves", runs, total, dtype, write, blocks)
        if blocks:
            move(own)
        return Done(leaves)

    def reduce_pair(
        self, numel: int, dtype: torch.dtype, pack: Callable[[Tensor], None], add: Add, axes: Axes,
        in_place: bool,
    ) -> Handle[Tensor] | None:  # fmt: skip
        """Reduce-scatter between two ranks, each of which keeps its own row; return None if they are not two.

        Args:
            pack: fills a flat [numel] with the peer's row.
            add: `add(row, out)` adds the row that the peer sent to this rank's own, into `out`, both [numel].
            in_place: whether `out` is the peer's row itself, which must die before the next collective.
        """
        if numel == 0 or self.mesh.axes_size(axes) != 2 or not self.shares_memory(axes):
            return None
        shared = self.leaves_of(axes)
        runs = [(0, numel), (numel, numel)]  # the rows that the first rank reads, and the second
        here, write = shared.channel.here, lambda rows: pack(rows[1 - here])
        rows, _ = shared.gather("reduce_pair", runs, 2 * numel, dtype, write)
        row = rows[here]
        out = row if in_place else torch.empty_like(row)
        add(row, out)
        return Done(out)

    def send(self, tensors: Sequence[Tensor], rank: int, what: str) -> Handle[None]:
        if not self.shares_memory((PIPELINE,)):
            return self.base.send(tensors, rank, what)
        self.mail.send(tensors, rank, what)
        return Done(None)

    def recv(self, likes: Likes, rank: int, what: str) -> Handle[list[Tensor]]:
        if not self.shares_memory((PIPELINE,)):
            return self.base.recv(likes, rank, what)
        return Pending(self.mail.recv(likes, rank, what))

    def flush(self) -> None:
        self.mail.flush()
        self.base.flush()

    def open_groups(self, groups: Iterable[Axes], pairs: Iterable[tuple[int, int]] = ()) -> None:
        apart = [axes for axes in groups if not self.shares_memory(axes)]
        if apart or not self.shares_memory((PIPELINE,)):
            self.base.open_groups(apart, pairs)

    def gather_object(self, text: str) -> list[str]:
        return self.base.gather_object(text)

    def transport_bytes(self) -> int:
        """Return the bytes of this rank's memory that were ever touched, and its share of leaves in place."""
        head = head_bytes(len(group_names(self.mesh)))
        slots = sum(s.top - s.floor for s in (self.gathers, self.reductions))
        in_place = sum(leaves.bytes_used() for leaves in self.shared_leaves.values())
        return head + slots + self.mail.bytes_used() + in_place

    def close(self) -> None:
        """Show the peers that this rank leaves, and release all memory; its last view unmaps it."""
        disconnect(self)
        # Peers that wait for this rank read in its word that it will not come.
        if self.host.memories:
            self.own.words(WAITS, 1)[0] = -1 - self.host.rank
        for kept in (
            self.channels, self.shared_leaves, self.host.memories, self.gathers.live, self.reductions.live,
            self.mail.slots.live,
        ):  # fmt: skip
            kept.clear()
        self.base.close()

    def shares_memory(self, axes: Axes) -> bool:
        """Return whether each group over these axes consists of several ranks of one host."""
        axes = tuple(axes)
        if axes not in self.together:
            groups = {self.mesh.group_ranks(axes, rank) for rank in range(self.mesh.size)}
            apart = any(len({self.hosts[rank] for rank in group}) > 1 for group in groups)
            self.together[axes] = self.mesh.axes_size(axes) > 1 and not apart
        return self.together[axes]

    def slots(self, scattered: bool) -> Slots:
        """Return the slots for messages of which each rank reads its own row (`scattered`), or all."""
        return self.reductions if scattered else self.gathers

    def find_slot(self, flat: Tensor) -> Slot | None:
        """Return the slot that was handed out as this tensor, or None."""
        start = self.own.offset_of(flat)
        return self.gathers.find_packed(start, flat.nbytes) or self.reductions.find_packed(start, flat.nbytes)

    def issue(self, name: str, flat: Tensor, axes: Axes, scattered: bool = False) -> Message:
        """Issue a message; `flat` is copied into a slot unless it is one."""
        slot = self.find_slot(flat)
        if slot is None:
            slot = self.slots(scattered).take(flat.nbytes)
            self.own.flat(slot.start, flat.nbytes, flat.dtype).copy_(flat.detach())
        return Message(self.channel(axes), name, flat.nbytes, flat.dtype, slot)

    def channel(self, axes: Axes) -> Channel:
        """Return the channel of the ranks along these axes."""
        named = drop_axes_of_one(self.mesh, axes)
        if named not in self.channels:
            ranks = self.mesh.group_ranks(named)
            memories = [self.host.memories[rank] for rank in ranks]
            start = head_bytes(group_names(self.mesh).index(named))
            words = [m.words(start, GROUP_BYTES // 8) for m in memories]
            here, name = ranks.index(self.mesh.rank), f"{self.host.name} {','.join(named)}"
            self.channels[named] = Channel(name, named, self.mesh, self.host, memories, words, here)
        return self.channels[named]

    def leaves_of(self, axes: Axes) -> SharedLeaves:
        """Return the leaves that the ranks along these axes gather in place."""
        channel = self.channel(axes)
        if channel.axes not in self.shared_leaves:
            floor = (3 + group_names(self.mesh).index(channel.axes)) * REGION
            self.shared_leaves[channel.axes] = SharedLeaves(channel, Slots(floor))
        return self.shared_leaves[channel.axes]


def _sum_by_pieces(message: Message, parts: list[Tensor], result: Tensor) -> None:
    """Sum one piece of all parts, show it in this rank's slot, and read the other ranks' pieces in theirs."""
    # Sum this rank's piece. No peer reads that piece of this rank's part, so the sum may overwrite it there.
    here, count = message.channel.here, result.numel()
    step = math.ceil(count / len(parts))
    pieces = [slice(min(j * step, count), min((j + 1) * step, count)) for j in range(len(parts))]
    mine = pieces[here]
    sum_rows([part[mine] for part in parts], result[mine])
    parts[here][mine] = result[mine]
    message.mark(REDUCED, 1)

    # Copy the others' pieces, as soon as they are summed.
    for place, piece in enumerate(pieces):
        if place != here:
            message.poll(lambda at, place=place: at != place or message.read(at, REDUCED))
            fence()
            result[piece] = parts[place][piece]


def connect_shared(base: Group) -> Shared | None:
    """Connect the ranks of `base` by shared memory, or return None on all ranks if some cannot.

    Every rank offers its memory, opens that of its host's ranks, and says whether that worked.
    """
    mesh, rank = base.mesh, base.mesh.rank

    # Make this rank's memory. An empty offer says that it has none.
    fd, offer = -1, ""
    try:
        fd = os.memfd_create("fnshard")
        os.ftruncate(fd, address_space(mesh))  # the file is sparse: it uses memory where something is written
        own = Memory.of(fd, rank, os.getpid())
        offer = json.dumps({"host": host(), "pid": os.getpid(), "fd": fd})
    except (OSError, ValueError, AttributeError):  # there is no memfd (no Linux), or a limit on address space
        pass
    try:
        texts = base.gather_object(offer)
        if not all(texts):
            return None

        # Open that of the other ranks of this host, while each still holds its descriptor.
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

        # All ranks use it, or none does.
        if set(base.gather_object(answer)) != {"yes"} or len(set(hosts)) == mesh.size:
            return None
    finally:
        if fd >= 0:
            os.close(fd)
    return Shared(base, hosts, Host(rank, memories, base.timeout, base.name, peers()))


def _open(peer: int, offer: dict[str, Any]) -> Memory:
    """Map a peer's memory, a file without a name, by the descriptor that its process holds."""
    fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR)
    try:
        return Memory.of(fd, peer, offer["pid"])
    finally:
        os.close(fd)
