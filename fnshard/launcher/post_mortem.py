"""Find the rank that caused a failure, and why, from the exit codes, errors and logs that ranks leave."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ERRORS = "TORCHELASTIC_ERROR_FILE"  # the file in which a rank leaves its error
# Words of errors that a rank raises when *another* one died: they echo a failure, and never cause it.
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
class PostMortem:
    """A record of how the ranks ended.

    Args:
        failures: the ranks that failed by themselves.
        killed: those that had to be killed afterwards.
        stopped: those of the killed ranks that did not run (SIGSTOP).
    """

    failures: Mapping[int, ProcessFailure]
    killed: Sequence[int] = ()
    stopped: Sequence[int] = ()

    @property
    def cause(self) -> int:
        """The rank that is to blame; one whose peer died, or that was asked to end, only echoes that."""
        return min(self.failures, key=lambda r: (echo_level(self.failures[r]), self.failures[r].timestamp))

    @property
    def may_restart(self) -> bool:
        """Return whether a rank was lost, and its program is not at fault."""
        cause = self.failures[self.cause]
        return bool(self.stopped) or cause.exitcode < 0 or echo_level(cause) > 1

    def describe(self, ranks: int, logs: Path) -> str:
        """Return a message for a person: the rank that caused the failure, its traceback and its log.

        It also names ranks without a failure that the others waited for.
        """
        message = self._describe_cause(ranks, logs)
        if self.stopped:
            named = ", ".join(map(str, self.stopped))
            return f"rank {named} of {ranks} stood still (SIGSTOP) and was killed; {message}"
        if self.killed and echo_level(self.failures[self.cause]) > 1:
            named, log = ", ".join(map(str, self.killed)), logs / f"rank{self.killed[0]}.log"
            return f"{message}\nStill at work, and killed: rank {named} (log: {log})"
        return message

    def _describe_cause(self, ranks: int, logs: Path) -> str:
        """Describe the end of the rank that is to blame: its traceback, its signal or its exit code."""
        rank = self.cause
        failure, log = self.failures[rank], logs / f"rank{rank}.log"
        text = _find_traceback(failure)
        if text:
            raised = _find_exception_lines(text)[0]
            head = f"rank {rank} of {ranks} failed: {raised}"
            # `sys.exit(message)` has no traceback, and the head has its first line already.
            body = drop_internal_frames(text.rstrip()).removeprefix(raised).lstrip("\n")
        else:
            ended = f"ended with exit code {failure.exitcode}, without a traceback."
            if failure.exitcode < 0:
                reason = ": perhaps out of memory" if failure.exitcode == -signal.SIGKILL else ""
                ended = f"was killed by signal {-failure.exitcode} ({failure.signal_name()}){reason}."
            head = f"rank {rank} of {ranks} {ended}"
            body = f"Last line of its log: {_read_last_line(log)}"
        return "\n".join(filter(None, [head, body, f"Log: {log}"]))


def echo_level(failure: ProcessFailure) -> int:
    """Rate how unlikely it is that a rank's end caused that of the others: 0 is a cause, 4 surely none."""
    text = _find_traceback(failure)
    if text:
        is_echo = any(words in line for words in ECHOES for line in _find_exception_lines(text))
        return 3 if is_echo else 0
    if failure.exitcode < 0:  # NCCL ends a process that has waited too long by SIGABRT
        return {signal.SIGABRT: 2, signal.SIGTERM: 4}.get(-failure.exitcode, 0)
    return 1


def write_message(message: str) -> None:
    """Report from a rank why it ends, in the file to which `record` writes an exception's traceback."""
    if ERRORS in os.environ:
        values = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(os.environ[ERRORS]).write_text(json.dumps({"message": values}), encoding="utf-8")


def _find_traceback(failure: ProcessFailure) -> str:
    """Return a rank's traceback, or its message alone; "" if it has left neither."""
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
    return ""


LIBRARY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
STARTERS = (os.path.join(LIBRARY, "launcher"), os.path.join("torch", "distributed", "elastic"), "<frozen ")


def drop_internal_frames(text: str) -> str:
    """Return a traceback with the program's own frames, and those of its calls; the rank's log has all.

    Frames that start a rank are left out. The library's frames are left out too, unless the library itself
    fails by an exception that is not its own.
    """
    kept: list[str] = []
    for head, frames, message in _split_tracebacks(text):
        files = [frame[1] for frame in frames]
        ends_in_library = bool(files) and files[-1].startswith(LIBRARY)
        hides_library = message.startswith("fnshard.errors.") or not ends_in_library
        shown = [
            frame[0] for frame, file in zip(frames, files, strict=True)
            if not any(s in file for s in STARTERS) and not (hides_library and file.startswith(LIBRARY))
        ]  # fmt: skip
        # Where every frame was left out, the head goes too, and the message is left alone.
        if shown or not frames:
            kept += [head, *shown]
        kept.append(message)
    return "".join(kept)


_HEAD = re.compile(  # the head of the first traceback, or of one that follows the traceback of its cause
    r"(?:^|(?<=another exception occurred:\n\n)|(?<=direct cause of the following exception:\n\n))"
    r"Traceback \(most recent call last\):\n"
)
_FRAME = re.compile(r'  File "(.*?)".*(?:\n(?:    |  \[).*)*(?:\n|$)')


def _split_tracebacks(text: str) -> Iterator[tuple[str, list[re.Match[str]], str]]:
    """Yield the head, the frames and the message of each traceback in a text; together these are the text.

    A message may have lines that look like frames, so that frames are matched only right after a head.
    """
    heads = list(_HEAD.finditer(text))
    starts = [*(h.start() for h in heads), len(text)]
    if starts[0]:
        yield "", [], text[: starts[0]]  # a message without a traceback
    for head, end in zip(heads, starts[1:], strict=True):
        frames, at = [], head.end()
        while frame := _FRAME.match(text, at, end):
            frames.append(frame)
            at = frame.end()
        yield head[0], frames, text[at:end]


def _find_exception_lines(text: str) -> list[str]:
    """Return the lines of the last exception's type and message."""
    *_, (_, _, message) = _split_tracebacks(text.rstrip())
    return [line for line in message.splitlines() if not line.startswith("    ")] or [text.splitlines()[-1]]


def _read_last_line(log: Path) -> str:
    """Read the last line of a log that is not blank."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else "(empty)"
