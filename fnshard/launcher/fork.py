"""Fork: start a rank as a copy of this process, which has already imported what the rank needs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any, NoReturn

import numpy as np
import torch

POLL_S = 0.02


class Forked:
    """A forked process, with the part of `subprocess.Popen` that a launcher uses."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(POLL_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def may_fork() -> bool:
    """Return whether a fork of this process would work: it must have no threads, which a fork would lack.

    OpenMP has threads as soon as torch has computed with several.
    """
    return sys.platform.startswith("linux") and threading.active_count() == 1 and torch.get_num_threads() == 1


def close_inherited_files() -> None:
    """Close this process's files but its streams, as an exec does: a lock is the launcher's alone.

    Their numbers stay taken, by the null device. Objects of the launcher still write to them or close them
    (a log's handler, an open file, Python's resource tracker), and a number that was free again would by
    then be a file of this rank's.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != null:
            with suppress(OSError):
                os.dup2(null, number, inheritable=False)
    # A rank starts a resource tracker of its own, which outlives it.
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None


def fork_rank(work: Callable[[], NoReturn], env: Mapping[str, str], log: Any = None) -> Forked:
    """Run a function in a forked process, which leads a session of its own, as a new program would.

    Args:
        work: ends the process itself.
        env: all environment variables of the process.
        log: an open file, which takes what the process prints; None leaves it this process's streams.
    """
    # The child has a copy of what is buffered, and would print it a second time.
    sys.stdout.flush()
    sys.stderr.flush()

    # The parent waits until the child leads its session: the launcher ends ranks by their process groups.
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        os.read(read_end, 1)  # returns when the child has its session and closes its end, or has died
        os.close(read_end)
        return Forked(pid)

    # The child takes on what a new program would have: session, streams, signals, environment, seeds.
    try:
        os.setsid()
        for stream in (1, 2) if log is not None else ():
            os.dup2(log.fileno(), stream)
        close_inherited_files()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        random.seed()
        np.random.seed()
        torch.seed()
        work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
