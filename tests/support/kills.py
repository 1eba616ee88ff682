"""A kill campaign: runs of the main job are killed at random moments and started again until they finish."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launched import is_alive, ranks_of
from runs import differences, rows_of

import fnshard as fs
from experiments import ROOT
from experiments.lib.folder import CHECKPOINTS, read_result
from experiments.lib.metrics import METRICS
from fnshard.errors import CheckpointError

POLL_S, SLOW_S, PATIENCE_S = 0.002, 0.02, 120.0
RESUMED = re.compile(r"^resume: (?:step (\d+) of|nothing to go on)", re.MULTILINE)
STOPPED = re.compile(r"^stopped: step (\d+) of", re.MULTILINE)
# Who is killed, and what the job may end with if it does not go on by itself.
CODES = {
    "kill_launcher": {-9},
    "kill_rank": {0, 1},
    "kill_all": {0, 1},
    "term_rank": {0},
    "term_launcher": {0},
}
MOMENTS = ("start", "step", "save")  # before the first step, in a step, in a save
SAVE_EVERY = 5
RUN = (
    "model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.context=32",
    "data.held_out_rows=8", "run.backend=eager", "run.device=cpu", "run.sample_tokens=4", "run.keep=2",
    "run.timeout_s=60", f"run.save_every={SAVE_EVERY}", "run.held_out_every=15",
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Who is to be killed, and when, drawn from the campaign's seed."""

    mode: str
    moment: str
    rank: int
    after: int  # steps, or saves, from the last start on
    within: float  # how far into it, 0 to 1


def draw(seed: int, ranks: int) -> Iterator[Kill]:
    """Kills without end; the same for the same seed."""
    chance = random.Random(seed)
    while True:
        moment = chance.choice(MOMENTS)
        after = chance.randint(1, 2 * SAVE_EVERY) if moment == "step" else chance.randint(1, 2)
        yield Kill(chance.choice(list(CODES)), moment, chance.randrange(ranks), after, chance.random())


class Job:
    """One start of a run, watched from outside: its output, its folder, its processes. Linux only."""

    def __init__(self, place: Path, overrides: Sequence[str], number: int):
        self.place, self.log = place, place / f"start-{number}.log"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "experiments.train", *overrides]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                command, cwd=place, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def resumed(self) -> list[int]:
        """The step that each attempt of its ranks went on from; 0 is a new run."""
        return [int(step or 0) for step in RESUMED.findall(self.text)]

    @property
    def folder(self) -> Path | None:
        """The run's: the newest that has metrics."""
        return max((p.parent for p in self.place.glob(f"outputs/*/*/{METRICS}")), default=None)

    @property
    def step(self) -> int:
        """The last that is finished."""
        return max((row["step"] for row in rows_of(self.folder)), default=0) if self.folder else 0

    @property
    def checkpoints(self) -> list[str]:
        try:
            return os.listdir(self.folder / CHECKPOINTS) if self.folder else []
        except OSError:
            return []

    @property
    def committed(self) -> list[int]:
        """Steps whose checkpoint has its name."""
        return sorted(int(name) for name in self.checkpoints if name.isdecimal())

    def saving(self) -> bool:
        return any(name.endswith(".saving") for name in self.checkpoints)

    @property
    def ranks(self) -> dict[int, int]:
        """Processes by rank, those that have not ended."""
        return {rank: pid for rank, pid in ranks_of(self.process.pid).items() if is_alive(pid)}

    def until(self, ready: Callable[[], bool], pause_s: float = POLL_S) -> bool:
        """Wait until `ready()`; False if the job ended first."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.problem(f"nothing happened for {PATIENCE_S:g} s")
            time.sleep(pause_s)
        return True

    def kill(self, mode: str, rank: int) -> bool:
        """Do it; False if who was meant is not there (any more)."""
        ranks, number = self.ranks, signal.SIGTERM if mode.startswith("term") else signal.SIGKILL
        one = [ranks[rank]] if rank in ranks else []
        every = {"kill_all": list(ranks.values()), "kill_rank": one, "term_rank": one}
        pids = every.get(mode, [self.process.pid])
        if not pids or self.process.poll() is not None:
            return False
        try:
            for pid in pids:
                os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.problem(f"it had not ended after {PATIENCE_S:g} s")) from None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def problem(self, what: str) -> str:
        """What is wrong, with the end of the log; its processes are ended."""
        self.end()
        return "\n".join([f"{what}: {self.log}", *self.text.splitlines()[-30:]])


@dataclass
class Campaign:
    """Runs in `folder`, killed as `kills` says. `problems`: what was lost, unreadable or unequal."""

    folder: Path
    overrides: Sequence[str]
    kills: Iterator[Kill]
    count: int
    problems: list[str] = field(default_factory=list)
    made_again: list[int] = field(default_factory=list)  # steps, of each kill that the run went on from
    done: int = 0
    spans_s: dict[str, float] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)

    def run(self) -> None:
        """An unbroken run, then broken ones until there were enough kills."""
        try:
            unbroken = self._unbroken()
            while self.done < self.count:
                self._broken(unbroken)
        finally:
            for job in self.jobs:
                job.end()

    def _start(self, place: Path, number: int) -> Job:
        place.mkdir(exist_ok=True)
        self.jobs.append(Job(place, [*RUN, *self.overrides], number))
        return self.jobs[-1]

    def _unbroken(self) -> Path:
        """Its folder; how long a start, a step and a save take is noted."""
        began, saves = time.monotonic(), [0.0]
        job = self._start(self.folder / "unbroken", 0)
        job.until(lambda: bool(job.resumed) and job.folder is not None, SLOW_S)
        start = time.monotonic() - began
        while job.until(job.saving):
            starting = time.monotonic()
            job.until(lambda: not job.saving())
            saves.append(time.monotonic() - starting)
        assert job.wait() == 0 and job.folder, job.problem("the unbroken run failed")
        step = statistics.median(row["seconds"] for row in rows_of(job.folder) if "seconds" in row)
        self.spans_s = {"start": start, "step": step, "save": statistics.median(saves)}
        return job.folder

    def _broken(self, unbroken: Path) -> None:
        """One run, killed and started again until it is finished."""
        place, jobs, killed = self.folder / f"run-{len(self.jobs)}", [], []
        while not jobs or read_result(jobs[-1].folder or place)["status"] != "ok":
            job, last, seen = self._start(place, len(jobs)), None, 0
            jobs.append(job)
            while self.done < self.count:
                kill = next(self.kills)
                if not self._moment(job, kill, seen):
                    break
                ranks, reached, committed = job.ranks, job.step, max(job.committed, default=0)
                before, seen_now = sum(len(j.resumed) for j in jobs), len(job.resumed)
                if not job.kill(kill.mode, kill.rank):
                    continue  # nobody was there yet
                self.done, last, seen = self.done + 1, kill, seen_now
                killed.append((kill, reached, committed, before))
                if kill.mode in ("kill_rank", "kill_all") and self._back(job, seen):
                    continue
                job.wait()
                if not gone(ranks.values(), 10 + 2 * self.spans_s["start"]):
                    self.problems.append(f"{kill}: a rank outlived its launcher")
                break
            self._look(job, job.wait(), last)
        resumed = [step for each in jobs for step in each.resumed]
        for kill, reached, committed, before in killed:
            step = resumed[before] if before < len(resumed) else reached
            self.made_again.append(max(0, reached - step))
            if step < committed:
                self.problems.append(f"{kill}: went on from step {step}, but {committed} was committed")
        self.problems += differences(unbroken, jobs[-1].folder)

    def _back(self, job: Job, seen: int) -> bool:
        """Wait until the job goes on by itself; whether it does."""
        return job.until(lambda: len(job.resumed) > seen and job.step > job.resumed[-1], SLOW_S)

    def _moment(self, job: Job, kill: Kill, seen: int) -> bool:
        """Wait for it; whether it came before the job ended."""
        if kill.moment != "start":
            if not job.until(lambda: len(job.resumed) > seen and job.folder is not None, SLOW_S):
                return False
            until = job.resumed[-1] + kill.after
            if kill.moment == "step" and not job.until(lambda: job.step >= until):
                return False
            for _ in range(kill.after if kill.moment == "save" else 0):
                if not job.until(lambda: not job.saving()) or not job.until(job.saving):
                    return False
        end = time.monotonic() + kill.within * self.spans_s[kill.moment]
        return job.until(lambda: time.monotonic() >= end)

    def _look(self, job: Job, code: int, last: Kill | None) -> None:
        """At what a job that is over has left: its exit code, and every checkpoint byte by byte."""
        assert last or code == 0, job.problem(f"exit code {code}, and nothing was killed")
        allowed = {0} | (CODES[last.mode] if last else set())
        if last and last.mode == "term_launcher" and last.moment == "start":
            allowed |= {-15, 143}  # it had not begun
        self.problems += [f"{last}: exit code {code}"] * (code not in allowed)
        stopped, committed = STOPPED.findall(job.text), job.committed
        if stopped and max(committed, default=0) != int(stopped[-1]):
            self.problems.append(f"stopped at step {stopped[-1]}, but the newest of {committed}")
        root = job.folder / CHECKPOINTS if job.folder else None
        for step in fs.checkpoint.all_steps(root) if root else ():
            try:
                fs.checkpoint.verify(root / str(step))
            except CheckpointError as error:
                self.problems.append(f"unreadable: {error}")
        if root and committed and fs.checkpoint.latest(root) != root / str(committed[-1]):
            self.problems.append(f"the newest of {committed} is not what `latest` finds")


def gone(pids: Iterable[int], seconds: float) -> bool:
    """Whether all of these processes have ended, soon."""
    left, deadline = list(pids), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if is_alive(pid)]
        time.sleep(POLL_S)
    return not left
