"""Python numbers of a batch: inputs of the program once they change, where `fn` can take them so."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from toys import step_of

import fnshard as fs
from fnshard.compiler import lower
from fnshard.compiler.frontend.trace import trace

W, X = torch.tensor([0.3, -1.2, 2.0]), torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 1.0]])
INDICES = torch.tensor([123456789, 2])
FLOATS, COUNTS = (0.5, 0.7, 0.9, 1.1), (1, 2, 3, 2)

# What `fn` does with a number, the numbers, and how many programs there are for them.
USES = {
    "temperature": (lambda p, x, n: (p["w"] * x / n).softmax(-1).square().sum(), FLOATS, 2),
    "weight of a loss": (lambda p, x, n: (p["w"] * x).sum() + n * p["w"].square().sum(), FLOATS, 2),
    "count": (lambda p, x, n: (p["w"] * x).sum() / (1 + n), COUNTS, 2),
    "exponent": (lambda p, x, n: (p["w"] * x).sum() * 0.9**n, COUNTS, 2),
    "in a dict": (lambda p, x, n: (p["w"] * x).sum() * n["scale"] + n["shift"],
                  [{"scale": n, "shift": 1.0} for n in FLOATS], 2),
    "whole, then not": (lambda p, x, n: (p["w"] * x * n).sum(), (2, 3, 0.5, 4, 0.7, 5, 2.5), 2),
    "exponent of thousands": (lambda p, x, n: (p["w"] * x * (1 - 0.9999**n)).sum(), (1000, 2000, 4000), 2),
    "index": (lambda p, x, n: p["w"][x.long().abs().clamp(max=n) * 0 + n].sum(), (1, 2, 0), 2),
    "difference": (lambda p, x, n: (n - p["w"] * x).square().sum(), FLOATS, 2),
    "bits": (lambda p, x, n: (p["w"] * x).sum() * ((n & 1) + (8 >> n)), COUNTS, 2),
    "unused": (lambda p, x, n: (p["w"] * x).sum(), FLOATS, 2),
    "beyond int64": (lambda p, x, n: (p["w"] * x).sum() * (n / 2**80), (2**80, 2**81), 2),
    "branch": (lambda p, x, n: (p["w"] * x).sum() * (2 if n > 0.8 else 1), FLOATS, 4),
    "function of numbers": (lambda p, x, n: (p["w"] * x).sum() * math.exp(n), FLOATS, 4),
    "shape": (lambda p, x, n: (p["w"][:n] * x[:, :n]).sum(), COUNTS, 3),
    "checked by type": (lambda p, x, n: (p["w"] * x).sum() * (n if type(n) is float else {}["n"]), FLOATS, 4),
    "looked at by type": (lambda p, x, n: (p["w"] * x).sum() * n * (1 if isinstance(n, float) else 100),
                          FLOATS, 4),
    "looked at by type, then by value": (
        lambda p, x, n: (p["w"] * x).sum() * (0.8 if type(n) is float and n > 0.8 else n), FLOATS, 4),
    "type in arithmetic": (lambda p, x, n: (p["w"] * x).sum() * n * (1 + isinstance(n, float)), FLOATS, 4),
    "key by type": (lambda p, x, n: (p["w"] * x).sum() * n * {float: 1.0}.get(type(n), 9.0), FLOATS, 4),
    "beyond 2**53": (lambda p, x, n: (p["w"] * x).sum() * (3**n % 1000), (50, 60, 70), 3),
    "powers": (lambda p, x, n: (p["w"] * x).square().mean() * (1 + 1 / 2**n), (3, 60, 64, 70), 4),
    "rounded to 32 bits": (lambda p, x, n: (p["w"] * x).sum() * (INDICES * n).double().sum(), FLOATS, 4),
    "no tensor": (lambda p, x, n: (p["w"] * x).sum() * (n + 1 if torch.is_tensor(n) else n), FLOATS, 4),
    "key": (lambda p, x, n: (p["w"] * x).sum() * n * {1.1: 3.0}.get(n, 5.0), FLOATS, 4),
    "text": (lambda p, x, n: (p["w"] * x).sum() * n * {"n=1.1": 3.0}.get(f"n={n}", 5.0), FLOATS, 4),
    "flag": (lambda p, x, n: (p["w"] * x).sum() * (2 if n else 1), (True, False, True), 2),
    "list": (lambda p, x, n: (p["w"] * x).sum() * sum(n), ([1, 2], [2, 3], [1, 2]), 2),
}  # fmt: skip


@pytest.fixture(autouse=True)
def traced_anew() -> Iterator[None]:
    """What `fn` runs is compared while it is traced; other tests remember traces."""
    with mock.patch.object(lower, "trace", trace):
        yield


@pytest.mark.parametrize("use", USES)
def test_numbers_that_change_are_inputs_where_they_can_be(use: str) -> None:
    fn, values, programs = USES[use]
    step = step_of(fn, {"w": W})
    with warnings.catch_warnings(record=True) as caught, fs.debug.assert_max_compiles(programs) as compiles:
        warnings.simplefilter("always")
        for value in values:
            w = W.clone().requires_grad_()
            expected = fn({"w": w}, X, value)
            loss, grads = step({"w": W}, X, value)
            torch.testing.assert_close((loss, grads["w"]), (expected, *torch.autograd.grad(expected, w)))
    assert len(compiles) == programs
    again = [w for w in caught if "compiling again" in str(w.message)]
    assert len(again) == (0 if use in list(USES)[:11] else programs - 1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_number_is_the_same_for_all_ranks_and_micro_batches(accumulate: int) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    params = {"w": W.double()}
    specs = fs.presets.full_shard(params, mesh)

    def fn(p: dict[str, Tensor], x: Tensor, n: float) -> Tensor:
        return (p["w"] * x / n).exp().sum(-1).mean()

    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager", accumulate=accumulate)
    x = torch.randn(8, 3, dtype=torch.float64)

    def run(rank: int) -> Any:
        return [float(step(fs.shard(params, specs, mesh), x[4 * rank :][:4], n)[0]) for n in FLOATS]

    for losses in fs.simulate(mesh, run):
        torch.testing.assert_close(losses, [float(fn(params, x, n)) for n in FLOATS], rtol=0, atol=1e-10)
