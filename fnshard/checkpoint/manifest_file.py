"""Manifest: what a checkpoint holds, as JSON: written last, read first, sealed by a checksum.

`manifest.json` names every leaf (shape, dtype, spec, and its chunks with their checksums) and every file;
`manifest.json.sha256` is what `sha256sum -c` reads. A file has the name that a rank gave it, or none: nothing
outside the directory is ever opened. Who writes a manifest and its seal can have wrong numbers read, but not
other files.
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

from fnshard.checkpoint.loader_state import decode
from fnshard.runtime.files import tensorfile
from fnshard.runtime.files.folder import DATA, flush_directory
from fnshard.runtime.files.json_reader import Count, reader
from fnshard.runtime.files.tensorfile import STATE_DTYPES, STATE_NAMES, Corrupt, open_regular

NAME, SEAL = "manifest.json", "manifest.json.sha256"
FORMAT = "fnshard checkpoint 3"
LIMIT_BYTES = 2 << 30
SHOWN = 20  # leaves that an error names


@dataclass(frozen=True)
class DataFile:
    """Sizes of a data file and of its header, and the header's CRC-32."""

    bytes: Count
    header_bytes: Count
    header_crc32: Count


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
    safetensors files name it; `spec`: the `P` it was stored by. `chunks`: of a manifest all of them, each
    part of the tensor once; of one rank, those that it has written."""

    shape: tuple[Count, ...]
    dtype: str
    spec: str
    chunks: tuple[Chunk, ...]

    def in_pairs(self) -> SavedLeaf:
        """Return the leaf with complex numbers as pairs of real ones, which are the same bytes; with real
        ones as it is."""
        if not (dtype := STATE_DTYPES[self.dtype]).is_complex:
            return self
        chunks = [replace(c, offset=(*c.offset, 0), shape=(*c.shape, 2)) for c in self.chunks]
        return SavedLeaf((*self.shape, 2), STATE_NAMES[dtype.to_real()], self.spec, tuple(chunks))

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Count the bytes of a chunk's data in its file."""
        return math.prod(chunk.shape) * STATE_DTYPES[self.dtype].itemsize

    def check(self, name: str = "") -> None:
        """Refuse chunks that do not add up to the tensor; `name` is said before why."""
        if math.prod(max(size, 1) for size in self.shape) >= 1 << 63:
            raise ValueError(f"{name}{list(self.shape)} is no shape of a tensor")
        if any(not len(c.offset) == len(c.shape) == len(self.shape) for c in self.chunks):
            raise ValueError(f"{name}chunks of other dims")
        for chunk in self.chunks:
            box = list(zip(chunk.offset, chunk.shape, self.shape, strict=True))
            if any(start + size > whole for start, size, whole in box):
                raise ValueError(f"{name}a chunk that is not in it")
            if len(chunk.crc32) != -(-self.chunk_bytes(chunk) // tensorfile.BLOCK_BYTES):
                raise ValueError(f"{name}checksums of other blocks")
        numbers, places = sum(math.prod(c.shape) for c in self.chunks), {c.offset for c in self.chunks}
        if numbers != math.prod(self.shape) or len(places) != len(self.chunks):
            raise ValueError(f"{name}its chunks are not the whole of it, each part once")


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
        complex: paths of the parameters, here pairs of real numbers, that are complex ones to their model.
        number: the number that its directory was named by; None where it had another name.
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
    complex: tuple[str, ...] = ()
    format: str = FORMAT
    number: int | None = None

    def write(self, folder: Path) -> None:
        """The last of a checkpoint: the manifest, its seal, and all of the directory flushed to the disk."""
        text = json.dumps(vars(self), default=vars, separators=(",", ":")).encode()
        for name, content in ((NAME, text), (SEAL, _seal(hashlib.sha256(text).hexdigest()))):
            with (folder / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        flush_directory(folder)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a checkpoint, and check it against its seal and in itself; the data files are
        not looked at.

        Raises:
            Corrupt: says what is wrong with which file.
        """
        text, seal = _content(folder, NAME), _content(folder, SEAL)
        if seal != _seal(hashlib.sha256(text).hexdigest()):
            raise Corrupt(f"{NAME} and {SEAL} do not belong together (checksum differs)")
        try:
            values = json.loads(text)
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']!r}, this reads {FORMAT!r}")
            found = _read_manifest(values)
            if odd := [name for name in found.files if not DATA.fullmatch(name)]:
                raise ValueError(f"{odd[0]!r} is no name of a data file")
            for name, leaf in found.leaves.items():
                leaf.check(f"{name}: ")
                if odd := {chunk.file for chunk in leaf.chunks} - found.files.keys():
                    raise ValueError(f"{name}: a chunk in {min(odd)!r}, which is not among its files")
            for position in found.data:
                _check_position(position)
            # Complex leaves were once saved as such, and their state with them.
            complexes = {n for n, leaf in found.leaves.items() if leaf.dtype in ("C64", "C128")}
            if old := tuple(n.removeprefix("params/") for n in complexes if n.startswith("params/")):
                pairs = {n: leaf.in_pairs() for n, leaf in found.leaves.items()}
                found = replace(found, leaves=pairs, complex=old)
            return found
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise Corrupt(
                f"{NAME} is no manifest of a checkpoint ({type(error).__name__}: {error})"
            ) from error

    def check_files(self, folder: Path) -> None:
        """Refuse a directory where a data file is missing, or not of its full length; names every one."""
        wrong = []
        for name, file in self.files.items():
            try:
                os.close(open_regular(folder, name, file.bytes))
            except Corrupt as error:
                wrong.append(str(error))
        if wrong:
            raise Corrupt("; ".join(wrong))


def merged(parts: Sequence[Mapping[str, SavedLeaf]], stages: Sequence[int]) -> dict[str, SavedLeaf]:
    """The leaves of which each rank has written some chunks, or none; rank 0 is the first.

    Args:
        stages: by rank, the stage of a pipeline that it runs: those of one have the same leaves.
    """
    first = {stage: parts[stages.index(stage)] for stage in stages}
    wrong = {n for part, stage in zip(parts, stages, strict=True) for n in part.keys() ^ first[stage].keys()}
    leaves = {name: leaf for part in first.values() for name, leaf in part.items()}
    found = {}
    for name, leaf in leaves.items():
        here = [part[name] for part in parts if name in part]
        alike = {(each.shape, each.dtype, each.spec) for each in here}
        chunks = sorted((c for each in here for c in each.chunks), key=lambda chunk: chunk.offset)
        found[name] = replace(leaf, chunks=tuple(chunks))
        try:
            found[name].check()
        except ValueError:
            wrong.add(name)
        if len(alike) > 1:
            wrong.add(name)
    if wrong:
        raise ValueError(f"ranks hold different states: {', '.join(sorted(wrong)[:SHOWN])}")
    return found


def _check_position(position: Any) -> None:
    """Refuse a position in the data that `decode` cannot read."""
    try:
        decode(position)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"data: no position of a loader ({type(error).__name__}: {error})") from error


def _seal(digest: str) -> bytes:
    return f"{digest}  {NAME}\n".encode()


def _content(folder: Path, name: str) -> bytes:
    with open(open_regular(folder, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LIMIT_BYTES:
            raise Corrupt(f"{name} is {size} bytes long")
        return file.read()


_read_manifest = reader(Manifest)  # made here: what reads files runs no code, not even annotations
