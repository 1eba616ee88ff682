"""What a step does besides the plain gradient: aux, Whole, resuming, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import sharded
import torch
import torch.nn.functional as F
from errors import raises
from models import model_of, noise, vectors
from sharded import by_steps, simulated
from torch import Tensor
from toys import step_of

import fnshard as fs
from fnshard import LayoutSpec, Mean, P, optim

# ------------------------------------------------------------------ what fn returns, what it takes


@pytest.mark.suite({
    "1-None": "gradients alone",
    "3-optimizer1": "over micro-batches of a step",
})  # fmt: skip
@pytest.mark.parametrize(("accumulate", "optimizer"), [(1, None), (3, optim.sgd(0.0)), (3, None)])
def test_aux_scalars_are_averaged_means_exact_and_tensors_local(accumulate: int, optimizer: Any) -> None:
    params = noise({"layers.0.w": (12, 7), "layers.1.w": (7, 12)})

    def loss(params: Any, x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(x @ params["layers.0.w"])
        out = h @ params["layers.1.w"]
        big = (x > 0.5).double()
        aux = {
            "hidden": h.mean(),
            "big": Mean((x * big).sum(), big.sum()),
            "rows": out,
            "note": "text",
            "seen": x,
        }
        return F.mse_loss(out, y), aux

    batch = vectors(0)
    mesh = simulated(2)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, accumulate=accumulate, backend="eager")

    def run(rank: int) -> Any:
        mine = sharded.part(batch, rank, 2)
        if optimizer is not None:
            return step(step.init(params), *mine)[1]["aux"]
        (_, aux), _ = step(fs.shard(params, specs, mesh), *mine)
        return aux

    full = loss(params, *batch)[1]
    for rank, aux in enumerate(fs.simulate(mesh, run)):
        torch.testing.assert_close(aux["hidden"], full["hidden"], rtol=0, atol=sharded.ATOL)
        torch.testing.assert_close(
            aux["big"], full["big"].total / full["big"].count, rtol=0, atol=sharded.ATOL
        )
        last = sharded.part(sharded.part(batch, rank, 2), accumulate - 1, accumulate)
        torch.testing.assert_close(aux["rows"], loss(params, *last)[1]["rows"], rtol=0, atol=sharded.ATOL)
        assert torch.equal(aux["seen"], last[0])
        assert aux["note"] == "text"


def test_whole_batch_leaves_are_not_cut() -> None:
    params = noise({"layers.0.w": (12, 12)})
    weights = torch.rand(12, dtype=torch.float64)  # as long as the batch: a cut would not be noticed by shape

    def loss(params: Any, x: Tensor, weights: Tensor, power: int) -> Tensor:
        return ((x @ params["layers.0.w"] * weights) ** power).mean()

    x = vectors(0)[0]
    grads, value = reference.gradients(loss, params, x, weights, 2)
    step = step_of(loss, params, accumulate=3)
    got, mine = step(params, x, fs.Whole(weights), 2)
    torch.testing.assert_close(got, value, rtol=0, atol=sharded.ATOL)
    torch.testing.assert_close(mine["layers.0.w"], grads["layers.0.w"], rtol=0, atol=sharded.ATOL)
    with raises(fs.StateError, leaves="batch['1'] [12]", fix="fs.Whole"):
        step_of(loss, params, accumulate=5)(params, x[:10], weights, 2)


# ------------------------------------------------------------------ state and layouts


def test_replicated_leaves_beside_sharded_ones() -> None:
    """Rules that mix layouts within one unit: several buckets, one result."""
    model = model_of("gpt")
    mesh = simulated(replicate=2, shard=2)
    rules = [
        ("*norm*", LayoutSpec()),
        ("*.down.*", LayoutSpec(P(None, ("replicate", "shard")))),
        ("*.up.*", LayoutSpec(P("replicate", "shard"))),
        ("*.gate.*", LayoutSpec(gradient=P("shard"), optimizer=P("shard"))),
        ("head*", LayoutSpec(optimizer=P("shard"), reshard=False)),
        ("*", LayoutSpec(P("shard"))),
    ]
    specs = fs.match_specs(model.params, rules)
    expected = reference.train(
        model.loss, model.params, by_steps(model), reference.adamw(3e-3, 0.1), frozen=model.frozen
    )
    step = sharded.make_step(mesh, model, specs, optim.adamw(3e-3, weight_decay=0.1), grad_norm=True)
    got = fs.simulate(mesh, lambda rank: sharded.train(rank, mesh, model, specs, None, step=step))
    for each in got:
        sharded.assert_same(each, expected)
        sharded.assert_floats(each.norms, expected.norms)
