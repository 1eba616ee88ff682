"""The cases `memory` and `predict`: bytes and seconds of many plans, predicted and measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import CONTENDERS, Contender, Plan, Training, batches, make_task
from experiments.bench.measure import Result, interleaved, over_ranks, release, say, timed
from experiments.bench.peers import memory_of
from experiments.configs.checks import ConfigError
from experiments.tables import ratio

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
APART = 0.10  # by which two plans differ in time before their order counts


@dataclass(frozen=True)
class Variant:
    """A plan of fnshard, None for torch's DDP, and what it changes in the configuration."""

    plan: Plan | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


HOST = {"memory": "host", "optimizer_memory": "host"}
BF16 = {"dtype": "bf16", "reduce": "fp32"}
RECOMPUTED = Plan(options={"remat": "unit"})
MEMORY = {
    "full_shard": Variant(Plan()),
    "ddp": Variant(),
    "no_shard": Variant(Plan("no_shard", clip=1.0)),  # clipped, or gradients never wait for each other
    "zero1": Variant(Plan("zero1", clip=1.0)),
    "zero2": Variant(Plan("zero2", clip=1.0)),
    "zero3": Variant(Plan("zero3", clip=1.0)),
    "one_unit": Variant(Plan(one_unit=True)),
    "remat": Variant(RECOMPUTED),
    "remat-bf16": Variant(RECOMPUTED, BF16),
    "remat-bf16-host": Variant(replace(RECOMPUTED, tiers=HOST), BF16),
    "optimizer-host": Variant(Plan(tiers={"optimizer_memory": "host"})),
}
SMALL = {"size": "5m", "rows": 4}
LARGE = {"size": "25m", "rows": 4}
PREDICT = {
    "5m-full_shard": Variant(Plan(), SMALL),
    "5m-no_shard-8x256": Variant(Plan("no_shard"), SMALL | {"rows": 8}),
    "5m-full_shard-remat": Variant(RECOMPUTED, SMALL),
    "5m-zero2-bf16-accumulate4-16x256": Variant(
        Plan("zero2", options={"accumulate": 4}), SMALL | BF16 | {"rows": 16}
    ),
    "25m-full_shard": Variant(Plan(), LARGE),
    "25m-full_shard-bf16-remat0.5": Variant(Plan(options={"remat": 0.5}), LARGE | BF16),
    "25m-shard_grad_op-bf16-clip-8x256": Variant(Plan("shard_grad_op", clip=1.0), LARGE | BF16 | {"rows": 8}),
    "25m-no_shard-remat-accumulate2": Variant(
        Plan("no_shard", options={"remat": "unit", "accumulate": 2}), LARGE
    ),
    "25m-zero1-bf16-2x512": Variant(Plan("zero1"), LARGE | BF16 | {"rows": 2, "length": 512}),
    "5m-zero3-bf16-remat-clip-4x1024": Variant(
        Plan("zero3", clip=1.0, options={"remat": "unit"}), SMALL | BF16 | {"length": 1024}
    ),
}


def chosen(config: BenchConfig, variants: Mapping[str, Variant]) -> dict[str, Variant]:
    unknown = [name for name in config.plans if name not in variants]
    if unknown:
        raise ConfigError(f"plans={','.join(unknown)}: any of {', '.join(variants)}.")
    return {name: variants[name] for name in config.plans or variants}


def running(config: BenchConfig, variant: Variant) -> tuple[Contender, Any]:
    """A contender that has made its first steps, and its batch."""
    own = replace(config, **variant.changes)
    task = make_task(own)
    batch, *_ = batches(own, task, 1)
    made = contender(task, variant)
    for _ in range(2):
        made.step(*batch)
    return made, batch


def contender(task: Any, variant: Variant) -> Contender:
    if variant.plan is None:
        return CONTENDERS["ddp"](task)
    training = Training(task, variant.plan)
    return Contender(training.run, training=training)


def memory(config: BenchConfig, folder: Path) -> Result:
    """What saves memory, how much, at what cost in time, and does the ledger predict it?

    ZeRO 1 to 3 against DDP; one unit, block units, remat, bf16 and the host, one by one.
    """
    variants = chosen(config, MEMORY)
    say("first steps")
    there = {name: running(config, variant) for name, variant in variants.items()}
    works = {name: lambda made=made, batch=batch: made.step(*batch) for name, (made, batch) in there.items()}
    seconds = interleaved(works, config.rounds, seed=config.seed)
    predicted = {}
    for name, (made, batch) in there.items():
        if made.training:
            ledger = made.training.lowered(*batch).memory_analysis()
            predicted[name] = {"peak_bytes": ledger.peak_bytes, "between_bytes": ledger.resident_bytes}
        made.close()
    there.clear()
    works.clear()
    release()
    rows = [["plan", "peak MB", "predicted", "off", "between MB", "predicted", "step / first"]]
    base, found = next(iter(variants)), {}
    for name, variant in variants.items():
        say(f"bytes of {name}")
        own = replace(config, **variant.changes)
        task = make_task(own)
        seen = memory_of(own, task, lambda task=task, variant=variant: contender(task, variant))
        paper = predicted.get(name, {})
        found[name] = {**seen, "predicted": paper, "seconds": seconds[name]}
        cells = [mega(each, key) for key in ("peak_bytes", "between_bytes") for each in (seen, paper)]
        off = f"{paper['peak_bytes'] / seen['peak_bytes'] - 1:+.1%}" if paper else "-"
        rows.append([name, *cells[:2], off, *cells[2:], f"{ratio(seconds[name], seconds[base]):.2f}"])
    return Result(rows, values={"plans": found})


def mega(found: Mapping[str, int], key: str) -> str:
    return f"{found[key] / 1e6:.1f}" if key in found else "-"


def predict(config: BenchConfig, folder: Path) -> Result:
    """How near are predicted step times to measured ones, and are plans in the right order?

    Every round measures the machine anew and then runs one step of each plan, so that both see the machine in
    the same moods. Nothing is fitted to a plan.
    """
    variants, clock = chosen(config, PREDICT), CLOCKS[config.clock]
    there = {}
    for name, variant in variants.items():
        say(f"first steps of {name}")
        there[name] = running(config, variant)
    mesh = make_task(config).mesh
    lowered = {name: made.training.lowered(*batch) for name, (made, batch) in there.items()}
    measured: dict[str, list[float]] = {name: [] for name in there}
    predicted: dict[str, list[float]] = {name: [] for name in there}
    for number in range(config.rounds):
        say(f"round {number + 1} of {config.rounds}")
        hardware = fs.Hardware.measure(mesh, clock)
        for name, (made, batch) in there.items():
            predicted[name].append(lowered[name].timeline(hardware).step_seconds)
            measured[name].append(timed(lambda made=made, batch=batch: made.step(*batch), clock=clock))
    measured = {name: over_ranks(seconds) for name, seconds in measured.items()}
    plans = {name: (median(measured[name]), median(predicted[name])) for name in there}
    rows = [["plan", "measured ms", "predicted ms", "error"]]
    rows += [
        [name, f"{1e3 * m:.0f}", f"{1e3 * p:.0f}", f"{p / m - 1:+.0%}"] for name, (m, p) in plans.items()
    ]
    values = {"measured": measured, "predicted": predicted, "hardware": hardware.as_dict()}
    return Result(rows, ["", verdict(plans)], values)


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
