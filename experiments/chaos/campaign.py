"""The campaign: runs are killed at random moments and started again until they finish."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.chaos.config import ChaosConfig
from experiments.chaos.job import POLL_S, ROOT, SLOW_S, STOPPED, MonitoredRun, gone, rows_of
from experiments.data.files import read_json, write_json
from experiments.training.metrics_file import METRICS
from experiments.training.result import read_result
from experiments.training.resume import CHECKPOINTS
from experiments.training.run_record import VARIES
from fnshard.errors import CheckpointError

FOUND = "chaos.json"  # what was found so far
TIMES = ("tokens_per_s", "seconds", *VARIES)  # what two equal runs differ in
TINY = (
    "model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.context=32",
    "data.held_out_rows=8", "run.backend=eager", "run.device=cpu", "run.sample_tokens=4", "run.keep=2",
    "run.timeout_s=60",
)  # fmt: skip
# What a job may end with, by how it was killed last.
CODES = {
    "": {0}, "kill_launcher": {-9}, "kill_rank": {0, 1}, "kill_all": {0, 1}, "term_rank": {0},
    "term_launcher": {0},
}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Who is to be killed, and when, drawn from the campaign's seed."""

    mode: str
    moment: str
    rank: int
    after: int  # steps, or saves, from the last start on
    within: float  # how far into it, 0 to 1


@dataclass
class KillOutcome:
    """A kill, and what came of it.

    `step`, `committed`: how far the run was, and its newest checkpoint. `inside`: the job went on by itself.
    `attempts`: how often ranks had begun before; `resumed`: where the next ones began. `back_s`: seconds
    until the next step was finished, where the job went on by itself and nothing was killed before;
    `imports_s`: those of them in which new processes did nothing but import.
    """

    kill: Kill
    run: int
    step: int
    committed: int
    in_save: bool
    ranks: int
    attempts: int
    inside: bool = False
    resumed: int | None = None
    back_s: float | None = None
    imports_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Committed steps that were not found again."""
        return 0 if self.resumed is None else max(0, self.committed - self.resumed)


def plan(config: ChaosConfig) -> Iterator[Kill]:
    """Kills without end; the same for the same seed."""
    draw = random.Random(config.seed)
    while True:
        moment = draw.choice(config.moments)
        after = draw.randint(1, 2 * config.save_every) if moment == "step" else draw.randint(1, 2)
        yield Kill(draw.choice(config.modes), moment, draw.randrange(config.ranks), after, draw.random())


class Campaign:
    """A campaign in `folder`; one that was interrupted there goes on behind the last run that it finished."""

    def __init__(self, config: ChaosConfig, folder: Path, say: Callable[[str], None] = lambda line: None):
        self.config, self.folder, self.say = config, folder, say
        earlier = read_json(folder / FOUND)
        earlier = earlier if earlier.get("config") == json.loads(json.dumps(asdict(config))) else {}
        self.runs: list[list[str]] = earlier.get("runs", [])  # of each that has finished, what was wrong
        self.kills = islice(plan(config), earlier.get("drawn", 0), None)
        self.drawn, self.coming = earlier.get("drawn", 0), next(self.kills)
        kills = [_outcome(values) for values in earlier.get("kills", [])]
        self.done: list[KillOutcome] = [kill for kill in kills if kill.run < len(self.runs)]
        self.starts, self.seconds = earlier.get("starts", 0), earlier.get("seconds", 0.0)
        self.jobs: list[MonitoredRun] = []
        self.spans_s: dict[str, float] = earlier.get("spans_s", {})  # how long each moment is here
        self.began, self.seen = time.monotonic(), 0  # attempts of a job before the last kill

    @property
    def found(self) -> dict[str, Any]:
        """What came of it so far, as JSON."""
        return {
            "config": asdict(self.config),
            "kills": [asdict(each) | {"lost": each.lost} for each in self.done],
            "runs": self.runs,
            "starts": self.starts + len(self.jobs),
            "spans_s": self.spans_s,
            "drawn": self.drawn,
            "seconds": self.seconds + time.monotonic() - self.began,
        }

    def run(self) -> dict[str, Any]:
        """The unbroken run, then broken ones until there were enough kills; what was found so far is written
        behind each kill.

        Raises:
            ChaosError: a run hung, or failed unasked.
        """
        text = self.folder / "text"
        if not text.exists():
            shutil.copytree(ROOT / "experiments", text, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            unbroken = self._unbroken()
            while len(self.done) < self.config.kills:
                self._broken(unbroken)
        finally:
            for job in self.jobs:
                job.end()
            write_json(self.folder / FOUND, self.found)
        return self.found

    def _unbroken(self) -> Path:
        """The folder of the run that nothing happens to."""
        earlier = [Path(p).parent for p in self.folder.glob(f"unbroken*/outputs/*/*/{METRICS}")]
        whole = [folder for folder in earlier if read_result(folder)["status"] == "ok"]
        if whole and self.spans_s:
            return whole[0]
        job = self._start(self._place("unbroken"), 0)
        self.spans_s = measured(job)
        if job.wait() != 0 or job.folder is None:
            raise job.error("the unbroken run failed")
        self.say(", ".join(f"a {name} takes {span * 1e3:.0f} ms" for name, span in self.spans_s.items()))
        return job.folder

    def _broken(self, unbroken: Path) -> None:
        """One run, killed and started again until it is finished."""
        place, jobs, mine = self._place(f"run-{len(self.runs)}"), [], len(self.done)
        newest = 0
        while True:
            job = self._start(place, len(jobs))
            before, attempts = len(self.done), sum(len(j.resumed) for j in jobs)
            jobs.append(job)
            while len(self.done) < self.config.kills and self._kill_once(job, attempts):
                pass
            self._look(job, job.wait(), self.done[before:])
            if job.resumed and job.resumed[0] < newest:
                self.done[-1].problems.append(f"went on from step {job.resumed[0]}, {newest} was there")
            newest = max(job.committed(job.folder), default=0)
            if job.folder is not None and read_result(job.folder)["status"] == "ok":
                break
        resumed = [step for j in jobs for step in j.resumed]
        for done in self.done[mine:]:
            done.resumed = resumed[done.attempts] if done.attempts < len(resumed) else None
        self.runs.append(differences(unbroken, job.folder))
        wrong = "; ".join(self.runs[-1]) or "equal to the unbroken one"
        self.say(f"{len(self.done)} kills; run {len(self.runs)}: {len(jobs)} starts, {wrong}")

    def _place(self, name: str) -> Path:
        """A new folder; an interrupted campaign may have left one of that name."""
        place = self.folder / f"{name}.{len(list(self.folder.glob(f'{name}.*')))}"
        place.mkdir()
        return place

    def _start(self, place: Path, number: int) -> MonitoredRun:
        c = self.config
        own = [
            f"data.root={self.folder / 'text'}", f"mesh.shard={c.ranks}", f"run.steps={c.steps}",
            f"run.save_every={c.save_every}", f"run.held_out_every={c.held_out_every}",
            f"run.async_save={str(c.async_save).lower()}", f"run.max_restarts={c.max_restarts}",
            f"run.replicas={c.replicas}",
        ]  # fmt: skip
        self.jobs.append(MonitoredRun.start(place, [*TINY, *own], number, c.patience_s, c.nodes))
        self.seen = 0
        return self.jobs[-1]

    # -------------------------------------------------------------- one kill

    def _kill_once(self, job: MonitoredRun, attempts: int) -> bool:
        """Wait for a moment and kill; whether the job is still there to be killed again."""
        kill, self.coming, self.drawn = self.coming, next(self.kills), self.drawn + 1
        if not self._moment(job, kill):
            return False
        folder, ranks, seen = job.folder, job.ranks, len(job.resumed)
        newest = max(job.committed(folder), default=0)
        in_save, before = job.saving(folder), attempts + seen
        done = KillOutcome(kill, len(self.runs), job.step(folder), newest, in_save, len(ranks), before)
        node = kill.rank % job.nodes
        beneath = job.ranks_of(node)
        if not job.kill(kill.mode, kill.rank):
            return not job.ended  # nobody was there yet
        self.done.append(done)
        self.seen = seen
        again = kill.mode == "kill_launcher" and job.nodes > 1
        if again:
            job.begin_again(node)
        if again or kill.mode in ("kill_rank", "kill_all"):
            done.inside = self._back(job, done, set(ranks.values()))
        else:
            job.wait()
        # One that is still importing looks for its launcher when it has done so.
        if not gone((beneath if again else ranks).values(), seconds=10 + 2 * self.spans_s["start"]):
            done.problems.append("a rank outlived its launcher")
        write_json(self.folder / FOUND, self.found)
        return done.inside

    def _back(self, job: MonitoredRun, done: KillOutcome, dead: set[int]) -> bool:
        """Wait until the job goes on; whether it does."""
        if self.coming.moment == "start" and len(self.done) < self.config.kills:
            ranks = self.config.ranks
            return job.until(lambda: len(job.ranks) == ranks and not dead & set(job.ranks.values()), SLOW_S)
        began = last = time.monotonic()
        imports_s = 0.0

        def finished() -> bool:
            nonlocal last, imports_s
            last, before = time.monotonic(), last
            imports_s += (last - before) * job.importing
            resumed = job.resumed
            return len(resumed) > self.seen and job.step(job.folder) > resumed[-1]

        if not job.until(finished, SLOW_S):
            return False
        if done.kill.moment != "start":
            done.back_s, done.imports_s = last - began, imports_s
        return True

    def _moment(self, job: MonitoredRun, kill: Kill) -> bool:
        """Whether it came before the job ended."""
        if kill.moment != "start":
            if not job.until(lambda: len(job.resumed) > self.seen and job.folder is not None, SLOW_S):
                return False
            folder, until = job.folder, job.resumed[-1] + kill.after
            if kill.moment == "step" and not job.until(lambda: job.step(folder) >= until):
                return False
            for _ in range(kill.after if kill.moment == "save" else 0):
                if not job.until(lambda: not job.saving(folder)) or not job.until(lambda: job.saving(folder)):
                    return False
        until = time.monotonic() + kill.within * self.spans_s[kill.moment]
        early = kill.moment == "start"  # no later than the first step
        job.until(
            lambda: time.monotonic() >= until or (early and len(job.resumed) > self.seen),
            SLOW_S if early else POLL_S,
        )
        return not job.ended

    # -------------------------------------------------------------- what came of it

    def _look(self, job: MonitoredRun, code: int, done: Sequence[KillOutcome]) -> None:
        """At what a job that is over has left behind."""
        last = done[-1] if done else None
        allowed = CODES[last.kill.mode if last else ""]
        if last and last.kill.mode == "term_launcher" and (not last.ranks or last.kill.moment == "start"):
            allowed = allowed | {-15, 143} | ({1} if job.nodes > 1 else set())  # it had not even begun
        if last and (last.inside or (job.nodes > 1 and last.kill.mode == "kill_launcher")):
            allowed = {0}  # of those that are there in the end
        if code not in allowed and last is None:
            raise job.error(f"exit code {code}")
        problems = [f"exit code {code}"] * (code not in allowed)
        stopped, committed = STOPPED.findall(job.text), job.committed(job.folder)
        if stopped and max(committed, default=0) != int(stopped[-1]):
            problems.append(f"stopped at step {stopped[-1]}, but the newest of {committed}")
        root = job.folder / CHECKPOINTS if job.folder else None
        for step in fs.checkpoint.all_steps(root) if root else ():
            try:
                fs.checkpoint.verify(root / str(step))
            except CheckpointError as error:
                problems.append(f"unreadable: {error}")
        if root and committed and fs.checkpoint.latest(root) != root / str(committed[-1]):
            problems.append(f"unreadable: the newest of {committed} is not what `latest` finds")
        if last:
            last.problems += problems


def _outcome(values: Mapping[str, Any]) -> KillOutcome:
    """What `asdict` made of one."""
    kept = {each.name: values[each.name] for each in fields(KillOutcome)}
    return KillOutcome(**kept | {"kill": Kill(**values["kill"])})


def measured(job: MonitoredRun) -> dict[str, float]:
    """How long the start, a step and a save of the unbroken run take; medians."""
    began, saves = time.monotonic(), [0.0]
    job.until(lambda: bool(job.resumed) and job.folder is not None, SLOW_S)
    start, folder = time.monotonic() - began, job.folder
    while job.until(lambda: job.saving(folder)):
        starting = time.monotonic()
        job.until(lambda: not job.saving(folder))
        saves.append(time.monotonic() - starting)
    steps = [row["seconds"] for row in rows_of(folder) if "seconds" in row] if folder else [0.0]
    return {"start": start, "step": statistics.median(steps), "save": statistics.median(saves)}


def differences(unbroken: Path, broken: Path) -> list[str]:
    """In what two runs differ that should be equal bit for bit: every loss, every parameter, the position."""
    wrong = []
    rows, others = (
        [{k: v for k, v in row.items() if k not in TIMES} for row in rows_of(f)] for f in (unbroken, broken)
    )
    if rows != others:
        at = next(
            (i for i, (a, b) in enumerate(zip(rows, others, strict=False)) if a != b),
            min(len(rows), len(others)),
        )
        wrong.append(f"metrics differ from row {at} on: {rows[at : at + 1]} and {others[at : at + 1]}")
    results = [{k: v for k, v in read_result(f).items() if k not in TIMES} for f in (unbroken, broken)]
    if results[0] != results[1]:
        wrong.append(f"results differ: {results[0]} and {results[1]}")
    saved = [fs.checkpoint.latest(f / CHECKPOINTS) for f in (unbroken, broken)]
    a, b = (fs.checkpoint.verify(path) for path in saved)
    wrong += [f"{name} differs" for name in a.leaves if a.leaves[name] != b.leaves.get(name)]
    wrong += [f"{name} differs" for name in ("step", "seed", "data") if getattr(a, name) != getattr(b, name)]
    return wrong
