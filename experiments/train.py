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
from collections.abc import Iterable
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
from experiments.config import NEVER, ConfigError, TrainConfig
from experiments.data import corpus_of
from experiments.place import place, ranks_of
from experiments.resume import finished, sweep_taken, taken
from experiments.sweep import RESULT, STOPPED, read_result, write_result
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
            with sweep_taken(sys.argv[1:]) as arguments:
                sys.argv[1:] = arguments
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
        start(asked_of(composed), folder, overrides, chosen=_names_folder(here.overrides.hydra))
        return
    try:  # a run that fails must not take the table of all runs with it
        asked = asked_of(composed)
        if asked.run.resume != NEVER and finished(folder, asked):
            print(f"resume: {folder} is finished", flush=True)
        elif start(asked, folder, overrides, chosen=True) == STOPPED:
            raise SystemExit(0)  # so is the sweep
    except Exception as error:
        told = _message(error) if _is_mistake(error) else traceback.format_exc()
        print(told, file=sys.stderr, flush=True)
        write_result(folder, status="failed", overrides=overrides, error=told)


def _names_folder(overrides: Iterable[str]) -> bool:
    return any(o.startswith("hydra.run.dir=") for o in overrides)


def asked_of(composed: DictConfig) -> TrainConfig:
    """The composed configuration as dataclasses, as the command says it.

    Raises:
        ConfigError: see `experiments.config.build`.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from None
    return configs.build(values)


def accelerators() -> dict[str, int]:
    """Devices by type: `{"cuda": 8}`, or empty."""
    if not torch.accelerator.is_available():
        return {}
    return {torch.accelerator.current_accelerator().type: torch.accelerator.device_count()}


def start(asked: TrainConfig, fresh: Path, overrides: list[str], *, chosen: bool) -> str:
    """Start this run's ranks and wait for them; results go to `fresh`, or to where it went on.

    Args:
        chosen: the command names the folder.

    Returns:
        The result's status, "ok" or "stopped".

    Raises:
        ConfigError: what cannot be on this machine, see `experiments.place.place`; no text where the
            configuration says; no checkpoint where `run.resume` says; and nothing was started. Or ranks found
            that no plan fits into `run.device_gb`, or that a checkpoint could not be read or written.
        LaunchError: a rank failed.
    """
    config = place(asked, accelerators=accelerators())
    try:
        corpus_of(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with taken(asked, fresh, chosen=chosen) as run:
        folder = Path(run.folder)
        job = folder / "job.json"
        values = {**job_values(config, overrides), "run": dataclasses.asdict(run)}
        job.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        for name in (REFUSAL, RESULT):
            (folder / name).unlink(missing_ok=True)
        try:
            launch(
                [sys.executable, "-u", "-m", "experiments.worker", str(job)],
                ranks=ranks_of(config),
                logs=folder / "ranks",
                env={"PYTHONPATH": path},
                max_restarts=config.run.max_restarts,
                grace_s=config.run.stop_grace_s,
            )
        except LaunchError:
            refusal = folder / REFUSAL
            if not refusal.exists():
                raise
            raise ConfigError(refusal.read_text(encoding="utf-8")) from None
        return read_result(folder)["status"]


def job_values(config: TrainConfig, overrides: list[str]) -> dict[str, Any]:
    """What every rank is told, as JSON."""
    return {"config": dataclasses.asdict(config), "overrides": overrides}


def _be_a_rank(arguments: list[str]) -> NoReturn:
    """Compose without Hydra's command line: every rank would make a folder of its own."""
    flags = [a for a in arguments if a.startswith("-")]
    if flags:
        raise ConfigError(f"under torchrun only key=value arguments are taken, not {' '.join(flags)}.")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = hydra.compose("train", overrides=arguments, return_hydra_config=True)
    fresh = {"fresh": str(Path(composed.hydra.run.dir).resolve()), "chosen": _names_folder(arguments)}
    with_hydra = OmegaConf.to_container(composed, resolve=False)
    with_hydra.pop("hydra")
    asked = asked_of(OmegaConf.create(with_hydra))
    config = place(asked, accelerators=accelerators(), world=int(os.environ["WORLD_SIZE"]))
    run_job({**job_values(config, arguments), **fresh, "asked": dataclasses.asdict(asked)})


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
