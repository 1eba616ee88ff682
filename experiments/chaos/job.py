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
from dataclasses import dataclass
from pathlib import Path

from experiments import ROOT
from experiments.training.report import METRICS
from experiments.training.resume import CHECKPOINTS

POLL_S, SLOW_S = 0.001, 0.02
RESUMED = re.compile(r"^resume: (?:step (\d+) of|nothing to go on)", re.MULTILINE)
RESTARTED = re.compile(r"^restart \d+ of \d+: ", re.MULTILINE)
STOPPED = re.compile(r"^stopped: step (\d+) of", re.MULTILINE)


class ChaosError(RuntimeError):
    """A run did what none may: it hung, or failed for a reason that nobody gave it."""


@dataclass
class MonitoredRun:
    """A process that was started in `place` with the run's command, writing to `log`."""

    place: Path
    log: Path
    process: subprocess.Popen[bytes]
    patience_s: float

    @staticmethod
    def start(place: Path, arguments: list[str], number: int, patience_s: float) -> MonitoredRun:
        """Start the run, or resume it: the same command every time."""
        log = place / f"start-{number}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.train", *arguments],
                cwd=place,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return MonitoredRun(place, log, process, patience_s)

    # -------------------------------------------------------------- what can be seen

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def resumed(self) -> list[int]:
        """The step that each attempt of its ranks went on from; 0 is a new run."""
        return [int(step or 0) for step in RESUMED.findall(self.text)]

    @property
    def restarts(self) -> int:
        """How often its launcher has started the ranks anew."""
        return len(RESTARTED.findall(self.text))

    @property
    def base(self) -> int | None:
        """Where the ranks that are there now went on; None while they are still on their way."""
        found = RESUMED.findall(RESTARTED.split(self.text)[-1])
        return int(found[-1] or 0) if found else None

    @property
    def folder(self) -> Path | None:
        """The run's: the newest that has metrics."""
        return max((p.parent for p in self.place.glob(f"outputs/2*/*/{METRICS}")), default=None)

    def step(self, folder: Path | None) -> int:
        return rows_of(folder)[-1]["step"] if folder and rows_of(folder) else 0

    def committed(self, folder: Path | None) -> list[int]:
        """Steps whose checkpoint has its name."""
        return sorted(int(name) for name in _checkpoints(folder) if name.isdecimal())

    def saving(self, folder: Path | None) -> bool:
        """Whether a checkpoint is being written."""
        return any(name.endswith(".saving") for name in _checkpoints(folder))

    @property
    def ranks(self) -> dict[int, int]:
        """Processes by rank, those that have not ended."""
        found = {}
        for pid in _children(self.process.pid):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((e[5:] for e in environment if e.startswith(b"RANK=")), None)
            if rank is not None and alive(pid):
                found[int(rank)] = pid
        return found

    # -------------------------------------------------------------- waiting and killing

    def until(self, ready: Callable[[], bool], pause_s: float = POLL_S) -> bool:
        """Wait until `ready()`; False if the job ended first."""
        deadline = time.monotonic() + self.patience_s
        while not ready():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise self.error(f"nothing happened for {self.patience_s:g} s")
            time.sleep(pause_s)
        return True

    def kill(self, mode: str, rank: int) -> bool:
        """Do it; False if who was meant is not there (any more)."""
        ranks = self.ranks
        number = signal.SIGTERM if mode.startswith("term") else signal.SIGKILL
        one = [ranks.get(rank)]
        meant = {"kill_all": list(ranks.values()), "kill_rank": one, "term_rank": one}
        pids = meant.get(mode, [self.process.pid])
        if not pids or None in pids or self.process.poll() is not None:
            return False
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return False
        return True

    def wait(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(self.patience_s)
        except subprocess.TimeoutExpired:
            raise self.error(f"it had not ended after {self.patience_s:g} s") from None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def error(self, problem: str) -> ChaosError:
        """What to raise about it; its processes are ended."""
        self.end()
        tail = "\n".join(self.text.splitlines()[-30:])
        return ChaosError(f"{problem}: {self.log}\n{tail}")


def rows_of(folder: Path) -> list[dict]:
    """The rows of a run's metrics; of a torn last line nothing."""
    rows = []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


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


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
