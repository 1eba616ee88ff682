"""Start the ranks of one machine, say which one failed and why, start them again, and end them cleanly.

`launch(main, ranks=n)` runs in the process that a person started, and `run_rank(main)` in each rank
(`fnshard.launcher.rank`). For several machines use torchrun: a program that calls `launch` or `run_rank` runs
under it unchanged.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fnshard.compiler.frontend.contexts import CUBLAS
from fnshard.errors import LaunchError
from fnshard.launcher.fork import Forked, fork_rank, may_fork
from fnshard.launcher.post_mortem import ERRORS, PostMortem
from fnshard.launcher.rank import LOGS, function_command, run_rank
from fnshard.mesh.deadlock import process_stat
from fnshard.mesh.process_group import ATTEMPT, LAUNCHER, RENDEZVOUS, under_launcher
from fnshard.runtime.files.folder import clear_memory, scratch_directory

__all__ = ["LaunchError", "launch", "run_rank", "under_launcher"]

Process = subprocess.Popen[bytes] | Forked

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
POLL_S = 0.05
LAST_WORDS_S = 1.0  # the time for other ranks to report their own errors after one has failed
KILLED_S = 30.0  # how long to wait for a killed process
GRACE_S = 600.0  # how long ranks may take to end once they were asked; a last save may take long
# Each asks ranks to end; a second one ends everything.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(
    program: Callable[..., Any] | Sequence[str],
    *,
    ranks: int,
    args: Sequence[Any] = (),
    logs: str | Path | None = None,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    fork: Callable[[], NoReturn] | None = None,
) -> None:
    """Run a function, or a command, in `ranks` processes on this machine and wait until all have ended well.

    Rank 0 keeps this process's console; the others write to `logs/rank<i>.log` alone. SIGTERM is passed on to
    the ranks: those that take note of it (`run_rank(stop=)`) may finish and end well, and then this function
    does too. A second SIGTERM kills them. SIGHUP and SIGQUIT do the same.

        def main(config):
            mesh = fs.make_mesh(shard=-1)
            ...

        if __name__ == "__main__":
            fs.launch(main, ranks=2, args=({"lr": 0.1},))

    Args:
        program: a function; each rank imports the script or module that defines it, with the same `sys.argv`.
            Or a program and its arguments, `[sys.executable, "-u", "-m", "package.module", "job.json"]`, of
            which each process must call `run_rank`. In a process that is a rank already (under `torchrun`) a
            function runs as that rank instead, among as many as there are.
        ranks: the number of ranks; each finds RANK, LOCAL_RANK and WORLD_SIZE set.
        args: arguments of the function: anything that can be pickled.
        logs: a folder, which is made if necessary; by default a temporary one, which stays if a rank fails.
        max_restarts: how often all ranks start anew after one of them was killed by a signal or stopped
            answering. An exception, or an exit code, is the program's own and ends the job.
        env: more environment variables for the ranks; under `torchrun` a function finds them set.
        fork: does what the command does and ends the process. Ranks then run it in forks of this process,
            which have imported already what a command would import, if that is possible (`may_fork`).

    Raises:
        LaunchError: a rank failed (the error has the first one, its traceback or last line, and its log),
            other processes cannot import the function, the command is a string, there are no ranks, or
            `max_restarts` is no number of restarts.
        KeyboardInterrupt, SystemExit: a signal ended this process; the ranks were ended first.
    """
    is_command = isinstance(program, list | tuple) and not args
    if not (callable(program) or is_command) or not isinstance(ranks, int) or ranks < 1:
        raise LaunchError(
            f"fs.launch({program!r}, ranks={ranks!r}): a function, or a list of words without args=, on at "
            "least one rank.",
            fix='fs.launch([sys.executable, "train.py"], ranks=2).',
        )
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise LaunchError(
            f"fs.launch(max_restarts={max_restarts!r}): a whole number of restarts.",
            fix="max_restarts=0 starts the ranks once, max_restarts=2 up to three times.",
        )

    # A process that torchrun started is a rank already; one that `launch` started must not start more.
    env = env or {}
    if callable(program):
        if LAUNCHER in os.environ:
            raise LaunchError(
                "fs.launch in a rank that fs.launch has started.",
                fix='call it below `if __name__ == "__main__":`, for each rank imports the script.',
            )
        if under_launcher():
            os.environ.update(env)
            run_rank(partial(program, *args))

    # Run in folders that are removed at the end, unless the logs are still needed.
    temporary = scratch_directory("fnshard-logs-", keep=(LaunchError,)) if logs is None else nullcontext(logs)
    with temporary as folder, scratch_directory("fnshard-ranks-") as meeting:
        command = function_command(program, args, meeting) if callable(program) else list(program)
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        # Restarts append to logs, another launch starts afresh. Files of other names are the user's.
        for old in folder.glob("rank*.log"):
            if re.fullmatch(r"rank\d+\.log", old.name):
                old.unlink()
        try:
            _run_attempts(command, ranks, folder, meeting, max_restarts, env, fork)
        except LaunchError as error:
            raise error.with_traceback(None) from None  # the launcher's own frames say nothing of the program
        finally:
            clear_memory(os.getpid())


def _run_attempts(
    command: list[str], ranks: int, logs: Path, meeting: Path, max_restarts: int, env: Mapping[str, str],
    fork: Callable[[], NoReturn] | None,
) -> None:  # fmt: skip
    """Run attempts until one ends well or none is left.

    Args:
        meeting: a folder for the ranks' files.
    """
    # The environment that all ranks share. They divide the CPUs among them.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {
        **{name: os.environ.get(name, value) for name, value in CUBLAS.items()},
        LOGS: str(logs),
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cpus // ranks)),
        "PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING") or ":backslashreplace",
        # Ranks meet in a file and talk over loopback, so that nothing listens on a network.
        RENDEZVOUS: str(meeting), "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK,
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        **env,
    }  # fmt: skip

    asked: list[float] = []  # when the first signal came

    def note_signal(number: int, _: Any) -> None:
        """Note the first signal, which `_run_attempt` passes on to ranks; a second one ends everything."""
        if asked:
            raise SystemExit(128 + number)
        asked.append(time.monotonic())

    # SIGINT stays KeyboardInterrupt. Only the main thread may set handlers of signals.
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note_signal) for number in SIGNALS} if is_main else {}
    try:
        for number in range(max_restarts + 1):
            attempt_env = {**common, ATTEMPT: str(number)}
            ended = _run_attempt(command, ranks, number, meeting, attempt_env, asked, fork)
            if not ended.failures:
                return
            if asked and {failure.exitcode for failure in ended.failures.values()} == {-signal.SIGTERM}:
                raise SystemExit(128 + signal.SIGTERM)  # ranks that simply died of the signal are no failure
            message = ended.describe(ranks, logs)
            if asked or not ended.may_restart or number == max_restarts:
                raise LaunchError(message)
            line = f"restart {number + 1} of {max_restarts}: {message.splitlines()[0]}"
            print(line, file=sys.stderr, flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _run_attempt(
    command: list[str], ranks: int, number: int, meeting: Path, env: Mapping[str, str],
    asked: Sequence[float], fork: Callable[[], NoReturn] | None,
) -> PostMortem:  # fmt: skip
    """Start all ranks and wait until all have ended well, or one has not.

    Args:
        asked: will hold the time at which the ranks are asked to end; they are killed GRACE_S later.
    """
    errors = [meeting / f"error-{number}-{rank}.json" for rank in range(ranks)]
    processes: list[Process] = []
    is_passed_on = False

    def pause() -> None:
        """Pass a first signal on to the ranks, end everything if they take too long, and sleep a moment."""
        nonlocal is_passed_on
        if asked and not is_passed_on:
            is_passed_on = True
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if asked and time.monotonic() > asked[0] + GRACE_S:
            print(f"ranks that were asked to end had not done so after {GRACE_S:g} s and were killed.",
                  file=sys.stderr, flush=True)  # fmt: skip
            raise SystemExit(128 + signal.SIGTERM)
        time.sleep(POLL_S)

    # Ranks inherit the mask: SIGTERM is held back in each until it can handle it (`run_rank`).
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        for rank, error in enumerate(errors):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERRORS: str(error)}
            rank_env = {**os.environ, **env, **variables}
            with open(Path(env[LOGS], f"rank{rank}.log"), "ab") as log:
                # Rank 0 keeps the console, and writes its log itself.
                if fork is not None and may_fork():
                    process = fork_rank(fork, rank_env, log if rank else None)
                else:
                    streams = {"stdout": log, "stderr": log} if rank else {}
                    process = subprocess.Popen(command, env=rank_env, start_new_session=True, **streams)
            processes.append(process)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

        # Wait until all have ended, or one has failed; then let the others report their own errors.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            pause()
        until = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < until and any(p.poll() is None for p in processes):
            pause()

        # Note who has failed, and who is still at work or stopped, before all that live are killed.
        killed = [rank for rank, p in enumerate(processes) if p.poll() is None]
        stopped = [rank for rank in killed if process_stat(processes[rank].pid)[0] in "Tt"]
        failures = {r: _read_failure(r, p, errors[r]) for r, p in enumerate(processes) if p.poll()}
        return PostMortem(failures, killed, stopped)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with all processes that it has started itself
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # a process that sleeps in the kernel is left behind
                process.wait(KILLED_S)


def _read_failure(rank: int, process: Process, error: Path) -> ProcessFailure:
    """Return how a rank ended, with the error that it has written if that can be read."""
    try:
        return ProcessFailure(rank, process.pid, process.returncode, str(error))
    except Exception:  # the rank died while it wrote the file
        return ProcessFailure(rank, process.pid, process.returncode, "")
