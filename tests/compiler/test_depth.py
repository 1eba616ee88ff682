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
PRESETS = ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_by_one": {"accumulate": 2, "prefetch": 0, "overlap": 0},
    "all_at_once": {"prefetch": DEEP, "overlap": DEEP},
}
OPTIMIZERS = {"sgd": fs.optim.sgd(RATE), "function": fs.optim.adamw(FALLING, weight_decay=0.1)}


def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Residual blocks, so that the last gradient is as large as the first."""
    for weight in params.values():
        x = x + torch.tanh(x @ weight) / len(params)
    return x.square().mean()


def made(units: int) -> tuple[dict[str, Tensor], Tensor]:
    return {p: v.double() for p, v in chain(units, 2).items()}, rows(2).double()


def trained(rank: int, preset: str, units: int, optimizer: str, options: str) -> reference.Trained:
    mesh = fs.make_mesh(shard=2, device="cpu")
    params, x = made(units)
    specs = fs.presets.PRESETS[preset](params, mesh)
    step = fs.shard_step(
        loss, specs, mesh=mesh, optimizer=OPTIMIZERS[optimizer], backend="eager", timeout=30.0,
        **OPTIONS[options],
    )  # fmt: skip
    state, out = step.init(params), reference.Trained()
    for _ in range(STEPS):
        state, metrics = step(state, x.chunk(2)[rank])
        out.losses.append(metrics["loss"].item())
    out.params = fs.unshard(state.params, specs, mesh)
    return out


def truth(units: int, optimizer: str) -> reference.Trained:
    params, x = made(units)
    optimizers, rate = (reference.sgd(RATE), None) if optimizer == "sgd" else (reference.adamw(RATE), FALLING)
    return reference.train(loss, params, [[(x,)]] * STEPS, optimizers, rate=rate)


def check(ranks: Any, preset: str, units: int, optimizer: str, options: str) -> None:
    expected = truth(units, optimizer)
    for got in ranks(2).run(trained, preset, units, optimizer, options):
        torch.testing.assert_close(got.params, expected.params, rtol=0, atol=1e-10)
        assert got.losses == pytest.approx(expected.losses, rel=1e-10)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        pytest.param(
            p, o, marks=[] if p == "full_shard" or (p, o) == ("no_shard", "plain") else pytest.mark.long
        )
        for p in PRESETS
        for o in OPTIONS
    ],
)
def test_no_depth_reaches_a_bound(ranks: Any, preset: str, options: str) -> None:
    check(ranks, preset, DEEP, "sgd", options)


@pytest.mark.parametrize("preset", ["full_shard", "zero1"])
def test_one_unit_without_clipping(ranks: Any, preset: str) -> None:
    check(ranks, preset, 1, "function", "plain")
