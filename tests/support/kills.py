"""A kill campaign: runs of a command are killed at random moments and started again until they finish."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commands import start_command
from launched import children_of, is_alive, ranks_below
from runs import differences, rows_of

import fnshard as fs
from experiments import ROOT
from experiments.lib.folder import CHECKPOINTS, RESULT, memory_name, read_result
from experiments.lib.metrics import METRICS
from experiments.lib.record import RUN as RECORD
from fnshard.errors import CheckpointError

POLL_S, SLOW_S, PATIENCE_S = 0.004, 0.02, 900.0
RESUMED = re.compile(r"^resume: (?:step (\d+) of|nothing to go on from, a new run in) (\S+)$", re.MULTILINE)
STOPPED = re.compile(r"^stopped: step (\d+) of .* run\.resume=(\S+)$", re.MULTILINE)
MOMENTS = ("start", "step", "save")  # before the first step, in a step, in a save
SAVE_EVERY = 5
# Who is killed, and what the command may end with if it does not go on by itself.
CODES: Mapping[str, set[int]] = {
    "kill_launcher": {-9},
    "kill_rank": {0, 1},
    "kill_all": {0, 1},
    "term_rank": {0},
    "term_launcher": {0},
}


@dataclass(frozen=True)
class Variant:
    """A command whose runs are killed.

    Args:
        command: what Python gets before the options.
        options: of every start.
        runs: the folders of its runs, as a pattern below the folder that it is started in.
        equal: files of a finished run that are those of the unbroken one, byte for byte.
        codes: what it may end with besides `CODES`, by who was killed.
        is_executed: whether its ranks import torch anew. The ranks of others are forked, as the command is,
            which takes a tenth of the time.
    """

    command: Sequence[str]
    options: Sequence[str]
    runs: str = "outputs/*/*"
    equal: Sequence[str] = ()
    codes: Mapping[str, set[int]] = field(default_factory=dict)
    is_executed: bool = False


RUN = ("run.backend=eager", "run.device=cpu", "run.keep=2", "run.timeout_s=60",
       f"run.save_every={SAVE_EVERY}", "run.held_out_every=15")  # fmt: skip
SMALL = (*RUN, "run.sample_tokens=4", "model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads=1",
         "model.context=32", "data.held_out_rows=8")  # fmt: skip
TUNED = (*RUN, "run.sample_tokens=3", "method.rank=2", "data.context=48", "data.rows=4",
         "data.held_out_rows=4")  # fmt: skip
REWARDED = (*TUNED, "objective=grpo", "objective.group=4", "objective.tokens=3", "optimizer.lr=0.02",
            "objective.reward={_target_: custom_task.digits}")  # fmt: skip
SEEDS = (*SMALL, "run.seed=1,2,3", "hydra.sweep.dir=sweep")
AGENT = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1000")
ADAPTERS = ("samples.txt", "adapters/adapter_model.safetensors")

TRAIN = Variant(("-m", "experiments.train"), SMALL, equal=("sample.txt",))
FINETUNE = Variant(("-m", "experiments.finetune"), TUNED, "outputs/finetune/*/*", ADAPTERS)
REWARDS = Variant(("-m", "experiments.finetune"), REWARDED, "outputs/finetune/*/*", ADAPTERS)
# What a signal does to one run of a sweep, it does not do to the others: the sweep ends with 1.
SWEEP = Variant(("-m", "experiments.train", "--multirun"), SEEDS, "sweep/[0-9]", ("sample.txt",))
SIDE_BY_SIDE = Variant(
    SWEEP.command, (*SEEDS, "launcher=joblib"), SWEEP.runs, SWEEP.equal,
    {"term_rank": {1}, "term_launcher": {-signal.SIGTERM}}, is_executed=True,
)  # fmt: skip
# torchrun's agent answers SIGTERM with an exception.
TORCHRUN = Variant(
    (*AGENT, *TRAIN.command), SMALL, equal=TRAIN.equal, is_executed=True,
    codes={"term_launcher": {1, -signal.SIGTERM}},
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """A kill: which process it hits, and when, drawn from the campaign's seed."""

    mode: str
    moment: str
    rank: int
    after: int  # steps, or saves, from the last start on
    within: float  # how far into it, 0 to 1


def draw(seed: int | str, ranks: int) -> Iterator[Kill]:
    """Yield kills without end; the same for the same seed."""
    chance = random.Random(seed)
    while True:
        moment = chance.choice(MOMENTS)
        after = chance.randint(1, 2 * SAVE_EVERY) if moment == "step" else chance.randint(1, 2)
        yield Kill(chance.choice(list(CODES)), moment, chance.randrange(ranks), after, chance.random())


def list_committed(run: Path) -> list[int]:
    """Return the steps of a run whose checkpoint has its name."""
    try:
        return sorted(int(name) for name in os.listdir(run / CHECKPOINTS) if name.isdecimal())
    except OSError:
        return []


def is_saving(run: Path) -> bool:
    try:
        return any(name.endswith(".saving") for name in os.listdir(run / CHECKPOINTS))
    except OSError:
        return False


def read_last_step(run: Path) -> int:
    """Return the last finished step of a run; 0 if there is none."""
    return max((row["step"] for row in rows_of(run)), default=0) if (run / METRICS).exists() else 0


def is_done(run: Path) -> bool:
    return read_result(run)["status"] == "ok"


class Job:
    """A start of a command, watched from outside: its output, its runs' folders, its processes. On Linux."""

    def __init__(self, variant: Variant, place: Path, options: Sequence[str], number: int):
        self.variant, self.place, self.log = variant, place, place / f"start-{number}.log"
        path = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))  # where a reward of one's own is
        command = [*variant.command, *variant.options, *options]
        env = {"PYTHONPATH": path, "FNSHARD_CACHE": "off"}  # as on a machine that has never seen the run
        self.process = start_command(command, place, env=env, output=self.log)

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def runs(self) -> list[Path]:
        """Return the folders of all runs, of earlier starts too, in order."""
        return sorted(path for path in self.place.glob(self.variant.runs) if (path / METRICS).exists())

    @property
    def starts(self) -> list[tuple[Path, int]]:
        """Return the runs that this start began or went on with, and from which step; 0 is a new run."""
        found = [(self.place / path, int(step or 0)) for step, path in RESUMED.findall(self.text)]
        return [(self._run_of(path), step) for path, step in found]

    def _run_of(self, path: Path) -> Path:
        """Return the run whose folder a path is, or whose checkpoints or memory."""
        if path.name == CHECKPOINTS:
            return path.parent
        return next((run for run in self.runs if path.name.endswith(memory_name(run))), path)

    @property
    def run(self) -> Path | None:
        """Return the run that this start is at work on."""
        starts = self.starts
        return starts[-1][0] if starts else None

    def is_under_way(self, seen: int) -> bool:
        """Return whether a run has begun, or gone on, since `seen` of them had."""
        starts = self.starts
        return len(starts) > seen and (starts[-1][0] / METRICS).exists()

    @property
    def ranks(self) -> list[int]:
        """Return the processes of ranks that have not ended, in order of ranks."""
        launcher = self.process.pid
        if self.variant.is_executed:
            pids = [pid for _, pid in ranks_below(launcher)]
        else:
            pids = children_of(launcher)  # forks of its own, whose environment nobody sees
        return list(filter(is_alive, pids))

    def until(self, ready: Callable[[], bool], pause_s: float = POLL_S) -> bool:
        """Wait until `ready()`; False if the command ended first."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.problem(f"nothing happened for {PATIENCE_S:g} s")
            time.sleep(pause_s)
        return True

    def kill(self, kill: Kill) -> bool:
        """Do it; False if who was meant is not there (any more)."""
        ranks = self.ranks
        number = signal.SIGTERM if kill.mode.startswith("term") else signal.SIGKILL
        pids = {
            "kill_all": ranks,
            "kill_rank": ranks[kill.rank : kill.rank + 1],
            "term_rank": ranks[kill.rank : kill.rank + 1],
        }.get(kill.mode, [self.process.pid])
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
        """End the processes, and return what is wrong with the end of the log."""
        self.end()
        return "\n".join([f"{what}: {self.log}", *self.text.splitlines()[-30:]])


@dataclass(frozen=True)
class Killed:
    """A kill that was made, and what there was at the time.

    Args:
        run: that was at work, if one was.
        reached: its last step.
        committed: the newest checkpoint's step, of each run that was not finished.
        starts: how many runs had begun or gone on before, of all starts in this place.
    """

    kill: Kill
    run: Path | None
    reached: int
    committed: Mapping[Path, int]
    starts: int


@dataclass
class Campaign:
    """A series of runs in `folder`, killed as `kills` says; `problems` are lost, torn or unequal things."""

    folder: Path
    variant: Variant
    options: Sequence[str]
    kills: Iterator[Kill]
    count: int
    problems: list[str] = field(default_factory=list)
    made_again: list[int] = field(default_factory=list)  # steps, of each kill that the run went on from
    done: list[Kill] = field(default_factory=list)
    spans_s: dict[str, float] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)

    def run(self) -> None:
        """Make an unbroken run, or sweep, then broken ones until there were enough kills."""
        try:
            unbroken = self._unbroken()
            while len(self.done) < self.count:
                self._broken(unbroken)
        finally:
            for job in self.jobs:
                job.end()

    def __str__(self) -> str:
        kills = ", ".join(f"{mode} {sum(k.mode == mode for k in self.done)}" for mode in CODES)
        saves = sum(kill.moment == "save" for kill in self.done)
        again = statistics.mean(self.made_again) if self.made_again else 0.0
        return (
            f"{len(self.done)} kills ({kills}; {saves} inside a save), {len(self.jobs)} starts, "
            f"{again:.1f} steps made again a kill, {len(self.problems)} problems"
        )

    def _start(self, place: Path, number: int) -> Job:
        place.mkdir(exist_ok=True)
        self.jobs.append(Job(self.variant, place, self.options, number))
        return self.jobs[-1]

    def _unbroken(self) -> list[Path]:
        """Make the unbroken runs, and return their folders; note how long a start, a step and a save take."""
        began, saves = time.monotonic(), [0.0]
        job = self._start(self.folder / "unbroken", 0)
        job.until(lambda: job.is_under_way(0), SLOW_S)
        start = time.monotonic() - began
        while job.until(lambda: is_saving(job.run)):
            starting = time.monotonic()
            job.until(lambda: not is_saving(job.run))
            saves.append(time.monotonic() - starting)
        assert job.wait() == 0 and job.runs, job.problem("the unbroken run failed")
        seconds = [row["seconds"] for run in job.runs for row in rows_of(run) if "seconds" in row]
        self.spans_s = {"start": start, "step": statistics.median(seconds), "save": statistics.median(saves)}
        return job.runs

    def _broken(self, unbroken: Sequence[Path]) -> None:
        """Make one run, or sweep, that is killed and started again until it is finished."""
        place, jobs, killed = self.folder / f"run-{len(self.jobs)}", [], []
        while not jobs or sum(map(is_done, jobs[-1].runs)) < len(unbroken):
            finished = {run: contents(run) for run in (jobs[-1].runs if jobs else ()) if is_done(run)}
            job, mine, seen = self._start(place, len(jobs)), [], 0
            jobs.append(job)
            while len(self.done) < self.count:
                kill = next(self.kills)
                if not self._moment(job, kill, seen):
                    break
                runs, ranks = job.runs, job.ranks
                committed = {run: max(list_committed(run), default=0) for run in runs if not is_done(run)}
                run = job.run
                reached, seen_now = read_last_step(run) if run else 0, len(job.starts)
                before = sum(len(each.starts) for each in jobs[:-1]) + seen_now
                if not job.kill(kill):
                    continue  # nobody was there yet
                seen = seen_now
                self.done.append(kill)
                mine.append(kill)
                killed.append(Killed(kill, run, reached, committed, before))
                if kill.mode in ("kill_rank", "kill_all") and self._back(job, seen):
                    continue
                job.wait()
                if not gone(ranks, 10 + 2 * self.spans_s["start"]):
                    self.problems.append(f"{kill}: a rank outlived its launcher")
                break
            self._look(job, job.wait(), mine)
            self.problems += [f"{run}: it was finished, and is made again" for run in finished
                              if contents(run) != finished[run]]  # fmt: skip
        starts, runs = [start for job in jobs for start in job.starts], jobs[-1].runs[-len(unbroken) :]
        for each in killed:
            self._follow(each, starts[each.starts :], runs)
        for whole, broken in zip(unbroken, runs, strict=True):
            self.problems += [f"{broken}: {each}" for each in unlike(whole, broken, self.variant.equal)]

    def _follow(self, killed: Killed, later: Sequence[tuple[Path, int]], runs: Sequence[Path]) -> None:
        """Check that every run went on from what was committed, or was not stopped at all."""
        went_on: dict[Path, int] = {}
        for run, step in later:
            went_on.setdefault(run, step)
        if killed.run:
            from_step = went_on.get(killed.run, killed.reached if killed.run in runs else 0)
            self.made_again.append(max(0, killed.reached - from_step))
        for run, committed in killed.committed.items():
            step = went_on.get(run, committed if run in runs else 0)
            if step < committed:
                self.problems.append(
                    f"{killed.kill}: {run} went on from step {step}, but {committed} was committed"
                )

    def _back(self, job: Job, seen: int) -> bool:
        """Wait until the command goes on by itself; whether it does."""
        return job.until(
            lambda: job.is_under_way(seen) and read_last_step(job.run) > job.starts[-1][1], SLOW_S
        )

    def _moment(self, job: Job, kill: Kill, seen: int) -> bool:
        """Wait for it; whether it came before the command ended."""
        if kill.moment != "start":
            if not job.until(lambda: job.is_under_way(seen), SLOW_S):
                return False
            run, step = job.starts[-1]
            over = lambda: job.run != run or is_done(run)  # noqa: E731  (a sweep is at its next)
            if kill.moment == "step" and not job.until(
                lambda: read_last_step(run) >= step + kill.after or over()
            ):
                return False
            for _ in range(kill.after if kill.moment == "save" else 0):
                if not (
                    job.until(lambda: not is_saving(run) or over())
                    and job.until(lambda: is_saving(run) or over())
                ):
                    return False
        end = time.monotonic() + kill.within * self.spans_s[kill.moment]
        return job.until(lambda: time.monotonic() >= end)

    def _look(self, job: Job, code: int, kills: Sequence[Kill]) -> None:
        """Look at what a command that is over has left: its exit code, and every checkpoint byte by byte."""
        assert kills or code == 0, job.problem(f"exit code {code}, and nothing was killed")
        allowed = {0}
        for kill in kills:
            allowed |= CODES[kill.mode] | self.variant.codes.get(kill.mode, set())
            if kill.mode == "term_launcher" and kill.moment == "start":
                allowed |= {-15, 143}  # it had not begun
        self.problems += [f"{kills[-1:]}: exit code {code}, {job.log}"] * (code not in allowed)
        for step, run in STOPPED.findall(job.text):
            committed = list_committed(job.place / run)
            if max(committed, default=0) != int(step):
                self.problems.append(f"{run} stopped at step {step}, but the newest of {committed}")
        for root in (run / CHECKPOINTS for run in job.runs):
            for step in fs.checkpoint.all_steps(root):
                try:
                    fs.checkpoint.verify(root / str(step))
                except CheckpointError as error:
                    self.problems.append(f"unreadable: {error}")
            committed = list_committed(root.parent)
            if committed and fs.checkpoint.latest(root) != root / str(committed[-1]):
                self.problems.append(f"the newest of {committed} is not what `latest` finds")


def contents(run: Path) -> dict[str, bytes]:
    """Return what a run's steps have left in its folder."""
    return {name: (run / name).read_bytes() for name in (METRICS, RECORD, RESULT)}


def unlike(unbroken: Path, broken: Path, equal: Sequence[str]) -> list[str]:
    """Return in what two finished runs differ that should be equal."""
    names = [{path.name for path in run.iterdir()} for run in (unbroken, broken)]
    wrong = [*differences(unbroken, broken), *(f"{name} is missing" for name in sorted(names[0] - names[1]))]
    # Files that have to be equal may lie in folders of the run.
    for name in equal:
        both = [run / name for run in (unbroken, broken)]
        if not all(path.exists() for path in both):
            wrong.append(f"{name} was not made")
        elif both[0].read_bytes() != both[1].read_bytes():
            wrong.append(f"{name} differs")
    return wrong


def gone(pids: Iterable[int], seconds: float) -> bool:
    """Return whether all of these processes end within some seconds."""
    left, deadline = list(pids), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if is_alive(pid)]
        time.sleep(POLL_S)
    return not left
