"""One rank of the memory experiments: `python -m experiments.memory.rank job.json`; times and bytes."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

import fnshard as fs
from experiments.bench.measure import largest, release
from experiments.bench.memory import live_bytes
from experiments.data.files import write_json
from experiments.memory.measured import MEASURED
from experiments.memory.plans import MemoryJob, MemoryPlan, RunningPlan, choose, start
from experiments.ranks import job_values
from fnshard.launcher.local import run_rank


def measure(job: MemoryJob, folder: Path) -> None:
    """Steps of all plans in turn, then the bytes of each by itself; rank 0 writes `measured.json`."""
    torch.set_num_threads(1)
    world = fs.make_mesh(shard=job.ranks, device="cpu")
    load = os.getloadavg()[0]
    seconds = race(job, world) if job.rounds else {p.name: [] for p in job.plans}
    found = {}
    for plan in job.plans:
        say(world, f"bytes of {plan.name}")
        found[plan.name] = {"seconds": seconds[plan.name], **watch(plan, job, world, folder)}
    if world.rank == 0:
        values = {
            "job": dataclasses.asdict(job),
            "parameters": job.model.parameters,
            "torch": torch.__version__,
            "load_average": [load, os.getloadavg()[0]],
            "plans": found,
        }
        write_json(folder / MEASURED, values)


def race(job: MemoryJob, world: fs.Mesh) -> dict[str, list[float]]:
    """Rounds of one step of each plan, in a new order every round; a step's time is the slowest rank's."""
    running: dict[str, RunningPlan] = {}
    for plan in job.plans:
        say(world, f"first steps of {plan.name}")
        running[plan.name] = start(plan, job, world, choose(plan, job, world))
        for _ in range(2):
            running[plan.name].step()
    order, seconds = random.Random(job.seed), {p.name: [] for p in job.plans}
    for number in range(job.rounds):
        say(world, f"round {number + 1} of {job.rounds}")
        for name in order.sample(list(running), len(running)):
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            running[name].step()
            seconds[name].append(time.perf_counter() - began)
    for each in running.values():
        each.close()
    running.clear()
    release()
    return {name: largest(values) for name, values in seconds.items()}


def watch(plan: MemoryPlan, job: MemoryJob, world: fs.Mesh, folder: Path) -> dict[str, Any]:
    """Live bytes of a plan's steps on the rank that holds most (transport slots added), and the ledger's."""
    made: list[RunningPlan] = []
    found = choose(plan, job, world)

    def make() -> Any:
        made.append(start(plan, job, world, found))
        return made[0].step

    live = live_bytes(make, world.device, job.steps)
    running = made[0]
    transport = running.transport_bytes()
    numbers = [float(n) for n in (live.peak + transport, live.between + transport, transport)]
    peak, between, slots = (int(n) for n in largest(numbers))
    out: dict[str, Any] = {"peak_bytes": peak, "between_bytes": between, "transport_bytes": slots}
    out["optimizer_device_bytes"] = running.optimizer_device_bytes()
    if running.lowered is not None:
        out["predicted"] = _short(running.lowered)
        if job.pictures and world.rank == 0:
            fs.plot.memory(running.lowered, folder / f"{_slug(plan.name)}.png")
    if found is not None:
        out |= {"budget_bytes": found.device_bytes, "fit": found.as_dict(), "fit_text": str(found)}
    running.close()
    made.clear()
    del running
    release()
    return out


def _short(lowered: Any) -> dict[str, Any]:
    """The ledger after compiling: what the generated kernels take, unless the backend is eager."""
    analysis = lowered.memory_analysis()
    values = analysis.as_dict()
    names = ("peak_bytes", "resident_bytes", "host_bytes", "disk_bytes", "kernels")
    return {**{n: values[n] for n in names}, "peak": values["peak"], "resident": values["resident"]}


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")


def say(world: fs.Mesh, text: str) -> None:
    if world.rank == 0:
        print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    values = job_values()
    job = TypeAdapter(MemoryJob).validate_python(values["job"])
    run_rank(lambda: measure(job, Path(values["folder"])), device_type="cpu", timeout_s=values["timeout_s"])
