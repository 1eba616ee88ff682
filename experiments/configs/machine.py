"""A configuration on this machine: devices, ranks, directories, and a batch that can be cut."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.configs.train import ConfigError
from experiments.trackers.registry import check_installed
from fnshard.errors import report

CPU_RANKS = 2  # where there is no accelerator and nobody says how many


def place(config: Any, *, accelerators: Mapping[str, int], world: int | None = None, nodes: int = 1) -> Any:
    """`config` with `run.device` and `mesh.shard` filled in from what there is.

    Args:
        accelerators: devices by type, `{"cuda": 8}`; empty on a machine without.
        world: ranks that already run (under `torchrun`); None: they are to be started here.
        nodes: machines like this one that the ranks are to be started on, equally many on each.

    Raises:
        ConfigError: a tracker that is not installed; more ranks than devices, axes that do not multiply to
            the ranks there are, or do not divide over the machines, a batch that does not divide over ranks
            and micro-batches, a `run.disk_dir` that is not there.
    """
    check_installed(config.tracker)
    device = config.run.device
    disk_dir = config.run.disk_dir
    if disk_dir is not None and not os.path.isdir(disk_dir):
        raise ConfigError(f"run.disk_dir={disk_dir!r} is no directory. Fix: make it, or name another.")
    if device == "auto":
        device = next(iter(accelerators), "cpu")
    if device != "cpu" and device not in accelerators:
        has = ", ".join(["cpu", *accelerators])
        raise ConfigError(f"run.device={device}: this machine has {has}. Fix: run.device=auto.")
    replicate, shard = config.mesh.replicate, config.mesh.shard
    there = world or nodes * (CPU_RANKS if device == "cpu" else accelerators[device])
    if shard is None:
        if there % replicate and (world or replicate < there):
            raise ConfigError(
                f"mesh.replicate={replicate} does not divide {there} ranks. "
                "Fix: another mesh.replicate, or say mesh.shard too."
            )
        shard = max(1, there // replicate)
    ranks = replicate * shard
    asked = f"mesh.replicate={replicate} times mesh.shard={shard} asks for {_count(ranks, 'rank')}"
    if world and ranks != world:
        raise ConfigError(f"{asked}; {world} were started. Fix: torchrun --nproc-per-node {ranks}.")
    if device != "cpu" and not world and ranks > nodes * accelerators[device]:
        has = _count(nodes * accelerators[device], f"{device} device")
        where = "this machine has" if nodes == 1 else f"{nodes} nodes have"
        raise ConfigError(f"{asked}; {where} {has}. Fix: a smaller mesh, or run.device=cpu.")
    if ranks % nodes:
        raise ConfigError(f"{asked}, which do not divide over {nodes} nodes. Fix: mesh.shard={there}.")
    _check_rows(config, ranks)
    return replace(
        config,
        mesh=replace(config.mesh, shard=shard),
        run=replace(config.run, device=device),
    )


def _check_rows(config: Any, ranks: int) -> None:
    over = _count(ranks, "rank")
    micro = f" times run.accumulate={config.run.accumulate}" if config.run.accumulate > 1 else ""
    parts = {"rows": (ranks * config.run.accumulate, over + micro), "held_out_rows": (ranks, over)}
    wrong, fixes = [], []
    for name, (divisor, shown) in parts.items():
        rows = getattr(config.data, name)
        if rows % divisor:
            wrong.append(f"data.{name}={rows} does not divide over {shown}.")
            fixes.append(f"data.{name}={math.ceil(rows / divisor) * divisor}")
    if wrong:
        raise ConfigError(report("the batch cannot be cut:", wrong, " ".join(fixes)))


def ranks_of(config: Any) -> int:
    return config.mesh.replicate * config.mesh.shard


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
