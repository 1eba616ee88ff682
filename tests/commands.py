"""The commands that the READMEs show, and processes to run them in.

Importing torch for each command and for each of its ranks would take longer than what they do, so both are
forked from a process that has imported it and has done nothing else: `python -m tests.commands` is that one.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("python", "torchrun", "srun", "pip", "pytest", "mlflow", "wandb")
BLOCK = re.compile(r"^```(?:bash|sh|console|shell)\n((?:.*\n)*?)^```|((?:^    .*(?:\n|\Z))+)", re.MULTILINE)
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
    """Runs `python -m MODULE ...`, one at a time, each in a process that has imported torch already."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.commands"], cwd=ROOT, env=env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def run(
        self, arguments: Sequence[str], cwd: Path, *, env: Mapping[str, str], patches: Mapping[str, Any],
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """As `subprocess.run(["python", "-m", *arguments])`, with stdout and stderr in one.

        Args:
            patches: values for constants of modules, by dotted name.
        """
        out = cwd / ".output.txt"
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "patches": dict(patches),
                   "out": str(out)}  # fmt: skip
        self._server.stdin.write(json.dumps(request) + "\n")
        pid = int(self._server.stdout.readline())
        late = not select.select([self._server.stdout], [], [], timeout)[0]
        if late:
            os.killpg(pid, signal.SIGKILL)
        code = int(self._server.stdout.readline())
        if late:
            raise subprocess.TimeoutExpired(list(arguments), timeout, output=out.read_text())
        return subprocess.CompletedProcess(list(arguments), code, stdout=out.read_text())

    def close(self) -> None:
        """End it."""
        self._server.stdin.close()
        self._server.wait(30)


class Fork:
    """What `subprocess.Popen` is to who starts `[python, -u, -m, MODULE, ...]` in a session of its own.

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
            _become(command[command.index("-m") + 1 :], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Be `python -m MODULE ...` in this process, which was just forked; ends it."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-m", *arguments[1:]]
    code = 1
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
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
    import torch  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    import experiments.finetune.loop
    import experiments.job
    import experiments.loop
    import experiments.worker  # noqa: F401
    from experiments.chaos import job as chaos
    from fnshard import launcher

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("there are threads, which a fork does not take along")
    warnings.filterwarnings("ignore", message=".*found in sys.modules")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(request["cwd"])
            file = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(file, 1)
            os.dup2(file, 2)
            launcher.subprocess = chaos.subprocess = Forking()
            for name, value in request["patches"].items():
                module, _, constant = name.rpartition(".")
                setattr(__import__(module, fromlist=["*"]), constant, value)
            _become(request["arguments"], {**os.environ, **request["env"]})
        print(pid, file=answers)
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), file=answers)


class Forking:
    """The module `subprocess`, with processes that are forked."""

    Popen = Fork

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


if __name__ == "__main__":
    _serve()
