"""Train a language model from text, or a model, data and loss of your own, sharded over ranks.

    python -m experiments.train experiment=laptop                      # two ranks on a CPU, or all GPUs
    torchrun --nproc-per-node 8 -m experiments.train model=1b          # ranks that torchrun starts

What happens, in order: `main` (`lib.launch`) composes the command line and checks all of it (`lib.compose`,
whose dataclasses are in `lib.config`), sees what this machine has, calls `prepare`, below, which opens the
data, takes the run's folder and starts the ranks. Each of them calls `train`, below, which goes on from the
run's newest checkpoint, if it has one, to the last step. What a run does besides its steps (folder, rows,
trackers, checkpoints, SIGTERM, NaN) is in `lib.run`. The same command again goes on with what was not
finished.

Where to look: a key `run.steps=9` is `config.run.steps`; a `_target_` becomes a model, data, a loss or an
optimizer in `lib.task`, once before the ranks start, so that its mistakes show, and once in each of them;
checkpoints are read by `Run.restore` and written by `Run.save_if_due`. SIGTERM sets `stop.asked`, and
`Run.numbers` raises a flag before the next step. The flag travels with that step, so that all ranks know of
it one step later, where `Run.check_and_replicate` decides that the loop ends, and `Run.save_if_due` saves.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imports and traces free little: to look for what they might have freed takes a sixth of a start.
    # `lib.launch` turns that on again, and `lib.run` in ranks.
    gc.disable()

from collections.abc import Iterator
from typing import Any

import fnshard as fs
from experiments.data.text import Dataset, open_dataset
from experiments.lib.compose import Command
from experiments.lib.config import TrainConfig
from experiments.lib.decoder import Sampler, last_logits, printable
from experiments.lib.files import write_text
from experiments.lib.folder import RunFolder
from experiments.lib.launch import Job, main
from experiments.lib.metrics import HELD_OUT, METRICS, Goal, comparison, draw_run
from experiments.lib.plan import Plan, axis_of, dtypes_of, forward_options, plan_step, specs_of
from experiments.lib.run import Run, mean_over
from experiments.lib.task import TargetData, Task, check_targets, make_data, make_optimizer, make_task
from fnshard.launcher.rank import Stop

COMMAND = Command(
    "train",
    TrainConfig,
    "Train a small language model from text, sharded over ranks: as many as there are GPUs, or two on the "
    "CPU. The same command again resumes what was not finished.",
    {
        "python -m experiments.train experiment=laptop": "a whole recipe; what follows it changes it",
        "python -m experiments.train model=25m strategy=zero2 precision=bf16 mesh.shard=4 run.steps=2000": (
            "choices of groups and single keys"
        ),
        "python -m experiments.train --multirun strategy=full_shard,zero2,no_shard run.steps=100": (
            "a sweep: three runs, and a table of them"
        ),
    },
)


def prepare(config: TrainConfig) -> TrainConfig:
    """Find, before a rank starts, what is wrong with data and code that the configuration names."""
    check_targets(config)
    if not isinstance(config.data, dict):
        open_dataset(config)
    return config


def train(config: TrainConfig, folder: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Train on this rank. Rank 0 writes records, pictures and results to the run's folder and prints its
    path; every rank writes its part of the checkpoints."""
    with Run("train", config, folder, overrides, stop) as run:
        # The mesh arranges ranks along axes. Ranks along data axes take different rows.
        mesh = fs.make_mesh(**config.mesh.axes, device=config.run.device)

        # The data are batches of this rank's rows, and held-out ones of as many rows as a step holds at once.
        data = open_data(config)

        # The model and its loss are pure functions. The first state has the parameters' values.
        task = make_task(config)

        # The plan says how each parameter is stored, gathered and reduced, and what is recomputed or moved to
        # other memory.
        optimizer = make_optimizer(config.optimizer, config.schedule, config.run.steps, task.undecayed)
        plan = make_plan(config, task, data, mesh, optimizer)

        # Make the step, and forwards of the same parameters that give the held-out loss and the sample.
        step = fs.shard_step(task.loss, plan.specs, mesh=mesh, optimizer=optimizer, **plan.options)
        forward = fs.shard_forward(task.held_out_loss, plan.specs, **forward_options(config, mesh))
        sampler = make_sampler(config, task, plan, mesh)

        # Restore the newest checkpoint's state and place in the data, or begin with the first of both.
        state, loader = run.restore(
            step,
            make_loader=lambda: data.loader(mesh),
            make_state=lambda: step.init(task.init, seed=config.run.seed),
        )
        goal = goal_of(config, data)
        run.open_report(state, plan, goal, data.tokens, data.unit)

        # The model is measured on held-out data after the steps that `Run.is_measured_after` says.
        def measure(number: int, state: fs.TrainState) -> float:
            with run.timer.during("evaluation"):
                loss, more = mean_over(forward, state.params, held_out_batches(data, plan, mesh), mesh.device)
            return run.report_held_out(number, loss, more)

        # The loop begins with the measurement of the last saved step if that is due: the last process may
        # have been killed between saving and measuring.
        before_first = run.first - 1
        held_out = measure(before_first, state) if run.is_measured_after(before_first) else None
        for number in run.numbers():
            with run.timer.during("data"):
                batch = next(loader)
            state = run.make_step(number, state, batch)

            # Trace both forwards, then compile them in the background while the model trains.
            if number == run.first:
                with run.timer.during("lowering"):
                    lowered = [forward.lower(state, *next(held_out_batches(data, plan, mesh)))]
                    if sampler and config.run.sample_length:
                        lowered.append(sampler.lower(state))
                    for each in lowered:
                        each.compile_async()

            # NaN ends the run, and so does SIGTERM to any rank. Other nodes get a copy if one is due.
            run.check_and_replicate(number, state, loader)
            if run.watch.fault:
                del state  # its memory is needed to find where that arose
                raise run.watch.diagnose()

            # Measure the held-out loss and save a checkpoint, if they are due.
            held_out = measure(number, state) if run.is_measured_after(number) else None
            run.save_if_due(number, state, loader, held_out)

        if run.is_ending:
            run.end_early(int(state.step))
            return

        # At the end, draw a sample, measure what else the loss gives, and wait for the last checkpoint.
        run.report.close()
        sample_text, more = "", {}
        with run.timer.during("samples"):
            if sampler is not None and config.run.sample_length:
                sample_text = sample(config, data, sampler, state.params, mesh)
        if config.objective is not None:  # it may return more numbers; text has its loss alone
            with run.timer.during("evaluation"):
                _, more = mean_over(forward, state.params, held_out_batches(data, plan, mesh), mesh.device)
        with run.timer.during("saves"):
            fs.checkpoint.wait()
        if mesh.rank != 0:
            return

        # Rank 0 writes the results: the curve, losses of n-gram tables to compare with, the totals.
        with run.timer.during("reports"):
            ngram_losses = data.ngram_losses()
            picture = run.folder / "loss.png"
            draw_run(run.folder / METRICS, goal, ngram_losses, picture, "loss of a training run")
        if sample_text:
            write_text(run.folder / "sample.txt", sample_text)
        measured = {goal.held_out: held_out, **{HELD_OUT + n: v for n, v in more.items()}, **ngram_losses}
        closing = run.finish(measured, sample="sample.txt")
        shown = filter(None, [comparison(held_out, goal, ngram_losses), sample_text, closing])
        print("\n\n".join(shown) + f"\nresults: {run.folder}", flush=True)


# ----------------------------------------------------- parts, which `experiments.generate` takes, too


def open_data(config: TrainConfig) -> Dataset | TargetData:
    """Open text, shards of tokens, or the data of a `_target_`."""
    if isinstance(config.data, dict):
        return make_data(config.data, config.run.seed)
    return open_dataset(config)


def make_plan(
    config: TrainConfig, task: Task, data: Dataset | TargetData, mesh: fs.Mesh, optimizer: fs.optim.Optimizer
) -> Plan:
    """Plan a step by the configuration's strategy. Its rules make the specs, if it has any."""

    def make_specs(preset: Any, **policy: Any) -> Any:
        policy = dtypes_of(config.precision) | policy
        if config.specs is None:
            return preset(task.params, mesh, tensor=axis_of("tensor", mesh), **policy)
        return specs_of(config.specs, task.params, policy)

    return plan_step(
        config.strategy, config.run, task.loss, task.params, mesh, optimizer,
        batch=next(data.loader(mesh)), specs=make_specs, hardware=config.hardware.name,
        along=config.mesh.options,
    )  # fmt: skip


def make_sampler(config: TrainConfig, task: Task, plan: Plan, mesh: fs.Mesh) -> Sampler | None:
    """Make the sampler of text; None if the data are no text."""
    if config.objective is not None:
        return None
    logits = fs.shard_forward(last_logits(task.apply), plan.specs, **forward_options(config, mesh))
    return Sampler(logits, config.context, mesh.device)


def goal_of(config: TrainConfig, data: Dataset | TargetData) -> Goal:
    """Return what the run is judged by: the loss, which for text is in nats per byte or token."""
    return Goal() if config.objective is not None else Goal(unit=f"nats per {data.unit}")


def held_out_batches(data: Dataset | TargetData, plan: Plan, mesh: fs.Mesh) -> Iterator[tuple[Any, ...]]:
    """Return this rank's held-out batches, in micro-batches of the training size, so that they fit."""
    return data.held_out(mesh, data.rows // mesh.data_size // plan.accumulate)


def sample(config: TrainConfig, data: Dataset, sampler: Sampler, params: Any, mesh: fs.Mesh) -> str:
    """Return the prompt and what the model writes after it. Ranks along data axes draw different texts."""
    prompt = data.encode(config.run.prompt)
    (drawn,) = sampler(params, [prompt], config.run.sample_length, config.run.seed + mesh.data_rank)
    return printable(data.decode([*prompt, *drawn]))


JOB = Job(COMMAND, prepare, train)

if __name__ == "__main__":
    from experiments import train as job  # by its own name, so that launchers of sweeps can pickle it

    main(job.JOB)
