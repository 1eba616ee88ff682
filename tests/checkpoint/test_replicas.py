"""Replicas: a state in the memory of two nodes: ranks and nodes that die, other meshes, flipped bytes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
import torch.distributed as dist
from errors import raises

import fnshard as fs
from fnshard.checkpoint import replicas
from fnshard.errors import CheckpointError

PRESETS = list(saved.MESHES)


def memory_of(root: str, rank: int, world: int, nodes: int) -> Path:
    """Return the folder of the node that a rank of equal nodes runs on."""
    folder = Path(root, f"node{rank * nodes // world}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def keep(rank: int, world: int, root: str, nodes: int, presets: Sequence[str]) -> None:
    """Save steps 5, 6 and 7 of the known state in every preset; the last two are kept."""
    for preset in presets:
        step = saved.step_of(preset, "fp32", saved.mesh_of(preset, world))
        memory = memory_of(f"{root}/{preset}", rank, world, nodes)
        kept = fs.checkpoint.Replicas(step, memory)
        kept.start(saved.make_known(step))
        for number in (5, 6, 7):
            kept.save(saved.make_known(step, number), data={"position": number})
        kept.wait()


def restore_kept(
    rank: int, world: int, root: str, nodes: int, kept: Sequence[str], presets: Sequence[str]
) -> list[str]:
    """Restore each kept preset in each preset here; return its step, and what is not as it must be."""
    out = []
    for name in kept:
        for preset in presets:
            step = saved.step_of(preset, "fp32", saved.mesh_of(preset, world))
            state = fs.checkpoint.Replicas(step, memory_of(f"{root}/{name}", rank, world, nodes)).restore()
            dist.barrier()
            if state is None:
                out.append("nothing")
                continue
            wrong = saved.differences(state)
            number = int(state.step)
            out.append(
                f"{number} {' '.join(wrong)}".strip() if state.data == {"position": number} else "data"
            )
    return out


@pytest.mark.long
def test_every_preset_restores_every_other_when_a_node_is_lost(ranks: Any, tmp_path: Path) -> None:
    """Four ranks on two nodes, then on two, three and four: also what was nowhere but at the partner's."""
    ranks(4).run(keep, 4, str(tmp_path), 2, PRESETS)
    for preset in PRESETS:
        shutil.rmtree(tmp_path / preset / "node0")
    for world in (4, 3, 2):
        here = PRESETS if world != 3 else PRESETS[:3]
        nodes = {4: 2, 3: 3, 2: 2}[world]
        for of_rank in ranks(world).run(restore_kept, world, str(tmp_path), nodes, PRESETS, here):
            assert set(of_rank) == {"7"}, of_rank


def keep_an_empty_leaf(rank: int, root: str) -> tuple[int, list[int]]:
    mesh = fs.make_mesh(shard=2, device="cpu")
    params = {"w": torch.ones(4), "none": torch.empty(0, 3)}
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(
        lambda p, x: (p["w"] * x).sum() + p["none"].sum(), specs, mesh=mesh, optimizer=fs.optim.adamw(0.1),
        backend="eager",
    )  # fmt: skip
    state, _ = step(step.init(params), torch.ones(4))
    kept = fs.checkpoint.Replicas(step, memory_of(root, rank, 2, 1))
    kept.start(state)
    kept.save(state)
    kept.wait()
    found = fs.checkpoint.Replicas(step, memory_of(root, rank, 2, 1)).restore()
    torch.testing.assert_close(found.params["w"], state.params["w"], rtol=0, atol=0)
    return int(found.step), list(found.params["none"].shape)


@pytest.mark.long
def test_a_leaf_without_elements(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(keep_an_empty_leaf, str(tmp_path)) == [(1, [0, 3])] * 2


def test_what_is_lost_torn_or_flipped_is_not_restored(ranks: Any, tmp_path: Path) -> None:
    """A part that is missing, a byte that differs: the step before; nothing left: nothing."""

    def restored() -> set[str]:
        return set().union(*ranks(2).run(restore_kept, 2, str(tmp_path), 1, ["zero1"], ["zero1"]))

    ranks(2).run(keep, 2, str(tmp_path), 1, ["zero1"])
    before, last = sorted((tmp_path / "zero1" / "node0").iterdir())
    assert restored() == {"7"}
    data = last / "rank-00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert restored() == {"6"}
    content[-1] ^= 1
    data.write_bytes(content)
    assert restored() == {"7"}
    data.with_name("rank-00001.safetensors.json").unlink()
    assert restored() == {"6"}
    torn = before / "rank-00000.safetensors.json"
    torn.write_bytes(torn.read_bytes()[:-9])
    assert restored() == {"nothing"}


def try_replicas(rank: int, root: str, nodes: int, copies: int) -> str:
    step = saved.step_of("zero1", "fp32", saved.mesh_of("zero1", 2))
    try:
        fs.checkpoint.Replicas(step, memory_of(root, rank, 2, nodes), copies=copies)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("nodes", "copies", "message"),
    [
        (1, 2, r"replicas=2: 1 node can hold 1 to 1"),
        (2, 2, r"replicas=2: 2 nodes can hold 1 to 1"),
        (2, 0, r"replicas=0"),
        (2, 1, r"^$"),
    ],
)
def test_more_copies_than_nodes_can_hold(
    ranks: Any, tmp_path: Path, nodes: int, copies: int, message: str
) -> None:
    for text in ranks(2).run(try_replicas, str(tmp_path), nodes, copies):
        assert re.search(message, text)


def test_memory_that_is_not_there_or_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = saved.step_of("zero1", "fp32", fs.make_mesh(shard=1))
    monkeypatch.setenv("FNSHARD_MEMORY", str(tmp_path / "nowhere"))
    with raises(
        CheckpointError,
        leaves="nowhere/fnshard-memory-a",
        fix=["/dev/shm", "FNSHARD_MEMORY"],
        says="No such file",
    ):
        fs.checkpoint.Replicas(step, "a")
    monkeypatch.setattr(replicas, "control_groups", lambda: [(1000, 900)])
    with raises(CheckpointError, fix=["fewer copies", "/dev/shm"], says="GB"):
        fs.checkpoint.Replicas(step, tmp_path).start(saved.make_known(step))
    (tmp_path / "file").touch()
    with raises(CheckpointError, leaves=str(tmp_path / "file" / "in"), fix="folder"):
        fs.checkpoint.Replicas(step, tmp_path / "file" / "in")


def keep_beside(rank: int, folder: str) -> list[str]:
    """Keep two states in a folder of the user's, which is made, and return what is in it before the close."""
    step = saved.step_of("zero1", "fp32", fs.make_mesh(shard=2, device="cpu"))
    kept = fs.checkpoint.Replicas(step, Path(folder))
    (Path(folder) / "mine").mkdir(exist_ok=True)
    (Path(folder) / "mine" / "notes.txt").touch()
    kept.start(saved.make_known(step))
    for number in (5, 6, 7):
        kept.save(saved.make_known(step, number))
    kept.wait()
    dist.barrier()
    names = sorted(os.listdir(folder))
    dist.barrier()
    kept.close()
    return names


def test_in_a_folder_of_the_users_only_replicas_are_removed(ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    names = ranks(2).run(keep_beside, str(folder))
    assert [len(each) for each in names] == [3, 3]  # two saves, and the user's
    assert [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))] == ["mine", "mine/notes.txt"]
