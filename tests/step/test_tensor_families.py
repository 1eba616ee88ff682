"""A tensor axis for models that nobody wrote for it: unmodified, they train as in one process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import torch
from families import FAMILIES
from families import model_of as model_of_family
from models import Model, generator, seeded
from sharded import assert_same, by_steps, make_step, simulate
from torch import nn

import fnshard as fs
from experiments.lib.decoder import Decoder, DecoderConfig, loss_function
from fnshard.compiler.schedule.instructions import Exchange

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MESHES = ({"tensor": 2}, {"shard": 2, "tensor": 2}, {"shard": 1, "tensor": 4})
RESIDUALS = ("split", "whole")
# Built of the same parts as others.
LONG = ("encoder", "gemma2", "bert", "llama", "qwen2", "mistral", "gemma")
NAMES = ("decoder", "perceptron", "gpt2", "cross_attention", "qwen3", "phi", "t5", "vit", *LONG)
# The norms of others compute in fp32 whatever they are given: each rank rounds its part of a gradient.
EXACT = ("decoder", "perceptron", "encoder", "cross_attention", "gpt2", "phi", "bert", "vit")
SIZES = {"phi": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}}


def own_decoder() -> Model:
    config = DecoderConfig(vocab=64, width=16, layers=2, heads=4, kv_heads=2, context=8)
    loss, params = loss_function(seeded(Decoder, config))
    return Model(params, loss, lambda seed: torch.randint(64, (2, 4, 8), generator=generator(seed)).unbind())


def perceptron() -> Model:
    """Make linears that have no names, in pairs."""
    sizes = (8, 12, 16, 8, 4)
    layers = [m for i, o in itertools.pairwise(sizes) for m in (nn.Linear(i, o), nn.GELU())]
    apply, params = fs.make_functional(seeded(nn.Sequential, *layers))
    return Model(params, lambda p, x: apply(p, x).square().mean(), lambda seed: (normal(seed, 4, 8),))


def encoder() -> Model:
    layer = seeded(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True)
    apply, params = fs.make_functional(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return Model(
        params, lambda p, x: apply(p, x)[..., 0].square().mean(), lambda seed: (normal(seed, 4, 6, 8),)
    )


def cross_attention() -> Model:
    """Make queries of one sequence, keys and values of another, which one product makes of each."""
    layer = seeded(nn.TransformerDecoderLayer, 8, 2, 16, dropout=0.0, batch_first=True)
    apply, params = fs.make_functional(layer)
    return Model(
        params,
        lambda p, x, y: apply(p, x, y)[..., 0].square().mean(),
        lambda seed: (normal(seed, 4, 6, 8), normal(seed + 1, 4, 4, 8)),
    )


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


@cache
def model_of(name: str) -> Model:
    """Return a model of sizes that two and four ranks divide, but for heads."""
    own = {f.__name__: f for f in (perceptron, encoder, cross_attention)} | {"decoder": own_decoder}
    if name in own:
        return own[name]()
    family = FAMILIES[name]
    sizes = family.sizes | {"vocab_size": 64} | SIZES.get(name, {}) if name != "vit" else family.sizes
    return model_of_family(replace(family, sizes=sizes).build())


@cache
def truth(name: str) -> reference.Trained:
    model = model_of(name)
    return reference.train(
        model.loss, model.params, by_steps(model), reference.sgd(0.1, 0.9), frozen=model.frozen
    )


def matrix() -> Iterator[Any]:
    """Yield each model on one mesh for the suite; the other meshes are long."""
    for i, name in enumerate(NAMES):
        for j, axes in enumerate(MESHES):
            for k, residual in enumerate(RESIDUALS):
                quick = name not in LONG and (j, k) == (i % len(MESHES), i // len(MESHES) % 2)
                marks = [] if quick else pytest.mark.long
                yield pytest.param(name, axes, residual, marks=marks, id=f"{name}-{axes}-{residual}")


@pytest.mark.suite({
    "perceptron-*": "no attention, a split residual",
})  # fmt: skip
@pytest.mark.parametrize(("name", "axes", "residual"), list(matrix()))
def test_any_mesh_is_one_process(name: str, axes: dict[str, int], residual: str) -> None:
    model = model_of(name)
    how = {"policy": {"tensor": "tensor"}, "residual": residual}
    for got in simulate(model, "full_shard", axes, fs.optim.sgd(0.1, momentum=0.9), **how):
        assert_same(got, truth(name), 1e-10 if name in EXACT else 1e-6)


# What a further block exchanges forward: backward sends the duals.
BLOCKS = {
    "qwen3": {"all_gather": 2, "reduce_scatter": 2},
    "gpt2": {"all_gather": 2, "reduce_scatter": 2},  # queries, keys and values are one product
    "phi": {"all_gather": 1, "reduce_scatter": 1},  # attention and MLP side by side
}
DUALS = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}


@pytest.mark.long
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_exchanges_as_much_as_by_hand_and_shares_its_kernels(name: str) -> None:
    mesh = fs.make_mesh(shard=2, tensor=2, abstract=True)
    found = []
    for layers in (2, 3):
        key = "n_layer" if name == "gpt2" else "num_hidden_layers"
        family = replace(FAMILIES[name], sizes=FAMILIES[name].sizes | {key: layers, "vocab_size": 64})
        model = model_of_family(family.build(), time=8)
        step = make_step(mesh, model, fs.presets.full_shard(model.params, mesh, tensor="tensor"), None)
        found.append(step.lower(model.params, *model.batch(0)))
    assert len(found[0].kernels) == len(found[1].kernels)
    lines = [
        Counter((i.phase, i.kind) for i in each.schedule.instructions if isinstance(i, Exchange))
        for each in found
    ]
    backward = {("backward", DUALS[kind]): count for kind, count in BLOCKS[name].items()}
    assert lines[1] - lines[0] == {("forward", k): n for k, n in BLOCKS[name].items()} | backward
