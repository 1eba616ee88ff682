"""Sums over large leaves: within 1e-6 of fp64's, whatever they are of, however they lie, on any mesh."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fnshard as fs
from fnshard.optim.muon import orthogonalize
from fnshard.optim.sums import CAST, sum_squares

COUNT = 1 << 22
RTOL = 1e-6


def numbers(kind: str, count: int = COUNT) -> Tensor:
    """Return equal numbers, of which each addition may round the same way, or drawn ones."""
    if kind == "equal":
        return torch.full((count,), 1 / 3)
    return torch.rand(count, generator=torch.Generator().manual_seed(0)) + 0.5


LAYOUTS = {
    "flat": lambda flat: flat,
    "odd": lambda flat: flat[:-3],
    "transposed": lambda flat: flat.view(1024, -1).T,
    "with gaps": lambda flat: flat.view(1024, -1)[:, ::3],
    "cut": lambda flat: flat.view(64, 64, -1)[1:, :-1, 3:],
    "expanded": lambda flat: flat[:2048, None].expand(2048, 2048),
    "of one number": lambda flat: flat[5].expand(2048, 2048),
}


@pytest.mark.suite({
    "*-torch.float32-drawn": "every layout",
    "flat-*": "every dtype, and equal numbers, which lose most",
})  # fmt: skip
@pytest.mark.parametrize("kind", ["equal", "drawn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_squares_of_a_large_leaf(layout: str, dtype: torch.dtype, kind: str) -> None:
    leaf = LAYOUTS[layout](numbers(kind).to(dtype))
    leaves = [leaf, torch.ones(3, dtype=dtype), torch.ones(0, 3, dtype=dtype)]
    want = leaf.double().square().sum() + 3
    torch.testing.assert_close(sum_squares(leaves), want, rtol=RTOL, atol=0)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["equal", "drawn"])
def test_the_global_norm_of_a_large_leaf(kind: str, ranks: int) -> None:
    mesh, given = fs.make_mesh(shard=ranks, simulated=True), numbers(kind)
    params = {"w": torch.zeros(COUNT), "b": torch.zeros(3)}
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(1.0))
    step = fs.shard_step(
        lambda p, g: (p["w"] * g).sum() + p["b"].sum(), fs.presets.full_shard(params, mesh), mesh=mesh,
        optimizer=optimizer, backend="eager",
    )  # fmt: skip
    norms = fs.simulate(mesh, lambda rank: step(step.init(params), given)[1]["grad_norm"])
    want = (given.double().square().sum() + 3).sqrt()
    for norm in norms:
        torch.testing.assert_close(norm.double(), want, rtol=RTOL, atol=0)


@pytest.mark.suite({
    "equal-*": "equal numbers lose most",
})  # fmt: skip
@pytest.mark.parametrize("optimizer", [fs.optim.lars(0.1), fs.optim.adafactor(0.1)], ids=lambda o: o.name)
@pytest.mark.parametrize("kind", ["equal", "drawn"])
def test_optimizers_that_sum_over_leaves(kind: str, optimizer: Any) -> None:
    """The update of a leaf in fp32 is that of one in fp64."""

    def updated(dtype: torch.dtype) -> Tensor:
        param, grad = (each.view(-1, 1024).to(dtype) for each in (numbers(kind), numbers(kind).flip(0)))
        update, _ = optimizer.update(
            "w", grad, optimizer.init("w", param), param, fs.optim.Step(torch.tensor(3))
        )
        return update.double()

    torch.testing.assert_close(updated(torch.float32), updated(torch.float64), rtol=2 * RTOL, atol=0)


@pytest.mark.parametrize("kind", ["equal", "drawn"])
def test_the_norm_of_a_large_matrix(kind: str) -> None:
    """Muon divides by it; without a turn of Newton-Schulz that is all that happens."""
    matrix = numbers(kind).view(2048, -1)
    got, want = (orthogonalize(m, steps=0).double() for m in (matrix, matrix.double()))
    torch.testing.assert_close(got, want, rtol=RTOL, atol=0)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_a_program_adds_up_to_one_number(backend: str) -> None:
    """A Mean's total, metrics and the loss, of the batch or of a leaf, in eager and in compiled kernels."""
    given, mesh = numbers("equal"), fs.make_mesh(shard=1)

    def fn(p: Any, x: Tensor) -> Any:
        each = x * p["w"]
        aux = {"mean": x.mean(), "sum": x.sum(dim=0, keepdim=True).sum(), "mean of": fs.Mean(x.sum(), 1.0)}
        return fs.Mean(each.sum(), float(COUNT)), aux

    params = {"w": torch.ones(())}
    step = fs.shard_step(
        fn, fs.presets.no_shard(params, mesh), mesh=mesh, optimizer=fs.optim.sgd(0.0), backend=backend
    )
    _, metrics = step(step.init(params), given)
    mean = given.double().mean()
    want = {"loss": mean, "mean": mean, "sum": mean * COUNT, "mean of": mean * COUNT}
    got = {"loss": metrics["loss"], **metrics["aux"]}
    for name, value in want.items():
        torch.testing.assert_close(
            got[name].double(), value, rtol=RTOL, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_squares_of_complex_tensors_and_of_none() -> None:
    value = torch.complex(torch.ones(1000), torch.full((1000,), 2.0))
    for leaf in (value, value.conj(), value[:5], value.view(10, 100).T):
        torch.testing.assert_close(sum_squares([leaf]), torch.tensor(5.0 * leaf.numel()).double())
    assert sum_squares([]).item() == 0


@pytest.mark.parametrize("count", [600, 3 * CAST])
def test_what_is_copied_is_what_the_memory_report_says(count: int) -> None:
    """Leaves in half types are copied: as many numbers as the largest has, and at most `CAST`."""
    with mock.patch.object(torch, "empty", wraps=torch.empty) as empty:
        sum_squares([torch.ones(n, dtype=torch.bfloat16) for n in (520, count)])
    assert sum(call.args[0] for call in empty.mock_calls if call.args) == min(count, CAST)
