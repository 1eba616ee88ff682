"""Collectives, an argument of the executor: the ways in which a rank exchanges flat tensors with peers.

`fnshard.runtime.collectives.connect` picks the implementation: `Group` (a `torch.distributed` process group,
or one rank alone), `Simulated` (ranks are threads, `fnshard.runtime.collectives.simulated`), `Shared` (CPU
ranks that share hosts, `fnshard.runtime.collectives.shared_memory`). All keep one contract:

- Groups are named by an ordered tuple of mesh axes; rank order is `mesh.group_ranks(axes)`. A group
  of one needs no transport.
- Every rank issues the same collectives of its groups in the same order. Any number may be in flight, and
  they may be waited for in any order, the same one on all ranks: they meet at the issue, or at the wait.
- A tensor that is handed over must not change until its handle has been waited for, and a gather's until it
  is released (`verify` checks schedules for this, and the adversarial simulation shows which one breaks it).
- Every handle is waited for, and a gather's is released; every send buffer is sent.
- A backend whose ranks write to one memory (`Shared`) also has `gather_leaves` and `reduce_pair`, and one
  with torch's own collectives (`Group`) `gather_blocks` and `reduce_leaves`: their inputs live until the
  wait.
- Messages from one rank to another of the pipeline (`send`, `recv`) are received in the order in which they
  are sent, whatever else either end does. A send copies, so that nothing ever waits for its receiver.
- On a pipeline, whose stages issue their collectives in different orders, `open_groups` is called first.
- A peer that dies, leaves or stays silent for `timeout` seconds is a `CollectiveError`, never a hang. On
  accelerators NCCL's watchdog ends the process instead, which the launcher reports.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fnshard.errors import CollectiveError
from fnshard.mesh import PIPELINE, Mesh
from fnshard.mesh.deadlock import DEFAULT_TIMEOUT, DUTY, RankStatus, lost, peers, ranks_text

Likes = Sequence[tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of a message's tensors
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Axes = Sequence[str]

# torch 2.13 renamed these, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Transport = Literal["auto", "p2p", "native"]
# torch's `Work`s, and a function that returns the result. Until it is called, it holds the tensors that the
# collective reads: on a stream their memory would otherwise be given to others while it is still being read.
Started = tuple[Sequence[Any], Callable[[], Any]]

MESSAGE_TAG = 1  # gloo's tag of messages; collectives from rank to rank have 0
SLACK_S = 10.0  # by how much gloo's own timeout exceeds ours, which names the rank
GONE_S = 2.0  # how long the process of a peer that closed its connections may take to end
_made = itertools.count()


class Handle(Protocol[T_co]):
    """A collective in flight."""

    def wait(self) -> T_co:
        """Wait (on CUDA: let the current stream wait) until the result is there, and return it; once only."""

    def release(self) -> None:
        """Say that the result of a gather has been copied out; its rows must not be read again."""


class Collectives(Protocol):
    """The interface of a backend for the executor.

    Sums are exact to the wire's dtype, and equal on all ranks.
    """

    @property
    def mesh(self) -> Mesh:
        """The mesh whose axes name the groups."""

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        """Return an uninitialised flat [rows * numel] tensor in which to pack the next message over `axes`.

        At most one such buffer per `axes` may be handed out and not yet sent. It need not be used: a
        collective takes any contiguous flat tensor.
        """

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        """Gather [k] of each rank as n tensors [k], read-only, in group order. Any dtype."""

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        """Sum [n * k] over ranks and return this rank's row [k], which the caller owns."""

    def all_to_all(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        """Return this rank's row of each rank's [n * k], again [n * k], which the caller owns. Any dtype."""

    def permute(self, flat: Tensor, axes: Axes, distance: int) -> Handle[Tensor]:
        """Return the [k] of the rank `distance` places before this one in the group; the caller owns it.

        Any dtype.
        """

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        """Sum [k] over ranks; the result may be `flat` itself, in place."""

    def send(self, tensors: Sequence[Tensor], rank: int, what: str) -> Handle[None]:
        """Send tensors of any shapes and dtypes to a rank of another stage, which takes them by `recv`.

        Args:
            what: the name of the message, the same at both ends.
        """

    def recv(self, likes: Likes, rank: int, what: str) -> Handle[list[Tensor]]:
        """Receive the next message of a rank of another stage, as contiguous tensors that the caller owns."""

    def flush(self) -> None:
        """Wait until the peers have all messages; simulated ranks have them at once."""

    def open_groups(self, groups: Iterable[Axes], pairs: Iterable[tuple[int, int]] = ()) -> None:
        """Make the groups over these axes, and the one for messages. It is a collective of the whole mesh.

        Args:
            pairs: stages of which the first sends to the second before they meet otherwise.
        """

    def gather_object(self, text: str) -> list[str]:
        """Return one small string of every rank of the mesh, by rank, when all have come here."""

    def transport_bytes(self) -> int:
        """Return the bytes that the transport itself holds on this rank (shared slots)."""

    def close(self) -> None:
        """Release groups and shared memory. A process may also end without it."""


@dataclass(frozen=True)
class Done(Generic[T]):
    """A handle whose result is known already."""

    value: T
    release: Callable[[], Any] = lambda: None

    def wait(self) -> T:
        return self.value


@dataclass(eq=False)
class Pending(Generic[T]):
    """A handle whose result `finish` makes when it is waited for.

    Args:
        finish: makes the result; all that it needs lives until then.
        sent: the tensor that is read until then, for tests that look for it.
        release: called when a gather's rows have been copied out.
    """

    finish: Callable[[], T]
    sent: Any = None
    release: Callable[[], Any] = lambda: None

    def wait(self) -> T:
        # A handle may outlive its wait, and the tensors that the collective read must not.
        finish, self.finish, self.sent = self.finish, refuse_second_wait, None
        return finish()


def refuse_second_wait(*_: Any) -> Any:
    """Refuse a second wait; it replaces `finish` once a handle has returned its result."""
    raise CollectiveError("a collective was waited for twice.", fix="keep the first result.")


@contextmanager
def translate_errors(what: Callable[[], str], blame: Callable[[str], str] | None = None) -> Iterator[None]:
    """Turn a transport's RuntimeError into a `CollectiveError` that says where, keeping the cause.

    An error of the device (no memory is left, a kernel failed) is this rank's own, and is raised unchanged.

    Args:
        what: describes the collective.
        blame: turns the transport's words into a cause that names a rank.
    """
    try:
        yield
    except (CollectiveError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CollectiveError(lost(what(), blame(line) if blame else line)) from error


def message_text(likes: Likes, what: str) -> str:
    """Return the text of a message that both ends must agree on."""
    return f"{what}: " + ", ".join(f"{list(shape)} {dtype}" for shape, dtype in likes)


def likes_of(tensors: Sequence[Tensor]) -> Likes:
    """Return the shapes and dtypes of a message's tensors."""
    return [(tuple(t.shape), t.dtype) for t in tensors]


def describe_message(verb: str, what: str, sender: int, receiver: int) -> str:
    """Describe a message: `recv of micro 1 h from rank 0 to rank 2`."""
    return f"{verb} of {what} from rank {sender} to rank {receiver}"


def collective_text(name: str, count: int, dtype: torch.dtype) -> str:
    """Return the text of a collective that all ranks of a group must agree on."""
    return f"{name} of [{count}] {dtype}"


def check_alike(what: str, kinds: Mapping[int, str]) -> None:
    """Refuse a collective that is not the same on all ranks; `kinds` are their texts by rank."""
    if len(set(kinds.values())) > 1:
        ranks = {kind: [str(r) for r in kinds if kinds[r] == kind] for kind in kinds.values()}
        raise CollectiveError(
            f"{what}: ranks issued different collectives or sizes.",
            [f"rank {', '.join(members)}: {kind}" for kind, members in ranks.items()],
            f"{DUTY} Their programs and specs must be alike too.",
        )


def disconnect(closed: Collectives) -> None:
    """Forget a closed connection, so that the next step on the mesh connects anew."""
    known = closed.mesh.connections
    for key in [k for k, v in known.items() if v is closed]:
        del known[key]


def describe(name: str, mesh: Mesh, axes: Axes) -> str:
    """Describe a collective: `all_gather over (shard) of ranks 0, 1, on rank 1`."""
    ranks = ", ".join(map(str, mesh.group_ranks(axes)))
    return f"{name} over ({', '.join(axes)}) of ranks {ranks}, on rank {mesh.rank}"


def purpose_of(name: str) -> str:
    """Return which group carries a collective of this name: "reduce" for sums, "gather" for all else."""
    return "reduce" if "reduce" in name else "gather"


def drop_axes_of_one(mesh: Mesh, axes: Axes) -> tuple[str, ...]:
    """Return the axes along which there is more than one rank."""
    return tuple(a for a in axes if mesh.axis_size(a) > 1)


def as_bytes(flat: Tensor) -> Tensor:
    """View [k] as uint8 [k * itemsize]: a gather only copies, so that no backend has to know the dtype."""
    return flat.view(torch.uint8)


SUM_CHUNK = 1 << 16  # elements summed at a time, so that partial sums stay in cache


def sum_rows(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Sum at least two flat [k] tensors into `out`, in the order given; half types are added in fp32."""
    half = out.dtype in (torch.bfloat16, torch.float16) and len(parts) > 2  # one addition rounds once anyway
    for low in range(0, out.numel(), SUM_CHUNK):
        first, second, *others = (part[low : low + SUM_CHUNK] for part in parts)
        target = out[low : low + SUM_CHUNK]
        total = first.float().add_(second) if half else torch.add(first, second, out=target)
        for piece in others:
            total += piece
        if half:
            target.copy_(total)
    return out


def all_to_all_at(parts: Sequence[Tensor], place: int) -> Tensor:
    """Return an all-to-all's result at a place of the group, given what each rank sent."""
    return torch.cat(_select_rows(parts, place))


def reduce_scatter_at(parts: Sequence[Tensor], place: int) -> Tensor:
    """Return a reduce-scatter's result at a place of the group."""
    rows = _select_rows(parts, place)
    return sum_rows(rows, torch.empty_like(rows[0]))


def _select_rows(parts: Sequence[Tensor], place: int) -> list[Tensor]:
    """Return the row that each rank sent to a place of the group."""
    count = parts[0].numel() // len(parts)
    return [part[place * count : (place + 1) * count] for part in parts]


def permute_at(parts: Sequence[Tensor], place: int, distance: int) -> Tensor:
    """Return a permute's result at a place of the group."""
    return parts[(place - distance) % len(parts)].clone()


@dataclass(frozen=True)
class Sent:
    """A message whose copies live until its receiver has them, which gloo tells only those who wait."""

    works: Sequence[Any]
    copies: Sequence[Tensor]
    what: str
    receiver: int

    def is_over(self) -> bool:
        """Return, without waiting, whether the copies may be freed."""
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True)
class Group:
    """Collectives of torch.distributed, asynchronous, on sub-groups that are made at their first use.

    Args:
        mesh: the mesh whose axes name the groups.
        timeout: seconds after which a silent peer is an error.
        peer_to_peer: whether gathers and reduce-scatters are sends from rank to rank, since gloo's own
            collectives stage everything in full-size temporaries.
        groups: torch's sub-groups by axes and purpose, see `group`.
        under_way: messages whose receivers may not have them yet.
        name: the same name on all ranks, under which they count their collectives.
    """

    mesh: Mesh
    timeout: float = DEFAULT_TIMEOUT
    peer_to_peer: bool = False
    groups: dict[tuple[tuple[str, ...], str], Any] = field(default_factory=dict, compare=False, repr=False)
    under_way: list[Sent] = field(default_factory=list, compare=False, repr=False)
    name: str = field(default_factory=lambda: f"connection {next(_made)}", compare=False, repr=False)

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        return torch.empty(rows * numel, dtype=dtype, device=self.mesh.device)

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        n = self.mesh.axes_size(axes)

        def start(group: Any, order: Sequence[int]) -> Started:
            if self.peer_to_peer:
                works, rows = self._exchange([flat] * n, axes, group)
                return works, lambda: rows
            out = flat.new_empty(n * flat.numel())
            work = _all_gather(as_bytes(out), as_bytes(flat), group=group, async_op=True)
            rows = out.view(n, -1).unbind(0)
            return [work], lambda: _return_last(flat, [rows[place] for place in order])

        return self._issue("all_gather", axes, [flat], start)

    def gather_blocks(self, blocks: Sequence[Tensor], axes: Axes) -> Handle[list[Tensor]] | None:
        """Gather flat blocks [k_i] of each rank into leaves [n * k_i], in one launch.

        Return None if that is not possible: pack them into one row then.
        """
        if not self._can_run_in_place(axes):
            return None
        out = [b.new_empty(self.mesh.axes_size(axes) * b.numel()) for b in blocks]

        def start(group: Any, _: Sequence[int]) -> Started:
            targets, sent = [as_bytes(t) for t in out], [as_bytes(t) for t in blocks]
            return [group.allgather_into_tensor_coalesced(targets, sent)], lambda: _return_last(blocks, out)

        return self._issue("gather_blocks", axes, out, start)

    def reduce_leaves(self, leaves: Sequence[Tensor], axes: Axes) -> Handle[Tensor] | None:
        """Sum flat leaves [n * k_i] into one row of this rank's blocks of the sums, in one launch.

        Return None if that is not possible: pack them into rows then.
        """
        if not self._can_run_in_place(axes):
            return None
        sizes = [leaf.numel() // self.mesh.axes_size(axes) for leaf in leaves]
        out = leaves[0].new_empty(sum(sizes))

        def start(group: Any, _: Sequence[int]) -> Started:
            parts = list(out.split(sizes))
            return [group.reduce_scatter_tensor_coalesced(parts, leaves)], lambda: _return_last(leaves, out)

        return self._issue("reduce_leaves", axes, out, start)

    def _can_run_in_place(self, axes: Axes) -> bool:
        """Return whether torch's own collectives serve a group: its ranks must ascend along the axes."""
        ranks = self.mesh.group_ranks(axes)
        return len(ranks) > 1 and not self.peer_to_peer and list(ranks) == sorted(ranks)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        n = self.mesh.axes_size(axes)

        def start(group: Any, order: Sequence[int]) -> Started:
            if self.peer_to_peer:
                works, parts = self._exchange(rows.view(n, -1).unbind(0), axes, group)
                return works, lambda: sum_rows(parts, torch.empty_like(parts[0]))
            # torch's group is in the order of the ranks' numbers, and rows are in that of the axes.
            sent = _permute_rows(rows, _invert(order))
            out = rows.new_empty(rows.numel() // n)
            work = _reduce_scatter(out, sent, group=group, async_op=True)
            return [work], lambda: _return_last(sent, out)

        return self._issue("reduce_scatter", axes, rows, start)

    def all_to_all(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        def start(group: Any, order: Sequence[int]) -> Started:
            sent, out = _permute_rows(rows, _invert(order)), torch.empty_like(rows)
            work = dist.all_to_all_single(as_bytes(out), as_bytes(sent), group=group, async_op=True)
            return [work], lambda: _return_last(sent, _permute_rows(out, order))

        return self._issue("all_to_all", axes, rows, start)

    def permute(self, flat: Tensor, axes: Axes, distance: int) -> Handle[Tensor]:
        n, here = self.mesh.axes_size(axes), self.mesh.group_ranks(axes).index(self.mesh.rank)

        def start(group: Any, order: Sequence[int]) -> Started:
            # An all-to-all in which each rank has bytes for one rank alone, and gets some of one rank alone.
            sent, out = as_bytes(flat), torch.empty_like(flat)
            sent_sizes, got_sizes = [0] * n, [0] * n
            sent_sizes[order[(here + distance) % n]] = len(sent)
            got_sizes[order[(here - distance) % n]] = len(sent)
            work = dist.all_to_all_single(
                as_bytes(out), sent, got_sizes, sent_sizes, group=group, async_op=True
            )
            return [work], lambda: _return_last(flat, out)

        return self._issue("permute", axes, flat, start) if distance % n else Done(flat)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        def start(group: Any, _: Sequence[int]) -> Started:
            return [dist.all_reduce(flat, group=group, async_op=True)], lambda: flat

        return self._issue("all_reduce", axes, flat, start)

    def send(self, tensors: Sequence[Tensor], rank: int, what: str) -> Handle[None]:
        here = self.mesh.rank
        # The copies let the sender go on, on a stream too. Without them two stages that send to each other
        # would each wait for the other to receive: a deadlock.
        copies = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        # Free the copies of messages that have arrived.
        self.under_way[:] = [sent for sent in self.under_way if not sent.is_over()]
        text = describe_message("send", what, here, rank)
        with translate_errors(lambda: text, partial(_blame, [rank])):
            group = self._find_direction_group(here, rank)
            flat = [as_bytes(t.view(-1)) for t in copies if t.numel()]
            works = [dist.isend(t, rank, group=group, tag=MESSAGE_TAG) for t in flat]
        self._count(here, rank, "sent")
        self.under_way.append(Sent(works, copies, text, rank))
        return Done(None)

    def recv(self, likes: Likes, rank: int, what: str) -> Handle[list[Tensor]]:
        # Post the receives, tensor by tensor, in the order of the sends.
        here = self.mesh.rank
        out = [torch.empty(shape, dtype=dtype, device=self.mesh.device) for shape, dtype in likes]
        text = describe_message("recv", what, rank, here)
        blame = partial(_blame, [rank])
        with translate_errors(lambda: text, blame):
            group = self._find_direction_group(rank, here)
            flat = [as_bytes(t.view(-1)) for t in out if t.numel()]
            works = [dist.irecv(t, rank, group=group, tag=MESSAGE_TAG) for t in flat]

        # Count the message, so that a wait for it can name a sender that is late.
        channel, number = self._count(rank, here, "received", "sent")
        wait = self._make_wait(works, RankStatus("", "", channel, number, [rank]), lambda: text)

        def finish() -> list[Tensor]:
            with translate_errors(lambda: text, blame):
                wait()
            return out

        return Pending(finish)

    def flush(self) -> None:
        for sent in self.under_way:
            # Until the receiver has counted the last message of the pair, it is the receiver that is late.
            channel = self._name_channel(self.mesh.rank, sent.receiver, "received")
            count = peers().counts.get(self._name_channel(self.mesh.rank, sent.receiver, "sent"), 0)
            number = count - 1
            status = RankStatus("", "", channel, number, [sent.receiver])
            wait = self._make_wait(sent.works, status, lambda sent=sent: sent.what)
            with translate_errors(lambda sent=sent: sent.what, partial(_blame, [sent.receiver])):
                wait()
        self.under_way.clear()

    def open_groups(self, groups: Iterable[Axes], pairs: Iterable[tuple[int, int]] = ()) -> None:
        # Make them in one order on all ranks.
        for axes in sorted({tuple(axes) for axes in groups if self.mesh.axes_size(axes) > 1}):
            for purpose in ("gather", "reduce"):
                self.group(axes, purpose)
        if self.mesh.stages > 1:
            for direction in ("up", "down"):
                self.group((PIPELINE,), direction)
        if self.mesh.device_type == "cpu":
            return
        # NCCL connects a pair at its first message, for which both ends wait. Connect all pairs here, in one
        # order, so that no two of them wait for each other.
        for sender, receiver in sorted(pairs):
            word = torch.zeros(1, device=self.mesh.device)
            if self.mesh.stage == sender:
                self.send([word], self.mesh.partner(receiver), "the first message")
            elif self.mesh.stage == receiver:
                self.recv(likes_of([word]), self.mesh.partner(sender), "the first message").wait()

    def _find_direction_group(self, sender: int, receiver: int) -> Any:
        """Return the group that carries messages in this direction.

        NCCL runs the messages of a group one after another, so that in a single group a send and a receive of
        a pair would wait for each other.
        """
        return self.group((PIPELINE,), "up" if sender < receiver else "down")[0]

    def _name_channel(self, sender: int, receiver: int, what: str) -> str:
        """Name the count of a pair's messages at one end, by which other ranks see who is late."""
        return f"{self.name} {sender}>{receiver} {what}"

    def _count(self, sender: int, receiver: int, mine: str, peer: str = "") -> tuple[str, int]:
        """Count a message at this end; return the channel in which the peer counts it, and its number."""
        counts, channel = peers().counts, self._name_channel(sender, receiver, mine)
        counts[channel] = number = counts.get(channel, 0) + 1
        return self._name_channel(sender, receiver, peer), number - 1

    def _make_wait(
        self, works: Sequence[Any], status: RankStatus, what: Callable[[], str]
    ) -> Callable[[], None]:
        """Return a function that waits for works: on the CPU this rank waits, else the device's stream."""

        def wait() -> None:
            for work in works:
                work.wait()

        if self.mesh.device_type != "cpu":
            return wait
        return partial(peers().run, wait, status, self.timeout, what)

    def _exchange(self, sent: Sequence[Tensor], axes: Axes, group: Any) -> tuple[list[Any], list[Tensor]]:
        """Send `sent[j]` to the j-th rank of the group; return the works, and what each rank sent here."""
        # All sends and receives are issued before any is waited for: two ranks that first waited for their
        # sends would wait for each other.
        works, got = [], list(sent)
        for place, peer in enumerate(self.mesh.group_ranks(axes)):
            if peer != self.mesh.rank:
                got[place] = torch.empty_like(sent[place])
                works.append(dist.isend(as_bytes(sent[place]), peer, group=group))
                works.append(dist.irecv(as_bytes(got[place]), peer, group=group))
        return works, got

    def _issue(
        self, name: str, axes: Axes, alone: Any, start: Callable[[Any, Sequence[int]], Started]
    ) -> Handle[Any]:
        """Start a collective on the sub-group of its axes; `alone` is the result in a group of one."""
        if self.mesh.axes_size(axes) == 1:
            return Done(alone)
        ranks, what = self.mesh.group_ranks(axes), partial(describe, name, self.mesh, axes)
        blame = partial(_blame, ranks)
        with translate_errors(what, blame):
            works, take = start(*self.group(axes, purpose_of(name)))

        # Count it, so that a rank that waits can name the one that has not reached it.
        counts, channel = peers().counts, f"{self.name} {','.join(axes)}"
        counts[channel] = number = counts.get(channel, 0) + 1
        wait = self._make_wait(works, RankStatus("", "", channel, number - 1, ranks), what)

        def finish() -> Any:
            with translate_errors(what, blame):
                wait()
                return take()

        return Pending(finish)

    def gather_object(self, text: str) -> list[str]:
        if self.mesh.size == 1:
            return [text]
        return [t.decode() for t in peers().exchange("host", text.encode(), self.timeout)]

    def transport_bytes(self) -> int:
        return 0

    def close(self) -> None:
        disconnect(self)
        # A program may destroy its process group first, and the sub-groups with it.
        groups = list(self.groups.values())
        self.groups.clear()
        if dist.is_initialized():
            for group, _ in groups:
                dist.destroy_process_group(group)

    def group(self, axes: Axes, purpose: str) -> tuple[Any, tuple[int, ...]]:
        """Return the sub-group over `axes` and, for each place of `mesh.group_ranks(axes)`, its place there.

        It is made at its first use, by all ranks of the mesh at once: a rank also makes the groups that it is
        not in. torch sorts the ranks of a group, hence the second value.

        Args:
            purpose: the result of `purpose_of`, or the direction of messages. With NCCL each has a group, and
                so a communicator and a stream of its own: a gather does not wait for a reduction. With gloo
                all share one group.
        """
        backend = dist.get_default_backend_for_device(self.mesh.device_type)
        axes = tuple(axes)
        key = (axes, "all" if backend == "gloo" else purpose)
        if key not in self.groups:
            # Each rank names the ranks of all groups along these axes, in one order.
            every = sorted({tuple(sorted(self.mesh.group_ranks(axes, r))) for r in range(self.mesh.size)})
            peers().exchange("groups", b"", self.timeout)  # it names a missing rank, which torch does not

            slack = SLACK_S if backend == "gloo" else 0.0  # `PeerWait` ends earlier, and says why
            timeout = datetime.timedelta(seconds=self.timeout + slack)
            options = None
            if backend == "nccl":  # so that kernels which fill the device do not hold communication up
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                options._timeout = timeout  # one that differs from `timeout=` makes torch warn for each group
            group, _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in every], timeout=timeout, backend=backend, pg_options=options
            )
            here = self.mesh.group_ranks(axes)
            self.groups[key] = group, tuple(sorted(here).index(rank) for rank in here)
        return self.groups[key]


def _blame(ranks: Sequence[int], line: str) -> str:
    """Return the cause of a failure with the ranks that are gone; torch says only that a connection broke.

    Args:
        line: torch's own words, which are the cause if no rank is gone.
    """
    until = time.monotonic() + GONE_S
    while not (gone := peers().gone(ranks)) and time.monotonic() < until:
        time.sleep(0.05)
    return f"{ranks_text(gone)} has left" if gone else line


def _return_last(*values: Any) -> Any:
    """Return the last value; a lambda that calls this holds the others until it is called itself."""
    return values[-1]


def _invert(order: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    return [order.index(place) for place in range(len(order))]


def _permute_rows(rows: Tensor, order: Sequence[int]) -> Tensor:
    """Return [n * k] whose j-th row is row `order[j]` of `rows`, or `rows` itself if no row moves."""
    if list(order) == sorted(order):
        return rows
    return rows.view(len(order), -1)[list(order)].view(-1)
