"""A thread that computes on the host, while another one launches kernels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

PENDING = 2  # heavy calls under way: enough that the thread never idles, few enough to hold little memory


class Worker:
    """A thread that makes calls in their order; after one that failed it makes none until `wait` raises.

    Args:
        device: the current device of its calls, if it is a GPU.
    """

    def __init__(self, device: torch.device):
        # Each thread has a current device of its own, the first GPU unless it is told another.
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "fnshard-host", set_device)
        self._heavy: deque[Future[None]] = deque()
        self._last: Future[None] | None = None
        self._error: BaseException | None = None

    def submit(self, call: Callable[[], Any], *, heavy: bool = False) -> None:
        """Make a call after all earlier ones; wait while `PENDING` heavy ones are not done."""
        # `result` raises nothing here: `_run` keeps the errors of calls for `wait`.
        while heavy and len(self._heavy) >= PENDING:
            self._heavy.popleft().result()
        self._last = self._thread.submit(self._run, call)
        if heavy:
            self._heavy.append(self._last)

    def _run(self, call: Callable[[], Any]) -> None:
        """Make a call in the thread, unless an earlier one has failed."""
        if self._error is None:
            try:
                call()
            except BaseException as error:  # the launching thread raises it
                self._error = error

    def wait(self) -> None:
        """Return when all calls are done.

        Raises: the error of the first call that failed.
        """
        if self._last is not None:
            self._last.result()
        error, self._error, self._last = self._error, None, None
        self._heavy.clear()
        if error is not None:
            raise error
