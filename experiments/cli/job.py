"""Jobs of ranks, as `python -m experiments.train` and `.finetune` start them.

`experiments.cli.validation` has checked the command line, Hydra composes the configuration; then this process
starts the ranks and waits for them, or is one itself where `torchrun` started it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

from experiments import python_path
from experiments.cli import slurm
from experiments.cli.command_spec import Job, is_mistake, is_outside, run_by_hydra, text_of
from experiments.cli.sweep import TABLE, objective, print_table
from experiments.cli.worker import REFUSAL, refused, run_job
from experiments.compare.outcome import jobs_of
from experiments.configs.machine import place, process_began
from experiments.configs.train import NEVER, ConfigError
from experiments.data.files import write_json
from experiments.training.metrics_file import METRICS, read_rows
from experiments.training.result import RESULT, STOPPED, read_result, write_result
from experiments.training.resume import claimed, finished, newest_step
from fnshard.launcher.local import LaunchError, launch, under_launcher
from fnshard.launcher.rank import end_with_parent

LOCAL, SIDE_BY_SIDE = "basic", "joblib"  # Hydra's names of launchers


def run(job: Job, config: Any) -> None:
    """Answer a command line; `config` is what it means, None where it is a sweep."""
    if under_launcher():
        record(be_a_rank)(job, config, sys.argv[1:])  # torchrun shows the error, whichever rank ends first
        return
    slurm.check_one_node()
    if config is not None:
        placed(config)  # before Hydra makes a folder
    sweep, folders = os.getpid(), set[Path]()

    def one(composed: DictConfig) -> float | None:
        folders.add(Path(HydraConfig.get().sweep.dir).resolve())
        return _one(job, composed, sweep)

    try:
        run_by_hydra(job.spec, one)
    except Exception:
        # What breaks a whole sweep, as a search in which every trial fails, hides none of its runs.
        for folder in folders:
            jobs = jobs_of(folder) if folder.is_dir() else []
            if jobs and not (folder / TABLE).exists() and print_table(folder) == len(jobs):
                raise SystemExit(1) from None  # the table says why
        raise


def _one(job: Job, composed: DictConfig, sweep: int) -> float | None:
    """One run; called once for each run of a `--multirun`, wherever it runs, and then gives what a search is
    after.

    Args:
        sweep: the process of the command.
    """
    here = HydraConfig.get()
    folder = Path(here.runtime.output_dir).resolve()
    overrides, launcher = list(here.overrides.task), here.runtime.choices["hydra/launcher"]
    if here.mode != RunMode.MULTIRUN:
        _check_used(launcher)
        requested = job.spec.read_composed(composed)
        chosen = _names_folder(here.overrides.hydra)
        start(job, requested, folder, overrides, chosen=chosen, began=process_began())
        return None
    if launcher == SIDE_BY_SIDE and os.getpid() != sweep:
        end_with_parent(signal.SIGTERM, sweep)  # a worker would finish its job, unseen
    try:  # a run that fails must not take the table of all runs with it
        requested = job.spec.read_composed(composed)
        if requested.run.resume != NEVER and finished(folder, requested):
            print(f"resume: {folder} is finished", flush=True)
        elif start(job, requested, folder, overrides, chosen=True) == STOPPED and launcher == LOCAL:
            raise SystemExit(0)  # so is the sweep
    except Exception as error:
        _note_failure(error, folder, overrides)
    direction = getattr(here.sweeper, "direction", None) or "minimize"
    is_said = any(o.lstrip("+").startswith("hydra.sweeper.direction=") for o in here.overrides.hydra)
    name = str(getattr(direction, "name", direction))
    return objective(folder, here.callbacks.table.metric, name, is_said=is_said)


def _check_used(launcher: str) -> None:
    """See that a single run names no launcher."""
    if launcher != LOCAL:
        raise ConfigError(
            f"a launcher ({launcher}) starts the jobs of a sweep, and this is a single run. Fix: add "
            "--multirun, for one job, too; or leave the launcher out."
        )


def _note_failure(error: Exception, folder: Path, overrides: list[str]) -> None:
    known = is_mistake(error) or is_outside(error)
    text = f"error: {text_of(error)}" if known else "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    reason = "" if known else f"{type(error).__name__}: {error}".splitlines()[0]
    with suppress(OSError):  # on a full disk
        write_result(folder, status="failed", overrides=overrides, error=text, reason=reason)


def _names_folder(overrides: Iterable[str]) -> bool:
    return any(o.startswith("hydra.run.dir=") for o in overrides)


def accelerators() -> dict[str, int]:
    """Devices by type: `{"cuda": 8}`, or empty."""
    if not torch.accelerator.is_available():
        return {}
    return {torch.accelerator.current_accelerator().type: torch.accelerator.device_count()}


def placed(requested: Any, *, world: int | None = None, nodes: int = 1) -> Any:
    """The configuration on this machine, as `experiments.configs.machine.place` has it."""
    return place(requested, accelerators=accelerators(), world=world, nodes=nodes)


def start(
    job: Job, requested: Any, fresh: Path, overrides: list[str], *,
    chosen: bool, began: float | None = None, makes: str = "",
) -> str:  # fmt: skip
    """Start this run's ranks and wait for them; results go to `fresh`, or to where it went on.

    Args:
        chosen: the command names the folder.
        began: when the command began, in seconds of `time.time`; None: now, as of a job of a sweep.
        makes: as of `RunFolder`.

    Returns:
        The result's status, "ok" or "stopped".

    Raises:
        ConfigError: what cannot be on this machine, see `experiments.configs.machine.place`; what
            `job.prepare` finds; no checkpoint where `run.resume` says; and nothing was started. Or ranks
            found that no plan fits into `run.device_gb`, or that a checkpoint could not be read or written.
        LaunchError: a rank failed.
    """
    began = time.time() if began is None else began
    if (nodes := slurm.nodes()) > 1:
        return _start_on_nodes(
            job, requested, fresh, overrides, nodes, chosen=chosen, began=began, makes=makes
        )
    config = job.prepare(placed(requested))
    with claimed(requested, fresh, chosen=chosen) as run:
        run, folder = dataclasses.replace(run, began=began, makes=makes), Path(run.folder)
        job_file = folder / "job.json"
        write_json(job_file, {**job_values(config, overrides), "run": dataclasses.asdict(run)})
        for name in (REFUSAL, RESULT):
            (folder / name).unlink(missing_ok=True)
        try:
            launch(
                [sys.executable, "-u", *_worker(job, job_file)],
                ranks=config.mesh.ranks,
                logs=folder / "ranks",
                env={"PYTHONPATH": python_path()},
                max_restarts=config.run.max_restarts,
            )
        except KeyboardInterrupt:
            print(f"\ninterrupted: {_how_far(folder)}", file=sys.stderr, flush=True)
            raise
        except LaunchError as error:
            if not folder.is_dir():
                raise LaunchError(
                    f"{folder} was deleted while the run was at work in it: nothing of it is left. Fix: the "
                    "same command begins anew."
                ) from None
            known = refused(folder) or error
            with suppress(OSError):  # the disk may be what failed
                write_result(folder, status="failed", overrides=overrides, error=str(known))
            raise known from None
        return read_result(folder)["status"]


def _how_far(folder: Path) -> str:
    """What an interrupted run has come to, and where the same command goes on."""
    reached = max((row["step"] for row in read_rows(folder / METRICS, sys.maxsize)), default=0)
    saved = newest_step(folder)
    goes_on = f"goes on from {saved}" if saved else "begins anew: nothing was saved"
    return f"step {reached}; the same command {goes_on}"


def _start_on_nodes(
    job: Job, requested: Any, fresh: Path, overrides: list[str], nodes: int, *,
    chosen: bool, began: float, makes: str,
) -> str:  # fmt: skip
    """`start` on each node of a SLURM job: torchrun starts the ranks, and rank 0 takes the run's folder."""
    config = placed(requested, nodes=nodes)
    job_file = fresh / f"job.{os.environ['SLURM_NODEID']}.json"
    run = {"requested": dataclasses.asdict(requested), "fresh": str(fresh), "chosen": chosen}
    run |= {"began": began, "makes": makes}
    write_json(job_file, {**job_values(config, overrides), **run})
    agent = slurm.torchrun(config.mesh.ranks // nodes, config.run.max_restarts)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    if subprocess.run([sys.executable, *agent, *_worker(job, job_file)], env=environment).returncode:
        raise LaunchError(f"the ranks on {nodes} nodes failed: the output of torchrun says why.")
    return read_result(fresh)["status"]


def _worker(job: Job, job_file: Path) -> list[str]:
    return ["-m", "experiments.cli.worker", job.module, str(job_file)]


def job_values(config: Any, overrides: list[str]) -> dict[str, Any]:
    return {"config": dataclasses.asdict(config), "overrides": overrides}


def be_a_rank(job: Job, requested: Any, arguments: list[str]) -> NoReturn:
    """Compose without Hydra's command line: every rank would make a folder of its own."""
    flags = [a for a in arguments if a.startswith("-")]
    if flags:
        raise ConfigError(f"under torchrun only key=value arguments are taken, not {' '.join(flags)}.")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(job.spec.conf)):
        composed = hydra.compose(job.name, overrides=arguments, return_hydra_config=True)
    _check_used(composed.hydra.runtime.choices["hydra/launcher"])
    fresh = {"fresh": str(Path(composed.hydra.run.dir).resolve()), "chosen": _names_folder(arguments)}
    config = placed(requested, world=int(os.environ["WORLD_SIZE"]))
    run_job(job, {**job_values(config, arguments), **fresh, "requested": dataclasses.asdict(requested)})
