"""The cases `memory` and `predict`: bytes and seconds of many plans, predicted and measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import BenchTask, Plan, Training, ddp, make_task
from experiments.bench.measure import Result, interleaved, ratio, say
from experiments.bench.peers import Found, Maker, memory_of, started
from experiments.configs.checks import ConfigError

APART = 0.10  # by which two plans differ in time before their order counts


COLUMNS = {
    "peak MB": ("peak_bytes", 1e-6), "predicted peak": ("predicted_peak_bytes", 1e-6),
    "between MB": ("between_bytes", 1e-6), "predicted between": ("predicted_between_bytes", 1e-6),
    "step ms": ("seconds", 1e3), "predicted ms": ("predicted_seconds", 1e3),
}  # fmt: skip
HOST = {"memory": "host", "optimizer_memory": "host"}
BF16 = {"dtype": "bf16", "reduce": "fp32"}
REMAT, FOUR, LONG = {"remat": "unit"}, {"accumulate": 4}, {"length": 1024}
SMALL, LARGE = {"size": "5m", "rows": 4}, {"size": "25m", "rows": 4}
# A plan of fnshard, None for torch's DDP, and what it changes in the configuration.
VARIANTS: dict[str, dict[str, tuple[Plan | None, dict[str, Any]]]] = {
    "memory": {
        "full_shard": (Plan(), {}),
        "ddp": (None, {}),
        "no_shard": (Plan("no_shard", clip=1.0), {}),  # clipped, or gradients never wait for each other
        "zero1": (Plan("zero1", clip=1.0), {}),
        "zero2": (Plan("zero2", clip=1.0), {}),
        "zero3": (Plan("zero3", clip=1.0), {}),
        "one_unit": (Plan(one_unit=True), {}),
        "remat": (Plan(options=REMAT), {}),
        "remat-bf16": (Plan(options=REMAT), BF16),
        "remat-bf16-host": (Plan(options=REMAT, tiers=HOST), BF16),
        "optimizer-host": (Plan(tiers={"optimizer_memory": "host"}), {}),
    },
    "predict": {
        "5m-full_shard": (Plan(), SMALL),
        "5m-no_shard-8x256": (Plan("no_shard"), SMALL | {"rows": 8}),
        "5m-full_shard-remat": (Plan(options=REMAT), SMALL),
        "5m-zero2-bf16-accumulate4-16x256": (Plan("zero2", options=FOUR), SMALL | BF16 | {"rows": 16}),
        "5m-zero3-bf16-remat-clip-4x1024": (Plan("zero3", clip=1.0, options=REMAT), SMALL | BF16 | LONG),
        "25m-full_shard": (Plan(), LARGE),
        "25m-full_shard-bf16-remat0.5": (Plan(options={"remat": 0.5}), LARGE | BF16),
        "25m-shard_grad_op-bf16-clip-8x256": (Plan("shard_grad_op", clip=1.0), LARGE | BF16 | {"rows": 8}),
        "25m-no_shard-remat-accumulate2": (Plan("no_shard", options=REMAT | {"accumulate": 2}), LARGE),
        "25m-zero1-bf16-2x512": (Plan("zero1"), LARGE | BF16 | {"rows": 2, "length": 512}),
    },
}


def run(config: BenchConfig, folder: Path) -> Result:
    """What saves memory, and at what cost in time? Are bytes, times and the order of plans as predicted?

    Every round measures the machine anew and runs a step of each plan, so that both see it in the same moods.
    Nothing is fitted to a plan.
    """
    makers: dict[str, tuple[BenchTask, Maker]] = {}
    for name, (plan, changes) in chosen(config).items():
        make = ddp if plan is None else partial(Training, plan=plan)
        makers[name] = make_task(replace(config, **changes)), make
    seconds, found = times(config, makers)
    for name, (task, make) in makers.items() if config.memory else ():
        say(f"bytes of {name}")
        found[name] |= memory_of(task, make, config.memory)
    rows = [["plan", *COLUMNS, "step / first"]]
    for name, each in found.items():
        shown = [f"{each[key] * by:.1f}" if key in each else "-" for key, by in COLUMNS.values()]
        rows.append([name, *shown, f"{ratio(seconds[name], next(iter(seconds.values()))):.2f}"])
    known = {n: (f["seconds"], f["predicted_seconds"]) for n, f in found.items() if "predicted_seconds" in f}
    return Result(rows, ["", verdict(known)], {"plans": found, "seconds": seconds})


def chosen(config: BenchConfig) -> dict[str, tuple[Plan | None, dict[str, Any]]]:
    """The plans that take part."""
    variants = VARIANTS[config.case]
    unknown = [name for name in config.plans if name not in variants]
    if unknown:
        raise ConfigError(f"plans={','.join(unknown)}: any of {', '.join(variants)}.")
    return {name: variants[name] for name in config.plans or variants}


def times(config: BenchConfig, makers: Mapping[str, tuple[BenchTask, Maker]]) -> tuple[Found, Found]:
    """Seconds of steps by round; and of each plan their median, and what is predicted of it."""
    clock = {"wall": time.perf_counter, "cpu": time.thread_time}[config.clock]
    mesh, machines = next(iter(makers.values()))[0].mesh, []
    with started(makers) as entries:
        works = {name: entry.step for name, entry in entries.items()}
        works["machine"] = lambda: machines.append(fs.Hardware.measure(mesh, clock))
        say(f"{config.rounds} rounds of {', '.join(works)}")
        seconds = interleaved(works, config.rounds, seed=config.seed, clock=clock)
        del seconds["machine"], works
        found = {name: {"seconds": median(each)} for name, each in seconds.items()}
        for name, entry in entries.items():
            if isinstance(entry.contender, Training):
                lowered = entry.contender.lowered(*entry.batches[0])
                ledger, lines = lowered.memory_analysis(), map(lowered.timeline, machines)
                found[name]["predicted_seconds"] = median(line.step_seconds for line in lines)
                found[name]["predicted_peak_bytes"] = ledger.peak_bytes
                found[name]["predicted_between_bytes"] = ledger.resident_bytes
        del entry
    return seconds, found


def verdict(plans: Mapping[str, tuple[float, float]]) -> str:
    """How many predictions are near, and which pairs of plans they put in the wrong order.

    >>> verdict({"a": (1.0, 1.2), "b": (2.0, 1.1), "c": (2.1, 2.0)})
    '2 of 3 within 25%; 1 of 2 pairs more than 10% apart in the right order; wrong: a < b'
    """
    near = sum(abs(predicted / measured - 1) <= 0.25 for measured, predicted in plans.values())
    ordered = sorted(plans, key=lambda name: plans[name][0])
    pairs = [(a, b) for a, b in combinations(ordered, 2) if plans[b][0] > (1 + APART) * plans[a][0]]
    wrong = [f"{a} < {b}" for a, b in pairs if plans[a][1] >= plans[b][1]]
    text = f"{near} of {len(plans)} within 25%; {len(pairs) - len(wrong)} of {len(pairs)} pairs more than "
    return f"{text}{APART:.0%} apart in the right order" + (f"; wrong: {', '.join(wrong)}" if wrong else "")
