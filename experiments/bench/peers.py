"""The case `peers`: compare fnshard with what torch ships, in one launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.bench.config import TORCH, BenchConfig
from experiments.bench.contenders import (
    CONTENDERS,
    Batch,
    BenchTask,
    Contender,
    Training,
    batches,
    global_batches,
    make_task,
    reference_losses,
    repeat_step,
)
from experiments.bench.measure import (
    Result,
    fresh_cache,
    interleave,
    log_live_bytes,
    quartiles,
    rank,
    ratio,
    reduce_over_ranks,
    release,
    say,
)
from fnshard.analysis.hardware import Hardware, mfu

Found = dict[str, Any]
Maker = Callable[[BenchTask], Contender | Training]
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
    task = make_task(config)
    found: dict[str, Found] = {}
    groups = [config.contenders] if config.device == "cpu" else [(name,) for name in config.contenders]
    for group in groups:
        found |= race(task, group)
    if config.memory and config.device == "cpu":
        for name in config.contenders:
            say(f"memory of {name}")
            found[name] |= memory_of(task, CONTENDERS[name], config.memory)
    reference = compare(task, found) if config.losses else []
    rows = {name: row(config, name, found) for name in config.contenders}
    values = {"parameters": config.model.parameters, "contenders": rows, "reference_losses": reference}
    return Result(table(rows), NOTES, values)


# ------------------------------------------------------------------ time


def race(task: BenchTask, names: Sequence[str]) -> dict[str, Found]:
    """Time contenders in interleaved rounds, while all of them exist. On a GPU also count their bytes."""
    config, on_gpu = task.config, task.config.device == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with start_contenders({name: (task, CONTENDERS[name]) for name in names}, fresh_cache) as entries:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        say(f"{config.rounds} rounds of {', '.join(names)}")
        options = {"seed": config.seed, "steps": config.steps, "device": config.device}
        seconds = interleave({name: each.step for name, each in entries.items()}, config.rounds, **options)
        found = {}
        for name, each in entries.items():
            losses = [mean(loss) for loss in each.losses] if each.contender.trains else []
            found[name] = {"first_step_s": each.first_step_s, "seconds": seconds[name], "losses": losses}
            if on_gpu:
                found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
                found[name]["between_bytes"] = torch.cuda.memory_allocated() - before
                found[name]["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


@dataclass
class Entry:
    """A contender that has run its first steps.

    Args:
        losses: the losses of all steps, as tensors, since a number would have to be waited for.
    """

    contender: Contender | Training
    batches: Sequence[Batch]
    first_step_s: float = 0.0
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._run = repeat_step(self.contender, self.batches)

    def step(self) -> None:
        self.losses.append(self._run())


@contextmanager
def start_contenders(
    makers: Mapping[str, tuple[BenchTask, Maker]], cache: Callable[[], Any] = nullcontext
) -> Iterator[dict[str, Entry]]:
    """Make contenders and run their first steps, and close them afterwards.

    Args:
        cache: makes a context for each one's first step.
    """
    entries: dict[str, Entry] = {}
    try:
        for name, (task, make) in makers.items():
            say(f"first step of {name}")
            with cache():
                config = task.config  # the same for all tasks
                feed = list(batches(task, config.warmup + config.rounds * config.steps))
                began = time.perf_counter()
                entries[name] = Entry(make(task), feed)
                entries[name].step()
                (entries[name].first_step_s,) = reduce_over_ranks([time.perf_counter() - began])
        # If a contender has changed something in the process that Dynamo guards, the others compile again in
        # these steps, and not in timed ones.
        for _ in range(config.warmup - 1):
            for entry in entries.values():
                entry.step()
        yield entries
    finally:
        while entries:
            entries.popitem()[1].contender.close()
        release()


def mean(loss: Tensor) -> float:
    """Return the mean of all ranks' losses."""
    total, count = reduce_over_ranks([loss.double().item(), 1.0], torch.distributed.ReduceOp.SUM)
    return total / count


# ------------------------------------------------------------------ memory, losses


def memory_of(task: BenchTask, make: Maker, times: int) -> Found:
    """Count the bytes of the rank that holds most. Slots in shared memory are added to both numbers."""
    passes: list[tuple[int, int, int]] = []
    feed = list(batches(task, 1))
    contenders: list[Contender | Training] = []

    def start() -> Callable[[], Any]:
        contenders.append(make(task))
        return repeat_step(contenders[-1], feed)

    for _ in range(times):
        live = log_live_bytes(start, task.mesh.device)
        transport = contenders[-1].transport_bytes()
        passes.append((live.peak + transport, live.between + transport, transport))
        contenders.pop().close()
        release()
    least = reduce_over_ranks([min(each) for each in zip(*passes, strict=True)])
    return dict(zip(("peak_bytes", "between_bytes", "transport_bytes"), map(int, least), strict=True))


def compare(task: BenchTask, found: dict[str, Found]) -> list[float]:
    """Put the largest difference of a loss into `found`, and return the losses of the fp64 reference."""
    # The first rank trains the reference, and all get its losses as the largest of every rank's numbers.
    say("the fp64 reference")
    steps = min(task.config.losses, task.config.warmup + task.config.rounds * task.config.steps)
    reference = reference_losses(task, global_batches(task, steps)) if rank() == 0 else [0.0] * steps
    reference = reduce_over_ranks(reference)
    for each in found.values():
        differences = [abs(a - b) for a, b in zip(each["losses"], reference, strict=False)]
        if differences:
            each["max_loss_difference"] = max(differences)
    return reference


# ------------------------------------------------------------------ the table


def row(config: BenchConfig, name: str, found: dict[str, Found]) -> Found:
    """Return the numbers of a contender's row."""
    seconds = found[name]["seconds"]
    middle = median(seconds)
    low, _, high = quartiles(seconds)
    share = mfu_of(config, middle)
    return {
        "step_ms": 1e3 * middle,
        "step_ms_quartiles": [1e3 * low, 1e3 * high],
        "tokens_per_s": config.tokens / middle,
        "ratios": {b: ratio(seconds, found[b]["seconds"]) for b in TORCH if b in found and b != name},
        **found[name],
        **({} if share is None else {"mfu": share}),
    }


def model_flops(config: BenchConfig) -> float:
    """Count the FLOPs of one rank's step as `fnshard.analysis.hardware.mfu` does."""
    return config.model.flops_per_token(config.length) * config.tokens / config.ranks


def mfu_of(config: BenchConfig, seconds: float) -> float | None:
    """Compute the share of the device's peak, which is None on a CPU and on a GPU of unknown data sheet."""
    hardware = Hardware.of_gpu(torch.cuda.get_device_name()) if config.device == "cuda" else None
    if hardware is None:
        return None
    peak = hardware.peak_flops[config.dtype.replace("fp", "f")]
    return mfu(model_flops(config), seconds, peak) if peak else None


def table(rows: dict[str, Found]) -> list[list[str]]:
    """Return a table of one row for each contender."""
    bases = [base for base in TORCH if base in rows]
    # The last columns: the key of a value, its format and a factor.
    last_columns = {
        "tokens/s": ("tokens_per_s", "{:,.0f}", 1), "peak MB": ("peak_bytes", "{:.0f}", 1e-6),
        "between MB": ("between_bytes", "{:.0f}", 1e-6), "first step s": ("first_step_s", "{:.1f}", 1),
        "loss diff": ("max_loss_difference", "{:.1e}", 1), "MFU": ("mfu", "{:.1%}", 1),
    }  # fmt: skip
    head = ["contender", "step ms", "quartiles", *(f"/ {base}" for base in bases), *last_columns]
    out = [head]
    for name, found in rows.items():
        low, high = found["step_ms_quartiles"]
        cells = [name, f"{found['step_ms']:.1f}", f"{low:.1f} {high:.1f}"]
        cells += [f"{found['ratios'].get(base, 1):.2f}" for base in bases]
        for key, style, factor in last_columns.values():
            cells.append(style.format(found[key] * factor) if key in found else "-")
        out.append(cells)
    return out
