"""Updates that close over tensors, and sides of a `torch.cond` that return what they were given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor

import fnshard as fs
from fnshard.errors import OptimizerError
from fnshard.optim import Optimizer

START = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)


def loss(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def train(optimizer: Optimizer, ranks: int, steps: int = 3) -> dict[str, Tensor]:
    """Train some steps, and return the whole leaf of rank 0, by its name."""
    mesh = fs.make_mesh(shard=ranks, simulated=True)
    specs = fs.presets.full_shard({"w": START}, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")

    def run(rank: int) -> dict[str, Tensor]:
        state = step.init({"w": START.clone()})
        for number in range(steps):
            rows = torch.linspace(-1, 1 + number, 4 * 4, dtype=torch.float64).reshape(4, 4)
            state, _ = step(state, rows.chunk(ranks)[rank])
        return {"w": fs.unshard(state.params, specs, mesh)["w"]}

    return fs.simulate(mesh, run)[0]


def pulled(path: str, grad: Tensor, slots: Any, param: Tensor, step: Any) -> Any:
    return -0.01 * grad - 0.1 * (param - START), {}


def kept(path: str, grad: Tensor, slots: Any, param: Tensor, step: Any) -> Any:
    """Update to a slot that every second step is the parameter of before; other steps pull back to it."""
    snap = torch.cond(step.count % 2 == 1, lambda: param, lambda: slots["snap"])
    return -0.01 * grad + 0.1 * (slots["snap"] - param), {"snap": snap}


def by_hand(update: Any, steps: int = 3) -> Tensor:
    """Compute the updates in plain torch, of the whole leaf."""
    param, snap = START.clone(), torch.zeros_like(START)
    for number in range(steps):
        rows = torch.linspace(-1, 1 + number, 4 * 4, dtype=torch.float64).reshape(4, 4)
        grad = 2 * rows.T @ (rows @ param) / (4 * 3)
        if update is pulled:
            param = param - 0.01 * grad - 0.1 * (param - START)
        else:
            change = -0.01 * grad + 0.1 * (snap - param)
            snap = param if number % 2 == 1 else snap
            param = param + change
    return param


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("update", "init"),
    [(pulled, lambda path, param: {}), (kept, lambda path, param: {"snap": torch.zeros_like(param)})],
    ids=["closed_over", "returned"],
)
def test_it_trains_as_by_hand(update: Any, init: Any, ranks: int) -> None:
    got = train(Optimizer("own", init, update), ranks)["w"]
    torch.testing.assert_close(got, by_hand(update), rtol=0, atol=1e-12)


def test_a_side_writes_to_nothing_from_outside_by_out() -> None:
    def update(path: str, grad: Tensor, slots: Any, param: Tensor, step: Any) -> Any:
        buffer = torch.zeros_like(grad)

        def write() -> Tensor:
            return torch.mul(grad, 2, out=buffer)

        return torch.cond(step.count > 1, write, lambda: grad.clone()), {}

    with raises(OptimizerError, leaves="params['w']"):
        train(Optimizer("own", lambda path, param: {}, update), 1)
