"""Programs that each rank runs, launched as a user launches them, and what is seen of their processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from commands import Forked, forking, popen_from_server, start_command

from fnshard.launcher import local as launcher

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def forked(request, monkeypatch):
    """Fork ranks from a process that has imported torch, unless a test is marked `executed`."""
    if request.node.get_closest_marker("executed") is None:
        monkeypatch.setattr(launcher, "subprocess", forking(popen_from_server))


HEADER = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from fnshard.mesh.process_group import attempt
from fnshard.launcher.rank import Stop, run_rank
out = sys.argv[1]
rank = int(os.environ["RANK"])
"""


def program_of(tmp_path: Path, body: str, *, timeout_s: float = 60, stop: bool = False) -> Path:
    """Write a program whose ranks run `main()` of `body`. With `stop` SIGTERM is noted in `stop.asked`."""
    program = tmp_path / "program.py"
    how = f"device_type='cpu', timeout_s={timeout_s}" + ", stop=stop" * stop
    text = [HEADER, "stop = Stop()", textwrap.dedent(body), f"run_rank(main, {how})"]
    program.write_text("\n".join(text) + "\n")
    return program


def run(
    tmp_path: Path, body: str, *, ranks: int = 2, max_restarts: int = 0, timeout_s: float = 60, **options: Any
) -> None:
    """Launch a program whose ranks run `main()` of `body`."""
    program = program_of(tmp_path, body, timeout_s=timeout_s)
    launcher.launch(
        [sys.executable, "-u", str(program), str(tmp_path)],
        ranks=ranks,
        logs=tmp_path / "ranks",
        max_restarts=max_restarts,
        env={"PYTHONPATH": str(ROOT)},
        **options,
    )


@contextmanager
def start_launch(
    command: list[str], out: Path, env: Mapping[str, str] | None = None, execute: bool = False, **options: Any
) -> Iterator[Forked | subprocess.Popen]:
    """Start `launch` with two ranks in a process of its own, which is forked unless `execute`."""
    starter = out / "starter.py"
    starter.write_text(
        "import pathlib; from fnshard.launcher.local import launch\n"
        f"launch({command!r}, ranks=2, logs=pathlib.Path({str(out)!r}, 'ranks'), **{options!r})"
    )
    env = {**environment(), **(env or {})}
    process = subprocess.Popen([sys.executable, starter], env=env) if execute else None
    process = process or start_command([str(starter)], out, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def children_of(process: int) -> list[int]:
    """Return the processes that one has started and not waited for, in order."""
    found = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return sorted(found)


def ranks_below(process: int) -> list[tuple[int, int]]:
    """Return (rank, process) of all ranks that a process has started, itself or through children, in order.

    They are known by the environment that they were executed with.
    """
    found = []
    for pid in children_of(process):
        with suppress(OSError):
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
            found += [(int(rank[1]), pid)] if rank else ranks_below(pid)
    return sorted(found)


def ranks_of(process: int) -> dict[int, int]:
    """Return the processes of a launcher by rank; none if it has ended."""
    return dict(ranks_below(process))


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> list:
    """Wait until a file has `count` lines of JSON, and return them."""
    deadline = time.monotonic() + 60
    while True:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if len(rows) >= count:
            return rows
        assert time.monotonic() < deadline and process.poll() in (None, 0), f"{len(rows)} of {count} lines"
        time.sleep(0.01)


def wait_for(path: Path, seconds: float = 60) -> Path:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)
    return path


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
