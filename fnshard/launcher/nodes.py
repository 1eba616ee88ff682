"""Nodes: the machines of one job: how their agents meet, watch each other, and agree on how it ended.

On every machine one process, the agent, starts the ranks of its machine:
`fnshard.launcher.local.launch(nodes=)`.
Agents meet in a folder that all machines see and that only their user may enter: every second each of
them writes a file of JSON there, one of them, the leader, reads those of all others, the others its. So all
restart, or end, together, with the same words. A machine that dies is noticed within `silent_s`, whatever the
ranks are waiting for. Agents listen on no network and unpickle nothing; their ranks meet by a file in the
same folder.

Every attempt has a leader of its own: the agent that makes the file `leader-ATTEMPT.json`, which one agent
can. Where the leader of the newest attempt is gone, another agent leads the next one, so no machine is needed
more than others. Who is led and finds a newer attempt, or cannot write for `silent_s`, ends its ranks: two
attempts do not run side by side. An agent that was started anew asks the newest leader for the next attempt;
where `Nodes.counts` allows it, the others go on without a machine meanwhile, as torch's elastic agents do.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fnshard.launcher import meeting_folder
from fnshard.launcher.meeting_folder import NodesError
from fnshard.mesh.process_group import RENDEZVOUS
from fnshard.runtime.files.json_reader import from_json

BEAT_S, SETTLE_S = 1.0, 0.1  # between two looks at the folder; and in the end, when others wait for it
POLL_S = 0.2
CLOSE_S = 5.0  # what ending the thread may take
AGAIN_S = 60.0  # how long a restart waits for all agents: they are there already
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOST = -1  # of echoes: who is gone, or there again, is the cause before all others
LEFT_BEHIND = "other nodes have begun anew without it"
LEADER = "leader"  # the leader's file is named by this, the others' by their numbers
REJOIN_S = 2.0  # since the last machine came: how long a job that may go on with fewer waits for others


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
        job: another one for every start of all agents, the same on all of them: what was ended under this
            name has ended for an agent that comes later; empty: nobody knows.
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
    job: str = ""

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
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = ".".join(environ.get(name, "0") for name in names)
    return Nodes(
        count, int(environ["SLURM_NODEID"]), folder, first_host(environ["SLURM_STEP_NODELIST"]), job=job
    )


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


# ------------------------------------------------------------------ meeting


def meet(nodes: Nodes, attempt: int, idle: Callable[[], Any]) -> Peers | None:
    """Wait for the agents of all nodes; None where the job has ended well without this one.

    Args:
        attempt: the least that this agent takes part in; 0: it has been in none.
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
        if time.monotonic() > max(began, peers.at_work_s) + wait_s:
            named = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            raise NodesError(
                f"node {nodes.number} of {nodes.count} has not met node {named} in {nodes.folder} within "
                f"{wait_s:g} s. Fix: start the same command once on every node; all have to see this folder."
            )
        idle()
        time.sleep(POLL_S)
    if peers.over:
        return None
    peers.watch()
    return peers


class Peers:
    """The other agents in one attempt; a thread reads their files, so that nothing waits for a dead disk.

    Each agent writes its `number`, a `token` of its own, `first` (the leader's token), `beat` (it counts up),
    and `ended`, its `Ending` once there is one; the leader also `job`, `tokens` (the others', once all are
    there), `failed` (whether anybody has), `verdict`, and `remaining` (who will be there in the next attempt,
    as far as it knows: a job that may go on with fewer waits for them, and for nobody else). Files may
    be left of an earlier job: who repeats a token lives.

    Attributes:
        attempt: the number that is in the names of the files.
        members: the machines that take part, in order.
        over: the job has ended well.
        at_work_s: when the leader of an attempt without this agent, which may last, was last seen to count.
    """

    def __init__(self, nodes: Nodes, attempt: int):
        self._nodes, self._least, self.attempt = nodes, attempt, -1
        self._leads, self._leader = False, -1
        self.members: tuple[int, ...] = ()
        self.over, self.at_work_s = False, 0.0
        self._leader_beat, self._leader_lives, self._leader_heard = -1, False, time.monotonic()
        self._newcomers: dict[int, tuple[str, int]] = {}  # token and beat when it was first seen
        self._joined: list[int] = []
        self._replaced: set[int] = set()  # members in whose place another agent was started
        self._found, self._came = 0, time.monotonic()
        self._remaining: set[int] = set()
        self._token, self._first = uuid.uuid4().hex, ""
        self._tokens: dict[int, str] = {}  # of those that this agent listens to
        self._beat, self._beats = 0, dict[int, int]()
        self._heard: dict[int, float] = {}
        self._written_at = 0.0
        self._mine: Ending | None = None
        self._verdict: Ending | None = None
        self._failed, self._overtaken = False, False
        self._endings: dict[int, Ending] = {}
        self._closed, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks of this attempt meet by."""
        return {RENDEZVOUS: str(self._nodes.folder / self._first)}

    @property
    def interruption(self) -> str:
        """Why ranks of this node, which had not failed, were to end; empty: for another node's failure."""
        if self._joins:
            return f"node {', '.join(map(str, self._joined))} is there again"
        if self._overtaken:
            return LEFT_BEHIND
        silent_s = self._nodes.silent_s
        return f"it could not write to the folder where nodes meet for {silent_s:g} s" if self._stalls else ""

    @property
    def _joins(self) -> bool:
        """Whether machines are there again, and this one, which leads, can grow with them."""
        return self._chosen(len(self.members) + len(self._joined)) > len(self.members)

    @property
    def _stalls(self) -> bool:
        """Whether the others may take this agent for gone."""
        return bool(self._nodes.counts) and time.monotonic() > self._written_at + self._nodes.silent_s

    def _chosen(self, there: int) -> int:
        """With how many of the machines that are there the job goes on; 0: with none of these numbers."""
        counts = self._nodes.counts | {self._nodes.count}
        return max((count for count in counts if count <= there), default=0)

    def missing(self) -> list[int]:
        """The agents that this one has not met yet; none if it goes on without them, or the job is over."""
        missing = self._without_leader() if not self._leads else []
        if self._leads:
            missing = self._without_members()
        if self._leads or (self.attempt >= self._least and self._leader not in (-1, self._nodes.number)):
            self._write(tokens={} if missing else self._tokens, remaining=sorted(self._remaining))
        return missing

    def _without_leader(self) -> list[int]:
        """Follow who leads the newest attempt; lead the next one where that is over, or its leader gone."""
        nodes, now = self._nodes, time.monotonic()
        attempt = meeting_folder.newest(nodes.folder, LEADER)
        found = meeting_folder.read(nodes.folder, f"{LEADER}-{attempt}.json")
        tokens, beat = found.get("tokens", {}), found.get("beat", -1)
        if attempt != self.attempt:
            self.attempt, self._leader_lives, self._leader_heard = attempt, False, now
        elif beat != self._leader_beat and found:
            self._leader_lives, self._leader_heard = True, now
            self.at_work_s = now if tokens and nodes.counts else self.at_work_s
        self._leader_beat, self._leader = beat, found.get("number", -1)
        ended = from_json(Ending | None, found.get("verdict"))
        if ended is not None and not ended.message:  # of an earlier job, or of this one?
            same = bool(nodes.job) and found.get("job") == nodes.job
            self.over = same or self._least > 0 or self._leader_lives
        gone = self._leader == nodes.number or now > self._leader_heard + nodes.silent_s
        if self.over:
            return []
        begins = attempt < self._least and (attempt >= 0 or nodes.number == 0)
        if begins or ended is not None or gone:
            self._lead(max(self._least, attempt + 1), found)
        elif tokens.get(str(nodes.number)) == self._token:
            self._tokens = {self._leader: self._first}
            self.members = tuple(sorted({self._leader, *map(int, tokens)}))
            return []
        else:
            self._first = found.get("token", "")
        return [n for n in range(nodes.count) if n != nodes.number and self._leader in (n, -1, nodes.number)]

    def _lead(self, attempt: int, before: Mapping[str, Any]) -> None:
        """Lead an attempt, if nobody else does.

        Args:
            before: what the leader of the last one has left; without a verdict it is gone.
        """
        if attempt < 0 or not meeting_folder.claim(self._nodes.folder, f"{LEADER}-{attempt}.json"):
            return
        self._leads, self._leader, self.attempt = True, self._nodes.number, attempt
        self._first, self._found, self._came = self._token, 0, time.monotonic()  # others come from now on
        gone = {before.get("number")} if before.get("verdict") is None else set()
        self._remaining = set(before.get("remaining", ())) - gone if self._least else set()

    def _without_members(self) -> list[int]:
        """Those that do not follow yet; none once there are enough."""
        number, count = self._nodes.number, self._nodes.count
        found = {other: self._read(other) for other in range(count) if other != number}
        there = {n: f["token"] for n, f in found.items() if f.get("first") == self._token}
        if len(there) != self._found:
            self._found, self._came = len(there), time.monotonic()
        late = time.monotonic() - self._came > REJOIN_S
        late |= bool(self._remaining) and self._remaining <= {number, *there}
        taken = self._chosen(1 + len(there)) if late else count
        if not taken or len(there) < taken - 1:
            return [n for n in found if n not in there]
        self._tokens = dict(list(there.items())[: taken - 1])
        self.members = tuple(sorted({number, *self._tokens}))
        (self._nodes.folder / self._first).mkdir(mode=0o700)
        return []

    def watch(self) -> None:
        """All are there: listen to them from now on."""
        self._written_at = time.monotonic()
        self._beats = dict.fromkeys(self._tokens, 0)
        self._heard = dict.fromkeys(self._tokens, self._written_at)
        self._thread.start()

    def trouble(self) -> bool:
        """Whether another node has failed, is gone, or is there again; or this one is left behind."""
        return self._failed or bool(self._lost()) or bool(self.interruption)

    def settle(self, mine: Ending, idle: Callable[[], Any]) -> Ending:
        """Tell the others how this node ended, wait for them, and find what all of them find."""
        self._mine = mine
        self._ends.set()
        while self._verdict is None:
            if self._overtaken or (not self._leads and self._lost()):
                gone = Ending(LEFT_BEHIND, echo=LOST, planned=True) if self._leads else self._gone()
                return verdict({self._nodes.number: mine, self._leader: gone}, self._nodes.count)
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
        if self._nodes.counts == {self._nodes.count}:
            message += (
                f"All ranks start anew when the same command runs there, within {self._nodes.join_s:g} s."
            )
            return Ending(message, echo=LOST)
        if self._nodes.counts:
            return Ending(f"{message}All ranks start anew.", echo=LOST)
        message += "All ranks were ended. The same command on all nodes goes on from the newest checkpoint."
        return Ending(message, may_go_on=False, echo=LOST)

    def _lost(self) -> list[int]:
        since = time.monotonic() - self._nodes.silent_s
        return [n for n, heard in self._heard.items() if n not in self._endings and heard < since]

    def _read(self, number: int) -> dict[str, Any]:
        return meeting_folder.read(self._nodes.folder, self._file_of(number))

    def _file_of(self, number: int) -> str:
        return f"{LEADER if number == self._leader else number}-{self.attempt}.json"

    def _write(self, **more: Any) -> None:
        self._beat += 1
        ended = None if self._mine is None else asdict(self._mine)
        values = {"number": self._nodes.number, "job": self._nodes.job, "token": self._token}
        values |= {"first": self._first, "beat": self._beat, "ended": ended, **more}
        meeting_folder.write(self._nodes.folder, self._file_of(self._nodes.number), values)

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
        for number in range(self._nodes.count):
            found = self._read(number) if number != self._leader else {}
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
        newer = bool(self._nodes.counts) and meeting_folder.newest(self._nodes.folder, LEADER) > self.attempt
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
        self._overtaken = newer and self._verdict is None  # else the next attempt is everybody's

    def _tell(self) -> None:
        if not self._leads:
            self._write()
            self._written_at = time.monotonic()
            return
        self._endings |= {number: self._gone() for number in self._lost()}
        self._failed = any(ending.message for ending in self._endings.values())
        mine, found = self._mine, None
        if mine is not None and len(self._endings) == len(self._tokens):
            found = verdict({self._nodes.number: mine, **self._endings}, self._nodes.count)
        failed = self._failed or (mine is not None and bool(mine.message))
        gone = {number for number, ending in self._endings.items() if ending.echo == LOST} - self._replaced
        values = {"failed": failed, "verdict": found and asdict(found)}
        try:
            remaining = sorted({*self.members, *self._joined} - gone)
            self._write(tokens=self._tokens, remaining=remaining, **values)
            self._written_at = time.monotonic()
        finally:
            self._verdict = found  # once it was written, or cannot be
