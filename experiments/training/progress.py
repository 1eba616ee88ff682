"""Progress: how far a run is, in some twenty lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TextIO

LINES = 20  # of a whole run
HINT_S = 10.0  # between two lines about what happens before a step


@dataclass
class Progress:
    """Steps of a run, `made` of them by earlier processes.

    `between`: the seconds so far that neither steps nor compiling took.
    """

    stream: TextIO
    steps: int
    made: int = 0
    between: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self._hinted, self._later_s = -math.inf, 0.0
        self._open = ExitStack()
        self._open.enter_context(_log_to(self._hint))

    def step(self, number: int, text: str, seconds: float) -> None:
        """Step `number` is done, `text` describes it; only some are printed."""
        first = number == self.made + 1  # it compiles: its time says nothing of later ones
        self._later_s = -self.between() if first else self._later_s + seconds
        if first or number == self.steps or number % max(1, self.steps // LINES) == 0:
            self.say(f"step {number}/{self.steps}, {text}, left {self._left(number)}")

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Show nothing more of what is logged; may be called again."""
        self._open.close()

    def _hint(self, text: str) -> None:
        if time.monotonic() - self._hinted > HINT_S:
            self._hinted = time.monotonic()
            self.say(text)

    def _left(self, number: int) -> str:
        made = number - self.made - 1
        if made == 0:
            return "?"
        left = round((self._later_s + self.between()) / made * (self.steps - number))
        return f"{left // 60}:{left % 60:02d}"


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
