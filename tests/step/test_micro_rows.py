"""Steps that are cut into as many micro-batches as each batch takes: the numbers of one whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from errors import raises
from torch import Tensor

import fnshard as fs

COUNTS = (2, 3, 1, 3)  # micro-batches of a rank's steps
PARAMS = {
    "w": torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "v": torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
}


def mean_error(params: Any, x: Tensor, keep: Tensor) -> fs.Mean:
    each = ((x @ params["w"].T).tanh() @ params["v"]).square() * keep
    return fs.Mean(each.sum(), keep.sum())


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7 + rank)
    return [
        (torch.randn(2 * n, 5, dtype=torch.float64, generator=draw),
         torch.randint(0, 2, (2 * n,), generator=draw).double())
        for n in COUNTS
    ]  # fmt: skip


def train(mesh: fs.Mesh, given: list[tuple[Tensor, Tensor]], **options: Any) -> tuple[Any, Any, list[float]]:
    specs = fs.presets.full_shard(PARAMS, mesh)
    how = {"backend": "eager", "grad_norm": True, **options}
    step = fs.shard_step(mean_error, specs, mesh=mesh, optimizer=fs.optim.sgd(0.05), micro_rows=2, **how)
    state, losses = step.init(PARAMS), []
    for batch in given:
        state, metrics = step(state, *batch)
        losses.append(metrics["loss"].item())
    return step, fs.unshard(state.params, step.specs, mesh), losses


@pytest.mark.parametrize("options", [{}, {"accumulate_mode": "local"}, {"micro_order": "breadth"}], ids=str)
def test_a_step_takes_as_many_micro_batches_as_its_batch_has(options: dict[str, Any]) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    found = fs.simulate(mesh, lambda rank: train(mesh, batches(rank), **options))
    steps = [list(parts) for parts in zip(batches(0), batches(1), strict=True)]
    expected = reference.train(mean_error, PARAMS, steps, reference.sgd(0.05))
    for step, params, losses in found:
        assert losses == pytest.approx(expected.losses, abs=1e-10)
        for path, leaf in expected.params.items():
            torch.testing.assert_close(params[path], leaf, rtol=0, atol=1e-10)
        assert step.compile_stats.traces == 1  # of one micro-batch, whatever their number


def test_each_number_is_scheduled_once_with_the_same_kernels() -> None:
    mesh = fs.make_mesh(shard=1, device="cpu")
    step, _, _ = train(mesh, batches(0))
    programs = [step.lower(PARAMS, *batch) for batch in batches(0)]
    assert [each.options.accumulate for each in programs] == list(COUNTS)
    assert programs[1] is programs[3]
    assert programs[0].compiled and all(each.compiled == programs[0].compiled for each in programs)


def test_ranks_with_other_numbers_of_micro_batches_are_one_error() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    with raises(fs.AgreementError, leaves=["rank 0: 2", "rank 1: 3"], fix="add micro-batches"):
        fs.simulate(mesh, lambda rank: train(mesh, [batches(rank)[0], batches(rank)[rank]]))


def test_rows_that_are_no_whole_micro_batches_are_refused() -> None:
    mesh = fs.make_mesh(shard=1, device="cpu")
    x, keep = batches(0)[1]
    with raises(fs.StateError, leaves=["micro_rows=2", "[5, 5]", "[5]"], fix="add rows"):
        train(mesh, [(x[:5], keep[:5])])
    with raises(fs.SpecError, leaves=["micro_rows=", "accumulate="]):
        train(mesh, [(x, keep)], accumulate=2)
