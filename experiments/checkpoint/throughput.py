"""Saves and restores in turn: fnshard's, and plain `torch.distributed.checkpoint` of the same blocks."""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

import fnshard as fs
from experiments.bench.measure import largest
from experiments.checkpoint.job import CheckpointJob, as_dtensors, nbytes, training
from fnshard.checkpoint.coordination import group_of
from fnshard.checkpoint.read_blocks import load_blocks
from fnshard.checkpoint.state_leaves import restore_targets, state_leaves

Seconds = dict[str, list[float]]


def measure(job: CheckpointJob, mesh: fs.Mesh) -> dict[str, Any]:
    """Seconds of the slowest rank of every save and restore, by contender.

    "new": into tensors that are made for it, as `fs.checkpoint.restore` does. "in place": into tensors that
    are there already, which leaves out the page faults of fresh memory. Warm: from the page cache, just after
    the save; cold: after the kernel was asked to drop the files.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    step, state = training(job, mesh)
    tensors = as_dtensors(step, state, mesh)
    saves, loads = contenders(step, state, tensors, mesh)
    out: dict[str, Seconds] = {}
    order, folder = random.Random(job.seed), Path(job.folder)
    for number in range(-1, job.rounds):  # the first round warms up, and compares
        note = _noting(out if number >= 0 else {})
        for name in order.sample(list(saves), len(saves)):
            note("save", name, timed(mesh, saves[name], folder / name)[0])
        for kind in ("warm", "cold"):
            for name, way in order.sample(list(loads), len(loads)):
                if kind == "cold":
                    evict(folder / name, mesh)
                seconds, got = timed(mesh, loads[name, way], folder / name)
                if number < 0:
                    compare(tensors, got)
                note(f"restore {kind}, {way}", name, seconds)
                del got
        barrier(mesh)
        if mesh.rank == 0:
            for name in saves:
                shutil.rmtree(folder / name)
    return {"bytes": nbytes(step, state), "leaves": len(tensors), "seconds": out}


Saves = dict[str, Callable[[Path], Any]]
Loads = dict[tuple[str, str], Callable[[Path], dict[str, Tensor]]]


def contenders(step: Any, state: Any, tensors: dict[str, Tensor], mesh: fs.Mesh) -> tuple[Saves, Loads]:
    """Who saves, and who restores how; all of them the same blocks."""
    own = state.copy()
    into = {"fnshard": as_dtensors(step, own, mesh), "dcp": as_dtensors(step, state, mesh, fresh=True)}
    named = step.resolved.stored

    def dcp_load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
        return tensors

    def fnshard_load(path: Path) -> dict[str, Tensor]:
        found = fs.checkpoint.manifest(path)
        filled = restore_targets(state_leaves(own, named, mesh), found.leaves, set(named))
        load_blocks(path, found, filled, mesh, group_of(mesh, None))
        return into["fnshard"]

    saves = {
        "fnshard": lambda path: fs.checkpoint.save(path, state),
        "dcp": lambda path: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path)),
    }
    loads = {
        ("fnshard", "new"): lambda path: as_dtensors(step, fs.checkpoint.restore(path, step), mesh),
        ("fnshard", "in place"): fnshard_load,
        ("dcp", "new"): lambda path: dcp_load(path, as_dtensors(step, state, mesh, fresh=True)),
        ("dcp", "in place"): lambda path: dcp_load(path, into["dcp"]),
    }
    return saves, loads


def _noting(out: dict[str, Seconds]) -> Callable[[str, str, float], None]:
    return lambda kind, name, seconds: out.setdefault(kind, {}).setdefault(name, []).append(seconds)


def timed(mesh: fs.Mesh, work: Callable[[Path], Any], path: Path) -> tuple[float, Any]:
    """Seconds of the slowest rank from a common start, with nothing left for the disk to do; the result."""
    if mesh.rank == 0:
        os.sync()
    barrier(mesh)
    began = time.perf_counter()
    got = work(path)
    return largest([time.perf_counter() - began])[0], got


def barrier(mesh: fs.Mesh) -> None:
    if mesh.size > 1:
        dist.barrier()


def evict(path: Path, mesh: fs.Mesh) -> None:
    """Ask the kernel to forget what it holds of a directory's files."""
    barrier(mesh)
    if mesh.rank == 0:
        for file in path.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    barrier(mesh)


def compare(saved: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Both hold the same bits, else nothing was measured."""
    for name, tensor in saved.items():
        if not torch.equal(_local(tensor), _local(got[name])):
            raise AssertionError(f"{name} is not what was saved")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
