"""One rank: `python -m experiments.checkpoint.rank job.json`, started by `experiments.checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.checkpoint import report, throughput, training
from experiments.checkpoint.job import CheckpointJob, world
from experiments.data.files import write_json
from experiments.ranks import job_values
from fnshard.launcher.local import run_rank

PARTS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[int, dict[str, Any]], str]]] = {
    "throughput": (throughput.measure, report.throughput),
    "async": (training.measure, report.training),
}


def main(job: CheckpointJob, out: Path) -> None:
    """Measure; rank 0 writes `checkpoint-<ranks>.json` into `out` and prints the tables."""
    torch.set_num_threads(1)
    mesh, load = world(), os.getloadavg()[0]
    found: dict[str, Any] = {"ranks": mesh.size, "torch": torch.__version__}
    for name in PARTS if job.part == "both" else (job.part,):
        measure, tell = PARTS[name]
        found[name] = measure(job, mesh)
        if mesh.rank == 0:
            print(f"\n{tell(mesh.size, found[name])}", flush=True)
    found["load_average"] = [load, os.getloadavg()[0]]
    if mesh.rank == 0:
        print(f"load average {found['load_average'][0]:.1f} to {found['load_average'][1]:.1f}", flush=True)
        write_json(out / f"checkpoint-{mesh.size}.json", found)


if __name__ == "__main__":
    values = job_values()
    run_rank(lambda: main(CheckpointJob(**values["job"]), Path(values["out"])), device_type="cpu")
