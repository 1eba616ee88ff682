"""Folder: find the folder of a run, so that the same command continues what is unfinished; and its result.

A run's folder says in `identity.json` what its results depend on. Where the command names no folder, the
newest one below `outputs/` of the same identity that holds a checkpoint is resumed, unless it is finished.
`experiments.train` has its folders in `outputs/DATE/TIME`, other jobs have them in `outputs/JOB/DATE/TIME`.
Whoever works in a folder holds a lock on it, which a killed process gives back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.lib.checks import ConfigError, flatten_keys
from experiments.lib.config import AUTO, NEVER
from experiments.lib.files import DamagedError, lock_folder, read_record, write_record
from experiments.lib.metrics import METRICS, Goal, grows
from fnshard.errors import report
from fnshard.runtime.files.folder import in_memory, make_directory

CHECKPOINTS, IDENTITY = "checkpoints", "identity.json"
OUTPUTS = Path("outputs")
RESULT = "result.json"
STOPPED = "stopped"  # the status of a run that can be resumed
# Options of `run` that may change between two starts of one run: they do not change its results.
FREE = (
    "timeout_s", "save_every", "async_save", "keep", "keep_every", "keep_best", "resume", "max_restarts",
    "profile", "watch", "replicas", "replica_every",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run's results and checkpoints.

    Args:
        source: the checkpoint that it starts from where it has none of its own.
        began: the time at which the command began, by the clock of its host; 0 where nobody knows it.
        first_made: the topmost folder on the way to it that this command had to make; empty if all existed.
    """

    folder: str
    source: str | None = None
    began: float = 0.0
    first_made: str = ""

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder, CHECKPOINTS)


# ------------------------------------------------------------------ a single run


@contextmanager
def claim(requested: Any, fresh: Path, *, chosen: bool) -> Iterator[RunFolder]:
    """Find or make the folder of a run, which no other process works in until the block is left.

    Args:
        requested: the configuration of the command before it was fitted to a machine: on another one it is
            the same run.
        fresh: the folder of a new run.
        chosen: whether the command names `fresh` itself.

    Raises:
        ConfigError: another process has the folder, it holds another run's checkpoints, or there is nothing
            where `run.resume` says.
    """
    resume = requested.run.resume
    source_path = None if resume in (AUTO, NEVER) else str(Path(resume).resolve())
    identity = identity_of(requested, source_path)
    with ExitStack() as stack:
        # Take the folder of an unfinished run, or make a new one.
        folder = None
        if not chosen and resume != NEVER:
            folder = find_unfinished(identity, stack)
        first_made = ""
        if folder is None:
            folder = fresh
            first_made = next((str(p) for p in reversed((fresh, *fresh.parents)) if not p.exists()), "")
            make_directory(fresh)
            if not stack.enter_context(lock_folder(fresh)):
                raise ConfigError(
                    f"another process is at work in {fresh}. Fix: await or end it, or another hydra.run.dir."
                )
            _refuse_chosen(fresh, identity, resume)

        # The run's own checkpoints come before the one that `run.resume` names.
        has_own = fs.checkpoint.latest(folder / CHECKPOINTS) is not None
        source = None if source_path is None or has_own else source_of(resume)
        write_record(folder / IDENTITY, identity, durable=True)
        yield RunFolder(str(folder), source, first_made=first_made)


def discard(run: RunFolder) -> bool:
    """Remove a folder that the command has made, and those above it that are then empty, if the run has made
    no step.

    Returns:
        Whether it is gone.
    """
    folder, rows = Path(run.folder), Path(run.folder, METRICS)
    if not run.first_made:
        return False
    has_rows = rows.exists() and rows.stat().st_size
    if has_rows or any(run.checkpoints.glob("*")):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another process may be at work above it; why the run ended matters more
        for above in folder.parents:
            if not above.is_relative_to(run.first_made) or any(above.iterdir()):
                break
            above.rmdir()
    return not folder.exists()


def _can_resume(folder: Path) -> bool:
    """Return whether a run has a whole checkpoint, or a replica in memory."""
    return fs.checkpoint.latest(folder / CHECKPOINTS) is not None or in_memory(memory_name(folder))


def has_step_folders(root: Path) -> bool:
    """Return whether a directory holds anything that is named as a checkpoint is, whole or not."""
    return root.is_dir() and any(path.name.isdecimal() for path in root.iterdir())


def newest_step(folder: Path) -> int | None:
    """Return the newest step that a run has saved to disk, or None."""
    return max(fs.checkpoint.all_steps(folder / CHECKPOINTS), default=None)


def identity_of(requested: Any, source: str | None = None) -> dict[str, Any]:
    """Return what a run's results depend on, as JSON has it."""
    values = dataclasses.asdict(requested)
    values["run"] = {k: v for k, v in values["run"].items() if k not in FREE}
    values["hardware"] = requested.hardware.name  # prices change no results
    values.pop("tracker", None)  # trackers do not change a run
    # Tuples become lists, as in what is read back.
    return json.loads(json.dumps(values | {"starts_from": source}))


def memory_name(folder: Path) -> str:
    """Return the name of a run's folder in memory.

    A folder that was deleted and made anew has another inode, so another name.
    """
    return hashlib.sha256(f"{folder}:{folder.stat().st_ino}".encode()).hexdigest()[:16]


def is_finished(folder: Path, requested: Any) -> bool:
    """Return whether a run of this configuration has left its result there."""
    try:
        before, here = read_record(folder / IDENTITY) or {}, identity_of(requested)
    except DamagedError:  # the error is reported when the run starts
        return False
    same = all(before.get(name) == value for name, value in here.items() if name != "starts_from")
    return same and read_result(folder)["status"] == "ok"


def source_of(resume: str) -> str:
    """Return the checkpoint, or the directory of checkpoints, that `run.resume=PATH` means."""
    folder = Path(resume).resolve()
    path = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    if fs.checkpoint.latest(path) is None:
        raise ConfigError(
            f"run.resume={resume}: no whole checkpoint is there. Fix: the folder of a run, one of its "
            "checkpoints, auto or never."
        )
    return str(path)


def _refuse_chosen(folder: Path, identity: Mapping[str, Any], resume: str) -> None:
    """Refuse a folder that the command names if its checkpoints must not be resumed. Nothing is changed.

    Raises:
        ConfigError: its checkpoints are of another configuration or damaged, or `run.resume` is "never".
    """
    steps = fs.checkpoint.all_steps(folder / CHECKPOINTS)
    if not steps and has_step_folders(folder / CHECKPOINTS) and not _can_resume(folder):
        raise ConfigError(
            f"no checkpoint in {folder / CHECKPOINTS} is whole. Fix: put them back; or, to begin anew, "
            "delete that folder, or name another hydra.run.dir."
        )
    if not steps:
        return
    if resume == NEVER:
        raise ConfigError(
            f"run.resume=never: {folder} holds checkpoints, the newest of step {steps[-1]}. "
            f"Fix: another hydra.run.dir, or delete {folder / CHECKPOINTS}."
        )

    # The checkpoints will be resumed, so they have to be of this configuration.
    try:
        there = read_record(folder / IDENTITY)
    except DamagedError as error:
        raise ConfigError(
            f"{error} It says of which configuration the checkpoints in {folder} are. Fix: delete it if they "
            "are of this one; or another hydra.run.dir."
        ) from None
    if there is None:
        print(
            f"resume: {folder / IDENTITY} is missing: whether the checkpoints there are of this "
            "configuration is not known",
            file=sys.stderr,
            flush=True,
        )
    before, here = dict(flatten_keys(there or {})), dict(flatten_keys(identity))
    differ = [f"{k}: {before.get(k)!r} there, {here.get(k)!r} here" for k in here if before.get(k) != here[k]]
    if before and differ:
        raise ConfigError(
            report(
                f"{folder} holds checkpoints of another configuration, the newest of step {steps[-1]}:",
                differ,
                f"another hydra.run.dir; with run.resume={folder} it starts from them.",
            )
        )


# ------------------------------------------------------------------ folders


def find_unfinished(identity: Mapping[str, Any], stack: ExitStack) -> Path | None:
    """Return the newest folder below `outputs/` of this identity that holds a checkpoint.

    It is locked until the stack unwinds. None is returned where a newer folder is finished.
    """
    # Find all runs of this identity below `outputs/`.
    same, root = [], OUTPUTS.resolve()
    for path in (*root.glob(f"*/*/{IDENTITY}"), *root.glob(f"*/*/*/{IDENTITY}")):
        try:
            if read_record(path) == identity:
                same.append(path)
        except DamagedError as error:
            fix = f"delete it, and hydra.run.dir={path.parent} goes on there."
            print(f"resume: {error} The folder is passed over. Fix: {fix}", file=sys.stderr, flush=True)

    # Take the newest that can be resumed and that no process is at work in, unless a newer one is finished.
    for path in sorted(same, key=lambda path: (path.stat().st_mtime_ns, path), reverse=True):
        folder = path.parent
        if read_result(folder)["status"] == "ok":  # this run is done; the same command makes another one
            return None
        if not _can_resume(folder):
            if has_step_folders(folder / CHECKPOINTS):
                print(
                    f"resume: no checkpoint in {folder / CHECKPOINTS} is whole; this is another run",
                    file=sys.stderr,
                    flush=True,
                )
            continue
        if stack.enter_context(lock_folder(folder)):
            return folder
        print(f"resume: {folder} is still at work; this is another run", file=sys.stderr, flush=True)
    return None


# ------------------------------------------------------------------ results


def write_result(folder: Path, **values: Any) -> None:
    """Write the result of the run in `folder`, for tables: `status`, `overrides`, and numbers by name."""
    write_record(folder / RESULT, values)


def read_result(folder: Path) -> dict[str, Any]:
    """Read what `write_result` has left in a folder.

    The status is "no result" if there is none, or if it is damaged, which is printed.
    """
    nothing: dict[str, Any] = {"status": "no result", "overrides": []}
    try:
        result = read_record(folder / RESULT)
        if result is None:
            return nothing
        # Any JSON may carry a checksum: tables read these four fields, and must not fail on another type.
        kinds = {"status": str, "overrides": list, "reason": str, "error": str}
        is_result = {"status", "overrides"} <= result.keys()
        if not is_result or not all(isinstance(result.get(n, kind()), kind) for n, kind in kinds.items()):
            raise DamagedError(f"{folder / RESULT} holds no result.")
        return result
    except DamagedError as error:
        print(f"{error} It counts as none.", file=sys.stderr, flush=True)
        return nothing


def search_value(
    folder: Path, metric: str | None = None, direction: str = "minimize", *, is_said: bool = False
) -> float | None:
    """Return the number of the run in `folder` that a search optimises.

    Its sign is such that the search's direction prefers the better run. It is None if the run has no such
    number, or has not finished.

    Args:
        metric: the name of the number; None is the run's own goal.
        direction: the direction of the search, "minimize" or "maximize".
        is_said: whether the user has written the direction, and so which of the metric is better.
    """
    result = read_result(folder)
    goal = Goal.of(result.get("goal")) or Goal()
    name = metric or goal.held_out
    value = result.get(name) if result["status"] == "ok" else None
    if type(value) not in (int, float):
        return None
    # The run's goal says whether more is better. For another metric its name does, unless the user gave a
    # direction.
    if metric is not None:
        is_negated = bool(grows(name, goal)) and direction == "minimize" and not is_said
    else:
        is_negated = goal.is_maximised != (direction == "maximize")
    return -float(value) if is_negated else float(value)
