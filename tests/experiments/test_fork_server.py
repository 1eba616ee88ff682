"""The fork server: what it starts is the command, as `subprocess.Popen` would start it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import is_alive

from experiments import ROOT
from experiments.cli import fork_server
from experiments.cli.fork_server import Forked, ForkServer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process is started as any")

PROGRAM = """
import json, os, signal, sys

def seen():
    return {
        "arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(),
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "session": os.getsid(0) == os.getpid(), "input": sys.stdin.read(), "parent": os.getppid(),
        "files": sorted(set(os.listdir("/proc/self/fd")) - {"0", "1", "2"}),
        "forked": b"fork_server" in open("/proc/self/cmdline", "rb").read(), "main": __name__,
        "imported": "colorsys" in sys.modules,
    }

if __name__ == "__main__":
    if sys.argv[1] == "ends":
        exec(sys.argv[2])
    else:
        print(json.dumps(seen()), flush=True)
        print("an error", file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module `program` is, and one that starts a thread."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    with ForkServer("program", "colorsys", "nowhere") as server:
        yield server


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", "program", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", **more}


def seen_by(popen: Any, capfd: Any, **more: str) -> dict[str, Any]:
    process = popen(command("sees", "a b"), env=environment(**more), start_new_session=True)
    assert process.wait(60) == 0
    out, err = capfd.readouterr()
    assert err == "an error\n"
    return json.loads(out)


def test_it_is_the_command(server, capfd, tmp_path, monkeypatch):
    """Its arguments, environment, folder, streams, signals, session and files are those of `Popen`'s."""
    server.start()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forked = seen_by(server.popen, capfd, PYTHONPATH=str(tmp_path), NEW="1")
        executed = seen_by(subprocess.Popen, capfd, PYTHONPATH=str(tmp_path), NEW="1")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert forked.pop("parent") == server._process.pid and executed.pop("parent") == os.getpid()
    assert forked.pop("forked") and not executed.pop("forked")
    assert forked.pop("imported") and not executed.pop("imported")
    assert forked == executed and signal.SIGTERM in forked["blocked"]


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a mistake')", 1, "a mistake\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import threading; threading.Timer(0.1, sys.stderr.write, ['at last']).start()", 0, "at last"),
        ("import atexit; atexit.register(sys.stderr.write, 'at exit')", 0, "at exit"),
    ],
)
def test_it_ends_as_the_command(server, capfd, ends, code, says):
    codes = []
    for popen in (server.popen, subprocess.Popen):
        process = popen(command("ends", ends), env=environment(), start_new_session=True)
        codes.append(process.wait(60))
        assert capfd.readouterr().err.endswith(says)
    assert codes == [code, code]


def test_a_signal_reaches_it(server, monkeypatch):
    process = server.popen(command("ends", "signal.pause()"), env=environment())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None and os.getsid(process.pid) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.kill()  # of what has ended: nothing
    monkeypatch.setattr(process, "poll", lambda: None)  # it ends behind this
    process.kill()


def test_sigterm_leaves_the_server(server, capfd):
    """A cluster tells every process of a job, and ranks may save what they have."""
    before = seen_by(server.popen, capfd)
    os.kill(server._process.pid, signal.SIGTERM)
    assert seen_by(server.popen, capfd)["parent"] == before["parent"]


def test_an_interrupted_request_leaves_others_their_answers(server):
    """Ctrl-C behind a request: its answer is none to the next one."""
    lasting = server.popen(command("ends", "signal.pause()"), env=environment())
    ended = server.popen(command("ends", "pass"), env=environment())
    while is_alive(ended.pid):
        time.sleep(0.01)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(server._process.pid, signal.SIGSTOP)
    threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        ended.poll()
    signal.signal(signal.SIGINT, before)
    os.kill(server._process.pid, signal.SIGCONT)
    assert lasting.poll() is None
    lasting.kill()
    assert lasting.wait(60) == -signal.SIGKILL


def test_when_the_server_is_killed_another_one_starts(server, capfd):
    first = server.popen(command("ends", "signal.pause()"), env=environment())
    server._process.kill()
    server._process.wait()
    try:
        assert seen_by(server.popen, capfd)["forked"]
        assert first.poll() == -signal.SIGKILL
    finally:
        os.kill(first.pid, signal.SIGKILL)  # no rank: a rank dies with the server


def test_a_server_that_stands_still_is_done_without(server, capfd, monkeypatch):
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.2)
    server.start()
    os.kill(server._process.pid, signal.SIGSTOP)
    seen = seen_by(server.popen, capfd)
    assert not seen["forked"] and seen["parent"] == os.getpid() and server._process is None


def test_what_it_has_forked_ends_with_a_server_that_stands_still(server, monkeypatch):
    monkeypatch.setattr(fork_server, "ANSWER_S", 5.0)
    process = server.popen(command("ends", "signal.pause()"), env=environment())
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        assert process.wait(60) == -signal.SIGKILL and server._process is None
    finally:
        os.kill(process.pid, signal.SIGKILL)  # it asks for no end with its parent, as a rank does


def test_one_that_has_threads_or_cannot_start_executes(folder, capfd, monkeypatch):
    with ForkServer("threads", "colorsys") as server:
        seen = seen_by(server.popen, capfd)
        assert not seen["forked"] and seen["parent"] == os.getpid()
    monkeypatch.setattr(ForkServer, "start", lambda *_: None)
    assert seen_by(ForkServer().popen, capfd)["parent"] == os.getpid()


def test_a_file_that_has_the_number_of_a_closed_stream_is_no_stream(folder):
    """Here the connection, which the server could not see end while a rank had it."""
    program = (
        "import os, sys; from experiments.cli.fork_server import ForkServer; os.close(0);"
        "command = [sys.executable, '-m', 'program', 'ends', 'pass'];"
        "process = ForkServer().popen(command, env=os.environ);"
        "print(type(process).__name__, process.wait())"
    )
    env = environment(PYTHONPATH=f"{folder}:{ROOT}")
    ended = subprocess.run([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, timeout=60)
    assert ended.stdout == b"Popen 0\n"


def test_random_numbers_are_its_own(folder, capfd):
    with ForkServer("numpy.random", "torch") as server:
        for _ in range(2):
            ends = "import numpy, torch; print(numpy.random.rand(), torch.rand(1).item())"
            process = server.popen(command("ends", ends), env=environment())
            assert isinstance(process, Forked) and process.wait(60) == 0
    first, second = (line.split() for line in capfd.readouterr().out.splitlines())
    assert not {*first} & {*second}


def test_openmp_finds_its_number_of_threads_where_it_is_imported(server, capfd):
    first = seen_by(server.popen, capfd, OMP_NUM_THREADS="1")
    again = seen_by(server.popen, capfd, OMP_NUM_THREADS="1")
    other = seen_by(server.popen, capfd, OMP_NUM_THREADS="3")
    assert first["parent"] == again["parent"] != other["parent"]


def test_in_another_process_it_is_another_server(server):
    server.start()
    copy = pickle.loads(pickle.dumps(server))
    assert copy._process is None and copy._modules == server._modules


@pytest.mark.parametrize("requests", [0, 1])
def test_it_ends_with_its_owner(folder, requests):
    """Whatever ends that, and at once: while it waits for an answer, too."""
    (folder / "lasting.py").write_text(
        "import atexit, signal, time\natexit.register(signal.pause)\ntime.sleep(0.5)\n"
    )
    program = (
        "import os, sys, threading, time; from experiments.cli.fork_server import ForkServer;"
        "command = [sys.executable, '-m', 'program', 'ends', 'os._exit(0)'];"
        "server = ForkServer('lasting');"
        "popen = threading.Thread(target=server.popen, args=[command], kwargs={'env': os.environ});"
        "server.start(os.environ['OMP_NUM_THREADS']); print(server._process.pid, flush=True);"
        f"[popen.start() for _ in range({requests})]; time.sleep(0.2); os.kill(os.getpid(), 9)"
    )
    env = environment(PYTHONPATH=f"{folder}:{ROOT}")
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=60)
    while is_alive(int(ended.stdout)):  # or a test's timeout
        time.sleep(0.01)
    assert not ended.stderr
