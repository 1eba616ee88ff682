"""Writing the blocks of a checkpoint: one safetensors file a rank, every block once, and the manifest last.

Which rank writes what follows from layouts and mesh, so that no rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fnshard.checkpoint.chunks import Chunk, DataFile
from fnshard.checkpoint.coordination import all_ranks
from fnshard.checkpoint.state_leaves import LocalLeaf
from fnshard.checkpoint.written import Written, manifest_of
from fnshard.layout.partition import P
from fnshard.mesh import Mesh
from fnshard.runtime.files.folder import AtomicDirectory, data_file
from fnshard.runtime.files.tensorfile import TensorToWrite, write


def save_blocks(
    directory: AtomicDirectory,
    leaves: Mapping[str, LocalLeaf],
    mesh: Mesh,
    group: Any,
    fields: Mapping[str, Any],
    data: Any,
) -> None:
    """Write this rank's leaves into a directory; commit it when those of all ranks are there. A collective.

    Args:
        leaves: by name.
        fields: fields of the manifest that are known from the start, the same on all ranks.
        data: this rank's position in the data, as JSON.

    Raises:
        Failed: on all ranks, if it failed on any.
        CollectiveError: a peer died, or did not answer in time.
    """
    positions: list[Any] = []

    def begin(states: list[tuple[int, Any]]) -> None:
        steps = [step for step, _ in states]
        if len(set(steps)) > 1:
            raise ValueError(f"ranks save states of different steps: {steps}")
        positions.extend(position for _, position in states)
        directory.begin()

    def finish(written: list[Written | None]) -> None:
        alike = all(position == positions[0] for position in positions)
        data = tuple(positions[:1] if alike else positions)
        expected = {name: leaf.saved_as() for name, leaf in leaves.items()}
        manifest = manifest_of(expected, list(filter(None, written)), {**fields, "data": data})
        manifest.write(directory.saving)
        directory.commit()

    all_ranks(group, lambda: (fields["step"], data), begin)
    all_ranks(group, lambda: _write(directory, assigned(leaves, mesh), mesh), finish)


def assigned(leaves: Mapping[str, LocalLeaf], mesh: Mesh) -> dict[str, LocalLeaf]:
    """The leaves whose block this rank writes: one of the ranks that have a block does, the least loaded one.

    >>> import torch
    >>> from fnshard import P, make_mesh
    >>> leaves = {name: LocalLeaf((4,), P(), torch.ones(4)) for name in "abcd"}
    >>> list(assigned(leaves, make_mesh(replicate=2, abstract=True)))
    ['a', 'c']
    """
    return {name: leaves[name] for name in writers(leaves, mesh, [0] * mesh.size, 0)}


def writers(
    leaves: Mapping[str, LocalLeaf], mesh: Mesh, nodes: Sequence[int], copies: int
) -> dict[str, bool]:
    """The leaves whose block this rank writes, and of each whether ranks on `copies` other nodes, which have
    the block too, write it as well.

    Args:
        nodes: of each rank, the node it runs on.

    >>> import torch
    >>> from fnshard import P, make_mesh
    >>> leaves = {"a": LocalLeaf((4,), P(), torch.ones(4)), "b": LocalLeaf((4,), P("shard"), torch.ones(2))}
    >>> writers(leaves, make_mesh(shard=2, abstract=True), nodes=[0, 1], copies=1)
    {'a': True, 'b': False}
    """
    loads: dict[tuple[int, ...], dict[int, int]] = {}  # bytes of each rank of a group
    groups: dict[P, tuple[int, ...]] = {}
    mine = {}
    for name, leaf in sorted(leaves.items(), key=lambda item: (-item[1].block.nbytes, item[0])):
        if leaf.layout not in groups:
            groups[leaf.layout] = mesh.group_ranks([a for a in mesh.names if a not in leaf.layout.axes])
        holders = groups[leaf.layout]
        load = loads.setdefault(holders, dict.fromkeys(holders, 0))
        on_node: dict[int, int] = {}
        for rank in sorted(holders, key=load.__getitem__):
            on_node.setdefault(nodes[rank], rank)
        spread = len(on_node) > copies
        chosen = list(on_node.values())[: copies + 1 if spread else 1]
        for rank in chosen:
            load[rank] += leaf.block.nbytes
        if mesh.rank in chosen and leaf.parts(mesh):
            mine[name] = spread and copies > 0
    return mine


def _write(directory: AtomicDirectory, leaves: Mapping[str, LocalLeaf], mesh: Mesh) -> Written | None:
    """This rank's file, written, flushed and summed; None where it has nothing to write."""
    if not leaves:
        return None
    parts = [
        (name, leaf, _title(name, leaf, *part), *part)
        for name, leaf in leaves.items()
        for part in leaf.parts(mesh)
    ]
    file = data_file(mesh.rank)
    entries = [TensorToWrite(t, tuple(p.shape), p.dtype, lambda p=p: p) for _, _, t, _, p in parts]
    done = write(directory.saving / file, entries)
    chunks = [
        (name, leaf.saved_as(), Chunk(start, tuple(part.shape), file, done.at[title], done.crc32[title]))
        for name, leaf, title, start, part in parts
    ]
    return Written.of(file, DataFile(done.bytes, done.header_bytes, done.header_crc32), chunks)


def _title(name: str, leaf: LocalLeaf, start: tuple[int, ...], part: Tensor) -> str:
    """The name in the file: a box that is not the full leaf says where it begins."""
    return name if part.shape == leaf.shape else f"{name}@{','.join(map(str, start))}"
