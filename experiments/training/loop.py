"""The main job, as one rank runs it."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

import fnshard as fs
from experiments.configs.plan import Plan, axis_of, dtypes_of, plan_of
from experiments.configs.train import ConfigError, TrainConfig
from experiments.data.files import write_text
from experiments.data.loader import Loader
from experiments.training.dataset import Dataset, open_dataset
from experiments.training.decoder import Decoder, next_token_loss
from experiments.training.goal import HELD_OUT, Goal
from experiments.training.metrics_file import METRICS
from experiments.training.own import OwnData, made, model_of, of_rows, own_data
from experiments.training.report import comparison, draw_run
from experiments.training.resume import RunFolder
from experiments.training.run import Ending, run_job
from experiments.training.sample import Sampler, last_logits, safe
from experiments.training.steps import Setup, make_optimizer, mean_over
from fnshard.launcher.rank import Stop


def train(config: TrainConfig, run: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Train, from the run's newest checkpoint if it has one; rank 0 writes everything to the run's folder and
    prints its path.
    """
    run_job("train", lambda: prepare(config), run, overrides, stop)


@dataclass(frozen=True)
class TrainSetup(Setup):
    """Of the main job."""

    config: TrainConfig
    mesh: fs.Mesh
    plan: Plan
    dataset: Dataset | OwnData
    model: Any
    step: Any
    forward: Any
    sampler: Sampler | None

    @property
    def tokens(self) -> int:
        return self.dataset.tokens

    @property
    def unit(self) -> str:
        return self.dataset.unit

    @property
    def goal(self) -> Goal:
        """A loss of one's own has the unit that its author knows."""
        return Goal() if self.config.objective is not None else Goal(unit=f"nats per {self.unit}")

    def loader(self) -> Loader:
        return self.dataset.loader(self.mesh)

    def first_state(self) -> fs.TrainState:
        return self.step.init(self.model, seed=self.config.run.seed)

    def evaluate(self, params: Any) -> tuple[float, dict[str, float]]:
        """Mean loss over all held-out rows, of text in nats per token, and the means of what else the loss
        gives; all ranks call it together."""
        return mean_over(self.forward, params, self._held_out(), self.mesh.device)

    def sample(self, params: Any) -> str:
        """Return the prompt and what follows it; each rank draws its own. Nothing where the data are no text,
        or no token is asked for."""
        if self.sampler is None or not self.config.run.sampled:
            return ""
        run, prompt = self.config.run, self.dataset.encode(self.config.run.prompt)
        (drawn,) = self.sampler(params, [prompt], run.sampled, run.seed + self.mesh.data_rank)
        return safe(self.dataset.decode([*prompt, *drawn]))

    def compile_ahead(self, state: fs.TrainState) -> None:
        """Compile what measures the model and samples from it, while it trains."""
        lowered = [self.forward.lower(state, *next(self._held_out()))]
        if self.config.run.sampled and self.sampler is not None:
            lowered.append(self.sampler.lower(state))
        for each in lowered:  # after all of them: nothing is traced while a thread compiles
            each.compile_async()

    def finish(self, end: Ending, baseline: None) -> None:
        """Draw a sample; on rank 0 write and print the results."""
        with end.spent.on("samples"):
            sampled = self.sample(end.state.params)
        with end.spent.on("evaluation"):  # of text a loss is all there is, and known
            more = {} if self.config.objective is None else self.evaluate(end.state.params)[1]
        with end.spent.on("saves"):
            fs.checkpoint.wait()
        if self.mesh.rank != 0:
            return
        if sampled:
            write_text(end.folder / "sample.txt", sampled)
        with end.spent.on("reports"):
            tables = self.dataset.tables()
            draw_run(
                end.folder / METRICS, self.goal, tables, end.folder / "loss.png", "loss of a training run"
            )
        measured = {self.goal.held_out: end.held_out, **{HELD_OUT + n: v for n, v in more.items()}, **tables}
        closing = end.write_result(measured, sample="sample.txt")
        text = comparison(end.held_out, self.goal, tables)
        print(
            "\n\n".join(filter(None, ["", text, sampled, closing])) + f"\nresults: {end.folder}", flush=True
        )

    def _held_out(self) -> Iterator[tuple[Any, ...]]:
        """This rank's held-out batches, of as many rows as a training step has: that much memory there is."""
        return self.dataset.held_out(
            self.mesh, self.dataset.rows // self.mesh.data_size // self.plan.accumulate
        )


@dataclass(frozen=True)
class Task:
    """What trains: a model as a pure function, and its loss.

    Args:
        init: what `step.init` takes.
        apply, params: as of `fs.make_functional`.
        loss: of a step; `measured` is the same in `Mean`s.
        undecayed: globs of leaves that do not decay.
    """

    init: Any
    apply: Callable[..., Any]
    params: Any
    loss: Callable[..., Any]
    measured: Callable[..., Any]
    undecayed: tuple[str, ...]


def task_of(config: TrainConfig) -> Task:
    """A decoder that learns next tokens, or what `_target_`s name."""
    with fs.deferred():
        model = model_of(config.model) if isinstance(config.model, dict) else Decoder(config.model)
    if not isinstance(model, nn.Module):  # whose values nobody makes later
        model = model_of(config.model)
    apply, params = fs.make_functional(model) if isinstance(model, nn.Module) else model
    init = model if isinstance(model, nn.Module) else params
    if config.objective is not None:
        loss = of_rows(made("objective", config.objective, partly=True), apply)
        vectors = (
            glob.escape(p) for p, leaf in fs.tree.flatten_with_paths(params)[0].items() if leaf.dim() < 2
        )
        return Task(init, apply, params, loss, loss, tuple(vectors))

    def next_token(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(model(tokens), targets)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token(partial(apply, params), tokens, targets)

    return Task(init, apply, params, loss_fn, of_rows(next_token, apply), ("*norm*", "embed.*"))


def prepare(config: TrainConfig) -> TrainSetup:
    """Mesh, specs, step: all of fnshard that the job uses."""
    run = config.run
    mesh = fs.make_mesh(**config.mesh.axes, device=run.device)
    task = task_of(config)
    dataset = own_data(config.data, run.seed) if isinstance(config.data, dict) else open_dataset(config)
    optimizer = make_optimizer(config.optimizer, config.schedule, run.steps, task.undecayed)
    plan = plan_of(
        config.strategy, run, task.loss, task.params, mesh, optimizer,
        batch=next(dataset.loader(mesh)), specs=partial(_specs, config, task.params, mesh),
        hardware=config.hardware.name, along=config.mesh.options,
    )  # fmt: skip
    step = fs.shard_step(task.loss, plan.specs, mesh=mesh, optimizer=optimizer, **plan.options)
    how = {
        "mesh": mesh, "backend": run.backend, "deterministic": run.deterministic, "timeout": run.timeout_s,
        **config.mesh.options,
    }  # fmt: skip
    forward, sampler = fs.shard_forward(task.measured, plan.specs, **how), None
    if config.objective is None:
        logits = fs.shard_forward(last_logits(task.apply), plan.specs, **how)
        sampler = Sampler(logits, config.context, mesh.device)
    return TrainSetup(config, mesh, plan, dataset, task.init, step, forward, sampler)


def _specs(config: TrainConfig, params: Any, mesh: fs.Mesh, preset: Callable[..., Any], **policy: Any) -> Any:
    """By the rules of the configuration, or by a preset."""
    policy = dtypes_of(config.precision) | policy
    if config.specs is None:
        return preset(params, mesh, tensor=axis_of("tensor", mesh), **policy)
    return specs_of(config.specs, params, policy)


def specs_of(rules: Any, params: Any, policy: Mapping[str, Any]) -> Any:
    """Specs by `TrainConfig.specs`; `policy`: fields of the leaves whose rules do not have them.

    Raises:
        ConfigError: a rule matches nothing, or a leaf no rule.
    """
    try:
        return fs.match_specs(params, [(of, rule_of(how, policy)) for of, how in rules])
    except fs.errors.SpecError as error:
        raise ConfigError(f"specs: {error}") from None


def rule_of(how: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A rule of `TrainConfig.specs`, with other fields where it has none, as `fs.match_specs` takes it.

    >>> rule_of("shard", {"memory": "host"}), rule_of({"storage": [None, "shard"]}, {"memory": "device"})
    ({'memory': 'host', 'storage': ['shard']}, {'memory': 'device', 'storage': [None, 'shard']})
    """
    return {**fields, **({"storage": [how]} if isinstance(how, str) else how or {})}
