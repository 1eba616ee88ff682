"""The campaign: runs are killed at random moments and started again until they finish."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.chaos.config import ChaosConfig
from experiments.chaos.job import ROOT, STOPPED, Job, alive, rows_of
from experiments.resume import CHECKPOINTS
from experiments.sweep import read_result
from fnshard.errors import CheckpointError

TIMES = ("tokens_per_s", "seconds")  # what two equal runs differ in
TINY = (
    "model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.context=32",
    "data.held_out_rows=8", "run.backend=eager", "run.device=cpu", "run.sample_bytes=4", "run.keep=2",
    "run.timeout_s=60",
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Who is to be killed, and when, drawn from the campaign's seed."""

    mode: str
    moment: str
    rank: int
    after: int  # steps, or saves, from the last start on
    delay_s: float


@dataclass
class Done:
    """A kill, and what came of it."""

    kill: Kill
    step: int = 0
    committed: int = 0
    in_save: bool = False
    inside: bool = False  # the ranks were started anew by their launcher
    resumed: int | None = None
    problems: list[str] = field(default_factory=list)


def plan(config: ChaosConfig) -> Iterator[Kill]:
    """Kills without end; the same for the same seed."""
    draw = random.Random(config.seed)
    while True:
        moment = draw.choice(config.moments)
        after = draw.randint(1, 2 * config.save_every) if moment == "step" else draw.randint(1, 2)
        # Of the start: imports, meeting, reading the checkpoint; of a step and a save of this size: all of it.
        delay_s = draw.uniform(0, {"start": 9.0, "step": 0.04, "save": 0.04}[moment])
        yield Kill(draw.choice(config.modes), moment, draw.randrange(config.ranks), after, delay_s)


class Campaign:
    """Runs, kills and what was found, in `folder`."""

    def __init__(self, config: ChaosConfig, folder: Path, say: Callable[[str], None] = lambda line: None):
        self.config, self.folder, self.say = config, folder, say
        self.kills = plan(config)
        self.done: list[Done] = []
        self.runs: list[list[str]] = []  # of each that has finished, what was wrong with it
        self.starts = 0

    def run(self) -> dict[str, Any]:
        """The unbroken run, then broken ones until there were enough kills."""
        text = self.folder / "text"
        shutil.copytree(ROOT / "experiments", text, ignore=shutil.ignore_patterns("__pycache__"))
        began = time.monotonic()
        unbroken = self._finished(self._start(self._place("unbroken"), 0))
        self.say(f"unbroken run: {len(rows_of(unbroken))} rows of metrics")
        while len(self.done) < self.config.kills:
            self._broken(unbroken)
        return {
            "config": asdict(self.config),
            "kills": [asdict(each) for each in self.done],
            "runs": self.runs,
            "starts": self.starts,
            "seconds": time.monotonic() - began,
        }

    def _broken(self, unbroken: Path) -> None:
        """One run, killed and started again until it is finished."""
        place, starts = self._place(f"run-{len(self.runs)}"), 0
        while True:
            job, starts = self._start(place, starts), starts + 1
            while len(self.done) < self.config.kills and self._attempt(job):
                pass
            code = job.wait()
            if self.done and not self._known_end(job, code):
                raise job.error(f"exit code {code}")
            if job.folder is not None and read_result(job.folder)["status"] == "ok":
                break
            self._look(job)
        self.runs.append(self._compare(unbroken, job.folder))
        wrong = "; ".join(self.runs[-1]) or "equal to the unbroken one, bit for bit"
        self.say(f"run {len(self.runs)} finished after {starts} starts, {len(self.done)} kills: {wrong}")

    def _place(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir()
        return place

    def _start(self, place: Path, number: int) -> Job:
        c = self.config
        self.starts += 1
        own = [
            f"data.root={self.folder / 'text'}", f"mesh.shard={c.ranks}", f"run.steps={c.steps}",
            f"run.save_every={c.save_every}", f"run.held_out_every={c.held_out_every}",
            f"run.async_save={str(c.async_save).lower()}", f"run.max_restarts={c.max_restarts}",
        ]  # fmt: skip
        return Job.start(place, [*TINY, *own], number, c.patience_s)

    def _finished(self, job: Job) -> Path:
        if job.wait() != 0 or job.folder is None:
            raise job.error("the unbroken run failed")
        return job.folder

    # -------------------------------------------------------------- one kill

    def _attempt(self, job: Job) -> bool:
        """Wait for a moment and kill; whether the job goes on by itself, so that it can be killed again."""
        kill, before = next(self.kills), job.resumed
        if not self._moment(job, kill, len(before)):
            return False
        done = Done(kill, job.step, max(job.committed, default=0), job.saving)
        ranks = job.ranks
        if not job.kill(kill.mode, kill.rank):
            return False
        self.done.append(done)
        if kill.mode in ("kill_rank", "kill_all"):
            done.inside = job.until(lambda: len(job.resumed) > len(before))
            if done.inside:
                self._went_on(done, job.resumed[len(before)])
            return done.inside
        job.wait()
        if not _gone(list(ranks.values()), 10):
            done.problems.append("a rank outlived its launcher")
        return False

    def _moment(self, job: Job, kill: Kill, attempts: int) -> bool:
        """Whether it came before the job ended."""
        if kill.moment != "start":
            if not job.until(lambda: len(job.resumed) > attempts or (attempts > 0 and self._under_way(job))):
                return False
            base = job.resumed[-1]
            if kill.moment == "step" and not job.until(lambda: job.step >= base + kill.after):
                return False
            for _ in range(kill.after if kill.moment == "save" else 0):
                if not job.until(lambda: not job.saving) or not job.until(lambda: job.saving):
                    return False
        job.until(lambda: False, kill.delay_s)
        return job.process.poll() is None

    def _under_way(self, job: Job) -> bool:
        """After a restart that was waited for already."""
        return bool(self.done) and self.done[-1].inside and self.done[-1].resumed == job.resumed[-1]

    # -------------------------------------------------------------- what came of it

    def _look(self, job: Job) -> None:
        """At what a job that is over has left behind."""
        done = self.done[-1]
        stopped = STOPPED.findall(job.text)
        if stopped and (done.step > int(stopped[-1]) or max(job.committed, default=0) != int(stopped[-1])):
            done.problems.append(f"SIGTERM: stopped at step {stopped[-1]}, there are {job.committed}")
        if job.folder is None:
            return
        for step in fs.checkpoint.all_steps(job.folder / CHECKPOINTS):
            try:
                fs.checkpoint.verify(job.folder / CHECKPOINTS / str(step))
            except CheckpointError as error:
                done.problems.append(f"unreadable: {error}")
