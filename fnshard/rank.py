"""Rank: one process of many: it joins the others, does its work, leaves with them, and ends.

`run_rank(main)` is what a program that `fnshard.launch` or `torchrun` starts calls. Ranks that `launch`
started meet through files below a temporary folder and talk over the loopback interface alone, so nothing
listens on a network. A rank started by `torchrun` meets as torchrun says.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fnshard import checkpoint

RENDEZVOUS = "FNSHARD_RENDEZVOUS"  # folder of the ranks' file store
LOGS = "FNSHARD_LOGS"  # folder of rank0.log, rank1.log, ...
LAUNCHER = "FNSHARD_LAUNCHER"  # process that started this one
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # elastic's name, which torchrun sets too


@dataclass
class Stop:
    """Whether somebody asked this process to end (SIGTERM): `main` does so when it is ready to.

    Asking again changes nothing: a cluster may tell a rank and its launcher, and the launcher passes it on.
    """

    asked: bool = False

    def ask(self, *_: Any) -> None:
        """A signal handler: it only takes note."""
        self.asked = True


def under_launcher() -> bool:
    """Whether this process is already a rank (`torchrun` and its like set these)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def attempt() -> int:
    """How often the ranks of this job were started anew before."""
    return int(os.environ.get(ATTEMPT, "0"))


def run_rank(
    main: Callable[[], Any],
    *,
    device_type: str | None = None,
    timeout_s: float = 600.0,
    stop: Stop | None = None,
) -> NoReturn:
    """Be one rank: join the others, run `main`, leave together, end this process.

    Ends with exit code 0 after `main` returned on all ranks; with 1 after an exception, whose
    traceback is printed and handed to the launcher. A world of one joins nothing.

    Args:
        main: called with the process group ready and the device set.
        device_type: "cpu", "cuda", ...; default the accelerator if there is one. CPU tensors can be
            communicated on any.
        timeout_s: how long a collective waits for a silent peer.
        stop: what SIGTERM is to be noted in; None: SIGTERM ends this process at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher answers Ctrl-C, ranks just end
    signal.signal(signal.SIGTERM, signal.SIG_DFL if stop is None else stop.ask)
    _end_with_parent()
    log = redirect_output()
    # From here on a SIGTERM is heard, one that the launcher held back during the imports, too.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def joined() -> None:
        join_group(device_type, timeout_s)
        try:
            main()
        except SystemExit:
            if dist.is_initialized() or os.environ["WORLD_SIZE"] == "1":  # else they have left already
                checkpoint.wait()
            raise
        checkpoint.wait()  # nothing that is being written is lost; what could not be is an error
        leave_group()

    code = 1
    try:
        record(joined)()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc(file=log)  # the launcher shows it on the console
    # An ended gloo rank can abort while the interpreter tears its threads down: do not let it.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr, log):
        if stream is not None:
            stream.flush()
    os._exit(code)


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
            self._file.write(text)
            self._file.flush()
        return self._console.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)


def join_group(device_type: str | None = None, timeout_s: float = 600.0) -> None:
    """Set this rank's device and make the default process group; nothing in a world of one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device_type = device_type or (accelerator.type if accelerator else "cpu")
    if device_type != "cpu":
        torch.accelerator.set_device_index(local)
    if world == 1:
        return
    backend = "gloo"
    if device_type != "cpu":
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    timeout = datetime.timedelta(seconds=timeout_s)
    if RENDEZVOUS in os.environ:
        store = dist.FileStore(str(Path(os.environ[RENDEZVOUS]) / f"store-{attempt()}"), world)
    else:
        # torchrun's store lives through restarts, and in it a dead attempt's addresses: who meets them hangs.
        met = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))[0]
        store = dist.PrefixStore(f"fnshard/{attempt()}", met)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def leave_group() -> None:
    """Wait for all ranks, then take the default process group down; nothing where there is none."""
    if not dist.is_initialized():
        return
    dist.all_reduce(torch.zeros(()))  # a barrier over gloo, whatever the device
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    dist.destroy_process_group()


def end_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when the one that started it dies; nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its launcher dies, so that no rank is left behind."""
    if not sys.platform.startswith("linux"):
        return
    end_with_parent(signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):  # it died while this process was importing
        os._exit(1)
