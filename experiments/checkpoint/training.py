"""What `save_async` costs a training step: windows of steps, one with a save and one without, in turn."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fnshard as fs
from experiments.bench.measure import largest
from experiments.checkpoint.job import CheckpointJob, batch, nbytes, training
from experiments.checkpoint.throughput import barrier

WARMUP = 3
KINDS = ("none", "async", "sync")
NOTED = ("wall", "cpu", "inside", "waited")  # inside of save and save_async; at the end of a window


def measure(job: CheckpointJob, mesh: fs.Mesh) -> dict[str, Any]:
    """Seconds of the slowest rank, and CPU seconds of all ranks, of windows of `job.steps` steps: without a
    save, with `save_async` every `job.every` steps, with `save` there. What is not written when a window ends
    is waited for within it."""
    step, state = training(job, mesh)
    feed = [batch(job, mesh, number) for number in range(8)]
    order, folder = random.Random(job.seed), Path(job.folder)
    found: dict[str, dict[str, list[float]]] = {kind: {n: [] for n in NOTED} for kind in KINDS}
    for _ in range(WARMUP):
        state, _ = step(state, *feed[0])
    for number in range(-1, job.rounds):  # the first round warms up
        for kind in order.sample(KINDS, len(KINDS)):
            barrier(mesh)
            wall, cpu, inside = time.perf_counter(), time.process_time(), 0.0
            for place in range(job.steps):
                state, metrics = step(state, *feed[place % len(feed)])
                float(metrics["loss"])
                if place % job.every == 0 and kind != "none":
                    began = time.perf_counter()
                    save = fs.checkpoint.save_async if kind == "async" else fs.checkpoint.save
                    save(folder / f"training-{place}", state)
                    inside += time.perf_counter() - began
            began = time.perf_counter()
            fs.checkpoint.wait()
            now = time.perf_counter()
            seconds = (now - wall, time.process_time() - cpu, inside, now - began)
            if number >= 0:
                for name, each in zip(NOTED, seconds, strict=True):
                    found[kind][name].append(each)
            barrier(mesh)
            if mesh.rank == 0:
                for path in folder.glob("training-*"):
                    shutil.rmtree(path)
    gathered = {
        kind: {name: (total if name == "cpu" else largest)(each) for name, each in by_name.items()}
        for kind, by_name in found.items()
    }
    saves = len(range(0, job.steps, job.every))
    facts = {"bytes": nbytes(step, state), "steps": job.steps, "every": job.every, "saves": saves}
    return facts | {"windows": gathered}


def total(numbers: list[float]) -> list[float]:
    """Over all ranks, entry by entry."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()
