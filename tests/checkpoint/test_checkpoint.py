"""Checkpoints: any layout to any other, in part, with positions and metrics; and resharding in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
from errors import raises
from safetensors.torch import load_file

import fnshard as fs
from fnshard import LayoutSpec, P, checkpoint
from fnshard.checkpoint.manifest_file import Manifest
from fnshard.checkpoint.restoring import _find_position
from fnshard.errors import CheckpointError, CheckpointWarning, StateError

WORLDS = (1, 2, 4)
PRESETS = list(saved.MESHES)


def one(preset: str = "full_shard", stored: str = "fp32", **more: Any) -> Any:
    return saved.step_of(preset, stored, fs.make_mesh(shard=1), **more)


# ------------------------------------------------------------------ any mesh to any mesh
def on(ranks: Any, world: int, work: Any, *args: Any) -> list[Any]:
    if world == 1:
        return [work(0, world, *args)]
    return ranks(world).run(work, world, *args)


def test_every_mesh_and_preset_restores_every_other(ranks: Any, tmp_path: Path) -> None:
    """Parameters, moments, buffers and frozen leaves, to the bit."""
    for world in WORLDS:
        on(ranks, world, saved.save_all, str(tmp_path), ["fp32"], PRESETS)
    names = [f"{world}-{preset}-fp32" for world in WORLDS for preset in PRESETS]
    for world in WORLDS:
        for wrong in on(ranks, world, saved.restore_all, str(tmp_path), names, ["fp32"], PRESETS):
            assert wrong == []


def test_every_dtype_and_tier_restores_every_other(ranks: Any, tmp_path: Path) -> None:
    kinds = list(saved.STORED)
    ranks(2).run(saved.save_all, 2, str(tmp_path), kinds, ["full_shard"])
    names = [f"2-full_shard-{kind}" for kind in kinds]
    for world, preset in ((1, "full_shard"), (2, "zero1")):
        for wrong in on(ranks, world, saved.restore_all, str(tmp_path), names, kinds, [preset]):
            assert wrong == []


def test_replicas_are_written_once(ranks: Any, tmp_path: Path) -> None:
    """DDP's four ranks write one state too, about a quarter each."""
    ranks(4).run(saved.save_all, 4, str(tmp_path), ["fp32"], ["no_shard"])
    folder = tmp_path / "4-no_shard-fp32"
    one_rank = checkpoint.save(tmp_path / "one", saved.make_known(one()))
    size = sum(f.stat().st_size for f in one_rank.glob("*.safetensors"))
    data = [sum(t.nbytes for t in load_file(f).values()) for f in sorted(folder.glob("*.safetensors"))]
    total = sum(t.nbytes for f in one_rank.glob("*.safetensors") for t in load_file(f).values())
    assert sum(data) == total < size
    assert len(data) == 4
    assert max(data) <= total / 4 + 140 * 3  # the largest leaf is 140 bytes


def test_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    state = saved.make_known(one())
    tensors = load_file(checkpoint.save(tmp_path / "7", state) / "rank-00000.safetensors")
    assert torch.equal(tensors["params/embed.w"], state.params["embed.w"])
    assert torch.equal(tensors["optimizer/embed.w/mu"], state.opt_state["embed.w"]["mu"])


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Restored by a step that has not seen its leaves' shapes: bitwise the same parameters and losses."""
    rules = {"w": LayoutSpec(optimizer_dtype=torch.float64), "b": LayoutSpec()}

    def step() -> Any:
        return fs.shard_step(
            lambda p, x: (torch.dropout(torch.tanh(x @ p["w"]), 0.3, True) @ p["b"]).square().mean(),
            rules,
            optimizer=fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(0.05)),
            backend="eager",
        )

    def batch(n: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(n))

    first = step()
    state = first.init({"w": saved.number("w", (3, 5)).float(), "b": saved.number("b", (5,)).float()}, seed=5)
    losses = []
    for n in range(6):
        if n == 3:
            checkpoint.save(tmp_path / "3", state)
        state, metrics = first(state, batch(n))
        losses.append(metrics["loss"].item())
    second = step()
    again = checkpoint.restore(tmp_path, second)
    repeated = []
    for n in range(3, 6):
        again, metrics = second(again, batch(n))
        repeated.append(metrics["loss"].item())
    assert repeated == losses[3:]
    assert all(torch.equal(again.params[k], state.params[k]) for k in rules)


def test_a_loss_scale_comes_back_or_begins_anew(tmp_path: Path) -> None:
    def step(loss_scale: Any) -> Any:
        return fs.shard_step(
            lambda p, x: (p["w"] * x).sum(),
            {"w": LayoutSpec()},
            optimizer=fs.optim.sgd(0.1),
            backend="eager",
            loss_scale=loss_scale,
        )

    dynamic, plain = step("dynamic"), step(None)
    state = dynamic.init({"w": torch.ones(2)})
    state.loss_scale["scale"].fill_(32.0)
    checkpoint.save(tmp_path / "dynamic", state)
    checkpoint.save(tmp_path / "plain", plain.init({"w": torch.ones(2)}))
    assert checkpoint.restore(tmp_path / "dynamic", step("dynamic")).loss_scale["scale"] == 32.0
    assert checkpoint.restore(tmp_path / "dynamic", plain).loss_scale == {}
    fresh = dynamic.init({"w": torch.ones(2)}).loss_scale["scale"]
    assert checkpoint.restore(tmp_path / "plain", dynamic).loss_scale["scale"] == fresh


# ------------------------------------------------------------------ parts of it
def test_specs_alone_restore_what_was_saved(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "7", saved.make_known(one(stored="bf16")))
    mesh = fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(saved.params(), mesh)
    state = checkpoint.restore(tmp_path / "7", specs, mesh)
    assert saved.differences(state) == []
    assert set(state.opt_state) == {p for p in saved.SHAPES if p != "frozen"}


def test_parameters_alone_and_a_subtree(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=1)
    checkpoint.save(tmp_path / "7", saved.make_known(one()))
    other = fs.shard_step(
        saved.loss_fn, fs.presets.full_shard(saved.params(), mesh), mesh=mesh, optimizer=fs.optim.sgd(0.1)
    )
    params = checkpoint.restore_params(tmp_path, other)
    assert list(params) == [*saved.SHAPES, "steps"]
    assert torch.equal(params["embed.w"], saved.number("embed.w 7", (7, 5)).float())
    part = checkpoint.restore_params(tmp_path, other, only=["layers.0.*", "scale"])
    assert list(part) == ["layers.0.w", "layers.0.b", "scale"]
    with raises(CheckpointError, leaves="only='head.*'"):
        checkpoint.restore_params(tmp_path, other, only="head.*")


def test_parameters_are_saved_alone(tmp_path: Path) -> None:
    step = one()
    blocks = saved.make_known(step).params
    with raises(CheckpointError, leaves="a dict", fix="specs=step.specs"):
        checkpoint.save(tmp_path / "params", blocks)
    checkpoint.save(tmp_path / "params", blocks, specs=step.specs)
    again = checkpoint.restore_params(tmp_path / "params", step)
    assert all(torch.equal(again[p], blocks[p]) for p in blocks)
    with raises(CheckpointError, leaves="optimizer/embed.w/mu [7, 5]", says="not in the checkpoint"):
        checkpoint.restore(tmp_path / "params", step)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "7", saved.make_known(one()))
    mesh = fs.make_mesh(shard=1)
    full = saved.params()
    full["embed.w"] = torch.nn.Parameter(torch.zeros(8, 5))
    full["new"] = torch.nn.Parameter(torch.zeros(2))
    del full["scale"]
    specs = fs.presets.full_shard(full, mesh)
    step = fs.shard_step(lambda p: p["new"].sum(), specs, mesh=mesh, optimizer=fs.optim.adamw(0.1))
    with raises(
        CheckpointError,
        leaves=["embed.w is [8, 5] here and [7, 5] there", "params/new [2]", "params/scale []"],
        fix="restore_params",
        says=["not in the checkpoint", "in the checkpoint alone"],
    ):
        checkpoint.restore(tmp_path, step)
    with raises(CheckpointError, leaves="optimizer/embed.w/mu [7, 5]", says="in the checkpoint alone"):
        checkpoint.restore(tmp_path, one(optimizer=fs.optim.sgd(0.1)))


# ------------------------------------------------------------------ what comes with it


def test_configuration_and_metrics_come_back(tmp_path: Path) -> None:
    checkpoint.save(
        tmp_path / "7",
        saved.make_known(one()),
        config={"lr": 0.1, "layers": [1, 2], "betas": (0.9, 0.95), "by_layer": {3: (1, 2)}},
        metrics={"held_out": 1.5},
    )
    found = checkpoint.manifest(tmp_path)
    assert (found.step, found.seed) == (7, 11)
    assert found.config == {"lr": 0.1, "layers": [1, 2], "betas": (0.9, 0.95), "by_layer": {3: (1, 2)}}
    assert found.config == checkpoint.verify(tmp_path / "7").config
    assert found.metrics == {"held_out": 1.5}
    leaf = found.leaves["params/embed.w"]
    assert (leaf.shape, leaf.dtype, leaf.spec) == ((7, 5), "F32", "P('shard')")


def positions(rank: int, root: str) -> Any:
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    checkpoint.save(f"{root}/7", saved.make_known(step), data={"rank": rank})
    return checkpoint.restore(root, step).data


def test_ranks_with_positions_of_their_own_get_them_back(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(positions, str(tmp_path)) == [{"rank": 0}, {"rank": 1}]
    with pytest.warns(CheckpointWarning, match=r"state\.data"):
        assert checkpoint.restore(tmp_path, one()).data is None


OTHER_ROWS = [{"shard": 2, "tensor": 2}, {"tensor": 2, "shard": 2}]


@pytest.mark.parametrize("how", ["restore", "reshard"])
@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        ({"shard": 4}, {"shard": 4}, True),
        ({"shard": 4}, {"replicate": 2, "shard": 2}, True),
        *(({"shard": 4}, after, False) for after in OTHER_ROWS),
        (*OTHER_ROWS, False),
        (*OTHER_ROWS[::-1], False),
    ],
    ids=str,
)
def test_a_rank_gets_no_position_in_rows_of_others(
    before: dict[str, int], after: dict[str, int], fits: bool, how: str
) -> None:
    """As many ranks as before, which may share out the batch otherwise."""
    old, new = (fs.make_mesh(**axes, simulated=True) for axes in (before, after))
    full = {"w": torch.ones(8, 4)}
    specs = [fs.presets.no_shard(full, mesh) for mesh in (old, new)]
    step = fs.shard_step(
        lambda p, x: (p["w"] * x).sum(), specs[0], mesh=old, optimizer=fs.optim.sgd(0.1), backend="eager"
    )

    def move(data: list[Any]) -> list[Any]:
        """Return what each rank has of the positions of all ranks; one position is that of all."""
        mesh = {"axes": before, "data_axes": list(old.data_axes)}
        there = Manifest(
            step=5, seed=0, mesh=mesh, leaves={}, files={}, specs={}, data=tuple(data), config=None,
            metrics={}, versions={},
        )  # fmt: skip

        def work(rank: int) -> Any:
            if how == "restore":
                return _find_position(there, new)
            state = step.init(full)
            state.data = data[rank % len(data)]
            return fs.reshard(state, *specs, old, to=new).data

        return fs.simulate(old, work)

    own = [{"rank": rank} for rank in range(4)]
    assert move([{"step": 3}]) == [{"step": 3}] * 4
    if fits:
        assert move(own) == own
    else:
        with pytest.warns(CheckpointWarning, match=r"state\.data"):
            assert move(own) == [None] * 4


def test_a_position_is_of_its_step_alone(tmp_path: Path) -> None:
    """A step moves on in the data: the restored position does not linger to be saved again."""
    step = one()
    checkpoint.save(tmp_path / "7", saved.make_known(step), data={"position": 1})
    state = checkpoint.restore(tmp_path, step)
    assert state.data == {"position": 1}
    assert step(state, torch.ones(2))[0].data is None


# ------------------------------------------------------------------ in memory
@pytest.mark.suite({
    "stored2": "narrow leaves, on the host",
})  # fmt: skip
@pytest.mark.parametrize(
    "stored", [pytest.param(("fp32", "fp32"), marks=pytest.mark.long), ("fp32", "bf16"), ("bf16", "host")]
)
def test_resharding_in_memory(stored: tuple[str, str]) -> None:
    """Every preset to every other on four ranks, their axes changed too."""
    flat, nested = {"shard": 4}, {"replicate": 2, "shard": 2}
    for before in PRESETS:
        for after in PRESETS:
            one_mesh = fs.make_mesh(**(nested if before == "hybrid_shard" else flat), simulated=True)
            other = fs.make_mesh(**(nested if after == "hybrid_shard" else flat), simulated=True)
            if (one_mesh.names, one_mesh.sizes) == (other.names, other.sizes):
                other = one_mesh

            def work(rank: int, a: Any = before, b: Any = after, x: Any = one_mesh, y: Any = other) -> Any:
                old, new = saved.step_of(a, stored[0], x), saved.step_of(b, stored[1], y)
                state = saved.make_known(old)
                moved = fs.reshard(state, old.specs, new.specs, x, to=y)
                with raises(StateError, leaves="TrainState", fix="state.copy()"):
                    _ = state.params
                return saved.differences(moved), int(moved.step)

            assert fs.simulate(one_mesh, work) == [([], 7)] * 4


@pytest.mark.parametrize("preset", PRESETS)
def test_averages_are_a_state_to_evaluate(preset: str) -> None:
    mesh = fs.make_mesh(**({"replicate": 2} if preset == "hybrid_shard" else {}), shard=2, simulated=True)
    params = {"w": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), "frozen": torch.ones(3)}
    specs = fs.presets.PRESETS[preset](
        params, mesh, storage_dtype=torch.bfloat16, compute_dtype=torch.float32, optimizer_dtype=torch.float32
    )
    specs |= {"frozen": replace(specs["frozen"], trainable=False)}
    optimizer = fs.optim.chain(fs.optim.sgd(0.1), fs.optim.ema(0.5))

    def work(rank: int) -> None:
        step = fs.shard_step(
            lambda p, x: ((x @ p["w"]) * p["frozen"]).square().mean(), specs, mesh=mesh, optimizer=optimizer,
            backend="eager",
        )  # fmt: skip
        x = torch.ones(2, 5)
        state, _ = step(step.init(params), x)
        average = fs.averaged(state)
        full = fs.unshard(fs.optim.ema_params(state.opt_state), specs, mesh, layout="optimizer")["w"]
        expected = {"w": full.bfloat16(), "frozen": torch.ones(3).bfloat16()}
        got = fs.unshard(average.params, specs, mesh)
        assert all(torch.equal(got[p], v) for p, v in expected.items())
        before = got["w"].clone()
        state, _ = step(state, x)  # which writes to its own averages alone
        assert torch.equal(fs.unshard(average.params, specs, mesh)["w"], before)
        forward = fs.shard_forward(lambda p, x: x @ p["w"], specs, mesh=mesh, backend="eager")
        torch.testing.assert_close(forward(average.params, x), x @ before.float())

    fs.simulate(mesh, work)


@pytest.mark.parametrize("how", ["reshard", "restore"])
def test_a_state_without_optimizer_slots_goes_on(how: str, tmp_path: Path) -> None:
    """Plain SGD holds nothing for a leaf, which is an entry without slots all the same."""
    mesh = fs.make_mesh(shard=2, simulated=True) if how == "reshard" else fs.make_mesh(shard=1)
    params = {"w": torch.randn(4, 3), "b": torch.randn(3)}
    sgd = {"optimizer": fs.optim.sgd(0.1), "mesh": mesh, "backend": "eager"}
    old, new = (
        fs.shard_step(lambda p, x: (x @ p["w"] + p["b"]).square().mean(), specs, **sgd)
        for specs in (fs.presets.full_shard(params, mesh), fs.presets.no_shard(params, mesh))
    )

    def work(rank: int) -> Any:
        state, _ = old(old.init(params), torch.ones(2, 4))
        kept = state.copy()
        if how == "reshard":
            moved = fs.reshard(state, old.specs, new.specs, mesh)
        else:
            checkpoint.save(str(tmp_path / "1"), state)
            moved = checkpoint.restore(str(tmp_path / "1"), new.specs, mesh)
        same, other = old(kept, torch.ones(2, 4))[0], new(moved, torch.ones(2, 4))[0]
        return fs.unshard(same.params, old.specs, mesh), other.params

    for same, other in fs.simulate(mesh, work) if how == "reshard" else [work(0)]:
        torch.testing.assert_close(other, same)


def test_axes_of_one_dim_lie_as_the_mesh_says() -> None:
    """A dim split over two axes, five rows on six ranks: boxes DTensor would cut otherwise."""
    mesh = fs.make_mesh(a=2, b=3, simulated=True)
    full = {"w": torch.arange(10.0).view(5, 2)}
    specs = fs.match_specs(full, [("*", LayoutSpec(P(("a", "b"))))])
    whole = fs.presets.no_shard(full, mesh)

    def work(rank: int) -> torch.Tensor:
        blocks = fs.shard(full, specs, mesh)
        with raises(fs.SpecError, leaves="(shard=8)", says="the same ranks"):
            fs.reshard(blocks, specs, whole, mesh, to=fs.make_mesh(shard=8, abstract=True))
        return fs.reshard(blocks, specs, whole, mesh)["w"]

    assert all(torch.equal(got, full["w"]) for got in fs.simulate(mesh, work))


def lies_in_a_file_of(folder: Path, leaf: torch.Tensor) -> bool:
    """Return whether a leaf's memory is that of a file in a folder."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [[int(end, 16) for end in fields[0].split("-")] for fields in maps]
    return any(start <= leaf.data_ptr() < end for start, end in ranges)


@pytest.mark.parametrize("own_folder", [True, False])
@pytest.mark.parametrize("memory", ["disk", "host", "device"])
def test_averages_of_leaves_that_rest_on_disk(memory: str, own_folder: bool, tmp_path: Path) -> None:
    """They rest in the folder that is named, or on the host."""
    mesh, params = fs.make_mesh(shard=2, simulated=True), {"w": torch.ones(5, 3), "b": torch.ones(3)}
    specs = fs.presets.full_shard(params, mesh, memory=memory, optimizer_memory="disk")
    step = fs.shard_step(
        lambda p, x: (x @ p["w"] + p["b"]).mean(), specs, mesh=mesh, backend="eager", disk_dir=str(tmp_path),
        optimizer=fs.optim.chain(fs.optim.sgd(0.1), fs.optim.ema(0.5)),
    )  # fmt: skip

    def work(rank: int) -> None:
        state, _ = step(step.init(params), torch.ones(2, 5))
        average = fs.averaged(state, disk_dir=str(tmp_path) if own_folder else None)
        on_disk = memory == "disk" and own_folder
        assert all(lies_in_a_file_of(tmp_path, leaf) == on_disk for leaf in average.params.values())
        got, now = (fs.unshard(each.params, specs, mesh) for each in (average, state))
        for path, first in params.items():
            torch.testing.assert_close(got[path], (first + now[path]) / 2)

    fs.simulate(mesh, work)
