"""Blocks: write a checkpoint's blocks once, to one safetensors file a rank, and read them onto any mesh.

Layouts and mesh determine which rank writes a block, so that no rank has to ask another. The manifest is
written last. A rank reads what overlaps its own blocks and nothing else, whatever mesh the checkpoint was
saved on. No byte reaches a tensor before its checksum is compared.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnshard.checkpoint.manifest_file import Chunk, DataFile, Manifest, SavedLeaf, merge_leaves
from fnshard.checkpoint.state_leaves import LocalLeaf, RestoreTarget, some_of
from fnshard.layout.partition import P
from fnshard.mesh import PIPELINE, Mesh
from fnshard.runtime.coordination import run_on_all
from fnshard.runtime.files.folder import AtomicDirectory, data_file
from fnshard.runtime.files.tensorfile import (
    BLOCK_BYTES,
    PASSING,
    STATE_DTYPES,
    Corrupt,
    TensorToWrite,
    open_regular,
    read_and_check,
    read_exactly,
    write,
)

READERS = 4  # the threads of a restore, so that the disk, checksums and the kernel's page faults overlap


def save_blocks(
    directory: AtomicDirectory,
    leaves: Mapping[str, LocalLeaf],
    mesh: Mesh,
    group: Any,
    fields: Mapping[str, Any],
    data: Any,
) -> None:
    """Write this rank's leaves into a directory, and commit it when all ranks have written theirs.

    It is a collective that fails on all ranks, if it fails on any.

    Args:
        leaves: the leaves by name.
        fields: fields of the manifest that are known from the start, the same on all ranks.
        data: this rank's position in the data, as JSON.
    """
    # Only rank 0 runs `begin` and `finish`, on what all ranks return.
    positions: list[Any] = []

    def begin(states: list[tuple[int, Any]]) -> None:
        steps = [step for step, _ in states]
        if len(set(steps)) > 1:
            raise ValueError(f"ranks save states of different steps: {steps}")
        positions.extend(position for _, position in states)
        directory.begin()

    def finish(written: list[tuple[DataFile | None, dict[str, SavedLeaf]]]) -> None:
        # Where all ranks are at the same position, it is saved once, and fits a mesh of any size.
        alike = all(position == positions[0] for position in positions)
        files = {data_file(rank): file for rank, (file, _) in enumerate(written) if file is not None}
        saved = merge_leaves([leaves for _, leaves in written], [mesh.stage_of(r) for r in range(mesh.size)])
        data = tuple(positions[:1] if alike else positions)
        Manifest(leaves=saved, files=files, data=data, **fields).write(directory.saving)
        directory.commit()

    run_on_all(group, lambda: (fields["step"], data), begin)
    run_on_all(group, lambda: _write_rank(directory, leaves, mesh), finish)


def assign_leaves(leaves: Mapping[str, LocalLeaf], mesh: Mesh) -> dict[str, LocalLeaf]:
    """Return the leaves whose block this rank writes.

    Of the ranks that have a block, the least loaded one writes it.

    >>> import torch
    >>> from fnshard import P, make_mesh
    >>> leaves = {name: LocalLeaf((4,), P(), torch.ones(4)) for name in "abcd"}
    >>> list(assign_leaves(leaves, make_mesh(replicate=2, abstract=True)))
    ['a', 'c']
    """
    # Ranks that hold the same blocks are a group. Every rank assigns the leaves of all, in the same order.
    loads: dict[tuple[int, ...], dict[int, int]] = {}  # the bytes of each rank of a group so far
    groups: dict[tuple[P, bool], tuple[int, ...]] = {}
    mine = {}
    # The largest leaves come first, so that the small ones that follow even out the loads. A rank counts its
    # padding too: sizes are then equal on all ranks, and so all compute the same assignment.
    for name, leaf in sorted(leaves.items(), key=lambda item: (-item[1].block.nbytes, item[0])):
        kind = leaf.layout, leaf.on_all_stages
        if kind not in groups:
            splitting = set(leaf.layout.axes)
            if not leaf.on_all_stages:
                splitting.add(PIPELINE)
            groups[kind] = mesh.group_ranks([a for a in mesh.names if a not in splitting])
        holders = groups[kind]
        load = loads.setdefault(holders, dict.fromkeys(holders, 0))
        rank = min(holders, key=load.__getitem__)
        load[rank] += leaf.block.nbytes
        if mesh.rank == rank and leaf.parts(mesh):
            mine[name] = leaf
    return mine


def _write_rank(
    directory: AtomicDirectory, leaves: Mapping[str, LocalLeaf], mesh: Mesh
) -> tuple[DataFile | None, dict[str, SavedLeaf]]:
    """Write this rank's file.

    Returns:
        The file, None if the rank has nothing to write; and all leaves, each with its chunks in the file.
    """
    mine = assign_leaves(leaves, mesh)
    file, chunks = write_blocks(directory.saving, mine, mesh) if mine else (None, {})
    return file, {name: leaf.to_saved(chunks.get(name, ())) for name, leaf in leaves.items()}


def write_blocks(
    folder: Path, mine: Mapping[str, LocalLeaf], mesh: Mesh
) -> tuple[DataFile, dict[str, list[Chunk]]]:
    """Write leaves to this rank's file, flushed and with checksums; return it and each leaf's chunks."""
    parts = [(name, leaf, *part) for name, leaf in mine.items() for part in leaf.parts(mesh)]

    # The name of a box in the file says where it begins, unless it is the full leaf.
    titles = [
        name if part.shape == leaf.shape else f"{name}@{','.join(map(str, start))}"
        for name, leaf, start, part in parts
    ]

    entries = [
        TensorToWrite(title, tuple(part.shape), part.dtype, lambda part=part: part)
        for title, (_, _, _, part) in zip(titles, parts, strict=True)
    ]

    # Write them, and describe each box as a chunk of its leaf.
    file = data_file(mesh.rank)
    done = write(folder / file, entries)
    chunks: dict[str, list[Chunk]] = {}
    for title, (name, _, start, part) in zip(titles, parts, strict=True):
        chunk = Chunk(start, tuple(part.shape), file, done.at[title], done.crc32[title])
        chunks.setdefault(name, []).append(chunk)
    return DataFile(done.bytes, done.header_bytes, done.header_crc32), chunks


@dataclass(frozen=True)
class ChunkRead:
    """A box of a saved chunk, and the tensor of the same shape that it fills.

    Args:
        leaf: the name of the saved leaf.
        dtype: the dtype that it was saved in.
        start: where the box begins in the chunk.
    """

    leaf: str
    chunk: Chunk
    dtype: torch.dtype
    start: tuple[int, ...]
    target: Tensor


def load_blocks(
    folder: Path, manifest: Manifest, targets: Mapping[str, RestoreTarget], mesh: Mesh, group: object
) -> None:
    """Fill this rank's leaves from a checkpoint of any mesh.

    It is a collective that fails on all ranks, if it fails on any.
    """

    def fill() -> None:
        if wrong := find_problems(folder, manifest, chunk_reads(targets, manifest, mesh)):
            raise Corrupt("; ".join(some_of(wrong)))

    run_on_all(group, fill)


def chunk_reads(targets: Mapping[str, RestoreTarget], manifest: Manifest, mesh: Mesh) -> Iterator[ChunkRead]:
    """Yield what this rank reads: the overlap of each saved chunk with its own boxes."""
    for target in targets.values():
        saved = manifest.leaves[target.source]
        dtype = STATE_DTYPES[saved.dtype]
        for offset, part in target.parts(mesh):
            for chunk in saved.chunks:
                # The box of the full tensor that both have in common, which may be empty.
                low = [max(pair) for pair in zip(offset, chunk.offset, strict=True)]
                ends = zip(offset, part.shape, chunk.offset, chunk.shape, strict=True)
                high = [min(a + n, b + m) for a, n, b, m in ends]
                if any(first >= last for first, last in zip(low, high, strict=True)):
                    continue

                # The same box as a view of this rank's block, and where it begins in the chunk.
                view = part
                for dim, (first, last) in enumerate(zip(low, high, strict=True)):
                    view = view.narrow(dim, first - offset[dim], last - first)
                start = tuple(a - b for a, b in zip(low, chunk.offset, strict=True))
                yield ChunkRead(target.source, chunk, dtype, start, view)


def all_chunks(manifest: Manifest) -> Iterator[ChunkRead]:
    """Yield reads of every byte, a block at a time, that fill nothing and only compare checksums."""
    for name, leaf in manifest.leaves.items():
        for chunk in leaf.chunks:
            size = leaf.chunk_bytes(chunk)
            # Read as bytes, a chunk may be cut anywhere, and no more than a block of it is in memory.
            flat = replace(chunk, shape=(size,))
            for start in range(0, size, BLOCK_BYTES):
                discarded = torch.empty(min(BLOCK_BYTES, size - start), dtype=torch.uint8, device="meta")
                yield ChunkRead(name, flat, torch.uint8, (start,), discarded)


def find_problems(folder: Path, manifest: Manifest, reads: Iterable[ChunkRead]) -> list[str]:
    """Read file by file, in the order of bytes, and return all that is corrupt."""
    # Sort by position, so that the threads read a file from its beginning to its end.
    wrong, by_file = [], dict[str, list[ChunkRead]]()
    for read in sorted(reads, key=lambda r: r.chunk.at):
        by_file.setdefault(read.chunk.file, []).append(read)
    with ThreadPoolExecutor(READERS) as readers:
        for name, file_reads in by_file.items():
            try:
                fd = open_and_check(folder, name, manifest.files[name])
            except Corrupt as error:
                wrong.append(str(error))
                continue
            try:
                # The threads can share a descriptor, since each read names its own position in the file.
                problems = readers.map(partial(_fill_or_explain, fd), file_reads)
                wrong += [f"{name}, {problem}" for problem in problems if problem]
            finally:
                os.close(fd)
    return wrong


def _fill_or_explain(fd: int, read: ChunkRead) -> str:
    """Fill one target; return what is wrong with the bytes, or ""."""
    try:
        fill_chunk(fd, read)
    except (Corrupt, OSError) as error:
        # Errors that may pass, such as too many open files, say nothing about the bytes.
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        return f"{read.leaf}: {error}"
    return ""


def fill_chunk(fd: int, read: ChunkRead) -> None:
    """Read the rows of a chunk that a box touches, and copy the box out of them."""
    chunk, target, dtype = read.chunk, read.target, read.dtype
    # Only the first dim is cut in the file, where rows are contiguous; the other dims are cut in memory. A
    # scalar is one row.
    first, rows, row = 0, (), 1
    if chunk.shape:
        first, rows = read.start[0], (target.shape[0], *chunk.shape[1:])
        row = math.prod(chunk.shape[1:])
    size = math.prod(chunk.shape) * dtype.itemsize

    # Whole rows that need no cast are read into the target itself, without a copy.
    is_plain = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
    in_place = is_plain and tuple(target.shape) == rows
    buffer = target if in_place else torch.empty(rows, dtype=dtype)
    out = memoryview(buffer.view(-1).view(torch.uint8).numpy())
    read_and_check(fd, chunk.at, size, chunk.crc32, first * row * dtype.itemsize, out)
    if not in_place:
        for dim in range(1, len(rows)):
            buffer = buffer.narrow(dim, read.start[dim], target.shape[dim])
        target.copy_(buffer)


def open_and_check(folder: Path, name: str, file: DataFile) -> int:
    """Open a data file, check its length and header, and return its descriptor.

    Raises:
        Corrupt: they are not what was written.
    """
    fd = open_regular(folder, name, file.bytes)
    try:
        head = bytearray(min(file.header_bytes, file.bytes))
        read_exactly(fd, 0, memoryview(head))
        if zlib.crc32(head) != file.header_crc32:
            raise Corrupt(f"{name}: its header is not what was written (checksum differs)")
    except BaseException:
        os.close(fd)
        raise
    return fd
