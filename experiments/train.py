"""The main job: `python -m experiments.train`, or the same under `torchrun`.

Hydra composes and checks the configuration; then this process starts the ranks
(`experiments.worker`) and waits for them, or is one itself where `torchrun` started it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from experiments import config as configs
from experiments.config import ConfigError, TrainConfig
from experiments.data import corpus_of
from experiments.place import place, ranks_of
from experiments.sweep import write_result
from experiments.worker import REFUSAL, run_job
from fnshard.errors import FnshardError
from fnshard.launch import LaunchError, launch, under_launcher

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
MISTAKES = (FnshardError, ConfigError, HydraException, OmegaConfBaseException)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 1."""
    configs.register()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands exceptions on, instead of printing them its way
    try:
        if under_launcher():
            record(_be_a_rank)(sys.argv[1:])  # torchrun shows the error, whichever rank ends first
        else:
            _command_line()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if wants_traceback or not _is_mistake(error):
            raise
        if int(os.environ.get("RANK", "0")) == 0:
            print(_message(error), file=sys.stderr, flush=True)
        sys.exit(1)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _command_line(composed: DictConfig) -> None:
    """One run; called once for each run of a `--multirun`."""
    here = HydraConfig.get()
    folder = Path(here.runtime.output_dir).resolve()
    overrides = list(here.overrides.task)
    if here.mode != RunMode.MULTIRUN:
        start(checked(composed), folder, overrides)
        return
    try:  # a run that fails must not take the table of all runs with it
        start(checked(composed), folder, overrides)
    except Exception as error:
        told = _message(error) if _is_mistake(error) else traceback.format_exc()
        print(told, file=sys.stderr, flush=True)
        write_result(folder, status="failed", overrides=overrides, error=told)


def checked(composed: DictConfig, world: int | None = None) -> TrainConfig:
    """The composed configuration as dataclasses, placed on this machine.

    Raises:
        ConfigError: see `experiments.config.build` and `experiments.place.place`.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from None
    return place(configs.build(values), accelerators=accelerators(), world=world)


def accelerators() -> dict[str, int]:
    """Devices by type: `{"cuda": 8}`, or empty."""
    if not torch.accelerator.is_available():
        return {}
    return {torch.accelerator.current_accelerator().type: torch.accelerator.device_count()}


def start(config: TrainConfig, folder: Path, overrides: list[str]) -> None:
    """Start this run's ranks and wait for them; results go to `folder`.

    Raises:
        ConfigError: there is no text where the configuration says, and nothing was started; or no plan
            fits into `run.device_gb`.
        LaunchError: a rank failed.
    """
    try:
        corpus_of(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    job.write_text(json.dumps(job_values(config, folder, overrides), indent=1) + "\n", encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    refusal = folder / REFUSAL
    refusal.unlink(missing_ok=True)
    try:
        launch(
            [sys.executable, "-u", "-m", "experiments.worker", str(job)],
            ranks=ranks_of(config),
            logs=folder / "ranks",
            env={"PYTHONPATH": path},
        )
    except LaunchError:
        if not refusal.exists():
            raise
        raise ConfigError(refusal.read_text(encoding="utf-8")) from None


def job_values(config: TrainConfig, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """What a rank is told, as JSON."""
    return {"config": dataclasses.asdict(config), "folder": str(folder), "overrides": overrides}


def _be_a_rank(arguments: list[str]) -> NoReturn:
    """Compose without Hydra's command line: every rank would make a folder of its own."""
    flags = [a for a in arguments if a.startswith("-")]
    if flags:
        raise ConfigError(f"under torchrun only key=value arguments are taken, not {' '.join(flags)}.")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = hydra.compose("train", overrides=arguments, return_hydra_config=True)
    folder = Path(composed.hydra.run.dir).resolve()
    with_hydra = OmegaConf.to_container(composed, resolve=False)
    with_hydra.pop("hydra")
    config = checked(OmegaConf.create(with_hydra), world=int(os.environ["WORLD_SIZE"]))
    run_job(job_values(config, folder, arguments))


def _is_mistake(error: Exception) -> bool:
    if isinstance(error, MISTAKES):
        return True
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename  # `run=null` and the like
    return any(f"{os.sep}{package}{os.sep}" in innermost for package in ("hydra", "omegaconf"))


def _message(error: Exception) -> str:
    cause = error.__cause__
    more = f"\n{cause}" if isinstance(cause, OmegaConfBaseException) else ""
    return f"error: {error}{more}"


if __name__ == "__main__":
    main()
