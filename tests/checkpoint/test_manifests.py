"""Manifests of many ranks: no work in Python for each part of each leaf, and a few bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fnshard as fs
from fnshard import P
from fnshard.checkpoint.chunks import Chunk, Chunks, DataFile, runs_of
from fnshard.checkpoint.manifest_file import NAME, Manifest
from fnshard.checkpoint.read_blocks import chunk_reads
from fnshard.checkpoint.state_leaves import LocalLeaf, RestoreTarget
from fnshard.checkpoint.write_blocks import assigned
from fnshard.checkpoint.written import Written, manifest_of
from fnshard.layout.partition import Fused, block_shape, boxes
from fnshard.mesh import simulated_rank
from fnshard.runtime.files.folder import data_file
from fnshard.runtime.files.tensorfile import TensorToWrite, file_layout

FIELDS: dict[str, Any] = {
    "step": 0, "seed": 0, "mesh": {"axes": {"shard": 1}, "data_axes": ["shard"]}, "data": (), "specs": {},
    "config": None, "metrics": {}, "versions": {},
}  # fmt: skip


def leaves_of(ranks: int, number: int) -> dict[str, LocalLeaf]:
    """Matrices whose last block is shorter, each rank having a part."""
    layout, mesh = fs.P("shard"), fs.make_mesh(shard=ranks, simulated=True)
    out = {}
    for n in range(number):
        shape = (ranks * (n % 7 + 2) - n % 2, 8)
        block = torch.empty(block_shape(shape, layout, mesh), device="meta")
        out[f"params/blocks.{n // 10}.matrix_{n % 10}.weight"] = LocalLeaf(shape, layout, block)
    return out


def written(leaves: dict[str, LocalLeaf], mesh: fs.Mesh, rank: int) -> Written:
    """What this rank plans to write, and would send."""
    with simulated_rank(rank):
        boxes = [
            (f"{name}@{start}", name, leaf, start, tuple(part.shape))
            for name, leaf in assigned(leaves, mesh).items()
            for start, part in leaf.parts(mesh)
        ]
    entries = [TensorToWrite(title, shape, torch.float32) for title, *_, shape in boxes]
    head, at = file_layout(entries)
    file = data_file(rank)
    chunks = [
        (name, leaf.saved_as(), Chunk(start, shape, file, at[title], (hash((rank, title)) & 0xFFFFFFFF,)))
        for title, name, leaf, start, shape in boxes
    ]
    size = len(head) + sum(entry.bytes for entry in entries)
    return Written.of(file, DataFile(size, len(head), 0), chunks)


def saved(leaves: dict[str, LocalLeaf], mesh: fs.Mesh, folder: Path) -> Manifest:
    parts = [written(leaves, mesh, rank) for rank in range(mesh.size)]
    return made(leaves, parts, folder)


def made(leaves: dict[str, LocalLeaf], parts: Any, folder: Path) -> Manifest:
    folder.mkdir()
    manifest_of({n: leaf.saved_as() for n, leaf in leaves.items()}, parts, FIELDS).write(folder)
    return Manifest.read(folder)


def work(ranks: int, number: int, folder: Path) -> tuple[int, int]:
    """Calls of rank 0, of Python's functions and C's, and bytes of the manifest."""
    leaves, mesh = leaves_of(ranks, number), fs.make_mesh(shard=ranks, simulated=True)
    parts, calls = [written(leaves, mesh, rank) for rank in range(ranks)], 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = made(leaves, parts, folder)
        targets = {n: RestoreTarget(v.shape, v.layout, v.block, n) for n, v in leaves.items()}
        assert len(list(chunk_reads(targets, found, mesh))) == number
    finally:
        sys.setprofile(None)
    return calls, (folder / NAME).stat().st_size


def test_nothing_is_done_for_each_part_of_each_leaf(tmp_path: Path) -> None:
    """What grows with ranks times leaves is one checksum."""
    ranks, leaves = (16, 64), (5, 20)
    work(2, 1, tmp_path / "first")  # makes readers, imports
    done = {(r, n): work(r, n, tmp_path / f"{r}-{n}") for r in ranks for n in leaves}
    calls, size = (done[64, 20][i] - done[64, 5][i] - done[16, 20][i] + done[16, 5][i] for i in range(2))
    parts = (64 - 16) * (20 - 5)
    assert calls < parts / 2 and size < 6 * parts


LAYOUTS = {
    "rows": ((37, 3), P("shard")),
    "both dims": ((8, 12), P("shard", "tensor")),
    "one dim": ((23,), P(("tensor", "shard"))),
    "replicated": ((5, 2), P()),
    "a number": ((), P()),
    "nothing": ((0, 4), P("shard")),
    "fewer rows than ranks": ((2, 5), P("shard")),
    "fused": ((24, 2), P((Fused("tensor", 3), "shard"))),
    "fused, unevenly": ((18, 2), P((Fused("tensor", 3), "shard"))),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_grid_names_every_part_and_finds_what_a_box_touches(layout: Any, tmp_path: Path) -> None:
    shape, spec = layout
    mesh = fs.make_mesh(replicate=2, shard=4, tensor=2, simulated=True)
    leaf = LocalLeaf(shape, spec, torch.empty(block_shape(shape, spec, mesh), device="meta"))
    found = saved({"params/w": leaf}, mesh, tmp_path / "1").leaves["params/w"].chunks
    seen = np.zeros(shape, int)
    for chunk in found:
        seen[tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))] += 1
    assert (seen == 1).all()
    for rank in range(mesh.size):
        with simulated_rank(rank):
            for where, _ in boxes(shape, spec, mesh):
                start, sizes = [s.start for s in where], [s.stop - s.start for s in where]
                touched = {
                    c.offset
                    for c in found
                    if all(
                        o < s + n and s < o + m
                        for o, m, s, n in zip(c.offset, c.shape, start, sizes, strict=True)
                    )
                }
                assert {c.offset for c in found.overlapping(start, sizes)} == touched
    assert isinstance(found, Chunks) and len(runs_of(found.at)) <= len(found)
