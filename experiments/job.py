"""Job: what a command line starts that ranks do together: `python -m experiments.train`, `.finetune`.

Hydra composes and checks the configuration; then this process starts the ranks and waits for them, or is one
itself where `torchrun` started it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from experiments import config as configs
from experiments.command import answer, is_mistake, message
from experiments.config import NEVER, ConfigError
from experiments.place import place, ranks_of
from experiments.resume import finished, sweep_taken, taken
from experiments.sweep import RESULT, STOPPED, read_result, write_result
from experiments.worker import REFUSAL, run_job
from fnshard.launch import LaunchError, launch, under_launcher

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"


@dataclass(frozen=True)
class Job:
    """One kind of job.

    Args:
        name: of its configuration, `NAME.yaml`.
        module: where it is, as `JOB`.
        config: the configuration's dataclass; has `run`, `mesh` and `data`, as `TrainConfig` does.
        work: what that rank does: (placed config, `Run`, overrides, `Stop`).
        prepare: what is done before ranks start, with the placed configuration; gives the one for the ranks.
            Mistakes in what the configuration names (files, directories) are found here.
        conf: the folder of its configuration.
        without_files: groups of the configuration with no files to choose from.
    """

    name: str
    module: str
    config: type
    work: Callable[..., None]
    prepare: Callable[[Any], Any]
    conf: Path = CONF
    without_files: tuple[str, ...] = ("mesh",)

    @property
    def schema(self) -> str:
        """What `ConfigStore` calls the configuration's schema."""
        return "schema" if self.name == "train" else f"{self.name}_schema"


def main(job: Job) -> None:
    """Run the command line; a user's mistake is one message and exit code 1."""
    configs.register(job.config, job.schema, job.without_files)
    answer(lambda: _run(job))


def _run(job: Job) -> None:
    if under_launcher():
        record(be_a_rank)(job, sys.argv[1:])  # torchrun shows the error, whichever rank ends first
        return

    @hydra.main(version_base="1.3", config_path=str(job.conf), config_name=job.name)
    def command_line(composed: DictConfig) -> None:
        _one(job, composed)

    with sweep_taken(sys.argv[1:], job.name) as arguments:
        sys.argv[1:] = arguments
        command_line()


def _one(job: Job, composed: DictConfig) -> None:
    """One run; called once for each run of a `--multirun`."""
    here = HydraConfig.get()
    folder = Path(here.runtime.output_dir).resolve()
    overrides = list(here.overrides.task)
    if here.mode != RunMode.MULTIRUN:
        start(job, asked_of(job, composed), folder, overrides, chosen=_names_folder(here.overrides.hydra))
        return
    try:  # a run that fails must not take the table of all runs with it
        asked = asked_of(job, composed)
        if asked.run.resume != NEVER and finished(folder, asked):
            print(f"resume: {folder} is finished", flush=True)
        elif start(job, asked, folder, overrides, chosen=True) == STOPPED:
            raise SystemExit(0)  # so is the sweep
    except Exception as error:
        told = message(error) if is_mistake(error) else traceback.format_exc()
        print(told, file=sys.stderr, flush=True)
        write_result(folder, status="failed", overrides=overrides, error=told)


def _names_folder(overrides: Iterable[str]) -> bool:
    return any(o.startswith("hydra.run.dir=") for o in overrides)


def asked_of(job: Job, composed: DictConfig) -> Any:
    """The composed configuration as dataclasses, as the command says it.

    Raises:
        ConfigError: see `experiments.config.build`.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from None
    return configs.build(values, job.config)


def accelerators() -> dict[str, int]:
    """Devices by type: `{"cuda": 8}`, or empty."""
    if not torch.accelerator.is_available():
        return {}
    return {torch.accelerator.current_accelerator().type: torch.accelerator.device_count()}


def start(job: Job, asked: Any, fresh: Path, overrides: list[str], *, chosen: bool) -> str:
    """Start this run's ranks and wait for them; results go to `fresh`, or to where it went on.

    Args:
        chosen: the command names the folder.

    Returns:
        The result's status, "ok" or "stopped".

    Raises:
        ConfigError: what cannot be on this machine, see `experiments.place.place`; what `job.prepare` finds;
            no checkpoint where `run.resume` says; and nothing was started. Or ranks found that no plan fits
            into `run.device_gb`, or that a checkpoint could not be read or written.
        LaunchError: a rank failed.
    """
    config = job.prepare(place(asked, accelerators=accelerators()))
    with taken(asked, fresh, chosen=chosen) as run:
        folder = Path(run.folder)
        told = folder / "job.json"
        values = {**job_values(config, overrides), "run": dataclasses.asdict(run)}
        told.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        for name in (REFUSAL, RESULT):
            (folder / name).unlink(missing_ok=True)
        try:
            launch(
                [sys.executable, "-u", "-m", "experiments.worker", job.module, str(told)],
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


def job_values(config: Any, overrides: list[str]) -> dict[str, Any]:
    """What every rank is told, as JSON."""
    return {"config": dataclasses.asdict(config), "overrides": overrides}


def be_a_rank(job: Job, arguments: list[str]) -> NoReturn:
    """Compose without Hydra's command line: every rank would make a folder of its own."""
    flags = [a for a in arguments if a.startswith("-")]
    if flags:
        raise ConfigError(f"under torchrun only key=value arguments are taken, not {' '.join(flags)}.")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(job.conf)):
        composed = hydra.compose(job.name, overrides=arguments, return_hydra_config=True)
    fresh = {"fresh": str(Path(composed.hydra.run.dir).resolve()), "chosen": _names_folder(arguments)}
    with_hydra = OmegaConf.to_container(composed, resolve=False)
    with_hydra.pop("hydra")
    asked = asked_of(job, OmegaConf.create(with_hydra))
    config = place(asked, accelerators=accelerators(), world=int(os.environ["WORLD_SIZE"]))
    values = {**job_values(config, arguments), **fresh, "asked": dataclasses.asdict(asked)}
    run_job(job, values)
