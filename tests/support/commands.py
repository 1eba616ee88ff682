"""The commands that the READMEs show, and processes to run them in.

Importing torch for each command and for each of its ranks would take longer than what they do, so both are
forked from a process that has imported it and has done nothing else: `python -m tests.support.commands` is
that one.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("python", "torchrun", "srun", "pip", "pytest", "mlflow", "wandb")
BLOCK = re.compile(r"^```(?:bash|sh|console|shell)\n((?:.*\n)*?)^```|((?:^    .*(?:\n|\Z))+)", re.MULTILINE)
OUTPUT = {"stdout": ".stdout.txt", "stderr": ".stderr.txt"}
INLINE = re.compile(r"`([^`\n]+)`")


def readmes() -> list[Path]:
    """Every README of the repository."""
    folders = (p for p in sorted(ROOT.iterdir()) if p.is_dir() and not p.name.startswith("."))
    return [ROOT / "README.md", *(path for folder in folders for path in sorted(folder.rglob("README.md")))]


def commands(text: str) -> Iterator[str]:
    """Every command of a Markdown text, in blocks and in sentences, without comments and prompts.

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


# ------------------------------------------------------------------ the process that is forked from


class Warm:
    """Starts Python programs in processes that have imported torch already."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.commands"], cwd=ROOT, env=env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        """What the server answers."""
        self._server.stdin.write(json.dumps(request) + "\n")
        return json.loads(self._server.stdout.readline())

    def run(
        self, arguments: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None,
        patches: Mapping[str, Any] | None = None, timeout: float = 280,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """As `subprocess.run(["python", "-m", *arguments])`, output captured.

        Args:
            env: variables beside those of this process.
            patches: values for constants of modules, by dotted name.
        """
        process = self.start(arguments, cwd, env=env, patches=patches)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = {name: (cwd / OUTPUT[name]).read_text() for name in OUTPUT}
        return subprocess.CompletedProcess(list(arguments), process.returncode, **texts)

    def start(
        self, arguments: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None,
        patches: Mapping[str, Any] | None = None,
    ) -> Started:  # fmt: skip
        """The same without waiting; what it prints is in the files `OUTPUT` of `cwd`."""
        return Started(
            self, ["-m", *arguments], {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, cwd=str(cwd),
            out=str(cwd / OUTPUT["stdout"]), err=str(cwd / OUTPUT["stderr"]), patches=dict(patches or {}),
        )  # fmt: skip

    def popen(self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool) -> Started:
        """As `subprocess.Popen([python, "-u", FILE, ...])`, with this process's stdout and stderr."""
        here = f"/proc/{os.getpid()}/fd"
        held_back = [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        return Started(
            self, command[2:], env, cwd=os.getcwd(), out=f"{here}/1", err=f"{here}/2", blocked=held_back
        )

    def close(self) -> None:
        """End it."""
        self._server.stdin.close()
        self._server.wait(30)


def _wait(process: Any, timeout: float) -> int:
    until = time.monotonic() + timeout
    while process.poll() is None:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(str(process.pid), timeout)
        time.sleep(0.01)
    return process.returncode


def _send_signal(process: Any, number: int) -> None:
    if process.poll() is None:
        os.kill(process.pid, number)


class Started:
    """A process that the server has forked, as `subprocess.Popen` shows one."""

    def __init__(self, warm: Warm, arguments: Sequence[str], env: Mapping[str, str], **how: Any):
        self._warm, self.returncode = warm, None
        self.pid = warm.ask(arguments=list(arguments), env=dict(env), **how)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ask(poll=self.pid)
        return self.returncode

    wait, send_signal = _wait, _send_signal

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Fork:
    """What `subprocess.Popen` is to who starts `[python, -u, ...]` in a session of its own.

    Args:
        cwd, stdout: a folder, and an open file for stdout and stderr; default those of this process.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool,
        cwd: Path | None = None, stdout: Any = None, stderr: int | None = None,
    ):  # fmt: skip
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if cwd is not None:
                os.chdir(cwd)
            if stdout is not None:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stdout.fileno(), 2)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as an exec does: a lock is its launcher's alone
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            _become([word for word in command[1:] if word != "-u"], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    wait, send_signal = _wait, _send_signal


def _become(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Be `python ARGUMENTS` in this process, which was just forked; ends it."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    code = 1
    try:
        if arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _finish(code)


def _finish(code: int) -> None:
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _serve() -> None:
    import warnings

    import hydra  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch._functorch.partitioners
    import torch._inductor.compile_fx  # noqa: F401  (what lowering imports at its first call)
    from transformers import LlamaForCausalLM  # noqa: F401

    from experiments.chaos import job as chaos  # noqa: F401
    from experiments.finetune import job as tuning  # noqa: F401

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("there are threads, which a fork does not take along")
    warnings.filterwarnings("ignore", message=".*found in sys.modules")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _started(request)
        print(json.dumps(answer), file=answers)


def _started(request: Mapping[str, Any]) -> None:
    """Be what was asked for, in a process that was just forked."""
    from experiments.chaos import job as chaos
    from fnshard.launcher import local, rank

    os.chdir(request["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        there = request[name].startswith("/proc/")  # a file that others write to
        os.dup2(
            os.open(request[name], os.O_WRONLY | (os.O_APPEND if there else os.O_CREAT | os.O_TRUNC)), number
        )
    signal.pthread_sigmask(signal.SIG_BLOCK, request.get("blocked", ()))
    local.subprocess = chaos.subprocess = Forking()
    for name, value in request.get("patches", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(__import__(module, fromlist=["*"]), constant, value)
    env = request["env"]
    if rank.LAUNCHER in env:  # a rank dies with its parent, which is this one's
        env[rank.LAUNCHER] = str(os.getppid())
    _become(request["arguments"], env)


class Forking:
    """The module `subprocess`, with processes that are forked."""

    def __init__(self, popen: Any = Fork):
        self.Popen = popen

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


if __name__ == "__main__":
    _serve()
