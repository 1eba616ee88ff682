"""A run of a job, around its steps, on each rank: folder, record, report, signals, checkpoints,
watchdog."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

import fnshard as fs
from experiments.data.loader import Loader
from experiments.lib.checks import ConfigError
from experiments.lib.config import AUTO
from experiments.lib.files import append, write_sealed, write_text
from experiments.lib.folder import STOPPED, RunFolder, has_step_folders, memory_name, write_result
from experiments.lib.metrics import HELD_OUT, Goal
from experiments.lib.plan import (
    MEMORY,
    Plan,
    hardware_of,
    peak_of,
    write_memory,
    write_search,
)
from experiments.lib.record import RunRecord, StepWork, TimeSpent, facts_of, in_words, speed_name, varying
from experiments.lib.report import Report, Silent, metrics_next_to
from experiments.lib.trackers import choose_trackers
from experiments.lib.watchdog import Watchdog
from fnshard.checkpoint.replicas import most_copies
from fnshard.errors import CheckpointError
from fnshard.launcher.rank import Stop

if TYPE_CHECKING:
    from experiments.lib.measured import Tracer

METRIC = "held_out"  # the name under which checkpoints note the number by which the best ones are kept


@dataclass(frozen=True)
class Launched:
    """A step that may be under way on the device, and what it will report."""

    number: int
    metrics: Any
    seconds: float


class Run:
    """A run of a job on one rank, from its start in this process to its end. All ranks call its methods
    together, but for `finish`, which rank 0 calls.

        with Run("train", config, folder, overrides, stop) as run:
            ...  # mesh, data, model, plan, step
            state, loader = run.restore(step, data.loader, lambda: step.init(model))
            run.open_report(state, plan, goal, tokens, unit)
            for number in run.numbers():
                state = run.make_step(number, state, next(loader))
                run.check_and_replicate(number, state, loader)
                if run.watch.fault:  # NaN
                    del state
                    raise run.watch.diagnose()
                held_out = measure(number, state) if run.is_measured_after(number) else None
                run.save_if_due(number, state, loader, held_out)
            if run.is_ending:  # SIGTERM
                run.end_early(int(state.step))
                return
            if run.mesh.rank == 0:
                run.finish(measured, sample="sample.txt")

    Its state: what the process has spent its time on, the step that was launched last and whose numbers
    nobody has read yet, and what `check_and_replicate` has decided.

    Args:
        job: the module of `experiments` that was started.
        config: the configuration on this machine, which has `run` and `tracker` as `TrainConfig` does.
        folder: the folder of the run, in which no other process works.
        overrides: the arguments of the command line.
        stop: a request that is `asked` after a SIGTERM to this rank. The next step tells all ranks, which
            make one more, save, and end.
    """

    def __init__(self, job: str, config: Any, folder: RunFolder, overrides: list[str], stop: Stop):
        self.job, self.config, self.overrides, self.stop_request = job, config, overrides, stop
        self.run_folder = folder
        self.folder = Path(folder.folder)
        self.timer, self._began = TimeSpent.since(self.folder, folder.began)
        self._starting = ExitStack()
        self._starting.enter_context(self.timer.during("start"))
        self.report: Report | Silent = Silent()
        self.replicas: fs.checkpoint.Replicas | None = None
        self.tracer: Tracer | None = None
        self.is_ending = self._is_save_due = False
        self._launched: list[Launched] = []  # at most the last step

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Write a row for every step whose numbers have arrived. A run that breaks off has failed."""
        # Numbers that have not arrived are not waited for, since another rank may be gone.
        if self._launched:
            with suppress(RuntimeError, OSError):
                self._report_rows(self._read_numbers(wait=False))
        self.report.__exit__(kind, error, trace)

    # ------------------------------------------------------------------ the start

    def restore(
        self,
        step: Any,
        make_loader: Callable[[], Loader],
        make_state: Callable[[], fs.TrainState],
    ) -> tuple[fs.TrainState, Loader]:
        """Return the state to go on from, and a loader that continues after the batches that it has seen.

        The state is that of the run's newest checkpoint, or of a newer replica in memory. If there is
        neither, it is that of the checkpoint that `run.resume` names, or else the one before the first step.

        Raises:
            CheckpointError: there are checkpoints, but none is whole, or fits the model and the optimizer.
            ConfigError: what was saved has seen other batches.
        """
        run, folder, self._step, self.mesh = self.config.run, self.run_folder, step, step.mesh
        if run.replicas:  # or as many as the nodes that are left can hold
            nodes = step.mesh.size // int(os.environ.get("LOCAL_WORLD_SIZE", step.mesh.size))
            copies = min(run.replicas, most_copies(nodes))
            name = memory_name(self.folder)
            self.replicas = fs.checkpoint.Replicas(step, name, copies=copies, timeout=run.timeout_s)

        def load(replicas: fs.checkpoint.Replicas | None = None) -> tuple[fs.TrainState, Loader, str]:
            loader = make_loader()
            state, found = restore_newest(folder.checkpoints, folder.source, step, loader, replicas)
            if state is None:
                state = make_state()
            return state, loader, found

        self._load_again = lambda: load()[:2]  # for the watchdog
        state, loader, self._found = load(self.replicas)
        if self.mesh.rank == 0 and self._found:
            print(f"resume: step {int(state.step)} of {self._found}", flush=True)
        elif self.mesh.rank == 0 and run.resume == AUTO:
            print(f"resume: nothing to go on from, a new run in {self.folder}", flush=True)
        return state, loader

    def open_report(self, state: fs.TrainState, plan: Plan, goal: Goal, tokens: int, unit: str) -> None:
        """Open the run's files and trackers, and start the watchdog and the replicas. Set `first`, the number
        of the next step.

        Args:
            tokens: the tokens of one step, of all ranks.
            unit: what `tokens` counts: "byte", "token" or "row".
        """
        config, made = self.config, int(state.step)
        self.plan, self.goal, self.first = plan, goal, made + 1
        hosts = self._step.gather_strings(socket.gethostname())
        if self.mesh.rank == 0:
            values = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
            write_sealed(self.folder / "config.yaml", values)
            facts = facts_of(config, self.job, self.overrides, self.mesh, hosts) | {"goal": goal.as_dict()}
            record = RunRecord(self.folder, facts, made, self.timer, self._began)
            self.report = Report(
                self.folder, config.run.steps, tokens, record, made,
                metrics_next_to(self.folder, self._found), trackers=choose_trackers(config.tracker),
                device_type=self.mesh.device_type, goal=goal, unit=unit,
            )  # fmt: skip
            print(f"goal: the run {goal.aim}", flush=True)
            write_search(plan, self.folder)
        self.watch = Watchdog(self._step, config.run.watch, self._load_again, self.report.say)
        self._step.clear_flag("stop")
        if self.replicas is not None:
            self.replicas.start(state)
        self._starting.close()

    # ------------------------------------------------------------------ the loop

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the steps to make, until all ranks know that one of them was asked to stop.

        The remaining steps are left to the next process.
        """
        for number in range(self.first, self.config.run.steps + 1):
            if self.stop_request.asked:
                self._step.raise_flag("stop")
            yield number
            if self.is_ending:
                break
        if self.replicas is not None:  # the last state is on disk
            fs.checkpoint.wait()
            self.replicas.close()
        self._write_trace()

    def make_step(self, number: int, state: fs.TrainState, batch: tuple[Any, ...]) -> fs.TrainState:
        """Make step `number`, and report the numbers of the step before.

        The device works on this step while the host reads those, so it never waits for the host. The seconds
        of a row are those from the call of a step until the step before it has finished; on a busy device
        that is the time of one step.

        Raises:
            SpecError, TraceError, ...: the errors of `fs.shard_step`.
        """
        step, timer, nth = self._step, self.timer, number - self.first + 1  # the nth step of this process
        on_gpu, is_first, is_writer = self.mesh.device_type == "cuda", nth == 1, self.mesh.rank == 0
        part = "compile" if is_first and self.config.run.backend != "eager" else "steps"
        lowered = None

        # Before the first step, lower it, since its schedule and its memory are written before it runs.
        if is_first and (is_writer or self.config.run.profile):
            with timer.during("lowering"):
                lowered = step.lower(state, *batch)
                planned, base = self.plan.hardware, hardware_of(AUTO, self.mesh)
                if profile := self.config.run.profile:
                    from experiments.lib.measured import Tracer

                    self.tracer = Tracer(step, profile, lowered, planned or base, base, self.folder)
                if is_writer:
                    write_text(self.folder / "schedule.txt", lowered.as_text() + "\n")
                    if on_gpu:  # whose memory may end in this very step
                        write_memory(lowered, self.folder)
        if nth == 2 and on_gpu:  # compiling has its own peak
            torch.cuda.reset_peak_memory_stats()

        # Launch the step, and read the numbers of the step before.
        tracing = nullcontext() if self.tracer is None else self.tracer.on(nth)
        with tracing, timer.during(part):
            began = time.perf_counter()
            state, metrics = step(state, *batch)
            rows = self._read_numbers()
            seconds = time.perf_counter() - began
        self._report_rows(rows)
        self._launched.append(Launched(number, metrics, seconds))
        if is_first:  # nobody waits for what is prepared next
            with timer.during(part):
                self._report_rows(self._read_numbers())

        # After the first two steps, report what a step takes by prediction, and what it took.
        if lowered is not None and is_writer:
            with timer.during("reports"):
                write_memory(lowered, self.folder)
                self.report.work = StepWork.of(lowered, peak_of(planned, self.mesh), base)
            if self.replicas is not None:
                self._add_memory(
                    f"replicas: {self.replicas.node_bytes / 1e6:.1f} MB of each node's host memory"
                )
        if is_first:
            gc.enable()  # see `experiments.train`
        if nth == 2 and on_gpu and is_writer:
            self._add_memory(f"measured peak of a step: {torch.cuda.max_memory_allocated() / 1e6:.1f} MB")
        if self.tracer is not None and self.tracer.is_last(nth):
            self._write_trace()
        return state

    def check_and_replicate(self, number: int, state: fs.TrainState, loader: Loader) -> None:
        """Decide what follows step `number`, and copy its state to other nodes' memory, if that is due.

        Set `is_ending`, whether all ranks stop after it; and `watch.fault`, if something is not finite: the
        numbers that were read last (of this step if it is saved, copied or measured, else of the one before),
        or the state that is to be saved.

        The copy is made at once, so that a rank that is killed while the model is measured costs no step. The
        last state goes to disk alone, so that a run which goes on from memory has a step left to make and to
        save.
        """
        # Decide what follows.
        run = self.config.run
        self.is_ending = self._step.flag_raised("stop")
        self._is_save_due = number == run.steps or (run.save_every > 0 and number % run.save_every == 0)
        copies = self.replicas is not None and number % run.replica_every == 0 and number < run.steps

        # Read this step's numbers now if its state is used, so that no bad one is saved, copied or measured.
        if self.is_ending or self._is_save_due or copies or self.is_measured_after(number):
            self._report_rows(self._read_numbers())
        with self.timer.during("saves"):
            if self.is_ending or self._is_save_due:
                self.watch.check_state(state, number)
            if copies and not self.is_ending and not self.watch.fault:
                self.replicas.save(state, loader)

    def is_measured_after(self, number: int) -> bool:
        """Return whether the model is measured on held-out data after step `number`."""
        run = self.config.run
        return number > 0 and not self.is_ending and (number % run.held_out_every == 0 or number == run.steps)

    def report_held_out(self, number: int, value: float, more: Mapping[str, float]) -> float:
        """Report the goal's number on held-out data after step `number`, and what else was measured.

        Returns:
            The goal's number.
        """
        self.report.held_out(number, value, {HELD_OUT + name: each for name, each in more.items()})
        return value

    def save_if_due(self, number: int, state: fs.TrainState, loader: Loader, held_out: float | None) -> None:
        """Save step `number` to the run's folder with the goal's number on held-out data, if it has one.

        Nothing is done if no save is due. If the run ends here, the checkpoint is on the disk when this
        returns.

        If a step cannot be written that is not the last, this is reported, and training continues: earlier
        checkpoints still exist.

        Raises:
            CheckpointError: the last step cannot be written, which no later save would make up for. In the
                background `fs.checkpoint.wait` raises it.
        """
        run = self.config.run
        if not (self.is_ending or self._is_save_due):
            return
        keep = fs.checkpoint.Keep(
            last=run.keep, every=run.keep_every, best=run.keep_best, metric=METRIC,
            mode="max" if self.goal.is_maximised else "min",
        )  # fmt: skip
        options = {
            "data": loader, "config": dataclasses.asdict(self.config), "keep": keep, "timeout": run.timeout_s,
            "metrics": {} if held_out is None else {METRIC: held_out},
        }  # fmt: skip
        path = self.run_folder.checkpoints / str(number)
        with self.timer.during("saves"):
            self.report.sync()
            # If an earlier save failed in the background, warn: else the next save would raise its error.
            self._warn_on_failure(fs.checkpoint.wait)
            if self.is_ending:
                fs.checkpoint.save(path, state, **options)
                return
            save = fs.checkpoint.save_async if run.async_save else fs.checkpoint.save
            write = partial(save, path, state, **options)
            if number == run.steps:
                write()
            else:
                self._warn_on_failure(write)

    def _warn_on_failure(self, work: Callable[[], Any]) -> None:
        """Save, or wait for a save, and print a `CheckpointError` instead of raising it."""
        try:
            work()
        except CheckpointError as error:  # on all ranks
            if self.mesh.rank == 0:
                print(f"not saved, training goes on: {error}", file=sys.stderr, flush=True)

    def _read_numbers(self, *, wait: bool = True) -> list[tuple[Launched, dict[str, float]]]:
        """Return the numbers of the step that was launched last, once.

        Args:
            wait: whether to wait for them; if not, they are lost if they have not arrived.
        """
        rows = [(each, each.metrics.numbers()) for each in self._launched if wait or each.metrics.ready]
        self._launched.clear()
        return rows

    def _report_rows(self, rows: list[tuple[Launched, dict[str, float]]]) -> None:
        """Give what was read to the report and to the watchdog."""
        for launched, values in rows:
            with self.timer.during("reports"):
                self.report.step(launched.number, values, launched.seconds)
            self.watch.look(launched.number, values)

    def _add_memory(self, text: str) -> None:
        """Print a line about memory, and add it to `memory.txt`."""
        append(self.folder / MEMORY, f"\n{text}\n")
        self.report.say(text)

    def _write_trace(self) -> None:
        """Write the trace of the steps that were traced, if there is one that is not written yet."""
        if self.tracer is not None:
            with self.timer.during("tracing"):
                text = self.tracer.write()
            self.tracer = None
            if text:
                self.report.say(text)

    # ------------------------------------------------------------------ the end

    def end_early(self, number: int) -> None:
        """Report that the run has stopped before its end, after step `number`, and how to go on."""
        self.report.close()
        if self.mesh.rank != 0:
            return
        self.report.finish(STOPPED)
        write_result(self.folder, status=STOPPED, overrides=self.overrides, step=number)
        print(
            f"stopped: step {number} of {self.config.run.steps} is saved; the same command goes on from "
            f"there, another one with run.resume={self.folder}",
            flush=True,
        )

    def finish(self, measured: Mapping[str, float], *, sample: str) -> str:
        """Leave the run's result, on rank 0.

        Args:
            measured: what the job has measured at the end.
            sample: the name of the file of samples, for the trackers.

        Returns:
            Its time and memory, as text.
        """
        # Collect the numbers of the result: means of the last steps, what the job measured, and the speed.
        rows, goal, speed = self.report.totals, self.goal, speed_name(self.report.unit)
        losses, trained = list(rows.losses)[-20:], list(rows.trained)[-20:]
        summary = {
            "loss": statistics.mean(losses) if losses else math.nan,
            goal.name: statistics.mean(trained) if trained else math.nan,
            **measured,
            speed: self.report.tokens / rows.step_seconds(),
        }
        # If metrics were lost, and no step was left to make, the rows' numbers are not known.
        unknown = {n for n in ("loss", goal.name, speed) if math.isnan(summary[n]) and not losses}
        summary = {name: value for name, value in summary.items() if name not in unknown}

        # Hand it to the trackers and to `run.json`, and leave it for tables.
        names = (f"{goal.name}.png", sample, "config.yaml", "schedule.txt")
        artifacts = [self.folder / name for name in names]
        totals = self.report.finish("ok", [a for a in artifacts if a.exists()], **summary)
        values = {**summary, "seconds": totals["seconds"], **varying(totals)}  # "seconds" of the whole run
        write_result(self.folder, status="ok", overrides=self.overrides, goal=goal.as_dict(), **values)
        return in_words(totals)


def restore_newest(
    root: Path, source: str | None, step: Any, loader: Any, replicas: fs.checkpoint.Replicas | None = None
) -> tuple[fs.TrainState | None, str]:
    """Return the state to go on from, and the directory it was found in; None if there is no checkpoint.

    It is the newest state that memory and `root` have, or that of `source` if they have none. The loader is
    moved behind the batches that the state has seen.

    Raises:
        CheckpointError, ConfigError: the errors of `Run.restore`.
    """
    mesh = step.mesh
    # Rank 0 looks, and tells the others: a file system may show each rank other folders for a moment. If no
    # checkpoint is whole, `restore` says what is wrong with them, since the run must not begin anew silently.
    steps = fs.checkpoint.all_steps(root) if mesh.rank == 0 else []
    found = str(root if steps or (mesh.rank == 0 and has_step_folders(root)) else source or "")
    newest, found = json.loads(step.gather_strings(json.dumps([max(steps, default=-1), found]))[0])

    # Take a newer state from memory, or else the checkpoint.
    state = None if replicas is None else replicas.restore(newer_than=newest)
    if replicas is not None and replicas.lost and mesh.rank == 0:
        print(f"replicas: no step is complete in memory, going on from {found or 'the start'}", flush=True)
    if state is not None:
        found = str(replicas.memory)
    elif found:
        state = fs.checkpoint.restore(found, step, mesh)
    if state is None:
        return None, ""

    # Move the loader. A state that was saved without one has seen a batch for each step.
    try:
        loader.load_state_dict(state.data or {**loader.state_dict(), "step": int(state.step)})
        if loader.step != int(state.step):  # a step takes one batch
            raise ValueError(f"its loader has drawn {loader.step} batches, its step is {int(state.step)}.")
    except ValueError as error:
        raise ConfigError(f"cannot go on from {found}: {error}") from None
    return state, found


def mean_over(
    forward: Callable[..., Any], params: Any, batches: Iterable[Any], device: torch.device
) -> tuple[float, dict[str, float]]:
    """Return the mean loss over all batches of all ranks, and the means of its `aux`.

    Totals and counts are summed, and divided once at the end: batches may have different counts, and a mean
    of their means would weigh them alike.
    """
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        loss, aux = forward(params, *batch)  # which sends the batch to the device
        named = {"aux.loss" if name == "loss" else name: mean for name, mean in aux.items()}  # as in metrics
        for name, mean in {"": loss, **named}.items():
            both = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in (mean.total, mean.count)]
            sums[name] = sums.get(name, torch.zeros((), device=device)) + torch.stack(both)
    sums = {name: both.cpu() for name, both in sums.items()}
    if dist.is_initialized():
        for both in sums.values():
            dist.all_reduce(both)
    # Weights may add up to less than 1. A mean of nothing is 0.
    means = {name: (both[0] / both[1]).item() if both[1] else 0.0 for name, both in sums.items()}
    return means.pop("", math.nan), means
