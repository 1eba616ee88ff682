"""DCP: the border to `torch.distributed.checkpoint`: its driver, planners and resharding, our files.

Importing it takes a second, so who saves or restores does it then.

Leaves go in as `Held`: a block, and the layout that says which box of the full leaf it is (a DTensor cannot
say it of a padded dim that several axes split). DCP plans which rank writes which box (replicas once,
evenly), checks that the boxes make the whole, and finds what a rank must read of boxes that another mesh has
saved. What it writes with (pickles, no checksums) is replaced: data go to one safetensors file a rank,
everything else to the manifest.
"""

from __future__ import annotations

import math
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fnshard.checkpoint.blocks import Held, Wanted
from fnshard.checkpoint.coordination import Failed
from fnshard.checkpoint.manifest_file import Chunk, File, Leaf, Manifest
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import failing
from fnshard.runtime.files.folder import Place, data_file
from fnshard.runtime.files.tensorfile import (
    DTYPES,
    NAMES,
    PASSING,
    BLOCK_bytes,
    Corrupt,
    Entry,
    open_regular,
    read_checked,
    read_exactly,
    write,
)

# DCP says so whenever there is no process group; here that is meant.
warnings.filterwarnings("ignore", "torch.distributed is disabled", module="torch.distributed.checkpoint")

READERS = 4  # threads of a restore: the disk, the checksums and the kernel's page faults overlap


def _md(offset: Sequence[int], shape: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))


# ------------------------------------------------------------------ save


class Boxes(DefaultSavePlanner):
    """Announces the box that this rank holds of every leaf; DCP's own planner does the rest."""

    def __init__(self, held: Mapping[str, Held], mesh: Mesh):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held, self.mesh = held, mesh

    def create_local_plan(self) -> SavePlan:
        """One item a leaf, none where this rank's part of it is empty."""
        items = []
        for name, held in self.held.items():
            offset, shape = held.box(self.mesh)
            if math.prod(shape):
                properties = TensorProperties(dtype=held.block.dtype)
                data = TensorWriteData(_md(offset, shape), properties, torch.Size(held.shape))
                index = MetadataIndex(name, torch.Size(offset))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The part of this rank's block that is no padding."""
        return self.held[write_item.index.fqn].part(self.mesh)


@dataclass
class Writer(dcp.StorageWriter):
    """Writes one safetensors file a rank where the place is saving, and commits when all are whole.

    Args:
        place: the checkpoint's directory.
        rank: this one.
        held: this rank's leaves.
        told: fields of the manifest that are known from the start, alike on all ranks.
        data: this rank's position in the data, encoded.
    """

    place: Place
    rank: int
    held: Mapping[str, Held]
    told: Mapping[str, Any]
    data: Any = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Send along what only this rank knows."""
        return replace(plan, storage_data=(self.told["step"], self.data))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: a fresh directory, before anybody writes."""
        steps = [plan.storage_data[0] for plan in plans]
        if len(set(steps)) > 1:
            raise ValueError(f"ranks save states of different steps: {steps}")
        data = [plan.storage_data[1] for plan in plans]
        self.told = {**self.told, "data": data[:1] if all(d == data[0] for d in data) else data}
        self.place.begin()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, written, flushed and summed."""
        name = data_file(self.rank)
        items = {_title(item): item for item in plan.items}
        entries = [
            Entry(
                title,
                tuple(item.tensor_data.chunk.sizes),
                item.tensor_data.properties.dtype,
                lambda item=item: planner.resolve_data(item),
            )
            for title, item in items.items()
        ]
        results = []
        if entries:
            done = write(self.place.saving / name, entries)
            file = File(done.bytes, done.header_bytes, done.header_crc32)
            for title, item in items.items():
                box = item.tensor_data.chunk
                chunk = Chunk(tuple(box.offsets), tuple(box.sizes), name, done.at[title], done.crc32[title])
                size = math.prod(chunk.shape) * item.tensor_data.properties.dtype.itemsize
                results.append(WriteResult(item.index, size, (chunk, file)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: the manifest, then the name."""
        written = [result for of_rank in results for result in of_rank]
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.held}
        for result in written:
            chunks[result.index.fqn].append(result.storage_data[0])
        files = {chunk.file: file for chunk, file in (r.storage_data for r in written)}
        leaves = {
            name: Leaf(held.shape, NAMES[held.block.dtype], repr(held.layout), tuple(chunks[name]))
            for name, held in self.held.items()
        }
        told = {**self.told, "data": tuple(self.told["data"])}
        Manifest(leaves=leaves, files=files, **told).write(self.place.saving)
        self.place.commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A path is no id of ours: we are made with it."""
        return checkpoint_id is None


def _title(item: WriteItem) -> str:
    """Its name in the file: a box that is not the whole leaf says where it begins."""
    data = item.tensor_data
    if data.chunk.sizes == data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


# ------------------------------------------------------------------ restore


class Reads(DefaultLoadPlanner):
    """Asks for the boxes this rank needs, each from the saved leaf that it is to come from."""

    def __init__(self, held: Mapping[str, Wanted], mesh: Mesh):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held, self.mesh = held, mesh

    def create_local_plan(self) -> LoadPlan:
        """What overlaps this rank's boxes."""
        items: list[ReadItem] = []
        for name, wanted in self.held.items():
            offset, shape = wanted.box(self.mesh)
            saved = self.metadata.state_dict_metadata[wanted.source]
            if not math.prod(shape):
                continue
            found = create_read_items_for_chunk_list(wanted.source, saved, [_md(offset, shape)])
            if sum(math.prod(item.lengths) for item in found) != math.prod(shape):
                raise Corrupt(f"{wanted.source}: the saved chunks are not the whole of it")
            items += [replace(i, dest_index=MetadataIndex(name, torch.Size(offset))) for i in found]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The part of this rank's block that is no padding."""
        return self.held[index.fqn].part(self.mesh)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never: there is nothing to unpickle."""
        raise Corrupt(f"{read_item.storage_index.fqn}: a checkpoint holds tensors alone")


@dataclass
class Reader(dcp.StorageReader):
    """Reads boxes out of a checkpoint's files, and believes none of their bytes before their checksum."""

    folder: Path
    manifest: Manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any) -> Metadata:
        """What the manifest says, in DCP's words."""
        leaves = self.manifest.leaves.items()
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[leaf.dtype]),
                    torch.Size(leaf.shape),
                    [_md(chunk.offset, chunk.shape) for chunk in leaf.chunks],
                )
                for name, leaf in leaves
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the wanted boxes, file by file in the order of their bytes; all that is corrupt is named."""

        def chunk_of(item: ReadItem) -> Chunk:
            return self.manifest.leaves[item.storage_index.fqn].chunks[item.storage_index.index]

        wrong, by_file = [], dict[str, list[ReadItem]]()
        for item in sorted(plan.items, key=lambda i: chunk_of(i).at):
            by_file.setdefault(chunk_of(item).file, []).append(item)
        with ThreadPoolExecutor(READERS) as readers:
            for name, items in by_file.items():
                try:
                    fd = checked(self.folder, name, self.manifest.files[name])
                except Corrupt as error:
                    wrong.append(str(error))
                    continue
                try:
                    targets = [planner.resolve_tensor(item) for item in items]
                    told = readers.map(partial(self._read, fd), map(chunk_of, items), items, targets)
                    wrong += [f"{name}, {text}" for text in told if text]
                finally:
                    os.close(fd)
        if wrong:
            raise Corrupt(
                "; ".join(wrong[:20]) + ("" if len(wrong) <= 20 else f"; and {len(wrong) - 20} more")
            )
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, fd: int, chunk: Chunk, item: ReadItem, target: Tensor) -> str:
        """Fill one box; what is wrong with it, if anything is."""
        leaf = item.storage_index.fqn
        try:
            _fill(fd, chunk, DTYPES[self.manifest.leaves[leaf].dtype], item, target)
        except (Corrupt, OSError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                raise
            return f"{leaf}: {error}"
        return ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A path is no id of ours: we are made with it."""
        return checkpoint_id is None


def checked(folder: Path, name: str, file: File) -> int:
    """A data file, open, its length and header as they were written.

    Raises:
        Corrupt: it is not.
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


def _fill(fd: int, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Read the rows of a chunk that an item touches, and copy what it wants of them."""
    first, count, row = 0, 1, math.prod(chunk.shape)
    if chunk.shape:
        first, count, row = item.storage_offsets[0], item.lengths[0], math.prod(chunk.shape[1:])
    size, rows = math.prod(chunk.shape) * dtype.itemsize, (count, *chunk.shape[1:]) if chunk.shape else ()
    same = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
    straight = same and tuple(target.shape) == rows
    held = target if straight else torch.empty(rows, dtype=dtype)
    out = memoryview(held.view(-1).view(torch.uint8).numpy())
    read_checked(fd, chunk.at, size, chunk.crc32, first * row * dtype.itemsize, out)
    if not straight:
        for dim, (start, length) in enumerate(
            zip(item.storage_offsets[1:], item.lengths[1:], strict=True), 1
        ):
            held = held.narrow(dim, start, length)
        target.copy_(held)


def verify_file(folder: Path, manifest: Manifest, name: str) -> list[str]:
    """What is wrong with a data file; every byte of it is read."""
    try:
        fd = checked(folder, name, manifest.files[name])
    except (Corrupt, OSError) as error:
        return [f"{name}: {error}" if isinstance(error, OSError) else str(error)]
    wrong, buffer = [], bytearray(BLOCK_bytes)
    try:
        for title, leaf in manifest.leaves.items():
            for chunk in (c for c in leaf.chunks if c.file == name):
                size = math.prod(chunk.shape) * DTYPES[leaf.dtype].itemsize
                try:
                    for start in range(0, size, BLOCK_bytes):
                        out = memoryview(buffer)[: min(BLOCK_bytes, size - start)]
                        read_checked(fd, chunk.at, size, chunk.crc32, start, out)
                except (Corrupt, OSError) as error:
                    wrong.append(f"{name}, {title}: {error}")
    finally:
        os.close(fd)
    return wrong


# ------------------------------------------------------------------ both


def save(
    place: Place, held: Mapping[str, Held], mesh: Mesh, group: Any, told: Mapping[str, Any], data: Any
) -> None:
    """Write this rank's leaves into `place`, and commit when those of all ranks are there; see `Writer`.

    Raises:
        Failed: on all ranks, if it failed on any.
        CollectiveError: a peer died, or did not answer in time.
    """
    writer = Writer(place, mesh.rank, held, told, data)
    _drive(dcp.save, held, group, planner=Boxes(held, mesh), storage_writer=writer)


def load(folder: Path, manifest: Manifest, wanted: Mapping[str, Wanted], mesh: Mesh, group: Any) -> None:
    """Fill this rank's leaves from a checkpoint of any mesh.

    Raises:
        Failed: on all ranks, if it failed on any.
        CollectiveError: a peer died, or did not answer in time.
    """
    _drive(dcp.load, wanted, group, planner=Reads(wanted, mesh), storage_reader=Reader(folder, manifest))


def _drive(work: Callable[..., Any], held: Mapping[str, Any], group: Any, **how: Any) -> None:
    try:
        with failing(lambda: f"checkpoint {work.__name__}"):
            blocks = {name: leaf.block for name, leaf in held.items()}
            work(blocks, process_group=group, no_dist=group is None, **how)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, KeyboardInterrupt | SystemExit):  # DCP takes them for failures
                raise cause from None
        raise Failed({rank: cause for rank, (cause, _) in error.failures.items()}) from error
