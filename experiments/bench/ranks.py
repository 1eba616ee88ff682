"""Ranks of a case: processes that run it together.

`python -m experiments.bench.ranks FOLDER key=value...` is one of them.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from experiments import python_path
from experiments.bench.config import BenchConfig, read
from experiments.bench.measure import barrier, show
from fnshard.compiler.frontend.contexts import CUBLAS
from fnshard.launcher.local import launch, run_rank
from fnshard.mesh.process_group import make_group

TIMEOUT_S = 600.0  # the seconds after which a silent rank is an error


def environment(config: BenchConfig) -> dict[str, str]:
    """Return the environment of the processes of a case."""
    threads = {"OMP_NUM_THREADS": "1"} if config.device == "cpu" else {}
    return {"PYTHONPATH": python_path(), **CUBLAS, **threads}


def start(config: BenchConfig, folder: Path) -> None:
    """Run the case on `config.ranks` new processes, whose logs are in `folder/ranks`.

    Raises:
        LaunchError: a rank failed.
    """
    command = [sys.executable, "-u", "-m", "experiments.bench.ranks", str(folder), *config.words()]
    launch(command, ranks=config.ranks, logs=folder / "ranks", env=environment(config))


def join(config: BenchConfig, group: bool = True) -> None:
    """Set up the device and, with `group`, a process group, which DDP and FSDP2 need even on one rank."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(0)
    if group and not dist.is_initialized():
        make_group(config.device, dist.HashStore(), 0, 1, timedelta(seconds=TIMEOUT_S))


def main(folder: Path, config: BenchConfig) -> None:
    """Join the other ranks, and run the case. If it fails, the process ends with status 1."""
    join(config)
    result = show(config, folder)
    barrier()  # the others stay until the first rank has shown it
    if result.failed:
        sys.exit(1)


if __name__ == "__main__":
    config = read(sys.argv[2:])
    run_rank(lambda: main(Path(sys.argv[1]), config), device_type=config.device, timeout_s=TIMEOUT_S)
