"""Pipelines by pairs: stages, chunks, micro-batches, presets and other axes train as one process does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import tensor_models
import torch
import torch.nn.functional as F
from mixtures import mixture
from models import Model, generator, noise
from pairs import cover_pairs
from sharded import assert_floats, assert_same, simulate

import fnshard as fs
from fnshard import LayoutSpec, P

pytestmark = pytest.mark.filterwarnings("ignore:accumulate=")  # few micro-batches, on purpose
ROWS, WIDTH, STEPS = 32, 6, 3  # four data ranks times eight micro-batches of a row
RULES: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "adamw": (fs.optim.adamw(3e-3, weight_decay=0.1), reference.adamw(3e-3, 0.1), {}),
    "clipped": (
        fs.optim.chain(fs.optim.clip_by_global_norm(0.02), fs.optim.sgd(0.1)), reference.sgd(0.1),
        {"clip": 0.02},
    ),
}  # fmt: skip
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "stages": (2, 4, 8),
    "chunks": (1, 2, 4),
    "accumulate": (4, 8),
    "preset": ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard", "hybrid_shard"),
    "beside": ("", "shard", "tensor", "expert", "context", "replicate+shard", "shard+tensor"),
    "rule": tuple(RULES),
    "remat": ("none", "unit", "unit+offload"),
    "micro_order": ("depth", "breadth", "zero_bubble"),
    "prefetch": (0, 1, 2),
    "memory": ("device", "host"),
}  # fmt: skip
KINDS = {"expert": "mixture", "tensor": "decoder", "context": "decoder"}  # of models, by axis
Row = dict[str, Any]


def allows(row: Row) -> bool:
    """Return whether a row, or a part of one, has at most eight ranks, and a model that is soon traced."""
    beside = axes_of(row.get("beside", ""))
    units = row.get("stages", 2) * row.get("chunks", 1)
    return (
        row.get("stages", 2) * 2 ** len(beside) <= 8
        and (units <= 8 or not {"tensor", "context", "expert"} & set(beside))
        and (row.get("preset") != "hybrid_shard" or "replicate" in beside or "beside" not in row)
    )


def axes_of(beside: str) -> list[str]:
    return beside.split("+") if beside else []


FEW: Mapping[str, tuple[Any, ...]] = {
    **FACTORS, "stages": (2,), "chunks": (1, 2), "accumulate": (4,), "memory": ("device",),
    "beside": ("", "shard", "expert", "context"), "micro_order": ("depth", "breadth"),
}  # fmt: skip
SHORT = list({row["beside"]: row for row in cover_pairs(FEW, allows)}.values())  # each of the axes once
LONG = cover_pairs(FACTORS, allows)


def layers_of(units: int) -> Model:
    """Return a chain of so many units, each of a matrix and a bias, with a residual."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(units):
        shapes |= {f"layers.{i}.w": (WIDTH, WIDTH), f"layers.{i}.b": (WIDTH,)}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(units):
            x = x + torch.tanh(F.linear(x, p[f"layers.{i}.w"], p[f"layers.{i}.b"]))
        return x.square().mean()

    draw = lambda seed: (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator(seed)),)  # noqa: E731
    return Model(noise(shapes), loss, draw)


@cache
def model_of(kind: str, units: int, dense: bool = False) -> Model:
    """Return a model whose leaves stand in the order in which it reads them.

    Args:
        kind: "layers", "decoder" or "mixture".
        units: how many it has at least.
        dense: a mixture's truth.
    """
    if kind == "layers":
        return layers_of(units)
    inner = max(2, units - 2)
    made = mixture(dense=dense, layers=units) if kind == "mixture" else tensor_models.decoder(2, False, inner)
    late = [path for path in made.params if path in ("norm", "head.weight")]
    params = {path: leaf for path, leaf in made.params.items() if path not in late}
    shape = (ROWS, 6 if kind == "mixture" else tensor_models.T)
    draw = lambda seed: (torch.randint(0, 16, shape, generator=generator(seed)),)  # noqa: E731
    return replace(made, params=params | {path: made.params[path] for path in late}, batch=draw)


@cache
def truth(kind: str, units: int, rule: str) -> reference.Trained:
    model, (_, optimizer, how) = model_of(kind, units, True), RULES[rule]
    return reference.train(
        model.loss, model.params, [[b] for b in model.batches(STEPS)], optimizer, frozen=model.frozen, **how
    )


def check(row: Row) -> None:
    beside = axes_of(row["beside"])
    kind = KINDS.get(beside[-1] if beside else "", "layers")
    units = row["stages"] * row["chunks"]
    model, optimizer = model_of(kind, units), RULES[row["rule"]][0]
    tiers = dict.fromkeys(("memory", "optimizer_memory"), row["memory"])
    policy: dict[str, Any] = {"chunks": row["chunks"], **tiers}
    policy |= {axis: axis for axis in ("tensor", "expert") if axis in beside}
    if kind == "mixture":  # whose table is read at both ends
        policy["rules"] = [("embed.weight", LayoutSpec(P("expert"), chunk="all"))]
    options = {name: row[name] for name in ("accumulate", "remat", "micro_order", "prefetch")}
    # The axis of stages comes first or last: then other ranks are neighbours.
    sizes, stages = dict.fromkeys(beside, 2), {"pipeline": row["stages"]}
    axes = {**stages, **sizes} if row["accumulate"] == 4 else {**sizes, **stages}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*(whole|accumulate)")
        ranks = simulate(model, row["preset"], axes, optimizer, policy=policy, grad_norm=True, **options)
    assert len(ranks) == row["stages"] * math.prod(sizes.values())
    expected = truth(kind, units, row["rule"])
    for got in ranks:
        assert_same(got, expected)
        assert_floats(got.norms, expected.norms)
    if row["rule"] == "clipped":
        assert min(expected.norms) > 0.02, "the row would not clip"


def name_of(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


@pytest.mark.suite({
    "2-2-4-no_shard-shard-*": "chunks, breadth first",
    "2-1-4-zero1--*": "recomputed, ahead",
})  # fmt: skip
@pytest.mark.parametrize("row", SHORT, ids=name_of)
def test_a_pipeline_trains_as_one_process_does(row: Row) -> None:
    """Losses, norms and every parameter after three steps, to 1e-10."""
    check(row)


@pytest.mark.long
@pytest.mark.parametrize("row", LONG, ids=name_of)
def test_every_two_choices_train_as_one_process_does(row: Row) -> None:
    check(row)
