"""The training loop of the main job, as one rank runs it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

import fnshard as fs
from experiments import data, ngram
from experiments.config import AdamWConfig, TrainConfig
from experiments.model import Decoder, next_token_loss
from experiments.plan import MEMORY, Plan, append_compiled, plan_of, write_memory, write_plan
from experiments.report import Report, Silent, comparison, plot_losses
from experiments.sample import Sampler, last_logits
from experiments.sweep import write_result
from experiments.text import Corpus


@dataclass(frozen=True)
class Setup:
    """What does not change while training."""

    config: TrainConfig
    mesh: fs.Mesh
    plan: Plan
    corpus: Corpus
    step: Any
    forward: Any
    sampler: Sampler


def train(config: TrainConfig, folder: Path, overrides: list[str]) -> None:
    """Train; rank 0 writes everything to `folder` and prints where it lies."""
    setup, state = prepare(config)
    report: Report | Silent = Silent()
    tables: dict[str, float] = {}
    if setup.mesh.rank == 0:
        _start_folder(folder, config)
        write_plan(setup.plan, folder)
        tables = table_losses(setup)
        report = Report(folder, config.run.steps, config.data.rows * config.model.context, tables)
    began = time.perf_counter()
    state = run_steps(setup, state, report, folder)
    held_out = evaluate(setup, state.params)
    report.held_out(config.run.steps, held_out)
    report.close()
    seconds = time.perf_counter() - began
    seed = config.run.seed + setup.mesh.rank
    sampled = setup.sampler(state.params, config.run.prompt, config.run.sample_bytes, seed)
    if isinstance(report, Report):
        (folder / "sample.txt").write_text(sampled, encoding="utf-8")
        plot_losses(report.rows, tables, folder / "loss.png")
        numbers = _summary(report, held_out, tables, seconds)
        write_result(folder, status="ok", overrides=overrides, **numbers)
        print(f"\n{comparison(held_out, tables)}\n\n{sampled}\n\nresults: {folder}", flush=True)


def prepare(config: TrainConfig) -> tuple[Setup, fs.TrainState]:
    """Mesh, specs, step and the initial state: all of fnshard that the job uses."""
    run = config.run
    mesh = fs.make_mesh(replicate=config.mesh.replicate, shard=config.mesh.shard, device=run.device)
    with torch.device("meta"):
        model = Decoder(config.model)
    apply, params = fs.make_functional(model)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(apply(params, tokens), targets)

    optimizer = make_optimizer(config)
    plan = plan_of(config, loss_fn, params, mesh, optimizer)
    step = fs.shard_step(loss_fn, plan.specs, mesh=mesh, optimizer=optimizer, **plan.options)
    how = {"mesh": mesh, "backend": run.backend, "timeout": run.timeout_s}
    forward = fs.shard_forward(loss_fn, plan.specs, **how)
    next_byte = fs.shard_forward(last_logits(apply), plan.specs, **how)
    sampler = Sampler(next_byte, config.model.context, mesh.device)
    setup = Setup(config, mesh, plan, data.corpus_of(config), step, forward, sampler)
    return setup, step.init(model, seed=run.seed)


def make_optimizer(config: TrainConfig) -> fs.optim.Optimizer:
    """Clipping, then the optimizer named; norms and the embedding do not decay."""
    chosen, rate = config.optimizer, make_rate(config)
    decay = [("*norm*", 0.0), ("embed.*", 0.0), ("*", chosen.weight_decay)]
    if isinstance(chosen, AdamWConfig):
        made = fs.optim.adamw(rate, b1=chosen.b1, b2=chosen.b2, eps=chosen.eps, weight_decay=decay)
    else:
        made = fs.optim.sgd(rate, momentum=chosen.momentum, nesterov=chosen.nesterov, weight_decay=decay)
    return made if chosen.clip is None else fs.optim.chain(fs.optim.clip_by_global_norm(chosen.clip), made)


def make_rate(config: TrainConfig) -> fs.schedules.Schedule:
    """The learning rate by step: the configuration's fractions as steps and rates."""
    shape, peak, steps = config.schedule, config.optimizer.lr, config.run.steps
    if shape.name == "constant":
        return fs.schedules.constant(peak)
    phases = {"warmup": math.floor(shape.warmup * steps), "total": steps, "floor": shape.floor * peak}
    if shape.name == "wsd":
        phases["decay"] = math.floor(shape.decay * steps)
    return fs.schedules.SCHEDULES[shape.name](peak=peak, **phases)


def run_steps(setup: Setup, state: fs.TrainState, report: Report | Silent, folder: Path) -> fs.TrainState:
    """All steps of the run, with held-out losses between them; gives the last state."""
    run, mesh = setup.config.run, setup.mesh
    loader = data.Loader(
        setup.corpus.train,
        rows=setup.config.data.rows,
        context=setup.config.model.context,
        seed=run.seed,
        rank=mesh.rank,
        ranks=mesh.size,
    )
    for number in range(1, run.steps + 1):
        batch = [part.to(mesh.device) for part in next(loader)]
        if number == 1 and mesh.rank == 0:
            lowered = setup.step.lower(state, *batch)
            (folder / "schedule.txt").write_text(lowered.as_text() + "\n", encoding="utf-8")
            write_memory(lowered, folder)
        watched = number == 2 and mesh.device_type == "cuda"
        if watched:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        state, metrics = setup.step(state, *batch)
        values = {name: value.item() for name, value in metrics.items() if name != "aux"}
        report.step(number, values, time.perf_counter() - began)
        if number == 1 and mesh.rank == 0:
            append_compiled(lowered, folder)
        if watched and mesh.rank == 0:
            _tell_peak(torch.cuda.max_memory_allocated(), folder)
        if number % run.held_out_every == 0 and number < run.steps:
            report.held_out(number, evaluate(setup, state.params))
    return state


def _tell_peak(measured_bytes: int, folder: Path) -> None:
    """What the allocator of rank 0's device saw of a step, beside the prediction."""
    told = f"measured peak of a step: {measured_bytes / 1e6:.1f} MB"
    with (folder / MEMORY).open("a", encoding="utf-8") as file:
        file.write(f"\n{told}\n")
    print(told, flush=True)


def held_out_starts(setup: Setup) -> Tensor:
    """Where the held-out windows begin; int64 [rows]."""
    config = setup.config
    return data.held_out_starts(setup.corpus.held_out, config.data.held_out_rows, config.model.context)


def evaluate(setup: Setup, params: Any) -> float:
    """Mean loss over all held-out windows, nats per byte; all ranks call it together."""
    config, mesh = setup.config, setup.mesh
    mine = held_out_starts(setup).chunk(mesh.size)[mesh.rank]
    # As many rows at once as a training step holds: that much memory there is.
    rows = math.gcd(len(mine), config.data.rows // mesh.size // setup.plan.accumulate)
    losses = []
    for starts in mine.split(rows):
        batch = data.cut_windows(setup.corpus.held_out, starts, config.model.context)
        losses.append(setup.forward(params, *(part.to(mesh.device) for part in batch)))
    mean = torch.stack(losses).double().mean().cpu()
    if dist.is_initialized():  # every rank's mean is over equally many bytes
        dist.all_reduce(mean)
    return mean.item() / mesh.size


def table_losses(setup: Setup) -> dict[str, float]:
    """Tables counted on the training bytes, at exactly the targets of `evaluate`; nats per byte.

    They see the bytes before a window too, the model does not: the comparison favours the tables.
    """
    targets = held_out_starts(setup)[:, None] + torch.arange(1, setup.config.model.context + 1)
    trigram = ngram.fit(setup.corpus.train, 3)
    tables = {"bigram": trigram.shortened(2), "trigram": trigram}
    return {name: table.loss(setup.corpus.held_out, targets.flatten()) for name, table in tables.items()}


def _start_folder(folder: Path, config: TrainConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    resolved = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
    (folder / "config.yaml").write_text(resolved, encoding="utf-8")


def _summary(
    report: Report, held_out: float, tables: Mapping[str, float], seconds: float
) -> dict[str, float]:
    losses = [row["loss"] for row in report.rows if "loss" in row]
    steady = [row["seconds"] for row in report.rows if "seconds" in row][1:] or [math.nan]
    return {
        "loss": sum(losses[-20:]) / len(losses[-20:]),
        "held_out_loss": held_out,
        **tables,
        "tokens_per_s": report.tokens * len(steady) / sum(steady),
        "seconds": seconds,
    }
