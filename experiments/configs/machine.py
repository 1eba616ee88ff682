"""A configuration on this machine: devices, ranks, directories, rows of a batch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.configs.train import AUTO, ConfigError, rows_of
from experiments.trackers.registry import check_installed
from fnshard.checkpoint.replicas import most_copies
from fnshard.errors import report

CPU_RANKS = 2  # where there is no accelerator and nobody says how many


def process_began() -> float:
    """Return when this process began, in seconds of `time.time`: before it had imported anything. Where the
    system does not say it, return the time now."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # from the machine's start to this process's
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - age


def place(config: Any, *, accelerators: Mapping[str, int], world: int | None = None, nodes: int = 1) -> Any:
    """`config` with `run.device`, `mesh.shard` and `precision` filled in from what there is.

    Args:
        accelerators: devices by type, `{"cuda": 8}`; empty on a machine without.
        world: ranks that already run (under `torchrun`); None: they are to be started here.
        nodes: machines like this one that the ranks are to be started on, equally many on each.

    Raises:
        ConfigError: a tracker that is not installed; more ranks than devices, axes that do not multiply to
            the ranks there are, or do not divide over the nodes, more replicas than these can hold, a batch
            that does not divide over ranks and micro-batches, a `run.disk_dir` that is not there.
    """
    check_installed(config.tracker)
    disk_dir = config.run.disk_dir
    if disk_dir is not None and not os.path.isdir(disk_dir):
        raise ConfigError(f"run.disk_dir={disk_dir!r} is no directory. Fix: make it, or name another.")
    device, mesh = device_of("run.device", config.run.device, accelerators), config.mesh
    fixed = mesh.replicate * mesh.expert * mesh.tensor * mesh.context
    there = world or nodes * (CPU_RANKS if device == "cpu" else accelerators[device])
    if mesh.shard is None:
        if there % fixed and (world or fixed < there):
            raise ConfigError(
                f"{_product(mesh)} does not divide {there} ranks. "
                "Fix: another mesh.replicate, or say mesh.shard too."
            )
        mesh = replace(mesh, shard=max(1, there // fixed))
    ranks = mesh.ranks
    product = f"{_product(mesh)} asks for {_count(ranks, 'rank')}"
    if world and ranks != world:
        raise ConfigError(f"{product}; {world} were started. Fix: torchrun --nproc-per-node {ranks}.")
    if device != "cpu" and not world and ranks > there:
        where = "this machine has" if nodes == 1 else f"{nodes} nodes have"
        has = _count(there, f"{device} device")
        raise ConfigError(f"{product}; {where} {has}. Fix: a smaller mesh, or run.device=cpu.")
    if ranks % nodes:
        raise ConfigError(
            f"{product}, which do not divide over {nodes} nodes. Fix: mesh.shard={max(1, there // fixed)}."
        )
    most = most_copies(nodes)
    if config.run.replicas > most and not world:
        raise ConfigError(
            f"run.replicas={config.run.replicas}: {_count(nodes, 'node')} can hold {most}. "
            f"Fix: run.replicas={most}, or more nodes."
        )
    _check_rows(config, mesh.data_ranks)
    sums = ranks > 1 or config.run.accumulate > 1 or config.strategy.name == AUTO
    return replace(
        config,
        mesh=mesh,
        run=replace(config.run, device=device),
        precision=config.precision.on(device, sums),
    )


def device_of(key: str, asked: str, accelerators: Mapping[str, int]) -> str:
    """Return the type of device that a key asks for: "auto" is the accelerator, where there is one.

    Raises:
        ConfigError: this machine has none of it.
    """
    device = next(iter(accelerators), "cpu") if asked == AUTO else asked
    if device != "cpu" and device not in accelerators:
        has = ", ".join(["cpu", *accelerators])
        raise ConfigError(f"{key}={asked}: this machine has {has}. Fix: {key}=auto.")
    return device


def _product(mesh: Any) -> str:
    """The axes that are named, and those that split."""
    sizes = {"replicate": mesh.replicate, "shard": mesh.shard}
    split = {name: getattr(mesh, name) for name in ("expert", "tensor", "context")}
    sizes |= {name: size for name, size in split.items() if size > 1}
    return " times ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size is not None)


def _check_rows(config: Any, ranks: int) -> None:
    """Rows divide over `ranks`, those that take other rows."""
    split = config.mesh.ranks > ranks
    over = _count(ranks, "rank") + " that take other rows" * split
    micro = f" times run.accumulate={config.run.accumulate}" if config.run.accumulate > 1 else ""
    parts = {"rows": (ranks * config.run.accumulate, over + micro), "held_out_rows": (ranks, over)}
    wrong, fixes = [], []
    for name, (divisor, shown) in parts.items():
        rows = rows_of(config.data)[name]
        if rows % divisor:
            wrong.append(f"data.{name}={rows} does not divide over {shown}.")
            fixes.append(f"data.{name}={math.ceil(rows / divisor) * divisor}")
    if wrong:
        raise ConfigError(report("the batch cannot be cut:", wrong, " ".join(fixes)))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
