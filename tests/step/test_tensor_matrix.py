"""Every mesh, residual stream, loss, remat and preset with each other: all train as one process does."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import reference
from sharded import assert_same, by_steps, make_step, specs_of, train
from tensor_models import decoder

import fnshard as fs
from fnshard.layout.tensor import tensor_layouts

MESHES = (
    {"shard": 2}, {"tensor": 2}, {"shard": 1, "tensor": 2}, {"shard": 2, "tensor": 2},
    {"shard": 1, "tensor": 4}, {"shard": 2, "context": 2}, {"shard": 1, "tensor": 2, "context": 2},
    {"shard": 2, "tensor": 2, "context": 2},
)  # fmt: skip
PRESETS = ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard")
CASES = [
    (axes, *options)
    for axes, *options in itertools.product(
        range(len(MESHES)), ("split", "whole"), (True, False), ("none", "unit"), PRESETS
    )
    if options[1] or "tensor" in MESHES[axes]
]
PROCESSES = ((3, "split", True, "unit", "full_shard"), (5, "split", True, "none", "zero2"),
             (6, "whole", False, "unit", "zero1"))  # fmt: skip
OPTIMIZER = fs.optim.adamw(1e-2, weight_decay=0.1)


@cache
def truth() -> reference.Trained:
    model = decoder()
    return reference.train(model.loss, model.params, by_steps(model), reference.adamw(1e-2))


def trained(rank: int, mesh: fs.Mesh, step: Any, specs: Any) -> reference.Trained:
    return train(rank, mesh, decoder(), specs, OPTIMIZER, step=step)


def step_of(mesh: fs.Mesh, residual: str, split_loss: bool, remat: str, preset: str) -> tuple[Any, Any]:
    """Without a split loss, the table of the vocabulary is computed whole."""
    model = decoder()
    layouts = tensor_layouts(model.params, "tensor", mesh) if "tensor" in mesh.names else {}
    tensor = {path: layout for path, layout in layouts.items() if split_loss or path != "embed.weight"}
    specs = specs_of(model, preset, mesh, tensor=tensor)
    return make_step(mesh, model, specs, OPTIMIZER, residual=residual, remat=remat), specs


@pytest.mark.long
@pytest.mark.parametrize(("axes", "residual", "split_loss", "remat", "preset"), CASES)
def test_every_combination(axes: int, residual: str, split_loss: bool, remat: str, preset: str) -> None:
    mesh = fs.make_mesh(**MESHES[axes], simulated=True)
    step, specs = step_of(mesh, residual, split_loss, remat, preset)
    for got in fs.simulate(mesh, lambda rank: trained(rank, mesh, step, specs)):
        assert_same(got, truth())


def on_ranks(rank: int, axes: int, *options: Any) -> reference.Trained:
    mesh = fs.make_mesh(**MESHES[axes], device="cpu")
    return trained(rank, mesh, *step_of(mesh, *options))


@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_processes(ranks: Any, case: Any) -> None:
    for got in ranks(4).run(on_ranks, *case):
        assert_same(got, truth())


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in CASES if c[0] in (1, 3, 4, 5, 6) and c[3] == "unit"], ids=str)
def test_every_combination_of_processes(ranks: Any, case: Any) -> None:
    world = fs.make_mesh(**MESHES[case[0]], abstract=True).size
    for got in ranks(world).run(on_ranks, *case):
        assert_same(got, truth())
