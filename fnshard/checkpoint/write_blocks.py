"""Writing the blocks of a checkpoint: one safetensors file a rank, every block once, and the manifest last.

Which rank writes what follows from layouts and mesh, so that no rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fnshard.checkpoint.coordination import all_ranks
from fnshard.checkpoint.manifest_file import Chunk, DataFile, Manifest, SavedLeaf, is_tiled
from fnshard.checkpoint.state_leaves import LocalLeaf
from fnshard.mesh import Mesh
from fnshard.runtime.files.folder import AtomicDirectory, data_file
from fnshard.runtime.files.tensorfile import TensorToWrite, write

Part = tuple[Mapping[str, SavedLeaf], Mapping[str, DataFile]]  # what one rank wrote


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

    def finish(parts: list[Part]) -> None:
        alike = all(position == positions[0] for position in positions)
        manifest = _manifest(leaves, parts, {**fields, "data": tuple(positions[:1] if alike else positions)})
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
    mine = {}
    for name, leaf in sorted(leaves.items(), key=lambda item: (-item[1].block.nbytes, item[0])):
        holders = mesh.group_ranks([axis for axis in mesh.names if axis not in leaf.layout.axes])
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


def _write(directory: AtomicDirectory, leaves: Mapping[str, LocalLeaf], mesh: Mesh) -> Part:
    """This rank's file, written, flushed and summed."""
    if not leaves:
        return {}, {}
    file, titles = data_file(mesh.rank), dict[str, list[tuple[str, tuple[int, ...], Tensor]]]()
    for name, leaf in leaves.items():
        titles[name] = [(_title(name, leaf, *part), *part) for part in leaf.parts(mesh)]
    done = write(
        directory.saving / file,
        [
            TensorToWrite(title, tuple(part.shape), part.dtype, lambda part=part: part)
            for parts in titles.values()
            for title, _, part in parts
        ],
    )
    written = {}
    for name, parts in titles.items():
        chunks = [Chunk(at, tuple(p.shape), file, done.at[t], done.crc32[t]) for t, at, p in parts]
        written[name] = leaves[name].saved_as(chunks)
    return written, {file: DataFile(done.bytes, done.header_bytes, done.header_crc32)}


def _title(name: str, leaf: LocalLeaf, start: tuple[int, ...], part: Tensor) -> str:
    """The name in the file: a box that is not the full leaf says where it begins."""
    return name if part.shape == leaf.shape else f"{name}@{','.join(map(str, start))}"


def _manifest(leaves: Mapping[str, LocalLeaf], parts: list[Part], fields: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks wrote.

    Raises:
        ValueError: the blocks of some leaf are not the full leaf, as ranks hold states of different layouts.
    """
    expected = {name: leaf.saved_as() for name, leaf in leaves.items()}
    chunks: dict[str, list[Chunk]] = {name: [] for name in leaves}
    files: dict[str, DataFile] = {}
    wrong = set()
    for written, of_rank in parts:
        files |= of_rank
        for name, leaf in written.items():
            if expected.get(name) != replace(leaf, chunks=()):
                wrong.add(name)
            else:
                chunks[name] += leaf.chunks
    wrong |= {name for name, leaf in leaves.items() if not is_tiled(leaf.shape, chunks[name])}
    if wrong:
        raise ValueError(f"ranks hold different states: {', '.join(sorted(wrong)[:20])}")
    saved = {name: leaf.saved_as(chunks[name]) for name, leaf in leaves.items()}
    return Manifest(leaves=saved, files=files, **fields)
