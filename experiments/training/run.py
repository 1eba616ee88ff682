"""Run: a job on one rank, from its start in this process to its end; jobs differ in their `Setup`."""

from __future__ import annotations

import dataclasses
import math
import socket
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

import fnshard as fs
from experiments.configs.plan import write_plan
from experiments.configs.train import AUTO
from experiments.data.files import write_sealed
from experiments.data.loader import Loader
from experiments.trackers.registry import chosen
from experiments.training.checkpoints import Saver, replicas_of, restored
from experiments.training.report import Report, Silent, metrics_next_to
from experiments.training.result import STOPPED, write_result
from experiments.training.resume import RunFolder
from experiments.training.run_record import RunRecord, TimeSpent, facts_of, speed_name, varying
from experiments.training.steps import Setup, Training, run_steps
from fnshard.launcher.rank import Stop


@dataclass(frozen=True)
class Ending:
    """A run that has made its last step."""

    run: RunFolder
    overrides: list[str]
    report: Report | Silent
    spent: TimeSpent
    state: fs.TrainState
    held_out: float

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    def write_result(self, measured: Mapping[str, float], *, sample: str) -> str:
        """On rank 0, leave the run's result.

        Args:
            measured: what the job has measured at the end.
            sample: the name of the file of samples, for the trackers.

        Returns:
            Its time and memory, as text.
        """
        rows, goal, speed = self.report.totals, self.report.goal, speed_name(self.report.unit)
        losses, trained = list(rows.losses)[-20:], list(rows.trained)[-20:]
        summary = {
            "loss": statistics.mean(losses) if losses else math.nan,
            goal.name: statistics.mean(trained) if trained else math.nan,
            **measured,
            speed: self.report.tokens / rows.step_seconds(),
        }
        # Where metrics were lost, and no step was left to make, the rows' numbers are not known.
        unknown = {n for n in ("loss", goal.name, speed) if math.isnan(summary[n]) and not losses}
        summary = {name: value for name, value in summary.items() if name not in unknown}
        names = (f"{goal.name}.png", sample, "config.yaml", "schedule.txt")
        artifacts = [self.folder / name for name in names]
        totals = self.report.finish("ok", [a for a in artifacts if a.exists()], **summary)
        values = {**summary, "seconds": totals["seconds"], **varying(totals)}  # of the run, not of its steps
        write_result(self.folder, status="ok", overrides=self.overrides, goal=goal.as_dict(), **values)
        return self.report.closing(totals)


def run_job(job: str, make: Callable[[], Setup], run: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Go on from the run's newest checkpoint, if it has one, to the last step, or until a rank has to stop.

    Args:
        job: the module of `experiments` that was started.
    """
    spent, began = TimeSpent.since(Path(run.folder), run.began)
    with spent.on("start"):
        setup = make()
        config, folder, mesh = setup.config, Path(run.folder), setup.mesh
        replicas = replicas_of(config.run, setup.step, folder)
        state, loader, found = begin(setup, run, replicas)
        if mesh.rank == 0 and found:
            print(f"resume: step {int(state.step)} of {found}", flush=True)
        elif mesh.rank == 0 and config.run.resume == AUTO and not run.makes:
            print("resume: nothing to go on from, a new run", flush=True)
        report = _report(job, setup, run, overrides, int(state.step), found, spent, began)
        if mesh.rank == 0 and not run.makes:
            print(f"goal: the run {setup.goal.aim}", flush=True)
            setup.introduce(state)
        if mesh.rank == 0:
            write_plan(setup.plan, folder)
    with report:
        baseline = setup.baseline(state, folder, spent)
        saver = Saver(config, run.root, mesh.rank, setup.goal)
        training = Training(setup, loader, lambda: begin(setup, run)[:2], report, saver, spent, replicas)
        state, held_out = run_steps(training, state, stop)
        report.close()
        if held_out is not None:
            setup.finish(Ending(run, overrides, report, spent, state, held_out), baseline)
        elif mesh.rank == 0:
            _print_stop(config.run.steps, int(state.step), run, overrides, report)


def begin(
    setup: Setup, run: RunFolder, replicas: fs.checkpoint.Replicas | None = None
) -> tuple[fs.TrainState, Loader, str]:
    """The state to resume, a loader that stands there, and the checkpoint that they are of."""
    loader = setup.loader()
    state, found = restored(run.root, run.source, setup.step, setup.mesh, loader, replicas)
    return setup.first_state() if state is None else state, loader, found


def _report(
    job: str,
    setup: Setup,
    run: RunFolder,
    overrides: list[str],
    made: int,
    found: str,
    spent: TimeSpent,
    began: float,
) -> Report | Silent:
    """A run's report, on rank 0; all ranks call it together.

    Args:
        made: steps that were made before.
        found: the checkpoint that is resumed, or nothing.
        began: when the command began.
    """
    config, mesh, folder = setup.config, setup.mesh, Path(run.folder)
    hosts = setup.step.gather_strings(socket.gethostname())
    if mesh.rank != 0:
        return Silent()
    write_sealed(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    facts = {**facts_of(config, job, overrides, mesh, hosts), "goal": setup.goal.as_dict()}
    record = RunRecord(folder, facts, made, spent, began)
    return Report(
        folder, config.run.steps, setup.tokens, record, made, metrics_next_to(folder, found),
        trackers=chosen(config.tracker), device_type=mesh.device_type, goal=setup.goal, unit=setup.unit,
    )  # fmt: skip


def _print_stop(steps: int, number: int, run: RunFolder, overrides: list[str], report: Report) -> None:
    """Report that the run has stopped before its end, and how to resume it."""
    report.finish(STOPPED)
    write_result(Path(run.folder), status=STOPPED, overrides=overrides, step=number)
    print(
        f"stopped: step {number} of {steps} is saved; the same command goes on from there, "
        f"another one with run.resume={run.folder}",
        flush=True,
    )
