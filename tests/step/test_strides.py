"""Strides where a step is cut: a kernel gives its readers the strides that they were traced with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P

# Of [B, C, T], C last: each leaves [B, T, C] or [B, T / 2, C] with strides of its own.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda x: x.permute(0, 2, 1),
    "slice": lambda x: F.pad(x, (0, 0, 1, 1))[:, 1:-1].transpose(1, 2),
    "step": lambda x: x.transpose(1, 2).repeat(1, 1, 2)[:, :, ::2],
    "flip": lambda x: x.transpose(1, 2).flip(2),
    "unfold": lambda x: x.transpose(1, 2).unfold(2, 8, 2)[:, :, 0],
    "expand": lambda x: x[:, :, :1].transpose(1, 2).expand(2, 4, 8),
    "index_select": lambda x: x.transpose(1, 2).index_select(1, torch.tensor([1, 0, 3, 2])),
    "where": lambda x: torch.where(x.transpose(1, 2) > 0, x.transpose(1, 2), 0.0),
    "einsum": lambda x: torch.einsum("bct,ts->bsc", x, torch.eye(4, dtype=x.dtype)),
    "pool": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1),
    "clone": lambda x: x.transpose(1, 2).clone(),
}
LAYOUTS = {
    "columns": ("tensor", LayoutSpec(P("tensor"), compute=P("tensor"))),
    "rows": ("tensor", LayoutSpec(P(None, "tensor"), compute=P(None, "tensor"))),
    "sequence": ("context", LayoutSpec()),
}
INDUCTOR = [("permute", "rows", "inductor"), ("index_select", "rows", "inductor")]


@pytest.mark.suite({
    "permute-columns-eager": "a view of all that is there",
    "unfold-*": "windows that overlap",
    "expand-*": "stride 0",
    "index_select-columns-*": "a copy with its input's strides",
    "flip-*": "a copy whose order is another",
    "pool-*": "an op of channels",
    "clone-*": "a copy that keeps strides",
})  # fmt: skip
@pytest.mark.parametrize(
    ("view", "layout", "backend"),
    [*((v, list(LAYOUTS)[i % 3], "eager") for i, v in enumerate(VIEWS)), *INDUCTOR],
)
def test_kernels_read_values_of_any_strides(view: str, layout: str, backend: str) -> None:
    def fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = VIEWS[view](torch.tanh(x * params["g"]))
        return (F.linear(y, params["w"]).mT.softmax(2) * y[..., :4].mT).square().mean()

    axis, spec = LAYOUTS[layout]
    mesh = fs.make_mesh(**{axis: 2}, simulated=True)
    x = torch.randn(2, 8, 4).double()
    params = {"g": torch.randn(1).double(), "w": torch.randn(4, 8).double()}
    specs = fs.match_specs(params, [("w", spec), ("*", LayoutSpec())])
    step = fs.shard_step(fn, specs, mesh=mesh, backend=backend)

    def rank(_: int) -> tuple[Tensor, ...]:
        batch: Any = fs.Sequence(x, 2) if layout == "sequence" else x
        loss, grads = step(fs.shard(params, specs, mesh), batch)
        return loss, *fs.unshard(grads, specs, mesh).values()

    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss = fn(leaves, x)
    expected = (loss, *torch.autograd.grad(loss, list(leaves.values())))
    for got, value in zip(fs.simulate(mesh, rank)[0], expected, strict=True):
        torch.testing.assert_close(got, value.detach(), rtol=1e-10, atol=1e-10)
