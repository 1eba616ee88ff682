"""Local ranks: start them, say which one failed and why, start them again, end them cleanly.

`launch(main, ranks=n)` runs in the process a person started, `run_rank(main)` in each rank
(`fnshard.launcher.rank`). Torch's own agent is not used: restarts meet stale addresses, it sends SIGTERM only
to kill after it, and takes half a minute to give up on a rank that was stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fnshard.checkpoint.replicas import MEMORY
from fnshard.errors import LaunchError
from fnshard.launcher.nodes import LOST, Ending, Nodes, Peers, meet
from fnshard.launcher.post_mortem import HostMemory, describe_failure, echo_level
from fnshard.launcher.rank import ERRORS, LAUNCHER, LOGS, import_command, run_rank
from fnshard.mesh.process_group import ATTEMPT, RENDEZVOUS, under_launcher
from fnshard.runtime.files.folder import MEMORY_PREFIX, memory_directory, scratch_directory

__all__ = ["LaunchError", "cpu_threads", "describe_failure", "launch", "run_rank", "under_launcher"]

Start = Callable[[Mapping[str, str]], Any]  # a rank's process, with its environment

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
POLL_S = 0.05
FAREWELL_S = 1.0  # what the others get to say their own errors once one has failed
KILLED_S = 30.0  # until a killed process is given up on
FOLLOWS = 9  # of echoes: the least a cause
GRACE_S = 120.0  # what ranks get to finish a step and save after SIGTERM
ENDING = (signal.SIGHUP, signal.SIGQUIT)  # end everything at once; SIGTERM asks first
SIGNALS = (signal.SIGTERM, *ENDING)


def cpu_threads(ranks: int) -> int:
    """Threads for each of `ranks` processes that share this machine's CPUs; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cpus // ranks)


def launch(
    program: Callable[[], Any] | Sequence[str],
    *,
    ranks: int,
    logs: str | Path | None = None,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
    nodes: Nodes | None = None,
    memory: str | None = None,
    popen: Callable[..., Any] | None = None,
) -> None:
    """Run a function, or a command, in `ranks` processes on this machine and wait until all have ended well.

    Rank 0 keeps this process's console; the others write to `logs/rank<i>.log` alone. SIGTERM is handed on to
    the ranks: those that take note of it (`run_rank(stop=)`) may finish and then end well, and so does this;
    a second one kills them.

        def main():
            mesh = fs.make_mesh(shard=-1)
            ...

        if __name__ == "__main__":
            fs.launch(main, ranks=2)

    Args:
        program: a function without arguments; it is found by its name in each rank, which imports the script
            or module that defines it, with the same `sys.argv`. Or program and arguments,
            `[sys.executable, "-u", "-m", "package.module", "job.json"]`; each process is to call `run_rank`.
        ranks: how many; RANK, LOCAL_RANK and WORLD_SIZE tell each which it is. In a process that is a rank
            already (under `torchrun`) a function is run as that rank instead, among as many as there are.
        logs: folder, made if need be; default a temporary one, kept if a rank fails.
        max_restarts: how often all ranks are started anew after one of them died (a signal), or stopped
            answering. An exception, or an exit code, is the program's own doing and ends the job.
        env: more environment variables for the ranks.
        grace_s: seconds between SIGTERM and the end of who has not ended by itself.
        nodes: the machines of the job, where there are several: each calls this, with as many `ranks`. They
            restart, and end, together.
        memory: a name for a folder in this machine's memory (tmpfs), where `fs.checkpoint.Replicas` keeps
            states through restarts. It is removed when this ends; where this is killed, the next launch of
            that name goes on with it, any other one removes it.
        popen: what starts a process, `subprocess.Popen` by default: called with a command, `env` and
            `start_new_session`, for something with `pid`, `returncode`, `poll`, `wait` and `send_signal`.
            A rank ends at once where FNSHARD_LAUNCHER of its environment does not name its parent.

    Raises:
        LaunchError: the rank that failed first, its traceback or last line, and where its log lies; a
            function that other processes cannot find; a command that is one text; no ranks.
        fnshard.launcher.nodes.NodesError: the machines did not meet.
        KeyboardInterrupt, SystemExit: a signal ended this process; the ranks were ended first.
    """
    if isinstance(program, str | Path) or ranks < 1:
        raise LaunchError(
            f"fs.launch({program!r}, ranks={ranks}): a function or a list of words, in some processes.",
            fix='fs.launch([sys.executable, "train.py"], ranks=2).',
        )
    if callable(program):
        if LAUNCHER in os.environ:
            raise LaunchError(
                "fs.launch in a rank that fs.launch has started.",
                fix='call it below `if __name__ == "__main__":`, for each rank imports the script.',
            )
        if under_launcher():
            run_rank(program)
        program = import_command(program)
    temporary = scratch_directory("fnshard-logs-", keep=(LaunchError,)) if logs is None else nullcontext(logs)
    tmpfs = nullcontext() if memory is None else _memory(memory, 0 if nodes is None else nodes.number)
    with temporary as folder, scratch_directory("fnshard-ranks-") as meeting, tmpfs as in_memory:
        env = {**(env or {}), **({} if in_memory is None else {MEMORY: str(in_memory)})}
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if nodes is None:  # on nodes others may be at work
            for old in folder.glob("rank*.log"):  # restarts append, another launch starts afresh
                old.unlink()
        start = partial(_start, popen or subprocess.Popen, program)
        _run(start, ranks, folder, meeting, max_restarts, env, grace_s, nodes)


@contextmanager
def _memory(name: str, node: int) -> Iterator[Path]:
    try:
        with memory_directory(name, node) as folder:
            yield folder
    except OSError as error:
        if MEMORY_PREFIX not in str(error.filename):
            raise
        raise LaunchError(
            f"memory={name!r}: {error.filename}: {error.strerror}.",
            fix="a Linux machine with /dev/shm, and a name that no other job has.",
        ) from None


def _run(
    start: Start, ranks: int, logs: Path, meeting: Path, max_restarts: int, env: Mapping[str, str],
    grace_s: float, nodes: Nodes | None,
) -> None:  # fmt: skip
    """Attempts, until one ends well or none is left.

    Args:
        meeting: a folder for the ranks' files.
    """
    added = {
        LOGS: str(logs),
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(cpu_threads(ranks)),
        **(_alone(meeting) if nodes is None else nodes.environment),
        **env,
    }
    peers, number, restarts = None, 0, 0
    with _notice(grace_s) as notice, ExitStack() as met:
        while True:
            if nodes is not None:
                peers = meet(nodes, number, notice.give_up)
                if peers is None:
                    line = f"node {nodes.number} of {nodes.count}: the job has ended."
                    return print(line, file=sys.stderr, flush=True)
                met.callback(peers.leave)
                number = peers.attempt
                added |= peers.environment
            team = _Team(ranks, nodes, peers)
            ended = _attempt(start, team, number, meeting, added, notice)
            ending = _ending(ended, team, logs, notice)
            notice.refuse(ended)
            if not ending.message:
                return
            if not ending.may_go_on or (restarts == max_restarts and not ending.planned):
                break
            number, restarts = number + 1, restarts + (not ending.planned)
            head = ending.message.splitlines()[0]
            counted = "" if ending.planned else f" {restarts} of {max_restarts}"
            print(f"restart{counted}: {head}", file=sys.stderr, flush=True)
    raise LaunchError(ending.message)


def _alone(meeting: Path) -> dict[str, str]:
    """On one machine nothing listens on a network."""
    return {RENDEZVOUS: str(meeting), "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}


@dataclass(frozen=True)
class _Team:
    """The ranks of this machine among all."""

    ranks: int
    nodes: Nodes | None
    peers: Peers | None

    @property
    def node(self) -> int:
        """This machine's place among those that take part."""
        return 0 if self.peers is None else self.peers.members.index(self.nodes.number)

    @property
    def world(self) -> int:
        return self.ranks * (1 if self.peers is None else len(self.peers.members))

    @property
    def members(self) -> range:
        return range(self.node * self.ranks, (self.node + 1) * self.ranks)


# ------------------------------------------------------------------ signals


@dataclass
class _Notice:
    """Signals that came, for the loop to act on."""

    grace_s: float
    asked_at: float | None = None  # SIGTERM
    end: int | None = None  # the signal that ends everything now
    forwarded: bool = False  # whether the ranks got SIGTERM

    def take(self, number: int, _: Any) -> None:
        """The handler."""
        if number == signal.SIGTERM and self.asked_at is None:
            self.asked_at = time.monotonic()
        else:
            self.end = number

    def act(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Hand SIGTERM on; end where the time has come."""
        if self.end is not None:
            raise SystemExit(128 + self.end)
        if self.asked_at is None:
            return
        if not self.forwarded:
            self.forwarded = True
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if time.monotonic() - self.asked_at > self.grace_s:
            print(
                f"ranks that were asked to end had not done so after {self.grace_s:g} s and were killed.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            raise SystemExit(128 + signal.SIGTERM)

    def give_up(self) -> None:
        """End at once: no rank runs."""
        if self.end is not None or self.asked_at is not None:
            raise SystemExit(128 + (self.end or signal.SIGTERM))

    def refuse(self, ended: _Ended) -> None:
        """After SIGTERM, ranks that simply died of it are no failure."""
        codes = {failure.exitcode for failure in ended.failures.values()}
        if self.asked_at is not None and codes == {-signal.SIGTERM}:
            raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def _notice(grace_s: float) -> Iterator[_Notice]:
    """Listen; handlers are put back. SIGINT stays what it is, KeyboardInterrupt."""
    notice = _Notice(grace_s)
    if threading.current_thread() is not threading.main_thread():
        yield notice
        return
    before = {number: signal.signal(number, notice.take) for number in SIGNALS}
    try:
        yield notice
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# ------------------------------------------------------------------ one attempt


@dataclass
class _Ended:
    """How the ranks ended: those that failed by themselves, and those that had to be killed then.

    `stopped`: of the killed ones, those that stood still (SIGSTOP).
    """

    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    memory: HostMemory = field(default_factory=HostMemory)
    may_go_on: bool = True

    @property
    def cause(self) -> int:
        """The rank that is to blame."""
        return min(self.failures, key=lambda r: (echo_level(self.failures[r]), self.failures[r].timestamp))


def _attempt(
    start: Start, team: _Team, number: int, meeting: Path, env: Mapping[str, str], notice: _Notice
) -> _Ended:
    """Start all ranks and wait: until all have ended well, or one, here or on another node, has not."""
    errors = {rank: meeting / f"error-{number}-{rank}.json" for rank in team.members}
    processes: dict[int, subprocess.Popen[bytes]] = {}
    notice.forwarded = False
    try:
        for local, rank in enumerate(team.members):
            own = {
                "RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": team.world, "LOCAL_WORLD_SIZE": team.ranks,
                "GROUP_RANK": team.node, ATTEMPT: number, ERRORS: errors[rank],
            }  # fmt: skip
            own = {key: str(value) for key, value in own.items()}
            processes[rank] = start({**os.environ, **env, **own})
        running, ended = list(processes.values()), _Ended()
        while any(p.poll() is None for p in running) and not _in_trouble(running, team):
            notice.act(running)
            ended.memory.look()
            time.sleep(POLL_S)
        ended.memory.read(errors.values())
        if _in_trouble(running, team):
            _farewell(running, notice)
            ended.killed = [r for r, p in processes.items() if p.poll() is None]
            ended.stopped = [r for r in ended.killed if _stands_still(processes[r].pid)]
        ended.failures = {r: _failure(r, p, errors[r]) for r, p in processes.items() if p.poll()}
    finally:
        for process in processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):  # what forked it may be killed now, and it with that
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started itself
        for process in processes.values():
            with suppress(subprocess.TimeoutExpired):  # one that sleeps in the kernel stays behind
                process.wait(KILLED_S)
    if ended.failures:
        cause = ended.failures[ended.cause]
        ended.may_go_on = bool(ended.stopped) or cause.exitcode < 0 or echo_level(cause) > 1
    return ended


def _in_trouble(processes: Sequence[subprocess.Popen[bytes]], team: _Team) -> bool:
    return any(p.poll() for p in processes) or (team.peers is not None and team.peers.trouble())


def _start(popen: Callable[..., Any], command: Sequence[str], env: Mapping[str, str]) -> Any:
    """SIGTERM is held back until the rank is ready to hear it, see `run_rank`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return popen(list(command), env=env, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _farewell(processes: Sequence[subprocess.Popen[bytes]], notice: _Notice) -> None:
    """Let the others see that one is gone, and say so themselves."""
    until = time.monotonic() + FAREWELL_S
    while time.monotonic() < until and any(p.poll() is None for p in processes):
        notice.act(processes)
        time.sleep(POLL_S)


def _stands_still(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


# ------------------------------------------------------------------ the message of a failure


def _failure(rank: int, process: subprocess.Popen[bytes], error: Path) -> ProcessFailure:
    try:
        return ProcessFailure(rank, process.pid, process.returncode, str(error))
    except Exception:  # it died while it wrote the file
        return ProcessFailure(rank, process.pid, process.returncode, "")


def _ending(ended: _Ended, team: _Team, logs: Path, notice: _Notice) -> Ending:
    """How the attempt ended, here and on all nodes."""
    mine = Ending(may_go_on=ended.may_go_on and notice.asked_at is None)
    if ended.failures:
        far = 0 if ended.stopped else echo_level(ended.failures[ended.cause])
        mine = replace(mine, message=_describe(ended, team.world, logs), echo=far)
    if team.peers is None:
        return mine
    if ended.killed and (why := team.peers.interruption):
        mine = replace(mine, message=why, echo=LOST, planned=True)
    elif ended.killed and not mine.message:
        mine = replace(mine, message="its ranks were ended with those of another node", echo=FOLLOWS)
    common = team.peers.settle(mine, lambda: notice.act([]))
    team.peers.leave()
    return common


def _describe(ended: _Ended, ranks: int, logs: Path) -> str:
    """The failure, and the ranks without one that the others waited for."""
    message = describe_failure(ended.failures, ranks, logs, ended.memory)
    if ended.stopped:
        named = ", ".join(map(str, ended.stopped))
        return f"rank {named} of {ranks} stood still (SIGSTOP) and was killed; {message}"
    if ended.killed and echo_level(ended.failures[ended.cause]) > 1:
        named = ", ".join(map(str, ended.killed))
        return (
            f"{message}\nStill at work, and killed: rank {named} (log: {logs / f'rank{ended.killed[0]}.log'})"
        )
    return message
