"""Simulated ranks: N threads of one process, the same user code as on real ones.

    mesh = make_mesh(shard=4, simulated=True)
    results = simulate(mesh, lambda rank: ...)        # one result per rank

Ranks take turns: a thread runs until it waits for a peer. So what lies between two collectives is
never interleaved, and tracing or compiling in a rank is safe. Sums run in rank order (half types
in fp32), so that results are deterministic and bit-identical on all ranks.

`adversary` shows schedules that touch a buffer they should not, which a GPU would show as rare wrong
numbers. Inputs are read at issue ("early") or when the sender waits ("late"); send buffers, reductions
in flight and released rows are filled with NaN. A right schedule gives the same bits in all modes.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fnshard.errors import CollectiveError, report
from fnshard.mesh import Mesh, simulated_rank
from fnshard.runtime.collectives import Axes, Done, Handle, describe, empty, lost, sum_rows

Adversary = Literal["early", "late"] | None

_thread = threading.local()  # .session: the `simulate` call that this thread is a rank of


def simulate(
    mesh: Mesh,
    fn: Callable[..., Any],
    *args: Any,
    adversary: Adversary = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Run `fn(rank, *args)` on every rank of a simulated mesh; their results, by rank.

    Args:
        adversary: None, "early" or "late": when inputs are read, see the module.
        timeout: seconds without any rank coming to a collective or its end before it is an error.

    Raises:
        The first exception that any rank raised; the others are stopped at their next collective.
        CollectiveError: a rank waits for one that has returned, ranks issue different collectives,
            or nothing happened for `timeout` seconds.

    >>> from fnshard.mesh import make_mesh
    >>> from fnshard.runtime.connect import connect
    >>> mesh = make_mesh(shard=2, simulated=True)
    >>> def total(rank):
    ...     return connect(mesh).all_reduce(torch.tensor([float(rank)]), ("shard",)).wait().item()
    >>> simulate(mesh, total)
    [1.0, 1.0]
    """
    if mesh.kind != "simulated":
        raise CollectiveError(
            report(f"mesh {mesh} is {mesh.kind}, not simulated.", fix="make_mesh(..., simulated=True).")
        )
    if adversary not in (None, "early", "late"):
        raise CollectiveError(f"adversary={adversary!r}: one of None, 'early', 'late'.")
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
    for thread in threads:
        thread.start()
    session.watch(threads)
    if session.failure is not None:
        raise session.failure
    return [session.results[rank] for rank in range(mesh.size)]


@dataclass
class _Session:
    """One `simulate` call: where its ranks meet. `turn` is held by the one rank that runs."""

    size: int
    adversary: Adversary
    timeout: float
    turn: threading.Condition = field(default_factory=threading.Condition)
    posts: dict[tuple[Any, ...], dict[int, tuple[str, Any]]] = field(default_factory=dict)
    taken: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    results: dict[int, Any] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    failure: BaseException | None = None
    seen: float = field(default_factory=time.monotonic)

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """This thread is `rank` and has its turn, until it waits or ends."""
        _thread.session = self
        with self.turn:
            try:
                yield
            except BaseException as error:
                self.fail(error)
            finally:
                self.gone.add(rank)
                self.news()

    def watch(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for all ranks; give up on those that neither end nor come to a collective."""
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(0.2)
            if time.monotonic() - self.seen > self.timeout + 1.0:
                stuck = ", ".join(t.name for t in threads if t.is_alive())
                text = f"nothing happened for {self.timeout:g} s; still running: {stuck}"
                self.fail(CollectiveError(lost("simulate", text)))
                return

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error

    def news(self) -> None:
        self.seen = time.monotonic()
        self.turn.notify_all()

    def ticket(self, ranks: tuple[int, ...], rank: int) -> tuple[Any, ...]:
        """The name of this rank's next collective in a group: (ranks, how many went before)."""
        self.counts[ranks, rank] += 1
        return ranks, self.counts[ranks, rank]

    def post(self, ticket: tuple[Any, ...], rank: int, kind: str, value: Any) -> None:
        self.posts.setdefault(ticket, {})[rank] = kind, value
        self.news()

    def collect(self, ticket: tuple[Any, ...], rank: int, what: str) -> list[Any]:
        """What all ranks of the group posted under `ticket`, in group order."""
        ranks, posted = ticket[0], self.posts[ticket]

        def settled() -> bool:
            return len(posted) == len(ranks) or self.failure is not None or bool(missing() & self.gone)

        def missing() -> set[int]:
            return set(ranks) - set(posted)

        self.turn.wait_for(settled, self.timeout)
        if self.failure is not None:
            raise CollectiveError(lost(what, f"another rank raised {self.failure!r}"))
        if missing():
            verb = "returned" if missing() & self.gone else f"silent for {self.timeout:g} s"
            raise CollectiveError(lost(what, f"rank {', '.join(map(str, sorted(missing())))}: {verb}"))
        kinds = {r: posted[r][0] for r in ranks}
        if len(set(kinds.values())) > 1:
            shown = [f"rank {r}: {kind}" for r, kind in kinds.items()]
            raise CollectiveError(report(f"{what}: ranks issued different collectives:", shown))
        self.taken[ticket] += 1
        if self.taken[ticket] == len(ranks):  # the last one to read clears the table
            del self.posts[ticket], self.taken[ticket]
        return [posted[r][1] for r in ranks]


@dataclass(frozen=True)
class Simulated:
    """Collectives between the threads of one `simulate`. Has no state: may be shared and reused."""

    mesh: Mesh

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        out = empty(self.mesh, rows * numel, dtype)
        if getattr(_thread, "session", None) is not None and _thread.session.adversary:
            poison(out)
        return out

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        if self.mesh.axes_size(axes) == 1:
            return Done([flat])
        return self._issue("all_gather", flat, axes, list)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        n = self.mesh.axes_size(axes)
        if n == 1:
            return Done(rows)
        here = self.mesh.group_ranks(axes).index(self.mesh.rank)

        def combine(got: list[Tensor]) -> Tensor:
            mine = [each.view(n, -1)[here] for each in got]
            return sum_rows(mine, torch.empty_like(mine[0]))

        return self._issue("reduce_scatter", rows, axes, combine)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        if self.mesh.axes_size(axes) == 1:
            return Done(flat)
        handle = self._issue("all_reduce", flat, axes, lambda got: sum_rows(got, flat))
        if self._session().adversary == "early":
            poison(flat)
        return handle

    def gather_object(self, text: str) -> list[str]:
        session = self._session()
        ticket = session.ticket(tuple(range(self.mesh.size)), self.mesh.rank)
        session.post(ticket, self.mesh.rank, "gather_object", text)
        return session.collect(ticket, self.mesh.rank, describe("gather_object", self.mesh, self.mesh.names))

    def barrier(self) -> None:
        self.gather_object("")

    def transport_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def _issue(
        self, name: str, sent: Tensor, axes: Axes, combine: Callable[[list[Tensor]], Any]
    ) -> _Exchange:
        session = self._session()
        ticket = session.ticket(self.mesh.group_ranks(axes), self.mesh.rank)
        kind = f"{name} over ({', '.join(axes)}) of {list(sent.shape)} {sent.dtype}"
        exchange = _Exchange(
            session, ticket, self.mesh.rank, kind, sent, combine, describe(name, self.mesh, axes)
        )
        if session.adversary != "late":
            exchange.publish()
        return exchange

    def _session(self) -> _Session:
        session = getattr(_thread, "session", None)
        if session is None or session.size != self.mesh.size:
            raise CollectiveError(
                report(
                    f"the ranks of mesh {self.mesh} are simulated, and this thread is none of them.",
                    fix="run the code under simulate(mesh, fn), with this mesh.",
                )
            )
        return session


@dataclass
class _Exchange:
    """One rank's part in one collective."""

    session: _Session
    ticket: tuple[Any, ...]
    rank: int
    kind: str
    sent: Tensor
    combine: Callable[[list[Tensor]], Any]
    what: str
    published: bool = False
    rows: list[Tensor] = field(default_factory=list)

    def publish(self) -> None:
        self.session.post(self.ticket, self.rank, self.kind, self.sent.detach().clone())
        self.published = True

    def wait(self) -> Any:
        # The sender may reuse its buffer once it has waited, so a late read is at the sender's Wait.
        if not self.published:
            self.publish()
        got = self.session.collect(self.ticket, self.rank, self.what)
        if self.combine is list and self.session.adversary:
            self.rows = got = [row.clone() for row in got]
        return self.combine(got)

    def release(self) -> None:
        for row in self.rows:
            poison(row)
        self.rows = []


def poison(flat: Tensor) -> None:
    """NaN, or the largest integer, or True: what nobody should read."""
    if flat.dtype.is_floating_point:
        flat.fill_(float("nan"))
    else:
        flat.fill_(True if flat.dtype == torch.bool else torch.iinfo(flat.dtype).max)
