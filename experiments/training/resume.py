"""Resume: the folder that a run goes on in, so that the same command continues what was not finished.

A folder made by the clock is named in `outputs/unfinished/` until its run is finished, by what the
configuration says. A folder that the command names (`hydra.run.dir=`, or a run of a sweep) needs no such
note. Whoever works in a folder holds a lock on it, which a killed process gives back.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.cli.schema import flat
from experiments.cli.sweep import TABLE
from experiments.configs.train import AUTO, NEVER, ConfigError
from experiments.data.files import read_json, write_json
from experiments.training.result import read_result
from fnshard.errors import report
from fnshard.runtime.files.folder import in_memory, make_directory

CHECKPOINTS, IDENTITY, LOCK = "checkpoints", "identity.json", "run.lock"
UNFINISHED, SWEEPS = Path("outputs", "unfinished"), Path("multirun")
# Options of `run` that may change between two starts of one run: they do not change its results.
FREE = (
    "timeout_s", "save_every", "async_save", "keep", "keep_every", "keep_best", "resume", "max_restarts",
    "stop_grace_s", "profile", "watch", "replicas", "replica_every",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """Where a run's results and checkpoints go.

    `source`: what it starts from where it has no checkpoint of its own; `note`: the file that says that it is
    not finished.
    """

    folder: str
    source: str | None = None
    note: str | None = None

    @property
    def root(self) -> Path:
        return Path(self.folder, CHECKPOINTS)

    def finish(self) -> None:
        """It will not be resumed."""
        if self.note is not None and _noted(Path(self.note)) == Path(self.folder):
            _forget(Path(self.note))


# ------------------------------------------------------------------ a single run


@contextmanager
def claimed(requested: Any, fresh: Path, *, chosen: bool) -> Iterator[RunFolder]:
    """The run that this configuration is about, this process's alone until the block is left.

    Args:
        requested: the configuration of the command, before it was placed on a machine: on another one it is
            the same run.
        fresh: the folder of a new run.
        chosen: the command names `fresh` itself.

    Raises:
        ConfigError: the folder is another process's, or holds another run's checkpoints; or there is nothing
            where `run.resume` says.
    """
    resume = requested.run.resume
    source_path = None if resume in (AUTO, NEVER) else str(Path(resume).resolve())
    identity = identity_of(requested, source_path)
    with ExitStack() as stack:
        folder, note, found = fresh, None, None
        if not chosen:
            note = note_of(identity)
            found = None if resume == NEVER else unfinished(note, stack)
            if found == Path():  # somebody is at it: this is another run beside it
                note = None
            elif found is not None:
                folder = found
                _remove_unused(fresh)
        if folder == fresh and found != fresh:  # else it is locked already
            make_directory(fresh)
            if not stack.enter_context(locked(fresh)):
                raise ConfigError(
                    f"another process is at work in {fresh}. Fix: end it, or another hydra.run.dir."
                )
            _check_chosen(fresh, identity, resume)
        has_own = fs.checkpoint.latest(folder / CHECKPOINTS) is not None
        source = None if source_path is None or has_own else source_of(resume)
        write_json(folder / IDENTITY, identity, durable=True)
        if note is not None:
            write_json(note, {"folder": str(folder)}, durable=True)
        yield RunFolder(str(folder), source, None if note is None else str(note))


def identity_of(requested: Any, source: str | None = None) -> dict[str, Any]:
    """What a run's results depend on, as JSON has it."""
    values = dataclasses.asdict(requested)
    values["run"] = {k: v for k, v in values["run"].items() if k not in FREE}
    values["hardware"] = requested.hardware.name  # prices change no results
    values.pop("tracker", None)  # trackers do not change a run
    return json.loads(json.dumps(values | {"starts_from": source}))


def memory_name(folder: Path) -> str:
    """What a run's folder in memory is called: another run in a folder made anew has another name."""
    return hashlib.sha256(f"{folder}:{folder.stat().st_ino}".encode()).hexdigest()[:16]


def finished(folder: Path, requested: Any) -> bool:
    """Whether a run of this configuration has left its result there."""
    before, here = read_json(folder / IDENTITY), identity_of(requested)
    same = all(before.get(name) == value for name, value in here.items() if name != "starts_from")
    return same and read_result(folder)["status"] == "ok"


def source_of(resume: str) -> str:
    """The checkpoint, or the directory of checkpoints, that `run.resume=PATH` means."""
    folder = Path(resume).resolve()
    path = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    if fs.checkpoint.latest(path) is None:
        raise ConfigError(
            f"run.resume={resume}: no whole checkpoint is there. Fix: the folder of a run, one of its "
            "checkpoints, auto or never."
        )
    return str(path)


def _check_chosen(folder: Path, identity: Mapping[str, Any], resume: str) -> None:
    """A folder that holds checkpoints is resumed, or left alone."""
    steps = fs.checkpoint.all_steps(folder / CHECKPOINTS)
    if not steps:
        return
    if resume == NEVER:
        raise ConfigError(
            f"run.resume=never: {folder} holds checkpoints, the newest of step {steps[-1]}. "
            f"Fix: another hydra.run.dir, or delete {folder / CHECKPOINTS}."
        )
    before, here = dict(flat(read_json(folder / IDENTITY))), dict(flat(identity))
    differ = [f"{k}: {before.get(k)!r} there, {here.get(k)!r} here" for k in here if before.get(k) != here[k]]
    if before and differ:
        raise ConfigError(
            report(
                f"{folder} holds checkpoints of another configuration, the newest of step {steps[-1]}:",
                differ,
                f"another hydra.run.dir; with run.resume={folder} it starts from them.",
            )
        )


def _remove_unused(fresh: Path) -> None:
    """Hydra's folder for a run that goes on in another one: nothing but the configuration is in it."""
    if fresh.is_dir() and {p.name for p in fresh.iterdir()} <= {".hydra"}:
        shutil.rmtree(fresh)


# ------------------------------------------------------------------ notes and locks


def note_of(identity: Any) -> Path:
    """The file that names the unfinished run (or sweep) of this identity."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return UNFINISHED.resolve() / f"{digest[:16]}.json"


def unfinished(note: Path, stack: ExitStack, *, has: str = CHECKPOINTS) -> Path | None:
    """The folder that a note names, locked until the stack unwinds; `Path()` if another process works there.

    None where there is no such folder, or, of a run, no checkpoint in it and nothing of it in memory.
    """
    folder = _noted(note)
    if folder is None or not folder.is_dir():
        return None
    if has and fs.checkpoint.latest(folder / has) is None and not in_memory(memory_name(folder)):
        return None
    if stack.enter_context(locked(folder)):
        return folder
    print(f"resume: {folder} is still at work; this is another run beside it", file=sys.stderr, flush=True)
    return Path()


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether this process holds the folder, as long as the block runs."""
    with (folder / LOCK).open("a") as file:
        free = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks
            pass
        yield free


def _noted(note: Path) -> Path | None:
    named = read_json(note).get("folder")
    return Path(named) if named else None


def _forget(note: Path) -> None:
    note.unlink(missing_ok=True)
    if not any(note.parent.iterdir()):
        note.parent.rmdir()


# ------------------------------------------------------------------ a sweep


@contextmanager
def claimed_sweep(arguments: Sequence[str], job: str = "train") -> Iterator[list[str]]:
    """The arguments of a `--multirun`, with the folder of the same sweep that was cut off, if there is one.

    A sweep is finished when it has written its table. Anything else is handed through.
    """
    named = any(a.startswith("hydra.sweep.dir=") for a in arguments)
    if named or not {"-m", "--multirun"} & set(arguments):
        yield list(arguments)
        return
    free = (
        *(f"run.{name}=" for name in FREE),
        "launcher=",
        "hydra/launcher=",
        "hydra.launcher.",
        "tracker=",
        "tracker.",
    )
    note = note_of({"sweep": sorted(a for a in arguments if not a.startswith(free)), "job": job})
    with ExitStack() as stack:
        anew = f"run.resume={NEVER}" in arguments
        found = None if anew else unfinished(note, stack, has="")
        folder = found
        if found is None or found == Path():
            folder = _unused(SWEEPS.resolve() / time.strftime("%Y-%m-%d/%H-%M-%S"))
            folder.mkdir(parents=True)
        if found is None:
            stack.enter_context(locked(folder))
            write_json(note, {"folder": str(folder)}, durable=True)
        elif found != Path():
            print(f"resume: the sweep in {folder}", flush=True)
        (folder / TABLE).unlink(missing_ok=True)
        try:
            yield [*arguments, f"hydra.sweep.dir={_quoted(folder)}"]
        finally:
            if (folder / TABLE).exists() and _noted(note) == folder:
                _forget(note)


def _unused(folder: Path) -> Path:
    """Two may begin within a second."""
    more = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(1))
    return next(path for path in itertools.chain([folder], more) if not path.exists())


def _quoted(path: Path) -> str:
    """As Hydra's grammar takes any path."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
