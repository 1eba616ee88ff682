"""Written: what each rank wrote, as columns that rank 0 gathers and makes a manifest of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fnshard.checkpoint.chunks import Chunk, Chunks, DataFile, Files, ordered
from fnshard.checkpoint.manifest_file import Manifest, SavedLeaf
from fnshard.runtime.files.tensorfile import STATE_DTYPES

SHOWN = 20  # leaves that an error names


@dataclass(frozen=True)
class Written:
    """One rank's file, and the chunks in it.

    Args:
        leaves: of each chunk its leaf, as `_key` has it; uint64 [chunks].
        starts, sizes: where it lies in the leaf; int64 [chunks, dims], as many dims as the leaf of most.
        at: where it begins in the file; int64 [chunks].
        blocks: how many checksums it has; int64 [chunks].
        crc32: of all chunks; uint32.
    """

    name: str
    file: DataFile
    leaves: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    at: np.ndarray
    blocks: np.ndarray
    crc32: np.ndarray

    @staticmethod
    def of(name: str, file: DataFile, chunks: Sequence[tuple[str, SavedLeaf, Chunk]]) -> Written:
        """Of (name of the leaf, the leaf, chunk)."""
        found = [chunk for *_, chunk in chunks]
        boxes = np.zeros((2, len(found), max((len(c.shape) for c in found), default=0)), np.int64)
        for row, chunk in enumerate(found):
            boxes[:, row, : len(chunk.shape)] = chunk.offset, chunk.shape
        return Written(
            name,
            file,
            np.array([_key(leaf, saved) for leaf, saved, _ in chunks], np.uint64),
            *boxes,
            np.array([chunk.at for chunk in found], np.int64),
            np.array([len(chunk.crc32) for chunk in found], np.int64),
            np.array([crc for chunk in found for crc in chunk.crc32], np.uint32),
        )


def _key(name: str, leaf: SavedLeaf) -> int:
    """The same on two ranks whose leaves of this name are alike."""
    text = repr((name, leaf.shape, leaf.dtype, leaf.spec)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def manifest_of(
    leaves: Mapping[str, SavedLeaf], written: Sequence[Written], fields: Mapping[str, Any]
) -> Manifest:
    """The manifest of what all ranks wrote; its time and memory are linear in the chunks.

    Args:
        leaves: rank 0's, without chunks.
        fields: of the manifest, beside leaves and files.

    Raises:
        ValueError: the blocks of some leaf are not the full leaf, as ranks hold states of different layouts.
    """
    files = {each.name: each.file for each in written if len(each.at)}
    table = _table([each for each in written if len(each.at)] or [Written.of("", DataFile(0, 0, 0), [])])
    numbered, found, wrong = Files.of(files), dict[str, SavedLeaf](), []
    for name, leaf in leaves.items():
        try:
            found[name] = replace(leaf, chunks=table.chunks(_key(name, leaf), leaf, numbered))
        except ValueError:
            wrong.append(name)
    if not wrong and sum(len(leaf.chunks) for leaf in found.values()) < len(table.leaves):
        wrong = ["some rank has leaves that rank 0 has not"]
    if wrong:
        raise ValueError(f"ranks hold different states: {', '.join(sorted(wrong)[:SHOWN])}")
    return Manifest(leaves=found, files=files, **fields)


@dataclass(frozen=True)
class _Table:
    """The columns of all ranks, and the number of each chunk's file, in the order of `leaves`; `sums`: where
    a chunk's checksums begin in `crc32`."""

    leaves: np.ndarray
    file: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    at: np.ndarray
    blocks: np.ndarray
    sums: np.ndarray
    crc32: np.ndarray

    def chunks(self, key: int, leaf: SavedLeaf, files: Files) -> Chunks:
        rows = slice(*(np.searchsorted(self.leaves, np.uint64(key), side) for side in ("left", "right")))
        dims = slice(len(leaf.shape))
        ends, order = ordered(leaf.shape, self.starts[rows, dims], self.sizes[rows, dims])
        blocks, sums = self.blocks[rows][order], self.sums[rows][order]
        before = np.cumsum(blocks) - blocks
        places = np.arange(blocks.sum()) + np.repeat(sums - before, blocks)
        return Chunks(
            ends,
            self.file[rows][order],
            self.at[rows][order],
            self.crc32[places],
            STATE_DTYPES[leaf.dtype].itemsize,
            files,
        )


def _table(written: Sequence[Written]) -> _Table:
    dims = max(each.starts.shape[1] for each in written)

    def column(name: str) -> np.ndarray:
        parts = [getattr(each, name) for each in written]
        return np.concatenate(
            [np.pad(p, ((0, 0), (0, dims - p.shape[1]))) if p.ndim > 1 else p for p in parts]
        )

    leaves, blocks = column("leaves"), column("blocks")
    order = np.argsort(leaves, kind="stable")
    file = np.repeat(np.arange(len(written)), [len(each.at) for each in written])
    starts, sizes, at = (column(name)[order] for name in ("starts", "sizes", "at"))
    sums = np.cumsum(blocks) - blocks
    return _Table(leaves[order], file[order], starts, sizes, at, blocks[order], sums[order], column("crc32"))
