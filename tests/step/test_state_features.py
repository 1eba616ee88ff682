"""What a step does besides the plain gradient: scaling, masters, chains, rates, aux, Whole, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import sharded
import torch
import torch.nn.functional as F
from models import GPT, language_model, model_of, noise, seeded, vectors
from sharded import by_steps, simulated
from torch import Tensor
from toys import step_of

import fnshard as fs
from fnshard import LayoutSpec, Mean, P, optim, schedules

# ------------------------------------------------------------------ optimizers and rates


@pytest.mark.parametrize("preset", ["zero1", "hybrid_shard"])
def test_clip_adamw_ema(preset: str) -> None:
    model, mesh = model_of("tied"), simulated(**sharded.meshes(4, preset))
    specs = sharded.specs_of(model, preset, mesh)
    chained = optim.chain(optim.clip_by_global_norm(0.2), optim.adamw(3e-3), optim.ema(0.5))
    step = sharded.make_step(mesh, model, specs, chained)
    averages = []
    for steps in range(1, 4):
        until = reference.train(
            model.loss,
            model.params,
            by_steps(model)[:steps],
            reference.adamw(3e-3, 0.01),
            frozen=model.frozen,
            clip=0.2,
        )
        before = averages[-1] if averages else model.params
        averages.append({p: 0.5 * before[p].detach() + 0.5 * v for p, v in until.params.items()})

    def run(rank: int) -> Any:
        state = step.init(model.params)
        for batch in model.batches(3):
            state, _ = step(state, *sharded.part(batch, rank, 4))
        return fs.unshard(optim.ema_params(state.opt_state), specs, mesh, layout="optimizer")

    for got in fs.simulate(mesh, run):
        got = {path: value for path, value in got.items() if value is not None}
        for path, value in got.items():
            torch.testing.assert_close(value, averages[-1][path], rtol=0, atol=sharded.ATOL, msg=path)


@pytest.mark.parametrize("preset", ["full_shard", "no_shard"])
def test_lars_sees_whole_leaves(preset: str) -> None:
    """Norms per leaf are exact over shards, padding and replicas."""
    model = model_of("dense_skips")
    lr, momentum, trust = 0.5, 0.9, 1e-2
    params = {p: v.clone() for p, v in model.params.items()}
    traces = {p: torch.zeros_like(v) for p, v in params.items()}
    losses = []
    for batch in model.batches(sharded.STEPS):
        grads, loss = reference.gradients(model.loss, params, *batch)
        for path, grad in grads.items():
            ratio = trust * params[path].norm() / (grad.norm() + 1e-8)
            traces[path] = momentum * traces[path] + lr * ratio * grad
            params[path] = params[path] - traces[path]
        losses.append(loss.item())
    for got in sharded.simulate(model, preset, 4, optim.lars(lr, momentum, trust=trust), accumulate=3):
        sharded.assert_same(got, reference.Trained(params, losses))


def test_schedules_move_the_rate_and_show_it() -> None:
    rate = schedules.warmup_cosine(0.1, warmup=2, total=5)
    model, mesh = model_of("dense_skips"), simulated()
    specs = sharded.specs_of(model, "full_shard", mesh)
    step = sharded.make_step(mesh, model, specs, optim.sgd(rate))
    expected = reference.train(
        model.loss,
        model.params,
        by_steps(model),
        reference.sgd(0.1),
        rate=lambda n: rate(torch.tensor(n)).item(),
    )

    def run(rank: int) -> Any:
        state, rates, out = step.init(model.params), [], reference.Trained()
        for batch in model.batches(sharded.STEPS):
            state, metrics = step(state, *sharded.part(batch, rank, 2))
            rates.append(metrics["lr"].item())
            out.losses.append(metrics["loss"].item())
        out.params = fs.unshard(state.params, specs, mesh)
        return rates, out

    for rates, got in fs.simulate(mesh, run):
        sharded.assert_same(got, expected)
        sharded.assert_floats(rates, [rate(torch.tensor(n)).item() for n in range(sharded.STEPS)], 1e-15)
    assert len(set(rates)) > 2
    assert len(step._cache.programs) == 1, "a new rate compiled again"


def test_weight_decay_and_rate_by_path() -> None:
    model = model_of("gpt")
    decays, scales = [("*norm*", 0.0), ("*", 0.1)], [("embed*", 0.5), ("layers.0.*", 0.0), ("*", 1.0)]

    def settings(path: str) -> dict[str, float]:
        scale = 0.5 if path.startswith("embed") else 0.0 if path.startswith("layers.0.") else 1.0
        return {"lr": 0.01 * scale, "weight_decay": 0.0 if "norm" in path else 0.1}

    expected = reference.train(
        model.loss,
        model.params,
        by_steps(model),
        reference.grouped(torch.optim.AdamW, settings),
        frozen=model.frozen,
    )
    made = optim.adamw(0.01, weight_decay=decays, lr_scale=scales)
    for preset in ("full_shard", "zero2"):
        sharded.assert_same(sharded.simulate(model, preset, 2, made)[1], expected)
    assert torch.equal(expected.params["layers.0.up.weight"], model.params["layers.0.up.weight"])


# ------------------------------------------------------------------ what fn returns, what it takes


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
    with pytest.raises(fs.StateError, match=r"batch\['1'\] \[12\].*\n?.*cannot|cannot be cut"):
        step_of(loss, params, accumulate=5)(params, x[:10], weights, 2)


# ------------------------------------------------------------------ state and layouts


def test_the_state_says_everything_a_resume_needs() -> None:
    """A copy of the state, taken on, makes the same losses, with dropout in it."""
    model = language_model(seeded(GPT, layers=1, dropout=0.2))
    mesh = simulated(2)
    specs = sharded.specs_of(model, "full_shard", mesh)
    step = sharded.make_step(
        mesh, model, specs, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.01))
    )

    def run(rank: int) -> Any:
        state = step.init(model.params, seed=7)
        batches = [sharded.part(b, rank, 2) for b in model.batches(4)]
        for batch in batches[:2]:
            state, _ = step(state, *batch)
        kept = state.copy()
        ends = []
        for each in (state, kept):
            for batch in batches[2:]:
                each, metrics = step(each, *batch)
            ends.append((metrics["loss"], dict(each.params)))
        return ends

    for (loss, params), (again, same) in fs.simulate(mesh, run):
        assert torch.equal(loss, again)
        assert all(torch.equal(params[p], same[p]) for p in params)


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
