"""Config: the configuration of `experiments.explain`, with the groups of the main job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from experiments.lib.checks import configuration
from experiments.lib.compose import Command
from experiments.lib.config import (
    AUTO,
    AdamWConfig,
    DataConfig,
    HardwareConfig,
    MeshConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    SGDConfig,
    ShardsConfig,
    StrategyConfig,
    Target,
    TrackerConfig,
    idle_chunks,
    nameless_sizes,
    specs_twice,
    uneven_splits,
)
from experiments.lib.decoder import DecoderConfig

PER_PARAMETER = 20  # a compute-optimal run has so many tokens for each parameter (Hoffmann et al., 2022)


def not_on_paper(hardware: HardwareConfig, optimizer: AdamWConfig | SGDConfig | dict[str, Any]) -> list[str]:
    """Return a line for each value that a configuration leaves to a job on a machine."""
    wrong = []
    if hardware.name == AUTO:
        wrong.append("hardware=auto: a job looks what it runs on; here say which, or hardware=measure.")
    if not isinstance(optimizer, dict) and optimizer.lr is None:
        wrong.append("optimizer.lr=null: only fine-tuning has defaults. Fix: leave it out.")
    return wrong


@configuration
class PaperTextConfig(DataConfig):
    """The data of a text. A step has `rows`; null is one row for each rank and micro-batch."""

    rows: PositiveInt | None = None


@configuration
class PaperShardsConfig(ShardsConfig):
    """The data of shards, none of which is read. A step has `rows`; null is one row for each rank and
    micro-batch."""

    rows: PositiveInt | None = None

    def __post_init__(self) -> None:
        """Accept a configuration that names no folder."""


# The keys of the main job that a step on paper depends on. A recipe may have others, which have no effect
# here.
ON_PAPER = {"run": ("accumulate", "micro_order", "zero_bubble_memory", "device_gb"), "data": ("rows",)}


def without_effect(config: Any, on_paper: Mapping[str, Sequence[str]] = ON_PAPER) -> list[str]:
    """Return the keys that differ from their defaults and change nothing here.

    Args:
        on_paper: the keys that count, by group.
    """
    keys = []
    for group, counted in on_paper.items():
        values = getattr(config, group)
        if isinstance(values, dict):
            continue
        for each in dataclasses.fields(values):
            has_default = each.default is not dataclasses.MISSING
            is_changed = has_default and getattr(values, each.name) != each.default
            if is_changed and each.name not in (*counted, "name"):
                keys.append(f"{group}.{each.name}")
    return keys


@configuration
class ExplainConfig:
    """The whole configuration of `experiments.explain`.

    It is that of the main job, so that recipes fit. A step on paper depends on the model, its layout, rows
    and micro-batches. `run.device_gb` are the bytes that the step may take of a rank's device, in 1e9; null
    is all that the hardware has. With `data.rows` null there is one row for each rank and micro-batch.
    `tokens` are those that the whole training would read; null is 20 for each parameter.
    """

    model: DecoderConfig | Target
    mesh: MeshConfig
    strategy: StrategyConfig
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig | Target
    data: PaperTextConfig | PaperShardsConfig | Target
    run: RunConfig
    hardware: HardwareConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    objective: Target | None = None
    specs: list[tuple[str, str | dict[str, Any] | None]] | None = None
    tokens: PositiveFloat | None = None

    def __post_init__(self) -> None:
        wrong = not_on_paper(self.hardware, self.optimizer)
        if self.strategy.name == AUTO and self.run.accumulate != 1:
            key = f"run.accumulate={self.run.accumulate}"
            wrong.append(f"{key}: strategy=auto chooses the micro-batches; leave 1, and say data.rows.")
        wrong += specs_twice(self.strategy, self.specs)
        wrong += idle_chunks(self.mesh, self.strategy, self.specs)
        if isinstance(self.model, DecoderConfig):
            wrong += uneven_splits(self.model, self.mesh)
        wrong += nameless_sizes(self.model, self.data, self.objective)
        if self.mesh.shard is None:
            wrong.append("mesh.shard=null: say how many ranks, as in mesh.shard=64; none have to exist.")
        else:
            wrong += self._find_uneven_rows()
        if wrong:
            raise ValueError("\n  ".join(wrong))

    def _find_uneven_rows(self) -> list[str]:
        """Return a line if the batch does not divide into the ranks' micro-batches."""
        parts = self.mesh.data_ranks * self.run.accumulate
        rows = self.batch_rows
        if rows is None or rows % parts == 0:
            return []
        more = f" times run.accumulate={self.run.accumulate}" if self.run.accumulate > 1 else ""
        near = -(-rows // parts) * parts
        over = f"{self.mesh.data_ranks} ranks{more}"
        return [f"data.rows={rows} does not divide over {over}. Fix: data.rows={near}."]

    @property
    def batch_rows(self) -> int | None:
        """Return the rows of the global batch; None if the configuration names no number."""
        return self.data.get("rows") if isinstance(self.data, dict) else self.data.rows

    @property
    def rows(self) -> int:
        """Return the rows of one rank's batch, all micro-batches together."""
        rows = self.batch_rows
        return self.run.accumulate if rows is None else rows // self.mesh.data_ranks


COMMAND = Command(
    "explain",
    ExplainConfig,
    "What a configuration comes to, without training and without the devices: bytes, traffic, time, "
    "tokens a day, cost; printed, and kept with two pictures.",
    {
        "python -m experiments.explain model=7b mesh.shard=64": "a model on so many GPUs",
        "python -m experiments.explain model=7b strategy=auto mesh.shard=8 hardware=a100": "a plan, and why",
        "python -m experiments.explain experiment=laptop mesh.shard=64": "a recipe of experiments.train",
    },
)
