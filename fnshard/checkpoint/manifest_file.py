"""Manifest: what a checkpoint holds, as JSON: written last, read first, sealed by a checksum.

`manifest.json` names every leaf (shape, dtype, spec, and the grid of its chunks with their checksums) and
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fnshard.checkpoint.chunks import Chunk, Chunks, DataFile, Files, Grid
from fnshard.checkpoint.loader_state import decode
from fnshard.runtime.files.folder import DATA, flush_directory
from fnshard.runtime.files.json_reader import Count, from_json, reader
from fnshard.runtime.files.tensorfile import (
    STATE_DTYPES,
    Corrupt,
    HEADER_LIMIT_bytes,
    open_regular,
    read_exactly,
)

NAME, SEAL = "manifest.json", "manifest.json.sha256"
FORMAT = "fnshard checkpoint 2"
FORMATS = ("fnshard checkpoint 1", FORMAT)  # the first lists every chunk
LIMIT_bytes = 2 << 30


@dataclass(frozen=True)
class SavedLeaf:
    """A full tensor: `params/<path>`, `optimizer/<path>/<slot>` or `loss_scale/<name>`. `dtype`: as
    safetensors files name it; `spec`: the `P` it was stored by. `chunks`: of a manifest `Chunks`, which
    cover it; of the part of one rank, those that it has."""

    shape: tuple[Count, ...]
    dtype: str
    spec: str
    chunks: Sequence[Chunk] | Grid


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
    if isinstance(value, Chunks):
        value = value.grid()
    if not isinstance(value, Grid | SavedLeaf | DataFile):
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
    if values["format"] not in FORMATS:
        raise ValueError(f"its format is {values['format']!r}, this reads {', '.join(map(repr, FORMATS))}")
    read = _read_manifest(values)
    for name, file in read.files.items():
        if not DATA.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a data file")
        if file.header_bytes > min(file.bytes, HEADER_LIMIT_bytes):
            raise ValueError(f"{name}: a header of {file.header_bytes} bytes")
    files = Files.of(read.files)
    read = replace(read, leaves={n: _checked_leaf(n, leaf, files) for n, leaf in read.leaves.items()})
    _check_apart(read.leaves, list(read.files.values()))
    sizes = from_json(Mapping[str, Count], read.mesh["axes"])
    if not all(sizes.values()) or not set(from_json(list[str], read.mesh["data_axes"])) <= sizes.keys():
        raise ValueError(f"its mesh is {read.mesh}")
    for position in read.data:
        decode(position)
    return read


def _checked_leaf(name: str, leaf: SavedLeaf, files: Files) -> SavedLeaf:
    shape, itemsize = leaf.shape, STATE_DTYPES[leaf.dtype].itemsize
    if len(shape) > 64 or math.prod(max(n, 1) for n in shape) * itemsize >= 1 << 63:
        raise ValueError(f"{name}: no tensor is {list(shape)}")
    make = Chunks.of_grid if isinstance(leaf.chunks, Grid) else Chunks.of
    try:
        return replace(leaf, chunks=make(shape, leaf.chunks, itemsize, files))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_apart(leaves: Mapping[str, SavedLeaf], files: Sequence[DataFile]) -> None:
    """Every chunk lies in its file, behind the header, and no two share bytes: else a small file could stand
    for any amount."""
    chunks = [leaf.chunks for leaf in leaves.values()]
    file, at, size = (
        np.concatenate([np.zeros(0, np.int64), *each])
        for each in ([c.file for c in chunks], [c.at for c in chunks], [c.bytes for c in chunks])
    )
    order = np.lexsort((at, file))
    file, at, size = file[order], at[order], size[order]
    header, length = (
        np.array(each, np.int64)[file] for each in ([f.header_bytes for f in files], [f.bytes for f in files])
    )
    before = np.where(np.diff(file, prepend=-1) != 0, header, np.roll(at + size, 1))
    wrong = np.flatnonzero((at < before) | (size > length - at))
    if len(wrong):
        number = int(np.searchsorted(np.cumsum([len(c) for c in chunks]), order[wrong[0]], "right"))
        raise ValueError(f"{list(leaves)[number]}: its bytes from {at[wrong[0]]} on are not its own")
