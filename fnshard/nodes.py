"""Nodes: the machines of one job: how their agents meet, watch each other, and agree on how it ended.

On every machine one process, the agent, starts the ranks of its machine: `fnshard.launch.launch(nodes=)`.
Agents meet by torch elastic's rendezvous at the first machine. From then on each of them says every second,
in the store there, that it lives, and at the end how its ranks did: so all of them restart, or end, together,
with the same words. A machine that dies is noticed within `silent_s`, whatever the ranks are waiting for.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from fnshard.errors import FnshardError

BEAT_S, SETTLE_S = 1.0, 0.1  # between two talks with the store; and in the end, when others wait for it
POLL_S = 0.05
LEAVE_S = 10.0  # how long the first node waits until all have read how it ended
CLOSE_S = 5.0  # what closing a meeting may take
AGAIN_S = 60.0  # how long a restart waits for all agents: they are there already
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOST = -1  # of echoes: who is gone is the cause before all others


class NodesError(FnshardError, RuntimeError):
    """The machines of a job did not meet."""


@dataclass(frozen=True)
class Nodes:
    """The machines of one job, as the agent on one of them knows them.

    Args:
        count: how many there are.
        number: which one this is, from 0.
        head: name or address of the first one.
        port: where agents meet there.
        job: tells this job from others at the same place.
        here: this machine's name or address, as the others reach it.
        join_s: how long to wait for all agents in the beginning.
        silent_s: a machine not heard of for so long is gone.
    """

    count: int
    number: int
    head: str
    port: int
    job: str
    here: str
    join_s: float = 600.0
    silent_s: float = 20.0

    @property
    def environment(self) -> dict[str, str]:
        """What ranks meet by: the store of the agents, as torch elastic's do."""
        meet = {
            "MASTER_ADDR": self.head,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return {**meet, "GLOO_SOCKET_IFNAME": "lo"} if self.head in LOOPBACK else meet


def under_slurm(environ: Mapping[str, str]) -> Nodes | None:
    """The machines of the job step that this process is a task of; None on one machine, or outside of `srun`.

    `MASTER_PORT` says where to meet, if what comes of the job's number is taken.

    Raises:
        NodesError: not one task a node.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    >>> nodes = under_slurm({**step, "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_TASKS": "2"})
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
    number, head = int(environ["SLURM_NODEID"]), first_host(environ["SLURM_STEP_NODELIST"])
    job = ".".join(
        [environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT", "0")]
    )
    port = int(environ.get("MASTER_PORT") or 15000 + zlib.crc32(job.encode()) % 15000)
    here = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Nodes(count, number, head, port, job, here)


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
        message: what to tell a person of it; empty: well.
        may_go_on: whether this node would start its ranks anew.
        echo: the more, the less it is the cause.
    """

    message: str = ""
    may_go_on: bool = True
    echo: int = 0


def verdict(endings: Mapping[int, Ending], count: int) -> Ending:
    """What all nodes' endings come to, the same on each of them.

    >>> verdict({0: Ending("connection closed", echo=2), 1: Ending("seven is not even", may_go_on=False)}, 2)
    Ending(message='on node 1 of 2: seven is not even', may_go_on=False, echo=0)
    """
    failed = {node: ending for node, ending in endings.items() if ending.message}
    if not failed:
        return Ending()
    cause = min(failed, key=lambda node: (failed[node].echo, node))
    message = f"on node {cause} of {count}: {failed[cause].message}"
    return Ending(message, all(ending.may_go_on for ending in endings.values()), failed[cause].echo)


# ------------------------------------------------------------------ meeting


def meet(nodes: Nodes, attempt: int, idle: Callable[[], Any]) -> Peers:
    """Wait for the agents of all nodes.

    Args:
        attempt: how often the ranks were started before.
        idle: called again and again while waiting; what it raises ends the wait.

    Raises:
        NodesError: not all came in time.
    """
    wait_s = nodes.join_s if attempt == 0 else AGAIN_S
    wait = _Wait()
    waiter = threading.Thread(target=wait.join, args=(nodes, attempt, wait_s), daemon=True)
    waiter.start()
    try:
        while waiter.is_alive():
            idle()
            waiter.join(POLL_S)
    except BaseException:
        _shut(wait.handler, waiter)
        raise
    if wait.error is not None:
        reason = str(wait.error.__cause__ or wait.error) or type(wait.error).__name__
        raise NodesError(
            f"node {nodes.number} of {nodes.count} has not met all others at {nodes.head}:{nodes.port} "
            f"in {wait_s:g} s ({reason.splitlines()[0]}). Fix: start the same command once on every node; "
            "if the port is taken, MASTER_PORT=... on all of them."
        )
    return Peers(nodes, wait.handler, wait.store)


@dataclass
class _Wait:
    """A rendezvous, in a thread of its own: torch's cannot be interrupted."""

    handler: Any = None
    store: Any = None
    error: Exception | None = None

    def join(self, nodes: Nodes, attempt: int, wait_s: float) -> None:
        seconds = max(1, int(wait_s))
        try:
            parameters = RendezvousParameters(
                "c10d", f"{nodes.head}:{nodes.port}", f"{nodes.job}/{attempt}", nodes.count, nodes.count,
                local_addr=nodes.here, is_host=nodes.number == 0, read_timeout=seconds, join_timeout=seconds,
            )  # fmt: skip
            self.handler = registry.get_rendezvous_handler(parameters)
            self.store = self.handler.next_rendezvous().store
        except Exception as error:
            self.error = error


def _shut(handler: Any, *threads: threading.Thread) -> None:
    """Close a rendezvous; no thread is to be in the middle of a call when the interpreter ends."""
    if handler is not None:
        closing = threading.Thread(target=handler.shutdown, daemon=True)  # it may wait for a dead store
        closing.start()
        threads = (closing, *threads)
    until = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


class Peers:
    """The other agents in one attempt; a thread talks to the store, so that nobody waits for a dead one."""

    def __init__(self, nodes: Nodes, handler: Any, store: Any):
        now = time.monotonic()
        self._nodes, self._handler, self._store = nodes, handler, store
        self._others = [n for n in range(nodes.count) if n != nodes.number]
        self._beats = dict.fromkeys(self._others, 0)
        self._heard = dict.fromkeys(self._others, now)
        self._contact = now
        self._mine: Ending | None = None
        self._said = self._knows = self._left = False
        self._readers = 0
        self._endings: dict[int, Ending] = {}
        self._closed, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def trouble(self) -> bool:
        """Whether another node has failed, or is gone."""
        return any(ending.message for ending in list(self._endings.values())) or bool(self._lost())

    def settle(self, mine: Ending, idle: Callable[[], Any]) -> Ending:
        """Tell the others how this node ended, wait for them, and find what all of them find."""
        self._mine = mine
        self._ends.set()
        while True:
            lost = self._lost()
            missing = [n for n in self._others if n not in self._endings and n not in lost]
            if not missing or 0 in lost:
                break
            idle()
            time.sleep(POLL_S)
        gone = {n: Ending(self._gone(), False, LOST) for n in lost}
        return verdict({self._nodes.number: mine, **self._endings, **gone}, self._nodes.count)

    def leave(self) -> None:
        """Say no more. The first node, where the store is, waits until the others know how it ended."""
        self._knows = True
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until and self._thread.is_alive() and not self._may_leave():
            time.sleep(POLL_S)
        self._closed.set()
        self._ends.set()
        _shut(self._handler, self._thread)

    def _may_leave(self) -> bool:
        return self._left and (self._nodes.number > 0 or self._readers > len(self._endings))

    def _gone(self) -> str:
        silent_s = self._nodes.silent_s
        return (
            f"its agent is gone: it was killed, or nothing was heard of its machine for {silent_s:g} s. "
            "All ranks were ended. The same command on all nodes goes on from the newest checkpoint."
        )

    def _lost(self) -> list[int]:
        now, silent_s = time.monotonic(), self._nodes.silent_s
        if now - self._contact > silent_s:
            return [0]
        return [n for n in self._others if n not in self._endings and now - self._heard[n] > silent_s]

    # -------------------------------------------------------------- the thread's

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                self._exchange()
            except RuntimeError:  # the first node is gone
                self._contact = float("-inf")
                return
            if self._ends.wait(BEAT_S):
                self._closed.wait(SETTLE_S)

    def _exchange(self) -> None:
        store, number = self._store, self._nodes.number
        store.add(f"beat/{number}", 1)
        if self._mine is not None and not self._said:
            store.set(f"ended/{number}", json.dumps(asdict(self._mine)))
            self._said = True
        for other in self._others:
            beats = store.add(f"beat/{other}", 0)
            if beats != self._beats[other]:
                self._beats[other], self._heard[other] = beats, time.monotonic()
            if other not in self._endings and store.check([f"ended/{other}"]):
                self._endings[other] = Ending(**json.loads(store.get(f"ended/{other}")))
        if self._knows and self._said:
            self._readers = store.add("read", 0 if self._left else 1)
            self._left = True
        self._contact = time.monotonic()
