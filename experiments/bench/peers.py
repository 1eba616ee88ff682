"""The case `peers`: fnshard and what torch ships, in one launch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import (
    CONTENDERS,
    FNSHARD,
    BenchTask,
    Contender,
    Plan,
    Training,
    batches,
    global_batch,
    make_task,
    reference_losses,
)
from experiments.bench.measure import Result, fresh_cache, interleaved, over_ranks, rank, release, say
from experiments.bench.memory import live_bytes
from experiments.tables import quartiles, ratio
from fnshard.analysis.hardware import Hardware, mfu

BASELINES = ("limit", "ddp", "fsdp2", "fsdp2_compiled")
Found = dict[str, Any]
NOTES = (
    "",
    "/ x: median over rounds of the step's time by x's. MB: live tensors of the fullest rank, transport",
    "slots counted in. first step: of fnshard only the first named compiles its kernels.",
    "loss diff: largest to an fp64 single-process reference.",
    "MFU: 6 N + 6 L T D FLOPs a token (causal attention) of the data sheet's dense peak.",
)


def run(config: BenchConfig, folder: Path) -> Result:
    """How fast and how large is a step, next to DDP, FSDP2 and a limit that no sharded step can beat?

    On a CPU all contenders live in one launch and take turns in every round, so that the machine's drift
    cancels in ratios. A GPU drifts little, and holds one at a time.
    """
    task, found = make_task(config), {}
    groups = [config.contenders] if config.device == "cpu" else [(name,) for name in config.contenders]
    for group in groups:
        found |= race(config, task, group)
    if config.memory and config.device == "cpu":
        for name in config.contenders:
            say(f"memory of {name}")
            found[name] |= memory_of(config, task, lambda name=name: CONTENDERS[name](task))
    reference = compare(config, task, found) if config.losses else []
    notes = [*NOTES, *(profile(config, task, folder) if config.profile and config.device == "cpu" else [])]
    rows = {name: row(config, name, found) for name in config.contenders}
    values = {"parameters": config.model.parameters, "contenders": rows, "reference_losses": reference}
    return Result(table(rows), notes, values)


# ------------------------------------------------------------------ time


@dataclass
class Entry:
    """A contender on its way through the batches."""

    contender: Contender
    feed: Iterator[tuple[Tensor, Tensor]]
    losses: list[Tensor] = field(default_factory=list)

    def step(self) -> None:
        self.losses.append(self.contender.step(*next(self.feed)))


def race(config: BenchConfig, task: BenchTask, names: Sequence[str]) -> dict[str, Found]:
    """First steps one after another, then interleaved rounds. On a GPU bytes are read off the allocator."""
    feed = list(batches(config, task, config.warmup + config.rounds * config.steps))
    entries: dict[str, Entry] = {}
    first: dict[str, float] = {}
    on_gpu = config.device == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    for name in names:
        say(f"first step of {name}")
        with fresh_cache():
            began = time.perf_counter()
            entries[name] = Entry(CONTENDERS[name](task), iter(feed))
            entries[name].step()
            first[name] = time.perf_counter() - began
    # All are there: where one of them did to the process what Dynamo guards, another compiles again
    # here, not in a timed step.
    for _ in range(config.warmup - 1):
        for entry in entries.values():
            entry.step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    say(f"{config.rounds} rounds of {', '.join(names)}")
    works = {name: entry.step for name, entry in entries.items()}
    how = {"seed": config.seed, "steps": config.steps, "device": config.device}
    seconds = interleaved(works, config.rounds, **how)
    sizes = {}
    if on_gpu:
        sizes = {"peak_bytes": torch.cuda.max_memory_allocated() - before}
        sizes["between_bytes"] = torch.cuda.memory_allocated() - before
    found = {}
    for name, entry in entries.items():
        losses = [mean(loss) for loss in entry.losses] if entry.contender.trains else []
        (slowest,) = over_ranks([first[name]])
        found[name] = {"first_step_s": slowest, "seconds": seconds[name], "losses": losses, **sizes}
        entry.contender.close()
    entries.clear()
    works.clear()
    release()
    return found


def mean(loss: Tensor) -> float:
    """Over all ranks."""
    total, count = over_ranks([loss.double().item(), 1.0], torch.distributed.ReduceOp.SUM)
    return total / count


# ------------------------------------------------------------------ memory, losses, profile


def memory_of(config: BenchConfig, task: BenchTask, make: Any) -> Found:
    """Bytes of the rank that holds most; slots in shared memory are added to both numbers.

    Args:
        make: gives a `Contender`.
    """
    batch, *_ = batches(config, task, 1)
    seen: list[tuple[int, int, int]] = []
    for _ in range(config.memory):
        made: list[Contender] = []

        def first() -> Any:
            made.append(make())  # noqa: B023
            return lambda: made[0].step(*batch)  # noqa: B023

        live = live_bytes(first, task.mesh.device)
        transport = made[0].transport_bytes()
        seen.append((live.peak + transport, live.between + transport, transport))
        made.pop().close()
        release()
    names = "peak_bytes", "between_bytes", "transport_bytes"
    return dict(
        zip(names, map(int, over_ranks([min(each) for each in zip(*seen, strict=True)])), strict=True)
    )


def compare(config: BenchConfig, task: BenchTask, found: dict[str, Found]) -> list[float]:
    """Put the largest difference of a loss into `found`; gives the fp64 reference's losses."""
    say("the fp64 reference")
    steps = min(config.losses, config.warmup + config.rounds * config.steps)
    rows, vocab = task.mesh.data_size * config.rows, task.model.config.vocab
    reference = [0.0] * steps
    if rank() == 0:
        feed = (global_batch(step, config, rows, vocab) for step in range(steps))
        reference = reference_losses(
            task, [tuple(part.to(task.mesh.device) for part in each) for each in feed]
        )
    reference = over_ranks(reference)
    for each in found.values():
        pairs = zip(each["losses"], reference, strict=False)
        if each["losses"]:
            each["max_loss_difference"] = max(abs(a - b) for a, b in pairs)
    return reference


def profile(config: BenchConfig, task: BenchTask, folder: Path) -> list[str]:
    """Where a step of the first fnshard contender goes by kind of instruction, as rank 0 saw it."""
    name = next((name for name in config.contenders if name in FNSHARD), None)
    if name is None:
        return []
    say(f"profile of {name}")
    training, feed = Training(task, Plan(name)), cycle(list(batches(config, task, 4)))
    for _ in range(config.warmup):
        training.run(*next(feed))
    trace = folder / f"trace-{rank()}.json"
    with fs.profile.traced(training.step, trace):
        for _ in range(3):
            training.run(*next(feed))
    lowered = training.lowered(*next(feed))
    text = fs.profile.table(lowered, lowered.timeline(config.device), fs.profile.measured(trace, lowered))
    training.close()
    return ["", f"{name}, by kind of instruction:", *text.splitlines()]


# ------------------------------------------------------------------ the table


def row(config: BenchConfig, name: str, found: dict[str, Found]) -> Found:
    seconds = found[name]["seconds"]
    middle = median(seconds)
    out = {
        "step_ms": 1e3 * middle,
        "step_ms_quartiles": [1e3 * q for q in quartiles(seconds)[::2]],
        "tokens_per_s": config.tokens / middle,
        "ratios": {b: ratio(seconds, found[b]["seconds"]) for b in BASELINES if b in found and b != name},
        **found[name],
    }
    share = mfu_of(config, middle)
    return out | ({"mfu": share} if share is not None else {})


def model_flops(config: BenchConfig) -> float:
    """Of one rank's step, as `fnshard.analysis.hardware.mfu` counts them."""
    return config.model.flops_per_token(config.length) * config.tokens / config.ranks


def mfu_of(config: BenchConfig, seconds: float) -> float | None:
    """None on a CPU, and on a GPU whose data sheet is not known."""
    known = Hardware.of_gpu(torch.cuda.get_device_name()) if config.device == "cuda" else None
    peak = known and known.peak_flops[config.dtype.replace("fp", "f")]
    return mfu(model_flops(config), seconds, peak) if peak else None


def table(rows: dict[str, Found]) -> list[list[str]]:
    """One row a contender."""
    bases = [base for base in BASELINES if base in rows]
    head = ["contender", "step ms", "quartiles", *(f"/ {base}" for base in bases), "tokens/s"]
    out = [[*head, "peak MB", "between MB", "first step s", "loss diff", "MFU"]]
    for name, found in rows.items():
        low, high = found["step_ms_quartiles"]
        cells = [name, f"{found['step_ms']:.1f}", f"{low:.1f} {high:.1f}"]
        cells += [f"{found['ratios'][base]:.2f}" if base in found["ratios"] else "1" for base in bases]
        cells += [f"{found['tokens_per_s']:,.0f}"]
        cells += [
            f"{found[key] / 1e6:.0f}" if key in found else "-" for key in ("peak_bytes", "between_bytes")
        ]
        cells += [f"{found['first_step_s']:.1f}"]
        cells += [f"{found['max_loss_difference']:.1e}" if "max_loss_difference" in found else "-"]
        out.append([*cells, f"{found['mfu']:.1%}" if "mfu" in found else "-"])
    return out
