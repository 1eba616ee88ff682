"""Jobs that are forked and killed: run by test_shards.py in a process of its own, without threads."""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.data.crew import CrewError, work
from experiments.tokenize.config import TokenizeConfig
from experiments.tokenize.job import tokenize
from experiments.tokenize.journal import NAME

SHARD_MB = 0.005
PATIENCE_S = 60.0


def sums(out: Path) -> dict[str, str]:
    """Every file that a job leaves but its lock, and a sum of it."""
    files = [p for p in sorted(out.rglob("*")) if p.is_file() and p.suffix != ".lock"]
    return {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def forked(run: Callable[[], Any]) -> int:
    """A process group of its own; its exit code is 1 where `run` raised."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        run()
        code = 0
    finally:
        os._exit(code)


def written(out: Path) -> int:
    """Shards that a job has noted."""
    path = out / NAME
    return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0


def killed(out: Path, run: Callable[[], Any], draw: random.Random) -> dict[str, int]:
    """One start of a job, its whole group killed some shards later."""
    before = written(out)
    goal, late = before + draw.randint(1, 6), draw.random() * 0.004
    pid = forked(run)
    until = time.monotonic() + PATIENCE_S
    while written(out) < goal and time.monotonic() < until and not os.waitid(
        os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):  # fmt: skip
        pass
    until = time.monotonic() + late
    while time.monotonic() < until:
        pass
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    torn = len(list(out.rglob("*.partial")))
    noted = (out / NAME).read_text().split("\n")[:-1]
    twice = len(noted) - len(set(noted))
    return {"signal": signalled, "before": before, "after": written(out), "torn": torn, "twice": twice}


def same(texts: Path, folder: Path) -> dict[str, Any]:
    """Any number of processes, and a job that is killed again and again."""
    found: dict[str, Any] = {}
    for processes in (1, 2, 5):
        out = folder / f"by{processes}"
        config = TokenizeConfig(
            out=str(out), files=(str(texts),), held_out_percent=30, shard_mb=SHARD_MB, processes=processes
        )
        _, status = os.waitpid(forked(lambda config=config: tokenize(config)), 0)
        found[f"by{processes}"] = sums(out) | {"status": status}
    out, draw = folder / "killed", random.Random(0)
    config = TokenizeConfig(
        out=str(out), files=(str(texts),), held_out_percent=30, shard_mb=SHARD_MB, processes=2
    )
    found["kills"] = [killed(out, lambda: tokenize(config), draw) for _ in range(5)]
    _, status = os.waitpid(forked(lambda: tokenize(config)), 0)
    found["killed"] = sums(out) | {"status": status}
    return found


def orphans() -> bool:
    """Whether the members of a crew end when the process that hands out is killed alone."""
    alive, held = os.pipe()

    def forever(_: int, advance: Callable[[int], None]) -> None:
        while True:
            advance(1)

    def run() -> None:
        os.close(alive)
        seen = [0]

        def advance(count: int) -> None:
            seen[0] += count
            if seen[0] == 100:
                os.kill(os.getpid(), signal.SIGKILL)

        list(work([0, 1, 2], forever, 3, advance))

    os.waitpid(forked(run), 0)
    os.close(held)
    readable, _, _ = select.select([alive], [], [], PATIENCE_S)  # the end of file: nobody holds the other end
    return bool(readable) and os.read(alive, 1) == b""


def errors() -> dict[str, str]:
    """What the process that hands out hears of a member's end."""

    def die(_: int, advance: Callable[[int], None]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def full(_: int, advance: Callable[[int], None]) -> None:
        raise OSError(28, "No space left on device")

    def bug(_: int, advance: Callable[[int], None]) -> None:
        raise KeyError("a bug")

    heard = {}
    for do in (die, full, bug):
        try:
            list(work([0, 1, 2], do, 2, lambda count: None))
        except (CrewError, OSError, RuntimeError) as error:
            heard[do.__name__] = f"{type(error).__name__}: {error}"
    return heard


if __name__ == "__main__":
    told = {"orphans": orphans(), "errors": errors(), **same(*map(Path, sys.argv[1:]))}
    print(json.dumps(told))
