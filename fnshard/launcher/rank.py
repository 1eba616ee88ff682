"""Rank: one process of many: it joins the others, does its work, leaves with them, and ends.

`run_rank(main)` is what a program that `fs.launch` or `torchrun` starts calls; started by nobody, it is the
only rank.
"""

from __future__ import annotations

import importlib
import json
import logging
import operator
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fnshard import checkpoint
from fnshard.checkpoint.saving import wait_for_save
from fnshard.errors import LaunchError, stable_repr
from fnshard.launcher.post_mortem import PEAK
from fnshard.mesh.process_group import join_group, leave_group, under_launcher, world_size

__all__ = ["Stop", "expect_memory", "run_rank"]

LOGS = "FNSHARD_LOGS"  # folder of rank0.log, rank1.log, ...
LAUNCHER = "FNSHARD_LAUNCHER"  # process that started this one
ERRORS = "TORCHELASTIC_ERROR_FILE"  # where a rank leaves why it failed


@dataclass
class Stop:
    """Whether this process was asked to end (SIGTERM): `main` does so when it is ready to.

    Asking again changes nothing: a cluster may tell a rank and its launcher, and the launcher passes it on.
    """

    asked: bool = False

    def ask(self, *_: Any) -> None:
        """A signal handler: it only takes note."""
        self.asked = True


def run_rank(
    main: Callable[[], Any],
    *,
    device_type: str | None = None,
    timeout_s: float = 600.0,
    stop: Stop | None = None,
) -> NoReturn:
    """Be one rank: join the others, run `main`, leave together, end this process.

    Ends with exit code 0 after `main` returned on all ranks; with 1 after an exception, whose
    traceback is printed and handed to the launcher, or after `sys.exit(message)`, of which the launcher gets
    the message alone. A world of one, or no launcher at all, joins nothing.

    Args:
        main: called with the process group ready and the device set.
        device_type: "cpu", "cuda", ...; default the accelerator if there is one. CPU tensors can be
            communicated on any.
        timeout_s: how long a collective waits for a silent peer.
        stop: what SIGTERM is to be noted in; None: SIGTERM ends this process at once.
    """
    if under_launcher():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher answers Ctrl-C, ranks just end
        end_with_parent(signal.SIGKILL, int(os.environ.get(LAUNCHER, os.getppid())))
    signal.signal(signal.SIGTERM, signal.SIG_DFL if stop is None else stop.ask)
    log = redirect_output()
    # From here on a SIGTERM is handled, one that the launcher held back during the imports, too.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def joined() -> None:
        join_group(device_type, timeout_s)
        try:
            main()
        except SystemExit as ended:
            if dist.is_initialized() or world_size() == 1:  # else they have left already
                unsaved = wait_for_save()
                if unsaved is not None and not ended.code:
                    raise unsaved from None
            raise
        checkpoint.wait()  # nothing that is being written is lost; what could not be is an error
        leave_group()

    code = 1
    try:
        record(joined)()
        code = 0
    except SystemExit as stopped:
        code = _exit_code(stopped.code, log)
    except BaseException:
        with suppress(OSError):  # the disk of the logs may be full
            traceback.print_exc(file=log)  # the launcher shows it on the console
    # An ended gloo rank can abort while the interpreter tears its threads down: do not let it.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr, log):
        if stream is not None:
            with suppress(OSError):
                stream.flush()
    os._exit(code)


BY_NAME = """
import json, sys
command = json.loads(sys.argv[1])
sys.argv[:], sys.path[:] = command["argv"], command["path"]
from fnshard.launcher.rank import import_function, run_rank
run_rank(lambda: import_function(command)())
"""


def import_command(function: Callable[[], Any]) -> list[str]:
    """The command that imports a function by its name in another process, and runs it as a rank.

    Raises:
        LaunchError: the name leads elsewhere, or nowhere: a lambda, a method of an object, a function inside
            of another, one of a notebook.
    """
    name, defined = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    main = sys.modules["__main__"]
    where = {"module": defined}
    if defined == "__main__":
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        is_file = file is not None and os.path.isfile(file)
        where = {"module": spec.name} if spec else {"file": os.path.abspath(file)} if is_file else {}
    try:
        found = operator.attrgetter(name)(sys.modules[defined])
    except (AttributeError, KeyError):
        found = None
    if found is not function or not where:
        raise LaunchError(
            f"{stable_repr(function)} has no name by which other processes could import it.",
            fix="def it at the top of a file; fs.launch([sys.executable, ...]) takes any program.",
        )
    command = {**where, "function": name, "argv": sys.argv, "path": sys.path}
    return [sys.executable, "-u", "-c", BY_NAME, json.dumps(command)]


def import_function(command: Mapping[str, Any]) -> Callable[[], Any]:
    """The function that `import_command` names; a script that defines it is not `__main__` here."""
    if "module" in command:
        module = importlib.import_module(command["module"])
    else:
        name = "__mp_main__"  # as `multiprocessing` calls it
        module = module_from_spec(spec_from_loader(name, loader := SourceFileLoader(name, command["file"])))
        sys.modules[name] = sys.modules["__main__"] = module
        loader.exec_module(module)
    return operator.attrgetter(command["function"])(module)


def _exit_code(code: object, log: TextIO | None) -> int:
    """The exit code of `sys.exit(code)`; a message goes to the log and to the launcher, as an exception's
    traceback would."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    with suppress(OSError):
        print(code, file=log or sys.stderr)
    if ERRORS in os.environ:
        message = {"message": str(code), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(os.environ[ERRORS]).write_text(json.dumps({"message": message}), encoding="utf-8")
    return 1


def expect_memory(peak_bytes: int) -> None:
    """Tell the launcher what this rank is predicted to take of the machine's memory, for its words on a rank
    that was killed."""
    if ERRORS in os.environ:
        with suppress(OSError):
            Path(os.environ[ERRORS]).with_suffix(PEAK).write_text(str(int(peak_bytes)))


def redirect_output() -> TextIO | None:
    """Send this rank's output to its file below `FNSHARD_LOGS`; rank 0 writes to the console too.

    Gives the file, or None where there is no such folder and everything stays as it is.
    """
    folder, rank = os.environ.get(LOGS), int(os.environ.get("RANK", "0"))
    if folder is None:
        return None
    log = (Path(folder) / f"rank{rank}.log").open("a", encoding="utf-8")
    if rank == 0:
        sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
    else:
        os.dup2(log.fileno(), 1)  # what libraries print from C++ goes there, too
        os.dup2(log.fileno(), 2)
    return log


class _Tee:
    """A console stream whose lines go to a file as well, but for those that are drawn over."""

    def __init__(self, console: TextIO, file: TextIO):
        self._console, self._file = console, file

    def write(self, text: str) -> int:
        if not text.startswith("\r"):
            with suppress(OSError):  # a full disk costs lines of a log, and ends nothing
                self._file.write(text)
                self._file.flush()
        return self._console.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)


def end_with_parent(number: int, parent: int) -> None:
    """Ask Linux to send this process a signal when the one that started it dies; nothing elsewhere.

    Args:
        parent: the process that started this one. Where it has died before, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.getppid() != parent:  # it died while this process was importing
        os._exit(1)
