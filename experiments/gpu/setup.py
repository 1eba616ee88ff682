"""The settings of all parts: device, model, batch; and a training made of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fnshard as fs
from experiments.bench.config import BenchConfig, complete
from experiments.bench.contenders import BenchTask, sharded
from experiments.bench.measure import batches, make_task
from fnshard.mesh.process_group import make_group

PRESET = "full_shard"


@dataclass(frozen=True)
class GpuSetup:
    """One process on one device.

    Args:
        device: "cuda" or "cpu".
        size: a file of `conf/model`.
        rows, length: of the batch.
        dtype: of compute; on a GPU parameters are stored in it, beside an fp32 master.
        backend: of fnshard's kernels.
        rounds, steps: samples of a contender, and steps of a sample.
    """

    device: str = "cuda"
    size: str = "1b"
    rows: int = 2
    length: int = 4096
    dtype: str = "bf16"
    backend: str = "inductor"
    rounds: int = 5
    steps: int = 10

    def bench(self) -> BenchConfig:
        return complete(BenchConfig(**vars(self), ranks=1))

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def join(device: str) -> None:
    """A process group of one, which DDP and FSDP2 want."""
    if device == "cuda":
        torch.cuda.set_device(0)
    if not dist.is_initialized():
        make_group(device, dist.HashStore(), 0, 1, timedelta(seconds=120))


class GpuTraining:
    """A step, its state, and batches on the device.

    Args:
        count: of batches, which come in turn.
        task: the model and its mesh, if they are there.
        options: as `contenders.sharded` takes them.
    """

    def __init__(self, setup: GpuSetup, count: int = 4, task: BenchTask | None = None, **options: Any):
        self.setup, config = setup, setup.bench()
        task = task or make_task(config)
        self.batches = list(batches(config, task, range(count)))
        self.step, self.state = sharded(task, PRESET, **options)
        self.number = 0

    def begin(self) -> None:
        _, leaves = fs.make_functional(make_task(self.setup.bench()).model)
        self.state, self.number = None, 0
        self.state = self.step.init({path: leaf.detach() for path, leaf in leaves.items()})

    def run(self) -> Tensor:
        batch = self.batches[self.number % len(self.batches)]
        self.state, metrics = self.step(self.state, *batch)
        self.number += 1
        return metrics["loss"]

    def seconds(self, samples: int = 5, steps: int = 1) -> float:
        """Of a step: the median of samples of several steps each."""
        return statistics.median(clocked(self.run, self.setup, steps) for _ in range(samples))

    def lowered(self) -> Any:
        return self.step.lower(self.state, *self.batches[0])


def clocked(run: Callable[[], Any], setup: GpuSetup, steps: int = 1) -> float:
    """Seconds of a call, the mean of several, all of which are done on the device."""
    setup.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        run()
    setup.synchronize()
    return (time.perf_counter() - began) / steps
