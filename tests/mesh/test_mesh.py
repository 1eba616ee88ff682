"""Meshes: coordinates, groups, sizes, and what is refused."""

from __future__ import annotations

import threading

import pytest
from errors import raises

import fnshard as fs
from fnshard import SpecError
from fnshard.mesh import simulated_rank


def test_last_axis_varies_fastest() -> None:
    mesh = fs.make_mesh(replicate=2, shard=4, abstract=True)
    assert mesh.coordinate(5) == {"replicate": 1, "shard": 1}
    assert [mesh.rank_of(mesh.coordinate(r)) for r in range(8)] == list(range(8))
    assert mesh.group_ranks(["shard"], rank=5) == (4, 5, 6, 7)
    assert mesh.group_ranks(["replicate"], rank=5) == (1, 5)
    assert mesh.group_ranks(["replicate", "shard"], rank=5) == tuple(range(8))
    assert mesh.group_ranks(["shard", "replicate"], rank=0) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert mesh.group_ranks([], rank=5) == (5,)


def test_sizes() -> None:
    mesh = fs.make_mesh(replicate=2, shard=4, one=1, abstract=True, data_axes=["shard"])
    assert (mesh.size, mesh.data_size, mesh.axis_size("replicate")) == (8, 4, 2)
    assert mesh.axes_size(["replicate", "shard"]) == 8 and mesh.axes_size([]) == 1
    assert mesh.ordered(["one", "shard", "replicate"]) == ("replicate", "shard")
    assert str(mesh) == "(replicate=2, shard=4, one=1)"


def test_a_mesh_of_one_needs_no_process_group() -> None:
    mesh = fs.make_mesh()
    assert (mesh.names, mesh.sizes, mesh.kind, mesh.rank) == (("shard",), (1,), "local", 0)
    assert fs.make_mesh(shard=-1).size == 1


def test_meshes_are_values() -> None:
    assert fs.make_mesh(shard=8, abstract=True) == fs.make_mesh(shard=8, abstract=True)
    assert fs.make_mesh(shard=8, abstract=True) != fs.make_mesh(shard=8, simulated=True)
    assert len({fs.make_mesh(shard=n, abstract=True) for n in (1, 2, 2)}) == 2


def test_any_abstract_size() -> None:
    assert fs.make_mesh(replicate=128, shard=1024, abstract=True).size == 131072


def test_a_simulated_rank_is_the_threads_own() -> None:
    mesh = fs.make_mesh(shard=4, simulated=True)
    seen: list[int] = []
    with simulated_rank(3):
        thread = threading.Thread(target=lambda: seen.append(mesh.rank))
        thread.start()
        thread.join()
        seen.append(mesh.rank)
        with simulated_rank(1):
            seen.append(mesh.rank)
        seen.append(mesh.rank)
    assert [*seen, mesh.rank] == [0, 3, 1, 3, 0]


@pytest.mark.parametrize(
    ("axes", "leaves", "fix"),
    [
        ({"shard": 0}, "(shard=0)", "at least 1"),
        ({"shard": -1, "replicate": -1}, "-1", "one axis may be -1"),
        ({"shard": 1.5}, "shard=1.5", "at least 1"),
        ({"shard": 8}, ["8 ranks", "has 1"], ["torchrun", "abstract=True"]),
        ({"shard": -1, "abstract": True}, "shard=-1", "where a world is known"),
        ({"shard": 1, "data_axes": ["data"]}, ["data_axes", "'data'"], "shard"),
    ],
)
def test_refused(axes: dict[str, object], leaves: str | list[str], fix: str | list[str]) -> None:
    with raises(SpecError, leaves=leaves, fix=fix):
        fs.make_mesh(**axes)


def test_an_unknown_axis_is_named() -> None:
    with raises(SpecError, leaves="'tensor'", says="replicate, shard"):
        fs.make_mesh(replicate=2, shard=4, abstract=True).axis_size("tensor")
