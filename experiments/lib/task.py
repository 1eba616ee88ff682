"""Task: the model, the data, the loss and the optimizer of a run.

They are those of a decoder that learns next tokens, or the user's own, by `_target_`.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.data import default_collate

import fnshard as fs
from experiments.data.loader import Loader, place_of
from experiments.lib.checks import TARGET, ConfigError, attempt, describe, join_problems
from experiments.lib.config import (
    TARGET_ROWS,
    AdamWConfig,
    ScheduleConfig,
    SGDConfig,
    TrainConfig,
    rows_of,
)
from experiments.lib.decoder import Decoder, next_token_loss
from fnshard.losses import Mean

Loss = Callable[..., tuple[Mean, dict[str, Mean]]]
UNDECAYED = ("*norm*", "embed.*")  # globs of a decoder's leaves that do not decay


def make_target(group: str, values: Mapping[str, Any], *arguments: Any, partly: bool = False) -> Any:
    """Return what a `_target_` makes of the other keys.

    Args:
        partly: return a function that calls it later, with more arguments.

    Raises:
        ConfigError: its name cannot be imported, or it does not take these keys, or fails.
    """
    try:
        return instantiate(dict(values), *arguments, _convert_="all", _partial_=partly)
    except InstantiationException as error:
        message = " ".join(str(error).splitlines()[:2])
        # An error in the user's code has a file and a line, which say more than what Hydra adds to it.
        cause = describe(error)
        if cause.endswith(")"):
            message = f"{message.partition(':')[0].partition(', set env var')[0]}: {cause}"
        raise ConfigError(f"{group}.{TARGET}={values[TARGET]}: {message}") from error


@dataclass(frozen=True)
class Items:
    """The items of a map-style data set, for a `Loader`; `default_collate` makes batches of them."""

    items: Any
    key: Mapping[str, Any]

    @property
    def count(self) -> int:
        """Return the number of items."""
        return len(self.items)

    def batch(self, numbers: np.ndarray) -> tuple[Any, ...]:
        """Return the items of these numbers, as arguments of a step.

        Raises:
            ConfigError: an item cannot be read, or they have different shapes or types.
        """
        items = []
        for number in map(int, numbers):
            try:
                items.append(self.items[number])
            except Exception as error:  # the user's code may raise anything
                raise ConfigError(f"data: item {number}: {describe(error)}") from error
        try:
            batch = default_collate(items)
        except Exception as error:
            named = ", ".join(map(str, numbers[:8].tolist()))
            if len(numbers) > 8:
                named += ", ..."
            raise ConfigError(
                f"data: the items {named} make no batch: "
                f"{type(error).__name__}: {error}. Fix: give all of them equal shapes and types."
            ) from error
        return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


@dataclass(frozen=True)
class TargetData:
    """Two map-style data sets: one to train on, and one to measure.

    Args:
        rows: the rows of the global batch.
        held_out_rows: the most rows that are measured.
    """

    train: Items
    measured: Items
    rows: int
    held_out_rows: int
    seed: int
    unit: str = "row"

    @property
    def tokens(self) -> int:
        """Return the number of rows of one step."""
        return self.rows

    def loader(self, mesh: fs.Mesh) -> Loader:
        """Return the loader of this rank's batches, from the first step on."""
        return Loader(self.train, self.rows, self.seed, **place_of(mesh))

    def held_out(self, mesh: fs.Mesh, rows: int) -> Iterator[tuple[Any, ...]]:
        """Yield this rank's held-out batches of `rows` rows, or of fewer if there are not so many.

        Rows that do not fill a batch of every rank are left out.

        Raises:
            ConfigError: some rank would have no row.
        """
        count = min(self.measured.count, self.held_out_rows)
        if count < mesh.data_size:
            raise ConfigError(
                f"data: {count} held-out rows for {mesh.data_size} ranks. "
                f"Fix: data.held_out_rows={mesh.data_size} or more, and as many items."
            )
        rows = min(rows, count // mesh.data_size)
        for first in range(0, count - rows * mesh.data_size + 1, rows * mesh.data_size):
            yield self.measured.batch(first + mesh.data_rank * rows + np.arange(rows))

    def ngram_losses(self) -> dict[str, float]:
        """Return the losses of n-gram tables, of which such data have none."""
        return {}


def make_data(values: Mapping[str, Any], seed: int) -> TargetData:
    """Make the data that a `_target_` gives: `(train, held_out)`, each with `len()` and `[number]`.

    Raises:
        ConfigError: an error of `make_target`; or it gives something else, or fewer rows than a batch has.
    """
    target = {name: value for name, value in values.items() if name not in TARGET_ROWS}
    rows, held_out_rows = rows_of(values).values()
    pair, name = make_target("data", target), f"data.{TARGET}={values[TARGET]}"
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if not is_pair or not all(hasattr(each, "__len__") and hasattr(each, "__getitem__") for each in pair):
        raise ConfigError(f"{name}: expected (train, held_out), two data sets with len() and [number].")
    if (least := min(map(len, pair))) < rows:
        raise ConfigError(f"{name}: a data set of {least} items, and a batch is of data.rows={rows}.")
    # The items are the user's, so a resumed run is compared by the arguments that made them.
    key = {"data": json.dumps(target, sort_keys=True, default=str)}
    return TargetData(Items(pair[0], key), Items(pair[1], key), rows, held_out_rows, seed)


def make_model(values: Mapping[str, Any]) -> Any:
    """Return what a `_target_` gives: a module, or the pair `(apply, params)` that a function returns."""
    model = make_target("model", values)
    if isinstance(model, nn.Module) or (isinstance(model, tuple) and len(model) == 2 and callable(model[0])):
        return model
    raise ConfigError(f"model.{TARGET}={values[TARGET]}: expected a module, or (apply, params).")


def average_over_rows(loss: Callable[..., Any], apply: Callable[..., Any]) -> Loss:
    """Make `fn(params, *batch)` of a loss `(model, *batch)`, with exact means over all ranks' rows.

    The loss returns a mean over the batch's rows, or an `fs.Mean`; or a pair of that and a dict of more.
    """

    def mean_loss(params: Any, *batch: Any) -> tuple[Mean, dict[str, Mean]]:
        rows = float(next(len(leaf) for leaf in fs.tree.flatten(batch)[0] if isinstance(leaf, Tensor)))

        def weigh(value: Any) -> Mean:
            return value if isinstance(value, Mean) else Mean(value * rows, rows)

        returned = loss(partial(apply, params), *batch)
        value, aux = returned if isinstance(returned, tuple) else (returned, {})
        return weigh(value), {name: weigh(each) for name, each in aux.items()}

    return mean_loss


def check_targets(config: TrainConfig) -> None:
    """Make what `_target_`s name, or import it, to find mistakes before a rank starts.

    Raises:
        ConfigError: the errors of `make_target`, `make_data` and `make_model`, of all groups together.
    """
    wrong: list[str] = []
    if isinstance(config.model, dict):
        attempt(partial(_make_deferred_model, config.model), wrong)
    if isinstance(config.data, dict):
        attempt(partial(make_data, config.data, 0), wrong)
    # The others need what ranks make, so they are imported, and not called.
    groups = {"objective": config.objective, "optimizer": config.optimizer}
    named = [(group, each) for group, each in groups.items() if isinstance(each, dict)]
    named += [("tracker.own", each) for each in config.tracker.own]
    for group, each in named:
        attempt(partial(make_target, group, each, partly=True), wrong)
    if wrong:
        raise join_problems(wrong)


def _make_deferred_model(model: Mapping[str, Any]) -> Any:
    """Make a model without its parameters' values, which ranks make."""
    with fs.deferred():
        return make_model(model)


# ------------------------------------------------------------------ what trains


@dataclass(frozen=True)
class Task:
    """A model as a pure function, and its loss.

    Args:
        init: the argument of `step.init`.
        apply, params: the results of `fs.make_functional`.
        loss: the loss of a step.
        held_out_loss: the same loss in `Mean`s.
        undecayed: globs of leaves that do not decay.
    """

    init: Any
    apply: Callable[..., Any]
    params: Any
    loss: Callable[..., Any]
    held_out_loss: Callable[..., Any]
    undecayed: tuple[str, ...]


def make_task(config: TrainConfig) -> Task:
    """Make a decoder that learns next tokens, or what `_target_`s name."""
    # `step.init` makes the values of a module's parameters.
    with fs.deferred():
        model = make_model(config.model) if isinstance(config.model, dict) else Decoder(config.model)
    if not isinstance(model, nn.Module):  # nobody makes the values of such parameters later
        model = make_model(config.model)
    apply, params = fs.make_functional(model) if isinstance(model, nn.Module) else model
    init = model if isinstance(model, nn.Module) else params
    if config.objective is not None:
        loss = average_over_rows(make_target("objective", config.objective, partly=True), apply)
        # Vectors of an unknown model do not decay: they are biases and norms' weights.
        leaves, _ = fs.tree.flatten_with_paths(params)
        vectors = tuple(glob.escape(path) for path, leaf in leaves.items() if leaf.dim() < 2)
        return Task(init, apply, params, loss, loss, vectors)

    def next_token(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(model(tokens), targets)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token(partial(apply, params), tokens, targets)

    return Task(init, apply, params, loss_fn, average_over_rows(next_token, apply), UNDECAYED)


# ------------------------------------------------------------------ the optimizer


def make_optimizer(
    chosen: AdamWConfig | SGDConfig | dict[str, Any],
    schedule: ScheduleConfig,
    steps: int,
    undecayed: tuple[str, ...],
    rates: Any = 1.0,
) -> fs.optim.Optimizer:
    """Make the optimizer that a configuration names, with clipping before it.

    A `_target_` is called with its keys, and `lr` is a schedule of the rate; it gets neither clipping nor the
    leaves that do not decay.

    Args:
        undecayed: globs of leaves that do not decay.
        rates: adamw's `lr_scale`.
    """
    if isinstance(chosen, dict):
        rate = {"lr": make_rate(schedule, chosen["lr"], steps)} if "lr" in chosen else {}
        others = {name: value for name, value in chosen.items() if name != "lr"}
        return instantiate(others, _convert_="all", _partial_=True)(**rate)  # Hydra takes no functions
    rate = make_rate(schedule, chosen.lr, steps)
    decay = [*((glob, 0.0) for glob in undecayed), ("*", chosen.weight_decay)]
    if isinstance(chosen, AdamWConfig):
        optimizer = getattr(fs.optim, chosen.name)(
            rate, b1=chosen.b1, b2=chosen.b2, eps=chosen.eps, weight_decay=decay, lr_scale=rates
        )
    else:
        optimizer = fs.optim.sgd(rate, momentum=chosen.momentum, nesterov=chosen.nesterov, weight_decay=decay)
    if chosen.clip is None:
        return optimizer
    return fs.optim.chain(fs.optim.clip_by_global_norm(chosen.clip), optimizer)


def make_rate(shape: ScheduleConfig, peak: float, steps: int) -> fs.schedules.RateSchedule:
    """Make the learning rate by step from the configuration's fractions."""
    if shape.name == "constant":
        return fs.schedules.constant(peak)
    phases = {"warmup": math.floor(shape.warmup * steps), "total": steps, "floor": shape.floor * peak}
    if shape.name == "wsd":
        phases["decay"] = math.floor(shape.decay * steps)
    return fs.schedules.SCHEDULES[shape.name](peak=peak, **phases)
