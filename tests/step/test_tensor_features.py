"""On a mesh with a tensor axis: forwards, gradients alone, frozen codes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from models import Model
from sharded import assert_same, make_step, specs_of, train
from tensor_models import decoder, logits

import fnshard as fs

AXES = {"shard": 2, "tensor": 2}
ADAMW = fs.optim.adamw(1e-2, weight_decay=0.1)


def on_mesh(
    model: Model, mesh: fs.Mesh, specs: Any, optimizer: Any, **options: Any
) -> list[reference.Trained]:
    step = make_step(mesh, model, specs, optimizer, **options)
    return fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, optimizer, step=step))


def test_a_forward_and_gradients_alone() -> None:
    model = decoder()
    mesh = fs.make_mesh(**AXES, simulated=True)
    specs = specs_of(model, "full_shard", mesh, tensor="tensor")
    tokens = model.batch(0)[0]
    grads, value = reference.gradients(model.loss, model.params, tokens)
    step = fs.shard_step(model.loss, specs, mesh=mesh, backend="eager")
    forward = fs.shard_forward(logits, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        stored = fs.shard(model.params, specs, mesh)
        mine = tokens[2 * (rank // 2) :][:2]
        loss, found = step(stored, mine)
        return loss, fs.unshard(found, specs, mesh, layout="gradient"), forward(stored, mine), mine

    for loss, found, made, mine in fs.simulate(mesh, run):
        torch.testing.assert_close(loss, value, rtol=0, atol=1e-10)
        torch.testing.assert_close(found, grads, rtol=0, atol=1e-10)
        torch.testing.assert_close(made, logits(model.params, mine), rtol=0, atol=1e-10)


@pytest.mark.parametrize("codec", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_frozen_codes_are_split_by_rows(codec: str) -> None:
    """The codes of a rank's rows are rows of the codes; a matrix whose inputs would be split stays whole."""
    model = replace(decoder(tied=False), frozen=("layers.0.up_proj.weight", "layers.1.down_proj.weight"))
    runs = []
    for axes in ({"shard": 1}, AXES):
        mesh = fs.make_mesh(**axes, simulated=True)
        tensor = "tensor" if "tensor" in axes else None
        coded = {p: model.params[p] for p in model.frozen}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            parts = fs.presets.full_shard(coded, mesh, tensor=tensor, codec=codec, trainable=False)
        specs = {**specs_of(model, "full_shard", mesh, tensor=tensor), **parts}
        assert specs[model.frozen[0]].compute.axes == tuple(a for a in axes if a == "tensor")
        runs.append(on_mesh(model, mesh, specs, ADAMW))
    for got in runs[1]:
        assert_same(got, runs[0][0])
