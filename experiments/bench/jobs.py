"""The case of whole runs of `python -m experiments.train`, seen from outside: `starts`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments import ROOT
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, say
from experiments.training.metrics_file import METRICS, read_rows

START = ("run.steps=40", "run.held_out_every=20", "run.sample_tokens=2")
POLL_S = 0.02


def train(overrides: Sequence[str], place: Path, checkout: Path = ROOT) -> float:
    """Run the main job in a new folder below `place`, where its caches lie too; gives the seconds from the
    command to its first row of metrics."""
    folder, log = Path(tempfile.mkdtemp(dir=place)), place / "log.txt"
    caches = {"XDG_CACHE_HOME": str(place / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
    env = {**os.environ, **caches, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-u", "-m", "experiments.train", f"hydra.run.dir={folder}", *overrides]
    first_row_s, began = 0.0, time.perf_counter()
    with (
        log.open("wb") as out,
        subprocess.Popen(command, cwd=place, env=env, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            time.sleep(POLL_S)
            if not first_row_s and any(read_rows(folder / METRICS, 2**63)):
                first_row_s = time.perf_counter() - began
    if process.returncode or not first_row_s:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{log.read_text(errors='replace')}")
    return first_row_s


def starts(config: BenchConfig, folder: Path) -> Result:
    """How long is it from the command to the first finished step, with empty caches and once more?

    With `checkout=` another checkout takes turns with this one.
    """
    checkouts = [ROOT, *([Path(config.checkout).resolve()] if config.checkout else [])]
    taken: dict[str, list[float]] = {}
    for number in range(config.rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as place:
                for which in ("first", "second"):
                    words = [*START, *shlex.split(config.overrides)]
                    seconds = train(words, Path(place), checkout)
                    taken.setdefault(f"{checkout.name}, {which} start", []).append(seconds)
                    say(f"round {number + 1}, {checkout.name}, {which} start: {seconds:.1f} s")
    rows = [[name, f"{median(seconds):.1f}", f"{max(seconds):.1f}"] for name, seconds in taken.items()]
    return Result([["", "median s", "longest s"], *rows], values={"seconds": taken})
