"""Manifest: what a checkpoint holds, as JSON: written last, read first, sealed by a checksum.

`manifest.json` names every leaf (shape, dtype, spec, and where each chunk of it lies, with checksums) and
every file; `manifest.json.sha256` is what `sha256sum -c` reads. A file has the name that a rank gave it, or
none: nothing outside the directory is ever opened. Who writes a manifest and its seal can have wrong numbers
read, but not other files, nor more memory than the files are long.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fnshard.checkpoint.loader_state import decode
from fnshard.runtime.files.folder import DATA, flush_directory
from fnshard.runtime.files.json_reader import Count, from_json, reader
from fnshard.runtime.files.tensorfile import (
    STATE_DTYPES,
    BLOCK_bytes,
    Corrupt,
    HEADER_LIMIT_bytes,
    open_regular,
    read_exactly,
)

NAME, SEAL = "manifest.json", "manifest.json.sha256"
FORMAT = "fnshard checkpoint 1"
LIMIT_bytes = 2 << 30


@dataclass(frozen=True)
class Chunk:
    """A box of a leaf: where it lies in the leaf, in which file from which byte, checksums by block."""

    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    at: Count
    crc32: tuple[Count, ...]


@dataclass(frozen=True)
class SavedLeaf:
    """A full tensor: `params/<path>`, `optimizer/<path>/<slot>` or `loss_scale/<name>`. `dtype`: as
    safetensors files name it; `spec`: the `P` it was stored by."""

    shape: tuple[Count, ...]
    dtype: str
    spec: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DataFile:
    """Sizes of a data file and of its header, and the header's CRC-32."""

    bytes: Count
    header_bytes: Count
    header_crc32: Count


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its tensors.

    Args:
        step, seed: the state's.
        mesh: `{"axes": {name: size}, "data_axes": [...]}` it was saved on.
        leaves: by name.
        files: by name.
        specs: by path, each leaf's whole `LayoutSpec` as text, for people.
        data: position in the data, by rank; one entry where all ranks are alike.
        config: the resolved configuration, if any.
        metrics: numbers that came with the save.
        versions: of torch.
    """

    step: Count
    seed: Annotated[int, range(-(1 << 63), 1 << 63)]
    mesh: Mapping[str, Any]
    leaves: Mapping[str, SavedLeaf]
    files: Mapping[str, DataFile]
    specs: Mapping[str, str]
    data: tuple[Any, ...]
    config: Any
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        """The last of a checkpoint: the manifest, its seal, and all of the directory flushed to the disk."""
        text = json.dumps(vars(self), default=_fields, separators=(",", ":")).encode()
        for name, content in ((NAME, text), (SEAL, _seal(hashlib.sha256(text).hexdigest()))):
            with (folder / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        flush_directory(folder)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Of a checkpoint, checked against its seal and in itself; the data files are not looked at.

        Raises:
            Corrupt: says what is wrong with which file.
        """
        text = _content(folder, NAME, LIMIT_bytes, _content(folder, SEAL, 1 << 10))
        try:
            return _manifest(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise Corrupt(
                f"{NAME} is no manifest of a checkpoint ({type(error).__name__}: {error})"
            ) from error

    def check_files(self, folder: Path) -> None:
        """Look whether all data files are there, in full length.

        Raises:
            Corrupt: names every one that is not.
        """
        wrong = []
        for name, file in self.files.items():
            try:
                os.close(open_regular(folder, name, file.bytes))
            except Corrupt as error:
                wrong.append(str(error))
        if wrong:
            raise Corrupt("; ".join(wrong))


def _fields(value: Any) -> dict[str, Any]:
    """What JSON is to make of a dataclass of this file; `asdict` takes several times as long."""
    if not isinstance(value, Chunk | SavedLeaf | DataFile):
        raise TypeError(f"a manifest holds no {type(value).__name__}")
    return vars(value)


def _seal(digest: str) -> bytes:
    return f"{digest}  {NAME}\n".encode()


def _content(folder: Path, name: str, limit: int, seal: bytearray | None = None) -> bytearray:
    """All of a file; a sealed one is read into memory only if its seal fits."""
    fd = open_regular(folder, name)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise Corrupt(f"{name} is {size} bytes long")
        if seal is not None:
            with open(fd, "rb", buffering=0, closefd=False) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if seal != _seal(digest):
                raise Corrupt(f"{NAME} and {SEAL} do not belong together (checksum differs)")
        text = bytearray(size)
        read_exactly(fd, 0, memoryview(text))
        return text
    finally:
        os.close(fd)


# ------------------------------------------------------------------ from JSON, believing nothing


_read_manifest = reader(Manifest)  # made here: what reads files runs no code, not even annotations


def _manifest(values: Any) -> Manifest:
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']!r}, this is {FORMAT!r}")
    read = _read_manifest(values)
    for name, file in read.files.items():
        if not DATA.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a data file")
        if file.header_bytes > min(file.bytes, HEADER_LIMIT_bytes):
            raise ValueError(f"{name}: a header of {file.header_bytes} bytes")
    for name, leaf in read.leaves.items():
        _check_leaf(name, leaf, read.files)
    _check_apart(read.leaves, read.files)
    sizes = from_json(Mapping[str, Count], read.mesh["axes"])
    if not all(sizes.values()) or not set(from_json(list[str], read.mesh["data_axes"])) <= sizes.keys():
        raise ValueError(f"its mesh is {read.mesh}")
    for position in read.data:
        decode(position)
    return read


def _check_leaf(name: str, leaf: SavedLeaf, files: Mapping[str, DataFile]) -> None:
    shape, itemsize = leaf.shape, STATE_DTYPES[leaf.dtype].itemsize
    if len(shape) > 64 or math.prod(max(n, 1) for n in shape) * itemsize >= 1 << 63:
        raise ValueError(f"{name}: no tensor is {list(shape)}")
    for chunk in leaf.chunks:
        size = math.prod(chunk.shape) * itemsize
        ranks = len(chunk.offset) == len(chunk.shape) == len(shape)
        fits = chunk.at + size <= files[chunk.file].bytes and len(chunk.crc32) == -(-size // BLOCK_bytes)
        if not (ranks and fits):
            raise ValueError(f"{name}: a chunk {list(chunk.shape)} at {list(chunk.offset)} cannot be")
    if not is_tiled(shape, leaf.chunks):
        raise ValueError(f"{name}: its chunks are not the whole of it, each part once")


def is_tiled(shape: tuple[int, ...], chunks: Sequence[Chunk], dim: int = 0) -> bool:
    """Whether chunks cover a tensor without overlap, cut as meshes cut: into slabs along a dim, each of these
    along the next. An empty tensor has no chunks."""
    if 0 in shape:
        return not chunks
    if dim == len(shape):
        return len(chunks) == 1
    slabs: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        slabs.setdefault((chunk.offset[dim], chunk.shape[dim]), []).append(chunk)
    end = 0
    for (start, size), inside in sorted(slabs.items()):
        if start != end or not size or not is_tiled(shape, inside, dim + 1):
            return False
        end += size
    return end == shape[dim]


def _check_apart(leaves: Mapping[str, SavedLeaf], files: Mapping[str, DataFile]) -> None:
    """No two chunks share bytes: else a small file could stand for any amount."""
    ends = {name: file.header_bytes for name, file in files.items()}
    placed = [(c.at, name, leaf.dtype, c) for name, leaf in leaves.items() for c in leaf.chunks]
    for at, name, dtype, chunk in sorted(placed, key=lambda p: p[0]):
        if at < ends[chunk.file]:
            raise ValueError(f"{name}: its bytes in {chunk.file} from {at} on are not its own")
        ends[chunk.file] = at + math.prod(chunk.shape) * STATE_DTYPES[dtype].itemsize
