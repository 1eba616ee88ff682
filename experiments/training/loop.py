"""The main job, as one rank runs it."""

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
from experiments.configs.plan import Plan, dtypes_of, plan_of, tensor_axis
from experiments.configs.train import TrainConfig
from experiments.data.files import write_text
from experiments.data.loader import Loader
from experiments.training.dataset import Dataset, open_dataset
from experiments.training.decoder import Decoder, next_token_loss
from experiments.training.metrics_file import METRICS
from experiments.training.report import comparison, plot_losses
from experiments.training.resume import RunFolder
from experiments.training.run import Ending, run_job
from experiments.training.run_record import TimeSpent
from experiments.training.sample import Sampler, last_logits, safe
from experiments.training.steps import make_optimizer
from fnshard.launcher.rank import Stop


def train(config: TrainConfig, run: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Train, from the run's newest checkpoint if it has one; rank 0 writes everything to the run's folder and
    prints its path.
    """
    run_job("train", lambda: prepare(config), run, overrides, stop)


@dataclass(frozen=True)
class TrainSetup:
    """A `run.Setup`."""

    config: TrainConfig
    mesh: fs.Mesh
    plan: Plan
    dataset: Dataset
    model: nn.Module
    step: Any
    forward: Any
    sampler: Sampler

    @property
    def tokens(self) -> int:
        return self.config.data.rows * self.config.context

    @property
    def unit(self) -> str:
        return self.dataset.unit

    def loader(self) -> Loader:
        return self.dataset.loader(self.mesh)

    def first_state(self) -> fs.TrainState:
        return self.step.init(self.model, seed=self.config.run.seed)

    def introduce(self, state: fs.TrainState) -> None:
        """Nothing is printed before the first step."""

    def baseline(self, state: fs.TrainState, folder: Path, spent: TimeSpent) -> None:
        """Nothing is measured before the first step."""

    def batch(self, state: fs.TrainState, loaded: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the loader gives."""
        return loaded

    def evaluate(self, params: Any) -> float:
        """Mean loss over all held-out windows, nats per token; all ranks call it together."""
        # The forward sends them to the device.
        losses = [self.forward(params, *self.dataset.held_out(s)) for s in self._held_out_starts()]
        mean = torch.stack(losses).double().mean().cpu()
        if dist.is_initialized():  # every rank's mean is over equally many tokens
            dist.all_reduce(mean)
        return mean.item() / self.mesh.size

    def sample(self, params: Any) -> str:
        """The prompt and what follows it; each rank draws its own."""
        run, prompt = self.config.run, self.dataset.encode(self.config.run.prompt)
        (drawn,) = self.sampler(params, [prompt], run.sampled, run.seed + self.mesh.data_rank)
        return safe(self.dataset.decode([*prompt, *drawn]))

    def compile_ahead(self, state: fs.TrainState) -> None:
        """Compile what measures the model and samples from it, while it trains."""
        lowered = [self.forward.lower(state, *self.dataset.held_out(self._held_out_starts()[0]))]
        if self.config.run.sampled:
            lowered.append(self.sampler.lower(state))
        for each in lowered:  # after all of them: nothing is traced while a thread compiles
            each.compile_async()

    def finish(self, end: Ending, baseline: None) -> None:
        """Draw a sample; on rank 0 write and print the results."""
        with end.spent.on("samples"):
            sampled = self.sample(end.state.params)
        with end.spent.on("saves"):
            fs.checkpoint.wait()
        if self.mesh.rank != 0:
            return
        write_text(end.folder / "sample.txt", sampled)
        with end.spent.on("reports"):
            tables = self.dataset.tables()
            plot_losses(end.folder / METRICS, tables, end.folder / "loss.png", unit=self.unit)
        closing = end.write_result({"held_out_loss": end.held_out, **tables}, sample="sample.txt")
        text = comparison(end.held_out, tables, unit=self.unit)
        print(f"\n{text}\n\n{sampled}\n\n{closing}\nresults: {end.folder}", flush=True)

    def _held_out_starts(self) -> tuple[Tensor, ...]:
        """This rank's held-out windows, as many at once as a training step has: that much memory there is."""
        mine = self.dataset.starts.chunk(self.mesh.data_size)[self.mesh.data_rank]
        rows = self.config.data.rows // self.mesh.data_size // self.plan.accumulate
        return mine.split(math.gcd(len(mine), rows))


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
    forward = fs.shard_forward(loss_fn, plan.specs, **how)
    sampler = Sampler(fs.shard_forward(last_logits(apply), plan.specs, **how), config.context, mesh.device)
    return TrainSetup(config, mesh, plan, open_dataset(config), model, step, forward, sampler)
