"""Monitor: a silent rank is named on a backend whose `wait` does not block the host.

NCCL's wait makes the stream wait. That a peer is gone shows minutes later, when NCCL ends the process, and
says nobody's name. So each wait leaves an event on the stream, and a thread looks whether these happen: if
the oldest has not for too long, it calls the roll, says who did not answer, and ends the process itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fnshard.errors import CollectiveError
from fnshard.runtime.collectives.roll_call import absent, lost

ROLL_CALL_S = 10.0  # ranks begin to wait at different times


@dataclass(frozen=True)
class _Wait:
    """What a stream waits for since when, and the event after it."""

    what: Callable[[], str]
    where: str
    event: Any
    since: float


def end(error: CollectiveError) -> NoReturn:
    """Hand the error to the launcher, print it, and end this process: its stream waits for ever."""
    try:
        raise error
    except CollectiveError as raised:
        with suppress(Exception):
            get_error_handler().record_exception(raised)
        with suppress(OSError):
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
        os._exit(1)


@dataclass(eq=False)
class Monitor:
    """Of one rank's connection.

    Args:
        device_type: whose events these are.
        timeout: seconds without any wait coming to its end.
        end: what is done with the error.
    """

    rank: int
    world: int
    device_type: str
    timeout: float
    end: Callable[[CollectiveError], None] = end
    where: str = ""  # the instruction that runs, as the executor says
    waits: deque[_Wait] = field(default_factory=deque, init=False)
    closed: threading.Event = field(default_factory=threading.Event, init=False)
    thread: threading.Thread | None = field(default=None, init=False)

    def note(self, what: Callable[[], str]) -> None:
        """The current stream waits for a collective."""
        event = torch.Event(self.device_type)
        event.record()
        self.waits.append(_Wait(what, self.where, event, time.monotonic()))
        if self.thread is None:
            device = torch.accelerator.current_device_index() if self.device_type == "cuda" else None
            self.thread = threading.Thread(
                target=self._watch, args=(device,), name="fnshard-monitor", daemon=True
            )
            self.thread.start()

    def close(self) -> None:
        """Stop looking."""
        self.closed.set()

    def _watch(self, device: int | None) -> None:
        if device is not None:  # a thread begins on device 0, and would make a context there
            torch.accelerator.set_device_index(device)
        moved = time.monotonic()
        while not self.closed.wait(min(1.0, self.timeout / 10)):
            try:
                while self.waits and self.waits[0].event.query():
                    self.waits.popleft()
                    moved = time.monotonic()
            except RuntimeError:  # of the device: who waits for it on the host gets it, too
                return
            if self.waits and time.monotonic() - max(moved, self.waits[0].since) > self.timeout:
                return self.end(self._lost(self.waits[0]))

    def _lost(self, wait: _Wait) -> CollectiveError:
        silent = absent(self.rank, self.world, ROLL_CALL_S)
        who = f"rank {', '.join(map(str, silent))}" if silent else "the device"
        place = f"{wait.where}: " if wait.where else ""
        return CollectiveError(lost(place + wait.what(), f"{who} did not answer within {self.timeout:g} s"))
