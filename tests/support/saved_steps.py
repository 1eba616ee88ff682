"""A small step that reads what is no argument, for tests of saved steps; and one rank of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fnshard as fs

PARAMS = {"up": torch.randn(8, 4), "down": torch.randn(4, 8)}
BATCH = (torch.randn(6, 4),)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])


class Settings:
    """What a function reads beside its arguments."""

    def __init__(self) -> None:
        self.scale, self.table, self.mask = 2.0, {"power": 2}, MASK.clone()


def loss_of(settings: Any) -> Callable[..., Any]:
    def loss_fn(params: Any, x: Tensor) -> Any:
        y = torch.relu(x @ params["up"].T) @ params["down"].T * settings.scale * settings.mask
        return (y ** settings.table["power"]).mean(), {"mean": y.mean()}

    return loss_fn


def on_ranks(rank: int, folder: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    params, x = {"up": torch.randn(8, 4), "down": torch.randn(4, 8)}, torch.randn(4, 4)[rank * 2 :][:2]
    mesh, fn = fs.make_mesh(shard=2), loss_of(Settings())
    specs, how = fs.presets.full_shard(params, mesh), {"backend": "inductor", "cache_dir": folder}
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-2), **how)
    state, metrics = step(step.init(params), x)
    graphs = [g for k in step.lower(state, x).kernels.values() for g in (k.forward, k.backward) if g]
    found = len(graphs), metrics.numbers()["loss"], state.params["up"], vars(step.made)
    losses, made = [], []
    for batch in (x, x[:1]):  # as the step's, and of a length of its own
        forward = fs.shard_forward(fn, specs, mesh=mesh, kernels=step, **how)
        with mock.patch.dict(os.environ, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2"):  # as a launcher does
            forward.lower(state, batch).compile_async()
        losses.append(float(forward(state, batch)[0]))
        made.append(vars(forward.made))
    plain = fs.shard_forward(fn, specs, mesh=mesh, backend="eager")
    return *found, made, losses, [float(plain(state, batch)[0]) for batch in (x, x[:1])]
