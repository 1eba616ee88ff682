"""What watching costs: progress, trackers and watchdog, as a share of a training step.

    python -m experiments.micro.watch_overhead model=5m trackers=tensorboard,mlflow,wandb rounds=12

Blocks of steps in a random order, with and without all of it; what trackers still have to be told is waited
for inside the block, so their threads' work is paid there. Beside the two medians, whose difference drowns in
the noise of a busy machine, stand the seconds that the calls took by themselves: the wall time of the loop's
own thread, and the CPU time of the trackers' threads.
"""

from __future__ import annotations

import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cli.validation import validate
from experiments.configs.machine import place
from experiments.configs.train import TrackerConfig
from experiments.trackers.base import RunInfo, Tracker
from experiments.trackers.registry import TRACKERS, chosen
from experiments.train import SPEC
from experiments.training import loop, steps
from experiments.training.report import Report, Silent
from experiments.training.resume import RunFolder
from experiments.training.run_record import RunRecord, TimeSpent, facts_of
from experiments.training.steps import Training
from experiments.training.watchdog import Spikes
from fnshard.launcher.local import launch, run_rank, under_launcher

DEFAULTS = {"model": "tiny", "trackers": ",".join(TRACKERS), "rounds": "12", "block": "25", "ranks": "2",
            "backend": "inductor"}  # fmt: skip


class Terminal(io.StringIO):
    """Where the progress bar is drawn for nobody."""

    def isatty(self) -> bool:
        return True


class Timed:
    """A tracker, and the CPU seconds that it takes on its thread behind its start."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.name, self.seconds = tracker, tracker.name, 0.0

    def start(self, info: RunInfo) -> Any:
        return self.tracker.start(info)

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        began = time.thread_time()
        self.tracker.log(rows)
        self.seconds += time.thread_time() - began

    def artifact(self, path: Path) -> None:
        self.tracker.artifact(path)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self.tracker.finish(status, summary)


def measure(options: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """On this rank: seconds of a step without and with watching, and of the watching alone."""
    config = configured(options)
    setup = loop.prepare(config)
    mesh, run = setup.mesh, RunFolder(str(folder))
    state, loader, _ = loop.begin(setup, run)
    tracked = [Timed(each) for each in chosen(config.tracker)] if mesh.rank == 0 else []
    report: Report | Silent = Silent()
    if mesh.rank == 0:
        record = RunRecord(folder, facts_of(config, "overhead", mesh, []))
        tokens = config.data.rows * config.model.context
        report = Report(folder, 10**6, tokens, stream=Terminal(), record=record, trackers=tracked,
                        spikes=Spikes())  # fmt: skip
    training = Training.of(
        config, setup.plan, setup.step, lambda params: 0.0, loader, lambda: (state, loader), report, folder,
        TimeSpent(),
    )  # fmt: skip
    calls = CallCounter(training, report)
    number, seconds = 0, {False: [], True: []}
    order = random.Random(0)  # the same on all ranks
    for turn in range(int(options["rounds"]) + 1):
        for watched in order.sample((False, True), 2):
            began = time.perf_counter()
            for _ in range(int(options["block"])):
                number += watched
                state = calls.watched(state, number, folder) if watched else calls.plain(state)
            if watched and mesh.rank == 0:
                calls.flush()
            if turn:  # the first compiles, and trackers start
                seconds[watched].append((time.perf_counter() - began) / int(options["block"]))
        if not turn:
            calls.seconds = 0.0
            for each in tracked:
                each.seconds = 0.0
    report.close()
    report.finish("ok")
    count = int(options["rounds"]) * int(options["block"])
    return {
        "plain_s": statistics.median(seconds[False]),
        "watched_s": statistics.median(seconds[True]),
        "spread_s": statistics.stdev(seconds[False]),
        "calls_s": calls.seconds / count,
        "trackers_s": {each.name: each.seconds / count for each in tracked},
    }


class CallCounter:
    """Steps with and without watching. `seconds`: of what stands around the watched ones."""

    def __init__(self, training: Training, report: Any):
        self.training, self.report, self.seconds = training, report, 0.0

    def plain(self, state: Any) -> Any:
        batch = next(self.training.loader)
        state, metrics = self.training.step(state, *batch)
        metrics.numbers()
        return state

    def watched(self, state: Any, number: int, folder: Path) -> Any:
        inside = self.training.spent.seconds
        before, began = inside["data"], time.perf_counter()
        timed = Timing(self.training.step)
        state = steps.one_step(timed.of(self.training), state, self.report, number, number, folder)
        total = time.perf_counter() - began
        self.seconds += total - timed.seconds - (inside["data"] - before)
        return state

    def flush(self) -> None:
        """Until trackers have logged all."""
        for feed in self.report._feeds:
            feed.flush(time.monotonic() + 60)


class Timing:
    def __init__(self, step: Any):
        self._step, self.seconds = step, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        state, metrics = self._step(*args)
        metrics.numbers()
        self.seconds += time.perf_counter() - began
        return state, metrics

    def of(self, training: Training) -> Training:
        return replace(training, step=self)


def configured(options: Mapping[str, str]) -> Any:
    keys = {"model": "model", "mesh.shard": "ranks", "run.backend": "backend"}
    overrides = [f"{key}={options[name]}" for key, name in keys.items()]
    config = validate(SPEC, overrides).config
    names = [name for name in options["trackers"].split(",") if name]
    tracker = TrackerConfig(**dict.fromkeys(names, True), store=str(Path(options["folder"]) / "mlruns"))
    return place(replace(config, tracker=tracker), accelerators={}, world=int(options["ranks"]))


def as_text(options: Mapping[str, str], found: Mapping[str, Any]) -> str:
    plain, watched = found["plain_s"], found["watched_s"]
    own = found["calls_s"] + sum(found["trackers_s"].values())
    each = ", ".join(f"{name} {s * 1e6:.0f} us" for name, s in found["trackers_s"].items()) or "none"
    return (
        f"{options['model']}, {options['ranks']} ranks, {options['backend']}: "
        f"a step {plain * 1e3:.1f} ms, watched "
        f"{watched * 1e3:.1f} ms ({watched / plain - 1:+.2%}; blocks vary {found['spread_s'] / plain:.1%})\n"
        f"by themselves: the loop's calls {found['calls_s'] * 1e6:.0f} us, trackers' threads: {each}; "
        f"together {own / plain:.2%} of a step"
    )


def main() -> None:
    if under_launcher():
        options = json.loads(os.environ["WATCH_OVERHEAD"])
        folder = Path(options["folder"])

        def rank() -> None:
            found = measure(options, folder)
            if os.environ["RANK"] == "0":
                print(as_text(options, found), flush=True)

        run_rank(rank, device_type="cpu")
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if set(arguments) - set(DEFAULTS) or len(arguments) < len(sys.argv) - 1:
        sys.exit(f"error: takes {', '.join(f'{k}={v}' for k, v in DEFAULTS.items())}")
    with tempfile.TemporaryDirectory() as folder:
        values = json.dumps({**DEFAULTS, **arguments, "folder": folder})
        command = [sys.executable, "-u", "-m", "experiments.micro.watch_overhead"]
        ranks = int({**DEFAULTS, **arguments}["ranks"])
        launch(command, ranks=ranks, logs=Path(folder, "ranks"), env={"WATCH_OVERHEAD": values})


if __name__ == "__main__":
    main()
