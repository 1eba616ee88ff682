"""Retention: which checkpoints of a directory, each named by its step, are complete, and which may go."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fnshard.checkpoint.manifest_file import NAME, SEAL, Manifest
from fnshard.errors import CheckpointError, counts, misfits, one_of
from fnshard.runtime.files.folder import is_checkpoint_directory, remove_directory
from fnshard.runtime.files.tensorfile import PASSING, Corrupt


@dataclass(frozen=True)
class Keep:
    """A rule that says which checkpoints of a directory stay; the rest is deleted after a complete save.

    Args:
        last: the number of newest checkpoints that stay; at least 1.
        every: checkpoints whose step is a multiple of this stay, too.
        best: the number of best checkpoints that stay, too, by a metric that was given to their save. NaN is
            no metric.
        metric: the name of the metric.
        mode: whether the "min" or the "max" is best.

    >>> metrics = {100: {}, 120: {"loss": 3.0}, 130: {"loss": 1.0}, 140: {"loss": 2.0}, 150: {}}
    >>> sorted(Keep(last=2, every=100, best=1).choose(metrics))
    [100, 130, 140, 150]
    """

    last: int = 2
    every: int | None = None
    best: int = 0
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        every = one_of(None) if self.every is None else counts(1)
        expected = {"last": counts(1), "every": every, "best": counts(0), "mode": one_of("min", "max")}
        if wrong := misfits(vars(self), expected):
            raise CheckpointError("this Keep cannot be:", wrong)

    def choose(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return the steps that stay.

        Args:
            metrics: the metrics that were saved with each step.
        """
        steps = sorted(metrics)
        sign = 1 if self.mode == "min" else -1
        rated = [s for s in steps if not math.isnan(metrics[s].get(self.metric, math.nan))]
        best = sorted(rated, key=lambda s: sign * metrics[s][self.metric])[: self.best]
        return {*steps[-self.last :], *best, *(s for s in steps if self.every and s % self.every == 0)}

    kept = choose  # the name that it had before, kept for one release


def find_complete(root: Path) -> Iterator[tuple[int, Path, Manifest]]:
    """Yield complete checkpoints with their steps, the newest first.

    They are those in the directory that are named by a number, which is then the step; or the directory
    itself. If one is deleted before it is read, a save has written a newer one. The directory is listed
    again then, and the newer one is yielded out of order.
    """
    seen: set[Path] = set()
    while folder := next((each for each in list_candidates(root) if each not in seen), None):
        manifest, _ = open_checkpoint(folder)
        if manifest is None and not folder.exists():
            continue
        seen.add(folder)
        if manifest is not None:
            number = _read_number(folder)
            yield manifest.step if number is None else number, folder, manifest


def open_checkpoint(folder: Path) -> tuple[Manifest | None, str]:
    """Read a checkpoint's manifest, or say what is wrong with it, its files or its name.

    Raises:
        OSError: the file system fails in a way that may pass.
    """
    try:
        manifest = Manifest.read(folder)
        manifest.check_files(folder)
    except (Corrupt, OSError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        return None, str(error)
    wrong = name_problem(folder, manifest)
    return (None, wrong) if wrong else (manifest, "")


def name_problem(folder: Path, manifest: Manifest) -> str:
    """Say that a checkpoint is named by another number than it was saved under; return "" if it is not."""
    number = _read_number(folder)
    if number is None or manifest.number in (None, number):
        return ""
    return f"it was saved under the name {manifest.number}; rename it to that"


def list_candidates(root: Path) -> list[Path]:
    """Return folders that may be checkpoints, the newest first.

    A save moves the earlier checkpoint of its name aside, to `.NAME.old`. If the save was killed, that folder
    is among the candidates.
    """
    # The root itself may be the checkpoint.
    root = root.absolute()
    if not root.is_dir():
        aside = root.with_name(f".{root.name}.old")
        return [aside] if aside.is_dir() else []
    if (root / NAME).exists() or (root / SEAL).exists():
        return [root]

    # Otherwise they are its folders that are named by numbers. Of two
    # with one number, the one that was not moved aside counts.
    folders = {p for p in root.iterdir() if p.is_dir() and not p.is_symlink()}
    numbered = {p.name: p for p in folders if p.name.isdecimal()}
    aside = {p.stem[1:]: p for p in folders if p.suffix == ".old" and p.stem[1:].isdecimal()}
    if not numbered and not aside:
        return [root]
    by_number = sorted((int(name), path) for name, path in (aside | numbered).items())
    return [path for _, path in reversed(by_number)]


def prune(written: Path, keep: Keep) -> None:
    """Delete the checkpoints next to a new one that need not be kept, and nothing else.

    Checkpoints of higher steps are left alone: the run went back to before them, perhaps because they are
    corrupt, and then they must not count among the last. Manifests of checkpoints that stay because of their
    step are not read, so that a save takes no longer for them.
    """
    new_step = int(written.name)
    numbered = {_read_number(folder): folder for folder in list_candidates(written.parent)}
    folders = {step: folder for step, folder in numbered.items() if step is not None and step <= new_step}

    # Read metrics only if they are needed. A manifest that cannot be read has none.
    metrics: dict[int, Mapping[str, float]] = {}
    for step, folder in folders.items():
        metrics[step] = {}
        if keep.best:
            with suppress(Corrupt, OSError):
                metrics[step] = Manifest.read(folder).metrics

    # Incomplete checkpoints do not count among the last or the best: choose again without them.
    is_complete = functools.cache(lambda step: open_checkpoint(folders[step])[0] is not None)
    last_and_best = replace(keep, every=None)
    while incomplete := [step for step in last_and_best.choose(metrics) if not is_complete(step)]:
        for step in incomplete:
            del metrics[step]

    # Delete only complete ones, and only if they hold nothing but files of a save.
    for step in metrics.keys() - keep.choose(metrics) - {new_step}:
        if is_complete(step) and is_checkpoint_directory(folders[step]):
            remove_directory(folders[step])


def _read_number(folder: Path) -> int | None:
    """Return the step that a folder is named by, even if it was moved aside; None for another name."""
    name = folder.name.removeprefix(".").removesuffix(".old")
    return int(name) if name.isdecimal() else None
