"""Write models: gather leaves one by one to rank 0, which fills safetensors files and names their folder."""

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
    "*.model", "*.spm", "tekken.json", "bpe.codes",
)  # fmt: skip

Put = Callable[[str, Tensor], None]  # a function that writes a whole tensor, by its name, in its dtype


@dataclass(frozen=True)
class LeafToWrite:
    """A leaf that is to be written.

    Args:
        path, spec: the leaf.
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
        if not self.experts:
            return [self.name]
        prefix = self.name.rpartition(".")[0]
        count = self.spec.shape[0]
        return [f"{prefix}.{expert}.{part}.weight" for expert in range(count) for part in self.experts]


def leaves_to_write(
    blocks: Mapping[str, Tensor],
    specs: Mapping[str, LayoutSpec],
    family: Family,
    dtype: torch.dtype | None,
    *,
    names: Names = None,
) -> list[LeafToWrite]:
    """Return what is written of stored blocks, which are given by path.

    Raises:
        StateError: `names` or `dtype` do not fit, or files cannot hold the dtype of a leaf.
    """
    check_names(names, specs)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise StateError(f"dtype={dtype!r}: a float dtype, such as torch.bfloat16, or None.")

    out: list[LeafToWrite] = []
    wrong: list[str] = []
    path_of: dict[str, str] = {}  # by names that are taken
    for path, spec in specs.items():
        named = read_name(path, names)
        if named is None and not family.saves(path):
            continue
        is_transposed = isinstance(named, Transposed)
        name = named.name if isinstance(named, Transposed) else named or family.name(path)
        if is_transposed and len(spec.shape) != 2:
            wrong.append(f"params[{path!r}] {list(spec.shape)} is to be transposed, and is no matrix")
        if name in path_of:
            wrong.append(f"{name!r} is to be params[{path_of[name]!r}] and params[{path!r}]")
        path_of[name] = path

        # Integers and floats of eight bits keep their dtype.
        is_wide_float = spec.storage_dtype.is_floating_point and spec.storage_dtype.itemsize > 1
        file_dtype = dtype if dtype is not None and is_wide_float else spec.storage_dtype
        make = partial(block_of, blocks, path, spec)
        # A name of the user's is that of one tensor, whatever the family has.
        experts = family.parts(path) if named is None else ()
        out.append(LeafToWrite(path, spec, make, name, file_dtype, is_transposed, experts))

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
    """Plan, gather, and write on rank 0: all ranks succeed in each of these, or none. A collective.

    Args:
        what: what an error calls it.
        make_plan: a function that returns the leaves, which are the same on all ranks, and the files, which
            only rank 0 opens.
    """
    all_ranks = partial(all_or_none, comm.gather_object, what)
    plan, files = all_ranks(make_plan)

    # Collectives follow, so that all ranks must mean the same file and the same leaves: compare a digest.
    lines = [(leaf.path, leaf.name, leaf.transposed, leaf.dtype, leaf.spec) for leaf in plan]
    digests = comm.gather_object(hashlib.sha256(repr((what, mesh, lines)).encode()).hexdigest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise AgreementError(
            f"{what}: rank(s) {', '.join(map(str, odd))} mean another file or other leaves than rank 0.",
            fix="give the same path, specs, names and dtype on every rank.",
        )

    is_writer = mesh.rank == 0
    put = None
    try:
        put = all_ranks(files.__enter__ if is_writer else None)
        if mesh.stages > 1:
            comm.open_groups([mesh.ordered(leaf.spec.storage.axes) for leaf in plan])
        for leaf in plan:
            # The first rank of the leaf's stage gathers it.
            gatherer = mesh.partner(stage_of(leaf.spec, mesh) or 0, rank=0)
            full = torch.empty(leaf.spec.shape, dtype=leaf.dtype) if mesh.rank in (0, gatherer) else None
            if is_here(leaf.spec, mesh):
                gather_leaf(leaf.make(), leaf.spec, mesh, comm, full if mesh.rank == gatherer else None)

            # Rank 0, which writes it, may be of another stage.
            if gatherer != 0 and mesh.rank == gatherer:
                comm.send([full], 0, f"leaf {leaf.path}")
                comm.flush()
            elif gatherer != 0 and is_writer:
                (full,) = comm.recv([(tuple(full.shape), full.dtype)], gatherer, f"leaf {leaf.path}").wait()
            all_ranks(partial(put_leaf, put, leaf, full) if is_writer else None)
        all_ranks(partial(files.__exit__, None, None, None) if is_writer else None)

    # Only rank 0 has entered the files, whose `__exit__` removes what was written so far.
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
    # Where each rank's block lies in the leaf, which every rank knows of all.
    boxes_of_ranks = [boxes(spec.shape, spec.storage, mesh, mesh.coordinate(rank)) for rank in ranks]
    block = as_pairs(block)
    full = None if out is None else as_pairs(out)
    step = max(1, PIECE_BYTES // (len(ranks) * block[0].nbytes))

    # Gather some rows of every rank's block at a time. The rank that has `out` copies them to their places.
    for low in range(0, block.shape[0], step):
        piece = block[low : low + step]
        flat = comm.send_buffer(piece.numel(), piece.dtype, axes)
        flat.view(piece.shape).copy_(piece)
        handle = comm.all_gather(flat, axes)
        for gathered, rank_boxes in zip(handle.wait(), boxes_of_ranks, strict=True):
            if full is None:
                continue
            rows = gathered.view(piece.shape)
            # A box has slices of the leaf, and of the rank's block without its padding.
            for in_leaf, in_block in rank_boxes:
                begin, end = max(low, in_block[0].start), min(low + len(rows), in_block[0].stop)
                if begin < end:
                    shift = in_leaf[0].start - in_block[0].start
                    valid = rows[(slice(begin - low, end - low), *in_block[1:])]
                    full[(slice(shift + begin, shift + end), *in_leaf[1:])] = valid
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
    # A save that was killed may have left a folder of that name.
    folder = final.with_name(f".{final.name}.writing")
    files = split_files(entries, max_bytes)
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)

    # Write the headers first: they say where each tensor goes, so that tensors can be written in any order.
    places: dict[str, tuple[Path, int]] = {}
    try:
        folder.mkdir(parents=True)
        for file, file_entries in files.items():
            header, starts = file_layout(file_entries, FORMAT)
            path = folder / file
            path.touch()
            _write_at(path, memoryview(header), 0)
            places |= {name: (path, start) for name, start in starts.items()}
        yield lambda name, tensor: _write_at(places[name][0], bytes_of(tensor), places[name][1])

        # Rename the folder when all of it is on the disk, so that a folder of the final name is complete.
        _add_index_and_config(folder, files, config)
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
        # The system may write less than asked for.
        while len(data):
            count = os.pwrite(fd, data, at)
            data, at = data[count:], at + count
    finally:
        os.close(fd)


def split_files(entries: Sequence[TensorToWrite], max_bytes: float) -> dict[str, list[TensorToWrite]]:
    """Return tensors by file, in order: files of at most so many bytes, or of one larger tensor."""
    files: list[list[TensorToWrite]] = [[]]
    room = max_bytes
    for entry in entries:
        # A file has one tensor at least, however large that is.
        if files[-1] and entry.bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(entry)
        room -= entry.bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": file for n, file in enumerate(files, 1)}


def _add_index_and_config(
    folder: Path, files: Mapping[str, Sequence[TensorToWrite]], config: Mapping[str, Any] | Path
) -> None:
    """Add what a model directory has besides weights: the index of several files, and the configuration."""
    if len(files) > 1:
        file_of = {e.name: file for file, entries in files.items() for e in entries}
        total = sum(e.bytes for entries in files.values() for e in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    entries = [entry for file_entries in files.values() for entry in file_entries]
    file = folder / "config.json"
    if not isinstance(config, Path):
        final = config_of_tensors(config, entries)
        if final:
            file.write_text(json.dumps(final, indent=2, sort_keys=True, default=str) + "\n")
        return

    # Copy a configuration, or all files of a directory that belong to the model but its weights.
    if config.is_file():
        shutil.copyfile(config, file)
    else:
        # An auto_map names classes of modules beside it, without which the directory cannot be opened.
        configs = [path for path in config.glob("*config.json") if path.is_file()]
        has_code = any(b'"auto_map"' in path.read_bytes() for path in configs)
        globs = (*COPIED, "*.py") if has_code else COPIED
        for source in sorted({path for glob in globs for path in config.glob(glob)}):
            if source.is_file():
                shutil.copyfile(source, folder / source.name)

    # A copied configuration is kept byte for byte, if it fits the tensors.
    values = read_config(folder)
    final = config_of_tensors(values, entries)
    if final != values:
        file.write_text(json.dumps(final, indent=2) + "\n")
