"""Fork server: a process that has imported what ranks need, and forks each of them in a moment.

The one of `multiprocessing` closes stdin, where a rank may stop in a debugger, and would import `__main__` of
this process in each rank. Standard library only: it starts before torch is imported here.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from experiments import python_path

MOST_BYTES = 1 << 20  # of a request
POLL_S = 0.01
ANSWER_S = 300.0  # what an answer may take: the first one waits for the imports
STREAMS = (0, 1, 2)
RANDOM = {"numpy.random", "torch"}  # Python's own seeds itself anew after a fork


class ForkServer:
    """Starts `python -m MODULE` without its imports.

    The server starts with `start`, or at the first `popen`. It ends with this process, or in `close`, and
    with it what it has forked and that is a rank. Elsewhere than on Linux a process starts as any other.

    Args:
        modules: what it imports. They start no threads: with some, a process starts as any other.
    """

    def __init__(self, *modules: str):
        self._modules, self._threads, self._requests = modules, "", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkServer, self._modules  # in another process it is another server

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self, threads: str | None = None) -> None:
        """Begin with the imports, unless it has; nothing waits for them.

        Args:
            threads: OMP_NUM_THREADS of what will be forked, which OpenMP reads when it is imported; default
                that of two ranks on this machine.
        """
        if not sys.platform.startswith("linux"):
            return
        if threads is None:
            threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // 2))
        if self._process is not None and self._process.poll() is None and self._threads == threads:
            return
        self.close()
        self._threads = threads
        self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(ANSWER_S)
        # NumPy's pool of threads would be there already, and none of them after a fork.
        own = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1"}
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, str(there.fileno()), *self._modules],
                env={**os.environ, **own}, pass_fds=[there.fileno()], start_new_session=True,
            )  # fmt: skip

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool = True
    ) -> subprocess.Popen[bytes] | Forked:
        """As `subprocess.Popen`, with the folder, the streams and the blocked signals of this process.

        Args:
            command: `[sys.executable, "-u", "-m", MODULE, ...]`.
        """
        self.start(env.get("OMP_NUM_THREADS"))
        request = {
            "command": list(command), "env": dict(env), "cwd": os.getcwd(),
            "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }  # fmt: skip
        pid = None
        if all(map(_is_stream, STREAMS)):
            try:
                pid = self.ask(request, *STREAMS)
            except TimeoutError:
                self.close()  # it would fork the command later, too
            except OSError:
                pass  # no server, or a request that is too long
        if pid is None:
            return subprocess.Popen(list(command), env=env, start_new_session=start_new_session)
        return Forked(self, pid)

    def ask(self, request: Mapping[str, Any], *files: int) -> Any:
        """What the server answers.

        Raises:
            OSError: it does not, or not in time.
        """
        if self._connection is None:
            raise ConnectionError("there is no server")
        self._requests += 1
        message = json.dumps({**request, "number": self._requests}).encode()
        socket.send_fds(self._connection, [message], files)
        while message := self._connection.recv(MOST_BYTES):
            number, answer = json.loads(message)
            if number == self._requests:  # else of a request that Ctrl-C has interrupted
                return answer
        raise ConnectionError("the server has ended")

    def close(self) -> None:
        """End it."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


class Forked:
    """A process that a server has forked, as `subprocess.Popen` shows one."""

    def __init__(self, server: ForkServer, pid: int):
        self.pid, self.returncode, self._server = pid, None, server

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._server.ask({"poll": self.pid})
            except OSError as error:  # a rank dies with its parent
                if isinstance(error, TimeoutError):
                    self._server.close()
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the server is killed now, and this with it
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _is_stream(number: int) -> bool:
    """Whether a child would have it: what Python opens itself, where a closed stream was, no child has."""
    try:
        return os.get_inheritable(number)
    except OSError:  # closed
        return False


# ------------------------------------------------------------------ in the server


def serve(connection: socket.socket) -> Callable[[], None] | None:
    """Fork what is asked for, until nobody can ask any more.

    Returns:
        in each fork what it is to run.

    Raises:
        OSError: nobody can, and an answer was under way; or there can be no other process.
    """
    gc.freeze()  # a first collection would copy what processes share
    server = os.getpid()
    while True:
        message, files, *_ = socket.recv_fds(connection, MOST_BYTES, len(STREAMS))
        if not message:
            return None
        request = json.loads(message)
        number = request.pop("number")
        if "poll" in request:
            answer = _exit_code(request["poll"])
        elif len(os.listdir("/proc/self/task")) > 1:
            answer = None  # a fork takes no other thread along
        else:
            reading, writing = os.pipe()
            answer = os.fork()
            if answer == 0:
                os.setsid()
                return partial(_become, files, server, **request)
            os.close(writing)
            os.read(reading, 1)  # until it has a session and streams of its own
            os.close(reading)
        for file in files:
            os.close(file)
        connection.send(json.dumps([number, answer]).encode())


def _exit_code(pid: int) -> int | None:
    """Of a child that has ended, once."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # of the server before, and it dies with it
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(
    files: Sequence[int], server: int, command: Sequence[str], env: Mapping[str, str], cwd: str,
    blocked: Sequence[int],
) -> None:  # fmt: skip
    """Be the command in this process, which was just forked."""
    for stream, file in enumerate(files):
        os.dup2(file, stream)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for file in {*map(int, os.listdir("/proc/self/fd"))} - {*STREAMS}:
        with suppress(OSError):  # the list's own
            os.close(file)  # and the server goes on
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)  # before what may not be imported yet
    if "RANK" in env:
        from fnshard.mesh.process_group import LAUNCHER

        os.environ[LAUNCHER] = str(server)  # whose death ends a rank
        with suppress(OSError):  # `ps` shows it, where the environment is that of the server
            Path("/proc/self/comm").write_text(f"rank {env['RANK']}")
    tempfile.tempdir = None
    for generator in RANDOM & sys.modules.keys():
        sys.modules[generator].seed()
    gc.enable()
    module, *arguments = command[command.index("-m") + 1 :]
    sys.argv[:] = ["-m", *arguments]
    warnings.filterwarnings("ignore", message=".*found in sys.modules")  # it was imported, for its imports
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(connection: str, *modules: str) -> None:
    gc.disable()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as a rank that imports does
    for name in modules:
        with suppress(Exception):  # the rank that needs it will say so
            importlib.import_module(name)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a cluster tells every process: ranks save, and need it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    run = None
    with suppress(OSError):
        run = serve(socket.socket(fileno=int(connection)))
    if run is None:
        os._exit(0)  # at once, and ranks with it: another launcher may be there
    run()


if __name__ == "__main__":
    main(*sys.argv[1:])
