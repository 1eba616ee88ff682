"""Matrices: a small model of matrices, a vector and a stack, and its training in any layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fnshard as fs

SHAPES = {"embed.weight": (7, 6), "a.weight": (6, 12), "b.weight": (9, 6), "b.bias": (6,),
          "experts.w": (3, 6, 5)}  # fmt: skip
ROWS = torch.randn(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def leaves() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {p: torch.randn(s, dtype=torch.float64, generator=draw) for p, s in SHAPES.items()}


def loss(params: Any, x: Tensor) -> fs.Mean:
    hidden = torch.tanh(x @ params["embed.weight"])
    hidden = torch.tanh(hidden @ params["a.weight"])[:, :6] + params["b.bias"]
    each = torch.einsum("bi,eio->beo", hidden, params["experts.w"]).square().sum()
    return fs.Mean((hidden @ params["b.weight"].T).square().sum() + each, torch.tensor(float(len(x))))


def step_on(mesh: fs.Mesh, specs: Any, optimizer: Any, **options: Any) -> Any:
    return fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager", **options)


def specs_on(mesh: fs.Mesh, preset: str, **policy: Any) -> Any:
    computes = {"embed.weight": fs.P("tensor"), "a.weight": fs.P("tensor"), "b.weight": fs.P(None, "tensor")}
    tensor = {"tensor": computes} if "tensor" in mesh.names else {}
    return fs.presets.PRESETS[preset](leaves(), mesh, **tensor, **policy)


def advanced(step: Any, state: fs.TrainState, steps: int, rank: int) -> fs.TrainState:
    mesh = step.mesh
    part = len(ROWS) // mesh.data_size
    at = rank // (mesh.size // mesh.data_size)
    for _ in range(steps):
        state, _ = step(state, ROWS[at * part : (at + 1) * part])
    return state


def trained(
    axes: dict[str, int], preset: str, optimizer: Any, policy: dict[str, Any] | None = None, **options: Any
) -> list[dict[str, Tensor]]:
    """The parameters of each rank after three steps."""
    params, mesh = leaves(), fs.make_mesh(**axes, simulated=True)
    specs = specs_on(mesh, preset, **(policy or {}))
    step = step_on(mesh, specs, optimizer, **options)

    def on_rank(rank: int) -> dict[str, Tensor]:
        return fs.unshard(advanced(step, step.init(params), 3, rank).params, specs, mesh)

    return fs.simulate(mesh, on_rank)
