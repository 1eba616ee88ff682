"""Simulated ranks: N threads of one process that run the same user code as real ranks.

    mesh = make_mesh(shard=4, simulated=True)
    results = simulate(mesh, lambda rank: ...)        # one result per rank

Ranks take turns: a thread runs until it waits for a peer. So the code between two collectives is never
interleaved, and tracing or compiling in a rank is safe. Sums run in rank order (half types in fp32), so that
results are deterministic and bit-identical on all ranks.

`adversary` reveals schedules that touch a buffer when they must not, which on a GPU would give rare wrong
numbers. Inputs are read at issue ("early") or when the sender waits ("late"); send buffers, reductions in
flight and released rows are filled with NaN. A right schedule gives the same bits in all modes.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh, check_mesh, simulated_rank
from fnshard.mesh.deadlock import lost
from fnshard.runtime.collectives.base import (
    Axes,
    Done,
    Handle,
    Likes,
    Pending,
    all_to_all_at,
    check_alike,
    collective_text,
    describe,
    describe_message,
    drop_axes_of_one,
    likes_of,
    message_text,
    permute_at,
    reduce_scatter_at,
    sum_rows,
)

__all__ = ["simulate"]

T = TypeVar("T")
Adversary = Literal["early", "late"] | None

_thread = threading.local()  # .session: the `simulate` call that this thread is a rank of


def simulate(
    mesh: Mesh, fn: Callable[..., Any], *args: Any, adversary: Adversary = None, timeout: float = 300.0
) -> list[Any]:
    """Run `fn(rank, *args)` on every rank of a simulated mesh, and return their results by rank.

    Args:
        adversary: None, "early" or "late": when inputs are read, see the module.
        timeout: seconds after which it is an error that no rank came to a collective or ended.

    Raises:
        The first exception that any rank raised; the others are stopped at their next collective.
        CollectiveError: a rank waits for one that has returned, ranks issue different collectives,
            or nothing happened for `timeout` seconds.

    >>> from fnshard.mesh import make_mesh
    >>> from fnshard.runtime.collectives.connect import connect
    >>> mesh = make_mesh(shard=2, simulated=True)
    >>> def total(rank):
    ...     return connect(mesh).all_reduce(torch.tensor([float(rank)]), ("shard",)).wait().item()
    >>> simulate(mesh, total)
    [1.0, 1.0]
    """
    check_mesh(mesh)
    if mesh.kind != "simulated":
        raise CollectiveError(
            f"mesh {mesh} is {mesh.kind}, not simulated.", fix="make_mesh(..., simulated=True)."
        )
    if adversary not in (None, "early", "late"):
        raise CollectiveError(f"adversary={adversary!r}: one of None, 'early', 'late'.")

    # Each rank is a thread with the caller's context and its grad mode.
    session = _Session(mesh.size, adversary, timeout)
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        with session.running(rank), simulated_rank(rank), torch.set_grad_enabled(grad):
            session.results[rank] = fn(rank, *args)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(run, rank), name=f"rank-{rank}", daemon=True
        )
        for rank in range(mesh.size)
    ]
    # In torch 2.11 built for CUDA, on a machine without it, the device guard that a process's first mode
    # registers dies with its thread, and the next mode reads it. So the first one is entered in this thread.
    with FakeTensorMode():
        pass

    for thread in threads:
        thread.start()
    session.watch(threads)
    if session.failure is not None:
        raise session.failure
    return [session.results[rank] for rank in range(mesh.size)]


@dataclass
class _Session:
    """A `simulate` call, in which its ranks meet. The one rank that runs holds the `turn`."""

    size: int
    adversary: Adversary
    timeout: float
    turn: threading.Condition = field(default_factory=threading.Condition)
    counts: dict[Hashable, int] = field(default_factory=dict)  # how often each rank exchanged in each group
    # Exchanges that not all of their ranks have issued, and messages that were not received yet.
    exchanges: dict[Hashable, dict[int, _Post]] = field(default_factory=dict)
    messages: dict[Hashable, _Post] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    failure: BaseException | None = None
    last_progress: float = field(default_factory=time.monotonic)

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """Run the block as `rank` in this thread, which has its turn until it waits or ends."""
        _thread.session = self
        with self.turn:
            try:
                yield
            except BaseException as error:
                self.fail(error)
            finally:
                self.gone.add(rank)
                self.announce()

    def watch(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for all ranks, and give up on those that neither end nor come to a collective."""
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(0.2)
            if time.monotonic() - self.last_progress > self.timeout + 1.0:
                stuck = ", ".join(t.name for t in threads if t.is_alive())
                text = f"nothing happened for {self.timeout:g} s; still running: {stuck}"
                self.fail(CollectiveError(lost("simulate", text)))
                return

    def fail(self, error: BaseException) -> None:
        """Note the first error, which stops all ranks at their next collective."""
        if self.failure is None:
            self.failure = error

    def announce(self) -> None:
        """Let ranks that wait look again, since something has changed."""
        self.last_progress = time.monotonic()
        self.turn.notify_all()

    def join(self, group: tuple[Any, ...], rank: int, post: _Post) -> dict[int, _Post]:
        """Add a rank's next post in a group, and return the posts of that number by rank.

        Other ranks add theirs to the same dict. The last entry of `group` is its ranks.
        """
        number = self.counts[group, rank] = self.counts.get((group, rank), 0) + 1
        posts = self.exchanges.setdefault((group, number), {})
        posts[rank] = post
        if len(posts) == len(group[-1]):
            # All ranks have the dict by now, and need no name for it.
            del self.exchanges[group, number]
        self.announce()
        return posts

    def wait(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        """Let other ranks have their turn until `ready()`."""
        in_time = self.turn.wait_for(
            lambda: ready() or self.failure is not None or peer in self.gone, self.timeout
        )
        if self.failure is not None:
            raise CollectiveError(lost(what, f"another rank raised {self.failure!r}"))
        if not ready():
            cause = "has returned" if in_time else f"did not come within {self.timeout:g} s"
            raise CollectiveError(lost(what, f"rank {peer} {cause}"))


@dataclass
class _Post:
    """A rank's contribution to an exchange, with a copy of its input once that was read."""

    kind: str
    value: Any = None


@dataclass(frozen=True)
class Simulated:
    """Collectives between the threads of one `simulate`. They have no state, and may be shared and reused."""

    mesh: Mesh

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        out = torch.empty(rows * numel, dtype=dtype, device=self.mesh.device)
        if self._adversary:
            poison(out)
        return out

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        if self.mesh.axes_size(axes) == 1:
            return Done([flat])
        # With an adversary each rank gets copies of its own, which are poisoned once they are released.
        rows: list[Tensor] = []

        def make(parts: list[Tensor], here: int) -> list[Tensor]:
            rows.extend(part.clone() for part in parts if self._adversary)
            return rows or parts

        return self._exchange("all_gather", flat, axes, make, lambda: [*map(poison, rows)])

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        return self._exchange("reduce_scatter", rows, axes, reduce_scatter_at)

    def all_to_all(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        return self._exchange("all_to_all", rows, axes, all_to_all_at)

    def permute(self, flat: Tensor, axes: Axes, distance: int) -> Handle[Tensor]:
        return self._exchange("permute", flat, axes, partial(permute_at, distance=distance))

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        # The result is `flat` itself. An early adversary has read it by now, and whoever reads it before the
        # wait finds poison.
        handle = self._exchange("all_reduce", flat, axes, lambda parts, here: sum_rows(parts, flat))
        if self._adversary == "early" and not isinstance(handle, Done):
            poison(flat)
        return handle

    def send(self, tensors: Sequence[Tensor], rank: int, what: str) -> Handle[None]:
        # An adversary does nothing here: a send copies its tensors at once.
        session, name = self._find_session(), self._name_message("send", self.mesh.rank, rank)
        copies = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        session.messages[name] = _Post(message_text(likes_of(tensors), what), copies)
        session.announce()
        return Done(None)

    def recv(self, likes: Likes, rank: int, what: str) -> Handle[list[Tensor]]:
        session, here = self._find_session(), self.mesh.rank
        name, text = self._name_message("recv", rank, here), describe_message("recv", what, rank, here)

        def finish() -> list[Tensor]:
            session.wait(lambda: name in session.messages, rank, text)
            post = session.messages[name]
            check_alike(text, {rank: post.kind, here: message_text(likes, what)})
            return session.messages.pop(name).value

        return Pending(finish)

    def _name_message(self, end: str, sender: int, receiver: int) -> Hashable:
        """Name the next message from one rank to another, as its sender or its receiver counts it."""
        counts, pair = self._find_session().counts, (self.mesh.names, self.mesh.sizes, sender, receiver)
        number = counts[end, pair] = counts.get((end, pair), 0) + 1
        return pair, number

    def flush(self) -> None:
        pass

    def open_groups(self, groups: Iterable[Axes], pairs: Iterable[tuple[int, int]] = ()) -> None:
        pass

    def gather_object(self, text: str) -> list[str]:
        if self.mesh.size == 1:
            return [text]
        return self._exchange("gather_object", text, self.mesh.names, lambda texts, here: texts).wait()

    def transport_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

    @property
    def _adversary(self) -> Adversary:
        session = getattr(_thread, "session", None)
        return None if session is None else session.adversary

    def _exchange(
        self, name: str, sent: Any, axes: Axes, make: Callable[[list[Any], int], Any],
        release: Callable[[], Any] = lambda: None,
    ) -> Handle[Any]:  # fmt: skip
        """Return `make(what each rank has sent, this one's place in the group)` when it is waited for."""
        if self.mesh.axes_size(axes) == 1:
            return Done(sent)
        # Describe what this rank issues, so that ranks can see whether they have issued the same.
        session, is_text = self._find_session(), isinstance(sent, str)
        named = drop_axes_of_one(self.mesh, axes)
        ranks, here = self.mesh.group_ranks(named), self.mesh.rank
        what = describe(name, self.mesh, named)
        post = _Post(name if is_text else collective_text(name, sent.numel(), sent.dtype))

        def read() -> None:
            post.value = sent if is_text else sent.detach().clone()
            session.announce()

        def finish() -> Any:
            # All ranks must have issued the same, and have read their inputs, which late ones do here.
            if is_late:
                read()
            for rank in ranks:
                session.wait(lambda rank=rank: rank in posts, rank, what)
            check_alike(what, {rank: posts[rank].kind for rank in ranks})
            for rank in ranks:
                session.wait(lambda rank=rank: posts[rank].value is not None, rank, what)
            return make([posts[rank].value for rank in ranks], ranks.index(here))

        is_late = session.adversary == "late"
        if not is_late:
            read()
        posts = session.join((self.mesh.names, self.mesh.sizes, named, ranks), here, post)
        return Pending(finish, sent, release)

    def _find_session(self) -> _Session:
        """Return the `simulate` call that this thread is a rank of, unless it has failed."""
        session = getattr(_thread, "session", None)
        if session is None or session.size != self.mesh.size:
            raise CollectiveError(
                f"the ranks of mesh {self.mesh} are simulated, and this thread is none of them.",
                fix="run the code under simulate(mesh, fn), with this mesh.",
            )
        if session.failure is not None:
            raise CollectiveError(lost("simulate", f"another rank raised {session.failure!r}"))
        return session


def poison(flat: Tensor) -> None:
    """Fill a tensor with numbers that nobody should read: NaN, the largest integer, or True."""
    if flat.dtype.is_floating_point:
        flat.fill_(float("nan"))
    else:
        flat.fill_(True if flat.dtype == torch.bool else torch.iinfo(flat.dtype).max)
