"""A small module, AdamW's state of it after some steps of plain torch, and a step here that goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fnshard as fs

STEPS, LR = 3, 1e-2


def make_model() -> nn.Module:
    """Make a module with shapes that nothing divides, and a buffer that is saved."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.BatchNorm1d(9).eval(), nn.Linear(9, 5))


def rows_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 5, generator=generator)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def step_here(mesh: fs.Mesh, preset: str = "full_shard") -> Any:
    apply, params = fs.make_functional(make_model())
    specs = getattr(fs.presets, preset)(params, mesh)
    fn = lambda p, x, y: loss_of(apply(p, x), y)  # noqa: E731
    return fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(LR), backend="eager")


def train_module() -> tuple[nn.Module, Any]:
    """Train a module for some steps in one process; return it with its optimizer."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        x, y = rows_of(step, 0)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def assert_same(state: Any, model: nn.Module, optimizer: Any) -> None:
    """Assert that a state of a mesh of one has a module's leaves and AdamW's moments, bit for bit."""
    assert int(state.step) == STEPS
    for name, value in model.state_dict().items():
        assert torch.equal(state.params[name], value), name
    for name, param in model.named_parameters():
        own = optimizer.state[param]
        assert torch.equal(state.opt_state[name]["mu"], own["exp_avg"]), name
        assert torch.equal(state.opt_state[name]["nu"], own["exp_avg_sq"]), name
