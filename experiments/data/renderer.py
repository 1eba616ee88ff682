"""Renderer: chat templates are programs of somebody else's, so a process of their own runs them, with an end.

`{{ 9**(9**8) }}` takes all time and `{{ 'a' * 10**12 }}` all memory, whatever a sandbox forbids: it looks at
names, not at costs. The process here has `CPU_S` for an answer and `MEMORY_bytes` in all, and what it writes
is in proportion to what it is asked. It knows nothing but jinja2, and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from experiments import ROOT

CPU_S, MEMORY_bytes = 10.0, 2 << 30
WALL_S = 120.0  # for an answer of a process that stands still: on a busy machine CPU time takes its time
MOST, TIMES = 1 << 20, 8  # characters of an answer: so many, and so many times those of the question
DAY = datetime(2024, 7, 26)  # for templates that ask for the date: the same text every day
COSTS = (
    f"takes more than {CPU_S:g} s of CPU time, {MEMORY_bytes >> 30} GiB of memory or {MOST} characters "
    "for one text"
)


class StartError(Exception):
    """The process did not start; in its own last words."""


class CostsError(Exception):
    """A template takes more than it may."""


class BrokenError(Exception):
    """A template is none; or it refuses its inputs, in its own words."""


class Renderer:
    """The process, as the one that starts it knows it.

    Raises:
        StartError: it ended before it could answer anything.
    """

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        limits = [str(CPU_S), str(MEMORY_bytes)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *limits], env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise StartError(str(error)) from None
        self._owner, self._lock = os.getpid(), threading.Lock()
        atexit.register(self.close)
        if not self._line():
            errors = self.close().decode(errors="replace").split("\n")
            last = next((line for line in reversed(errors) if line.strip()), "it wrote no error")
            raise StartError(f"{last.strip()}; exit code {self._process.returncode}")

    def _line(self) -> bytes:
        """The next line that the process writes; none where it ends, or stands still."""
        ready = select.select([self._process.stdout], [], [], WALL_S)[0]
        line = self._process.stdout.readline() if ready else b""
        return line if line.endswith(b"\n") else b""

    def answer(self, source: str, values: Any) -> str:
        """The text of a template with these values; None: it is looked at alone.

        Raises:
            BrokenError: see there.
            CostsError: the process has ended over it.
        """
        with self._lock:
            try:
                self._process.stdin.write(json.dumps([source, values]).encode() + b"\n")
                self._process.stdin.flush()
                line = self._line()
            except BrokenPipeError:
                line = b""
        if not line:
            renderer.cache_clear()
            self.close()
            raise CostsError
        text, error = json.loads(line)
        if error:
            raise BrokenError(error)
        return text

    def close(self) -> bytes:
        """End it, and give what it wrote to stderr; a fork of the process that started it leaves it alone."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return b""
        self._process.kill()
        return self._process.communicate()[1]


@lru_cache(maxsize=1)
def renderer(pid: int) -> Renderer:
    """Of this process: one that was forked starts its own."""
    return Renderer()


def render(source: str, values: Any) -> str:
    return renderer(os.getpid()).answer(source, values)


# ------------------------------------------------------------------ in the process


def serve(cpu_s: float, memory_bytes: int) -> None:
    """Answer, line by line; over a limit the process dies, and its reader sees the end of it."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for who started this
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, whatever it computes
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # from here on nobody reads it
    print(flush=True)  # started
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _answer(*json.loads(line))
        if len(answer[0]) > MOST + TIMES * len(line):
            return
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(source: str, values: Any) -> tuple[str, str]:
    """A text, and what is wrong."""
    try:
        template = compiled(source)
        return ("" if values is None else template.render(**values)), ""
    except MemoryError:
        sys.exit(1)
    except Exception as error:  # templates are programs: anything can come out of one
        return "", str(error) if isinstance(error, SyntaxError) else f"{type(error).__name__}: {error}"[:MOST]


@lru_cache(maxsize=8)
def compiled(source: str) -> Any:
    """The template as transformers compiles it: sandboxed, blocks trimmed, a few helpers."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks an assistant's part; prefixes tell us that, so it is passed over."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals |= {"raise_exception": _refuse(jinja2.TemplateError), "strftime_now": DAY.strftime}
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise SyntaxError(f"line {error.lineno}: {error.message}") from error


def _refuse(kind: type[Exception]) -> Any:
    def raise_exception(message: str) -> NoReturn:
        raise kind(message)

    return raise_exception


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
