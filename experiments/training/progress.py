"""Progress: how far a run is: on a terminal one live line below other output, else plain lines."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, TextIO

PLAIN_LINES = 20  # in a run whose output is no terminal
HINT_S = 10.0  # between two plain lines of what happens before a step


@dataclass
class Progress:
    """Steps of a run, `made` of them by earlier processes."""

    stream: TextIO
    steps: int
    made: int = 0

    def __post_init__(self) -> None:
        self._bar: Any = None
        self._hinted, self._after_first = -math.inf, 0.0
        self._open = ExitStack()
        self._open.enter_context(_log_to(self.hint))
        if self.stream.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._bar = tqdm(
                total=self.steps, initial=self.made, unit="step", dynamic_ncols=True, file=self.stream
            )
            self._open.enter_context(logging_redirect_tqdm())
            for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
                if stream.isatty():
                    above = _AboveBar(stream, self._bar.write)
                    self._open.callback(above.finish)
                    self._open.enter_context(redirect(above))

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
        """What happens before the next step; of plain lines only one in a while is printed."""
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
        self._open.close()

    def _left(self, number: int) -> str:
        made = number - self.made - 1
        if made == 0:
            return "?"
        left = round((time.perf_counter() - self._after_first) / made * (self.steps - number))
        return f"{left // 60}:{left % 60:02d}"


class _AboveBar:
    """A terminal's stream whose whole lines go above the bar; what has no end yet waits for it."""

    def __init__(self, stream: TextIO, write: Callable[..., None]) -> None:
        self._stream, self._write, self._rest = stream, write, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print the lines that are whole."""
        lines, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            self._write(lines, file=self._stream)
        return len(text)

    def finish(self) -> None:
        """Print the rest, when the bar is closed."""
        self._stream.write(self._rest)
        self._rest = ""


@contextmanager
def _log_to(show: Callable[[str], None]) -> Iterator[None]:
    """In here `show` gets what fnshard logs: a first step takes a while to be lowered and compiled."""
    logger, handler = logging.getLogger("fnshard"), logging.Handler(logging.INFO)
    handler.emit = lambda record: show(record.getMessage())
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else it would be printed twice where logging is set up
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
