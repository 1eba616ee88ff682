"""The case `checkpoint`: saves and restores next to torch.distributed.checkpoint, and what a step pays."""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import Setup, Training, batches, make_task, repeat_step
from experiments.bench.measure import (
    Result,
    barrier,
    make_shared_folder,
    quartiles,
    rank,
    reduce_over_ranks,
    say,
    time_work,
)

OURS, OTHER = "fnshard", "DCP"
KINDS = ("save", "restore")  # a restore reads from the page cache
SAVES = {"alone": None, "with async saves": fs.checkpoint.save_async, "with sync saves": fs.checkpoint.save}


def run(config: BenchConfig, folder: Path) -> Result:
    """Are saves and restores as fast as torch.distributed.checkpoint's, and what does a save cost a step?"""
    # Time saves and restores, and then windows of steps without and with saves.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    task = make_task(config)
    training = Training(task, Setup())
    step = repeat_step(training, batches(task, 8))
    step()
    with make_shared_folder(config.folder or folder) as place:
        seconds = measure_throughput(config, training, place)
        windows: dict[str, list[float]] = {kind: [] for kind in SAVES}
        for number in range(-1, config.rounds):  # the first round warms up
            for kind in random.Random(number).sample(list(SAVES), len(SAVES)):
                work = partial(run_window, config, training, step, place, SAVES[kind])
                seconds_of_window = reduce_over_ranks([time_work(work)])
                if number >= 0:
                    windows[kind] += seconds_of_window
                clear_folder(place)

    # A line for saves, for restores, and for each kind of window.
    leaves = as_tensors(training, training.state)
    megabytes = sum(t.numel() * t.element_size() for t in leaves.values()) / 1e6  # DTensors count the whole
    rows = [["", "the first", "the second", "ratio of pairs", "quartiles"]]
    for kind, each in seconds.items():
        shown = [f"{megabytes / median(each[name]):.0f} MB/s" for name in (OURS, OTHER)]
        rows.append([f"{kind}: {OURS}, {OTHER}", *shown, *compare_pairs(each[OURS], each[OTHER])])
    alone, *others = windows
    for kind in others:
        shown = [f"{1e3 * median(windows[name]):.2f}" for name in (alone, kind)]
        label = f"{config.steps} steps, ms: {alone}, {kind}"
        rows.append([label, *shown, *compare_pairs(windows[alone], windows[kind])])
    note = f"{megabytes:.0f} MB of state in {len(leaves)} leaves; a save every {config.every} steps"
    return Result(rows, ["", note], {"seconds": seconds, "windows": windows, "megabytes": megabytes})


def compare_pairs(first: Sequence[float], second: Sequence[float]) -> tuple[str, str]:
    """Return the median and the quartiles over rounds of the second's times by the first's."""
    low, middle, high = quartiles([b / a for a, b in zip(first, second, strict=True)])
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def measure_throughput(
    config: BenchConfig, training: Training, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Measure the seconds that the slowest rank needs for every save and restore.

    The first round warms up, and compares what was restored with what was saved.
    """
    state, tensors = training.state, as_tensors(training, training.state)

    def load_dcp(path: Path) -> dict[str, Tensor]:
        fresh = as_tensors(training, state, fresh=True)
        dcp.load(fresh, storage_reader=dcp.FileSystemReader(path))
        return fresh

    # Each work is a function of the path.
    saves = {
        OURS: lambda path: fs.checkpoint.save(path, state),
        OTHER: lambda path: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path)),
    }
    loads = {
        OURS: lambda path: as_tensors(training, fs.checkpoint.restore(path, training.step)),
        OTHER: load_dcp,
    }
    out = {kind: {name: [] for name in (OURS, OTHER)} for kind in KINDS}
    for number in range(-1, config.rounds):
        say(f"round {number + 1} of {config.rounds}")
        for kind, each in out.items():
            for name in random.Random(number).sample((OURS, OTHER), 2):
                work = saves[name] if kind == "save" else loads[name]
                result, seconds = time_alone(work, folder / name)
                if number >= 0:
                    each[name] += reduce_over_ranks([seconds])
                elif kind == "restore":
                    compare(tensors, result)
        clear_folder(folder)
    return out


def run_window(
    config: BenchConfig, training: Training, step: Callable[[], Tensor], folder: Path, save: Callable | None
) -> None:
    """Run `config.steps` steps, every `config.every`th of which saves, and wait for all saves."""
    for number in range(config.steps):
        float(step())
        if number % config.every == 0 and save is not None:
            save(folder / f"step-{number}", training.state)
    fs.checkpoint.wait()


def time_alone(work: Callable[[Path], Any], path: Path) -> tuple[Any, float]:
    """Run and time a work from a common start of all ranks, when the disk is idle."""
    if rank() == 0:
        os.sync()
    barrier()
    began = time.perf_counter()
    return work(path), time.perf_counter() - began


def as_tensors(training: Training, state: Any, fresh: bool = False) -> dict[str, Tensor]:
    """Return the state as users of torch's checkpoints have it: DTensors, or plain tensors on a single rank.

    Args:
        fresh: whether to make new tensors of the same shapes, instead of the state's own.
    """
    out: dict[str, Tensor] = {}
    mesh = training.step.mesh
    for path, spec in training.step.specs.items():
        named = {f"params/{path}": (state.params[path], spec.storage)}
        named |= {f"{n}/{path}": (slot, spec.optimizer) for n, slot in state.opt_state.get(path, {}).items()}
        for name, (block, layout) in named.items():
            out[name] = torch.empty_like(block) if fresh else block
            if mesh.size > 1:
                placed = layout.to_placements(mesh)
                out[name] = DTensor.from_local(out[name], mesh.device_mesh, placed, run_check=False)
    return out


def clear_folder(folder: Path) -> None:
    """Remove the content of a folder when all ranks are done with it."""
    barrier()
    for path in folder.iterdir() if rank() == 0 else ():
        shutil.rmtree(path)


def compare(saved: Mapping[str, Tensor], restored: Mapping[str, Tensor]) -> None:
    """Check that both hold the same bits, since times of wrong restores would mean nothing.

    Raises:
        AssertionError: a tensor is not what was saved.
    """
    for name, tensor in saved.items():
        a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, restored[name]))
        if not torch.equal(a, b):
            raise AssertionError(f"{name} is not what was saved")
