"""Writing: gather leaves one by one to rank 0, which fills safetensors files and then names their folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import AgreementError, StateError, leaves
from fnshard.hf.names import Family, Names, Transposed, check_names, config_of_tensors, read_name
from fnshard.hf.reading import INDEX, SINGLE, read_config
from fnshard.layout.codecs import block_of
from fnshard.layout.pairs import as_pairs
from fnshard.layout.partition import boxes
from fnshard.layout.spec import LayoutSpec, is_here, stage_of
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.coordination import all_or_none
from fnshard.runtime.files.folder import flush_directory, flush_file
from fnshard.runtime.files.tensorfile import NAMES, TensorToWrite, bytes_of, file_layout

PIECE_BYTES = 64 << 20  # the most bytes that one collective moves, unless one row of all ranks is more
FORMAT = {"format": "pt"}  # without it transformers refuses a file
COPIED = (
    "config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.*", "preprocessor_config.json", "processor_config.json",
    "spiece.model",
)  # fmt: skip

Put = Callable[[str, Tensor], None]  # it writes a whole tensor of a name, in its dtype


@dataclass(frozen=True)
class LeafToWrite:
    """A leaf that is to be written.

    Args:
        make: a function that returns this rank's block.
        name: its name in the files.
        dtype: its dtype in the files.
        transposed: whether the files hold its transpose.
        experts: the matrices that files have for each of its experts.
    """

    path: str
    spec: LayoutSpec
    make: Callable[[], Tensor]
    name: str
    dtype: torch.dtype
    transposed: bool
    experts: tuple[str, ...] = ()

    @property
    def entries(self) -> list[TensorToWrite]:
        """The tensors that are written."""
        shape = self.spec.shape[::-1] if self.transposed else self.spec.shape
        if self.experts:
            shape = (shape[1] // len(self.experts), *shape[2:])
        return [TensorToWrite(name, shape, self.dtype) for name in self.names]

    @property
    def names(self) -> list[str]:
        """The names of the tensors: one, or those of each expert's matrices in turn."""
        prefix = self.name.rpartition(".")[0]
        experts = range(self.spec.shape[0]) if self.experts else ()
        return [f"{prefix}.{e}.{part}.weight" for e in experts for part in self.experts] or [self.name]


def leaves_to_write(
    blocks: Mapping[str, Tensor],
    specs: Mapping[str, LayoutSpec],
    family: Family,
    dtype: torch.dtype | None,
    *,
    names: Names = None,
) -> list[LeafToWrite]:
    """Return how stored blocks, given by path, are written.

    Raises:
        StateError: `names` or `dtype` do not fit, or files cannot hold the dtype of a leaf.
    """
    check_names(names, specs)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise StateError(f"dtype={dtype!r}: a float dtype, such as torch.bfloat16, or None.")

    out, wrong, taken = [], [], {}
    for path, spec in specs.items():
        named = read_name(path, names)
        if named is None and not family.saves(path):
            continue
        transposed = isinstance(named, Transposed)
        name = named.name if isinstance(named, Transposed) else named or family.name(path)
        if transposed and len(spec.shape) != 2:
            wrong.append(f"params[{path!r}] {list(spec.shape)} is to be transposed, and is no matrix")
        if name in taken:
            wrong.append(f"{name!r} is to be params[{taken[name]!r}] and params[{path!r}]")
        taken[name] = path

        # Integers and eight bits keep their dtype.
        wide = spec.storage_dtype.is_floating_point and spec.storage_dtype.itemsize > 1
        kind = dtype if dtype is not None and wide else spec.storage_dtype
        make = partial(block_of, blocks, path, spec)
        parts = family.parts(path) if named is None else ()
        out.append(LeafToWrite(path, spec, make, name, kind, transposed, parts))

    if wrong:
        raise StateError("names= does not fit the leaves:", wrong, "give each leaf its own name.")

    odd = [f"params[{leaf.path!r}] is {leaf.dtype}" for leaf in out if leaf.dtype not in NAMES]
    if odd:
        fix = "store them in another dtype (storage_dtype= of their specs)."
        raise StateError(f"safetensors files have no such dtype, {leaves(len(odd))}:", odd, fix)
    return out


def write_leaves(
    what: str,
    make_plan: Callable[[], tuple[list[LeafToWrite], AbstractContextManager[Put]]],
    mesh: Mesh,
    comm: Collectives,
) -> None:
    """Plan, gather, and write on rank 0: all ranks do each of these, or none. A collective.

    Args:
        what: what an error calls it.
        make_plan: a function that returns the leaves, which are the same on all ranks, and the files, which
            only rank 0 opens.
    """
    all_ranks = partial(all_or_none, comm.gather_object, what)
    plan, files = all_ranks(make_plan)

    # Collectives follow: all ranks must mean the same file.
    lines = [(leaf.path, leaf.name, leaf.transposed, leaf.dtype, leaf.spec) for leaf in plan]
    digests = comm.gather_object(hashlib.sha256(repr((what, mesh, lines)).encode()).hexdigest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise AgreementError(
            f"{what}: rank(s) {', '.join(map(str, odd))} mean another file or other leaves than rank 0.",
            fix="give the same path, specs, names and dtype on every rank.",
        )

    first, put = mesh.rank == 0, None
    try:
        put = all_ranks(files.__enter__ if first else None)
        if mesh.stages > 1:
            comm.open_groups([mesh.ordered(leaf.spec.storage.axes) for leaf in plan])
        for leaf in plan:
            # The first rank of the leaf's stage gathers it; rank 0, which writes it, may be of another one.
            home = mesh.partner(stage_of(leaf.spec, mesh) or 0, rank=0)
            full = torch.empty(leaf.spec.shape, dtype=leaf.dtype) if mesh.rank in (0, home) else None
            if is_here(leaf.spec, mesh):
                gather_leaf(leaf.make(), leaf.spec, mesh, comm, full if mesh.rank == home else None)
            if home and mesh.rank == home:
                comm.send([full], 0, f"leaf {leaf.path}")
                comm.flush()
            elif home and first:
                (full,) = comm.recv([(tuple(full.shape), full.dtype)], home, f"leaf {leaf.path}").wait()
            all_ranks(partial(put_leaf, put, leaf, full) if first else None)
        all_ranks(partial(files.__exit__, None, None, None) if first else None)

    # `__exit__` of the files removes what they hold so far.
    except BaseException as error:
        if put is not None:
            files.__exit__(type(error), error, error.__traceback__)
        raise


def put_leaf(put: Put, leaf: LeafToWrite, full: Tensor) -> None:
    """Write a whole leaf, as the tensors that files have for it."""
    if not leaf.experts:
        put(leaf.name, full.t() if leaf.transposed else full)
        return
    for name, part in zip(leaf.names, full.flatten(0, 1).chunk(len(leaf.names)), strict=True):
        put(name, part)


def gather_leaf(block: Tensor, spec: LayoutSpec, mesh: Mesh, comm: Collectives, out: Tensor | None) -> None:
    """Fill `out` with a leaf, cast to its dtype, a bounded piece at a time. A collective.

    Args:
        out: the whole leaf; None on ranks that only take part.
    """
    axes = mesh.ordered(spec.storage.axes)
    if not axes or not block.numel():
        if out is not None:
            out.copy_(block)
        return

    ranks = mesh.group_ranks(axes)
    # Where each rank's block lies in the leaf: every rank can tell for all.
    parts_of = [boxes(spec.shape, spec.storage, mesh, mesh.coordinate(rank)) for rank in ranks]
    block, full = as_pairs(block), None if out is None else as_pairs(out)
    step = max(1, PIECE_BYTES // (len(ranks) * block[0].nbytes))

    # A piece of rows of every rank's block at a time, from which rank `out` takes the valid part.
    for low in range(0, block.shape[0], step):
        piece = block[low : low + step]
        flat = comm.send_buffer(piece.numel(), piece.dtype, axes)
        flat.view(piece.shape).copy_(piece)
        handle = comm.all_gather(flat, axes)
        for part, parts in zip(handle.wait(), parts_of, strict=True):
            if full is None:
                continue
            rows = part.view(piece.shape)
            for where, own in parts:  # slices of the leaf, and of the rank's block without its padding
                begin, end = max(low, own[0].start), min(low + len(rows), own[0].stop)
                if begin < end:
                    first = where[0].start - own[0].start
                    valid = rows[(slice(begin - low, end - low), *own[1:])]
                    full[(slice(first + begin, first + end), *where[1:])] = valid
        handle.release()


@contextmanager
def model_directory(
    final: Path, entries: Sequence[TensorToWrite], max_bytes: float, config: Mapping[str, Any] | Path
) -> Iterator[Put]:
    """Write tensors, in any order, into files of a new folder. After an exception nothing is left.

    Args:
        final: the path of the folder when it is complete. It replaces an empty directory, and nothing else.
        max_bytes: the most bytes of a file.
    """

    folder, files = final.with_name(f".{final.name}.writing"), split_files(entries, max_bytes)
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)

    # Heads first, so that tensors can come in any order.
    places: dict[str, tuple[Path, int]] = {}
    try:
        folder.mkdir(parents=True)
        for file, some in files.items():
            head, starts = file_layout(some, FORMAT)
            path = folder / file
            path.touch()
            _write_at(path, memoryview(head), 0)
            places |= {name: (path, start) for name, start in starts.items()}
        yield lambda name, tensor: _write_at(places[name][0], bytes_of(tensor), places[name][1])

        # Renamed when all of it is on the disk: a folder of that name is complete.
        _complete(folder, files, config)
        for path in folder.iterdir():
            flush_file(path)
        flush_directory(folder)
        os.replace(folder, final)
        flush_directory(final.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_at(path: Path, data: memoryview, at: int) -> None:
    """Write bytes at a place of a file, which may be longer or shorter."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while len(data):
            count = os.pwrite(fd, data, at)
            data, at = data[count:], at + count
    finally:
        os.close(fd)


def split_files(entries: Sequence[TensorToWrite], max_bytes: float) -> dict[str, list[TensorToWrite]]:
    """Return tensors by file, in order: files of at most so many bytes, or of one larger tensor."""
    files: list[list[TensorToWrite]] = [[]]
    room = max_bytes
    for e in entries:
        # A file has one tensor at least, however large that is.
        if files[-1] and e.bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(e)
        room -= e.bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": some for n, some in enumerate(files, 1)}


def _complete(
    folder: Path, files: Mapping[str, Sequence[TensorToWrite]], config: Mapping[str, Any] | Path
) -> None:
    """Add what a model directory has besides weights: the index of several files, and the configuration."""
    if len(files) > 1:
        where = {e.name: file for file, entries in files.items() for e in entries}
        total = sum(e.bytes for entries in files.values() for e in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    entries = [entry for some in files.values() for entry in some]
    if isinstance(config, Path):
        found = [config] if config.is_file() else sorted({p for g in COPIED for p in config.glob(g)})
        for source in filter(Path.is_file, found):
            shutil.copyfile(source, folder / ("config.json" if config.is_file() else source.name))

    file = folder / "config.json"
    values = read_config(folder) if isinstance(config, Path) else config
    # A configuration that is copied stays as it is, byte for byte, if it fits the tensors.
    final = config_of_tensors(values, entries)
    if isinstance(config, Path) and final != values:
        file.write_text(json.dumps(final, indent=2) + "\n")
    elif final and not isinstance(config, Path):
        file.write_text(json.dumps(final, indent=2, sort_keys=True, default=str) + "\n")
