"""The configuration of `experiments.explain`: groups of the main job, and on what the step would run."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from experiments.cli.command_spec import CommandSpec
from experiments.configs.checks import configuration
from experiments.configs.train import (
    AUTO,
    AdamWConfig,
    DecoderConfig,
    HardwareConfig,
    MeshConfig,
    PrecisionConfig,
    SGDConfig,
    StrategyConfig,
    uneven_splits,
)

PER_PARAMETER = 20  # tokens of a compute-optimal run (Hoffmann et al., 2022)


def not_on_paper(hardware: HardwareConfig, optimizer: AdamWConfig | SGDConfig) -> list[str]:
    """What only a job can find out by itself."""
    wrong = []
    if hardware.name == AUTO:
        wrong.append("hardware=auto: a job looks what it runs on; here say which, or hardware=measure.")
    if optimizer.lr is None:
        wrong.append("optimizer.lr=null: only fine-tuning has defaults. Fix: leave it out.")
    return wrong


@configuration
class RowsConfig:
    """`rows` of the global batch; null: one for each rank and micro-batch."""

    rows: PositiveInt | None = None


@configuration
class PaperRunConfig:
    """`accumulate`: micro-batches of a step. `device_gb`: what the step may take of a rank's device, in 1e9
    bytes; null: all that the hardware has."""

    accumulate: PositiveInt = 1
    device_gb: PositiveFloat | None = None


@configuration
class ExplainConfig:
    """The whole configuration of `experiments.explain`.

    `tokens`: what the whole training would read; null: 20 a parameter.
    """

    model: DecoderConfig
    mesh: MeshConfig
    strategy: StrategyConfig
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig
    data: RowsConfig
    run: PaperRunConfig
    hardware: HardwareConfig
    tokens: PositiveFloat | None = None

    def __post_init__(self) -> None:
        wrong = not_on_paper(self.hardware, self.optimizer)
        if self.strategy.name == AUTO and self.run.accumulate != 1:
            key = f"run.accumulate={self.run.accumulate}"
            wrong.append(f"{key}: strategy=auto chooses the micro-batches; leave 1, and say data.rows.")
        wrong += uneven_splits(self.model, self.mesh)
        if self.mesh.shard is None:
            wrong.append("mesh.shard=null: say how many ranks, as in mesh.shard=64; none have to exist.")
        else:
            wrong += self._uncut()
        if wrong:
            raise ValueError("\n  ".join(wrong))

    def _uncut(self) -> list[str]:
        """Why the batch cannot be cut into the ranks' micro-batches."""
        parts = self.mesh.data_ranks * self.run.accumulate
        rows = self.data.rows
        if rows is None or rows % parts == 0:
            return []
        more = f" times run.accumulate={self.run.accumulate}" if self.run.accumulate > 1 else ""
        near = -(-rows // parts) * parts
        over = f"{self.mesh.data_ranks} ranks{more}"
        return [f"data.rows={rows} does not divide over {over}. Fix: data.rows={near}."]

    @property
    def rows(self) -> int:
        """Of one rank's batch, all micro-batches."""
        return self.run.accumulate if self.data.rows is None else self.data.rows // self.mesh.data_ranks

    @property
    def budget(self) -> int:
        return int(self.tokens or PER_PARAMETER * self.model.parameters)


SPEC = CommandSpec(
    "explain",
    ExplainConfig,
    "What a configuration comes to, without training and without the devices: bytes, traffic, time, "
    "tokens a day, cost; printed, and kept with two pictures.",
    {
        "python -m experiments.explain model=7b mesh.shard=64": "a model on so many GPUs",
        "python -m experiments.explain model=7b strategy=auto mesh.shard=8 hardware=a100": "a plan, and why",
    },
)
