"""Run one rank of many: join the others, do the work, leave with them, and end the process.

A program that `fs.launch` or `torchrun` starts calls `run_rank(main)`; without a launcher it is the only
rank.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fnshard import checkpoint
from fnshard.checkpoint.saving import wait_for_save
from fnshard.errors import CollectiveError, LaunchError, stable_repr
from fnshard.launcher.post_mortem import write_message
from fnshard.mesh.process_group import join_group, launcher, leave_group, sign_off, under_launcher, world_size

__all__ = ["Stop", "run_rank"]

LOGS = "FNSHARD_LOGS"  # the folder of rank0.log, rank1.log, ...


@dataclass
class Stop:
    """A note that this process was asked to end (SIGTERM); `main` reads it, and ends when it is ready.

    Asking again changes nothing: a cluster may signal a rank and its launcher, which passes the signal on.
    """

    asked: bool = False

    def ask(self, *_: Any) -> None:
        """Take note of a signal, as its handler."""
        self.asked = True


def run_rank(
    main: Callable[[], Any],
    *,
    device_type: str | None = None,
    timeout_s: float = 600.0,
    stop: Stop | None = None,
) -> NoReturn:
    """Be one rank: join the others, run `main`, leave together, and end this process.

    The exit code is 0 after `main` returned on all ranks. It is 1 after an exception, whose traceback is
    printed and reported to the launcher, or after `sys.exit(message)`, of which the launcher gets the message
    alone. A save in the background is completed before the end, also after an exception, unless that is a
    `CollectiveError`. A world of one, or no launcher at all, joins nothing.

    Args:
        main: is called with the process group ready and the device set.
        device_type: "cpu", "cuda", ...; by default the accelerator if there is one. CPU tensors can be
            communicated on any.
        timeout_s: how long a collective waits for a silent peer.
        stop: notes a SIGTERM; with None a SIGTERM ends this process at once.
    """
    # Set up signals.
    if under_launcher():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher reports Ctrl-C; ranks just end
        end_with_parent(signal.SIGKILL, launcher())
    signal.signal(signal.SIGTERM, signal.SIG_DFL if stop is None else stop.ask)

    # Set up the streams. A console that fails must not end the training.
    log = None
    if LOGS in os.environ and os.environ["RANK"] == "0":  # the others' output is in their files already
        path = Path(os.environ[LOGS], "rank0.log")
        log = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  (to the end)
    sys.stdout, sys.stderr = (s and Console(s, log) for s in (sys.stdout, sys.stderr))
    # From here on a SIGTERM is handled, also one that was held back during the imports.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def run_in_group() -> None:
        """Join the others, run `main`, and leave with them."""
        join_group(device_type, timeout_s, lambda: stop is not None and stop.asked)
        try:
            main()
        except SystemExit as ended:
            if dist.is_initialized() or world_size() == 1:  # otherwise the ranks have left already
                unsaved = wait_for_save()
                if unsaved is not None and not ended.code:
                    raise unsaved from None
            raise
        checkpoint.wait()  # a save that is still being written must not be lost, nor its failure
        leave_group()

    # Run it. `record` reports an exception to the launcher; find the exit code, and report all else.
    code, raised = 1, None
    try:
        record(run_in_group)()
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
        if not isinstance(code, int):
            with suppress(OSError):
                print(code, file=log or sys.stderr)
            write_message(str(code))
            code = 1
    except BaseException as error:
        raised = error
        with suppress(OSError):  # the disk of the logs may be full
            traceback.print_exc(file=log)  # the launcher shows it on the console
        # The background goes on with the save that it has begun, and peers wait for this rank's part of it.
        # After a `CollectiveError` there may be no peer left. Ctrl-C ends the wait.
        if not isinstance(error, CollectiveError):
            with suppress(OSError, KeyboardInterrupt):
                if (unsaved := wait_for_save()) is not None:
                    print(unsaved, file=log or sys.stderr)

    sign_off(raised)
    # A gloo rank can abort while the interpreter tears its threads down, so this process skips that.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr, log):
        if stream is not None:
            with suppress(OSError):
                stream.flush()
    os._exit(code)


RUN_FUNCTION = "import sys; from fnshard.launcher.rank import run_function; run_function(sys.argv[1])"


def function_command(function: Callable[..., Any], args: Sequence[Any], folder: Path) -> list[str]:
    """Return the command that runs a function in another process, which imports it as `multiprocessing` does.

    Raises:
        LaunchError: other processes cannot import the function (a lambda, a function inside another, one of a
            notebook), or the arguments cannot be pickled.
    """
    preparation = spawn.get_preparation_data("rank")
    preparation.pop("authkey", None)  # the key of `multiprocessing`'s own pipes, which refuses to be pickled
    file = folder / "function.pickle"
    try:
        has_main = "init_main_from_name" in preparation or "init_main_from_path" in preparation
        if function.__module__ == "__main__" and not has_main:
            raise AttributeError("it is defined in no file")
        file.write_bytes(pickle.dumps(preparation) + pickle.dumps((function, tuple(args))))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise LaunchError(
            f"{stable_repr(function)} and its args= cannot be sent to other processes: {error}.",
            fix="def it at the top of a file; fs.launch([sys.executable, ...]) takes any program.",
        ) from None
    return [sys.executable, "-u", "-c", RUN_FUNCTION, str(file)]


def run_function(path: str) -> NoReturn:
    """Run, as a rank, the function that `function_command` wrote to a file."""

    def main() -> None:
        with open(path, "rb") as file:
            spawn.prepare(pickle.load(file))  # imports the script, which is not `__main__` here
            function, args = pickle.load(file)
        if function.__module__ == "__mp_main__":  # hydra.main would take it for a module of a package
            os.environ.setdefault("HYDRA_MAIN_MODULE", "__main__")
        function(*args)

    run_rank(main)


class Console:
    """A stream whose errors never end a program: if a disk is full or nobody listens, it writes nothing.

    Lines go to a file as well, except those that are drawn over.
    """

    def __init__(self, console: TextIO, file: TextIO | None = None):
        if isinstance(console, io.TextIOWrapper):
            with suppress(OSError):  # this flushes the stream, which may fail
                console.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
        self._console, self._file = console, file

    def write(self, text: str) -> int:
        drawn_over = self._file is None or text.startswith("\r")
        for stream in [self._console] if drawn_over else [self._file, self._console]:
            with suppress(OSError):
                stream.write(text)
                stream.flush()
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write flushes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)


def end_with_parent(number: int, parent: int) -> None:
    """Ask Linux to send this process a signal when its parent dies; do nothing on other systems.

    Args:
        parent: the process that started this one. If it has died already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.getppid() != parent:  # it died while this process was importing
        os._exit(1)
