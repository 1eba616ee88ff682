"""The cases `memory` and `predict`: predict and measure the bytes and seconds of many plans.

`choose_plans` also serves the case `bubble`, which `bubble.py` runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import fnshard as fs
from experiments.bench.config import BenchConfig, complete
from experiments.bench.contenders import BenchTask, Setup, Training, ddp, make_task
from experiments.bench.measure import Result, interleave, rank_correlation, ratio, say
from experiments.bench.peers import Found, Maker, memory_of, start_contenders
from experiments.bench.sizes import size_names
from experiments.lib.checks import ConfigError

APART = 0.10  # the order of two plans counts if their times differ by more than this share

COLUMNS = {
    "peak MB": ("peak_bytes", 1e-6), "predicted peak": ("predicted_peak_bytes", 1e-6),
    "between MB": ("between_bytes", 1e-6), "predicted between": ("predicted_between_bytes", 1e-6),
    "step ms": ("seconds", 1e3), "predicted ms": ("predicted_seconds", 1e3),
}  # fmt: skip
TIERS = ("memory", "optimizer_memory")
# A setup, which is None for torch's DDP, and the values of the configuration that a plan changes.
Variant = tuple[Setup | None, dict[str, Any]]
# Each word of a plan's name changes the configuration, a field of `Setup` or an option of `shard_step`.
WORDS: dict[str, Callable[..., tuple[str, dict[str, Any]]]] = {
    rf"({'|'.join(size_names())})": lambda size: ("changes", {"size": size}),
    rf"({'|'.join(fs.presets.PRESETS)})": lambda preset: ("setup", {"preset": preset}),
    r"bf16": lambda: ("changes", {"dtype": "bf16", "reduce": "fp32"}),
    r"(tensor|context|pipeline)(\d+)": lambda axis, size: ("changes", {axis: int(size)}),
    r"chunks(\d+)": lambda count: ("setup", {"chunks": int(count)}),
    r"(\d+)x(\d+)": lambda rows, length: ("changes", {"rows": int(rows), "length": int(length)}),
    r"clip": lambda: ("setup", {"clip": 1.0}),
    r"one_unit": lambda: ("setup", {"one_unit": True}),
    r"(optimizer_)?host": lambda part: ("setup", {"tiers": dict.fromkeys(TIERS[bool(part) :], "host")}),
    r"remat(\d*\.?\d+|)": lambda share: ("options", {"remat": float(share) if share else "unit"}),
    r"accumulate(\d+)": lambda times: ("options", {"accumulate": int(times)}),
}
MEMORY = (  # some are clipped, so that all of their gradients have to wait for the norm
    "full_shard", "ddp", "no_shard-clip", "zero1-clip", "zero2-clip", "zero3-clip", "one_unit", "remat",
    "remat-bf16", "remat-bf16-host", "optimizer_host",
)  # fmt: skip
BUBBLE = (
    "pipeline2-accumulate2-4x256", "pipeline2-accumulate4-8x256", "pipeline2-accumulate8-8x256",
    "pipeline2-chunks2-accumulate4-4x256",
)  # fmt: skip
PREDICT = {  # by the number of ranks; `read_plan` reads the names
    2: (
        "5m-full_shard", "5m-no_shard-8x256", "5m-full_shard-remat", "5m-zero2-bf16-accumulate4-16x256",
        "5m-zero3-bf16-remat-clip-4x1024", "25m-full_shard", "25m-full_shard-bf16-remat0.5",
        "25m-shard_grad_op-bf16-clip-8x256", "25m-no_shard-remat-accumulate2", "25m-zero1-bf16-2x512",
        "5m-full_shard-tensor2", "5m-full_shard-context2-4x1024", "5m-shard_grad_op-accumulate2-8x256",
        "25m-full_shard-tensor2", "25m-zero2-tensor2-bf16-remat", "25m-full_shard-context2",
        "25m-zero3-accumulate2-remat", "25m-no_shard-context2-bf16-2x512", "25m-zero1-clip",
        "25m-full_shard-tensor2-accumulate2-8x256",
    ),
    4: (
        "5m-full_shard-2x256", "5m-no_shard-2x256", "5m-zero2-bf16-4x256", "5m-full_shard-remat-2x512",
        "5m-full_shard-tensor2-2x512", "5m-full_shard-context2-2x1024", "5m-zero3-accumulate2-4x256",
        "25m-full_shard-2x256", "25m-shard_grad_op-tensor2-remat-2x256", "25m-zero1-bf16-tensor4-4x256",
    ),
}  # fmt: skip


def run(config: BenchConfig, folder: Path) -> Result:
    """What saves memory, and at what cost in time? Are bytes, times and the order of plans as predicted?

    Every round measures the machine anew and runs a step of each plan, so that both see it under the same
    load. Nothing is fitted to a plan.
    """
    makers: dict[str, tuple[BenchTask, Maker]] = {}
    for name, (setup, changes) in choose_plans(config).items():
        make = ddp if setup is None else partial(Training, setup=setup)
        makers[name] = make_task(replace(config, **changes)), make
    # Time all plans in turn, and then count their bytes.
    seconds, found = measure_times(config, makers)
    if config.memory:  # the number of passes that count bytes
        for name, (task, make) in makers.items():
            say(f"bytes of {name}")
            found[name] |= memory_of(task, make, config.memory)
    # A row for each plan, and notes on how near the predictions are.
    rows = [["plan", *COLUMNS, "step / first"]]
    first = next(iter(seconds.values()))
    for name, each in found.items():
        shown = [f"{each[key] * factor:.1f}" if key in each else "-" for key, factor in COLUMNS.values()]
        rows.append([name, *shown, f"{ratio(seconds[name], first):.2f}"])
    known = {n: (f["seconds"], f["predicted_seconds"]) for n, f in found.items() if "predicted_seconds" in f}
    both = [f for f in found.values() if {"peak_bytes", "predicted_peak_bytes"} <= f.keys()]
    sizes = [f["predicted_peak_bytes"] / f["peak_bytes"] for f in both]
    notes = ["", verdict(known)]
    if sizes:
        notes.append(f"peak bytes, predicted / measured: {min(sizes):.3f} to {max(sizes):.3f}")
    return Result(rows, notes, {"plans": found, "seconds": seconds})


def choose_plans(config: BenchConfig) -> dict[str, Variant]:
    """Return the plans that take part, by name.

    Raises:
        ConfigError: a name is unknown, or there are no plans for so many ranks.
    """
    names = config.plans or {"memory": MEMORY, "bubble": BUBBLE}.get(
        config.case, PREDICT.get(config.ranks, ())
    )
    if not names:
        raise ConfigError(f"ranks={config.ranks}: plans=[...] names which; 2 and 4 ranks have their own.")
    plans = {name: read_plan(name) for name in names}
    for _, changes in plans.values():
        complete(replace(config, **changes))  # raises if a plan's values do not go together
    return plans


def read_plan(name: str) -> Variant:
    """Read a plan's name: words of `WORDS` that hyphens join, or "ddp" for torch's.

    >>> setup, changes = read_plan("25m-zero1-bf16-remat0.5-tensor2-2x512")
    >>> setup.options, changes["tensor"], changes["length"]
    ({'remat': 0.5}, 2, 512)
    """
    if name == "ddp":
        return None, {}
    chosen: dict[str, dict[str, Any]] = {"changes": {}, "setup": {}, "options": {}}
    for word in name.split("-"):
        matches = [(re.fullmatch(pattern, word), read) for pattern, read in WORDS.items()]
        known = [read(*match.groups()) for match, read in matches if match]
        if not known:
            raise ConfigError(f"plans={name}: {word!r} is none of {', '.join(WORDS)}, and the name not ddp.")
        kind, values = known[0]
        chosen[kind] |= values
    return Setup(**chosen["setup"], options=chosen["options"]), chosen["changes"]


def measure_times(config: BenchConfig, makers: Mapping[str, tuple[BenchTask, Maker]]) -> tuple[Found, Found]:
    """Measure the seconds of steps by round. Return them, and each plan's median and predictions."""
    clock = {"wall": time.perf_counter, "cpu": time.thread_time}[config.clock]
    mesh, machines = next(iter(makers.values()))[0].mesh, []
    with start_contenders(makers) as entries:
        works = {name: entry.step for name, entry in entries.items()}
        works["machine"] = lambda: machines.append(fs.Hardware.measure(mesh, clock))
        say(f"{config.rounds} rounds of {', '.join(works)}")
        seconds = interleave(works, config.rounds, seed=config.seed, clock=clock)
        del seconds["machine"], works
        found = {name: {"seconds": median(each)} for name, each in seconds.items()}
        for name, entry in entries.items():
            if isinstance(entry.contender, Training):
                lowered = entry.contender.lower(*entry.batches[0])
                ledger, lines = lowered.memory_analysis(), map(lowered.timeline, machines)
                found[name]["predicted_seconds"] = median(line.step_seconds for line in lines)
                found[name]["predicted_peak_bytes"] = ledger.peak_bytes
                found[name]["predicted_between_bytes"] = ledger.resident_bytes
        del entry  # the context frees the contenders
    return seconds, found


def verdict(plans: Mapping[str, tuple[float, float]]) -> str:
    """Return how many predictions are near, and which pairs of plans they put in the wrong order.

    >>> verdict({"a": (1.0, 1.2), "b": (2.0, 1.3)})
    '1 of 2 within 25%, rank correlation 1.000; 1 of 1 pairs more than 10% apart in the right order'
    >>> verdict({"a": (1.0, 1.2), "b": (1.09, 1.1)}).partition("; ")[2]
    '0 of 0 pairs more than 10% apart in the right order'
    """
    near = sum(abs(predicted / measured - 1) <= 0.25 for measured, predicted in plans.values())
    ordered = sorted(plans, key=lambda name: plans[name][0])
    pairs = [(a, b) for a, b in combinations(ordered, 2) if plans[b][0] > (1 + APART) * plans[a][0]]
    wrong = [f"{a} < {b}" for a, b in pairs if plans[a][1] >= plans[b][1]]
    rank = rank_correlation(*zip(*plans.values(), strict=True)) if plans else 1.0
    text = f"{near} of {len(plans)} within 25%, rank correlation {rank:.3f}; "
    text += f"{len(pairs) - len(wrong)} of {len(pairs)} pairs more than {APART:.0%} apart in the right order"
    return f"{text}; wrong: {', '.join(wrong)}" if wrong else text
