"""Training runs on a disk that is full at one moment after another: run by test_disk.py, on a small
file system of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path

from commands import forking, popen_here
from runs import SMALL, compose
from tqdm import tqdm

from experiments.cli.job import start
from experiments.configs.machine import place
from experiments.configs.train import TrainConfig
from experiments.train import JOB
from experiments.training import loop
from experiments.training.resume import RunFolder
from fnshard.errors import FnshardError
from fnshard.launcher import local
from fnshard.launcher.rank import Stop

STEPS = 40  # a row each: two blocks of metrics
BLOCK = 4096


def free(disk: Path) -> int:
    """Blocks that can be written."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize // BLOCK


def run_with(blocks: int | None, disk: Path, text: Path) -> dict[str, object]:
    """One run that finds so many blocks free, or all of them; what it says, and what it leaves."""
    ballast, folder = disk / "ballast", disk / "run"
    if blocks is not None:
        ballast.write_bytes(b"\0" * ((free(disk) - blocks) * BLOCK))
    before, said = free(disk), "ok"
    try:
        start(JOB, asked(text), folder, [], chosen=True)
    except (FnshardError, OSError) as error:  # what the command line tells in one line
        said = f"{type(error).__name__}: {error}"
    result = folder / "result.json"
    left = {
        "blocks": before, "said": said, "took": before - free(disk),
        "result": json.loads(result.read_text()) if result.exists() else None,
        "partial": sorted(str(p.relative_to(disk)) for p in disk.rglob("*.partial")),
    }  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    ballast.unlink(missing_ok=True)
    return left


def asked(text: Path) -> TrainConfig:
    """A small run on one rank."""
    more = ("run.save_every=0", "run.held_out_every=40", "run.max_restarts=0", f"run.steps={STEPS}")
    return compose(*SMALL, *more, "mesh.shard=1", f"data.root={text}", "run.sample_tokens=2")


def main() -> None:
    """Print a line of JSON for each run: one with all the room, then with less."""
    disk, text = map(Path, sys.argv[1:])
    tqdm.monitor_interval = 0  # no thread: ranks are forked from here, when all is lowered
    config = place(asked(text), accelerators={})
    setup = loop.prepare(config)
    loop.prepare = lambda _: setup
    loop.train(config, RunFolder(str(disk / "first")), [], Stop())
    shutil.rmtree(disk / "first")
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(timeout=60)  # the loader's, which has nothing more to do
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("there are threads, which a fork does not take along")
    local.subprocess = forking(popen_here)
    whole = run_with(None, disk, text)
    print(json.dumps(whole))
    for blocks in (0, 2, 7, whole["took"] - 12, whole["took"] - 2):
        print(json.dumps(run_with(blocks, disk, text)), flush=True)


if __name__ == "__main__":
    main()
