"""Hugging Face models, unmodified, tiny and random: the gradients of plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
from families import FAMILIES, Case, case_of

import fnshard as fs
from fnshard.step.lowered import Lowered

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def check(case: Case, atol: float) -> Lowered:
    """Loss and gradients of two ranks equal autograd's."""
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(case.params, mesh)
    step = fs.shard_step(case.loss, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        got, grads = step(fs.shard(case.params, specs, mesh), *sharded.part(case.batch, rank, 2))
        return got, fs.unshard(grads, specs, mesh, layout="gradient")

    for got, grads in fs.simulate(mesh, run):
        torch.testing.assert_close(got, case.value, rtol=0, atol=atol)
        grads = {path: grad for path, grad in grads.items() if grad is not None}
        for path, grad in grads.items():
            expected = case.grads.get(path, torch.zeros_like(grad))
            torch.testing.assert_close(
                grad, expected, rtol=0, atol=atol, msg=lambda m, path=path: f"{path}: {m}"
            )
        assert case.grads.keys() <= grads.keys()
    return step.lower(case.params, *sharded.part(case.batch, 0, 2))


def layers_gathered(lowered: Lowered) -> list[str]:
    """Units of a numbered module, by their gathers in the forward: one of each layer is expected."""
    lines = [line.split() for line in lowered.as_text().splitlines()]
    gathered = [line[2] for line in lines if line[1:2] == ["forward"] and line[3:4] == ["gather"]]
    return [unit for unit in gathered if any(part.isdigit() for part in unit.split("."))]


# The others are built of the same parts; several of them are split in test_tensor_families, and one is read.
QUICK = ("t5", "vit")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.long) for n in FAMILIES if n not in QUICK)]
)
def test_gradients_of_an_unmodified_model(name: str) -> None:
    family = FAMILIES[name]
    case = case_of(family.build())
    if family.tied:
        first, other = family.tied
        assert first in case.params and other not in case.params
    lowered = check(case, family.atol)
    gathered = layers_gathered(lowered)
    assert len(set(gathered)) == family.layers, gathered
    if name != "t5":  # whose decoder layers all read the first one's table of relative positions
        assert len(gathered) == family.layers, gathered
