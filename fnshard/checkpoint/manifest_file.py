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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fnshard.checkpoint.loader_state import decode
from fnshard.runtime.files.folder import DATA, flush_directory
from fnshard.runtime.files.tensorfile import (
    DTYPES,
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

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class SavedLeaf:
    """A full tensor: `params/<path>`, `optimizer/<path>/<slot>` or `loss_scale/<name>`. `dtype`: as
    safetensors files name it; `spec`: the `P` it was stored by."""

    shape: tuple[int, ...]
    dtype: str
    spec: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DataFile:
    """Sizes of a data file and of its header, and the header's CRC-32."""

    bytes: int
    header_bytes: int
    header_crc32: int


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
        config: the resolved configuration, if one was given.
        metrics: numbers that came with the save.
        versions: of torch and fnshard.
    """

    step: int
    seed: int
    mesh: Mapping[str, Any]
    leaves: Mapping[str, SavedLeaf]
    files: Mapping[str, DataFile]
    specs: Mapping[str, str] = field(default_factory=dict)
    data: tuple[Any, ...] = ()
    config: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        """The last of a checkpoint: the manifest, its seal, and all of the directory flushed to the disk."""
        text = json.dumps(vars(self), default=_fields, separators=(",", ":")).encode()
        for name, content in ((NAME, text), (SEAL, _seal(text))):
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


def _seal(text: bytes) -> bytes:
    return _line(hashlib.sha256(text).hexdigest())


def _line(digest: str) -> bytes:
    return f"{digest}  {NAME}\n".encode()


def _content(folder: Path, name: str, limit: int, seal: bytearray | None = None) -> bytearray:
    """All of a file; of a sealed one nothing is held before the seal is found to fit."""
    fd = open_regular(folder, name)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise Corrupt(f"{name} is {size} bytes long")
        if seal is not None:
            with open(fd, "rb", buffering=0, closefd=False) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if seal != _line(digest):
                raise Corrupt(f"{NAME} and {SEAL} do not belong together (checksum differs)")
        text = bytearray(size)
        read_exactly(fd, 0, memoryview(text))
        return text
    finally:
        os.close(fd)


# ------------------------------------------------------------------ from JSON, believing nothing


def _manifest(values: Any) -> Manifest:
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']!r}, this is {FORMAT!r}")
    files = {name: _file(name, v) for name, v in _object(values, "files").items()}
    leaves = {name: _leaf(name, v, files) for name, v in _object(values, "leaves").items()}
    _check_apart(leaves, files)
    seed, data = values["seed"], _list(values["data"], "data")
    if type(seed) is not int or not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed is {seed!r}")
    for position in data:
        decode(position)
    return Manifest(
        step=_count(values["step"]),
        seed=seed,
        mesh=_mesh(_object(values, "mesh")),
        leaves=leaves,
        files=files,
        specs=_texts(values, "specs"),
        data=tuple(data),
        config=values["config"],
        metrics=_metrics(_object(values, "metrics")),
        versions=_texts(values, "versions"),
    )


def _file(name: str, values: Any) -> DataFile:
    if not DATA.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a data file")
    file = DataFile(*(_count(values[k]) for k in DataFile.__dataclass_fields__))
    if file.header_bytes > min(file.bytes, HEADER_LIMIT_bytes):
        raise ValueError(f"{name}: a header of {file.header_bytes} bytes")
    return file


def _leaf(name: str, values: Any, files: Mapping[str, DataFile]) -> SavedLeaf:
    shape, dtype = _counts(values["shape"]), values["dtype"]
    itemsize, chunks = DTYPES[dtype].itemsize, []
    if len(shape) > 64 or math.prod(max(n, 1) for n in shape) * itemsize >= 1 << 63:
        raise ValueError(f"{name}: no tensor is {list(shape)}")
    for v in _list(values["chunks"], "chunks"):
        at, crc32 = _count(v["at"]), _counts(v["crc32"])
        chunk = Chunk(_counts(v["offset"]), _counts(v["shape"]), v["file"], at, crc32)
        size = math.prod(chunk.shape) * itemsize
        ranks = len(chunk.offset) == len(chunk.shape) == len(shape)
        if not ranks or at + size > files[chunk.file].bytes or len(crc32) != -(-size // BLOCK_bytes):
            raise ValueError(f"{name}: a chunk {list(chunk.shape)} at {list(chunk.offset)} cannot be")
        chunks.append(chunk)
    if not is_tiled(shape, chunks):
        raise ValueError(f"{name}: its chunks are not the whole of it, each part once")
    if not isinstance(values["spec"], str):
        raise ValueError(f"{name}: its spec is no text")
    return SavedLeaf(shape, dtype, values["spec"], tuple(chunks))


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
    """No two chunks share bytes: else a small file could be said to hold any amount."""
    ends = {name: file.header_bytes for name, file in files.items()}
    placed = [(c.at, name, leaf.dtype, c) for name, leaf in leaves.items() for c in leaf.chunks]
    for at, name, dtype, chunk in sorted(placed, key=lambda p: p[0]):
        if at < ends[chunk.file]:
            raise ValueError(f"{name}: its bytes in {chunk.file} from {at} on are not its own")
        ends[chunk.file] = at + math.prod(chunk.shape) * DTYPES[dtype].itemsize


def _mesh(values: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes, data_axes = _object(values, "axes"), _list(values["data_axes"], "data_axes")
    if not all(_count(size) for size in sizes.values()) or not all(axis in sizes for axis in data_axes):
        raise ValueError(f"its mesh is {values}")
    return values


def _metrics(values: Mapping[str, Any]) -> Mapping[str, float]:
    wrong = [name for name, value in values.items() if type(value) not in (int, float)]
    if wrong:
        raise ValueError(f"metrics are numbers, but not {', '.join(wrong)}")
    return {name: float(value) for name, value in values.items()}


def _texts(values: Any, name: str) -> Mapping[str, str]:
    found = _object(values, name)
    if not all(isinstance(v, str) for v in found.values()):
        raise ValueError(f"{name} are texts")
    return found


def _object(values: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(values[name], dict):
        raise ValueError(f"{name} is no object")
    return values[name]


def _list(values: Any, name: str) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"{name} is no list")
    return values


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(v) for v in _list(values, "sizes"))
