"""What grows in a long run: memory, descriptors, threads, tensors or the time of a step.

    python -m experiments.micro.long_run steps=10000 ranks=2

The main job's loop with a tiny model, on the eager backend: saves in the background, replicas, held-out
losses, samples, and a second step whose batches have many lengths. Every rank looks at itself forty times;
prints the median of each quarter, and ends with an error where the last is above the second.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.cli.validation import validate
from experiments.configs.machine import place
from experiments.train import SPEC
from experiments.training import loop
from experiments.training.checkpoints import Saver
from experiments.training.report import Report, Silent
from experiments.training.resume import RunFolder
from experiments.training.run_record import TimeSpent
from experiments.training.steps import Training, run_steps
from experiments.training.watchdog import Spikes
from fnshard.launcher.local import launch, run_rank, under_launcher
from fnshard.launcher.rank import Stop

DEFAULTS = {"steps": "10000", "ranks": "1", "saves": "100"}
LOOKS = 40
# What the last quarter may have more than the second: a share of it, and so much.
# An exchange under way holds tensors.
ALLOWED = {
    "descriptors": (0.0, 0), "threads": (0.0, 0), "tensors": (0.0, 2), "blocks": (0.005, 500),
    "rss_mb": (0.01, 4), "step_ms": (0.5, 1),
}  # fmt: skip


@dataclass
class Watched:
    """A loader, and what the process has at some of its steps; `blocks`: those of Python's allocator."""

    loader: Any
    every: int
    seen: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ALLOWED})
    _steps: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._steps += 1
        if self._steps % self.every == 0:
            self._look()
        return next(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def _look(self) -> None:
        seconds = time.perf_counter() - self._began
        fs.checkpoint.wait()  # else its thread and files are there at some looks
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        values = {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
            "blocks": sys.getallocatedblocks(),
            "rss_mb": pages * resource.getpagesize() / 1e6,
            "step_ms": seconds * 1e3 / self.every,
        }
        for name, value in values.items():
            self.seen[name].append(value)
        self._began = time.perf_counter()


def quarters(values: list[float]) -> list[float]:
    """The median of each.

    >>> quarters([5, 1, 1, 2, 3, 3, 4, 4])
    [3.0, 1.5, 3.0, 4.0]
    """
    size = len(values) // 4
    return [statistics.median(values[n * size : (n + 1) * size]) for n in range(4)]


def grown(seen: Mapping[str, list[float]], names: Any = ALLOWED) -> list[str]:
    """What is more in the last quarter than in the second."""
    out = []
    for name in names:
        (_, second, _, last), (share, more) = quarters(seen[name]), ALLOWED[name]
        if last > second * (1 + share) + more:
            out.append(f"{name} {second:.1f} -> {last:.1f}")
    return out


def lengths(mesh: fs.Mesh) -> Iterator[None]:
    """Steps of a small model, each of another length."""
    params = {"w": torch.zeros(8)}
    step = fs.shard_step(
        lambda p, x: (p["w"][:1] * x).mean(), fs.match_specs(params, [("*", fs.LayoutSpec())]), mesh=mesh,
        optimizer=fs.optim.sgd(0.1), backend="eager", shapes=fs.Buckets(8, pad={"*": 0}),
    )  # fmt: skip
    state, number = step.init(params), 0
    while True:
        number += 1
        state, metrics = step(state, torch.ones(1, 1 + number * 7 % 60))
        metrics.numbers()
        yield


def measure(steps: int, ranks: int, saves: int, folder: Path) -> dict[str, list[float]]:
    """What this rank has seen of itself."""
    overrides = [
        "model=tiny", "model.width=16", "model.layers=1", "model.context=16", "data.rows=4",
        "data.held_out_rows=4", "run.backend=eager", "run.async_save=true", "run.keep=2",
        f"mesh.shard={ranks}", f"run.steps={steps}", f"run.save_every={saves}",
        f"run.held_out_every={saves}", "run.replicas=1",
        f"run.replica_every={max(1, saves // 4)}", "run.cache=off",
    ]  # fmt: skip
    config = place(validate(SPEC, overrides).config, accelerators={}, world=ranks)
    setup, run = loop.prepare(config), RunFolder(str(folder))
    state, loader, _ = loop.begin(setup, run)
    watched, other = Watched(loader, max(1, steps // LOOKS)), lengths(setup.mesh)
    report: Any = Silent()
    if setup.mesh.rank == 0:
        report = Report(folder, steps, config.data.rows * config.model.context, spikes=Spikes())

    def evaluate(params: Any) -> float:
        next(other)
        setup.sampler(params, "def ", 2, 0)
        return loop.evaluate(setup, params)

    training = Training.of(
        config, setup.plan, setup.step, evaluate, watched, lambda: (state, loader), report, folder,
        TimeSpent(), fs.checkpoint.Replicas(setup.step, folder / "memory"),
    )  # fmt: skip
    with report:
        run_steps(training, state, report, Saver(config, folder / "checkpoints", setup.mesh.rank), Stop())
        fs.checkpoint.wait()
    return watched.seen


def as_text(rank: int, seen: Mapping[str, list[float]]) -> str:
    rows = [f"  {name:12}" + "".join(f"{q:12.1f}" for q in quarters(values)) for name, values in seen.items()]
    return "\n".join([f"rank {rank}, quarters of the run:", *rows])


def main() -> None:
    if under_launcher():
        options = json.loads(os.environ["LONG_RUN"])
        rank = int(os.environ["RANK"])

        def work() -> None:
            numbers = [int(options[name]) for name in DEFAULTS]
            seen = measure(*numbers, Path(options["folder"]))
            print(as_text(rank, seen), flush=True)
            if grown(seen):
                sys.exit(f"rank {rank} grows: {', '.join(grown(seen))}")

        run_rank(work, device_type="cpu")
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if set(arguments) - set(DEFAULTS) or len(arguments) < len(sys.argv) - 1:
        sys.exit(f"error: takes {', '.join(f'{k}={v}' for k, v in DEFAULTS.items())}")
    options = {**DEFAULTS, **arguments}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "memory").mkdir()
        command = [sys.executable, "-u", "-m", "experiments.micro.long_run"]
        values = json.dumps({**options, "folder": folder})
        launch(command, ranks=int(options["ranks"]), logs=Path(folder, "ranks"), env={"LONG_RUN": values})


if __name__ == "__main__":
    main()
