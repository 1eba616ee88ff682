"""Ranks of a case: processes that run it together. `python -m experiments.bench.ranks job.json` is one."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments import python_path
from experiments.bench.cases import CASES
from experiments.bench.config import BenchConfig
from experiments.bench.measure import show
from experiments.data.files import write_json
from fnshard.launcher.local import launch, run_rank
from fnshard.mesh.process_group import make_group


def job_file(config: BenchConfig, folder: Path) -> Path:
    """What a rank reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    write_json(path, {"config": dataclasses.asdict(config), "folder": str(folder)})
    return path


def config_of(values: dict[str, Any]) -> BenchConfig:
    """The configuration from its JSON."""
    return BenchConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def start(config: BenchConfig, folder: Path) -> None:
    """Run the case on `config.ranks` new processes; their logs are in `folder/ranks`.

    Raises:
        LaunchError: a rank failed.
    """
    threads = {"OMP_NUM_THREADS": "1"} if config.device == "cpu" else {}
    command = [sys.executable, "-u", "-m", "experiments.bench.ranks", str(job_file(config, folder))]
    env = {"PYTHONPATH": python_path(), **threads}
    launch(command, ranks=config.ranks, logs=folder / "ranks", env=env)


def join(config: BenchConfig) -> None:
    """A process group, which DDP and FSDP2 want even in a world of one."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(0)
    if not dist.is_initialized():
        make_group(config.device, dist.HashStore(), 0, 1, timedelta(seconds=config.timeout_s))


def work(config: BenchConfig, folder: Path) -> None:
    join(config)
    show(config, folder, CASES[config.case].run)


if __name__ == "__main__":
    values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = config_of(values["config"])
    run_rank(
        lambda: work(config, Path(values["folder"])), device_type=config.device, timeout_s=config.timeout_s
    )
