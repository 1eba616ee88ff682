"""Sharded training against the naive loop, in fp64: every model, cuts of a batch, gradients, forwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import reference
import sharded
import torch
from models import MODELS, model_of
from toys import step_of

import fnshard as fs

LR, DECAY = 3e-3, 0.1
ADAMW = fs.optim.adamw(LR, weight_decay=DECAY)


@cache
def truth(name: str) -> reference.Trained:
    """Train a model by the naive loop over whole global batches."""
    model = model_of(name)
    steps = [[batch] for batch in model.batches(sharded.STEPS)]
    return reference.train(model.loss, model.params, steps, reference.adamw(LR, DECAY), frozen=model.frozen)


def spread(*key: str | int) -> int:
    """Return 0, 1 or 2 for a key, so that depths vary over a matrix but not from run to run."""
    return sum(str(k).encode()[0] + len(str(k)) for k in key) % 3


# Segments of theirs are cut in places of their own: recomputed, too.
CUT_OTHERWISE = ("checkpoint", "early_and_late", "in_place", "islands", "odd_leaves", "several_outputs")


def _models() -> Iterator[Any]:
    """Yield models with each of three layouts, of which one is quick and the other two are long.

    Two are elsewhere: gpt in test_state_features, tied in test_pipeline_features.
    """
    for i, name in enumerate(m for m in MODELS if m not in ("gpt", "tied")):
        for preset in ("full_shard", "hybrid_shard", "zero1"):
            quick = preset == ("full_shard", "hybrid_shard")[i % 2]
            yield pytest.param(name, preset, marks=[] if quick else pytest.mark.long)


@pytest.mark.suite(but={
    "penalty-*": "test_transforms has gradients of gradients",
    "complex_leaves-*": "test_complex",
    "masked_mean-*": "test_matrix",
    "dense_skips-*": "test_stages",
    "islands-*": "early_and_late has segments that are cut as these",
})  # fmt: skip
@pytest.mark.parametrize(("name", "preset"), list(_models()))
def test_every_model(name: str, preset: str) -> None:
    world = 4 if spread(name, preset) else 2
    ranks = sharded.simulate(
        model_of(name),
        preset,
        world,
        ADAMW,
        prefetch=spread(name, preset),
        accumulate=3 if spread(preset) else 1,
        remat="unit" if name in CUT_OTHERWISE else "none",
    )
    # torch recomputes a checkpointed module with the values that functional_call has put back by then:
    # the truth of `checkpoint` is the same model without it.
    expected = truth("gpt" if name == "checkpoint" else name)
    for got in ranks:
        sharded.assert_same(got, expected)


def test_a_global_count_of_zero_gives_zero_gradients() -> None:
    model = model_of("masked_mean")
    ids, targets, mask = model.batch(0)
    batch = (ids, targets, torch.zeros_like(mask))
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = sharded.specs_of(model, "full_shard", mesh)
    step = sharded.make_step(mesh, model, specs, fs.optim.sgd(1.0))

    def run(rank: int) -> Any:
        state, metrics = step(step.init(model.params), *sharded.part(batch, rank, 2))
        return metrics["loss"], fs.unshard(state.params, specs, mesh)

    for loss, params in fs.simulate(mesh, run):
        assert loss == 0.0
        assert all(torch.equal(params[p], v) for p, v in model.params.items())


# ------------------------------------------------------------------ without an optimizer


def test_shard_forward_gives_each_rank_its_rows() -> None:
    from models import GPT, seeded

    module = seeded(GPT)
    apply, params = fs.make_functional(module)
    ids = model_of("gpt").batch(0)[0]
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)

    def outputs(params: Any, ids: torch.Tensor) -> dict[str, Any]:
        logits = apply(params, ids)
        return {"logits": logits, "best": (logits.argmax(-1), ids), "name": "logits"}

    forward = fs.shard_forward(outputs, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        return forward(fs.shard(params, specs, mesh), *sharded.part((ids,), rank, 2))

    ranks = fs.simulate(mesh, run)
    with torch.no_grad():
        logits = module(ids)
    torch.testing.assert_close(torch.cat([r["logits"] for r in ranks]), logits, rtol=0, atol=sharded.ATOL)
    assert torch.equal(torch.cat([r["best"][0] for r in ranks]), logits.argmax(-1))
    assert torch.equal(torch.cat([r["best"][1] for r in ranks]), ids)
    assert {r["name"] for r in ranks} == {"logits"}
    assert not ranks[0]["logits"].requires_grad


@pytest.mark.parametrize("how", ["norm", "state", "gradients"])
def test_a_finite_loss_beside_gradients_that_are_not_is_said_once(how: str) -> None:
    params = {"w": torch.tensor([1.0, 0.0])}
    optimizer = None if how == "gradients" else fs.optim.adamw(1e-3)
    step = step_of(
        lambda p, x: (p["w"] * x).sqrt().sum(), params, optimizer=optimizer, grad_norm=how == "norm"
    )
    state = step.init(params)
    words = {"norm": "gradients are not finite: grad_norm", "state": "parameters .* not finite: w"}
    with pytest.warns(UserWarning, match=words.get(how, "gradients are not finite: w")) as said:
        state = step(state, torch.ones(2))
    assert len(said) == 1 and "fs.debug.nan_hunt" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(params if how == "gradients" else state[0], torch.ones(2))


SOME = {  # numbers of a leaf whose gradient is NaN, and whether a step that reads a part sees them
    "all": (lambda w: w, True),
    "a row": (lambda w: w[3], True),
    "a column": (lambda w: w[:, 7], True),
    "one": (lambda w: w[3, 7], False),
}


@pytest.mark.suite({
    "*-16": "all is read",
    "one-5000": "a part is read",
})  # fmt: skip
@pytest.mark.parametrize("width", [16, 5000])
@pytest.mark.parametrize("kind", SOME)
def test_gradients_that_are_not_finite_are_said_at_once_or_by_the_next_loss(kind: str, width: int) -> None:
    """The gradient is NaN at step 3. The first step to see it says so, once; of a small leaf all is read."""
    some, at_once = SOME[kind]
    params = {"w": torch.ones(8, width)}
    step = step_of(
        lambda p, x: (some(p["w"]).square().sum() * x).sqrt().sum(), params, optimizer=fs.optim.sgd(1e-3)
    )
    state = step.init(params)
    for x in (1.0, 1.0, 1.0, 0.0, 1.0, 1.0):
        number = int(state.step)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            state, metrics = step(state, torch.full((1,), x))
        assert len(found) == (number == (3 if at_once or width == 16 else 4))
        assert metrics["loss"].isfinite() == (number < 4)
        assert not found or "fs.debug.nan_hunt" in str(found[0].message)


def test_nothing_is_said_of_what_is_finite_and_of_skipped_steps() -> None:
    params = {"w": torch.tensor([1.0, 0.0])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = step_of(lambda p, x: (p["w"] * x).sum() * 1e30, params, optimizer=fs.optim.sgd(1e-3))
        step(step.init({"w": torch.full((2,), 3e38)}), torch.zeros(2))  # whose sum overflows
        scaled = {"optimizer": fs.optim.sgd(1e-3), "loss_scale": "dynamic"}
        step = step_of(lambda p, x: (p["w"] * x).sqrt().sum(), params, **scaled)
        step(step.init(params), torch.ones(2))
