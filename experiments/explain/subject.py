"""Subject: the model and data of a step on paper, a decoder by its sizes or the user's own by `_target_`s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fnshard as fs
from experiments.lib.checks import TARGET
from experiments.lib.decoder import Decoder, DecoderConfig, loss_function
from experiments.lib.task import UNDECAYED, make_data, make_task


@dataclass(frozen=True)
class Subject:
    """A subject of a step on paper: a model with its loss and batches.

    Args:
        loss, params: arguments of `fs.shard_step` and `lower`. The leaves have shapes and no values.
        batch: a function that makes a rank's batch of so many rows, without values.
        undecayed: globs of leaves that do not decay.
        parameters: the number of parameters, without buffers.
        tokens: the tokens of a row; 1 if rows are counted.
        unit: the name of what is counted, "token" or "row".
        words: a description of the model in a few words.
    """

    loss: Callable[..., Any]
    params: Any
    batch: Callable[[int], tuple[Any, ...]]
    undecayed: tuple[str, ...]
    parameters: int
    tokens: int
    unit: str
    words: str


def make_subject(config: Any, layers: int | None = None) -> Subject:
    """Make the subject of a configuration of `explain` or `plan`.

    Args:
        layers: the number of layers in place of the model's own, for a language model only
            (`PlanConfig.is_layered`). The user's own model takes it as `layers`.

    Raises:
        ConfigError: a `_target_` does not import, or does not take its keys.
    """
    # The main job's decoder.
    model = config.model
    if isinstance(model, DecoderConfig) and config.objective is None:
        sizes = replace(model, layers=layers or model.layers)
        with torch.device("meta"):
            loss, params = loss_function(Decoder(sizes))
        words = f"{sizes.layers} layers of width {sizes.width:,}, vocabulary {sizes.vocab:,}, "
        words += f"context {sizes.context:,}"
        batch = _make_text_batch(sizes.context)
        return Subject(loss, params, batch, UNDECAYED, sizes.parameters, sizes.context, "token", words)

    # The user's own model, made as the main job makes it.
    if layers is not None:
        config = replace(config, model={**model, "layers": layers})
    task = make_task(config)
    named, structure = fs.tree.flatten_with_paths(task.params)

    # Leaves of a module that are no `nn.Parameter` are buffers and do not count; those of a function all do.
    is_module = isinstance(task.init, nn.Module)
    size = sum(
        leaf.numel()
        for leaf in named.values()
        if leaf.requires_grad or isinstance(leaf, nn.Parameter) or not is_module
    )
    params = fs.tree.unflatten(map(_drop_values, named.values()), structure)
    name = model[TARGET] if isinstance(model, dict) else f"a decoder of {model.layers} layers"
    words = f"{name}, {len(named)} leaves"

    # Its batches are texts, or repeat the first row of the user's own data.
    if config.objective is None:
        text = f"{words}, context {model['context']:,}"
        batch = _make_text_batch(model["context"])
        return Subject(task.loss, params, batch, task.undecayed, size, model["context"], "token", text)
    one = make_data({**config.data, "rows": 1}, 0).train.batch(np.arange(1))

    def rows(count: int) -> tuple[Any, ...]:
        def repeat(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty(count, *leaf.shape[1:], dtype=leaf.dtype, device="meta")  # dim 0 has the rows

        return fs.tree.map(repeat, one)

    return Subject(task.loss, params, rows, task.undecayed, size, 1, "row", words)


def _make_text_batch(context: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that makes tokens and the tokens that follow them, int64 [rows, context]."""

    def texts(rows: int) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(rows, context, dtype=torch.int64, device="meta")
        return tokens, tokens

    return texts


def _drop_values(leaf: Tensor) -> Tensor:
    """Return a leaf of the same shape and kind on meta."""
    empty = torch.empty_like(leaf, device="meta")
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(empty, requires_grad=leaf.requires_grad)
    return empty.requires_grad_(leaf.requires_grad)
