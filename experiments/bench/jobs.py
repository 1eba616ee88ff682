"""Cases that look at whole runs of `python -m experiments.train` from outside: `starts`, `watch`, `loader`,
`long_run`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from experiments import ROOT
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, say
from experiments.tables import ratio
from experiments.training.metrics_file import METRICS, read_rows
from experiments.training.result import read_result
from experiments.training.run_record import PARTS

FIRST_ROW = re.compile(r"step 1/")
START = ("run.steps=40", "run.held_out_every=20", "run.sample_tokens=2")
TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True)
class Run:
    """A run that has ended: seconds from the command to its first row of metrics, and what it left."""

    first_row_s: float
    folder: Path

    @property
    def result(self) -> Mapping[str, Any]:
        return read_result(self.folder)

    @property
    def step_ms(self) -> list[float]:
        return [1e3 * row["seconds"] for row in read_rows(self.folder / METRICS, 2**63) if "seconds" in row]


def train(
    overrides: Sequence[str], place: Path, checkout: Path = ROOT, look: Callable[[int], None] | None = None
) -> Run:
    """Run the main job in a new folder below `place`, where its caches lie too.

    Args:
        look: called with the process's id while it runs, once it has begun to train.
    """
    folder = Path(tempfile.mkdtemp(dir=place))
    caches = {"XDG_CACHE_HOME": str(place / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
    env = {**os.environ, **caches, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-u", "-m", "experiments.train", f"hydra.run.dir={folder}", *overrides]
    seconds, text, began = None, [], time.perf_counter()
    with subprocess.Popen(
        command, cwd=place, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            text.append(line)
            if seconds is None and FIRST_ROW.match(line):
                seconds = time.perf_counter() - began
                if look:
                    threading.Thread(target=keep_looking, args=(process, look), daemon=True).start()
    if process.returncode or seconds is None:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{''.join(text)}")
    return Run(seconds, folder)


def keep_looking(process: subprocess.Popen[str], look: Callable[[int], None]) -> None:
    while process.poll() is None:
        look(process.pid)


def starts(config: BenchConfig, folder: Path) -> Result:
    """How long is it from the command to the first finished step, with empty caches and once more?

    With `checkout=` another checkout takes turns with this one.
    """
    checkouts = [ROOT, *([Path(config.checkout).resolve()] if config.checkout else [])]
    taken: dict[str, list[float]] = {}
    own = shlex.split(config.overrides)
    for number in range(config.rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as place:
                for which in ("first", "second"):
                    seconds = train([*START, *own], Path(place), checkout).first_row_s
                    taken.setdefault(f"{checkout.name}, {which} start", []).append(seconds)
                    say(f"round {number + 1}, {checkout.name}, {which} start: {seconds:.1f} s")
    rows = [[name, f"{median(seconds):.1f}", f"{max(seconds):.1f}"] for name, seconds in taken.items()]
    return Result([["", "median s", "longest s"], *rows], values={"seconds": taken})


def watch(config: BenchConfig, folder: Path) -> Result:
    """What do trackers cost a run: its speed with each next to its speed with none?"""
    speeds: dict[str, list[float]] = {}
    reports: dict[str, list[float]] = {}
    own = shlex.split(config.overrides)
    choices = {"none": [], **{name: [f"tracker={name}"] for name in TRACKERS}}
    choices["all"] = [f"tracker=[{','.join(TRACKERS)}]"]
    with tempfile.TemporaryDirectory() as place:
        for number in range(config.rounds):
            for name, named in choices.items():
                run = train([f"run.steps={config.steps}", *named, *own], Path(place))
                speeds.setdefault(name, []).append(run.result["tokens_per_s"])
                spent = {part: run.result.get(f"{part}_s", 0.0) for part in PARTS}
                reports.setdefault(name, []).append(spent["reports"] / sum(spent.values()))
                say(f"round {number + 1}, {name}: {speeds[name][-1]:,.0f} tokens/s")
    rows = [["trackers", "tokens/s", "/ none", "reports, of the run"]]
    for name, each in speeds.items():
        share = f"{ratio(each, speeds['none']):.3f}"
        rows.append([name, f"{median(each):,.0f}", share, f"{median(reports[name]):.2%}"])
    return Result(rows, values={"tokens_per_s": speeds, "reports": reports})


def loader(config: BenchConfig, folder: Path) -> Result:
    """How much of a training's time waits for batches (`overrides="data=shards data.root=..."`)?"""
    with tempfile.TemporaryDirectory() as place:
        found = train([f"run.steps={config.steps}", *shlex.split(config.overrides)], Path(place)).result
    share = found["data_s"] / (found["data_s"] + found["steps_s"])
    rows = [["tokens/s", "waiting for batches"], [f"{found['tokens_per_s']:,.0f}", f"{share:.3%}"]]
    return Result(rows, values={"result": dict(found)})


# ------------------------------------------------------------------ long runs

# What the last quarter of a run may have more than the second: a share of it, and so much.
ALLOWED = {"descriptors": (0.0, 0), "threads": (0.0, 0), "rss_mb": (0.01, 4), "step_ms": (0.5, 1)}


@dataclass
class Watched:
    """What the ranks of a run had, look by look: the sum over its processes."""

    pause_s: float
    seen: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ALLOWED})

    def look(self, pid: int) -> None:
        time.sleep(self.pause_s)
        try:
            paths = [Path(f"/proc/{p}") for p in descendants(pid)]
            pages = [int((path / "statm").read_text().split()[1]) for path in paths]
            counts = {
                "descriptors": sum(len(os.listdir(path / "fd")) for path in paths),
                "threads": sum(len(os.listdir(path / "task")) for path in paths),
                "rss_mb": sum(pages) * os.sysconf("SC_PAGESIZE") / 1e6,
            }
        except OSError:  # it ends
            return
        for name, value in counts.items():
            self.seen[name].append(value)


def descendants(pid: int) -> list[int]:
    """Processes that one has started, and those that these have."""
    children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def long_run(config: BenchConfig, folder: Path) -> Result:
    """What grows in a long run of the main job: descriptors, threads, memory, the time of a step?

    A tiny model that saves in the background, keeps replicas, and measures held-out losses a hundred times.
    """
    every = max(1, config.steps // 100)
    tiny = [
        "model=tiny", "model.width=16", "model.layers=1", "model.context=16", "data.rows=4",
        "data.held_out_rows=4", "run.backend=eager", "run.async_save=true", "run.keep=2", "run.device=cpu",
        f"mesh.shard={config.ranks}", f"run.steps={config.steps}", f"run.save_every={every}",
        f"run.held_out_every={every}", "run.replicas=1", f"run.replica_every={max(1, every // 4)}",
    ]  # fmt: skip
    watched = Watched(pause_s=0.5)
    with tempfile.TemporaryDirectory() as place:
        run = train([*tiny, *shlex.split(config.overrides)], Path(place), look=watched.look)
        watched.seen["step_ms"] = run.step_ms
    rows, wrong = [["", "1st quarter", "2nd", "3rd", "4th"]], []
    for name, values in watched.seen.items():
        four = quarters(values)
        share, more = ALLOWED[name]
        wrong += [f"{name} grows: {four[1]:.1f} -> {four[3]:.1f}"] * (four[3] > four[1] * (1 + share) + more)
        rows.append([name, *(f"{each:.1f}" for each in four)])
    return Result(rows, ["", *(wrong or ["nothing grows"])], {"seen": watched.seen}, failed=bool(wrong))


def quarters(values: Sequence[float]) -> list[float]:
    """The median of each.

    >>> quarters([5, 1, 1, 2, 3, 3, 4, 4])
    [3.0, 1.5, 3.0, 4.0]
    """
    size = max(1, len(values) // 4)
    return [median(values[n * size : (n + 1) * size] or values[-1:] or [0.0]) for n in range(4)]
