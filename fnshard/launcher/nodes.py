"""Nodes: the machines of one job: how their agents meet, watch each other, and agree on how it ended.

On every machine one process, the agent, starts the ranks of its machine:
`fnshard.launcher.local.launch(nodes=)`.
Agents meet in a folder that all machines see and that only their user may enter: every second each of
them writes a file of JSON there, the first one reads those of all others, the others its. So all restart, or
end, together, with the same words. A machine that dies is noticed within `silent_s`, whatever the ranks are
waiting for. Agents listen on no network and unpickle nothing; their ranks meet by a file in the same folder.

An agent that was started anew finds the newest attempt by the first one's files and asks for the next; where
`Nodes.counts` allows it, the others go on without a machine meanwhile, as torch's elastic agents do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fnshard.errors import FnshardError
from fnshard.mesh.process_group import RENDEZVOUS
from fnshard.runtime.files.json_reader import from_json

BEAT_S, SETTLE_S = 1.0, 0.1  # between two looks at the folder; and in the end, when others wait for it
POLL_S = 0.2
CLOSE_S = 5.0  # what ending the thread may take
AGAIN_S = 60.0  # how long a restart waits for all agents: they are there already
LARGEST = 1 << 20  # bytes of a file
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOST = -1  # of echoes: who is gone, or there again, is the cause before all others
REJOIN_S = 2.0  # since the last machine came: how long a job that may go on with fewer waits for others


class NodesError(FnshardError, RuntimeError):
    """The machines of a job did not meet."""


@dataclass(frozen=True)
class Nodes:
    """The machines of one job, as the agent on one of them knows them.

    Args:
        count: how many there are.
        number: which one this is, from 0.
        folder: where they meet, on a file system that all of them see; made, for this user alone.
        head: name or address of the first one.
        join_s: how long to wait for all agents in the beginning.
        silent_s: a machine not heard of for so long is gone.
        counts: with how many machines the job goes on when one is gone; with `count` among them alone it
            waits for another agent in its place; empty: the job ends.
    """

    count: int
    number: int
    folder: Path
    head: str = ""
    join_s: float = 600.0
    silent_s: float = 20.0
    counts: frozenset[int] = frozenset()

    @property
    def environment(self) -> dict[str, str]:
        """The ranks' variables for the network; none, unless all machines are this one."""
        return {"GLOO_SOCKET_IFNAME": "lo"} if self.head in LOOPBACK else {}


def under_slurm(environ: Mapping[str, str], folder: Path) -> Nodes | None:
    """The machines of the job step that this process is a task of; None on one machine, or outside of `srun`.

    Args:
        folder: where they are to meet, the same on all of them.

    Raises:
        NodesError: not one task a node.

    >>> step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    >>> step |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_TASKS": "2"}
    >>> nodes = under_slurm(step, Path("outputs/slurm/7.0/nodes"))
    >>> nodes.number, nodes.count, nodes.head
    (1, 2, 'gpu07')
    """
    count = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if "SLURM_STEP_ID" not in environ or count == 1:
        return None
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", count))
    if tasks != count:
        raise NodesError(
            f"SLURM started {tasks} tasks on {count} nodes; each starts all ranks of its node. Fix: srun "
            "--ntasks-per-node=1; or, to use this node alone, SLURM_STEP_NUM_NODES=1 before the command."
        )
    return Nodes(count, int(environ["SLURM_NODEID"]), folder, first_host(environ["SLURM_STEP_NODELIST"]))


def first_host(listed: str) -> str:
    """The first of SLURM's list of hosts.

    >>> first_host("rack[2-3]node[07,09-11],login"), first_host("alone,two")
    ('rack2node07', 'alone')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", listed)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else listed)


# ------------------------------------------------------------------ how an attempt ended


@dataclass(frozen=True)
class Ending:
    """How one node's ranks ended.

    Args:
        message: for a person; empty: it ended well.
        may_go_on: whether this node would start its ranks anew.
        echo: the more, the less it is the cause.
        planned: it is no failure, and no restart that counts.
    """

    message: str = ""
    may_go_on: bool = True
    echo: int = 0
    planned: bool = False


def verdict(endings: Mapping[int, Ending], count: int) -> Ending:
    """What all nodes' endings come to, the same on each of them.

    >>> verdict({0: Ending("connection closed", echo=2), 1: Ending("seven is not even", may_go_on=False)}, 2)
    Ending(message='on node 1 of 2: seven is not even', may_go_on=False, echo=0, planned=False)
    """
    failed = {node: ending for node, ending in endings.items() if ending.message}
    if not failed:
        return Ending()
    cause = min(failed, key=lambda node: (failed[node].echo, node))
    message = f"on node {cause} of {count}: {failed[cause].message}"
    return replace(
        failed[cause], message=message, may_go_on=all(ending.may_go_on for ending in endings.values())
    )


# ------------------------------------------------------------------ the folder


@contextmanager
def _entered(folder: Path) -> Iterator[int]:
    """The folder, opened anew: on a network file system that is what makes new files visible.

    Raises:
        NodesError: it is not this user's alone.
    """
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NodesError(f"{folder}, where nodes meet, is no folder ({error.strerror}).") from None
    try:
        found = os.fstat(number)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            raise NodesError(
                f"{folder}, where nodes meet, is open to others (owner {found.st_uid}, mode {mode:04o}).",
                fix="remove it: it is made for this user alone; or name another folder.",
            )
        os.listdir(number)
        yield number
    finally:
        os.close(number)


def _write(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """Into the same file, again and again: on a network file system a new one may be seen late."""
    line = json.dumps(values).encode()
    with _entered(folder) as inside:
        number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=inside)
        with open(number, "wb") as file:
            file.write(b"%08x %s\n" % (zlib.crc32(line), line))
            file.truncate()


def _newest(folder: Path, number: str) -> int:
    """The newest attempt of which an agent of that number (or "*", any) has left a file; -1: none."""
    with _entered(folder):
        found = (path.stem.partition("-")[2] for path in folder.glob(f"{number}-*.json"))
        return max((int(attempt) for attempt in found if attempt.isdecimal()), default=-1)


def _read(folder: Path, name: str) -> dict[str, Any]:
    """What an agent wrote; empty where there is no file, or no complete one."""
    with _entered(folder) as inside, suppress(OSError, ValueError):
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
        with open(number, "rb") as file:
            if stat.S_ISREG(os.fstat(number).st_mode):
                checksum, _, line = file.read(LARGEST).partition(b"\n")[0].partition(b" ")
                if checksum == b"%08x" % zlib.crc32(line) and isinstance(values := json.loads(line), dict):
                    return values
    return {}


# ------------------------------------------------------------------ meeting


def meet(nodes: Nodes, attempt: int, idle: Callable[[], Any]) -> Peers:
    """Wait for the agents of all nodes.

    Args:
        attempt: the number of the attempt, on the first node; 0: the next one, where an earlier agent has
            left files. On the others at least that one.
        idle: called again and again while waiting; what it raises ends the wait.

    Raises:
        NodesError: not all came in time, or the folder is open to others.
    """
    with suppress(FileExistsError):  # what is there is looked at below
        nodes.folder.mkdir(mode=0o700, parents=True)
    peers = Peers(nodes, attempt)
    wait_s = nodes.join_s if attempt == 0 or nodes.counts else AGAIN_S
    began = time.monotonic()
    while missing := peers.missing():
        seen = peers.leader_seen if nodes.counts else began  # it may go on without this one for long
        if time.monotonic() > max(began, seen) + wait_s:
            named = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            raise NodesError(
                f"node {nodes.number} of {nodes.count} has not met node {named} in {nodes.folder} within "
                f"{wait_s:g} s. Fix: start the same command once on every node; all have to see this folder."
            )
        idle()
        time.sleep(POLL_S)
    peers.watch()
    return peers


class Peers:
    """The other agents in one attempt; a thread reads their files, so that nothing waits for a dead disk.

    Each agent writes a `token` of its own, `first` (the first agent's token), `beat` (it counts up), and
    `ended`, its `Ending` once there is one; the first one also `tokens` (the others', once all are there),
    `failed` (whether anybody has), `verdict`, and `remaining` (who will be there in the next attempt, as far
    as it knows: a job that may go on with fewer waits for them, and for nobody else). Files may be left of an
    earlier job: who repeats a token lives.

    Attributes:
        attempt: the number that is in the names of the files.
        members: the machines that take part.
        leader_seen: when the first agent was last seen to count, by an agent that waits for it.
    """

    def __init__(self, nodes: Nodes, attempt: int):
        self._nodes, self.attempt = nodes, attempt
        self._leads = nodes.number == 0
        if self._leads and attempt == 0:
            self.attempt = max(1 + _newest(nodes.folder, "0"), _newest(nodes.folder, "*"))
        self.members: tuple[int, ...] = ()
        self.leader_seen, self._leader_beat = 0.0, 0
        self._newcomers: dict[int, tuple[str, int]] = {}  # token and beat when it was first seen
        self._joined: list[int] = []
        self._replaced: set[int] = set()  # members in whose place another agent was started
        self._found, self._came = 0, time.monotonic()
        before = _read(nodes.folder, f"0-{attempt - 1}.json") if self._leads else {}
        self._remaining = set(before.get("remaining", ()))
        self._token = uuid.uuid4().hex
        self._first = self._token if self._leads else ""
        self._tokens: dict[int, str] = {}  # of those that this agent listens to
        self._others = range(1, nodes.count) if self._leads else range(1)
        self._beat, self._beats = 0, dict[int, int]()
        self._heard: dict[int, float] = {}
        self._mine: Ending | None = None
        self._verdict: Ending | None = None
        self._failed = False
        self._endings: dict[int, Ending] = {}
        self._closed, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks of this attempt meet by."""
        return {RENDEZVOUS: str(self._nodes.folder / self._first)}

    @property
    def joined(self) -> list[int]:
        """Machines that are there again, and with which this one, the first, can grow."""
        return self._joined if self._chosen(len(self.members) + len(self._joined)) > len(self.members) else []

    def _chosen(self, there: int) -> int:
        """With how many of the machines that are there the job goes on; 0: with none of these numbers."""
        counts = self._nodes.counts | {self._nodes.count}
        return max((count for count in counts if count <= there), default=0)

    def missing(self) -> list[int]:
        """The agents that this one listens to and has not met yet; none if it goes on without them."""
        number = self._nodes.number
        if not self._leads:
            self.attempt = max(self.attempt, _newest(self._nodes.folder, "0"))
        found = {other: self._read(other) for other in range(self._nodes.count) if other != number}
        if self._leads:
            there = {n: f["token"] for n, f in found.items() if f.get("first") == self._token}
            if len(there) != self._found:
                self._found, self._came = len(there), time.monotonic()
            late = time.monotonic() - self._came > REJOIN_S
            late |= bool(self._remaining) and self._remaining <= {*there}
            taken = self._chosen(1 + len(there)) if late else self._nodes.count
            missing = [n for n in range(1, self._nodes.count) if n not in there]
            if taken and len(there) >= taken - 1:
                self._others, missing = list(there)[: taken - 1], []
            self._tokens = {n: there[n] for n in self._others if n in there}
        else:
            tokens = found[0].get("tokens", {})
            if tokens.get(str(number)) == self._token:
                self._tokens, self.members = {0: self._first}, (0, *map(int, tokens))
            else:
                self._first = found[0].get("token", "")
            if (beat := found[0].get("beat", 0)) != self._leader_beat:
                self.leader_seen, self._leader_beat = time.monotonic(), beat
            missing = [n for n in self._others if n not in self._tokens]
        if self._leads and not missing:
            self.members = (0, *self._tokens)
            (self._nodes.folder / self._first).mkdir(mode=0o700)
        self._write(tokens={} if missing else self._tokens, remaining=sorted(self._remaining))
        return missing

    def watch(self) -> None:
        """All are there: listen to them from now on."""
        self._beats = dict.fromkeys(self._others, 0)
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._thread.start()

    def trouble(self) -> bool:
        """Whether another node has failed, is gone, or is there again."""
        return self._failed or bool(self._lost()) or bool(self.joined)

    def settle(self, mine: Ending, idle: Callable[[], Any]) -> Ending:
        """Tell the others how this node ended, wait for them, and find what all of them find."""
        self._mine = mine
        self._ends.set()
        while self._verdict is None:
            if not self._leads and self._lost():
                return verdict({0: self._gone(), self._nodes.number: mine}, self._nodes.count)
            idle()
            time.sleep(POLL_S)
        return self._verdict

    def leave(self) -> None:
        """Stop writing and listening."""
        self._closed.set()
        self._ends.set()
        self._thread.join(CLOSE_S)
        if self._leads:
            shutil.rmtree(self._nodes.folder / self._first, ignore_errors=True)

    def _gone(self) -> Ending:
        silent_s = self._nodes.silent_s
        message = (
            f"its agent is gone: it was killed, or nothing was heard of its machine for {silent_s:g} s. "
        )
        if self._nodes.counts:
            return Ending(f"{message}All ranks start anew.", echo=LOST)
        message += "All ranks were ended. The same command on all nodes goes on from the newest checkpoint."
        return Ending(message, may_go_on=False, echo=LOST)

    def _lost(self) -> list[int]:
        since = time.monotonic() - self._nodes.silent_s
        return [n for n, heard in self._heard.items() if n not in self._endings and heard < since]

    def _read(self, number: int) -> dict[str, Any]:
        return _read(self._nodes.folder, f"{number}-{self.attempt}.json")

    def _write(self, **more: Any) -> None:
        self._beat += 1
        ended = None if self._mine is None else asdict(self._mine)
        values = {"token": self._token, "first": self._first, "beat": self._beat, "ended": ended, **more}
        _write(self._nodes.folder, f"{self._nodes.number}-{self.attempt}.json", values)

    # -------------------------------------------------------------- the thread's

    def _keep(self) -> None:
        while not self._closed.is_set():
            for work in (self._listen, self._tell):
                with suppress(Exception):  # of a disk, or of a damaged file: it counts as silence
                    work()
            if self._ends.wait(BEAT_S):
                self._closed.wait(SETTLE_S)

    def _look_for_newcomers(self) -> None:
        """Agents that were started anew: one in a member's place says that the member is gone."""
        for number in range(1, self._nodes.count):
            found = self._read(number)
            token, beat = found.get("token", ""), found.get("beat", 0)
            if not token or token == self._tokens.get(number) or number in self._joined:
                continue
            first_token, first_beat = self._newcomers.setdefault(number, (token, beat))
            if token != first_token:
                self._newcomers[number] = token, beat
            elif beat > first_beat and number in self._tokens:
                self._heard[number] = -self._nodes.silent_s
                self._replaced.add(number)
            elif beat > first_beat:
                self._joined.append(number)

    def _listen(self) -> None:
        if self._leads and self._nodes.counts:
            self._look_for_newcomers()
        for number, token in self._tokens.items():
            found = self._read(number)
            if found.get("token") != token or found["beat"] == self._beats[number]:
                continue
            self._beats[number], self._heard[number] = found["beat"], time.monotonic()
            if not self._leads:
                self._failed = found.get("failed", False)
                self._verdict = from_json(Ending | None, found.get("verdict"))
            elif found["ended"] is not None:
                self._endings[number] = from_json(Ending, found["ended"])

    def _tell(self) -> None:
        if not self._leads:
            self._write()
            return
        self._endings |= {number: self._gone() for number in self._lost()}
        self._failed = any(ending.message for ending in self._endings.values())
        mine, found = self._mine, None
        if mine is not None and len(self._endings) == len(self._others):
            found = verdict({0: mine, **self._endings}, self._nodes.count)
        failed = self._failed or (mine is not None and bool(mine.message))
        gone = {number for number, ending in self._endings.items() if ending.echo == LOST} - self._replaced
        values = {"failed": failed, "verdict": found and asdict(found)}
        try:
            self._write(
                tokens=self._tokens, remaining=sorted({*self._tokens, *self._joined} - gone), **values
            )
        finally:
            self._verdict = found  # once it was written, or cannot be
