"""Local ranks: start them, say which one failed and why, end them cleanly.

`launch(command, ranks=n)` runs in the process a person started, `run_rank(main)` in each rank. The
ranks meet through files below a temporary folder and talk over the loopback interface alone, so
nothing listens on a network. A rank started by `torchrun` instead meets as torchrun says.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fnshard.errors import FnshardError

RENDEZVOUS = "FNSHARD_RENDEZVOUS"  # folder of the ranks' file store
LOGS = "FNSHARD_LOGS"  # folder of rank0.log, rank1.log, ...
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
SHUTDOWN_S = 5  # a stopped process is killed after this many seconds
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# What a rank says when *another* one died: never the cause of a failure, always its echo.
ECHOES = (
    "CollectiveError",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out",
)


class LaunchError(FnshardError, RuntimeError):
    """A rank failed. One string, so that it survives pickling by a job launcher."""


# ------------------------------------------------------------------ the process that starts ranks


def under_launcher() -> bool:
    """Whether this process is already a rank (`torchrun` and its like set these)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cpu_threads(ranks: int) -> int:
    """Threads for each of `ranks` processes that share this machine's CPUs; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cpus // ranks)


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    logs: Path,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run `command` in `ranks` processes on this machine and wait until all have ended well.

    Rank 0 keeps this process's console; the others write to `logs/rank<i>.log` alone. Each process
    is to call `run_rank`.

    Args:
        command: program and arguments, `[sys.executable, "-u", "-m", "package.module", "job.json"]`.
        ranks: how many; RANK, LOCAL_RANK and WORLD_SIZE tell each which it is.
        logs: folder, made if need be.
        max_restarts: how often all ranks are started anew after one of them failed.
        env: more environment variables for the ranks.

    Raises:
        LaunchError: the rank that failed first, its traceback or last line, and where its log lies.
        KeyboardInterrupt, SystemExit: a signal ended this process; the ranks were ended first.
    """
    logs = Path(logs).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("rank*.log"):  # restarts append, another launch starts afresh
        old.unlink()
    meeting = Path(tempfile.mkdtemp(prefix="fnshard-"))
    added = {
        RENDEZVOUS: str(meeting),
        LOGS: str(logs),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(cpu_threads(ranks)),
        # Without it a restart can meet the dead attempt's addresses, and hang.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
        **(env or {}),
    }
    config = _launch_config(ranks, meeting, max_restarts)
    try:
        with _environment(added), _signal_handlers(), _quiet_agent():
            elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        message = describe_failure(error.failures, ranks, logs)
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stop.sigval) from None
    else:
        return
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    raise LaunchError(message)


def _launch_config(ranks: int, meeting: Path, max_restarts: int) -> LaunchConfig:
    # Older releases read the timeout from the environment alone.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    timeout = {"shutdown_timeout": SHUTDOWN_S} if "shutdown_timeout" in known else {}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(meeting / "agent"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        monitor_interval=0.1,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(meeting / "errors")),
        **timeout,
    )


def describe_failure(failures: Mapping[int, ProcessFailure], ranks: int, logs: Path) -> str:
    """What to tell a person: the rank that caused the failure, its traceback, its log.

    A rank whose peer died, or that was told to end, is an echo and comes last.
    """
    rank = min(failures, key=lambda r: (_echo(failures[r]), failures[r].timestamp))
    failure = failures[rank]
    log = logs / f"rank{rank}.log"
    told = _traceback(failure)
    if told:
        head = f"rank {rank} of {ranks} failed: {_raised(told)[0]}"
        body = told.rstrip()
    else:
        ended = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else "ended"
        head = f"rank {rank} of {ranks} {ended} with exit code {failure.exitcode}, without a traceback."
        body = f"Last line of its log: {_last_line(log)}"
    return f"{head}\n{body}\nLog: {log}"


def _traceback(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
    return ""


def _raised(told: str) -> list[str]:
    """A traceback's last lines: the exception's type and message, which may be of several lines."""
    lines = told.rstrip().splitlines()
    frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    return [line for i, line in enumerate(lines) if i > frame and not line.startswith("    ")]


def _echo(failure: ProcessFailure) -> int:
    told = _traceback(failure)
    if told:
        return 2 if any(sign in line for sign in ECHOES for line in _raised(told)) else 0
    if failure.exitcode < 0:
        return 3 if -failure.exitcode == signal.SIGTERM else 0
    return 1


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else "(empty)"


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:  # the agent leaves variables of its own behind, too
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Put back the handlers that the agent replaces with its own and leaves installed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Hide the agent's own account of a failure; ours follows."""
    loggers = [
        logger
        for name, logger in logging.Logger.manager.loggerDict.items()
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger)
    ]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


# ------------------------------------------------------------------ the process that is a rank


def run_rank(
    main: Callable[[], Any], *, device_type: str | None = None, timeout_s: float = 600.0
) -> NoReturn:
    """Be one rank: join the others, run `main`, leave together, end this process.

    Ends with exit code 0 after `main` returned on all ranks; with 1 after an exception, whose
    traceback is printed and handed to the launcher. A world of one joins nothing.

    Args:
        main: called with the process group ready and the device set.
        device_type: "cpu", "cuda", ...; default the accelerator if there is one. CPU tensors can be
            communicated on any.
        timeout_s: how long a collective waits for a silent peer.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher answers Ctrl-C, ranks just end
    _end_with_parent()
    log = redirect_output()

    def joined() -> None:
        join_group(device_type, timeout_s)
        main()
        leave_group()

    code = 1
    try:
        record(joined)()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
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
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_s)}
    if RENDEZVOUS in os.environ:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        path = Path(os.environ[RENDEZVOUS]) / f"store-{attempt}"  # a dead attempt's keys stay behind
        options.update(store=dist.FileStore(str(path), world), rank=rank, world_size=world)
    dist.init_process_group(backend, **options)


def leave_group() -> None:
    """Wait for all ranks, then take the default process group down; nothing where there is none."""
    if not dist.is_initialized():
        return
    dist.all_reduce(torch.zeros(()))  # a barrier over gloo, whatever the device
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its launcher dies, so that no rank is left behind."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
