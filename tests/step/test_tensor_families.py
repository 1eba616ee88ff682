"""A tensor axis for models that nobody wrote for it: unmodified, they train as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import torch
from families import FAMILIES, case_of
from models import Model, generator, seeded
from sharded import assert_same, by_steps, make_step, specs_of, train
from torch import nn

import fnshard as fs
from experiments.configs.train import DecoderConfig
from experiments.training.decoder import Decoder, loss_function

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MESHES = ({"tensor": 2}, {"shard": 2, "tensor": 2}, {"shard": 1, "tensor": 4})
RESIDUALS = ("split", "whole")
NAMES = (
    "decoder", "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gpt2", "phi", "t5", "bert", "vit",
)  # fmt: skip
LONG = ("llama", "qwen2", "mistral", "gemma", "vit")  # built of the same parts as others
# The norms of the others compute in fp32 whatever they are given: each rank rounds its part of a gradient.
EXACT = ("decoder", "gpt2", "phi", "bert", "vit")


@cache
def model_of(name: str) -> Model:
    """Of sizes that two and four ranks divide, but for key heads."""
    if name == "decoder":
        config = DecoderConfig(vocab=64, width=16, layers=2, heads=4, kv_heads=2, context=8)
        loss, params = loss_function(seeded(Decoder, config))
        return Model(
            params, loss, lambda seed: torch.randint(64, (2, 4, 8), generator=generator(seed)).unbind()
        )
    family = FAMILIES[name]
    sizes = family.sizes | ({} if name == "vit" else {"vocab_size": 64})
    case = case_of(replace(family, sizes=sizes).build())
    frozen = tuple(p for p, v in case.params.items() if not isinstance(v, nn.Parameter))
    return Model(case.params, case.loss, lambda seed: case.batch, frozen)


@cache
def truth(name: str) -> reference.Trained:
    model = model_of(name)
    return reference.train(
        model.loss, model.params, by_steps(model), reference.sgd(0.1, 0.9), frozen=model.frozen
    )


def matrix() -> Iterator[Any]:
    """Each model on one mesh in the suite, the other meshes are long."""
    for i, name in enumerate(NAMES):
        for j, axes in enumerate(MESHES):
            for k, residual in enumerate(RESIDUALS):
                quick = name not in LONG and (j, k) == (i % len(MESHES), i // len(MESHES) % 2)
                marks = [] if quick else pytest.mark.long
                yield pytest.param(name, axes, residual, marks=marks, id=f"{name}-{axes}-{residual}")


@pytest.mark.parametrize(("name", "axes", "residual"), list(matrix()))
def test_any_mesh_is_one_process(name: str, axes: dict[str, int], residual: str) -> None:
    model = model_of(name)
    mesh = fs.make_mesh(**axes, simulated=True)
    specs = specs_of(model, "full_shard", mesh, tensor="tensor")
    optimizer = fs.optim.sgd(0.1, momentum=0.9)
    step = make_step(mesh, model, specs, optimizer, residual=residual)
    for got in fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, optimizer, step=step)):
        assert_same(got, truth(name), 1e-10 if name in EXACT else 1e-6)
