"""Cache: a folder of saved steps, found by what they were lowered for, and what came of looking there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fnshard.step.saved import file, store
from fnshard.step.saved.encoding import NotSaved
from fnshard.step.saved.file import Refused
from fnshard.step.saved.store import Request, Saved

LOG = logging.getLogger("fnshard")


@dataclass(eq=False)
class Made:
    """How a step's programs came about: how many were traced, or loaded from a file, and kernels compiled.

    `notes`: why a file was not used, or not written; one line each.
    """

    traces: int = 0
    compiles: int = 0
    loads: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a line, and log it."""
        self.notes.append(text)
        LOG.info(text)

    def __str__(self) -> str:
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.loads} loaded, {self.traces} traced, {self.compiles} kernels compiled{notes}"


def find(folder: str, make_request: Callable[[], Request], made: Made) -> Saved | None:
    """A saved step; None where there is none that may be used, which a note explains.

    Raises:
        StateError: others may write to the folder.
    """
    try:
        root = file.make_folder(Path(folder))
    except OSError as error:  # a file has its name, or nothing can be written where it would be
        made.note(f"cache_dir={folder} is no folder, and none can be made: {error.strerror}")
        return None
    try:
        request = make_request()
        path = root / f"{request.key}{file.SUFFIX}"
        saved = store.load(path, request)
    except FileNotFoundError:
        return None
    except (NotSaved, Refused, OSError) as error:
        made.note(f"no saved step is used: {error}")
        return None
    file.touch(path)
    made.loads += 1
    LOG.info("loaded %s from %s", request.texts["fn"].split(" ")[0], path)
    return saved


def keep(
    folder: str, request: Request, saved: Saved, made: Made, limit_bytes: int = file.LIMIT_bytes
) -> Path | None:
    """Write a step that was traced and compiled, and remove what was used longest ago; the file's path.

    What cannot be written leaves a note: a full disk ends no training.
    """
    root = Path(folder).expanduser().absolute()
    if not root.is_dir():  # which `find` has noted
        return None
    path = root / f"{request.key}{file.SUFFIX}"
    try:
        store.save(path, request, saved.stages, saved.kernels, saved.batch_bytes)
        file.prune(root, limit_bytes)
    except (NotSaved, OSError) as error:
        made.note(f"the step is not saved: {error}")
        return None
    return path
