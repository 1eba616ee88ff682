"""`python -m experiments.generate run=DIR prompt="def "`: what a run is judged by, and text from it.

It reads the newest checkpoint of a run of train or of finetune into one process, whatever mesh it is of.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from experiments.cli.main import exiting
from experiments.cli.schema import build
from experiments.configs.checks import configuration
from experiments.configs.train import (
    AUTO,
    ConfigError,
    MeshConfig,
    StrategyConfig,
    TrackerConfig,
    TrainConfig,
)

QUOTED = re.compile(r"""("|').*\1""", re.DOTALL)


@configuration
class GenerateConfig:
    """`run`: the folder of a run. `prompt`: null, the run's own prompts. `tokens`: of the text; null, as many
    as the run's sample. `held_out`: whether the held-out loss is measured. `device`: as `run.device`."""

    run: str
    prompt: str | None = None
    tokens: NonNegativeInt | None = None
    held_out: bool = True
    device: str = AUTO


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer a command line of KEY=VALUE; a value is taken as it is, but for quotes around it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{GenerateConfig.__doc__}")
        return
    values = {key: value[1:-1] if QUOTED.fullmatch(value) else value
              for key, _, value in (argument.partition("=") for argument in arguments)}  # fmt: skip
    exiting(lambda: generate(build(values, GenerateConfig)))


def generate(config: GenerateConfig) -> None:
    """Print what the newest checkpoint of a run has learned.

    Raises:
        ConfigError: the folder is no run's, or holds no checkpoint.
    """
    import fnshard as fs
    from experiments.training.resume import CHECKPOINTS, newest_step

    folder = Path(config.run)
    setup = _setup(config, folder)
    number = newest_step(folder)
    if number is None:
        raise ConfigError(
            f"run={config.run}: no checkpoint is in it. Fix: the folder of a run that has saved."
        )
    state = fs.checkpoint.restore(folder / CHECKPOINTS / str(number), setup.step, setup.mesh)
    print(f"step {number} of {folder.resolve()}", flush=True)
    if config.held_out:
        value, more = setup.evaluate(state.params)
        print(f"held-out {setup.goal.label}: {value:.3f}", flush=True)
        for name, each in more.items():
            print(f"held-out {name.replace('_', ' ')}: {each:.4g}", flush=True)
    if sampled := setup.sample(state.params):
        print(f"\n{sampled}", flush=True)


def _setup(config: GenerateConfig, folder: Path) -> Any:
    """The `training.run.Setup` of a run on one rank: what its step does not need is left out."""
    from omegaconf import OmegaConf

    from experiments.cli.job import placed
    from experiments.finetune.config import FinetuneConfig

    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run={config.run}: is no folder of a run. Fix: what a run prints after results:.")
    values = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    tunes = "method" in values
    saved = build(values, FinetuneConfig if tunes else TrainConfig)
    asked = {"prompt": config.prompt, "sample_tokens": config.tokens}
    run = replace(
        saved.run, device=config.device, device_gb=None, disk_dir=None, accumulate=1, replicas=0,
        replica_every=1, **{name: value for name, value in asked.items() if value is not None},
    )  # fmt: skip
    alone = replace(
        saved, run=run, mesh=MeshConfig(shard=1), strategy=StrategyConfig(), tracker=TrackerConfig()
    )
    if tunes:
        from experiments.finetune.loop import prepare

        return prepare(placed(alone, world=1), only_prompt=config.prompt is not None)
    from experiments.training.loop import prepare as prepared

    return prepared(placed(alone, world=1))


if __name__ == "__main__":
    main()
