"""The case `checkpoint`: saves and restores next to torch.distributed.checkpoint, and what a step pays."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import Plan, Training, batches, make_task
from experiments.bench.measure import Result, barrier, milliseconds, over_ranks, rank, say, timed
from experiments.tables import quartiles

NAMES = ("fnshard", "dcp")


def run(config: BenchConfig, folder: Path) -> Result:
    """Are saves and restores as fast as torch.distributed.checkpoint's, and what does a save cost a step?"""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    task = make_task(config)
    training, feed = Training(task, Plan()), cycle(list(batches(config, task, 8)))
    training.run(*next(feed))
    named = [tempfile.mkdtemp(dir=config.folder or folder) if rank() == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(named, src=0)
    place = Path(named[0])
    try:
        seconds = throughput(config, training, place)
        windows = {kind: [] for kind in ("none", "async", "sync")}
        for number in range(-1, config.rounds):  # the first round warms up
            for kind in random.Random(number).sample(list(windows), 3):
                taken = window(config, training, feed, place, kind)
                windows[kind] += [taken] if number >= 0 else []
    finally:
        barrier()
        if rank() == 0:
            shutil.rmtree(place)
    leaves = as_tensors(training, training.state)
    size = sum(t.numel() * t.element_size() for t in leaves.values()) / 1e6  # DTensors count the whole
    rows = [["", "fnshard", "the other", "ratio of pairs", "quartiles"]]
    for kind, each in seconds.items():
        low, middle, high = quartiles([b / a for a, b in zip(each["fnshard"], each["dcp"], strict=True)])
        rates = [f"{size / median(each[name]):.0f} MB/s" for name in NAMES]
        rows.append([f"{kind}: fnshard, DCP", *rates, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    for kind in ("async", "sync"):
        low, middle, high = quartiles([b / a for a, b in zip(windows["none"], windows[kind], strict=True)])
        shown = milliseconds(windows["none"]), milliseconds(windows[kind])
        rows.append(
            [
                f"{config.steps} steps, ms: alone, with {kind} saves",
                *shown,
                f"{middle:.2f}",
                f"{low:.2f} to {high:.2f}",
            ]
        )
    note = f"{size:.0f} MB of state in {len(leaves)} leaves; a save every {config.every} steps"
    return Result(rows, ["", note], {"seconds": seconds, "windows": windows, "megabytes": size})


def throughput(config: BenchConfig, training: Training, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of the slowest rank of every save and restore; warm: from the page cache, just after the save;
    cold: after the kernel was asked to drop the files. The first round warms up, and compares."""
    step, state, tensors = training.step, training.state, as_tensors(training, training.state)
    saves = {
        "fnshard": lambda path: fs.checkpoint.save(path, state),
        "dcp": lambda path: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path)),
    }
    loads = {
        "fnshard": lambda path: as_tensors(training, fs.checkpoint.restore(path, step)),
        "dcp": lambda path: dcp_load(path, as_tensors(training, state, fresh=True)),
    }
    out = {kind: {name: [] for name in NAMES} for kind in ("save", "restore, warm", "restore, cold")}
    for number in range(-1, config.rounds):
        say(f"round {number + 1} of {config.rounds}")
        for kind, each in out.items():
            for name in random.Random(number).sample(NAMES, 2):
                if kind == "restore, cold":
                    evict(folder / name)
                got, seconds = synced((saves if kind == "save" else loads)[name], folder / name)
                if number >= 0:
                    each[name] += over_ranks([seconds])
                elif kind != "save":
                    compare(tensors, got)
        barrier()
        if rank() == 0:
            for name in NAMES:
                shutil.rmtree(folder / name)
    return out


def window(config: BenchConfig, training: Training, feed: Any, folder: Path, kind: str) -> float:
    """Seconds of so many steps, of which every `every`th saves; what is not written yet is waited for."""

    def steps() -> None:
        for number in range(config.steps):
            float(training.run(*next(feed)))
            if number % config.every == 0 and kind != "none":
                save = fs.checkpoint.save_async if kind == "async" else fs.checkpoint.save
                save(folder / f"step-{number}", training.state)
        fs.checkpoint.wait()

    (seconds,) = over_ranks([timed(steps)])
    barrier()
    if rank() == 0:
        for path in folder.glob("step-*"):
            shutil.rmtree(path)
    return seconds


def synced(work: Callable[[Path], Any], path: Path) -> tuple[Any, float]:
    """From a common start, with nothing left for the disk to do."""
    if rank() == 0:
        os.sync()
    barrier()
    began = time.perf_counter()
    return work(path), time.perf_counter() - began


def dcp_load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
    return tensors


def as_tensors(training: Training, state: Any, fresh: bool = False) -> dict[str, Tensor]:
    """The state as users of torch's checkpoints have it: DTensors; plain tensors in a process of one.

    Args:
        fresh: new tensors of the same shapes, instead of the state's own.
    """
    out: dict[str, Tensor] = {}
    for path, spec in training.step.specs.items():
        named = {f"params/{path}": (state.params[path], spec.storage)}
        named |= {f"{n}/{path}": (slot, spec.optimizer) for n, slot in state.opt_state.get(path, {}).items()}
        for name, (block, layout) in named.items():
            local, mesh = torch.empty_like(block) if fresh else block, training.step.mesh
            if mesh.size > 1:
                local = DTensor.from_local(
                    local, mesh.device_mesh, layout.to_placements(mesh), run_check=False
                )
            out[name] = local
    return out


def evict(path: Path) -> None:
    """Ask the kernel to drop what it keeps of a folder's files."""
    barrier()
    for file in path.iterdir() if rank() == 0 else ():
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    barrier()


def compare(saved: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Both hold the same bits, else nothing was measured."""
    for name, tensor in saved.items():
        a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, got[name]))
        if not torch.equal(a, b):
            raise AssertionError(f"{name} is not what was saved")
