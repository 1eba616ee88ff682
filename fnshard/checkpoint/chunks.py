"""Chunks: where the parts of a saved leaf lie, as columns: thousands of ranks write millions of parts.

A mesh cuts a tensor into a grid: along each dim into slabs. So of a part only its place in the grid, its file
and its checksums are needed, and a regular grid over ranks that wrote alike is a few numbers and a CRC-32 a
part: `Grid`, what a manifest holds.
"""

from __future__ import annotations

import base64
import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fnshard.runtime.files import tensorfile
from fnshard.runtime.files.json_reader import Count

# (start, step, count): an arithmetic progression.
Run = tuple[Annotated[int, range(-(1 << 63), 1 << 63)], ...]


@dataclass(frozen=True)
class DataFile:
    """Sizes of a data file and of its header, and the header's CRC-32."""

    bytes: Count
    header_bytes: Count
    header_crc32: Count


@dataclass(frozen=True, eq=False)
class Files:
    """The data files of a checkpoint, by number: names, and where their data begin; int64."""

    names: tuple[str, ...]
    data: np.ndarray

    @staticmethod
    def of(files: Mapping[str, DataFile]) -> Files:
        """In the manifest's order."""
        return Files(tuple(files), np.array([file.header_bytes for file in files.values()], np.int64))


@dataclass(frozen=True)
class Chunk:
    """A box of a leaf: where it lies in the leaf, in which file from which byte, checksums by block."""

    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    at: Count
    crc32: tuple[Count, ...]


@dataclass(frozen=True)
class Grid:
    """`Chunks` as JSON has them, row-major.

    Args:
        cuts: of each dim, where its slabs end, in runs.
        file: the file of each part, as a number in the order of the manifest's, in runs.
        at: its first byte among the data there, in runs.
        crc32: little-endian 32-bit checksums of all parts, one for each block, as base64.
    """

    cuts: tuple[tuple[Run, ...], ...]
    file: tuple[Run, ...]
    at: tuple[Run, ...]
    crc32: str


@dataclass(frozen=True, eq=False)
class Chunks(Sequence[Chunk]):
    """The parts of one leaf, row-major: each part of the tensor once. An empty tensor has none.

    Args:
        ends: of each dim, where its slabs end; int64.
        file: the number of each part's file; int64 [parts].
        at: its first byte there; int64 [parts].
        crc32: checksums of all parts; uint32.
        itemsize: bytes of an element.
        files: the checkpoint's.
    """

    ends: tuple[np.ndarray, ...]
    file: np.ndarray
    at: np.ndarray
    crc32: np.ndarray
    itemsize: int
    files: Files

    def __post_init__(self) -> None:
        blocks = blocks_of(self.bytes)
        object.__setattr__(self, "_sums", np.concatenate([[0], np.cumsum(blocks)]))
        if self._sums[-1] != len(self.crc32):
            raise ValueError(f"{len(self.crc32)} checksums of {self._sums[-1]} blocks")

    @property
    def bytes(self) -> np.ndarray:
        """Of each part's data; int64 [parts]."""
        return sizes_of(self.ends) * self.itemsize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunks) and [*self] == [*other]

    __hash__ = None

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, part: int) -> Chunk:
        place, slabs = range(len(self))[part], []
        for ends in reversed(self.ends):
            place, slab = divmod(place, len(ends))
            slabs.insert(0, (int(ends[slab - 1]) if slab else 0, int(ends[slab])))
        sums = self.crc32[self._sums[part] : self._sums[part + 1]]
        return Chunk(
            tuple(start for start, _ in slabs),
            tuple(end - start for start, end in slabs),
            self.files.names[self.file[part]],
            int(self.at[part]),
            tuple(sums.tolist()),
        )

    def overlapping(self, start: Sequence[int], shape: Sequence[int]) -> Iterator[Chunk]:
        """The parts that a box touches."""
        dims = []
        for low, size, ends in zip(start, shape, self.ends, strict=True):
            first = np.searchsorted(ends, low, "right")
            dims.append(range(first, np.searchsorted(ends, low + size, "left") + 1 if size else first))
        for slabs in itertools.product(*dims):
            part = 0
            for slab, ends in zip(slabs, self.ends, strict=True):
                part = part * len(ends) + int(slab)
            yield self[part]

    def in_file(self, number: int) -> Iterator[Chunk]:
        """The parts that lie in the file of this number."""
        return (self[int(part)] for part in np.flatnonzero(self.file == number))

    def grid(self) -> Grid:
        """The inverse of `of_grid`."""
        cuts = tuple(map(runs_of, self.ends))
        sums = base64.b64encode(self.crc32.astype("<u4").tobytes()).decode()
        at = self.at - self.files.data[self.file]
        return Grid(cuts, runs_of(self.file), runs_of(at), sums)

    @staticmethod
    def of_grid(shape: Sequence[int], grid: Grid, itemsize: int, files: Files) -> Chunks:
        """Of a manifest, which is not to be believed.

        Raises:
            ValueError: it is no grid of a tensor of this shape; no more memory is taken than `crc32` is long.
        """
        crc32 = np.frombuffer(base64.b64decode(grid.crc32, validate=True), "<u4")
        if len(grid.cuts) != len(shape):
            raise ValueError(f"cuts of {len(grid.cuts)} dims")
        ends = tuple(_of_runs(runs, len(crc32)) for runs in grid.cuts)
        parts, empty = math.prod(map(len, ends)), 0 in shape
        if parts > len(crc32):
            raise ValueError(f"{parts} parts of {len(crc32)} checksums")
        for size, cut in zip(shape, ends, strict=True):
            fits = len(cut) and cut[-1] == size and (np.diff(cut, prepend=0) > 0).all()
            if len(cut) if empty else not fits:
                raise ValueError(f"its cuts are not those of a dim of {size}")
        file, at = (_of_runs(runs, parts) for runs in (grid.file, grid.at))
        if not len(file) == len(at) == parts:
            raise ValueError(f"{len(file)} files and {len(at)} places of {parts} parts")
        if parts and not 0 <= file.min() <= file.max() < len(files.names):
            raise ValueError("a file that is not there")
        return Chunks(ends, file, at + files.data[file], crc32, itemsize, files)

    @staticmethod
    def of(shape: Sequence[int], chunks: Sequence[Chunk], itemsize: int, files: Files) -> Chunks:
        """Of a list in any order.

        Raises:
            ValueError: they are not the whole tensor, each part of it once; or of other files.
        """
        if any(not len(c.offset) == len(c.shape) == len(shape) for c in chunks):
            raise ValueError("chunks of other dims")
        places = (len(chunks), len(shape))
        starts, sizes = (
            np.array(each, np.int64).reshape(places)
            for each in ([c.offset for c in chunks], [c.shape for c in chunks])
        )
        ends, order = ordered(shape, starts, sizes)
        numbers = {name: n for n, name in enumerate(files.names)}
        here = [chunks[n] for n in order]
        if not numbers.keys() >= {c.file for c in here}:
            raise ValueError("a file that is not there")
        made = Chunks(
            ends,
            np.array([numbers[c.file] for c in here], np.int64),
            np.array([c.at for c in here], np.int64),
            np.array([crc for c in here for crc in c.crc32], np.uint32),
            itemsize,
            files,
        )
        if [len(c.crc32) for c in here] != np.diff(made._sums).tolist():
            raise ValueError("checksums of other blocks")
        return made


def blocks_of(sizes: np.ndarray) -> np.ndarray:
    """How many blocks, each with a checksum, so many bytes are."""
    return -(-sizes // tensorfile.BLOCK_bytes)


def sizes_of(ends: Sequence[np.ndarray]) -> np.ndarray:
    """Elements of each part of a grid, row-major; int64 [parts]."""
    sizes = np.ones(1, np.int64)
    for cut in ends:
        sizes = np.multiply.outer(sizes, np.diff(cut, prepend=0)).reshape(-1)
    return sizes


def ordered(
    shape: Sequence[int], starts: np.ndarray, sizes: np.ndarray
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Where the slabs of each dim end, and the order of boxes in which they are row-major.

    Args:
        starts, sizes: of the boxes; int64 [boxes, dims].

    Raises:
        ValueError: they are not the whole tensor, each part of it once, as meshes cut.

    >>> ends, order = ordered((3,), np.array([[2], [0]]), np.array([[1], [2]]))
    >>> ends[0].tolist(), order.tolist()
    ([2, 3], [1, 0])
    """
    none = np.zeros(0, np.int64)
    if 0 in shape and not len(starts):
        return (none,) * len(shape), none
    place, ends, stops = np.zeros(len(starts), np.int64), list[np.ndarray](), starts + sizes
    for dim, size in enumerate(shape):
        cut = np.unique(stops[:, dim])
        slab = np.searchsorted(cut, stops[:, dim])
        begins = np.concatenate([[0], cut[:-1]])
        ends.append(cut)
        fits = len(cut) and cut[-1] == size and (begins[slab] == starts[:, dim]).all()
        if not fits or (sizes[:, dim] <= 0).any() or math.prod(map(len, ends)) > len(starts):
            raise ValueError("its chunks are not the whole of it, each part once")
        place = place * len(cut) + slab
    order = np.argsort(place)
    if math.prod(map(len, ends)) != len(starts) or (place[order] != np.arange(len(starts))).any():
        raise ValueError("its chunks are not the whole of it, each part once")
    return tuple(ends), order


def runs_of(values: np.ndarray) -> tuple[Run, ...]:
    """Numbers as arithmetic progressions.

    >>> runs_of(np.array([3, 6, 9, 10]))
    ((3, 3, 3), (10, 0, 1))
    """
    steps, first, out = np.diff(values), 0, list[Run]()
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    while first < len(values):
        last = changes[bisect.bisect_right(changes, first)] if first < len(steps) else first
        out.append((int(values[first]), int(steps[first]) if last > first else 0, last - first + 1))
        first = last + 1
    return tuple(out)


def _of_runs(runs: Sequence[Run], most: int) -> np.ndarray:
    """The inverse of `runs_of`.

    Raises:
        ValueError: they are no runs of numbers from 0, or more than `most`.
    """
    out, total = [np.zeros(0, np.int64)], 0
    for start, step, count in runs:
        total += count
        last = start + step * (count - 1)
        if count < 1 or total > most or min(start, last) < 0 or max(start, last) >= 1 << 63:
            raise ValueError(f"{[start, step, count]} is no run of at most {most} numbers")
        if count == 1 and step:
            raise ValueError(f"{[start, step, count]} has a step to nowhere")
        out.append(np.arange(count, dtype=np.int64) * step + start)
    return np.concatenate(out)
