"""The configuration of `experiments.plan`: groups of the main job, and what is looked for."""

from __future__ import annotations

import math

from pydantic import PositiveFloat, PositiveInt

from experiments.cli.command_spec import CommandSpec
from experiments.configs.checks import configuration
from experiments.configs.train import (
    AdamWConfig,
    DecoderConfig,
    Dtype,
    HardwareConfig,
    PrecisionConfig,
    SGDConfig,
)
from experiments.explain.config import PER_PARAMETER, not_on_paper

BATCH_TOKENS = 4_000_000  # about so many in a step, where nothing is said
DEVICE_SHARE = 0.9  # of a device's memory that a step may take, where nothing is said


@configuration
class PlanConfig:
    """The whole configuration of `experiments.plan`.

    `devices`: how many there are. `days`: instead, the fewest that read `tokens` in so many days are
    looked for, by powers of two up to `most_devices`. `rows`: of a step's batch, of all ranks; null: the
    power of two that makes about four million tokens. `tokens`: that the whole training reads; null: 20 a
    parameter. `optimizer_dtypes`: of the optimizer's state, that are tried besides the precision's: fewer
    bytes, and other numbers. `device_gb`: what a step may take of a device, in 1e9 bytes; null: nine tenths
    of what the hardware has (the rest is the allocator's and NCCL's).
    """

    model: DecoderConfig
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig
    hardware: HardwareConfig
    devices: PositiveInt = 8
    days: PositiveFloat | None = None
    most_devices: PositiveInt = 65_536
    rows: PositiveInt | None = None
    tokens: PositiveFloat | None = None
    optimizer_dtypes: tuple[Dtype, ...] = ()
    device_gb: PositiveFloat | None = None

    def __post_init__(self) -> None:
        wrong = not_on_paper(self.hardware, self.optimizer)
        if wrong:
            raise ValueError("\n  ".join(wrong))

    @property
    def budget(self) -> int:
        """Tokens of the whole training."""
        return int(self.tokens or PER_PARAMETER * self.model.parameters)

    @property
    def batch_rows(self) -> int:
        return self.rows or 2 ** max(0, round(math.log2(BATCH_TOKENS / self.model.context)))


SPEC = CommandSpec(
    "plan",
    PlanConfig,
    "The fastest plan for a model on so many devices: axes, micro-batches, what is recomputed and what rests "
    "on the host, by bytes first and then by time; its rivals, days and cost. Nothing runs.",
    {
        "python -m experiments.plan model=70b devices=64": "70B on 64 H100s",
        "python -m experiments.plan model=405b devices=16384 tokens=15e12 rows=2048": "Llama 3.1's own size",
        "python -m experiments.plan model=8b days=30 tokens=1e12": "the fewest that take 30 days",
    },
)
