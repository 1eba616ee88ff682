"""The configuration of a fine-tuning job; `configs.train` has the groups it shares with the main job."""

from __future__ import annotations

import math
from dataclasses import field

from experiments.configs.checks import above, at_least, configuration, fraction, one_of
from experiments.configs.train import (
    AUTO,
    MULTIPLE,
    AdamWConfig,
    HardwareConfig,
    MeshConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    SGDConfig,
    StrategyConfig,
    TrackerConfig,
    misfits,
)

METHODS = ("full", "lora", "qlora8", "qlora4")  # from the most memory to the least
ALL_LINEAR = "all-linear"  # of method.targets: every matrix of every layer
EXPORTS = (AUTO, "adapters", "merged", "both", "none")


@configuration
class MethodConfig:
    """What trains: all (`full`), or adapters (`lora`) with a base that is frozen, as it is or as codes.

    `targets`: globs of leaves, joined by "|", or "all-linear".
    """

    name: str = "lora"
    rank: int = 8
    alpha: float = 16.0
    targets: str = ALL_LINEAR
    dropout: float = 0.0
    rank_stabilised: bool = False

    def __post_init__(self) -> None:
        one_of(METHODS, self, "name")
        at_least(1, self, "rank")
        above(0, self, "alpha")
        fraction(self, "dropout")


@configuration
class ObjectiveConfig:
    """`sft`: the likelihood of responses; `dpo`: of the chosen above the rejected, by `beta`."""

    name: str = "sft"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        one_of(("sft", "dpo"), self, "name")
        above(0, self, "beta")
        fraction(self, "label_smoothing")
        if self.label_smoothing >= 0.5:
            raise ValueError(f"objective.label_smoothing={self.label_smoothing}: must be below 0.5.")


@configuration
class FinetuneDataConfig:
    """Files that `experiments.data.rows` reads; null: docstrings of Python's standard library.

    `held_out: null` with a `train` of your own: one in 20 of its records. `rows` of the global batch,
    `context` tokens each; `pack`: several samples to a row. `too_long`, `broken`: what is done about samples
    that are longer than the context, and about records that cannot be used.
    """

    train: str | None = None
    held_out: str | None = None
    context: int = 256
    rows: int = 8
    held_out_rows: int = 32
    pack: bool = True
    too_long: str = "refuse"
    broken: str = "refuse"

    def __post_init__(self) -> None:
        at_least(1, self, "rows", "held_out_rows")
        at_least(8, self, "context")
        one_of(("refuse", "skip", "truncate"), self, "too_long")
        one_of(("refuse", "skip"), self, "broken")
        if self.train is None and self.held_out is not None:
            raise ValueError("data.held_out: without data.train there is nothing it is held out of.")


@configuration
class FinetuneConfig:
    """The whole configuration of a fine-tuning job.

    `model`: a Hugging Face model directory; or "stdlib", a tiny base that a short pre-training on the
    standard library's text makes; or "tiny" and "100m", which are random. `export`: what is written at the
    end; "auto" is the adapters where there are some, the whole model otherwise.
    """

    method: MethodConfig
    objective: ObjectiveConfig
    strategy: StrategyConfig
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig
    schedule: ScheduleConfig
    run: RunConfig
    hardware: HardwareConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    model: str = "stdlib"
    export: str = AUTO
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        wrong = misfits(self.strategy, self.run)
        most = math.gcd(self.data.context, MULTIPLE, self.mesh.context)
        if most < self.mesh.context:
            wrong.append(
                f"mesh.context={self.mesh.context}: has to divide data.context={self.data.context} and "
                f"{MULTIPLE}, of which rows that are not packed are multiples. Fix: mesh.context={most}."
            )
        if self.export not in EXPORTS:
            wrong.append(f"export={self.export!r}: must be one of {', '.join(EXPORTS)}.")
        if self.method.name == "full" and self.export in ("adapters", "both"):
            wrong.append(f"export={self.export}: method=full has no adapters. Fix: export=merged.")
        if self.optimizer.lr is None and isinstance(self.optimizer, SGDConfig):
            wrong.append("optimizer.lr=null: the defaults are AdamW's. Fix: optimizer.lr=0.1.")
        if not self.data.pack and self.objective.name == "dpo":
            wrong.append("data.pack=false: pairs are never packed; leave the default.")
        if wrong:
            raise ValueError("\n  ".join(wrong))
