"""The commands that the READMEs show, and processes to run them in.

Importing torch for each command and for each of its ranks would take longer than what they do, so both are
forked from a process that has imported it and has done nothing else.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import fork_server
from tests.support.fork_server import Forked, ForkServer

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("python", "torchrun", "srun", "pip", "pytest", "mlflow", "wandb")
BLOCK = re.compile(r"^```(?:bash|sh|console|shell)\n((?:.*\n)*?)^```|((?:^    .*(?:\n|\Z))+)", re.MULTILINE)
OUTPUT = {"stdout": ".stdout.txt", "stderr": ".stderr.txt"}
IMPORTED = (
    "hydra", "matplotlib.pyplot", "torch._functorch.partitioners", "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama", "experiments.finetune.job",
)  # fmt: skip
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
        self._server = ForkServer(*IMPORTED)
        self._server.start()

    def run(
        self, arguments: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None,
        patches: Mapping[str, Any] | None = None, timeout: float = 280,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """As `subprocess.run(["python", "-m", *arguments])`, output captured.

        Args:
            env: variables beside those of this process.
            patches: values for constants of modules, by dotted name.
        """
        process = self.start(["-m", *arguments], cwd, env=env, patches=patches)
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
    ) -> Forked:  # fmt: skip
        """`python ARGUMENTS` without waiting; what it prints is in the files `OUTPUT` of `cwd`."""
        for name in OUTPUT.values():
            (cwd / name).write_bytes(b"")
        streams = [str(cwd / OUTPUT[name]) for name in ("stdout", "stderr")]
        how = {"cwd": str(cwd), "streams": streams, "patches": dict(patches or {})}
        return self._server.popen(
            _words(how, arguments), env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        )

    def popen(
        self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool, stdout: Any = None,
        stderr: Any = None,
    ) -> Forked:  # fmt: skip
        """As `subprocess.Popen([python, "-u", FILE, ...])`."""
        return self._server.popen(_words(_streams_to(stdout), command[2:]), env=env)

    def close(self) -> None:
        """End it."""
        self._server.close()


def _words(how: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.support.commands", json.dumps(how), *arguments]


def _streams_to(file: Any) -> dict[str, Any]:
    """Both streams to an open file, which may be closed when they are needed."""
    return {} if file is None else {"streams": [os.path.abspath(file.name)] * 2}


class Forking:
    """The module `subprocess`, with processes that are forked."""

    def __init__(self, popen: Any = None):
        self.Popen = popen or self._popen

    def _popen(
        self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool,
        cwd: Path | None = None, stdout: Any = None, stderr: int | None = None,
    ) -> Forked:  # fmt: skip
        """`[python, -u, ...]`, from this process as it is."""
        server = ForkServer()
        start_here(server)
        how = _streams_to(stdout) | ({} if cwd is None else {"cwd": str(cwd)})
        return server.popen(_words(how, [word for word in command[1:] if word != "-u"]), env=env)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def start_here(server: ForkServer, threads: str | None = None) -> None:
    """`ForkServer.start` without imports: the server is a fork of this process."""
    if server._connection is not None:
        return
    server._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        code = 1
        try:
            kept = os.dup2(there.fileno(), 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # as an exec does: a lock is its launcher's alone
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            run = fork_server.serve(socket.socket(fileno=kept))
            if run is not None:
                run()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            atexit._run_exitfuncs()
            os._exit(code)
    there.close()


def main(how: str, *arguments: str) -> None:
    """Be `python ARGUMENTS` in this process, which was just forked."""
    from hydra.core.global_hydra import GlobalHydra

    from fnshard.launcher import local

    GlobalHydra.instance().clear()
    told = json.loads(how)
    os.chdir(told.get("cwd", "."))
    for number, path in enumerate(told.get("streams", []), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    if "streams" in told:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    local.subprocess = Forking()
    for name, value in told.get("patches", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(__import__(module, fromlist=["*"]), constant, value)
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
