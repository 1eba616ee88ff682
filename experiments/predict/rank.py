"""One rank of `experiments.predict`: rounds of one benchmark of the machine and one step of every plan."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fnshard as fs
from experiments.predict.plans import PLANS, Trained
from experiments.predict.report import write
from experiments.ranks import job_values
from fnshard.analysis.timeline import Timeline
from fnshard.launcher.local import run_rank

WARMUP = 3


CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def main(folder: str, rounds: int, backend: str, clock: str, names: list[str]) -> None:
    """Measure, predict, compare; rank 0 writes `folder/predict.json` and the pictures.

    Micro-benchmarks and steps take turns, so that both see the machine in the same moods; a plan's
    prediction is the median over the rounds, as its time is.
    """
    torch.set_num_threads(1)
    mesh = fs.make_mesh(shard=-1, device="cpu")
    plans = [p for p in PLANS if not names or p.name in names]
    load = os.getloadavg()[0]
    trained = []
    for plan in plans:
        _say(mesh, f"first steps of {plan.name}")
        trained.append(Trained(plan, mesh, backend))
        for _ in range(WARMUP):
            trained[-1].run()
    measured: list[list[float]] = [[] for _ in plans]
    predicted: list[list[Timeline]] = [[] for _ in plans]
    order = random.Random(0)
    hardware: list[fs.Hardware] = []
    for number in range(rounds):
        _say(mesh, f"round {number + 1} of {rounds}")
        hardware.append(fs.Hardware.measure(mesh, CLOCKS[clock]))
        for place in order.sample(range(len(plans)), len(plans)):
            predicted[place].append(trained[place].lowered.timeline(hardware[-1]))
            measured[place].append(_seconds(mesh, trained[place], CLOCKS[clock]))
    if mesh.rank == 0:
        found = {
            "ranks": mesh.size,
            "rounds": rounds,
            "clock": clock,
            "backend": backend,
            "load_average": [load, os.getloadavg()[0]],
            "hardware": hardware[-1].as_dict(),
            "plans": [
                _entry(plan.name, seconds, timelines)
                for plan, seconds, timelines in zip(plans, measured, predicted, strict=True)
            ],
        }
        write(found, [t.lowered.timeline(hardware[-1]) for t in trained], Path(folder))


def _seconds(mesh: fs.Mesh, trained: Trained, clock: Callable[[], float]) -> float:
    """Of one step from a common start, of the rank that takes longest."""
    if mesh.size > 1:
        dist.barrier()
    began = clock()
    trained.run()
    seconds = torch.tensor(clock() - began, dtype=torch.float64)
    if mesh.size > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _entry(name: str, seconds: list[float], timelines: list[Timeline]) -> dict[str, Any]:
    middle = statistics.median([t.step_seconds for t in timelines])
    return {
        "plan": name,
        "measured_ms": 1e3 * statistics.median(seconds),
        "predicted_ms": 1e3 * middle,
        "all_measured_ms": [1e3 * s for s in seconds],
        "all_predicted_ms": [1e3 * t.step_seconds for t in timelines],
        "busy_ms": {n: 1e3 * s for n, s in timelines[-1].busy_seconds.items()},
        "tflop": timelines[-1].hardware_flops / 1e12,
        "mfu": timelines[-1].mfu,
    }


def _say(mesh: fs.Mesh, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    run_rank(lambda: main(**job_values()), device_type="cpu")
