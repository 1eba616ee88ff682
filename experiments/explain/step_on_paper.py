"""A step on paper: a step that is lowered for a mesh that need not exist, with its analyses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import fnshard as fs
from experiments.explain.config import PER_PARAMETER, ExplainConfig
from experiments.explain.subject import Subject, make_subject
from experiments.lib.config import AUTO, ScheduleConfig
from experiments.lib.plan import axis_of, dtypes_of, hardware_of, specs_of
from experiments.lib.task import make_optimizer
from fnshard.analysis.memory import MemoryAnalysis, MemoryTimeline
from fnshard.analysis.timeline import Timeline
from fnshard.analysis.traffic import Traffic
from fnshard.search.fit import Fit
from fnshard.step.lowered import Lowered


@dataclass(frozen=True)
class StepOnPaper:
    """A step on paper, with its memory, traffic and time.

    Args:
        device_bytes: the bytes that the step may take of a rank's device.
        subject: the model that it trains.
        specs, options: the arguments of `shard_step`.
        found: the search, if `strategy=auto` made one.
    """

    config: ExplainConfig
    hardware: fs.Hardware
    device_bytes: int
    subject: Subject
    mesh: fs.Mesh
    specs: Any
    options: fs.StepOptions
    lowered: Lowered
    memory: MemoryAnalysis
    memory_timeline: MemoryTimeline
    traffic: Traffic
    timeline: Timeline
    found: Fit | None = None

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.device_bytes

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens that all ranks read in a step, or the rows if these are counted."""
        return self.config.rows * self.subject.tokens * self.config.mesh.data_ranks

    @property
    def tokens_per_day(self) -> float:
        """Return the tokens, or rows, that all ranks read in a day, by prediction."""
        return 86_400 * self.tokens_per_step / self.timeline.step_seconds

    @property
    def budget(self) -> int:
        """Return the tokens, or rows, that the whole training reads."""
        return int(self.config.tokens or PER_PARAMETER * self.subject.parameters)

    @property
    def device_hours(self) -> float:
        """Return the hours of the whole training, added up over all devices."""
        return 24 * self.config.mesh.ranks * self.budget / self.tokens_per_day

    @property
    def cost(self) -> float | None:
        """Return the price of the whole training; None if no price of an hour is known."""
        price = self.config.hardware.price_per_hour
        return None if price is None else price * self.device_hours


def explain(config: ExplainConfig) -> StepOnPaper:
    """Lower the configuration's step. Nothing is compiled, and nothing runs."""
    # The hardware, and the mesh, whose devices need not exist.
    name, gigabytes, found = config.hardware.name, config.run.device_gb, None
    hardware = hardware_of(name)
    device = "cuda" if hardware.overlap else "cpu"
    sums_gradients = config.mesh.ranks > 1 or config.run.accumulate > 1
    config = replace(config, precision=config.precision.on(device, sums=sums_gradients))
    device_bytes = hardware.memory_bytes if gigabytes is None else int(gigabytes * 1e9)
    axes = {name: size for name, size in config.mesh.axes.items() if size > 1 or name == "shard"}
    mesh = fs.make_mesh(**axes, device=device, abstract=True)

    # The model, its batch and optimizer.
    subject = make_subject(config)
    loss_fn, params, batch = subject.loss, subject.params, subject.batch(config.rows)
    optimizer = make_optimizer(config.optimizer, ScheduleConfig(name="constant"), 1, subject.undecayed)

    # The layout and options, which the strategy names or a search finds.
    preset_options = {"tensor": axis_of("tensor", mesh), **dtypes_of(config.precision)}
    options = fs.StepOptions(grad_norm=True, **config.mesh.options)
    strategy = config.strategy
    if strategy.name == AUTO:
        found = fs.fit(
            loss_fn, params, mesh, batch=batch, device_bytes=device_bytes, hardware=hardware,
            optimizer=optimizer, specs=fs.presets.full_shard(params, mesh, **preset_options), **options,
        )  # fmt: skip
        specs, options, lowered = found.specs, found.options, found.lowered
    else:
        tiers = {name: getattr(strategy, name) for name in ("memory", "optimizer_memory", "update_on")}
        if config.specs is None:
            specs = fs.presets.PRESETS[strategy.name](
                params, mesh, chunks=strategy.chunks, **preset_options, **tiers
            )
        else:
            specs = specs_of(config.specs, params, dtypes_of(config.precision) | tiers)
        options = replace(
            options, accumulate=config.run.accumulate, micro_order=config.run.micro_order,
            zero_bubble_memory=config.run.zero_bubble_memory,
            remat=strategy.remat, overlap=strategy.overlap,
            prefetch=(strategy.prefetch_forward, strategy.prefetch_backward),
        )  # fmt: skip
        step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, **options)
        lowered = step.lower(params, *batch)

    # CPU ranks communicate through shared memory, as those of the main job do; `fs.fit` plans without it.
    shared = "shared" if not hardware.overlap and mesh.size > 1 and found is None else None
    return StepOnPaper(
        config, hardware, device_bytes, subject, mesh, specs, options, lowered,
        lowered.memory_analysis(transport=shared), lowered.memory_timeline(transport=shared),
        lowered.comm_analysis(), lowered.timeline(hardware), found,
    )  # fmt: skip
