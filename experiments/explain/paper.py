"""Paper: a configuration as a lowered step on a mesh that does not exist, and all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import fnshard as fs
from experiments.configs.plan import axis_of, dtypes_of, hardware_of
from experiments.configs.train import AUTO, ScheduleConfig
from experiments.explain.config import ExplainConfig
from experiments.training.decoder import Decoder, loss_function
from experiments.training.steps import make_optimizer
from fnshard.analysis.memory import MemoryAnalysis, MemoryTimeline
from fnshard.analysis.timeline import Timeline
from fnshard.analysis.traffic import Traffic
from fnshard.step.lowered import Lowered

UNDECAYED = ("*norm*", "embed.*")  # as the main job has it


@dataclass(frozen=True)
class Paper:
    """A step on paper.

    Args:
        device_bytes: what the step may take of a rank's device.
        specs, options: the arguments of `shard_step`.
        found: the search, if `strategy=auto` made one.
    """

    config: ExplainConfig
    hardware: fs.Hardware
    device_bytes: int
    mesh: fs.Mesh
    specs: Any
    options: Mapping[str, Any]
    lowered: Lowered
    memory: MemoryAnalysis
    over: MemoryTimeline
    traffic: Traffic
    timeline: Timeline
    found: fs.Fit | None = None

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.device_bytes

    @property
    def tokens_per_step(self) -> int:
        return self.config.rows * self.config.model.context * self.config.mesh.data_ranks

    @property
    def tokens_per_day(self) -> float:
        """Of all ranks, predicted."""
        return 86_400 * self.tokens_per_step / self.timeline.step_seconds

    @property
    def device_hours(self) -> float:
        """Of the whole training, all ranks together."""
        return 24 * self.config.mesh.ranks * self.config.budget / self.tokens_per_day

    @property
    def cost(self) -> float | None:
        """Of the whole training, if a price is known."""
        price = self.config.hardware.price_per_hour
        return None if price is None else price * self.device_hours


def explain(config: ExplainConfig) -> Paper:
    """Lower the configuration's step; nothing is compiled, nothing runs."""
    name, gigabytes, found = config.hardware.name, config.run.device_gb, None
    hardware = hardware_of(name)
    device = "cuda" if hardware.overlap else "cpu"
    sums = config.mesh.ranks > 1 or config.run.accumulate > 1
    config = replace(config, precision=config.precision.on(device, sums=sums))
    device_bytes = hardware.memory_bytes if gigabytes is None else int(gigabytes * 1e9)
    axes = {name: size for name, size in config.mesh.axes.items() if size > 1 or name == "shard"}
    mesh = fs.make_mesh(**axes, device=device, abstract=True)  # which need not be here
    with torch.device("meta"):
        model = Decoder(config.model)
        tokens = torch.empty(config.rows, config.model.context, dtype=torch.int64)
    loss_fn, params = loss_function(model)
    optimizer = make_optimizer(config.optimizer, ScheduleConfig(name="constant"), 1, UNDECAYED)
    how = {"tensor": axis_of("tensor", mesh), **dtypes_of(config.precision)}
    options = {"grad_norm": True, **config.mesh.options}
    strategy = config.strategy
    if strategy.name == AUTO:
        found = fs.fit(
            loss_fn, params, mesh, batch=(tokens, tokens), device_bytes=device_bytes, hardware=hardware,
            optimizer=optimizer, specs=fs.presets.full_shard(params, mesh, **how), **options,
        )  # fmt: skip
        specs, options, lowered = found.specs, found.options, found.lowered
    else:
        tiers = {name: getattr(strategy, name) for name in ("memory", "optimizer_memory", "update_on")}
        specs = fs.presets.PRESETS[strategy.name](params, mesh, **how, **tiers)
        prefetch = strategy.prefetch_forward, strategy.prefetch_backward
        options |= {"accumulate": config.run.accumulate, "remat": strategy.remat, "prefetch": prefetch}
        step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, **options)
        lowered = step.lower(params, tokens, tokens)
    # CPU ranks talk through shared memory, as the main job's do; a plan was found without it.
    shared = "shared" if not hardware.overlap and mesh.size > 1 and found is None else None
    return Paper(
        config, hardware, device_bytes, mesh, specs, options, lowered,
        lowered.memory_analysis(transport=shared), lowered.memory_timeline(transport=shared),
        lowered.comm_analysis(), lowered.timeline(hardware), found,
    )  # fmt: skip
