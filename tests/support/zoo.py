"""Programs of small matrices: what plain torch computes with them, and what a step does on ranks.

A program is `fn(p, x)` of leaves `{layers.i.w: [WIDTH, WIDTH]}` and rows [ROWS, WIDTH], all in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fnshard as fs

Params = dict[str, Tensor]
Fn = Callable[[Params, Tensor], Any]
LAYERS, WIDTH, ROWS = 3, 8, 6
SETTINGS: dict[str, dict[str, Any]] = {"full_shard": {"remat": "unit", "accumulate": 2}, "zero2": {}}


def params(layers: int = LAYERS) -> Params:
    """Make the leaves of a program, the same at every call."""
    draw = torch.Generator().manual_seed(0)
    shape = (WIDTH, WIDTH)
    return {
        f"layers.{i}.w": torch.randn(shape, dtype=torch.float64, generator=draw) / 2 for i in range(layers)
    }


def batches(count: int) -> Tensor:
    """Make `count` slices of rows, [count, ROWS, WIDTH]; each is a rank's batch or micro-batch."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, ROWS, WIDTH, dtype=torch.float64, generator=draw)


def net(p: Params, x: Tensor) -> Tensor:
    """Return tanh(x @ w) through all leaves."""
    for w in p.values():
        x = torch.tanh(x @ w)
    return x


def between(each: Callable[[Tensor], Tensor]) -> Fn:
    """Make a program that is a chain of products, with `each` after every one of them."""

    def fn(p: Params, x: Tensor) -> Tensor:
        for w in p.values():
            x = each(x @ w / 2)
        return (x * x.cos()).mean()

    return fn


def train_plain(fn: Fn, parts: int) -> tuple[Tensor, list[Tensor]]:
    """Compute the loss of `parts` slices and its gradients by torch's own autograd.

    Each slice has leaves of its own, so that hooks see the gradient of one slice, as they do in a step.
    """
    slices = [{k: v.requires_grad_() for k, v in params().items()} for _ in range(parts)]
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        results = [fn(dict(p), x.clone()) for p, x in zip(slices, batches(parts), strict=True)]
        if isinstance(results[0], fs.Mean):
            loss = sum(r.total for r in results) / sum(r.count for r in results)
        else:
            loss = torch.stack(results).mean()
        loss.backward()
    grads = [[torch.zeros_like(v) if v.grad is None else v.grad for v in p.values()] for p in slices]
    return loss.detach(), [sum(of_leaf) for of_leaf in zip(*grads, strict=True)]


def step_on(
    fn: Fn, mesh: fs.Mesh, preset: str = "full_shard", **options: Any
) -> Callable[[int], tuple[Tensor, list[Tensor]]]:
    """Make a function of a rank, which computes the loss of its slices and whole gradients by a step."""
    specs = fs.presets.PRESETS[preset](params(), mesh)
    step = fs.shard_step(fn, specs, mesh=mesh, **{"backend": "eager", **options})
    parts = batches(mesh.size * options.get("accumulate", 1)).reshape(mesh.size, -1, WIDTH)

    def work(rank: int) -> tuple[Tensor, list[Tensor]]:
        value, grads = step(fs.shard(params(), specs, mesh), parts[rank])
        return value, list(fs.unshard(grads, specs, mesh, layout="gradient").values())

    return work


def check(fn: Fn, results: list[tuple[Tensor, list[Tensor]]], parts: int) -> None:
    """Assert that every rank's loss and gradients are those of plain torch."""
    expected = train_plain(fn, parts)
    for got in results:
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def table(programs: Mapping[str, Fn], twins: Mapping[str, Fn] = {}) -> Callable[[str], None]:
    """Make a test that runs every program on two ranks.

    The suite runs each program in one of the settings, in turn; the other is `long`.

    Args:
        twins: by name, what plain torch runs in the place of a program that only a compiler can run.
    """

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    @pytest.mark.parametrize(("name", "preset"), [
        pytest.param(name, preset, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, name in enumerate(programs) for j, preset in enumerate(SETTINGS)
    ])  # fmt: skip
    def test_sharded_gradients_are_those_of_plain_torch(name: str, preset: str) -> None:
        mesh, options = fs.make_mesh(shard=2, simulated=True), SETTINGS[preset]
        got = fs.simulate(mesh, step_on(programs[name], mesh, preset, **options))
        check(twins.get(name, programs[name]), got, 2 * options.get("accumulate", 1))

    return test_sharded_gradients_are_those_of_plain_torch


def check_compiled(fn: Fn, twin: Fn | None = None) -> None:
    """Assert that inductor's kernels, on one rank, compute what plain torch does with `fn`, or its `twin`."""
    mesh = fs.make_mesh(shard=1, simulated=True)
    check(twin or fn, fs.simulate(mesh, step_on(fn, mesh, backend="inductor")), 1)


def named(*programs: Fn) -> dict[str, Fn]:
    """Return programs by the names of their functions."""
    return {fn.__name__: fn for fn in programs}
