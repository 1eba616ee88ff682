"""What recipes have, taken away: no clipping, no accumulation, one unit or many, SGD, a function as the rate.

On real ranks: what is in flight at once grows with the depth, and nothing may bound it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from toys import chain, rows

import fnshard as fs

RATE, STEPS, DEEP = 0.05, 3, 72
FALLING = lambda step: RATE * 0.5 ** float(step)  # noqa: E731
OPTIMIZERS = {"sgd": fs.optim.sgd(RATE), "function": fs.optim.adamw(FALLING, weight_decay=0.1)}
AT_ONCE, ONE_BY_ONE = ({"prefetch": depth, "overlap": depth} for depth in (DEEP, 0))


def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Compute residual blocks, so that the last gradient is as large as the first."""
    for weight in params.values():
        x = x + torch.tanh(x @ weight) / len(params)
    return x.square().mean()


def make_chain(units: int) -> tuple[dict[str, Tensor], Tensor]:
    return {p: v.double() for p, v in chain(units, 2).items()}, rows(2).double()


def train_chain(
    rank: int, preset: str, units: int, optimizer: str, options: dict[str, Any]
) -> reference.Trained:
    mesh = fs.make_mesh(shard=2, device="cpu")
    params, x = make_chain(units)
    specs = fs.presets.PRESETS[preset](params, mesh)
    how = {"mesh": mesh, "optimizer": OPTIMIZERS[optimizer], "backend": "eager", "timeout": 30.0, **options}
    step = fs.shard_step(loss, specs, **how)
    state, out = step.init(params), reference.Trained()
    for _ in range(STEPS):
        state, metrics = step(state, x.chunk(2)[rank])
        out.losses.append(metrics["loss"].item())
    out.params = fs.unshard(state.params, specs, mesh)
    return out


@pytest.mark.parametrize(
    ("preset", "units", "optimizer", "options"),
    [
        pytest.param("full_shard", DEEP, "sgd", AT_ONCE, marks=pytest.mark.long),
        pytest.param("full_shard", DEEP, "sgd", {"accumulate": 2, **ONE_BY_ONE}, marks=pytest.mark.long),
        ("no_shard", DEEP, "sgd", {}),
        ("full_shard", 1, "function", {}),
        ("zero1", 1, "function", {}),
    ],
)
def test_no_depth_reaches_a_bound(
    ranks: Any, preset: str, units: int, optimizer: str, options: dict[str, Any]
) -> None:
    params, x = make_chain(units)
    optimizers, rate = (reference.sgd(RATE), None) if optimizer == "sgd" else (reference.adamw(RATE), FALLING)
    expected = reference.train(loss, params, [[(x,)]] * STEPS, optimizers, rate=rate)
    for got in ranks(2).run(train_chain, preset, units, optimizer, options):
        torch.testing.assert_close(got.params, expected.params, rtol=0, atol=1e-10)
        assert got.losses == pytest.approx(expected.losses, rel=1e-10)
