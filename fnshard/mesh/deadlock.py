"""Notice ranks that wait in vain: each shows the others what it waits for, in the store they met at.

Whatever ranks exchange on their hosts goes through that store (`Peers.exchange`), so that no rank issues a
collective to which another may never come. A rank that has waited for LOOK_S writes there in which call it
waits, and how many messages of each channel it has reached. A rank that ends signs off. So a rank that waits
for one that has ended, or for one that waits for it in turn, learns this at its next look, and says which
ranks called what. This is exact: what a rank shows stays true until it has what it waits for. A rank that
shows nothing is at work, and the others wait for it until the timeout.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fnshard.errors import CollectiveError, report

DEFAULT_TIMEOUT = 600.0  # seconds: a peer may be compiling its first step
LOOK_S = 1.0  # how often a rank that waits looks at the others
ROLL_S = 2.0  # ranks that wait for the same silent rank time out within this interval
STOP_S = 5.0  # how long a rank that was asked to end waits for peers that are idle
PIECE = 4 << 20  # bytes of a piece of a message: a TCPStore hangs up on 8 MiB at once
BUSY = 0.05  # a process that uses more of a CPU than this is at work
LEAVE = "the end of its program"
DUTY = "all ranks make the same calls in the same order: none of them below `if rank == 0:`."
LOCKSTEP = "Where batches ran out on some ranks: `for batch in fs.lockstep(loader, step)`."
NOT_USERS = {*sys.stdlib_module_names, "torch", "optree", "numpy"} - {"__main__"}
Missing = Callable[[], list[int]]  # the ranks that have not come yet
_group_numbers = itertools.count()


def lost(what: object, cause: str) -> str:
    """Describe a collective that failed because of a peer, as the text of a `CollectiveError`."""
    return report(
        f"{what}: a peer died, left, or did not answer in time.",
        [cause],
        "look at the rank that failed first, its own error is the cause; if all live, raise the timeout.",
    )


def ranks_text(ranks: Collection[int]) -> str:
    """Name some ranks: `rank 1, 3`."""
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def caller() -> tuple[str, str]:
    """Return the library's function that this thread is in, as its user calls it, and the call's line."""
    # Walk outwards. The last frame of the library before one of the user's is the call that the user wrote.
    frame, call = sys._getframe(1), ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("fnshard.") and module != __name__:
            call = _name_call(module.split(".")[1], frame.f_code.co_qualname.partition(".<locals>")[0])
        elif call and module.partition(".")[0] not in {*NOT_USERS, "fnshard"}:
            return call, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return call, ""


def _name_call(package: str, name: str) -> str:
    """Name a function as a user writes it: `fs.shard`, `step`, `checkpoint.save`."""
    name = name.replace("Step.__call__", "step").replace("Forward.__call__", "shard_forward")
    is_method = name[:1].isupper() or name in ("step", "shard_forward")
    named = f"fs.{name}" if name in sys.modules["fnshard"].__all__ else f"{package}.{name}"
    return name if is_method else named


def host() -> str:
    """Return a text that is equal for processes that see each other's `/proc`: same boot, same namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def process_stat(pid: int) -> list[str]:
    """Return Linux's fields of a process of this host, from its state (a letter) on; ["X"] if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name before the state is in parentheses, and may itself contain spaces and parentheses.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["X"]


@dataclass(frozen=True)
class RankStatus:
    """A description of where a rank is: it waits in a call, or has ended.

    Args:
        call, line: the call and line of the program; or "has ended", and its exception.
        channel, number, ranks: the message that it waits for, and the ranks that have to reach it.
        counts: how many messages of each channel it has reached.
        ended: whether it has ended.
    """

    call: str
    line: str = ""
    channel: str = ""
    number: int = -1
    ranks: Collection[int] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.call} ({self.line})" if self.line else self.call


def stuck(statuses: Mapping[int, RankStatus | None]) -> set[int]:
    """Find the ranks that have ended, and those that wait for one that will never come.

    A rank whose status is None is at work.

    >>> save, ended = RankStatus("save", "", "a", 0, (0, 1), {"a": 1}), RankStatus("has ended", ended=True)
    >>> stuck({0: save, 1: None}), stuck({0: save, 1: ended})
    (set(), {0, 1})
    """
    # Ranks at work are free. So is a rank that waits for free ranks alone, since these may still come. When
    # no more ranks become free, the others wait for each other, or for a rank that has ended.
    free = {rank for rank, status in statuses.items() if status is None}

    def is_held_up(status: RankStatus) -> bool:
        others = (statuses[r] for r in status.ranks if r not in free and r in statuses)
        return status.ended or any(other.counts.get(status.channel, 0) <= status.number for other in others)

    while more := {r for r, status in statuses.items() if r not in free and not is_held_up(status)}:
        free |= more
    return {*statuses} - free


def explain(rank: int, statuses: Mapping[int, RankStatus]) -> CollectiveError:
    """Make the error of a rank that would wait in vain, which says what each rank called."""
    # A rank that failed is the cause of all else.
    failed = [f"rank {r} {s}" for r, s in statuses.items() if s.ended and s.line]
    if failed:
        return CollectiveError(lost(statuses[rank], "; ".join(failed)))

    # Otherwise name a call that some ranks wait in, if possible this rank's own, and who made it.
    calls = {r: s.call for r, s in sorted(statuses.items())}
    known = (statuses[rank], *statuses.values())
    call = next((p.call for p in known if p.call != LEAVE and not p.ended), LEAVE)
    if len({*calls.values()}) > 1:
        head = f"only {ranks_text([r for r in calls if calls[r] == call])} called {call}."
    else:
        head = f"ranks wait for each other in {call}."
    fix = f"{DUTY} {LOCKSTEP}" if "step" in calls.values() else DUTY
    return CollectiveError(head, [f"rank {r}: {statuses[r]}" for r in calls], fix)


@dataclass(eq=False)
class Peers:
    """A view of the ranks of the default process group from one of them.

    Args:
        store: the store that ranks met at.
        rank, world: this rank, and how many there are.
        counts: how many messages of each channel this rank has reached.
        pieces: how many pieces beyond the first its last message of each channel had.
        asked: says whether this process was asked to end.
        timeout: the timeout of exchanges without one of their own.
        abandoned: whether a wait outside of Python still goes on.
    """

    store: dist.Store
    rank: int
    world: int
    counts: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    asked: Callable[[], bool] = lambda: False
    timeout: float = 600.0
    abandoned: bool = False

    def __post_init__(self) -> None:
        with suppress(OSError, RuntimeError):  # this is no Linux, or the store is gone
            self.store.set(f"process/{self.rank}", json.dumps([host(), os.getpid()]))

    def exchange(
        self, channel: str, data: bytes, timeout: float, of: Iterable[int] | None = None, call: str = ""
    ) -> list[bytes]:
        """Give data to all ranks, and return every rank's data, by rank, once all have come.

        Args:
            channel: the channel of which this is each rank's next message.
            data: this rank's data.
            timeout: seconds to wait for silent ranks.
            of: the ranks whose data is read; by default all.
            call: the name of the call in errors; by default the library's function that the program called.

        Raises:
            CollectiveError: ranks call different functions, wait for each other, have ended or stay silent.
        """
        number, ranks = self.counts.get(channel, 0), range(self.world)
        status = RankStatus(*((call, "") if call else caller()), channel, number, ranks)
        keys = [f"data/{channel}/{number}/{r}" for r in ranks]
        chosen = [*ranks] if of is None else [*of]
        self.counts[channel] = number + 1

        # Give the data, and wait until all have given theirs.
        try:
            before = self.pieces.get(channel, 0)
            self.pieces[channel] = self._write(keys[self.rank], status.call, data)
            # The first looks follow closely, since most ranks come at once; later ones spare the store.
            with PeerWait(self, status, timeout) as wait:
                for tries in itertools.count():
                    if self.store.check(keys):
                        break
                    wait.give_up(lambda: [r for r in ranks if not self.store.check([keys[r]])], self.gone)
                    time.sleep(min(0.05, 1e-5 * tries))

            # Read it, with the calls in which the ranks gave it.
            first = self.store.multi_get([keys[r] for r in chosen]) if chosen else []
            received = [self._read(keys[r], value) for r, value in zip(chosen, first, strict=True)]
            calls = {r: RankStatus(call or "gave up") for r, (call, _) in zip(chosen, received, strict=True)}
            if b"" in first:  # a rank gave up, and so does this one: its data must not answer a later try
                raise explain(self.rank, {self.rank: status, **calls})

            # All ranks have reached this message, so they have read the one before, which can be deleted.
            if number:
                old = f"data/{channel}/{number - 1}/{self.rank}"
                for key in (old, *(f"{old}/{at}" for at in range(before))):
                    self.store.delete_key(key)
        except BaseException as error:
            self.counts[channel] = number
            with suppress(RuntimeError):  # a rank that comes later must not take the data for an answer
                self.store.set(keys[self.rank], b"")
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise CollectiveError(lost(status, "the store that ranks met at is gone")) from error
            raise
        if len({p.call for p in calls.values()}) > 1:
            raise explain(self.rank, {self.rank: status, **calls})
        return [data for _, data in received]

    def _write(self, key: str, call: str, data: bytes) -> int:
        """Write a message in pieces, and return how many there are beyond the first.

        The first piece is written last, so that a reader who finds it finds all.
        """
        first, *more = [data[at : at + PIECE] for at in range(0, len(data) or 1, PIECE)]
        for at, piece in enumerate(more):
            self.store.set(f"{key}/{at}", piece)
        self.store.set(key, f"{call}\n{len(more)}\n".encode() + first)
        return len(more)

    def _read(self, key: str, value: bytes) -> tuple[str, bytes]:
        """Return the call and the data of a message, given its first piece; empty if its rank gave up."""
        call, _, value = value.partition(b"\n")
        count, _, first = value.partition(b"\n")
        pieces = [self.store.get(f"{key}/{at}") for at in range(int(count or 0))]
        return call.decode(), b"".join((first, *pieces))

    def show(self, stream: str, status: RankStatus | None) -> None:
        """Show the others where this rank is; None is at work. The stream "ended" is never overwritten."""
        values = status and asdict(replace(status, counts=dict(self.counts), ranks=[*status.ranks]))
        with suppress(RuntimeError):  # the store may be gone
            self.store.set(f"at/{stream}/{self.rank}", json.dumps(values))

    def _read_json(self, key: str) -> Any:
        """Read a JSON value from the store; None if there is none, or the store is gone."""
        with suppress(RuntimeError):
            return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def status_of(self, rank: int, stream: str) -> RankStatus | None:
        """Return where another rank is, or was when it gave up waiting; None if it is at work."""
        values = self._read_json(f"at/{stream}/{rank}") or self._read_json(f"at/ended/{rank}")
        return values and RankStatus(**values)

    def statuses(self, mine: RankStatus, of: Iterable[int], stream: str) -> dict[int, RankStatus | None]:
        """Return the statuses of this rank, of others, and of all ranks that these wait for."""
        statuses, pending = dict[int, RankStatus | None]({self.rank: mine}), [*of]
        while pending:
            if (rank := pending.pop()) not in statuses:
                statuses[rank] = status = self.status_of(rank, stream)
                pending += status.ranks if status else ()
        return statuses

    def process_of(self, rank: int) -> tuple[int, list[str]]:
        """Return the process of a rank and its `process_stat`; "?" for another host."""
        its_host, pid = self._read_json(f"process/{rank}") or ("", 0)
        return pid, process_stat(pid) if its_host and its_host == host() else ["?"]

    def gone(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks whose process, on this host, has ended."""
        return {r for r in ranks if self.process_of(r)[1][0] in "ZX"}

    def run(
        self, work: Callable[[], Any], status: RankStatus, timeout: float, what: Callable[[], str]
    ) -> None:
        """Run work that waits for peers outside of Python in a thread, and look at the peers meanwhile."""
        errors: list[BaseException] = []

        def catch_errors() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=catch_errors, daemon=True)
        thread.start()
        with PeerWait(self, status, timeout, what()) as wait:
            self.abandoned = True  # stays so if this thread gives up, and the other still waits
            while thread.is_alive():
                thread.join(0.1)
                # torch itself sees ranks that are gone, so that nobody is looked up here.
                wait.give_up(lambda: [*status.ranks], lambda _: set())
            self.abandoned = False
        if errors:
            raise errors[0]


class PeerWait:
    """A wait for peers, in which to `look` again and again.

    Args:
        what: describes the wait in errors; by default the status.
    """

    def __init__(self, peers: Peers, status: RankStatus, timeout: float, what: str = ""):
        self.peers, self.status, self.timeout, self.what = peers, status, timeout, what
        self.began = time.monotonic()
        self.next_look, self.is_shown = self.began + min(LOOK_S, timeout), False
        # A thread besides the main one shows its waits apart, since both may wait at once.
        self.stream = "" if threading.current_thread() is threading.main_thread() else status.channel
        self.asked_at, self.asked_before = 0.0, peers.asked()
        self.ticks: dict[int, int] = {}  # by rank, the CPU time that its process had used at the last look

    def __enter__(self) -> PeerWait:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if self.is_shown and kind is None:
            self.peers.show(self.stream, None)
        elif self.is_shown:  # the others have to see that this rank gave up, before it is forgotten
            timer = threading.Timer(3 * LOOK_S, self.peers.show, [self.stream, None])
            timer.daemon = True
            timer.start()

    def look(self, missing: Missing, now: bool = False) -> list[int]:
        """Look at the missing peers if it is time to, and return them.

        Raises:
            CollectiveError: they will never come, or this process was asked to end.
        """
        time_s, peers = time.monotonic(), self.peers
        if time_s < self.next_look and not now:
            return []
        self.next_look = time_s + LOOK_S

        # Show the others, at the first look, where this rank waits.
        if not self.is_shown:
            if not self.status.call:
                call, line = caller()
                self.status = replace(self.status, call=call, line=line)
            self.is_shown = True
            peers.show(self.stream, self.status)

        # Give up if the missing ranks, by what they show, will never come.
        absent = [r for r in missing() if r != peers.rank]
        statuses = peers.statuses(replace(self.status, counts=peers.counts), absent, self.stream)
        hopeless = stuck(statuses)
        if peers.rank in hopeless:
            shown = {r: s for r, s in statuses.items() if s is not None and r in hopeless}
            raise explain(peers.rank, shown)

        # A process that was asked to end goes on waiting for peers that compute, but not for idle ones.
        if peers.asked():
            self.asked_at = self.asked_at or time_s
            busy = [r for r in absent if self._is_busy(r) and statuses[r] is None]
            if time_s - self.asked_at > STOP_S and not busy:
                message = f"{self.status}: asked to end (SIGTERM) while it waited for {ranks_text(absent)}."
                raise CollectiveError(message, fix="look at what these ranks did, and start them again.")
        return absent

    def give_up(self, missing: Missing, gone: Callable[[Iterable[int]], set[int]]) -> None:
        """Look at the peers, and end the wait when a process is `gone` or time has run out.

        Raises:
            CollectiveError: a peer has left, stayed silent, or will never come.
        """
        late = time.monotonic() - self.began > self.timeout
        absent = self.look(missing, now=late)
        left = gone(absent) & {*missing()} if absent else ()
        if left or (late and missing()):
            cause = f"{ranks_text(left)} has left" if left else self._describe_silence(absent)
            raise CollectiveError(lost(self.what or self.status, cause))

    def _is_busy(self, rank: int) -> bool:
        """Return whether a process has computed, or waited for a disk, since the last look.

        A process of another host counts as busy if this one began to wait after it was asked to end.
        """
        _, (state, *fields) = self.peers.process_of(rank)
        ticks = sum(map(int, fields[10:12]))  # in user mode and in the kernel
        before, self.ticks[rank] = self.ticks.get(rank, ticks), ticks
        is_far = state == "?" and self.asked_before
        return is_far or state == "D" or ticks - before > BUSY * LOOK_S * os.sysconf("SC_CLK_TCK")

    def _describe_silence(self, absent: list[int]) -> str:
        """Describe the ranks that did not come in time, without those that wait for the same."""
        # Give ranks that wait for the same silent rank time to show it: they are not to blame.
        time.sleep(ROLL_S)
        channel, number = self.status.channel, self.status.number
        shown = {r: self.peers.status_of(r, self.stream) for r in absent}
        came = {r for r, s in shown.items() if s and s.counts.get(channel, 0) > number}
        absent = [r for r in absent if r not in came] or absent
        stats = [self.peers.process_of(r) for r in absent]
        still = [f"; its process {pid} is stopped" for pid, stat in stats if stat[0] in "Tt"]
        return f"{ranks_text(absent)} did not come within {self.timeout:g} s{''.join(still)}"


def peers() -> Peers:
    """Return the peers of the default process group."""
    return _make_peers(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _make_peers(world: Any) -> Peers:
    """Make the peers of a process group, once."""
    # The store may have served a group that this process has left, whose keys must not be read.
    store = dist.PrefixStore(f"fnshard/{next(_group_numbers)}", _get_default_store())
    return Peers(store, dist.get_rank(), dist.get_world_size())
