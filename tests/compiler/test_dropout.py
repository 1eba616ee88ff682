"""Random ops: masks depend on (seed, step, rank) alone, and the backward uses the forward's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sharded
import torch
import torch.nn.functional as F
from models import GPT, MODELS, language_model, noise, seeded, vectors
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P, optim


def simulated(world: int = 2) -> fs.Mesh:
    return fs.make_mesh(shard=world, simulated=True)


def masks(preset: str, seed: int, steps: int, world: int = 2, **options: Any) -> list[list[Tensor]]:
    """By rank and step: which of 12 x 12 products a dropout kept, seen through the gradient of the weight."""
    params = {
        "layers.0.w": torch.ones(12, 12, dtype=torch.float64),
        "layers.1.w": torch.ones(12, 12, dtype=torch.float64),
    }

    def loss(params: Any, x: Tensor) -> Any:
        kept = F.dropout(params["layers.0.w"] * x, 0.25)
        again = F.dropout(params["layers.1.w"] * kept, 0.5)
        return again.sum(), {"kept": kept, "again": again}

    mesh = simulated(world)
    specs = fs.presets.PRESETS[preset](params, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optim.sgd(0.0), backend="eager", **options)

    def run(rank: int) -> list[Tensor]:
        state, seen = step.init(params, seed=seed), []
        for _ in range(steps):
            state, metrics = step(state, torch.ones(12, 12, dtype=torch.float64))
            seen.append(torch.stack([metrics["aux"]["kept"], metrics["aux"]["again"]]))
        return seen

    return fs.simulate(mesh, run)


def test_dropout_masks_depend_on_seed_step_and_rank_and_on_nothing_else() -> None:
    truth = masks("full_shard", 0, 2)
    for preset, depth in (("full_shard", 0), ("shard_grad_op", 2), ("zero2", 1), ("no_shard", 0)):
        got = masks(preset, 0, 2, prefetch=depth, overlap=depth)
        assert all(
            torch.equal(a, b)
            for mine, yours in zip(got, truth, strict=True)
            for a, b in zip(mine, yours, strict=True)
        )
    other = masks("full_shard", 1, 1)[0][0]
    distinct = [*truth[0], *truth[1], other]
    for i, a in enumerate(distinct):
        assert not torch.equal(a[0] != 0, a[1] != 0), "two draws of one step are one mask"
        for b in distinct[i + 1 :]:
            assert not torch.equal(a[0] != 0, b[0] != 0)


def test_dropout_keeps_its_share_and_scales_it() -> None:
    kept = torch.stack([m[0] for rank in masks("zero1", 3, 20, world=4) for m in rank])
    share = (kept != 0).double().mean().item()
    sigma = math.sqrt(0.25 * 0.75 / kept.numel())
    assert abs(share - 0.75) < 5 * sigma
    assert torch.equal(kept.unique(), torch.tensor([0.0, 1 / 0.75], dtype=torch.float64))
    per_place = (kept != 0).double().mean(0)  # no place is favoured
    assert per_place.std() < 2 * math.sqrt(0.25 * 0.75 / kept.shape[0])


@pytest.mark.parametrize("preset", ["full_shard", "zero2"])
def test_backward_uses_the_forward_mask(preset: str) -> None:
    """y = dropout(w * x): dL/dw is x / (1 - p) exactly where y was kept, though the mask is drawn again."""
    p = 0.4
    params = noise({"layers.0.w": (12, 12), "layers.1.w": (12, 12)})

    def loss(params: Any, x: Tensor) -> Any:
        y = F.dropout(params["layers.0.w"] * x[0], p)
        return F.dropout(torch.tanh(y) * params["layers.1.w"], p).sum(), y

    mesh = simulated(2)
    specs = fs.presets.PRESETS[preset](
        params, mesh, rules=[("layers.1.*", LayoutSpec(P("shard"), trainable=False))]
    )
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")
    x = torch.rand(1, 12, 12, dtype=torch.float64) + 0.5

    def run(rank: int) -> Any:
        (total, y), grads = step(fs.shard(params, specs, mesh), x)
        return total, y, fs.unshard(grads, specs, mesh, layout="gradient")["layers.0.w"]

    ranks = fs.simulate(mesh, run)
    grad = ranks[0][2]
    kept = torch.stack([y != 0 for _, y, _ in ranks])
    assert (kept[0] != kept[1]).any(), "ranks share their mask"
    never = ~(kept[0] | kept[1])
    assert never.any()
    assert not grad[never].any()
    for _, y, _ in ranks:
        expected = params["layers.0.w"] * x[0] / (1 - p)
        torch.testing.assert_close(y[y != 0], expected[y != 0], rtol=1e-12, atol=0)
    # Each rank's part of the gradient is a sum of kept terms alone: with tanh' and w1 known up to the
    # second mask, every entry is one of four values.
    slopes = [
        (1 - torch.tanh(y).square()) * params["layers.1.w"] * x[0] / (1 - p) ** 2 * (y != 0) / 2
        for _, y, _ in ranks
    ]
    options = torch.stack([a * slopes[0] + b * slopes[1] for a in (0, 1) for b in (0, 1)])
    assert (options - grad).abs().amin(0).max() < 1e-12


def test_dropout_in_a_model_trains_alike_under_all_presets_and_recompute() -> None:
    """In a transformer block: presets and prefetch change no bit of the losses; eval mode has no dropout."""
    module = seeded(GPT, dropout=0.3)
    model = language_model(module)
    runs = [
        sharded.simulate(model, preset, 2, optim.sgd(0.01), steps=3, prefetch=depth)
        for preset, depth in (("full_shard", 1), ("no_shard", 0), ("zero2", 2))
    ]
    for got in runs[1:]:
        sharded.assert_same(got[0], runs[0][0], atol=1e-12)
    module.eval()
    still = sharded.simulate(language_model(module), "full_shard", 2, optim.sgd(0.01), steps=3)[0]
    expected = sharded.simulate(MODELS["gpt"](), "full_shard", 2, optim.sgd(0.01), steps=3)[0]
    sharded.assert_same(still, expected, atol=1e-12)
    assert abs(still.losses[0] - runs[0][0].losses[0]) > 1e-6


def test_random_ops_beside_dropout() -> None:
    """rand, randn, randint, bernoulli and attention's own dropout: drawn from the step's seed, all differ."""
    params = noise({"layers.0.w": (12, 12)})

    def loss(params: Any, x: Tensor) -> Any:
        h = x @ params["layers.0.w"]
        drawn = {
            "rand": torch.rand(500), "randn": torch.randn_like(h), "randint": torch.randint(3, 9, (500,)),
            "bernoulli": torch.bernoulli(torch.full((500,), 0.3)),
            "attention": F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.5)[0],
        }  # fmt: skip
        return (h * drawn["randn"]).sum() + drawn["attention"].sum(), drawn

    mesh = simulated(2)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optim.sgd(0.0), backend="eager")

    def run(rank: int) -> Any:
        state = step.init(params, seed=5)
        x = vectors(0)[0][:6]
        state, one = step(state, x)
        state, two = step(state, x)
        return one["aux"], two["aux"]

    (one, two), (other, _) = fs.simulate(mesh, run)
    assert one["rand"].min() >= 0 and one["rand"].max() < 1 and abs(one["rand"].mean() - 0.5) < 0.07
    assert abs(one["randn"].mean()) < 0.5 and abs(one["randn"].std() - 1) < 0.4
    assert set(one["randint"].tolist()) == {3, 4, 5, 6, 7, 8}
    assert abs(one["bernoulli"].mean() - 0.3) < 0.11
    for name, value in one.items():
        assert not torch.equal(value, two[name]) and not torch.equal(value, other[name]), name
