"""The state of a pipeline: each stage has its own leaves; files, full trees and other meshes see them all."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
from errors import raises
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import fnshard as fs
from fnshard import LayoutSpec, P, checkpoint
from fnshard.checkpoint.replicas import Replicas
from fnshard.compiler.deferred.deferred_init import Values
from fnshard.errors import StateError
from fnshard.layout.spec import is_here

# "scale" is on all stages; on two stages, two leaves and a buffer are on each.
CHUNKS = {
    "embed.w": 0, "layers.0.w": 1, "layers.0.b": 1, "layers.1.w": 2, "empty": 3, "frozen": 3, "steps": 1,
}  # fmt: skip
MESHES: dict[int, list[dict[str, int]]] = {
    1: [{"shard": 1}],
    2: [{"pipeline": 2}, {"shard": 2}],
    4: [{"pipeline": 4}, {"pipeline": 2, "shard": 2}, {"shard": 2, "pipeline": 2}, {"shard": 4}],
}
KINDS = ("fp32", "bf16", "host")


def specs_on(mesh: fs.Mesh, kind: str = "fp32", preset: str = "full_shard") -> dict[str, LayoutSpec]:
    specs = getattr(fs.presets, preset)(saved.params(), mesh, **saved.STORED[kind])
    return {p: replace(s, chunk=CHUNKS.get(p, "all")) for p, s in specs.items()}


def step_on(mesh: fs.Mesh, kind: str = "fp32", optimizer: Any = None) -> Any:
    specs, chosen = specs_on(mesh, kind), optimizer or fs.optim.adamw(0.1)
    return fs.shard_step(saved.loss_fn, specs, mesh=mesh, optimizer=chosen, backend="eager")


def mesh_of(axes: dict[str, int]) -> fs.Mesh:
    return fs.make_mesh(**axes, device="cpu")


def name_of(axes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


# ------------------------------------------------------------------ a state's leaves
def look_at_a_state(rank: int, mesh: fs.Mesh) -> None:
    state = saved.make_known(step_on(mesh, "bf16"))
    copy = state.copy()
    for path, spec in step_on(mesh, "bf16").specs.items():
        block, here = state.params[path], is_here(spec, mesh)
        assert block.dtype == spec.storage_dtype and here == (CHUNKS.get(path, mesh.stage) % 2 == mesh.stage)
        assert block.numel() == copy.params[path].numel() and (block.numel() == 0 or here)
        assert (path in state.opt_state) == (here and spec.trainable)
    assert saved.differences(copy) == []


def test_a_stage_has_its_own_leaves_and_their_state_alone():
    mesh = fs.make_mesh(pipeline=2, shard=2, simulated=True)
    fs.simulate(mesh, look_at_a_state, mesh)


def test_a_stage_draws_its_own_leaves_alone_and_the_same_numbers(monkeypatch):
    with fs.deferred():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    params = fs.make_functional(model)[1]
    drawn: list[tuple[int, str]] = []
    part = Values.part
    mesh = fs.make_mesh(pipeline=2, shard=2, simulated=True)

    def watched(values: Values, path: str, box: Any) -> Any:
        drawn.append((mesh.stage, path))
        return part(values, path, box)

    monkeypatch.setattr(Values, "part", watched)

    def on_stages(rank: int) -> Any:
        rules = [(f"{i}.*", LayoutSpec(P("shard"), chunk=i)) for i in range(2)]
        specs = fs.match_specs(params, rules)
        return fs.unshard(fs.shard(params, specs, mesh, seed=3), specs, mesh)

    found = fs.simulate(mesh, on_stages)
    assert {path[0] for stage, path in drawn if stage == 0} == {"0"}
    assert {path[0] for stage, path in drawn if stage == 1} == {"1"}
    alone = fs.make_mesh(shard=1)
    expected = fs.shard(params, fs.presets.no_shard(params, alone), alone, seed=3)
    for full, path in itertools.product(found, expected):
        assert torch.equal(full[path], expected[path])


def test_a_block_of_another_stage_is_refused():
    mesh = fs.make_mesh(pipeline=2, simulated=True)

    def adopt(rank: int) -> None:
        blocks = fs.shard(saved.params(), specs_on(mesh), mesh)
        blocks["embed.w"] = torch.zeros(7, 5)
        step_on(mesh).adopt(blocks)

    with raises(StateError, leaves="params['embed.w']", says="block [0, 7, 5]"):
        fs.simulate(mesh, adopt)


# ------------------------------------------------------------------ full trees
def full_trees(rank: int, mesh: fs.Mesh) -> None:
    chained = fs.optim.chain(fs.optim.sgd(0.1), fs.optim.ema(0.9))
    step = step_on(mesh, optimizer=chained)
    state = saved.make_known(step)
    full = fs.unshard(state.params, step.specs, mesh)
    for path, shape in saved.SHAPES.items():
        assert torch.equal(full[path], saved.number(f"{path} 7", shape).float()), path
    ema = fs.unshard(fs.optim.ema_params(state.opt_state), step.specs, mesh, layout="optimizer")
    moved = fs.averaged(state)
    averaged = fs.unshard(moved.params, step.specs, mesh)
    for path, spec in step.specs.items():
        if spec.trainable:
            expected = saved.number(f"optimizer/{path}/ema 7", spec.shape).float()
            assert torch.equal(ema[path], expected) and torch.equal(averaged[path], expected), path
            assert moved.params[path].shape == state.params[path].shape
        else:
            assert ema[path] is None


@pytest.mark.parametrize("axes", MESHES[4][:3], ids=name_of)
def test_full_trees_have_the_leaves_of_all_stages(axes):
    mesh = fs.make_mesh(**axes, simulated=True)
    fs.simulate(mesh, full_trees, mesh)


def full_on_real_ranks(rank: int, axes: dict[str, int]) -> None:
    full_trees(rank, mesh_of(axes))


def test_full_trees_of_real_ranks(ranks):
    for world in (2, 4):
        for axes in MESHES[world]:
            ranks(world).run(full_on_real_ranks, axes)


# ------------------------------------------------------------------ resharding in memory
def there_and_back(rank: int, kind: str) -> list[str]:
    wrong = []
    meshes = [mesh_of(axes) for axes in MESHES[4]]
    for one, other in itertools.permutations(meshes, 2):
        before, after = step_on(one, kind), step_on(other, kind)
        state = saved.make_known(before)
        specs = [before.resolved.resolve(saved.params()).tree, after.resolved.resolve(saved.params()).tree]
        moved = fs.reshard(state, *specs, one, to=other)
        wrong += [f"{one} to {other}: {name}" for name in saved.differences(moved)]
        back = fs.reshard(moved, *specs[::-1], other, to=one)
        wrong += [f"{other} back to {one}: {name}" for name in saved.differences(back)]
    return wrong


@pytest.mark.suite({
    "bf16": "with masters",
})  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_to_every_mesh_and_back_in_memory(ranks, kind):
    assert ranks(4).run(there_and_back, kind) == [[]] * 4


# ------------------------------------------------------------------ checkpoints
def save_all(rank: int, world: int, root: str) -> None:
    for axes in MESHES[world]:
        for kind in KINDS:
            state = saved.make_known(step_on(mesh_of(axes), kind))
            checkpoint.save(f"{root}/{name_of(axes)} {kind}", state, data={"position": 5})


def restore_all(rank: int, world: int, root: str, kind: str) -> list[str]:
    wrong, names = [], [f"{name_of(axes)} {kind}" for meshes in MESHES.values() for axes in meshes]
    for axes, name in itertools.product(MESHES[world], names):
        mesh = mesh_of(axes)
        step = step_on(mesh, kind)
        for how in (step, step.resolved.resolve(saved.params()).tree):
            state = checkpoint.restore(f"{root}/{name}", how, mesh)
            wrong += [f"{name} on {mesh}: {leaf}" for leaf in saved.differences(state)]
            wrong += [] if state.data == {"position": 5} else [f"{name} on {mesh}: {state.data}"]
        params = checkpoint.restore_params(f"{root}/{name}", step)
        wrong += [p for p, block in params.items() if not torch.equal(block, state.params[p])]
    return wrong


@pytest.mark.long
def test_every_mesh_restores_every_other_to_the_bit(ranks, tmp_path):
    for world in MESHES:
        run = ranks(world).run if world > 1 else lambda work, *args: [work(0, *args)]
        run(save_all, world, str(tmp_path))
    for world, kind in itertools.product(MESHES, KINDS):
        run = ranks(world).run if world > 1 else lambda work, *args: [work(0, *args)]
        assert run(restore_all, world, str(tmp_path), kind) == [[]] * world


def test_a_checkpoint_says_nothing_of_stages_and_has_each_leaf_once(ranks, tmp_path):
    ranks(4).run(save_all, 4, str(tmp_path))
    sizes, leaves = set(), []
    for axes in MESHES[4]:
        folder = tmp_path / f"{name_of(axes)} fp32"
        found = checkpoint.verify(folder)
        assert "chunk='all'" in found.specs["embed.w"]
        assert not re.search(r"chunk=\d", str(found.specs))
        leaves.append({name: (leaf.shape, leaf.dtype) for name, leaf in found.leaves.items()})
        sizes.add(sum(t.nbytes for f in folder.glob("*.safetensors") for t in load_file(f).values()))
    assert len(sizes) == 1 and all(each == leaves[0] for each in leaves)


def keep_replicas(rank: int, memory: str) -> list[str]:
    mesh = mesh_of({"pipeline": 2})
    step = step_on(mesh)
    state = saved.make_known(step)
    replicas = Replicas(step, Path(memory))
    replicas.start(state)
    replicas.save(state)
    replicas.wait()
    found = replicas.restore()
    replicas.close()
    return saved.differences(found)


def test_replicas_in_memory_have_the_leaves_of_all_stages(ranks, tmp_path):
    assert ranks(2).run(keep_replicas, str(tmp_path)) == [[], []]


# ------------------------------------------------------------------ Hugging Face's files
def through_files(rank: int, axes: dict[str, int], folder: str) -> None:
    mesh = mesh_of(axes)
    state = saved.make_known(step_on(mesh))
    specs = state.where[0]
    fs.hf.save(state, f"{folder}/{name_of(axes)}")
    blocks = fs.hf.load(f"{folder}/{name_of(axes)}", specs, mesh)
    for path, block in state.params.items():
        assert torch.equal(blocks[path], block) and blocks[path].shape == block.shape, path
    step_on(mesh).adopt(blocks)


def test_model_files_have_the_leaves_of_all_stages(ranks, tmp_path):
    files = []
    for world in (2, 4):
        for axes in MESHES[world]:
            ranks(world).run(through_files, axes, str(tmp_path))
            files.append(load_file(tmp_path / name_of(axes) / "model.safetensors"))
    for each, path in itertools.product(files, saved.SHAPES):
        assert torch.equal(each[path], files[-1][path]), path


# ------------------------------------------------------------------ adapters and codes
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_adapters_are_merged_on_their_stages(dora, codec):
    made = torch.Generator().manual_seed(0)
    base = {f"{i}.w": torch.randn(shape, generator=made) for i, shape in enumerate([(8, 6), (6, 8)])}
    fn, params = fs.lora(
        lambda p, x: F.linear(F.linear(x, p["0.w"]), p["1.w"]), base, rank=2, alpha=2, targets="*", dora=dora
    )
    for leaf in fs.tree.flatten(params["adapters"])[0]:
        leaf.data.normal_(generator=made)

    def merged_on(mesh: fs.Mesh) -> Any:
        rules = [(f"*{i}.w*", LayoutSpec(P("shard"), chunk=i)) for i in range(2)]
        frozen = {"codec": codec, "trainable": False}
        rules = [(f"base.{g}", replace(s, **frozen)) for g, s in rules] + rules
        specs = fs.match_specs(params, rules)
        return fs.unshard(*fs.adapters.merge(fs.shard(params, specs, mesh), fn.lora, specs, mesh), mesh)

    mesh, expected = fs.make_mesh(pipeline=2, shard=2, simulated=True), merged_on(fs.make_mesh(shard=1))
    for found in fs.simulate(mesh, lambda rank: merged_on(mesh)):
        for path, value in expected.items():
            torch.testing.assert_close(found[path], value)
