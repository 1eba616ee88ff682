"""Runs: those of a folder, as their files show them.

They are started, stopped and resumed by their own commands, as in a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import python_path
from experiments.compare.outcome import MARKS, OVERRIDES, UNFINISHED, Outcome, read_outcome
from experiments.lib.checks import ConfigError
from experiments.lib.files import LOCK, read_json
from experiments.lib.folder import IDENTITY, OUTPUTS, RESULT
from experiments.lib.metrics import METRICS
from experiments.lib.record import RUN
from experiments.web.form import JOBS, RUN_DIR, command_line, quote, refuse_reserved

PLACES = (OUTPUTS, Path("multirun"))  # the folders of runs, below the folder of the page
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # the names that a person may give a run
STARTING, RUNNING, STOPPING, KILLED = "starting", "running", "stopping", "killed"
AT_WORK = (STARTING, RUNNING, STOPPING)
SAMPLES = ("sample.txt", "samples.txt")  # the files of train and of finetune
SHARE = 10  # a run's files are read again after so many times the seconds that reading took
TAIL_BYTES = 6000  # the end of what a command has printed
LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class RunView:
    """A run as its files show it.

    Args:
        name: its folder, relative to the page's.
        job: the command; empty if it is not known.
        status: one of `AT_WORK`, "killed", or a status of `Outcome`.
        arguments: the arguments of the command.
        steps: the steps that it is to make; 0 if they are not known.
        outcome: its outcome; None if it has written nothing.
    """

    folder: Path
    name: str
    job: str
    status: str
    arguments: tuple[str, ...] = ()
    steps: int = 0
    outcome: Outcome | None = None

    @property
    def is_at_work(self) -> bool:
        return self.status in AT_WORK

    @property
    def can_resume(self) -> bool:
        return self.status in ("stopped", "failed", KILLED) and bool(self.job and self.outcome)

    @property
    def step(self) -> int:
        return self.outcome.rows[-1]["step"] if self.outcome and self.outcome.rows else 0


@dataclass
class ReadOutcome:
    """An outcome as it was read from a run's files.

    Args:
        stamp: a value that changes with the run's files.
        at: the time at which it was read.
        took: the seconds that reading took.
    """

    stamp: tuple[Any, ...]
    outcome: Outcome
    at: float
    took: float


@dataclass(frozen=True)
class Started:
    """A command that this page has started."""

    job: str
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes]


@dataclass
class Runs:
    """The runs below a folder.

    Its state is the commands that this page has started, the runs that were asked to stop, and the outcome
    that was read last of each run. Runs outlive it: another page on the folder finds them by their locks.

    Args:
        root: the folder in which commands are started, an absolute path.
    """

    root: Path
    started: dict[Path, Started] = field(default_factory=dict)
    stop_requested: set[Path] = field(default_factory=set)
    outcomes: dict[Path, ReadOutcome] = field(default_factory=dict)

    # -------------------------------------------------------------- what a person does

    def start(self, job: str, arguments: Sequence[str], name: str = "") -> Path:
        """Start a run and return its folder, which the command makes.

        Args:
            name: the name of the folder below `outputs`; an empty one stands for the time.

        Raises:
            ConfigError: the name leads elsewhere, or is taken.
        """
        folder = self.new_folder(job, name)
        self._spawn(job, arguments, folder)
        return folder

    def new_folder(self, job: str, name: str) -> Path:
        """Return the folder of a run that is to be started. Arguments and errors are those of `start`."""
        if not name:
            name = time.strftime("%Y-%m-%d/%H-%M-%S")
            name = name if job == "train" else f"{job}/{name}"
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of a run. Fix: letters, digits, - _ . and / between them."
            )
        folder = self.inside(OUTPUTS / name)
        if folder.exists() or folder in self.started:
            raise ConfigError(f"{name}: there is such a run. Fix: resume it, or another name.")
        return folder

    def resume(self, view: RunView) -> None:
        """Start a run's own command again in its folder. It continues from the newest checkpoint.

        Raises:
            ConfigError: the run is at work, or its folder names no command that the page would start.
        """
        if view.is_at_work or not view.can_resume:
            raise ConfigError(
                f"{view.name} is {view.status}. Fix: resume one that was stopped or has failed."
            )
        refuse_reserved(view.arguments)
        self._spawn(view.job, view.arguments, self.inside(view.folder))

    def stop(self, view: RunView) -> None:
        """Ask a run to stop by a SIGTERM to its command. It saves after the next steps and ends.

        Raises:
            ConfigError: it is not at work, or works on another machine.
        """
        started = self.started.get(view.folder)
        if started is not None and started.process.poll() is None:
            started.process.terminate()
        else:  # another page, or a shell, has started it
            pid = find_lock_holders().get(inode_of(view.folder))
            if pid is None or not is_command(pid):
                raise ConfigError(f"{view.name}: no process of this machine is at work on it.")
            os.kill(pid, signal.SIGTERM)
        self.stop_requested.add(view.folder)

    def command(self, arguments: Sequence[str], folder: Path) -> list[str]:
        """Return the arguments of a command that works in a folder below the page's."""
        return [*arguments, f"{RUN_DIR}={quote(str(folder.relative_to(self.root)))}"]

    def _spawn(self, job: str, arguments: Sequence[str], folder: Path) -> None:
        """Start a command as a process, whose output is appended to its log."""
        if job not in JOBS:
            raise ConfigError(f"{job}: no command of this page. Fix: {' or '.join(JOBS)}.")
        with_folder = self.command(arguments, folder)
        log = log_of(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"$ {command_line(job, with_folder)}\n".encode())
            file.flush()
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", f"experiments.{job}", *with_folder],
                cwd=self.root, env={**os.environ, "PYTHONPATH": python_path()}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, start_new_session=True,  # it outlives the page
            )  # fmt: skip
        self.started[folder] = Started(job, tuple(arguments), process)
        self.stop_requested.discard(folder)

    def inside(self, path: Path) -> Path:
        """Return the absolute path of a file or folder below the page's folder.

        Raises:
            ConfigError: it is not below it.
        """
        absolute = (self.root / path).resolve()  # links may lead elsewhere
        if not absolute.is_relative_to(self.root):
            raise ConfigError(f"{path} is not below {self.root}. Fix: another name, or folder= of the page.")
        return absolute

    # -------------------------------------------------------------- what the folder shows

    def views(self) -> list[RunView]:
        """Return all runs, the newest first."""
        holders = find_lock_holders()
        folders = dict.fromkeys([*self.started, *find_runs(self.root)])
        views = [self.view(folder, holders) for folder in folders]
        return sorted(views, key=lambda view: (start_time_of(view.folder), view.name), reverse=True)

    def view(self, folder: Path, holders: Mapping[int, int] | None = None) -> RunView:
        """Return a run as its files show it.

        Args:
            holders: the result of `find_lock_holders`; None asks for it here.
        """
        holders = find_lock_holders() if holders is None else holders
        name, started = str(folder.relative_to(self.root)), self.started.get(folder)
        outcome = None
        with suppress(OSError):  # a command that is refused removes its folder
            outcome = self._read_outcome(folder, name) if folder.is_dir() else None

        # The command and its arguments.
        job = started.job if started else job_of(read_json(folder / RUN).get("command", ""))
        arguments: tuple[str, ...] = ()
        if outcome:
            arguments = outcome.overrides
        elif started:
            arguments = started.arguments

        # A run is at work if this page's process lives, or another process holds the folder's lock.
        status = outcome.status if outcome else "failed"
        if (started is not None and started.process.poll() is None) or holders.get(inode_of(folder)):
            if folder in self.stop_requested:
                status = STOPPING
            else:
                status = RUNNING if outcome and outcome.rows else STARTING
        elif status in (UNFINISHED, "no result"):
            status = KILLED
        steps = read_json(folder / IDENTITY).get("run", {}).get("steps", 0)
        return RunView(folder, name, job, status, arguments, steps, outcome)

    def _read_outcome(self, folder: Path, name: str) -> Outcome:
        """Return a run's outcome, which is read again if its files have changed.

        A long run is read more seldom, so that reading takes only a share of the time.
        """
        stamp = tuple(stamp_of(folder / each) for each in (METRICS, RESULT, RUN))
        before, now = self.outcomes.get(folder), time.monotonic()
        if before is not None and (before.stamp == stamp or now - before.at < SHARE * before.took):
            return before.outcome
        outcome = read_outcome(folder, name)
        self.outcomes[folder] = ReadOutcome(stamp, outcome, now, time.monotonic() - now)
        return outcome


def find_lock_holders() -> dict[int, int]:
    """Return the ids of processes that hold locks on this machine, by the inode of the file."""
    holders = {}
    with suppress(OSError):  # a system without /proc only knows the runs that its own page has started
        # A line is "1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF".
        for line in LOCKS.read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and int(words[4]) > 0:
                holders[int(words[5].rpartition(":")[2])] = int(words[4])
    return holders


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs. Links are not followed, since they may lead elsewhere."""
    for place in PLACES:
        for path, folders, files in os.walk(root / place):
            if not {*MARKS, RUN}.isdisjoint(files):
                yield Path(path)
                folders.clear()
            folders[:] = [each for each in folders if not each.startswith(".")]


def log_of(folder: Path) -> Path:
    """Return the file of a command's output, which is beside its folder since a refused one removes that."""
    return folder.with_name(f"{folder.name}.log")


def read_tail(path: Path, most: int = TAIL_BYTES) -> str:
    """Return the last bytes of a file as text; "" if there is no such file."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read().decode(errors="replace")
    return ""


def job_of(command: str) -> str:
    """Return the job of a command line of `run.json`; "" if it is none of the page's.

    >>> job_of("python -m experiments.train model=tiny"), job_of("rm -r outputs")
    ('train', '')
    """
    with suppress(ValueError):
        for word in shlex.split(str(command))[:3]:
            if word.removeprefix("experiments.") in JOBS:
                return word.removeprefix("experiments.")
    return ""


def is_command(pid: int) -> bool:
    """Return whether a process of this machine is one of the page's commands."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return any(word == f"experiments.{job}" for word in words for job in JOBS)
    return False


def inode_of(folder: Path) -> int:
    """Return the inode of a run's lock; 0 if it has none."""
    with suppress(OSError):
        return (folder / LOCK).stat().st_ino
    return 0


def stamp_of(path: Path) -> tuple[int, int]:
    """Return the time of a file's last change and its size; zeros if there is no such file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return 0, 0


def start_time_of(folder: Path) -> float:
    """Return the time at which a run began."""
    # A run's arguments are written once, at its start. A command that was refused has left only a log.
    for path in (folder / OVERRIDES, folder, log_of(folder)):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0
