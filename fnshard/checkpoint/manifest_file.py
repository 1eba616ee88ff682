"""Manifest: the list of what a checkpoint holds, as JSON. It is written last, read first, and has a checksum.

`manifest.json` names every leaf (shape, dtype, spec, and its chunks with their checksums) and every file.
`manifest.json.sha256`, its seal, is a file that `sha256sum -c` reads. Files are named by ranks, and a
manifest with any other name in it is refused: nothing outside the directory is ever opened. An attacker who
writes a manifest and its seal can make a reader take wrong numbers, but not other files.
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
from fnshard.checkpoint.overlap import have_overlap
from fnshard.runtime.files import tensorfile
from fnshard.runtime.files.folder import DATA, flush_directory
from fnshard.runtime.files.json_reader import Count, reader
from fnshard.runtime.files.tensorfile import STATE_DTYPES, STATE_NAMES, Corrupt, open_regular

NAME, SEAL = "manifest.json", "manifest.json.sha256"
FORMAT = "fnshard checkpoint 3"
LIMIT_BYTES = 2 << 30
SHOWN = 20  # the number of leaves that an error names


@dataclass(frozen=True)
class DataFile:
    """The sizes of a data file and of its header, and the header's CRC-32."""

    bytes: Count
    header_bytes: Count
    header_crc32: Count


@dataclass(frozen=True)
class Chunk:
    """A box of a leaf in a file.

    Args:
        offset: where it begins in the leaf.
        at: the byte of the file at which it begins.
        crc32: a checksum for each block of its bytes.
    """

    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    at: Count
    crc32: tuple[Count, ...]


@dataclass(frozen=True)
class SavedLeaf:
    """A full tensor, called `params/<path>`, `optimizer/<path>/<slot>` or `loss_scale/<name>`.

    Args:
        dtype: its dtype, as safetensors files name it.
        spec: the `P` that it was stored by, as text.
        chunks: its chunks. In a manifest these are all, with each part of the tensor once; on one rank, those
            that the rank has written.
    """

    shape: tuple[Count, ...]
    dtype: str
    spec: str
    chunks: tuple[Chunk, ...]

    def in_pairs(self) -> SavedLeaf:
        """Return the leaf with pairs of real numbers in place of complex ones, which are the same bytes."""
        dtype = STATE_DTYPES[self.dtype]
        if not dtype.is_complex:
            return self
        chunks = [replace(c, offset=(*c.offset, 0), shape=(*c.shape, 2)) for c in self.chunks]
        return SavedLeaf((*self.shape, 2), STATE_NAMES[dtype.to_real()], self.spec, tuple(chunks))

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of a chunk in its file."""
        return math.prod(chunk.shape) * STATE_DTYPES[self.dtype].itemsize

    def check(self, name: str = "") -> None:
        """Refuse chunks that do not add up to the tensor.

        Args:
            name: the text in front of the error's.

        Raises:
            ValueError: they do not.
        """
        # The shape, and each chunk by itself.
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

        # All chunks together. As many numbers as the tensor has, none of them twice, leave no gap.
        count = sum(math.prod(c.shape) for c in self.chunks)
        if count != math.prod(self.shape) or have_overlap((c.offset, c.shape) for c in self.chunks):
            raise ValueError(f"{name}its chunks are not the whole of it, each part once")


@dataclass(frozen=True)
class Manifest:
    """A list of all that a checkpoint holds.

    Args:
        step, seed: the step and the seed of the state.
        mesh: the mesh that it was saved on, `{"axes": {name: size}, "data_axes": [...]}`.
        leaves: the leaves by name.
        files: the data files by name.
        specs: by path, each leaf's whole `LayoutSpec` as text, for people.
        data: the positions in the data by rank; one entry if all ranks are alike.
        config: the resolved configuration, if any.
        metrics: the metrics that were given to the save.
        versions: the version of torch.
        complex: paths of parameters that are complex numbers to their model, and pairs of real ones here.
        number: the number that its directory was named by; None if it had another name.
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
        """Write the manifest and its seal, which complete a checkpoint, and flush the directory."""
        text = json.dumps(vars(self), default=vars, separators=(",", ":")).encode()
        # The seal comes last: a manifest that was cut off by a kill has none.
        for name, content in ((NAME, text), (SEAL, _make_seal(hashlib.sha256(text).hexdigest()))):
            with (folder / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        flush_directory(folder)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a checkpoint; check its seal and its consistency, but not the data files.

        Raises:
            Corrupt: something is wrong. The error names the file.
        """
        # Check the seal before the text is parsed.
        text, seal = _read_file(folder, NAME), _read_file(folder, SEAL)
        if seal != _make_seal(hashlib.sha256(text).hexdigest()):
            raise Corrupt(f"{NAME} and {SEAL} do not belong together (checksum differs)")
        try:
            values = json.loads(text)
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']!r}, this reads {FORMAT!r}")
            manifest = _read_manifest(values)

            # Names of files, the chunks of each leaf, positions in the data, and the configuration.
            if odd := [name for name in manifest.files if not DATA.fullmatch(name)]:
                raise ValueError(f"{odd[0]!r} is no name of a data file")
            for name, leaf in manifest.leaves.items():
                leaf.check(f"{name}: ")
                if odd := {chunk.file for chunk in leaf.chunks} - manifest.files.keys():
                    raise ValueError(f"{name}: a chunk in {min(odd)!r}, which is not among its files")
            for position in manifest.data:
                _decode(position, "data: no position of a loader")
            config = _decode(manifest.config, "config: no values that a save writes")
            manifest = replace(manifest, config=config)

            # Earlier versions saved complex leaves, and their optimizer state, as complex numbers.
            complexes = {n for n, leaf in manifest.leaves.items() if leaf.dtype in ("C64", "C128")}
            if old := tuple(n.removeprefix("params/") for n in complexes if n.startswith("params/")):
                pairs = {n: leaf.in_pairs() for n, leaf in manifest.leaves.items()}
                manifest = replace(manifest, leaves=pairs, complex=old)
            return manifest
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise Corrupt(
                f"{NAME} is no manifest of a checkpoint ({type(error).__name__}: {error})"
            ) from error

    def check_files(self, folder: Path) -> None:
        """Refuse a directory in which data files are missing, or do not have their full length.

        Raises:
            Corrupt: there are such files. The error names every one.
        """
        wrong = []
        for name, file in self.files.items():
            try:
                os.close(open_regular(folder, name, file.bytes))
            except Corrupt as error:
                wrong.append(str(error))
        if wrong:
            raise Corrupt("; ".join(wrong))


def merge_leaves(parts: Sequence[Mapping[str, SavedLeaf]], stages: Sequence[int]) -> dict[str, SavedLeaf]:
    """Merge the leaves of all ranks, each of which has written some of their chunks.

    Args:
        parts: the leaves of each rank, in the order of ranks.
        stages: by rank, the stage of a pipeline that it runs: ranks of one stage have the same leaves.

    Raises:
        ValueError: ranks hold different states.
    """
    # Ranks of a stage must have the same leaves. Other stages have other leaves.
    first = {stage: parts[stages.index(stage)] for stage in stages}
    wrong: set[str] = set()
    for part, stage in zip(parts, stages, strict=True):
        wrong |= part.keys() ^ first[stage].keys()

    # Join the chunks of each leaf, which must be whole, and of the same tensor on all ranks.
    leaves = {name: leaf for part in first.values() for name, leaf in part.items()}
    merged = {}
    for name, leaf in leaves.items():
        by_rank = [part[name] for part in parts if name in part]
        kinds = {(each.shape, each.dtype, each.spec) for each in by_rank}
        chunks = sorted((c for each in by_rank for c in each.chunks), key=lambda chunk: chunk.offset)
        merged[name] = replace(leaf, chunks=tuple(chunks))
        try:
            merged[name].check()
        except ValueError:
            wrong.add(name)
        if len(kinds) > 1:
            wrong.add(name)

    if wrong:
        raise ValueError(f"ranks hold different states: {', '.join(sorted(wrong)[:SHOWN])}")
    return merged


def _decode(value: Any, what: str) -> Any:
    """Return what `encode` made this value of.

    Args:
        what: what the value is otherwise, for an error.

    Raises:
        ValueError: `encode` never makes such a value.
    """
    try:
        return decode(value)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{what} ({type(error).__name__}: {error})") from error


def _make_seal(digest: str) -> bytes:
    """Return the content of a seal, as `sha256sum` writes it."""
    return f"{digest}  {NAME}\n".encode()


def _read_file(folder: Path, name: str) -> bytes:
    """Read a file of a checkpoint's directory, if it is a regular file and not too long."""
    with open(open_regular(folder, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LIMIT_BYTES:
            raise Corrupt(f"{name} is {size} bytes long")
        return file.read()


_read_manifest = reader(Manifest)  # made here, so that reading a file evaluates no code, not even annotations
