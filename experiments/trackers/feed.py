"""Feed: a thread that reads a run's `metrics.jsonl` into a tracker: training never waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from experiments.data.files import DamagedError, read_record, write_record
from experiments.trackers.base import Row, RunInfo, Tracker

FOLDER = "trackers"  # of the run's folder: for each tracker a file of how many rows it has
EVERY_S = 1.0  # between two looks at the file: many rows at once cost less
BATCH = 1000  # rows that are logged at once


@dataclass
class Feed:
    """One tracker's thread. A tracker that raises, or does not end, is reported once, and training goes on.

    The thread notes how many rows the tracker has. A resumed run writes the rows after its checkpoint again,
    as they were, so the next process skips that many. Rows that were logged when the process was killed, but
    not noted, are logged again, with equal values.

    Args:
        metrics: the file of rows; others append to it.
        say: gets the line of a tracker that fails.
    """

    name: str
    tracker: Tracker
    metrics: Path
    say: Callable[[str], None]
    every_s: float = EVERY_S
    failed: str = field(default="", init=False)

    def start(self, facts: Mapping[str, Any]) -> None:
        self._end: tuple[str, Sequence[Path], Mapping[str, Any]] = ("", (), {})
        self._ended = threading.Event()
        # A daemon: a tracker that hangs does not keep the process.
        self._thread = threading.Thread(
            target=self._work, args=(facts,), name=f"tracker {self.name}", daemon=True
        )
        self._thread.start()

    def finish(self, status: str, artifacts: Sequence[Path] = (), **summary: Any) -> None:
        """All rows are written. Does not wait: see `join`."""
        self._end = (status, artifacts, summary)
        self._ended.set()

    def join(self, until: float) -> None:
        """Wait for the tracker to end, at most until a moment of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._fail("it does not answer")

    def _work(self, facts: Mapping[str, Any]) -> None:
        try:
            self._follow(facts)
        except Exception as error:  # whatever the tracker's library raises
            self._fail(f"{type(error).__name__}: {error}".splitlines()[0])

    def _follow(self, facts: Mapping[str, Any]) -> None:
        note = self.metrics.parent / FOLDER / f"{self.name}.json"
        try:
            known = read_record(note) or {}
        except DamagedError as error:
            self.say(f"{error} Tracker {self.name} begins a run anew.")
            known = {}
        logged = known.get("rows", 0)
        name = self.tracker.start(RunInfo(self.metrics.parent, facts, known.get("id", "")))
        write_record(note, {"id": name, "rows": logged})
        with self.metrics.open("rb") as file:
            read, ended = 0, False
            while not ended:
                ended = self._ended.wait(self.every_s)
                while rows := list(islice(_rows(file), BATCH)):
                    new = rows[max(0, logged - read) :]
                    read += len(rows)
                    if new:
                        self.tracker.log(new)
                        logged = read
                        write_record(note, {"id": name, "rows": logged})
        status, artifacts, summary = self._end
        for path in artifacts:
            self.tracker.artifact(path)
        self.tracker.finish(status, summary)

    def _fail(self, why: str) -> None:
        self.failed = why
        self.say(
            f"tracker {self.name} gets no more rows, training goes on: {why} "
            "(all numbers are in metrics.jsonl)"
        )


def _rows(file: BinaryIO) -> Iterator[Row]:
    """The rows after where the file stands; a line that is only begun is left for later."""
    while (line := file.readline()).endswith(b"\n"):
        yield json.loads(line)
    file.seek(-len(line), 1)
