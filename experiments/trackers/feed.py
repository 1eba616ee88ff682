"""Feed: a tracker's rows, on a thread of its own: training never waits for it, and survives it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.data.files import read_json, write_json
from experiments.trackers.base import LogPosition, Row, RunInfo, Tracker

FOLDER = "trackers"  # of the run's folder: a file each, of what the next process must know
EVERY_s = 1.0  # between two hand-overs: many rows at once cost less
MOST = 100_000  # rows that wait; a tracker that falls behind so far has failed
BATCH = 1000  # rows of an earlier process that are logged at once


def say(text: str) -> None:
    """Where people look."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Feed:
    """One tracker's thread, from `start` to `close`; dropped, with a line, where the tracker raises or hangs.

    What was logged is noted after each batch. A process that resumes logs what is missing, from the
    run's rows, and nothing twice.
    """

    tracker: Tracker
    folder: Path
    tell: Callable[[str], None] = say
    every_s: float = EVERY_s
    dropped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._lock = threading.Condition()
        self._waiting: list[Row] = []
        self._artifacts: list[Path] = []
        self._end: tuple[str, Mapping[str, Any]] | None = None
        self._hurry = False
        self._idle = False
        self._thread: threading.Thread | None = None
        self._known: Mapping[str, Any] = {}
        self._at = LogPosition()

    def start(self, facts: Mapping[str, Any], rows: Iterable[Row]) -> None:
        """Begin with the rows that the run has already; the thread starts the tracker, and reads them."""
        work = threading.Thread(
            target=self._work, args=(facts, iter(rows)), name=f"tracker {self.tracker.name}"
        )
        work.daemon = True  # one that hangs does not keep the process
        self._thread = work
        work.start()

    def row(self, row: Row) -> None:
        with self._lock:
            behind = len(self._waiting) >= MOST
            if not (self.dropped or behind):
                self._waiting.append(row)
        if behind:
            self._drop(f"{MOST} rows behind")

    def artifact(self, path: Path) -> None:
        """A file, behind the rows so far."""
        with self._lock:
            self._artifacts.append(path)

    def flush(self, until: float) -> None:
        """Wait until all rows are logged, at most until a moment of `time.monotonic`; then it is dropped."""
        with self._lock:
            self._hurry = True
            self._idle = False
            self._lock.notify_all()
            done = self._lock.wait_for(
                lambda: self.dropped or (self._idle and not self._waiting), max(0.0, until - time.monotonic())
            )
        if not done:
            self._drop("it does not answer")

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """Tell the end; does not wait for it."""
        with self._lock:
            self._end = (status, summary)
            self._lock.notify_all()

    def join(self, until: float) -> None:
        if self._thread is not None and not self.dropped:
            self._thread.join(max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                self._drop("it does not answer")

    # -------------------------------------------------------------- the thread

    def _work(self, facts: Mapping[str, Any], earlier: Iterator[Row]) -> None:
        try:
            self._begin(facts)
            while not self.dropped and (rows := list(islice(earlier, BATCH))):
                self._log(rows)
            while self._hand_over():
                pass
        except Exception as error:  # whatever a library of others' does
            self._drop(f"{type(error).__name__}: {error}".splitlines()[0])

    def _begin(self, facts: Mapping[str, Any]) -> None:
        known = read_json(self._note)
        at = LogPosition(*known.get("at", (0, True)))
        info = RunInfo(self.folder, facts, known.get("known", {}), at)
        self._known, self._at = self.tracker.start(info)
        self._write()

    def _hand_over(self) -> bool:
        """What has come since; False behind the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._hurry or self._end is not None or self.dropped, self.every_s)
            rows, self._waiting = self._waiting, []
            artifacts, self._artifacts = self._artifacts, []
            end, self._hurry = self._end, False
            if self.dropped:
                return False
        self._log(rows)
        for path in artifacts:
            self.tracker.artifact(path)
        if end is not None:
            self.tracker.finish(*end)
        with self._lock:
            self._idle = True
            self._lock.notify_all()
        return end is None

    def _log(self, rows: Iterable[Row]) -> None:
        """Those that are not logged yet."""
        new = [row for row in rows if place_of(row) > self._at]
        if new:
            self.tracker.log(new)
            self._at = place_of(new[-1])
            self._write()

    def _drop(self, why: str) -> None:
        with self._lock:
            already, self.dropped = self.dropped, True
            self._waiting = []
            self._lock.notify_all()
        if not already:
            self.tell(
                f"tracker {self.tracker.name} gets no more rows, training goes on: {why} "
                "(all numbers are in metrics.jsonl)"
            )

    @property
    def _note(self) -> Path:
        return self.folder / FOLDER / f"{self.tracker.name}.json"

    def _write(self) -> None:
        values = {"known": dict(self._known), "at": [self._at.step, self._at.held_out]}
        write_json(self._note, values)


def place_of(row: Row) -> LogPosition:
    """Where a row stands among all of its run."""
    return LogPosition(int(row["step"]), "loss" not in row)
