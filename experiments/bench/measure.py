"""What one rank measures: rounds of interleaved steps, losses, memory, phases."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import (
    CONTENDERS,
    FNSHARD,
    BenchTask,
    Contender,
    global_batch,
    mean_over_ranks,
    rank_batch,
    reference_losses,
)
from experiments.bench.memory import live_bytes
from experiments.bench.phases import watched
from experiments.training.decoder import Decoder

Batch = tuple[Tensor, Tensor]
PHASE_STEPS = 10


@dataclass
class Track:
    contender: Contender
    number: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


def run(
    config: BenchConfig,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Everything that is asked for; the same plain values on every rank.

    Args:
        say: takes one line about what is being done.
        keep: takes this rank's own seconds of one contender, before a collective can lose them.
    """
    torch.set_num_threads(1 if config.device == "cpu" else torch.get_num_threads())
    task = make_task(config)
    out: dict[str, Any] = {name: {} for name in config.contenders}
    load = os.getloadavg()[0]
    # Interleaving needs all alive. A GPU drifts little, and is to hold one at a time.
    groups = [config.contenders] if config.device == "cpu" else [(name,) for name in config.contenders]
    for group in groups:
        for name, found in race(config, task, group, say, keep).items():
            out[name] |= found
    if config.memory and config.device == "cpu":
        for name in config.contenders:
            say(f"memory of {name}")
            out[name] |= memory(config, task, name)
    if config.phases and config.device == "cpu":
        for name in config.contenders:
            if name in FNSHARD:
                say(f"phases of {name}")
                out[name]["phases"] = phases(config, task, name)
    reference: list[float] = []
    if config.losses:
        say("the fp64 reference")
        reference = compare(config, task, out)
    return {
        "load_average": [load, os.getloadavg()[0]],
        "reference_losses": reference,
        "contenders": out,
    }


def make_task(config: BenchConfig) -> BenchTask:
    """The same initial parameters on every rank."""
    torch.manual_seed(config.seed)
    mesh = fs.make_mesh(shard=config.ranks // config.tensor, tensor=config.tensor, device=config.device)
    model = Decoder(config.model)
    dtypes = (config.compute_dtype, config.reduce_dtype)
    return BenchTask(
        model,
        mesh,
        *dtypes,
        config.lr,
        config.weight_decay,
        config.backend,
        config.store_dtype,
        config.update,
    )


def batches(config: BenchConfig, task: BenchTask, steps: range) -> Iterator[Batch]:
    sizes = config.rows, config.length, task.model.config.vocab
    for step in steps:
        yield tuple(part.to(task.mesh.device) for part in rank_batch(step, config.seed, task.mesh, *sizes))


# ------------------------------------------------------------------ time


def race(
    config: BenchConfig, task: BenchTask, names: Sequence[str], say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """First steps one after another, then rounds: one sample of each, in a new order every round.

    On a GPU, where one lives at a time, its bytes are read off the allocator on the way.
    """
    tracks: dict[str, Track] = {}
    feed = list(batches(config, task, range(config.warmup + config.rounds * config.steps)))
    before = _allocated(config)
    first: dict[str, float] = {}
    for name in names:
        say(f"first steps of {name}")
        with fresh_cache():
            began = time.perf_counter()
            tracks[name] = Track(CONTENDERS[name](task))
            one_step(tracks[name], feed, task)
            first[name] = time.perf_counter() - began
    # All have been made: where one of them did to the process what Dynamo guards, another compiles again
    # here, not in a timed step.
    for _ in range(config.warmup - 1):
        for name in names:
            one_step(tracks[name], feed, task)
    say(f"{config.rounds} rounds of {', '.join(names)}")
    if config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    order = random.Random(config.seed)
    for _ in range(config.rounds):
        for name in order.sample(list(names), len(names)):
            tracks[name].seconds.append(sample(tracks[name], feed, task, config.steps))
    after = _allocated(config)
    for name, track in tracks.items():
        keep({"contender": name, "first_step_s": first[name], "seconds": track.seconds})
    out = {}
    for name, track in tracks.items():
        out[name] = {
            "first_step_s": largest([first[name]])[0],
            "seconds": largest(track.seconds),
            **({"peak_bytes": after[0] - before[1], "between_bytes": after[1] - before[1]} if after else {}),
            "losses": [mean_over_ranks(loss) for loss in track.losses] if track.contender.trains else [],
        }
        track.contender.close()
    tracks.clear()
    release()
    return out


def _allocated(config: BenchConfig) -> tuple[int, int] | None:
    """Bytes at most and now; None on a CPU."""
    if config.device == "cpu":
        return None
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


def one_step(track: Track, feed: Sequence[Batch], task: BenchTask) -> float:
    return sample(track, feed, task, 1)


def sample(track: Track, feed: Sequence[Batch], task: BenchTask, steps: int) -> float:
    """Seconds of a step, the mean of the next few, from a common start; by CUDA's own events on a GPU."""
    coming = feed[track.number : track.number + steps]
    if task.mesh.size > 1:
        dist.barrier()
    if task.mesh.device_type == "cpu":
        began = time.perf_counter()
        track.losses += [track.contender.step(*batch) for batch in coming]
        seconds = time.perf_counter() - began
    else:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        track.losses += [track.contender.step(*batch) for batch in coming]
        end.record()
        end.synchronize()
        seconds = start.elapsed_time(end) / 1e3
    track.number += steps
    return seconds / steps


def largest(numbers: list[float]) -> list[float]:
    """Of all ranks, entry by entry."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


@contextmanager
def fresh_cache() -> Iterator[None]:
    """An empty Inductor cache, shared by the ranks, for what is compiled within."""
    named = [tempfile.mkdtemp(prefix="fnshard-bench-")]
    own = named[0]
    if dist.is_initialized():
        dist.broadcast_object_list(named, src=0)
    if named[0] != own:
        os.rmdir(own)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = named[0]
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.barrier()
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
        if named[0] == own:
            shutil.rmtree(own, ignore_errors=True)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------ memory, phases, losses


def memory(config: BenchConfig, task: BenchTask, name: str) -> dict[str, int]:
    """Of the rank that holds most; transport slots (shared memory) are added to both numbers."""
    (tokens, targets), *_ = batches(config, task, range(1))
    seen: list[tuple[int, int, int]] = []
    for _ in range(config.memory):
        contender: Contender | None = None

        def make() -> Callable[[], Any]:
            nonlocal contender
            contender = CONTENDERS[name](task)
            return lambda: contender.step(tokens, targets)

        live = live_bytes(make, task.mesh.device)
        transport = contender.transport_bytes()
        seen.append((live.peak + transport, live.between + transport, transport))
        contender.close()
        contender = None
        release()
    least = [float(min(column)) for column in zip(*seen, strict=True)]
    peak, between, transport = (int(n) for n in largest(least))
    return {"peak_bytes": peak, "between_bytes": between, "transport_bytes": transport}


def phases(config: BenchConfig, task: BenchTask, name: str) -> dict[str, Any]:
    """Milliseconds by instruction as rank 0 sees them, waits for its peers included."""
    with watched() as watch:
        contender = CONTENDERS[name](task)
        track, feed = Track(contender), list(batches(config, task, range(config.warmup + PHASE_STEPS)))
        for _ in range(config.warmup):
            one_step(track, feed, task)
        watch.clear()
        seconds = sum(one_step(track, feed, task) for _ in range(PHASE_STEPS))
    contender.close()
    release()
    return watch.summary(PHASE_STEPS, seconds)


def compare(config: BenchConfig, task: BenchTask, out: dict[str, Any]) -> list[float]:
    """Put the largest loss difference into `out`; gives the reference's losses."""
    steps = min(config.losses, config.warmup + config.rounds * config.steps)
    rows, vocab = task.mesh.data_size * config.rows, task.model.config.vocab
    losses = [torch.zeros(steps, dtype=torch.float64)]
    if task.mesh.rank == 0:
        feed = [global_batch(s, config.seed, rows, config.length, vocab) for s in range(steps)]
        feed = [tuple(part.to(task.mesh.device) for part in batch) for batch in feed]
        losses = [torch.tensor(reference_losses(task, feed), dtype=torch.float64)]
    if dist.is_initialized():
        dist.all_reduce(losses[0])
    reference = losses[0].tolist()
    for found in out.values():
        differences = [abs(a - b) for a, b in zip(found["losses"], reference, strict=False)]
        if differences:
            found["max_loss_difference"] = max(differences)
    return reference
