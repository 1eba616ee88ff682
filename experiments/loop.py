"""The training loop of the main job, as one rank runs it."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

import fnshard as fs
from experiments import data, ngram
from experiments.config import AUTO, AdamWConfig, TrainConfig
from experiments.model import Decoder, next_token_loss
from experiments.plan import MEMORY, Plan, append_compiled, plan_of, write_memory, write_plan
from experiments.report import Report, Silent, comparison, metrics_beside, plot_losses
from experiments.resume import Run
from experiments.sample import Sampler, last_logits
from experiments.saver import Saver, restored
from experiments.sweep import STOPPED, write_result
from experiments.text import Corpus
from fnshard.rank import Stop

TABLES = "tables.json"


@dataclass(frozen=True)
class Setup:
    """What does not change while training."""

    config: TrainConfig
    mesh: fs.Mesh
    plan: Plan
    corpus: Corpus
    model: Decoder
    step: Any
    forward: Any
    sampler: Sampler


def train(config: TrainConfig, run: Run, overrides: list[str], stop: Stop) -> None:
    """Train, from the run's newest checkpoint if it has one; rank 0 writes everything to the run's folder and
    prints where it lies.

    Args:
        stop: once it is asked on any rank, all finish the step, save, and return.
    """
    setup = prepare(config)
    folder, mesh = Path(run.folder), setup.mesh
    loader = loader_of(setup)
    state, found = restored(run.root, run.source, setup.step, mesh, loader)
    if state is None:
        state = setup.step.init(setup.model, seed=config.run.seed)
    report: Report | Silent = Silent()
    if mesh.rank == 0:
        _tell_resume(config, state, found)
        _start_folder(folder, config)
        write_plan(setup.plan, folder)
        tokens = config.data.rows * config.model.context
        earlier = metrics_beside(folder, found)
        tables = known_tables(setup, folder)
        report = Report(folder, config.run.steps, tokens, tables, int(state.step), earlier)
    saver = Saver(config, run.root, mesh.rank)
    state, held_out = run_steps(setup, state, loader, report, saver, stop)
    report.close()
    if held_out is None:
        _tell_stop(setup, state, run, overrides)
        return
    seed = config.run.seed + mesh.rank
    sampled = setup.sampler(state.params, config.run.prompt, config.run.sample_bytes, seed)
    fs.checkpoint.wait()
    if isinstance(report, Report):
        (folder / "sample.txt").write_text(sampled, encoding="utf-8")
        plot_losses(report.rows, report.tables, folder / "loss.png")
        write_result(folder, status="ok", overrides=overrides, **_summary(report, held_out))
        run.finish()
        print(f"\n{comparison(held_out, report.tables)}\n\n{sampled}\n\nresults: {folder}", flush=True)


def prepare(config: TrainConfig) -> Setup:
    """Mesh, specs, step: all of fnshard that the job uses."""
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
    return Setup(config, mesh, plan, data.corpus_of(config), model, step, forward, sampler)


def loader_of(setup: Setup) -> data.Loader:
    """This rank's batches, from the first step on."""
    return data.Loader(
        setup.corpus.train,
        rows=setup.config.data.rows,
        context=setup.config.model.context,
        seed=setup.config.run.seed,
        rank=setup.mesh.rank,
        ranks=setup.mesh.size,
    )


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


def run_steps(
    setup: Setup, state: fs.TrainState, loader: data.Loader, report: Report | Silent, saver: Saver, stop: Stop
) -> tuple[fs.TrainState, float | None]:
    """The run's steps that are left, with held-out losses and checkpoints between them.

    Returns:
        The last state, and its held-out loss: None if a rank was asked to stop.
    """
    run, first = setup.config.run, int(state.step) + 1
    held_out = None
    if first > 1:  # it may have been killed before it had measured, or after
        held_out = _held_out(setup, state, report, first - 1)
    for number in range(first, run.steps + 1):
        if stop.asked:
            setup.step.tell("stop")
        state = _one_step(setup, state, loader, report, number, number - first + 1, saver.root.parent)
        if setup.step.heard("stop"):
            report.sync()
            saver.save_last(number, state, loader, None)
            return state, None
        held_out = _held_out(setup, state, report, number)
        if saver.due(number):
            report.sync()
            saver.save(number, state, loader, held_out)
    return state, held_out


def _one_step(
    setup: Setup,
    state: fs.TrainState,
    loader: data.Loader,
    report: Report | Silent,
    number: int,
    here: int,
    folder: Path,
) -> fs.TrainState:
    """Step `number` of the run, the `here`th of this process."""
    mesh = setup.mesh
    batch = [part.to(mesh.device) for part in next(loader)]
    tells = here == 1 and mesh.rank == 0
    if tells:
        lowered = setup.step.lower(state, *batch)
        (folder / "schedule.txt").write_text(lowered.as_text() + "\n", encoding="utf-8")
        write_memory(lowered, folder)
    watched = here == 2 and mesh.device_type == "cuda"
    if watched:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    state, metrics = setup.step(state, *batch)
    values = {name: value.item() for name, value in metrics.items() if name != "aux"}
    report.step(number, values, time.perf_counter() - began)
    if tells:
        append_compiled(lowered, folder)
    if watched and mesh.rank == 0:
        _tell_peak(torch.cuda.max_memory_allocated(), folder)
    return state


def _held_out(setup: Setup, state: fs.TrainState, report: Report | Silent, number: int) -> float | None:
    """The held-out loss after step `number`, if it is to be known there."""
    run = setup.config.run
    if number % run.held_out_every and number != run.steps:
        return None
    loss = evaluate(setup, state.params)
    report.held_out(number, loss)
    return loss


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


def known_tables(setup: Setup, folder: Path) -> dict[str, float]:
    """`table_losses`, counted once for a run: a restart is not to wait for it."""
    path, config = folder / TABLES, setup.config
    of = [setup.corpus.checksum, config.data.held_out_rows, config.model.context]
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if before.get("of") != of:
        before = {"of": of, "losses": table_losses(setup)}
        path.write_text(json.dumps(before) + "\n", encoding="utf-8")
    return before["losses"]


def _start_folder(folder: Path, config: TrainConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    resolved = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
    (folder / "config.yaml").write_text(resolved, encoding="utf-8")


def _tell_resume(config: TrainConfig, state: fs.TrainState, found: str) -> None:
    if found:
        print(f"resume: step {int(state.step)} of {found}", flush=True)
    elif config.run.resume == AUTO:
        print("resume: nothing to go on from, a new run", flush=True)


def _tell_stop(setup: Setup, state: fs.TrainState, run: Run, overrides: list[str]) -> None:
    if setup.mesh.rank != 0:
        return
    number, folder = int(state.step), Path(run.folder)
    write_result(folder, status=STOPPED, overrides=overrides, step=number)
    print(
        f"stopped: step {number} of {setup.config.run.steps} is saved; the same command goes on from there, "
        f"another one with run.resume={folder}",
        flush=True,
    )


def _summary(report: Report, held_out: float) -> dict[str, float]:
    losses = [row["loss"] for row in report.rows if "loss" in row]
    seconds = [row["seconds"] for row in report.rows if "seconds" in row] or [math.nan]
    return {
        "loss": sum(losses[-20:]) / len(losses[-20:]),
        "held_out_loss": held_out,
        **report.tables,
        # Of the step in the middle: the first one after each start compiles.
        "tokens_per_s": report.tokens / statistics.median(seconds),
        "seconds": sum(seconds),
    }
