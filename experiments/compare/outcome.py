"""Outcome: the state and the results of a run, read from its folder."""

from __future__ import annotations

import glob
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments.lib.checks import ConfigError
from experiments.lib.files import DamagedError, read_json, read_record
from experiments.lib.folder import RESULT, STOPPED, read_result
from experiments.lib.metrics import METRICS, Goal, is_held_out, read_rows
from experiments.lib.record import RUN
from fnshard.errors import report

IDENTITY, OVERRIDES = "identity.json", Path(".hydra", "overrides.yaml")
MARKS = (RESULT, METRICS, IDENTITY)  # a folder with any of these is a run's
OK, FAILED, UNFINISHED = "ok", "failed", "unfinished"
RECENT = 20  # the loss of an unfinished run is the mean of so many last rows


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Args:
        status: "ok", "stopped", "failed", "unfinished" (at work, or killed), "no result".
        overrides: the overrides of its command line.
        numbers: the numbers that it has measured, by name.
        rows: the rows of its metrics, by step.
        reason: a line that says why it failed, or how far it is.
        goal: the number that it is judged by.
    """

    folder: Path
    name: str
    status: str
    overrides: tuple[str, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = ()
    reason: str = ""
    goal: Goal = Goal()


def find_outcomes(places: Sequence[str]) -> tuple[list[Outcome], int]:
    """Find the runs in folders or below them. Globs are expanded.

    Returns:
        The outcomes, and the number of folders that hold no run.

    Raises:
        ConfigError: one of the folders is not there, or none of them holds a run.
    """
    folders: dict[Path, None] = {}
    empty, typos = [], []
    for place in places:
        paths = [Path(place)] if os.path.lexists(place) else sorted(map(Path, glob.glob(place)))
        runs = [run for path in paths if path.is_dir() for run in runs_below(path.resolve())]
        folders |= dict.fromkeys(runs)
        if not any(map(Path.exists, paths)):
            typos.append(f"{place}: no such folder")
        elif not runs:
            empty.append(f"{place}: no run is in it")
    if typos or not folders:
        fix = "folders of runs or of sweeps, as outputs/2030-01-31/12-00-00, or multirun/*/*."
        what = "these places cannot be compared:" if typos else "there is nothing to compare:"
        raise ConfigError(report(what, typos or empty, fix))
    common = Path(os.path.commonpath([str(f.parent) for f in folders]))
    return [read_outcome(folder, str(folder.relative_to(common))) for folder in folders], len(empty)


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of all runs in a folder, which may be a run's itself."""
    if is_run(folder):
        yield folder
        return
    for below in _list_folders(folder):
        yield from runs_below(below)


def find_jobs(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's jobs, also of those that left nothing but Hydra's files."""
    return [folder for folder in _list_folders(sweep) if is_run(folder) or (folder / ".hydra").is_dir()]


def is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder in order. Names that are numbers are ordered as numbers."""
    below = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(below, key=lambda path: (int(path.name) if path.name.isdigit() else math.inf, path.name))


def read_outcome(folder: Path, name: str) -> Outcome:
    """Read the outcome of a run, finished or not."""
    # What is damaged or missing is printed, and the rest is read.
    result = read_result(folder)
    wrong: list[str] = []
    if not (folder / RESULT).exists() and read_json(folder / RUN).get("status") == OK:
        wrong.append(f"{folder / RESULT} is missing, and {RUN} says that the run has ended")
    rows = tuple(read_rows(folder / METRICS, 2**63, wrong))
    for each in wrong:
        print(each, file=sys.stderr, flush=True)
    numbers = {k: float(v) for k, v in result.items() if type(v) in (int, float) and k != "step"}
    status, reason = result["status"], result.get("reason") or _shorten_error(result.get("error", ""))
    goal = Goal.of(result.get("goal")) or Goal.of(read_json(folder / RUN).get("goal")) or Goal()

    # A run that has no result yet is judged by the last rows of its metrics.
    if status not in (OK, FAILED):
        trained = [row[goal.name] for row in rows if goal.name in row][-RECENT:]
        numbers = {goal.name: sum(trained) / len(trained)} if trained else {}
        measured = next((row for row in reversed(rows) if is_held_out(row)), {})
        numbers |= {name: float(value) for name, value in measured.items() if name != "step"}
        if rows:
            steps = "?"
            with suppress(DamagedError, AttributeError):
                steps = (read_record(folder / IDENTITY) or {}).get("run", {}).get("steps", "?")
            status = STOPPED if status == STOPPED else UNFINISHED
            reason = f"step {rows[-1]['step']} of {steps}"
    overrides = result["overrides"] or _read_overrides(folder)
    return Outcome(folder, name, status, tuple(map(str, overrides)), numbers, rows, reason, goal)


def _read_overrides(folder: Path) -> list[str]:
    """Return the overrides that Hydra has written; none if there is no such file, or it is damaged."""
    try:
        listed = yaml.safe_load((folder / OVERRIDES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    return listed if isinstance(listed, list) else []


def _shorten_error(error: str) -> str:
    """Return the line of an error that says most: the last of a traceback, or else the first.

    If the first ends with a colon, the next one is added.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    if lines[0].startswith("Traceback"):
        return lines[-1]
    count = 2 if lines[0].endswith(":") else 1
    return " ".join(lines[:count]).removeprefix("error: ")
