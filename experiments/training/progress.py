"""Progress: how far a run is: on a terminal one live line that other output goes around, else plain lines."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

PLAIN_LINES = 20  # in a run whose output is no terminal
HINT_S = 10.0  # between two plain lines of what is being done


@dataclass
class Progress:
    """Steps of a run, `made` of them by earlier processes."""

    stream: TextIO
    steps: int
    made: int = 0
    _after_first: float = 0.0
    _around: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._bar: Any = None
        self._hinted = -math.inf
        self._around.enter_context(_listening(self.hint))
        if self.stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self.steps, initial=self.made, unit="step", dynamic_ncols=True, file=self.stream
            )
            self._around.enter_context(_printing_around(self._bar))

    def step(self, number: int, text: str) -> None:
        """Step `number` is done, `text` describes it; of plain lines only some are printed."""
        first = number == self.made + 1  # it compiles: its time says nothing of later ones
        if first:
            self._after_first = time.perf_counter()
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(number - self._bar.n)
        elif first or number == self.steps or number % max(1, self.steps // PLAIN_LINES) == 0:
            left = self._left(number)
            print(f"step {number}/{self.steps}, {text}, left {left}", file=self.stream, flush=True)

    def hint(self, text: str) -> None:
        """What is being done before the next step; of plain lines only one in a while is printed."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif time.monotonic() - self._hinted > HINT_S:
            self._hinted = time.monotonic()
            print(text, file=self.stream, flush=True)

    def say(self, text: str) -> None:
        if self._bar is None:
            print(text, file=self.stream, flush=True)
        else:
            self._bar.write(text, file=self.stream)

    def close(self) -> None:
        """Leave the last line standing; may be called again."""
        if self._bar is not None:
            self._bar.close()
        self._around.close()

    def _left(self, number: int) -> str:
        made = number - self.made - 1
        if made == 0:
            return "?"
        left = round((time.perf_counter() - self._after_first) / made * (self.steps - number))
        return f"{left // 60}:{left % 60:02d}"


class _Listener(logging.Handler):
    """Hands the text of records on."""

    def __init__(self, hear: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage())


@contextmanager
def _listening(hear: Callable[[str], None]) -> Iterator[None]:
    """In here `hear` gets what fnshard logs: a first step takes a while to be lowered and compiled."""
    logger, listener = logging.getLogger("fnshard"), _Listener(hear)
    before = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else it would be printed twice where logging is set up
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextmanager
def _printing_around(bar: Any) -> Iterator[None]:
    """In here, whole lines that are printed or logged to a terminal go above the bar."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Above(each, bar) if each.isatty() else each for each in before)
    try:
        with logging_redirect_tqdm():
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Above):
                stream.finish()
        sys.stdout, sys.stderr = before


class _Above:
    """A terminal's stream that is written to a line at a time, with the bar out of the way."""

    def __init__(self, stream: TextIO, bar: Any):
        self._stream, self._bar, self._begun = stream, bar, ""

    def write(self, text: str) -> int:
        lines, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            with self._bar.external_write_mode(file=self._bar.fp):
                self._stream.write(lines + newline)
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """A line that has only begun waits for its end."""
        self._stream.flush()

    def finish(self) -> None:
        """Let go of a line without an end."""
        self._stream.write(self._begun)
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
