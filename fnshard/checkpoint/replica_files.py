"""Replica files: what a node holds of a state in memory, two slots of data files.

Next to each file lies a part that says what it holds; the parts of a step, if none is missing, make a state.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from fnshard.checkpoint.manifest_file import Chunk, DataFile, Manifest, SavedLeaf, merged
from fnshard.checkpoint.state_leaves import LocalLeaf
from fnshard.layout.partition import boxes
from fnshard.mesh import Mesh
from fnshard.runtime.files.json_reader import Count, from_json
from fnshard.runtime.files.tensorfile import (
    BLOCK_bytes,
    TensorToWrite,
    bytes_of,
    file_layout,
)

SLOTS = ("0", "1")
PART = ".json"  # of the file beside a data file


@dataclass(frozen=True)
class Part:
    """What one data file holds.

    Args:
        token: of the start of the ranks that wrote it: parts of two starts do not mix.
        rank, data: who wrote it, and its position in the data.
        leaves: with the chunks in this file alone.
    """

    step: Count
    seed: Annotated[int, range(-(1 << 63), 1 << 63)]
    token: str
    rank: Count
    data: Any
    mesh: Mapping[str, Any]
    leaves: Mapping[str, SavedLeaf]
    name: str
    file: DataFile

    def encode(self) -> bytes:
        """One line of JSON behind its checksum."""
        text = json.dumps(vars(self), default=vars, separators=(",", ":")).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)


def write_part(folder: Path, name: str, text: bytes) -> None:
    """Beside its data file; there whole or not at all."""
    temporary = folder / f".{name}{PART}"
    temporary.write_bytes(text)
    os.rename(temporary, folder / f"{name}{PART}")


def parts_in(memory: Path) -> Iterator[tuple[str, bytes]]:
    """(slot, text) of every part in a node's memory that is whole."""
    for slot in SLOTS:
        for path in sorted((memory / slot).glob(f"rank-*{PART}")):
            with suppress(OSError, ValueError):
                text = path.read_bytes()
                if int(text[:8], 16) == zlib.crc32(text[9:-1]):
                    yield slot, text


# ------------------------------------------------------------------ one data file


class ReplicaFile:
    """The data file of one rank: blocks, copied to fixed places of a file that is mapped.

    Args:
        leaves: all; `mine`: those whose blocks are in this file.
    """

    def __init__(self, name: str, leaves: Mapping[str, LocalLeaf], mine: Mapping[str, LocalLeaf], mesh: Mesh):
        self.name, self.leaves = name, leaves
        self._views: dict[str, tuple[str, Any, tuple[int, ...], tuple[int, ...]]] = {}
        entries = []
        for path, leaf in mine.items():
            for number, (full, inner) in enumerate(boxes(leaf.shape, leaf.layout, mesh)):
                shape = tuple(leaf.block[inner].shape)
                if math.prod(shape):
                    title = f"{path}@{number}"
                    self._views[title] = path, inner, tuple(s.start for s in full), shape
                    entries.append(TensorToWrite(title, shape, leaf.block.dtype))
        self.head, self._at = file_layout(entries)
        self._sizes = {entry.name: entry.bytes for entry in entries}
        self.bytes = len(self.head) + sum(self._sizes.values())

    def copies(self, mapped: Tensor, blocks: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(place in the mapped file, bytes of the block) of every box."""
        pairs = [(mapped[: len(self.head)], torch.frombuffer(bytearray(self.head), dtype=torch.uint8))]
        for title, (path, inner, _, _) in self._views.items():
            at = self._at[title]
            part = blocks[path].detach()[inner].contiguous().reshape(-1).view(torch.uint8)
            pairs.append((mapped[at : at + self._sizes[title]], part))
        return pairs

    def part(self, mapped: Tensor, fields: Mapping[str, Any]) -> Part:
        """Of what was copied there."""
        data, chunks = bytes_of(mapped), dict[str, list[Chunk]]()
        for title, (path, _, start, shape) in self._views.items():
            at = self._at[title]
            ends = range(at, at + self._sizes[title], BLOCK_bytes)
            end = at + self._sizes[title]
            sums = tuple(zlib.crc32(data[i : min(i + BLOCK_bytes, end)]) for i in ends)
            chunks.setdefault(path, []).append(Chunk(start, shape, self.name, at, sums))
        saved = {path: leaf.saved_as(chunks.get(path, [])) for path, leaf in self.leaves.items()}
        file = DataFile(self.bytes, len(self.head), zlib.crc32(self.head))
        return Part(leaves=saved, name=self.name, file=file, **fields)


def mapped_file(path: Path, size: int, *, new: bool = False) -> Tensor:
    """A file as uint8 that all processes of the node share; a new one takes all of its memory at once.

    Raises:
        OSError: there is no room.
    """
    if new:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


# ------------------------------------------------------------------ which of them make a state


@dataclass(frozen=True)
class Replica:
    """A complete state in memory: where its files lie, by node."""

    slot: str
    manifest: Manifest
    nodes: Mapping[str, tuple[int, ...]]


def replicas_of(found: Iterable[tuple[int, str, bytes]]) -> list[Replica]:
    """The complete states among parts, the newest first.

    Args:
        found: (node, slot, text) of parts on all nodes.
    """
    groups: dict[tuple[int, str, str], dict[str, tuple[Part, list[int]]]] = {}
    for node, slot, text in found:
        part = from_json(Part, json.loads(text[9:]))
        group = groups.setdefault((part.step, part.token, slot), {})
        group.setdefault(part.name, (part, []))[1].append(node)
    made = [_replica(slot, list(groups[step, token, slot].values())) for step, token, slot in groups]
    return sorted(filter(None, made), key=lambda replica: -replica.manifest.step)


def _replica(slot: str, parts: Sequence[tuple[Part, list[int]]]) -> Replica | None:
    """Of the parts of one step; None where some block or some rank's position is not among them."""
    first, positions = parts[0][0], {part.rank: part.data for part, _ in parts}
    if len(positions) < math.prod(first.mesh["axes"].values()):
        return None
    try:
        leaves = merged([part.leaves for part, _ in parts])
    except ValueError:
        return None
    files = {part.name: part.file for part, _ in parts}
    data = tuple(positions[rank] for rank in sorted(positions))
    alike = all(position == data[0] for position in data)
    manifest = Manifest(
        step=first.step, seed=first.seed, mesh=first.mesh, leaves=leaves,
        files=files, specs={}, data=data[:1] if alike else data,
        config=None, metrics={}, versions={"torch": str(torch.__version__)},
    )  # fmt: skip
    return Replica(slot, manifest, {part.name: tuple(nodes) for part, nodes in parts})
