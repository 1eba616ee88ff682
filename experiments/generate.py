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
from experiments.configs.checks import configuration, targets_in
from experiments.configs.train import (
    AUTO,
    ConfigError,
    MeshConfig,
    StrategyConfig,
    TrackerConfig,
    TrainConfig,
)
from experiments.data.files import read_sealed

QUOTED = re.compile(r"""("|').*\1""", re.DOTALL)


@configuration
class GenerateConfig:
    """`run`: the folder of a run. `prompt`: null, the run's own prompts. `tokens`: of the text; null, as many
    as the run's sample. `held_out`: whether the held-out loss is measured. `device`: as `run.device`.
    `own_code`: whether code that the run's configuration names may run, its `_target_`s."""

    run: str
    prompt: str | None = None
    tokens: NonNegativeInt | None = None
    held_out: bool = True
    device: str = AUTO
    own_code: bool = False


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
    from experiments.training.resume import CHECKPOINTS, has_numbered, newest_step

    folder = Path(config.run)
    setup = _setup(config, folder)
    if newest_step(folder) is None and not has_numbered(folder / CHECKPOINTS):  # else `restore` says why
        raise ConfigError(
            f"run={config.run}: no checkpoint is in it. Fix: the folder of a run that has saved."
        )
    state = fs.checkpoint.restore(folder / CHECKPOINTS, setup.step, setup.mesh)
    print(f"step {int(state.step)} of {folder.resolve()}", flush=True)
    if config.held_out:
        value, more = setup.evaluate(state.params)
        print(f"held-out {setup.goal.label}: {value:.3f}", flush=True)
        for name, each in more.items():
            print(f"held-out {name.replace('_', ' ')}: {each:.4g}", flush=True)
    if sampled := setup.sample(state.params):
        print(f"\n{sampled}", flush=True)


def _setup(config: GenerateConfig, folder: Path) -> Any:
    """The `training.run.Setup` of a run on one rank: what its step does not need is left out."""
    from experiments.cli.job import placed
    from experiments.data.prepared import open_prepared
    from experiments.finetune.config import FinetuneConfig
    from fnshard.errors import report

    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run={config.run}: is no folder of a run. Fix: what a run prints after results:.")
    values = read_config(folder)
    code = targets_in(values)
    if code and not config.own_code:
        fix = "own_code=true, where you trust who has written the folder."
        raise ConfigError(
            report(f"run={config.run}: its configuration names code, which would run:", code, fix)
        )
    tunes = "method" in values
    try:
        saved = build(values, FinetuneConfig if tunes else TrainConfig)
    except ConfigError as error:
        raise ConfigError(f"run={config.run}: config.yaml is of no run of this version: {error}") from None
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

        for name in ("train", "held_out"):
            place = getattr(saved.data, name)
            if place is None:
                raise ConfigError(
                    f"run={config.run}: its data are not prepared: data.{name} is null in its config.yaml. "
                    "Fix: name the folder of a run that has begun."
                )
            open_prepared(place, read_all=True)

        return prepare(placed(alone, world=1), only_prompt=config.prompt is not None)
    from experiments.training.loop import prepare as prepared

    return prepared(placed(alone, world=1))


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration that a run has left in its folder.

    Raises:
        ConfigError: it is not what was written, or no configuration.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = folder / "config.yaml"
    text = read_sealed(path)
    try:
        values = OmegaConf.to_container(OmegaConf.create(text))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}")
    except (ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} is no configuration of a run ({why}).") from None
    return values


if __name__ == "__main__":
    main()
