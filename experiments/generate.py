"""`python -m experiments.generate run=DIR prompt="def "`: what a run is judged by, and text from it.

It reads the newest checkpoint of a run of train or of finetune into one process, whatever mesh it is of.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import NonNegativeInt
from yaml import YAMLError

import fnshard as fs
from experiments import finetune, train
from experiments.data.prepared import open_prepared
from experiments.lib.checks import ConfigError, configuration, targets_in
from experiments.lib.compose import build, exit_with
from experiments.lib.config import AUTO, MeshConfig, StrategyConfig, TrackerConfig, TrainConfig
from experiments.lib.files import read_sealed
from experiments.lib.folder import CHECKPOINTS, has_step_folders, newest_step
from experiments.lib.launch import fit_to_machine
from experiments.lib.metrics import Goal
from experiments.lib.run import mean_over
from experiments.lib.task import make_optimizer, make_task
from experiments.tuning.config import FinetuneConfig
from fnshard.errors import report

QUOTED = re.compile(r"""("|').*\1""", re.DOTALL)


@configuration
class GenerateConfig:
    """The keys of the command.

    `run` is the folder of a run. `prompt` is what the text begins with; null takes the run's own prompts.
    `tokens` is the length of the text; null is that of the run's sample. `held_out` says whether the held-out
    loss is measured. `device` is as `run.device`. `own_code` says whether code that the run's configuration
    names by `_target_` may run.
    """

    run: str
    prompt: str | None = None
    tokens: NonNegativeInt | None = None
    held_out: bool = True
    device: str = AUTO
    own_code: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer a command line of KEY=VALUE. Values are taken literally, but quotes around one are removed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{GenerateConfig.__doc__}")
        return
    values = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        values[key] = value[1:-1] if QUOTED.fullmatch(value) else value
    exit_with(lambda: generate(build(values, GenerateConfig)))


def generate(config: GenerateConfig) -> None:
    """Print what the newest checkpoint of a run has learned.

    Raises:
        ConfigError: the folder is no run's, or holds no checkpoint.
    """
    # Make the parts of the run as its job does, on one rank, and read its newest checkpoint.
    folder = Path(config.run)
    saved = fit_to_machine(read_run(config, folder), world=1)
    parts = make_training_parts(saved) if isinstance(saved, TrainConfig) else make_tuning_parts(saved, config)
    if newest_step(folder) is None and not has_step_folders(folder / CHECKPOINTS):  # else `restore` says why
        raise ConfigError(
            f"run={config.run}: no checkpoint is in it. Fix: the folder of a run that has saved."
        )
    state = fs.checkpoint.restore(folder / CHECKPOINTS, parts.step, parts.step.mesh)
    print(f"step {int(state.step)} of {folder.resolve()}", flush=True)

    # Print the held-out numbers and the text.
    if config.held_out:
        value, more = parts.evaluate(state.params)
        print(f"held-out {parts.goal.label}: {value:.3f}", flush=True)
        for name, each in more.items():
            print(f"held-out {name.replace('_', ' ')}: {each:.4g}", flush=True)
    if sampled := parts.sample(state.params):
        print(f"\n{sampled}", flush=True)


@dataclass(frozen=True)
class Parts:
    """The parts of a job that are needed besides its loop.

    Args:
        step: the step, which knows what a checkpoint holds.
        evaluate: a function of the parameters that returns the goal's number on held-out data, and more
            numbers by name.
        sample: a function of the parameters that returns the text that the model writes, which may be empty.
    """

    step: Any
    goal: Goal
    evaluate: Callable[[Any], tuple[float, Mapping[str, float]]]
    sample: Callable[[Any], str]


def make_training_parts(config: TrainConfig) -> Parts:
    """Make the parts of a run of `experiments.train`, as that does."""
    mesh = fs.make_mesh(**config.mesh.axes, device=config.run.device)
    data, task = train.open_data(config), make_task(config)
    optimizer = make_optimizer(config.optimizer, config.schedule, config.run.steps, task.undecayed)
    plan = train.make_plan(config, task, data, mesh, optimizer)
    step = fs.shard_step(task.loss, plan.specs, mesh=mesh, optimizer=optimizer, **plan.options)
    forward = fs.shard_forward(task.held_out_loss, plan.specs, **train.forward_options(config, mesh))
    sampler = train.make_sampler(config, task, plan, mesh)

    def evaluate(params: Any) -> tuple[float, Mapping[str, float]]:
        return mean_over(forward, params, train.held_out_batches(data, plan, mesh), mesh.device)

    def sample(params: Any) -> str:
        is_text = sampler is not None and config.run.sample_length
        return train.sample(config, data, sampler, params, mesh) if is_text else ""

    return Parts(step, train.goal_of(config, data), evaluate, sample)


def make_tuning_parts(config: FinetuneConfig, asked: GenerateConfig) -> Parts:
    """Make the parts of a run of `experiments.finetune`, as that does."""
    for name in ("train", "held_out"):
        prepared = getattr(config.data, name)
        if prepared is None:
            raise ConfigError(
                f"run={asked.run}: its data are not prepared: data.{name} is null in its config.yaml. "
                "Fix: name the folder of a run that has begun."
            )
        open_prepared(prepared, read_all=True)
    parts = finetune.build(config, only_prompt=asked.prompt is not None)
    return Parts(parts.step, parts.goal, parts.evaluate, parts.sample)


def read_run(config: GenerateConfig, folder: Path) -> Any:
    """Return the configuration of a run for one rank, without what its step does not need.

    Raises:
        ConfigError: the folder is no run's, or its configuration names code and `own_code` is false.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run={config.run}: is no folder of a run. Fix: what a run prints after results:.")
    values = read_config(folder)
    code = targets_in(values)
    if code and not config.own_code:
        fix = "own_code=true, where you trust who has written the folder."
        raise ConfigError(
            report(f"run={config.run}: its configuration names code, which would run:", code, fix)
        )
    try:
        saved = build(values, FinetuneConfig if "method" in values else TrainConfig)
    except ConfigError as error:
        raise ConfigError(f"run={config.run}: config.yaml is of no run of this version: {error}") from None

    # One rank on its own needs no mesh, strategy, budget, replicas or trackers.
    asked = {"prompt": config.prompt, "sample_tokens": config.tokens}
    run = replace(
        saved.run, device=config.device, device_gb=None, disk_dir=None, accumulate=1, replicas=0,
        replica_every=1, **{name: value for name, value in asked.items() if value is not None},
    )  # fmt: skip
    return replace(
        saved, run=run, mesh=MeshConfig(shard=1), strategy=StrategyConfig(), tracker=TrackerConfig()
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration that a run has left in its folder.

    Raises:
        ConfigError: it is not what was written, or no configuration.
    """
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
