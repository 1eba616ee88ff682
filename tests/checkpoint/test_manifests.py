"""Manifests: the chunks of all ranks are the whole of every leaf, each part once, however a mesh cuts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fnshard as fs
from fnshard import P
from fnshard.checkpoint.blocks import assigned, chunk_reads
from fnshard.checkpoint.manifest_file import Chunk, DataFile, Manifest, merged
from fnshard.checkpoint.state_leaves import LocalLeaf, RestoreTarget
from fnshard.layout.partition import Fused, block_shape
from fnshard.mesh import simulated_rank

FIELDS: dict[str, Any] = {
    "step": 0, "seed": 0, "mesh": {"axes": {"shard": 1}, "data_axes": ["shard"]}, "data": (), "specs": {},
    "config": None, "metrics": {}, "versions": {},
}  # fmt: skip
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


def part_of(leaf: LocalLeaf, mesh: fs.Mesh, rank: int) -> Any:
    """The leaf with the chunks that a rank writes, of a file of its own."""
    chunks, at = [], 8
    for start, part in leaf.parts(mesh) if assigned({"params/w": leaf}, mesh) else ():
        chunks.append(Chunk(start, tuple(part.shape), f"rank-{rank:05d}.safetensors", at, (0,)))
        at += part.nbytes
    return leaf.saved_as(chunks)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_chunks_are_every_part_once_and_ranks_read_their_own(layout: Any, tmp_path: Path) -> None:
    shape, spec = layout
    mesh = fs.make_mesh(replicate=2, shard=4, tensor=2, simulated=True)
    leaf = LocalLeaf(shape, spec, torch.empty(block_shape(shape, spec, mesh), device="meta"))
    parts = []
    for rank in range(mesh.size):
        with simulated_rank(rank):
            parts.append({"params/w": part_of(leaf, mesh, rank)})
    files = {f"rank-{rank:05d}.safetensors": DataFile(1 << 20, 8, 0) for rank in range(mesh.size)}
    Manifest(leaves=merged(parts), files=files, **FIELDS).write(tmp_path)
    found = Manifest.read(tmp_path)
    seen = np.zeros(shape, int)
    for chunk in found.leaves["params/w"].chunks:
        seen[tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))] += 1
    assert (seen == 1).all()
    target = RestoreTarget(shape, spec, leaf.block, "params/w")
    for rank in range(mesh.size):
        with simulated_rank(rank):
            read = sum(read.target.numel() for read in chunk_reads({"params/w": target}, found, mesh))
            assert read == sum(part.numel() for _, part in leaf.parts(mesh))


def test_ranks_that_hold_different_states_are_told() -> None:
    leaf = LocalLeaf((4,), P(), torch.ones(4))
    whole = leaf.saved_as([Chunk((0,), (4,), "rank-00000.safetensors", 8, (0,))])
    other = LocalLeaf((4,), P("shard"), torch.ones(4)).saved_as()
    for parts in ([{"a": whole}, {"a": other}], [{"a": whole}, {"a": whole, "b": whole}], [{"a": other}]):
        with pytest.raises(ValueError, match=r"ranks hold different states: [ab]"):
            merged(parts)
