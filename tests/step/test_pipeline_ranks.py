"""Pipelines on real ranks: what one process trains, on every transport; and stages that fail."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import reference
import sharded
import torch
import torch.distributed as dist
from models import Model, gpt

import fnshard as fs
from fnshard.errors import AgreementError, CollectiveError
from fnshard.runtime.collectives import connect as connecting

AXES = {2: {"pipeline": 2}, 4: {"pipeline": 2, "shard": 2}}
APART = {"accumulate": 3, "micro_order": "zero_bubble"}


def model() -> Model:
    return gpt(layers=2)


def clipped_sgd() -> Any:
    return fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.sgd(0.1, momentum=0.9))


@contextmanager
def use_transport(name: str) -> Iterator[None]:
    """Connect ranks as always ("auto"), or without shared memory ("p2p")."""
    connect_shared = connecting.connect_shared
    if name == "p2p":
        connecting.connect_shared = lambda group: None
    try:
        yield
    finally:
        connecting.connect_shared = connect_shared


def train_on(rank: int, axes: dict[str, int], transport: str, options: dict[str, Any]) -> reference.Trained:
    warnings.simplefilter("ignore")  # few micro-batches leave stages without work
    with use_transport(transport):
        mesh = fs.make_mesh(**axes, device="cpu")
        specs = sharded.specs_of(model(), "full_shard", mesh)
        return sharded.train(rank, mesh, model(), specs, clipped_sgd(), **options)


@pytest.mark.suite({
    "2-options2-auto": "one micro-batch, by shared memory",
    "4-options1-p2p": "stages that send and receive, by torch's messages",
})  # fmt: skip
@pytest.mark.parametrize("transport", ["auto", "p2p"])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"accumulate": 4}),
        (4, {"accumulate": 2}),
        (2, {}),
        pytest.param(2, APART, marks=pytest.mark.long),
        pytest.param(4, {**APART, "remat": "unit"}, marks=pytest.mark.long),
    ],
)
def test_real_stages_train_what_one_process_does(ranks, world, options, transport):
    """Losses, norms and every parameter, on all ranks."""
    steps, rule = sharded.by_steps(model()), reference.sgd(0.1, 0.9)
    expected = reference.train(model().loss, model().params, steps, rule, clip=0.1, frozen=model().frozen)
    for found in ranks(world).run(train_on, AXES[world], transport, options, timeout=300.0):
        sharded.assert_same(found, expected)
        sharded.assert_floats(found.norms, expected.norms)


@pytest.mark.long  # test_gloo compiles on real ranks
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"accumulate": 2}),
        pytest.param(4, {"accumulate": 2}, marks=pytest.mark.long),
        pytest.param(2, APART, marks=pytest.mark.long),
    ],
)
def test_compiled_stages_train_what_one_process_does(ranks, world, options):
    steps, rule = sharded.by_steps(model()), reference.sgd(0.1, 0.9)
    expected = reference.train(model().loss, model().params, steps, rule, clip=0.1, frozen=model().frozen)
    options = {**options, "backend": "inductor"}
    for found in ranks(world).run(train_on, AXES[world], "auto", options, timeout=300.0):
        sharded.assert_same(found, expected)


# ------------------------------------------------------------------ forwards and gradients
def forward_and_gradients(rank: int, transport: str) -> tuple[Any, ...]:
    warnings.simplefilter("ignore")
    with use_transport(transport):
        mesh, of = fs.make_mesh(pipeline=2, device="cpu"), model()
        specs = sharded.specs_of(of, "full_shard", mesh)
        blocks, batch = fs.shard(of.params, specs, mesh), of.batch(0)

        def outputs_of(params: Any, ids: Any, targets: Any) -> dict[str, Any]:
            return {"loss": of.loss(params, ids, targets), "rows": ids.float().mean(1)}

        forward = fs.shard_forward(outputs_of, specs, mesh=mesh, backend="eager")
        outputs = forward(blocks, *batch)
        loss, grads = fs.shard_step(of.loss, specs, mesh=mesh, backend="eager")(blocks, *batch)
        return outputs, loss, fs.unshard(grads, specs, mesh, layout="gradient")


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "p2p"])
def test_forwards_and_gradients_are_the_same_on_all_stages(ranks, transport):
    of = model()
    trained = {p: v for p, v in of.params.items() if p not in of.frozen}
    grads, loss = torch.func.grad_and_value(lambda t: of.loss({**of.params, **t}, *of.batch(0)))(trained)
    for outputs, found, gradients in ranks(2).run(forward_and_gradients, transport):
        assert torch.equal(outputs["rows"], of.batch(0)[0].float().mean(1))
        sharded.assert_floats([outputs["loss"].item(), found.item()], [loss.item()] * 2)
        for path, grad in grads.items():
            torch.testing.assert_close(gradients[path], grad, rtol=0, atol=1e-10)


# ------------------------------------------------------------------ files between steps
def train_and_save(rank: int, axes: dict[str, int], folder: str, at: int, last: int) -> list[float]:
    """Train from the checkpoint of step `at`, or from the start if it is 0, and write that of step `last`.

    Returns:
        The losses of these steps.
    """
    warnings.simplefilter("ignore")
    mesh, of = fs.make_mesh(**axes, device="cpu"), model()
    specs = sharded.specs_of(of, "full_shard", mesh)
    step = sharded.make_step(mesh, of, specs, fs.optim.adamw(0.01, weight_decay=0.1), accumulate=3)
    state = fs.checkpoint.restore(f"{folder}/{at}", step) if at else step.init(of.params)
    losses = []
    for batch in of.batches(last)[at:]:
        state, metrics = step(state, *sharded.part(batch, mesh.data_rank, mesh.data_size))
        losses.append(metrics["loss"].item())
    fs.checkpoint.save(f"{folder}/{last}", state)
    return losses


@pytest.mark.long  # tests/checkpoint/test_pipeline_state.py
def test_a_run_goes_on_with_other_stages(ranks, tmp_path):
    """Two stages, then two data ranks, then two stages: as one process. Other numbers of them: in memory."""
    found = []
    for at, axes in enumerate([{"pipeline": 2}, {"shard": 2}, {"pipeline": 2}]):
        found += ranks(2).run(train_and_save, axes, str(tmp_path), at, at + 1)[0]
    of, rule = model(), reference.adamw(0.01)
    trained = reference.train(of.loss, of.params, sharded.by_steps(of), rule, frozen=of.frozen)
    sharded.assert_floats(found, trained.losses)


# ------------------------------------------------------------------ stages that fail
def fail_in_a_step(rank: int, transport: str, how: str) -> tuple[str, float]:
    """Make two steps, before the second of which the second stage dies or says nothing for a while.

    Returns:
        What the other stage raised, and after how many seconds.
    """
    warnings.simplefilter("ignore")
    with use_transport(transport):
        mesh, of = fs.make_mesh(pipeline=2, device="cpu"), model()
        timeout = 20.0 if how == "dies" else 2.0
        specs = sharded.specs_of(of, "full_shard", mesh)
        step = sharded.make_step(mesh, of, specs, clipped_sgd(), accumulate=2, timeout=timeout)
        step.lower(of.params, *of.batch(0))  # a rank that lowers for longer than the timeout is no hang
        dist.barrier()
        state, _ = step(step.init(of.params), *of.batch(0))
        step._runner.rank.calls = 2  # rows are compared at the fourth call next; the schedule is to fail
        if rank == 1 and how == "dies":
            os._exit(9)
        if rank == 1:
            time.sleep(4)
            return "", 0.0
        began = time.monotonic()
        try:
            step(state, *of.batch(1))
        except CollectiveError as error:
            return str(error), time.monotonic() - began
        return "nothing was raised", 0.0


@pytest.mark.suite({
    "auto": "test_mail has every transport",
})  # fmt: skip
@pytest.mark.parametrize("transport", ["auto", "p2p"])
def test_a_stage_that_dies_in_a_step_is_named(ranks, transport):
    text, seconds = ranks(2).run(fail_in_a_step, transport, "dies", lost=(1,))[0]
    assert "rank 1 has left" in text and "of the schedule" in text and seconds < 20  # the timeout


@pytest.mark.suite({
    "auto": "test_mail has every transport",
})  # fmt: skip
@pytest.mark.parametrize("transport", ["auto", "p2p"])
def test_a_silent_stage_is_named_when_the_time_is_up(ranks, transport):
    text, _ = ranks(2).run(fail_in_a_step, transport, "is silent", lost=(0, 1))[0]
    assert "rank 1 did not come within 2 s" in text and "of the schedule" in text


# ------------------------------------------------------------------ stages that differ
def disagree(rank: int) -> str:
    warnings.simplefilter("ignore")
    mesh, of = fs.make_mesh(pipeline=2, device="cpu"), model()
    specs = sharded.specs_of(of, "full_shard", mesh)
    step = sharded.make_step(mesh, of, specs, fs.optim.sgd(0.1), accumulate=1 + rank)
    try:
        step(step.init(of.params), *of.batch(0))
    except AgreementError as error:
        return str(error)
    return "nothing was raised"


def test_stages_with_other_programs_are_refused_before_they_run(ranks):
    for text in ranks(2).run(disagree):
        assert "accumulate" in text and "rank 1" in text


def hold_other_values(rank: int) -> str:
    """Give stages other values of a leaf that all of them hold, and return the error."""
    warnings.simplefilter("ignore")
    mesh, of = fs.make_mesh(pipeline=2, device="cpu"), model()
    specs = sharded.specs_of(of, "full_shard", mesh, rules=[("*norm*", fs.LayoutSpec(chunk="all"))])
    params = {p: v + rank * (p == "norm.weight") for p, v in of.params.items()}
    step = sharded.make_step(mesh, of, specs, fs.optim.sgd(0.1))
    try:
        step(step.init(params), *of.batch(0))
    except AgreementError as error:
        return str(error)
    return "nothing was raised"


def test_stages_with_other_values_of_a_leaf_of_all_are_refused(ranks):
    name = next(p for p in model().params if p.endswith("norm.weight") and p[0] != "l")
    for text in ranks(2).run(hold_other_values):
        assert f"params[{name!r}]" in text
