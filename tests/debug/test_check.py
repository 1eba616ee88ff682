"""`fs.debug.check`: each planted fault is found at its leaf; and nothing where there is nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from faults import PARAMS, PRESETS, loss, lying, mesh_of
from torch import Tensor
from toys import rows, run_chain

import fnshard as fs
from fnshard.errors import DebugError, SpecError, StateError


@pytest.mark.parametrize("preset", PRESETS)
def test_check_says_nothing_of_what_is_right(preset: str) -> None:
    mesh = mesh_of(replicate=2, shard=2) if preset == "hybrid_shard" else mesh_of()
    found = fs.debug.check(loss, PARAMS, rows(), PRESETS[preset](PARAMS, mesh), mesh)
    assert found and not found.failed
    assert {a.leaf for a in found.leaves} == set(PARAMS)
    assert str(found).startswith("3 gradients and the loss on mesh ")


def test_check_of_micro_batches_means_and_lower_precision() -> None:
    mesh = mesh_of()
    bf16 = PRESETS["full_shard"](PARAMS, mesh, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert fs.debug.check(loss, PARAMS, (rows(),), bf16, mesh, remat="unit")

    def masked(params: Any, x: Tensor, keep: Tensor) -> fs.Mean:
        return fs.Mean((run_chain(params, x).square().sum(-1) * keep).sum(), keep.sum())

    keep = torch.tensor([1.0, 1.0, 1.0, 0.0])
    specs = PRESETS["full_shard"](PARAMS, mesh)
    assert fs.debug.check(masked, PARAMS, (rows(), keep), specs, accumulate=2)


def test_check_of_a_pipeline_compares_each_leaf_on_its_stage() -> None:
    mesh = mesh_of(pipeline=2, shard=2)
    specs = PRESETS["full_shard"](PARAMS, mesh)
    found = fs.debug.check(loss, PARAMS, rows(), specs, mesh, accumulate=2)
    assert found and {a.leaf for a in found.leaves} == set(PARAMS)
    stages = {a.leaf: mesh.stage_of(a.rank) for a in found.leaves}
    assert stages == {path: specs[path].chunk for path in PARAMS}
    # The last stage reduces the last unit first.
    with lying("reduce_scatter", 0, lambda r: r * 2, 3):
        found = fs.debug.check(loss, PARAMS, rows(), specs, mesh, accumulate=2, strict=False)
    assert [(a.leaf, a.rank) for a in found.failed] == [("layers.2.w", 3)]


def test_check_of_a_reentrant_checkpoint() -> None:
    def again(params: Any, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(loss, params, x.requires_grad_(), use_reentrant=True)

    assert fs.debug.check(again, PARAMS, (rows(),), PRESETS["full_shard"](PARAMS, mesh_of()))


@pytest.mark.parametrize("which", ["scaled", "own part", "one rank"])
def test_check_names_the_leaf_whose_gradient_is_wrong(which: str) -> None:
    lie = {"scaled": lambda r: r * 2, "own part": lambda r: r / 2, "one rank": lambda r: r + 1}[which]
    specs = PRESETS["full_shard"](PARAMS, mesh_of())
    # Units are reduced last to first.
    with lying("reduce_scatter", 1, lie, 1 if which == "one rank" else None):
        found = fs.debug.check(loss, PARAMS, rows(), specs, strict=False)
        with raises(
            DebugError, leaves="layers.1.w", fix="fs.debug.nan_hunt", says=["1 beyond", "rtol=0.0001"]
        ):
            fs.debug.check(loss, PARAMS, rows(), specs)
    assert [a.leaf for a in found.failed] == ["layers.1.w"] == [found.leaves[0].leaf]
    assert found.leaves[0].relative > 0.4
    assert which != "one rank" or found.leaves[0].rank == 1


def test_check_of_a_function_that_is_no_mean_says_what_to_return() -> None:
    specs = PRESETS["full_shard"](PARAMS, mesh_of())
    with raises(DebugError, fix=["a mean over rows", "of a sum"], says="4 beyond"):
        fs.debug.check(lambda p, x: run_chain(p, x).square().sum(), PARAMS, rows(), specs)


def test_check_refuses_what_it_cannot_compare() -> None:
    specs = PRESETS["full_shard"](PARAMS, mesh_of())
    with raises(StateError, leaves="batch['0'] [3, 8]", fix="a multiple of 2"):
        fs.debug.check(loss, PARAMS, rows()[:3], specs)
    with raises(StateError, leaves="random numbers"):
        fs.debug.check(lambda p, x: F.dropout(run_chain(p, x), 0.5).mean(), PARAMS, rows(), specs)
    with raises(SpecError, leaves=["(shard=2)", "abstract"], fix="fs.make_mesh(shard=2, simulated=True)"):
        fs.debug.check(loss, PARAMS, rows(), specs, fs.make_mesh(shard=2, abstract=True))
