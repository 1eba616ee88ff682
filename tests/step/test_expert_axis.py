"""A data axis that splits stacks of experts while they compute: layouts and options, routing, mistakes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import torch
from errors import raises
from mixtures import CHOSEN, EXPERTS, ROWS, WIDTH, T, mixture
from models import Model
from sharded import assert_same, by_steps, make_step, simulate, train
from torch import Tensor

import fnshard as fs

ADAMW = fs.optim.adamw(1e-2, weight_decay=0.1)
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.05), fs.optim.sgd(0.1))
RULES = {"adamw": (ADAMW, reference.adamw(1e-2), None), "clipped": (CLIPPED, reference.sgd(0.1), 0.05)}


MODELS = {"mixture": {}, "one expert": {"skew": 40.0}}


@cache
def model_of(name: str, dense: bool = False) -> Model:
    return mixture(**MODELS[name], dense=dense)


@cache
def truth(name: str, rule: str) -> reference.Trained:
    model, (_, optimizer, clip) = model_of(name, True), RULES[rule]
    return reference.train(model.loss, model.params, by_steps(model), optimizer, clip=clip)


def train_model(
    model: Model, axes: Mapping[str, int], optimizer: Any, preset: str = "full_shard", policy: Any = None,
    **options: Any,
) -> list[reference.Trained]:  # fmt: skip
    policy = {"expert": "expert", **(policy or {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a tensor axis has no rule for some of the routing
        return simulate(model, preset, axes, optimizer, policy=policy, **options)


HOST = {"optimizer_memory": "host", "update_on": "host"}


LAYOUTS = [
    ({"expert": 2}, "full_shard", {}, {}),
    ({"expert": 4}, "full_shard", {}, {}),
    ({"shard": 2, "expert": 2}, "full_shard", {}, {}),
    ({"replicate": 2, "expert": 2}, "hybrid_shard", {}, {}),
    ({"expert": 2, "tensor": 2}, "full_shard", {"tensor": "tensor"}, {}),
    ({"expert": 2, "context": 2}, "full_shard", {}, {}),
    ({"shard": 2, "expert": 2}, "zero1", {}, {}),
    ({"shard": 2, "expert": 2}, "zero2", HOST, {}),
    ({"expert": 2}, "no_shard", {}, {}),
    ({"expert": 2}, "shard_grad_op", {}, {"remat": "unit"}),
    ({"expert": 2}, "full_shard", {}, {"accumulate": 2, "remat": "unit"}),
    ({"expert": 2}, "full_shard", {"memory": "host", **HOST}, {"accumulate": 2}),
    ({"expert": 2}, "full_shard", {}, {"accumulate": 2, "accumulate_mode": "local", "prefetch": 2}),
]
LONG = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    9,
    12,
)  # options and axes that others have in pairs; a tensor axis: test_experts


@pytest.mark.parametrize(
    ("rule", "axes", "preset", "policy", "options"),
    [
        pytest.param(list(RULES)[i % 2], *layout, marks=pytest.mark.long if i in LONG else [])
        for i, layout in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_every_layout_trains_as_one_process_does(rule, axes, preset, policy, options):
    for got in train_model(model_of("mixture"), axes, RULES[rule][0], preset, policy, **options):
        assert_same(got, truth("mixture", rule))


def test_any_routing_is_exact():
    """All rows may go to one rank's experts: there is room for them."""
    model, dense = model_of("one expert"), model_of("one expert", True)
    grads, _ = reference.gradients(dense.loss, model.params, *model.batch(0))
    assert [g for g in grads.values() if g.dim() == 3 and (g.flatten(1).abs().amax(1) == 0).any()]
    for got in train_model(model, {"shard": 2, "expert": 2}, ADAMW):
        assert_same(got, truth("one expert", "adamw"))


@pytest.mark.long
def test_muon_has_whole_experts_on_every_rank():
    """Each rank makes its own experts' matrices orthogonal, and sends none."""
    model, muon = model_of("mixture"), fs.optim.muon(0.02, dtype=None)
    (expected,) = train_model(model, {"shard": 1}, muon, policy={"expert": None})
    for got in train_model(model, {"expert": 2}, muon):
        assert_same(got, expected)
    schedule = lower_model({"expert": 2}, optimizer=muon).schedule
    stacked = [p for name, b in schedule.buckets.items() if name.startswith("stack/") for p in b.paths]
    assert stacked and not any("experts" in path for path in stacked)


def lower_model(
    axes: Mapping[str, int], optimizer: Any = ADAMW, expert: str | None = "expert", **options: Any
) -> Any:
    model, mesh = model_of("mixture"), fs.make_mesh(**axes, abstract=True)
    specs = fs.presets.full_shard(model.params, mesh, expert=expert)
    step = make_step(mesh, model, specs, optimizer, **options)
    return step.lower(model.params, model.batch(0)[0][: ROWS // mesh.data_size])


def test_rows_travel_and_experts_do_not():
    """Each layer sends how many rows come, the rows there and back; and in the backward the rows alone.

    The work between the two products is done where the experts are.
    """
    schedule = lower_model({"expert": 2}).schedule
    exchanges = [line for line in schedule.instructions if line.verb == "exchange"]
    assert {(line.kind, line.axes) for line in exchanges} == {("all_to_all", ("expert",))}
    rows = ROWS // 2 * T * CHOSEN
    sent = [list(line.like.shape) for line in exchanges if line.phase == "forward"]
    assert sorted(sent) == sorted([[EXPERTS], [2 * rows, WIDTH], [2 * rows, WIDTH]] * 2)
    assert [list(line.like.shape) for line in exchanges if line.phase == "backward"] == [
        [2 * rows, WIDTH]
    ] * 4
    gathered = {p for name, b in schedule.buckets.items() if name.startswith("gather/") for p in b.paths}
    assert gathered and not any("experts" in path for path in gathered)
    half = lower_model({"expert": 2}, expert_capacity=0.75).schedule
    room = 9  # of each of two ranks: 0.75 of the even share of rows / 2 = 12
    assert [2 * room, WIDTH] in [
        list(line.like.shape) for line in half.instructions if line.verb == "exchange"
    ]


@pytest.mark.long
def test_a_rank_holds_its_share_of_experts():
    whole, split = (lower_model({"expert": n}).memory_analysis() for n in (1, 4))
    model = model_of("mixture")
    stacks = sum(leaf.nbytes for path, leaf in model.params.items() if "experts" in path)
    rest = sum(leaf.nbytes for leaf in model.params.values()) - stacks
    assert whole.resident["parameter shards"] == stacks + rest
    assert stacks / 4 <= split.resident["parameter shards"] <= (stacks + rest) / 4 + 1024


def test_more_rows_than_there_is_room_for_are_told():
    with raises(fs.StateError, leaves="'expert'", fix="a bound of", says=["of 9", "all ranks"]):
        train_model(model_of("one expert"), {"expert": 2}, ADAMW, expert_capacity=0.75)
    for got in train_model(model_of("one expert"), {"expert": 2}, ADAMW, expert_capacity=2):
        assert_same(got, truth("one expert", "adamw"))


@pytest.mark.long
def test_another_use_of_a_stack_gathers_it_and_says_so():
    model, dense = model_of("mixture"), model_of("mixture", True)

    def with_penalty(loss: Any) -> Any:
        return lambda p, tokens: loss(p, tokens) + p["layers.0.experts.up"].square().flatten().sum()

    expected = reference.train(with_penalty(dense.loss), model.params, by_steps(model), reference.adamw(1e-2))
    mesh = fs.make_mesh(expert=2, simulated=True)
    specs = fs.presets.full_shard(model.params, mesh, expert="expert")
    step = make_step(mesh, model, specs, ADAMW, loss=with_penalty(model.loss))
    with pytest.warns(UserWarning, match=r"(?s)whole stacks of experts.*aten.flatten"):
        for got in fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, ADAMW, step=step)):
            assert_same(got, expected)


def test_a_view_of_a_gathered_stack_need_not_fit_its_strides():
    """A gather makes a transposed stack contiguous, so that its view back is a copy."""

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        rows_first = p["w"].transpose(1, 2).transpose(0, 1)
        return (rows_first.permute(1, 2, 0).view(-1) ** 3).mean() * x.mean()

    params, mesh = {"w": torch.randn(4, 3, 5)}, fs.make_mesh(expert=2, simulated=True)
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(fs.P("expert"), compute=fs.P("expert")))])
    with pytest.warns(UserWarning, match=r"whole stacks of experts"):
        assert fs.debug.check(loss, params, torch.randn(4, 3), specs, mesh)


@pytest.mark.parametrize(
    ("axes", "policy", "leaves", "fix"),
    [
        ({"expert": 3}, {}, ["4 leaves", "params['layers.0.experts.up']", "3 ranks", "8 experts"],
         "'expert'"),
        ({"shard": 2}, {}, ["expert='expert'", "(shard=2)"], "expert=4"),
        ({"shard": 2, "tensor": 2}, {"expert": "tensor"}, "expert='tensor'", "expert='expert'"),
        ({"expert": 2}, {"codec": "int8", "trainable": False}, ["expert='expert'", "codec='int8'"],
         ["expert=None", "codec=None"]),
        ({"expert": 2}, {"rules": [("*experts*", fs.LayoutSpec())]}, ["expert='expert'", "[E, M, N]"],
         ["F.grouped_mm", "rules="]),
        ({"expert": 2}, {"rules": [("*router", fs.LayoutSpec(compute=fs.P(None, "expert")))]},
         "router", "compute=P('expert')"),
        ({"expert": 2}, {"rules": [("*norm1", fs.LayoutSpec(compute=fs.P("expert")))]},
         ["norm1", "'expert' is a data axis"], "compute=P('expert')"),
    ],
)  # fmt: skip
def test_mistakes_are_named(axes, policy, leaves, fix):
    model, mesh = model_of("mixture"), fs.make_mesh(**axes, abstract=True)
    with raises(fs.SpecError, leaves=leaves, fix=fix):
        specs = fs.presets.full_shard(model.params, mesh, **{"expert": "expert", **policy})
        make_step(mesh, model, specs, ADAMW)


def test_capacity_is_more_than_nothing():
    with raises(fs.SpecError, leaves="expert_capacity=0", says="above 0"):
        lower_model({"expert": 2}, expert_capacity=0)


def test_a_stack_that_is_written_to_is_refused():
    model, mesh = model_of("mixture"), fs.make_mesh(expert=2, abstract=True)
    specs = fs.presets.full_shard(model.params, mesh, expert="expert")
    specs["layers.0.experts.up"] = replace(specs["layers.0.experts.up"], trainable=False)

    def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        p["layers.0.experts.up"].mul_(0.5)
        return model.loss(p, tokens)

    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")
    with raises(
        fs.TraceError, leaves=["params['layers.0.experts.up']", "'expert'"], fix="LayoutSpec(compute=P())"
    ):
        step.lower(model.params, model.batch(0)[0])
