"""One start of a run, watched from outside: its output, its directory, its processes. Linux only."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from experiments import ROOT
from experiments.training.metrics_file import METRICS
from experiments.training.resume import CHECKPOINTS

POLL_S, SLOW_S = 0.002, 0.02
TAIL = 1 << 16  # bytes, more than a row has
LATE_S = 30.0  # that an agent may end behind the one that ended well
RESUMED = re.compile(r"^resume: (?:step (\d+) of|nothing to go on)", re.MULTILINE)
RANK = re.compile(r"rank (\d+)\n")  # a process's name
STOPPED = re.compile(r"^stopped: step (\d+) of", re.MULTILINE)
SIGTERM = 1 << signal.SIGTERM - 1  # its bit in the masks of `/proc`


class ChaosError(RuntimeError):
    """A run did what none may: it hung, or failed for a reason that nobody gave it."""


@dataclass
class MonitoredRun:
    """A run's processes, one for each node (on loopback, as SLURM would start them), in the folder `place`.

    `number`: how often the run was started before.
    """

    place: Path
    arguments: list[str]
    number: int
    patience_s: float
    nodes: int = 1
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @staticmethod
    def start(
        place: Path, arguments: list[str], number: int, patience_s: float, nodes: int = 1
    ) -> MonitoredRun:
        """Start the run, or resume it: the same command every time."""
        run = MonitoredRun(place, arguments, number, patience_s, nodes)
        run.processes = [run.begin(node) for node in range(nodes)]
        return run

    def begin(self, node: int) -> subprocess.Popen[bytes]:
        """Start one node's process."""
        addresses = ",".join(["127.0.0.1"] * self.nodes)
        slurm = {
            "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(self.nodes),
            "SLURM_STEP_NUM_TASKS": str(self.nodes), "SLURM_STEP_NODELIST": addresses,
            "SLURM_NODEID": str(node), "SLURM_RESTART_COUNT": str(self.number),
        }  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log(node).open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "experiments.train", *self.arguments],
                cwd=self.place,
                env={**env, **(slurm if self.nodes > 1 else {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def begin_again(self, node: int) -> None:
        """Start the process of a node that was killed."""
        self.processes[node].wait()
        self.processes[node] = self.begin(node)

    # -------------------------------------------------------------- what can be seen

    def log(self, node: int) -> Path:
        return self.place / f"start-{self.number}.{node}.log"

    @property
    def text(self) -> str:
        logs = (self.log(node).read_text(encoding="utf-8", errors="replace") for node in range(self.nodes))
        return "\n".join(logs)

    @property
    def resumed(self) -> list[int]:
        """The step that each attempt of its ranks went on from; 0 is a new run."""
        return [int(step or 0) for step in RESUMED.findall(self.text)]

    @property
    def folder(self) -> Path | None:
        """The run's: the newest that has metrics."""
        found = (p.parent for p in self.place.glob(f"outputs/*/*/{METRICS}"))
        return max(found, default=None)

    def step(self, folder: Path | None) -> int:
        """The last that is finished."""
        return last_step(folder / METRICS) if folder else 0

    def committed(self, folder: Path | None) -> list[int]:
        """Steps whose checkpoint has its name."""
        return sorted(int(name) for name in _checkpoints(folder) if name.isdecimal())

    def saving(self, folder: Path | None) -> bool:
        """Whether a checkpoint is being written."""
        return any(name.endswith(".saving") for name in _checkpoints(folder))

    @property
    def ranks(self) -> dict[int, int]:
        """Processes by rank, those that have not ended."""
        return {rank: pid for node in range(self.nodes) for rank, pid in self.ranks_of(node).items()}

    def ranks_of(self, node: int) -> dict[int, int]:
        """The same, of one node."""
        named = {pid: RANK.match(_name(pid)) for pid in _descendants(self.processes[node].pid)}
        return {int(match[1]): pid for pid, match in named.items() if match and alive(pid)}

    @property
    def importing(self) -> bool:
        """Whether a process is there that has only begun: a launcher that does not handle SIGTERM yet, what
        forks its ranks or a rank from which it is held back."""
        launchers = [process.pid for process in self.processes if process.poll() is None]
        caught = [_mask(pid, "SigCgt") for pid in launchers]
        held_back = [_mask(pid, "SigBlk") for launcher in launchers for pid in _descendants(launcher)]
        return not all(mask & SIGTERM for mask in caught) or any(mask & SIGTERM for mask in held_back)

    # -------------------------------------------------------------- waiting and killing

    @property
    def ended(self) -> bool:
        """Whether one of its processes has."""
        return any(process.poll() is not None for process in self.processes)

    def until(self, ready: Callable[[], bool], pause_s: float = POLL_S) -> bool:
        """Wait until `ready()`; False if the job ended first."""
        deadline = time.monotonic() + self.patience_s
        while not ready():
            if self.ended:
                return False
            if time.monotonic() > deadline:
                raise self.error(f"nothing happened for {self.patience_s:g} s")
            time.sleep(pause_s)
        return True

    def kill(self, mode: str, rank: int) -> bool:
        """Do it; False if who was meant is not there (any more)."""
        ranks = self.ranks
        number = signal.SIGTERM if mode.startswith("term") else signal.SIGKILL
        one, launchers = [ranks.get(rank)], [process.pid for process in self.processes]
        meant = {
            "kill_all": list(ranks.values()), "kill_rank": one, "term_rank": one,
            "kill_launcher": [launchers[rank % self.nodes]], "term_launcher": launchers,
        }  # fmt: skip
        pids = meant[mode]
        if not pids or None in pids or self.ended:
            return False
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return False
        return True

    def wait(self) -> int:
        """Its exit code: of several the first that is not 0."""
        deadline = time.monotonic() + self.patience_s
        while any(process.poll() is None for process in self.processes):
            if any(process.poll() == 0 for process in self.processes):
                deadline = min(deadline, time.monotonic() + LATE_S)
            if time.monotonic() > deadline:
                raise self.error(f"it had not ended after {self.patience_s:g} s")
            time.sleep(SLOW_S)
        return next((process.returncode for process in self.processes if process.returncode), 0)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def error(self, problem: str) -> ChaosError:
        """What to raise about it; its processes are ended."""
        self.end()
        tail = "\n".join(self.text.splitlines()[-30:])
        return ChaosError(f"{problem}: {self.log(0)}\n{tail}")


def rows_of(folder: Path) -> list[dict]:
    """The rows of a run's metrics; of a torn last line nothing."""
    rows = []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def last_step(metrics: Path) -> int:
    """The step of the last row that is whole; 0 where there is none."""
    with metrics.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    return json.loads(lines[-1])["step"] if lines else 0


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: Iterable[int], seconds: float) -> bool:
    """Whether all of these processes have ended, soon."""
    left, deadline = list(pids), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if alive(pid)]
        time.sleep(POLL_S)
    return not left


def _checkpoints(folder: Path | None) -> list[str]:
    try:
        return os.listdir(folder / CHECKPOINTS) if folder else []
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    """Processes that one has started, and those that these have."""
    try:
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(p for child in children for p in _descendants(child))]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _mask(pid: int, name: str) -> int:
    """A set of signals of a process, of bits; none of one that is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1], 16)
    except OSError:
        pass
    return 0
