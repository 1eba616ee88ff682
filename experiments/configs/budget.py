"""Budget: what a run takes at least, by its sizes alone, beside what the machine has: before ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import fnshard as fs
from experiments.configs.machine import ranks_of
from experiments.configs.train import AUTO, ConfigError
from fnshard.analysis.measure import memory_bytes
from fnshard.errors import report

PROCESS_bytes = 128 << 20  # of a process that has loaded torch
WAYS = (
    "a smaller model (model.layers, model.width, model.vocab) or batch (data.rows), more devices, fewer "
    "ranks on each, strategy=full_shard, precision=bf16; or, with run.disk_dir=FOLDER, strategy.memory=disk "
    "strategy.optimizer_memory=disk."
)


def state_bytes(config: Any) -> dict[str, tuple[str, int]]:
    """What one rank keeps all the time: tier and bytes, by name. A step takes more: activations, gathered
    units and buffers come on top.

    Args:
        config: of the main job, placed.

    """
    strategy, precision, optimizer = config.strategy, config.precision, config.optimizer
    size = {name: getattr(torch, dtype).itemsize for name, dtype in vars(precision).items()}
    slots = 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)
    whole = optimizer.clip is not None  # else each is used as soon as it is there
    count, ranks = config.model.parameters, ranks_of(config)
    total = {
        "parameters": (strategy.memory, count * size["storage"]),
        "gradients": (strategy.update_on or "device", count * size["reduce"] * whole),
        "optimizer": (strategy.optimizer_memory, count * size["optimizer"] * slots),
    }
    parts = _parts(strategy.name, config.mesh)
    found = {name: (tier, bytes_ // parts[name]) for name, (tier, bytes_) in total.items()}
    tokens = config.data.rows * config.model.context // ranks
    return found | {"batch": ("device", 2 * torch.int64.itemsize * tokens)}


def _parts(strategy: str, mesh: Any) -> dict[str, int]:
    """Into how many parts a strategy's preset splits what ranks keep; a plan of `auto` may split all."""
    preset = fs.presets.PRESETS["full_shard" if strategy == AUTO else strategy]
    axes = fs.make_mesh(replicate=mesh.replicate, shard=mesh.shard, abstract=True)
    spec = preset({"leaf": torch.empty(axes.size, device="meta")}, axes)["leaf"]
    layouts = {"parameters": spec.storage, "gradients": spec.gradient, "optimizer": spec.optimizer}
    return {name: axes.axes_size(layout.axes) for name, layout in layouts.items()}


def check_memory(config: Any, ranks_here: int, available: Mapping[str, int] | None = None) -> None:
    """Refuse what cannot fit.

    Args:
        config: placed; of a job without `DecoderConfig` nothing is known before its model is read.
        ranks_here: that share this machine.
        available: bytes for one rank, of its "device" and its part of the "host"; None: as they are.

    Raises:
        ConfigError: predicted and available bytes, and the ways out.
    """
    if not hasattr(config.model, "parameters"):
        return
    device = config.run.device
    there = available or memory_of(device, ranks_here)
    state = {**state_bytes(config), "process": ("host", PROCESS_bytes)}
    together = device == "cpu" or config.strategy.name == AUTO  # which may put anything anywhere
    pools = {"memory": ("device", "host")} if together else {"device": ("device",), "host": ("host",)}
    wrong = []
    for pool, tiers in pools.items():
        needed = {name: size for name, (tier, size) in state.items() if tier in tiers}
        has = sum(there.get(tier, 0) for tier in tiers)
        if sum(needed.values()) > has:
            most = sorted((size, name) for name, size in needed.items() if size > 0.01 * sum(needed.values()))
            parts = ", ".join(f"{name} {gigabytes(size)}" for size, name in reversed(most))
            wrong.append(f"{pool}: {gigabytes(sum(needed.values()))} or more ({parts}) of {gigabytes(has)}")
    if wrong:
        head = f"a rank, one of {ranks_of(config):,}, takes more memory than it has:"
        raise ConfigError(report(head, [f"{config.model.parameters:,} parameters", *wrong], WAYS))


def memory_of(device: str, ranks_here: int) -> dict[str, int]:
    """Bytes for one rank: of its device, and its part of the machine's, or of the control group's."""
    host = {"host": memory_bytes(torch.device("cpu"), ranks_here)}
    return host if device == "cpu" else host | {"device": memory_bytes(torch.device(device), ranks_here)}


def gigabytes(size: int) -> str:
    """As people read it.

    >>> gigabytes(1_234_000_000), gigabytes(10**15)
    ('1.23 GB', '1,000,000 GB')
    """
    return f"{size / 1e9:,.2f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"
