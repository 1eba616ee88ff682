"""The commands that README and the guide show, and processes to run them in.

Importing torch for each command and for each of its ranks would take longer than what they do. So a command
is forked by the server that forks the ranks of pools (`ranks`), and its ranks from the command's own process.
"""

from __future__ import annotations

import atexit
import importlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from hydra.core.global_hydra import GlobalHydra
from kernels import remember_traces
from ranks import make_process
from updates import share_updates

from fnshard.launcher import local
from fnshard.launcher.fork import close_inherited_files
from fnshard.mesh.process_group import LAUNCHER

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("python", "torchrun", "srun", "pip", "pytest", "mlflow", "wandb")
BLOCK = re.compile(r"^```(?:bash|sh|console|shell)\n((?:.*\n)*?)^```|((?:^    .*(?:\n|\Z))+)", re.MULTILINE)
OUTPUT = {"stdout": ".stdout.txt", "stderr": ".stderr.txt"}
INLINE = re.compile(r"`([^`\n]+)`")


def documents() -> list[Path]:
    """Return README, every README below it and every page of the guide."""
    experiments = ROOT / "experiments"
    below = [*sorted(experiments.rglob("README.md")), *sorted((experiments / "guide").glob("*.md"))]
    return [ROOT / "README.md", *below]


def commands(text: str) -> Iterator[str]:
    """Yield every command of a Markdown text, in blocks and in sentences, without comments and prompts.

    >>> list(commands("Run `python -m a x=1`.\\n\\n    $ torchrun -m b  # two\\n    pip install c && pytest"))
    ['torchrun -m b', 'pip install c', 'pytest', 'python -m a x=1']
    """
    for fenced, indented in BLOCK.findall(text):
        for line in (fenced or indented).replace("\\\n", " ").splitlines():
            yield from _parts(line.strip().removeprefix("$ "))
    for inline in INLINE.findall(BLOCK.sub("", text)):
        if " " in inline:
            yield from _parts(inline)


def _parts(line: str) -> Iterator[str]:
    line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)  # variables of its environment
    if line.split(" ")[0] not in PROGRAMS:
        return
    for part in line.split("&&"):
        words = shlex.shlex(part, punctuation_chars=False)
        words.whitespace_split = True
        yield " ".join(words)


# ------------------------------------------------------------------ processes that are forked


class Forked:
    """A process, as `subprocess.Popen` shows one; `exit_code()` is None until it has ended."""

    def __init__(self, pid: int, exit_code: Callable[[], int | None]):
        self.pid, self.returncode, self._exit_code = pid, None, exit_code

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._exit_code()
        return self.returncode

    def wait(self, timeout: float = 280) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(arguments: Sequence[str], cwd: Path, *, timeout: float = 280, **options: Any) -> Any:
    """Run `python -m ARGUMENTS` and return it with its output captured; see `start_command`."""
    process = start_command(["-m", *arguments], cwd, **options)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    texts = {name: (cwd / OUTPUT[name]).read_text() for name in OUTPUT}
    return subprocess.CompletedProcess(list(arguments), process.returncode, **texts)


def start_command(
    arguments: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None,
    patches: Mapping[str, Any] | None = None, output: Path | None = None,
) -> Forked:  # fmt: skip
    """Start `python ARGUMENTS`, and do not wait; what it prints is in the files `OUTPUT` of `cwd`.

    Args:
        env: variables besides those of this process.
        patches: values for constants of modules, by dotted name.
        output: one file for all that is printed, in the place of the two.
    """
    streams = [cwd / name for name in OUTPUT.values()] if output is None else [output] * 2
    for file in streams:
        file.write_bytes(b"")
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return _from_server(arguments, env=env, cwd=str(cwd), streams=streams, patches=patches)


def _from_server(arguments: Sequence[str], **how: Any) -> Forked:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    process = make_process(_become, args=(list(arguments),), kwargs={**how, "blocked": blocked})
    process.start()
    return Forked(process.pid, lambda: process.exitcode)


def popen_from_server(command: Sequence[str], env: Mapping[str, str], stdout: Any = None, **_: Any) -> Forked:
    """Stand in for `subprocess.Popen([python, "-u", FILE, ...])` where a test's own process launches."""
    here = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
    return _from_server(command[2:], env=dict(env), cwd=os.getcwd(), streams=_streams(stdout) or here)


def popen_here(
    command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, stdout: Any = None, **_: Any
) -> Forked:
    """Stand in for `subprocess.Popen([python, ...])` by a fork of this process, which has no threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        close_inherited_files()
        arguments = [word for word in command[1:] if word != "-u"]
        _become(arguments, env=dict(env), cwd=str(cwd or os.getcwd()), streams=_streams(stdout))

    def exit_code() -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    return Forked(pid, exit_code)


def _streams(file: Any) -> list[str]:
    """Return the paths of both streams of an open file, which may be closed when they are needed."""
    return [] if file is None else [os.path.abspath(file.name)] * 2


def forking(popen: Callable[..., Forked]) -> Any:
    """Return a stand-in for the module `subprocess`, with all that a launcher uses of it."""
    names = ("STDOUT", "TimeoutExpired")
    return SimpleNamespace(Popen=popen, **{name: getattr(subprocess, name) for name in names})


def _become(
    arguments: list[str], *, env: Mapping[str, str], cwd: str, streams: Sequence[str | Path] = (),
    patches: Mapping[str, Any] | None = None, blocked: Sequence[int] | None = None,
) -> NoReturn:  # fmt: skip
    """Become `python ARGUMENTS` in this process, which was just forked."""
    code = 1
    try:
        os.setsid()
        for number, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        if "RANK" in env:
            os.environ[LAUNCHER] = str(os.getppid())  # whose death ends a rank
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
        remember_traces()
        share_updates()
        tempfile.tempdir = None
        GlobalHydra.instance().clear()
        local.subprocess = forking(popen_here)
        for name, value in (patches or {}).items():
            path, _, constant = name.rpartition(".")
            module = importlib.import_module(path)
            getattr(module, constant)  # a constant that is gone would be made, and nobody would read it
            setattr(module, constant, value)
        _run_python(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # As an interpreter ends: threads first, whose pools (joblib's) are told to end their processes.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
