"""Checkpoints and resharding of leaves that a tensor axis splits: any mesh to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import saved
import torch
from sharded import assert_same, by_steps, make_step, specs_of
from tensor_models import decoder

import fnshard as fs
from fnshard import P

MESHES = {
    "2x2": {"shard": 2, "tensor": 2},
    "turned": {"tensor": 2, "shard": 2},
    "4": {"tensor": 4},
    "1": {"shard": 1},
}
REAL = [name for name in MESHES if name != "1"]


def step_on(mesh: fs.Mesh) -> Any:
    """Make a step of the known state, of which the tensor axis splits one matrix, or two side by side."""
    ranks = mesh.axes_size(mesh.ordered({"tensor"} & set(mesh.names)))
    compute = {"layers.0.w": P(None, fs.Fused("tensor", 4 // ranks))} if ranks > 1 else None
    specs = fs.presets.full_shard(saved.params(), mesh, tensor=compute)
    return fs.shard_step(saved.loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(0.1), backend="eager")


def save_and_restore(rank: int, root: str, saving: list[str], names: list[str]) -> list[str]:
    """Save on meshes, restore each of `names` on each mesh of this world: what is not as it must be."""
    wrong = []
    for name in saving:
        fs.checkpoint.save(
            f"{root}/{name}", saved.make_known(step_on(fs.make_mesh(**MESHES[name], device="cpu")))
        )
    for name in names:
        for here in saving or REAL:
            state = fs.checkpoint.restore(
                f"{root}/{name}", step_on(fs.make_mesh(**MESHES[here], device="cpu"))
            )
            wrong += [f"{name} on {here}: {what}" for what in saved.differences(state)]
    return wrong


def test_every_mesh_restores_every_other(ranks: Any, tmp_path: Path) -> None:
    """Parameters, moments, a buffer and a frozen leaf come back to the bit."""
    assert ranks(4).run(save_and_restore, str(tmp_path), REAL, REAL) == [[]] * 4
    assert save_and_restore(0, str(tmp_path), ["1"], list(MESHES)) == []
    assert ranks(4).run(save_and_restore, str(tmp_path), [], ["1"]) == [[]] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [("2x2", "4"), ("turned", "2x2"), ("4", "turned")],
)
def test_training_goes_on_after_resharding(before: str, after: str) -> None:
    """State is resharded in memory: two steps on one mesh and one on another are three of one process."""
    model, optimizer = decoder(vocab=19, fused=True), fs.optim.adamw(1e-2, weight_decay=0.1)
    expected = reference.train(model.loss, model.params, by_steps(model), reference.adamw(1e-2))
    meshes = [fs.make_mesh(**MESHES[name], simulated=True) for name in (before, after)]
    specs = [specs_of(model, "full_shard", mesh, tensor="tensor") for mesh in meshes]
    steps = [make_step(m, model, s, optimizer) for m, s in zip(meshes, specs, strict=True)]

    def rows(mesh: fs.Mesh, batch: Any) -> Any:
        at = mesh.coordinate().get("shard", 0)
        return batch[0].chunk(mesh.data_size)[at]

    def run(rank: int) -> reference.Trained:
        out, batches = reference.Trained(), model.batches(3)
        state = steps[0].init(model.params)
        for batch in batches[:2]:
            state, metrics = steps[0](state, rows(meshes[0], batch))
            out.losses.append(metrics["loss"].item())
        full = fs.unshard(state.params, specs[0], meshes[0])
        state = fs.reshard(state, specs[0], specs[1], meshes[0], to=meshes[1])
        moved = fs.unshard(state.params, specs[1], meshes[1])
        assert all(torch.equal(moved[p], full[p]) for p in full)
        state, metrics = steps[1](state, rows(meshes[1], batches[2]))
        out.losses.append(metrics["loss"].item())
        out.params = fs.unshard(state.params, specs[1], meshes[1])
        return out

    for got in fs.simulate(meshes[0], run):
        assert_same(got, expected)
