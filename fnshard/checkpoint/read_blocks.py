"""Reading the blocks of a checkpoint: the parts of saved chunks that a rank needs, checked as they are read.

A rank reads what overlaps its own blocks and nothing else, whatever mesh the checkpoint was saved on. No byte
reaches a tensor before its checksum is compared.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fnshard.checkpoint.chunks import Chunk, DataFile
from fnshard.checkpoint.coordination import all_ranks
from fnshard.checkpoint.manifest_file import Manifest
from fnshard.checkpoint.state_leaves import RestoreTarget
from fnshard.mesh import Mesh
from fnshard.runtime.files.tensorfile import (
    PASSING,
    STATE_DTYPES,
    BLOCK_bytes,
    Corrupt,
    open_regular,
    read_checked,
    read_exactly,
)

READERS = 4  # threads of a restore: the disk, the checksums and the kernel's page faults overlap
SHOWN = 20  # causes that one error names


@dataclass(frozen=True)
class ChunkRead:
    """A box of a saved chunk, and the tensor of the same shape that it fills.

    `leaf` is the saved leaf's name, `dtype` the saved one, `start` where the box begins in the chunk.
    """

    leaf: str
    chunk: Chunk
    dtype: torch.dtype
    start: tuple[int, ...]
    target: Tensor


def load_blocks(
    folder: Path, manifest: Manifest, targets: Mapping[str, RestoreTarget], mesh: Mesh, group: object
) -> None:
    """Fill this rank's leaves from a checkpoint of any mesh. A collective.

    Raises:
        Failed: on all ranks, if it failed on any.
        CollectiveError: a peer died, or did not answer in time.
    """
    all_ranks(group, lambda: _read_all(folder, manifest, list(chunk_reads(targets, manifest, mesh))))


def chunk_reads(targets: Mapping[str, RestoreTarget], manifest: Manifest, mesh: Mesh) -> Iterator[ChunkRead]:
    """What this rank reads: the overlap of each saved chunk with its own boxes."""
    for target in targets.values():
        saved = manifest.leaves[target.source]
        dtype = STATE_DTYPES[saved.dtype]
        for offset, part in target.parts(mesh):
            for chunk in saved.chunks.overlapping(offset, part.shape):
                low = [max(pair) for pair in zip(offset, chunk.offset, strict=True)]
                ends = zip(offset, part.shape, chunk.offset, chunk.shape, strict=True)
                high = [min(a + n, b + m) for a, n, b, m in ends]
                view = part
                for dim, (first, last) in enumerate(zip(low, high, strict=True)):
                    view = view.narrow(dim, first - offset[dim], last - first)
                start = tuple(a - b for a, b in zip(low, chunk.offset, strict=True))
                yield ChunkRead(target.source, chunk, dtype, start, view)


def _read_all(folder: Path, manifest: Manifest, reads: list[ChunkRead]) -> None:
    """Read file by file in the order of their bytes; the error names all that is corrupt."""
    wrong, by_file = [], dict[str, list[ChunkRead]]()
    for read in sorted(reads, key=lambda r: r.chunk.at):
        by_file.setdefault(read.chunk.file, []).append(read)
    with ThreadPoolExecutor(READERS) as readers:
        for name, of_file in by_file.items():
            try:
                fd = open_checked(folder, name, manifest.files[name])
            except Corrupt as error:
                wrong.append(str(error))
                continue
            try:
                problems = readers.map(partial(_problem_of, fd), of_file)
                wrong += [f"{name}, {problem}" for problem in problems if problem]
            finally:
                os.close(fd)
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] * (len(wrong) > SHOWN)
        raise Corrupt("; ".join(wrong[:SHOWN] + more))


def _problem_of(fd: int, read: ChunkRead) -> str:
    """Fill one target; empty, or what is wrong with the bytes."""
    try:
        _fill(fd, read)
    except (Corrupt, OSError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        return f"{read.leaf}: {error}"
    return ""


def _fill(fd: int, read: ChunkRead) -> None:
    """Read the rows of a chunk that a box touches, and copy the box out of them."""
    chunk, target, dtype = read.chunk, read.target, read.dtype
    first, rows, row = 0, (), 1
    if chunk.shape:
        first, rows = read.start[0], (target.shape[0], *chunk.shape[1:])
        row = math.prod(chunk.shape[1:])
    size = math.prod(chunk.shape) * dtype.itemsize
    same = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
    in_place = same and tuple(target.shape) == rows
    buffer = target if in_place else torch.empty(rows, dtype=dtype)
    out = memoryview(buffer.view(-1).view(torch.uint8).numpy())
    read_checked(fd, chunk.at, size, chunk.crc32, first * row * dtype.itemsize, out)
    if not in_place:
        for dim in range(1, len(rows)):
            buffer = buffer.narrow(dim, read.start[dim], target.shape[dim])
        target.copy_(buffer)


def open_checked(folder: Path, name: str, file: DataFile) -> int:
    """A file descriptor of a data file whose length and header are as they were written.

    Raises:
        Corrupt: they are not.
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


def verify_file(folder: Path, manifest: Manifest, name: str) -> list[str]:
    """What is wrong with a data file; every byte of it is read."""
    try:
        fd = open_checked(folder, name, manifest.files[name])
    except (Corrupt, OSError) as error:
        return [f"{name}: {error}" if isinstance(error, OSError) else str(error)]
    wrong, buffer, number = [], bytearray(BLOCK_bytes), list(manifest.files).index(name)
    try:
        for title, leaf in manifest.leaves.items():
            for chunk in leaf.chunks.in_file(number):
                size = math.prod(chunk.shape) * STATE_DTYPES[leaf.dtype].itemsize
                try:
                    for start in range(0, size, BLOCK_bytes):
                        out = memoryview(buffer)[: min(BLOCK_bytes, size - start)]
                        read_checked(fd, chunk.at, size, chunk.crc32, start, out)
                except (Corrupt, OSError) as error:
                    wrong.append(f"{name}, {title}: {error}")
    finally:
        os.close(fd)
    return wrong
