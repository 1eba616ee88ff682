"""Steps: what every training job does between its first and its last one, as one rank does it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from hydra.utils import instantiate

import fnshard as fs
from experiments.configs.plan import MEMORY, Plan, append_compiled, hardware_of, write_memory
from experiments.configs.train import AUTO, AdamWConfig, RunConfig, ScheduleConfig, SGDConfig
from experiments.data.files import append, write_text
from experiments.data.loader import Loader
from experiments.training.checkpoints import Saver
from experiments.training.goal import HELD_OUT, Goal
from experiments.training.report import Report, Silent
from experiments.training.run_record import StepWork, TimeSpent
from experiments.training.tracing import Tracer
from experiments.training.watchdog import Begin, Watchdog
from fnshard.analysis.hardware import TABLE
from fnshard.launcher.rank import Stop
from fnshard.losses import Mean


@dataclass(frozen=True)
class Launched:
    """A step that may be under way on the device, and what it will report."""

    number: int
    metrics: Any
    seconds: float


class Setup(Protocol):
    """What a job makes of its configuration. All ranks call its methods together, but `introduce`.

    `tokens`: of one step, of all ranks. `unit`: what one is, "byte", "token" or "row". `goal`: what the run
    is judged by. Of what can be left out, the methods here do nothing.
    """

    config: Any
    mesh: fs.Mesh
    plan: Plan
    step: Any
    tokens: int
    unit: str
    goal: Goal

    def loader(self) -> Loader:
        """This rank's batches, from the first step on."""

    def first_state(self) -> fs.TrainState:
        """The state before the first step."""

    def introduce(self, state: fs.TrainState) -> None:
        """On rank 0, what people see before the first step."""

    def baseline(self, state: fs.TrainState, folder: Path, spent: TimeSpent) -> Any:
        """What is measured before the first step, for `finish`."""

    def batch(self, state: fs.TrainState, loaded: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a step takes, of its state and of what the loader gives."""
        return loaded

    def evaluate(self, params: Any) -> tuple[float, Mapping[str, float]]:
        """Return the goal's number on held-out data, and more numbers by name."""

    def sample(self, params: Any) -> str:
        """What the model says after the configuration's prompts."""

    def compile_ahead(self, state: fs.TrainState) -> None:
        """After the first step: compile what later ones need."""

    def finish(self, end: Any, baseline: Any) -> None:
        """Samples, exports, results; `end`: a `run.Ending`."""


@dataclass
class Training:
    """What steps take of a run.

    Args:
        loader: this rank's batches, each a tuple of arguments; it has `state_dict`.
        begin: the state to resume, and a loader that stands there.
        spent: where this process's time goes.
        replicas: what keeps states in memory, if anything does.
    """

    setup: Setup
    loader: Iterator[tuple[Any, ...]]
    begin: Begin
    report: Report | Silent
    saver: Saver
    spent: TimeSpent
    replicas: fs.checkpoint.Replicas | None = None
    tracer: Tracer | None = field(default=None, init=False)
    unread: list[Launched] = field(default_factory=list, init=False)  # at most the last step

    def __post_init__(self) -> None:
        self.config, self.step = self.setup.config, self.setup.step
        self.watch = Watchdog(self.step, self.config.run.watch, self.begin, self.report.say)

    @property
    def folder(self) -> Path:
        return self.saver.root.parent


def run_steps(training: Training, state: fs.TrainState, stop: Stop) -> tuple[fs.TrainState, float | None]:
    """The run's steps that are left, with held-out losses and checkpoints between them.

    Returns:
        The last state, and its held-out loss: None if a rank was asked to stop.

    Raises:
        DivergedError: a step was not finite; on all ranks.
    """
    run, first = training.config.run, int(state.step) + 1
    report, saver, replicas, spent = training.report, training.saver, training.replicas, training.spent
    training.step.clear_flag("stop")
    if replicas is not None:
        replicas.start(state)
    held_out = None
    if first > 1:  # it may have been killed before it had measured, or after
        held_out = _held_out(training, state, first - 1)
    try:
        for number in range(first, run.steps + 1):
            if stop.asked:
                training.step.raise_flag("stop")
            state = one_step(training, state, number, number - first + 1)
            stops, saves = training.step.flag_raised("stop"), saver.due(number)
            copies = replicas is not None and number % run.replica_every == 0
            if stops or saves or copies or _measures(run, number):
                report_rows(training, read(training))
            if stops or saves:
                with spent.on("saves"):
                    training.watch.before_save(state, number)
            if training.watch.fault:
                del state  # its memory is needed
                raise training.watch.diverged()
            if stops:
                with spent.on("saves"):
                    report.sync()
                    saver.save_last(number, state, training.loader, None)
                break
            if copies:
                with spent.on("saves"):
                    replicas.save(state, training.loader)
            held_out = _held_out(training, state, number)
            if saves:
                with spent.on("saves"):
                    report.sync()
                    saver.save(number, state, training.loader, held_out)
        else:
            stops = False
    finally:  # a run that breaks off has a row for every step whose numbers have arrived
        with suppress(RuntimeError, OSError):
            report_rows(training, read(training, wait=False))
    if replicas is not None:  # the last state is on disk
        fs.checkpoint.wait()
        replicas.close()
    _write_trace(training)
    return state, None if stops else held_out


def one_step(training: Training, state: fs.TrainState, number: int, here: int) -> fs.TrainState:
    """Step `number` of the run, the `here`th of this process; reports the numbers of the step before.

    The device works on this step while the host reads those, so it never waits for the host. The
    seconds are those from the call of a step until the one before it is done: on a device that is busy,
    what a step takes there.
    """
    step, spent = training.step, training.spent
    on_gpu, is_first = step.mesh.device_type == "cuda", here == 1
    with spent.on("data"):
        loaded = next(training.loader)
    with spent.on("rollouts"):  # where answers are rewarded the model draws them; else this takes no time
        batch = training.setup.batch(state, loaded)  # the step sends it to the device
    lowered, compiles = None, is_first and training.config.run.backend != "eager"
    if is_first and (step.mesh.rank == 0 or training.config.run.profile):
        with spent.on("lowering"):
            lowered = step.lower(state, *batch)
            if training.config.run.profile:
                training.tracer = _tracer(training, lowered)
            if step.mesh.rank == 0:
                _describe(training, lowered)
    if here == 2 and on_gpu:
        torch.cuda.reset_peak_memory_stats()
    tracing = nullcontext() if training.tracer is None else training.tracer.on(here)
    with tracing, spent.on("compile" if compiles else "steps"):
        began = time.perf_counter()
        state, metrics = step(state, *batch)
        before = read(training)
        seconds = time.perf_counter() - began
    report_rows(training, before)
    training.unread.append(Launched(number, metrics, seconds))
    if is_first:
        with spent.on("compile" if compiles else "steps"):
            report_rows(training, read(training))  # nobody waits for what is prepared
        with spent.on("lowering"):
            training.setup.compile_ahead(state)
    if lowered is not None and step.mesh.rank == 0:
        _describe_compiled(training, lowered)
    if here == 2 and on_gpu and step.mesh.rank == 0:
        peak = torch.cuda.max_memory_allocated()
        _add_memory(training, f"measured peak of a step: {peak / 1e6:.1f} MB")
    if training.tracer is not None and training.tracer.done(here):
        _write_trace(training)
    return state


def _describe(training: Training, lowered: Any) -> None:
    """Write what the step is before it runs: its schedule, its memory."""
    mesh, planned = training.step.mesh, training.setup.plan.hardware
    write_text(training.folder / "schedule.txt", lowered.as_text() + "\n")
    write_memory(lowered, training.folder)
    training.report.work = StepWork.of(lowered, peak_of(planned, mesh), hardware_of(AUTO, mesh))


def _tracer(training: Training, lowered: Any) -> Tracer:
    steps, base = training.config.run.profile, hardware_of(AUTO, training.step.mesh)
    return Tracer(training.step, steps, lowered, training.setup.plan.hardware or base, base, training.folder)


def _describe_compiled(training: Training, lowered: Any) -> None:
    """Write what is known after the first step."""
    with training.spent.on("reports"):
        append_compiled(lowered, training.folder)
    if training.replicas is not None:
        size = training.replicas.node_bytes / 1e6
        _add_memory(training, f"replicas: {size:.1f} MB of each node's host memory")


def _add_memory(training: Training, text: str) -> None:
    append(training.folder / MEMORY, f"\n{text}\n")
    training.report.say(text)


def _write_trace(training: Training) -> None:
    if training.tracer is not None:
        with training.spent.on("tracing"):
            text = training.tracer.write()
        training.tracer = None
        if text:
            training.report.say(text)


Row = tuple[Launched, dict[str, float]]


def read(training: Training, *, wait: bool = True) -> list[Row]:
    """The numbers of the step that was launched last, once; without `wait`, only if they have arrived."""
    rows = [(each, each.metrics.numbers()) for each in training.unread if wait or each.metrics.ready]
    training.unread.clear()
    return rows


def report_rows(training: Training, rows: list[Row]) -> None:
    """What was read, to the report and to the watchdog."""
    for launched, values in rows:
        with training.spent.on("reports"):
            training.report.step(launched.number, values, launched.seconds)
        training.watch.look(launched.number, values)


def _measures(run: RunConfig, number: int) -> bool:
    return number % run.held_out_every == 0 or number == run.steps


def _held_out(training: Training, state: fs.TrainState, number: int) -> float | None:
    """Return the goal's number on held-out data after step `number`, if it is to be known there."""
    if not _measures(training.config.run, number):
        return None
    with training.spent.on("evaluation"):
        value, more = training.setup.evaluate(state.params)
    training.report.held_out(number, value, {HELD_OUT + name: each for name, each in more.items()})
    return value


def mean_over(
    forward: Callable[..., Any], params: Any, batches: Iterable[Any], device: torch.device
) -> tuple[float, dict[str, float]]:
    """The loss of all batches of all ranks, and the means of its `aux`; exact means, not means of means."""
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        loss, aux = forward(params, *batch)  # which sends it to the device
        for name, mean in {"": loss, **aux}.items():
            sums[name] = sums.get(name, torch.zeros((), device=device)) + _both(mean, device)
    sums = {name: both.cpu() for name, both in sums.items()}
    if dist.is_initialized():
        for both in sums.values():
            dist.all_reduce(both)
    means = {name: (both[0] / both[1].clamp(min=1)).item() for name, both in sums.items()}
    return means.pop("", math.nan), means


def _both(mean: Mean, device: torch.device) -> torch.Tensor:
    both = mean.total, mean.count
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in both])


# ------------------------------------------------------------------ the optimizer


def make_optimizer(
    chosen: AdamWConfig | SGDConfig | dict[str, Any],
    schedule: ScheduleConfig,
    steps: int,
    undecayed: tuple[str, ...],
    rates: Any = 1.0,
) -> fs.optim.Optimizer:
    """Clipping, then the optimizer named; leaves that `undecayed`'s globs match do not decay, and `rates` are
    adamw's `lr_scale`. Or what a `_target_` makes by itself of the rate, if it has an `lr`, and of its other
    keys."""
    if isinstance(chosen, dict):
        rate = {"lr": make_rate(schedule, chosen["lr"], steps)} if "lr" in chosen else {}
        others = {name: value for name, value in chosen.items() if name != "lr"}
        return instantiate(others, _convert_="all", _partial_=True)(**rate)  # Hydra takes no rate as it is
    rate = make_rate(schedule, chosen.lr, steps)
    decay = [*((glob, 0.0) for glob in undecayed), ("*", chosen.weight_decay)]
    if isinstance(chosen, AdamWConfig):
        made = fs.optim.adamw(
            rate, b1=chosen.b1, b2=chosen.b2, eps=chosen.eps, weight_decay=decay, lr_scale=rates
        )
    else:
        made = fs.optim.sgd(rate, momentum=chosen.momentum, nesterov=chosen.nesterov, weight_decay=decay)
    return made if chosen.clip is None else fs.optim.chain(fs.optim.clip_by_global_norm(chosen.clip), made)


def make_rate(shape: ScheduleConfig, peak: float, steps: int) -> fs.schedules.RateSchedule:
    """The learning rate by step: the configuration's fractions as steps and rates."""
    if shape.name == "constant":
        return fs.schedules.constant(peak)
    phases = {"warmup": math.floor(shape.warmup * steps), "total": steps, "floor": shape.floor * peak}
    if shape.name == "wsd":
        phases["decay"] = math.floor(shape.decay * steps)
    return fs.schedules.SCHEDULES[shape.name](peak=peak, **phases)


def peak_of(planned: fs.Hardware | None, mesh: fs.Mesh) -> fs.Hardware | None:
    """The hardware whose peak an MFU is a share of: one that was measured, or a GPU that the table knows."""
    if planned is not None and not planned.name.startswith(tuple(TABLE)):
        return planned
    if mesh.device_type != "cuda":
        return None  # the table's CPU is nobody's
    return fs.Hardware.of_gpu(torch.cuda.get_device_name())
