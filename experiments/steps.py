"""Steps: what every training job does between its first and its last one, as one rank does it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import fnshard as fs
from experiments.config import AUTO, AdamWConfig, RunConfig, ScheduleConfig, SGDConfig
from experiments.plan import MEMORY, append_compiled, write_memory
from experiments.report import Report, Silent
from experiments.resume import Run
from experiments.saver import Saver
from experiments.sweep import STOPPED, write_result
from fnshard import tree
from fnshard.rank import Stop


@dataclass(frozen=True)
class Training:
    """What does not change from step to step.

    Args:
        run: the configuration's.
        step: the compiled step, on `mesh`.
        loader: this rank's batches, each a tuple of arguments; it has `state_dict`.
        evaluate: the held-out loss of parameters; all ranks call it together.
    """

    run: RunConfig
    mesh: fs.Mesh
    step: Any
    loader: Iterator[tuple[Any, ...]]
    evaluate: Callable[[Any], float]


def run_steps(
    training: Training, state: fs.TrainState, report: Report | Silent, saver: Saver, stop: Stop
) -> tuple[fs.TrainState, float | None]:
    """The run's steps that are left, with held-out losses and checkpoints between them.

    Returns:
        The last state, and its held-out loss: None if a rank was asked to stop.
    """
    run, first = training.run, int(state.step) + 1
    held_out = None
    if first > 1:  # it may have been killed before it had measured, or after
        held_out = _held_out(training, state, report, first - 1)
    for number in range(first, run.steps + 1):
        if stop.asked:
            training.step.tell("stop")
        state = one_step(training, state, report, number, number - first + 1, saver.root.parent)
        if training.step.heard("stop"):
            report.sync()
            saver.save_last(number, state, training.loader, None)
            return state, None
        held_out = _held_out(training, state, report, number)
        if saver.due(number):
            report.sync()
            saver.save(number, state, training.loader, held_out)
    return state, held_out


def one_step(
    training: Training, state: fs.TrainState, report: Report | Silent, number: int, here: int, folder: Path
) -> fs.TrainState:
    """Step `number` of the run, the `here`th of this process."""
    mesh, step = training.mesh, training.step
    batch = tree.map(lambda part: part.to(mesh.device), next(training.loader))
    tells = here == 1 and mesh.rank == 0
    if tells:
        lowered = step.lower(state, *batch)
        (folder / "schedule.txt").write_text(lowered.as_text() + "\n", encoding="utf-8")
        write_memory(lowered, folder)
    watched = here == 2 and mesh.device_type == "cuda"
    if watched:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    state, metrics = step(state, *batch)
    values = {name: value.item() for name, value in told(metrics).items()}
    report.step(number, values, time.perf_counter() - began)
    if tells:
        append_compiled(lowered, folder)
    if watched and mesh.rank == 0:
        _tell_peak(torch.cuda.max_memory_allocated(), folder)
    return state


def told(metrics: dict[str, Any]) -> dict[str, Any]:
    """What a row of the metrics says of a step: its scalars, those of `aux` by name."""
    plain = {name: value for name, value in metrics.items() if name != "aux"}
    aux = metrics.get("aux")
    return plain | (aux if isinstance(aux, dict) else {})


def _held_out(training: Training, state: fs.TrainState, report: Report | Silent, number: int) -> float | None:
    """The held-out loss after step `number`, if it is to be known there."""
    run = training.run
    if number % run.held_out_every and number != run.steps:
        return None
    loss = training.evaluate(state.params)
    report.held_out(number, loss)
    return loss


def _tell_peak(measured_bytes: int, folder: Path) -> None:
    """What the allocator of rank 0's device saw of a step, beside the prediction."""
    said = f"measured peak of a step: {measured_bytes / 1e6:.1f} MB"
    with (folder / MEMORY).open("a", encoding="utf-8") as file:
        file.write(f"\n{said}\n")
    print(said, flush=True)


# ------------------------------------------------------------------ the optimizer


def make_optimizer(
    chosen: AdamWConfig | SGDConfig, schedule: ScheduleConfig, steps: int, undecayed: tuple[str, ...]
) -> fs.optim.Optimizer:
    """Clipping, then the optimizer named; leaves that `undecayed`'s globs match do not decay."""
    rate = make_rate(schedule, chosen.lr, steps)
    decay = [*((glob, 0.0) for glob in undecayed), ("*", chosen.weight_decay)]
    if isinstance(chosen, AdamWConfig):
        made = fs.optim.adamw(rate, b1=chosen.b1, b2=chosen.b2, eps=chosen.eps, weight_decay=decay)
    else:
        made = fs.optim.sgd(rate, momentum=chosen.momentum, nesterov=chosen.nesterov, weight_decay=decay)
    return made if chosen.clip is None else fs.optim.chain(fs.optim.clip_by_global_norm(chosen.clip), made)


def make_rate(shape: ScheduleConfig, peak: float, steps: int) -> fs.schedules.Schedule:
    """The learning rate by step: the configuration's fractions as steps and rates."""
    if shape.name == "constant":
        return fs.schedules.constant(peak)
    phases = {"warmup": math.floor(shape.warmup * steps), "total": steps, "floor": shape.floor * peak}
    if shape.name == "wsd":
        phases["decay"] = math.floor(shape.decay * steps)
    return fs.schedules.SCHEDULES[shape.name](peak=peak, **phases)


# ------------------------------------------------------------------ beginning and ending


def start_folder(folder: Path, config: Any) -> None:
    """A run's folder, with its configuration as it was placed on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    resolved = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
    (folder / "config.yaml").write_text(resolved, encoding="utf-8")


def tell_resume(run: RunConfig, state: fs.TrainState, found: str) -> None:
    """Where the run goes on from."""
    if found:
        print(f"resume: step {int(state.step)} of {found}", flush=True)
    elif run.resume == AUTO:
        print("resume: nothing to go on from, a new run", flush=True)


def tell_stop(run: RunConfig, state: fs.TrainState, where: Run, overrides: list[str]) -> None:
    """That the run has stopped before its end, and how it is gone on with."""
    number = int(state.step)
    write_result(Path(where.folder), status=STOPPED, overrides=overrides, step=number)
    print(
        f"stopped: step {number} of {run.steps} is saved; the same command goes on from there, "
        f"another one with run.resume={where.folder}",
        flush=True,
    )
