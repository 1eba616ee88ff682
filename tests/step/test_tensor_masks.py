"""Random masks and a fused loss on meshes with a tensor and a context axis: those of a mesh without."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch.nn.functional as F
from models import Model
from sharded import assert_same, make_step, specs_of, train
from tensor_models import HEADS, WIDTH, decoder
from torch import Tensor

import fnshard as fs


def dropped(params: dict[str, Tensor], tokens: Tensor) -> fs.Mean:
    """The decoder with dropout at each place where models have it, and a loss that holds no logits."""
    x = F.dropout(F.embedding(tokens, params["embed.weight"]) + params["pos"], 0.2)
    for i in range(2):
        of = lambda name, i=i: params[f"layers.{i}.{name}"]  # noqa: E731
        h = F.layer_norm(x, (WIDTH,), of("norm1"))
        q, k, v = (
            F.linear(h, of(f"{n}_proj.weight")).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for n in "qkv"
        )
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True)
        x = x + F.dropout(F.linear(a.transpose(1, 2).flatten(2), of("o_proj.weight"), of("o_proj.bias")), 0.4)
        h = F.layer_norm(x, (WIDTH,), of("norm2"))
        h = F.dropout(F.gelu(F.linear(h, of("up_proj.weight"), of("up_proj.bias"))), 0.3, inplace=True)
        x = x + F.linear(h, of("down_proj.weight"), of("down_proj.bias"))
    x = F.layer_norm(x, (WIDTH,), params["norm"])
    return fs.losses.linear_cross_entropy(x[:, :-1], params["head.weight"], tokens[:, 1:], chunk=5)


@cache
def trained(axes: tuple[tuple[str, int], ...], **options: Any) -> list[Any]:
    model = decoder(tied=False)
    model = Model(model.params, dropped, model.batch)
    mesh = fs.make_mesh(**dict(axes), simulated=True)
    specs = specs_of(model, "full_shard", mesh, tensor="tensor" if "tensor" in dict(axes) else None)
    optimizer = fs.optim.adamw(1e-2)
    step = make_step(mesh, model, specs, optimizer, **options)
    return fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, optimizer, step=step, seed=7))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"tensor": 2, "context": 2}, {"remat": "unit"}),
        pytest.param({"shard": 2, "tensor": 2}, {"residual": "whole"}, marks=pytest.mark.long),
        pytest.param({"shard": 2, "tensor": 2, "context": 2}, {}, marks=pytest.mark.long),
        pytest.param({"shard": 2, "context": 2}, {}, marks=pytest.mark.long),
        pytest.param({"shard": 2, "tensor": 2}, {"backend": "inductor"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_masks_do_not_depend_on_the_mesh(axes: dict[str, int], options: dict[str, Any]) -> None:
    (expected, *_) = trained((("shard", axes.get("shard", 1)),))
    for got in trained(tuple(axes.items()), **options):
        assert_same(got, expected)
