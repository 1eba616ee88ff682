"""Post-mortem: which rank caused a failure and why, by what ranks leave: exit codes, errors, logs, memory."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fnshard.analysis.measure import control_groups

# What a rank raises when *another* one died: never the cause of a failure, always its echo.
ECHOES = (
    "CollectiveError",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out",
    "DistStoreError",  # a rank never came to the meeting
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "unexpected exit of a remote peer",
)


@dataclass
class HostMemory:
    """Bytes that were free at the least while ranks ran, and that each of them was predicted to take; None
    is not known. A process that is gone has given its memory back: `look` again and again before."""

    least_free: int | None = None
    predicted: int | None = None

    def look(self) -> None:
        """Take note of what is free now."""
        free = free_bytes()
        if free is not None:
            self.least_free = free if self.least_free is None else min(free, self.least_free)

    def read(self, errors: Iterable[Path]) -> None:
        """Read what ranks wrote by `fnshard.launcher.rank.expect_memory`."""
        for path in errors:
            with suppress(OSError, ValueError):
                self.predicted = max(int(path.with_suffix(PEAK).read_text()), self.predicted or 0)

    def __str__(self) -> str:
        parts = []
        if self.predicted is not None:
            parts.append(f"peak predicted {self.predicted / 1e9:.3g} GB a rank")
        if self.least_free is not None:
            parts.append(f"free at the least {self.least_free / 1e9:.3g} GB")
        return f" ({', '.join(parts)})" if parts else ""


PEAK = ".peak"  # of the file beside a rank's error file


def free_bytes() -> int | None:
    """Memory that processes may still take, of the machine and of this process's control groups; None where
    the system does not say it."""
    found = [max(0, limit - used) for limit, used in control_groups()]
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    return min(found, default=None)


def describe_failure(
    failures: Mapping[int, ProcessFailure], ranks: int, logs: Path, memory: HostMemory | None = None
) -> str:
    """The message for a person: the rank that caused the failure, its traceback, its log.

    A rank whose peer died, or that was asked to end, is an echo and comes last.

    Args:
        memory: what was seen of it while they ran.
    """
    rank = min(failures, key=lambda r: (echo_level(failures[r]), failures[r].timestamp))
    failure, log = failures[rank], logs / f"rank{rank}.log"
    text = _traceback_of(failure)
    if text:
        raised = _exception_lines(text)[0]
        head = f"rank {rank} of {ranks} failed: {raised}"
        body = text.rstrip().removeprefix(raised).lstrip("\n")  # of `sys.exit(message)` there is no traceback
    else:
        ended = f"ended with exit code {failure.exitcode}, without a traceback."
        if failure.exitcode < 0:
            ended = f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
            ended += f": perhaps out of memory{memory or ''}." if failure.exitcode == -signal.SIGKILL else "."
        head = f"rank {rank} of {ranks} {ended}"
        body = f"Last line of its log: {_last_line(log)}"
    return "\n".join(filter(None, [head, body, f"Log: {log}"]))


def echo_level(failure: ProcessFailure) -> int:
    """The more, the less a rank's end is the cause of the others'."""
    text = _traceback_of(failure)
    if text:
        return 3 if any(sign in line for sign in ECHOES for line in _exception_lines(text)) else 0
    if failure.exitcode < 0:  # NCCL ends a process that has waited too long by SIGABRT
        return {signal.SIGABRT: 2, signal.SIGTERM: 4}.get(-failure.exitcode, 0)
    return 1


def _traceback_of(failure: ProcessFailure) -> str:
    """A rank's traceback, or its message alone."""
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
    return ""


def _exception_lines(text: str) -> list[str]:
    """A traceback's last lines: the exception's type and message, which may be of several lines."""
    lines = text.rstrip().splitlines()
    frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    return [line for i, line in enumerate(lines) if i > frame and not line.startswith("    ")]


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else "(empty)"
