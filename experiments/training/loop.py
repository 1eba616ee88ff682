"""The training loop of the main job, as one rank runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch import Tensor, nn

import fnshard as fs
from experiments.configs.plan import Plan, dtypes_of, plan_of, tensor_axis, write_plan
from experiments.configs.train import TrainConfig
from experiments.data.files import write_text
from experiments.training.checkpoints import Saver, replicas_of, restored
from experiments.training.dataset import Dataset, open_dataset
from experiments.training.decoder import Decoder, next_token_loss
from experiments.training.metrics_file import METRICS
from experiments.training.report import Report, comparison, plot_losses
from experiments.training.resume import RunFolder
from experiments.training.run_record import TimeSpent
from experiments.training.sample import Sampler, last_logits, safe
from experiments.training.steps import (
    Training,
    begin_report,
    finish_run,
    make_optimizer,
    print_resume,
    print_stop,
    run_steps,
)
from fnshard.launcher.rank import Stop


@dataclass(frozen=True)
class TrainSetup:
    config: TrainConfig
    mesh: fs.Mesh
    plan: Plan
    dataset: Dataset
    model: nn.Module
    step: Any
    forward: Any
    sampler: Sampler


def train(config: TrainConfig, run: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Train, from the run's newest checkpoint if it has one; rank 0 writes everything to the run's folder and
    prints its path.
    """
    spent = TimeSpent()
    with spent.on("start"):
        setup = prepare(config)
        folder, mesh = Path(run.folder), setup.mesh
        replicas = replicas_of(config.run, setup.step, folder)
        state, loader, found = begin(setup, run, replicas)
        if mesh.rank == 0:
            print_resume(config.run, state, found)
        report = begin_report(
            "train", config, run, setup.step, overrides, int(state.step), found, spent=spent,
            tokens=config.data.rows * config.context,
        )  # fmt: skip
        if mesh.rank == 0:
            write_plan(setup.plan, folder)
    training = Training(
        config, setup.plan, setup.step, loader, lambda params: evaluate(setup, params),
        lambda: begin(setup, run)[:2], report, Saver(config, run.root, mesh.rank), spent, replicas,
        lambda state: compile_ahead(setup, state),
    )  # fmt: skip
    with report:
        state, held_out = run_steps(training, state, stop)
        report.close()
        if held_out is None:
            print_stop(config.run, state, run, overrides, report)
            return
        seed = config.run.seed + mesh.data_rank
        with spent.on("samples"):
            prompt = setup.dataset.encode(config.run.prompt)
            (drawn,) = setup.sampler(state.params, [prompt], config.run.sample_tokens, seed)
            sampled = safe(setup.dataset.decode([*prompt, *drawn]))
        with spent.on("saves"):
            fs.checkpoint.wait()
        if isinstance(report, Report):
            write_text(folder / "sample.txt", sampled)
            finish(report, setup, run, overrides, held_out, sampled)


def begin(
    setup: TrainSetup, run: RunFolder, replicas: fs.checkpoint.Replicas | None = None
) -> tuple[fs.TrainState, Any, str]:
    """The state to resume, a loader that stands there, and the checkpoint that they are of."""
    loader = setup.dataset.loader(setup.mesh)
    state, found = restored(run.root, run.source, setup.step, setup.mesh, loader, replicas)
    if state is None:
        state = setup.step.init(setup.model, seed=setup.config.run.seed)
    return state, loader, found


def finish(
    report: Report, setup: TrainSetup, run: RunFolder, overrides: list[str], held_out: float, sampled: str
) -> None:
    """Write and print the results of a finished run."""
    folder, unit = Path(run.folder), setup.dataset.unit
    with report.record.spent.on("reports"):
        tables = setup.dataset.tables()
        plot_losses(folder / METRICS, tables, folder / "loss.png", unit=unit)
    measured = {"held_out_loss": held_out, **tables}
    closing = finish_run(report, run, overrides, measured, sample="sample.txt")
    text = comparison(held_out, tables, unit=unit)
    print(f"\n{text}\n\n{sampled}\n\n{closing}\nresults: {folder}", flush=True)


def prepare(config: TrainConfig) -> TrainSetup:
    """Mesh, specs, step: all of fnshard that the job uses."""
    run = config.run
    mesh = fs.make_mesh(**config.mesh.axes, device=run.device)
    with fs.deferred():
        own = isinstance(config.model, dict)
        model = instantiate(config.model, _convert_="all") if own else Decoder(config.model)
    apply, params = fs.make_functional(model)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(apply(params, tokens), targets)

    optimizer = make_optimizer(config.optimizer, config.schedule, run.steps, ("*norm*", "embed.*"))
    rows = config.data.rows // mesh.data_size
    tokens = torch.empty(rows, config.context, dtype=torch.int64, device="meta")
    dtypes = dtypes_of(config.precision)
    plan = plan_of(
        config.strategy, run, loss_fn, params, mesh, optimizer,
        batch=(tokens, tokens),
        specs=lambda preset, **policy: preset(params, mesh, tensor=tensor_axis(mesh), **dtypes, **policy),
        hardware=config.hardware.name, attention=config.mesh.context_attention,
    )  # fmt: skip
    step = fs.shard_step(loss_fn, plan.specs, mesh=mesh, optimizer=optimizer, **plan.options)
    how = {
        "mesh": mesh, "backend": run.backend, "deterministic": run.deterministic, "timeout": run.timeout_s,
        "context_attention": config.mesh.context_attention,
    }  # fmt: skip
    forward = fs.shard_forward(loss_fn, plan.specs, kernels=step, **how)
    dataset = open_dataset(config)
    sampler = Sampler(fs.shard_forward(last_logits(apply), plan.specs, **how), config.context, mesh.device)
    return TrainSetup(config, mesh, plan, dataset, model, step, forward, sampler)


def evaluate(setup: TrainSetup, params: Any) -> float:
    """Mean loss over all held-out windows, nats per token; all ranks call it together."""
    # The forward sends them to the device.
    losses = [setup.forward(params, *setup.dataset.held_out(s)) for s in held_out_starts(setup)]
    mean = torch.stack(losses).double().mean().cpu()
    if dist.is_initialized():  # every rank's mean is over equally many tokens
        dist.all_reduce(mean)
    return mean.item() / setup.mesh.size


def held_out_starts(setup: TrainSetup) -> tuple[Tensor, ...]:
    """Of this rank's held-out windows, as many at once as a training step has: that much memory there is."""
    mine = setup.dataset.starts.chunk(setup.mesh.data_size)[setup.mesh.data_rank]
    rows = setup.config.data.rows // setup.mesh.data_size // setup.plan.accumulate
    return mine.split(math.gcd(len(mine), rows))


def compile_ahead(setup: TrainSetup, state: fs.TrainState) -> None:
    """Compile what measures the model and samples from it, while it trains."""
    lowered = [setup.forward.lower(state, *setup.dataset.held_out(held_out_starts(setup)[0]))]
    if setup.config.run.sample_tokens:
        lowered.append(setup.sampler.lower(state))
    for each in lowered:  # after all of them: nothing is traced while a thread compiles
        each.compile_async()
