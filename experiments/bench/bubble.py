"""The case `bubble`: predict and measure how long the stages of a pipeline wait for one another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import BenchTask, Training, make_task
from experiments.bench.measure import Result, interleave, reduce_over_ranks, say
from experiments.bench.peers import Entry, Found, Maker, memory_of, start_contenders
from experiments.bench.plans import choose_plans
from fnshard.compiler.schedule.instructions import COMMUNICATION, Action, Env, Instruction, Wait
from fnshard.compiler.schedule.instructions.messages import Send
from fnshard.compiler.schedule.ir import Schedule
from fnshard.mesh import PIPELINE

NOTES = (
    "",
    "bubble: the share of a step in which a rank waits for other stages, the mean of all ranks: for what it",
    "receives, and for those that come last to a sum over the pipeline. Predicted from what the machine was",
    "measured to do in the same rounds; nothing is fitted to a plan.",
)


@dataclass(eq=False)
class Waiting:
    """An observer of a step (`Step.watching`), which sums the seconds that this rank waits for other
    stages."""

    schedule: Schedule
    seconds: float = 0.0

    def __call__(self, number: int, line: Instruction, action: Action) -> Action:
        """Time the action of a line if another stage can make it wait."""
        issue = self.schedule.issues[line.reads[0]] if isinstance(line, Wait) else line
        is_of_stages = issue.lane == COMMUNICATION and PIPELINE in issue.axes_of(self.schedule)
        if not is_of_stages or isinstance(issue, Send):  # a sender copies its message, and waits for nobody
            return action

        def run(env: Env) -> None:
            began = time.perf_counter()
            action(env)
            self.seconds += time.perf_counter() - began

        return run


def run(config: BenchConfig, folder: Path) -> Result:
    """How long do the stages of a pipeline wait for one another, next to what the timeline predicts?

    Every round measures the machine anew and runs a step of each plan, so that both see it in the same moods.
    """
    makers: dict[str, tuple[BenchTask, Maker]] = {
        name: (make_task(replace(config, **changes)), partial(Training, setup=setup))
        for name, (setup, changes) in choose_plans(config).items()
    }
    # Time and predict all plans, and then count their bytes.
    found = measure(config, makers)
    for name, (task, make) in makers.items() if config.memory else ():
        say(f"bytes of {name}")
        found[name] |= memory_of(task, make, config.memory)
    head = ["plan", "step ms", "predicted", "bubble", "predicted", "peak MB", "predicted"]
    rows = [head, *(make_row(name, each) for name, each in found.items())]
    errors = {name: each["predicted_bubble"] - each["bubble"] for name, each in found.items()}
    worst = max(errors, key=lambda name: abs(errors[name]))
    notes = [*NOTES, f"furthest apart: {100 * errors[worst]:+.1f} points, {worst}"]
    return Result(rows, notes, {"plans": found})


def make_row(name: str, found: Found) -> list[str]:
    """Return a plan's row of the table, in which each measured number precedes its prediction."""
    cells = [f"{1e3 * found[key]:.1f}" for key in ("seconds", "predicted_seconds")]
    cells += [f"{found[key]:.1%}" for key in ("bubble", "predicted_bubble")]
    peaks = [found.get(key) for key in ("peak_bytes", "predicted_peak_bytes")]
    return [name, *cells, *("-" if peak is None else f"{peak / 1e6:.1f}" for peak in peaks)]


def measure(config: BenchConfig, makers: dict[str, tuple[BenchTask, Maker]]) -> Found:
    """Measure the seconds of each plan's step and the bubble in it, as medians over rounds, and predict
    both."""
    mesh, machines = next(iter(makers.values()))[0].mesh, []
    with start_contenders(makers) as entries:
        # Each plan's step has an observer, and the machine is measured in turn with them.
        lowered = {name: entry.contender.lower(*entry.batches[0]) for name, entry in entries.items()}
        watches = {name: Waiting(each.schedule) for name, each in lowered.items()}
        waited: dict[str, list[float]] = {name: [] for name in entries}
        works = {name: make_step(entry, watches[name], waited[name]) for name, entry in entries.items()}
        for work in works.values():
            work()  # binds the schedule a second time, with its observer
        works["machine"] = lambda: machines.append(fs.Hardware.measure(mesh))
        say(f"{config.rounds} rounds of {', '.join(works)}")
        seconds = interleave(works, config.rounds, seed=config.seed)

        # The bubble is the ranks' mean share of a step's seconds.
        found: Found = {}
        for name, each in lowered.items():
            waits = reduce_over_ranks(waited[name][1:], dist.ReduceOp.SUM)
            shares = [w / config.ranks / s for w, s in zip(waits, seconds[name], strict=True)]
            lines = [each.timeline(machine) for machine in machines]
            found[name] = {
                "seconds": median(seconds[name]), "bubble": median(shares), "bubbles": shares,
                "predicted_seconds": median(line.step_seconds for line in lines),
                "predicted_bubble": median(line.bubble for line in lines),
                "predicted_peak_bytes": each.memory_analysis().peak_bytes,
            }  # fmt: skip
        del works, entries  # the context frees the contenders
    return found


def make_step(entry: Entry, watch: Waiting, waited: list[float]) -> Callable[[], Any]:
    """Return a function that makes a step, and appends the seconds that this rank has waited in it."""
    training: Training = entry.contender

    def step() -> None:
        watch.seconds = 0.0
        with training.step.watching(watch):
            entry.step()
        waited.append(watch.seconds)

    return step
