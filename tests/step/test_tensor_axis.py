"""A tensor axis: whatever it splits, losses and parameters are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from models import Model
from sharded import assert_same, by_steps, make_step, specs_of, train
from torch import Tensor

import fnshard as fs
from fnshard.compiler.schedule.instructions import Exchange

ROWS, T, WIDTH, HEADS, VOCAB = 4, 8, 8, 4, 16
D = torch.float64


def decoder(kv_heads: int = 2, tied: bool = True) -> Model:
    """Two blocks of attention and an MLP with biases, written by hand for one device."""
    draw = torch.Generator().manual_seed(0)
    kv = kv_heads * WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, WIDTH), "pos": (T, WIDTH), "norm": (WIDTH,)}
    if not tied:
        shapes["head.weight"] = (VOCAB, WIDTH)
    for i in range(2):
        block = {
            "q_proj.weight": (WIDTH, WIDTH), "k_proj.weight": (kv, WIDTH), "v_proj.weight": (kv, WIDTH),
            "o_proj.weight": (WIDTH, WIDTH), "o_proj.bias": (WIDTH,), "norm1": (WIDTH,), "norm2": (WIDTH,),
            "up_proj.weight": (4 * WIDTH, WIDTH), "up_proj.bias": (4 * WIDTH,),
            "down_proj.weight": (WIDTH, 4 * WIDTH), "down_proj.bias": (WIDTH,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{n}": s for n, s in block.items()}
    params = {p: torch.randn(s, dtype=D, generator=draw) * 0.3 for p, s in shapes.items()}

    def block(p: dict[str, Tensor], x: Tensor, i: int) -> Tensor:
        of = lambda name: p[f"layers.{i}.{name}"]  # noqa: E731
        h = F.layer_norm(x, (WIDTH,), of("norm1"))
        q, k, v = (
            F.linear(h, of(f"{n}_proj.weight")).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for n in "qkv"
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(a.transpose(1, 2).flatten(2), of("o_proj.weight"), of("o_proj.bias"))
        h = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), of("norm2")), of("up_proj.weight"), of("up_proj.bias")))
        return x + F.linear(h, of("down_proj.weight"), of("down_proj.bias"))

    def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, p["embed.weight"]) + p["pos"]
        for i in range(2):
            x = block(p, x, i)
        logits = F.linear(F.layer_norm(x, (WIDTH,), p["norm"]), p["embed.weight" if tied else "head.weight"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def batch(seed: int) -> tuple[Tensor]:
        return (torch.randint(0, VOCAB, (ROWS, T), generator=torch.Generator().manual_seed(seed)),)

    return Model(params, loss, batch)


MESHES = [
    {"tensor": 2}, {"shard": 2, "tensor": 2}, {"tensor": 2, "shard": 2}, {"shard": 1, "tensor": 4},
    {"context": 2}, {"shard": 2, "context": 2}, {"context": 4}, {"shard": 1, "tensor": 2, "context": 2},
    {"shard": 2, "tensor": 2, "context": 2},
]  # fmt: skip


def trained(model: Model, axes: dict[str, int], preset: str = "full_shard", **options: Any) -> list[Any]:
    mesh = fs.make_mesh(**axes, simulated=True)
    specs = specs_of(model, preset, mesh, tensor="tensor" if "tensor" in axes else None)
    optimizer = fs.optim.adamw(1e-2, weight_decay=0.1)
    step = make_step(mesh, model, specs, optimizer, **options)
    return fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, optimizer, step=step))


@pytest.mark.parametrize("residual", ["split", "whole"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_any_mesh_is_one_process(axes: dict[str, int], residual: str) -> None:
    model = decoder()
    expected = reference.train(model.loss, model.params, by_steps(model), reference.adamw(1e-2))
    for got in trained(model, axes, residual=residual):
        assert_same(got, expected)


def test_constrain_says_how_a_value_is_split() -> None:
    model = decoder()

    def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return model.loss({**p, "pos": fs.constrain(p["pos"], fs.P(None, "tensor"))}, tokens)

    def counts(fn: Any) -> list[str]:
        mesh = fs.make_mesh(tensor=2, context=2, abstract=True)
        step = make_step(mesh, model, fs.presets.full_shard(model.params, mesh), None, loss=fn)
        lines = step.lower(model.params, *model.batch(0)).schedule.instructions
        return [line.detail for line in lines if isinstance(line, Exchange)]

    assert not any("tensor" in line for line in counts(model.loss))
    assert any("tensor" in line for line in counts(loss))
