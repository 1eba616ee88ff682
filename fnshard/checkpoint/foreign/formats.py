"""Formats: recognise, read and write training states of several formats, in one process.

A tensor is read when it is written, so that no more than one of them is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fnshard.checkpoint.blocks import ChunkRead, fill_chunk, open_and_check
from fnshard.checkpoint.foreign.boxes import Piece, Pieces
from fnshard.checkpoint.foreign.dcp import find_dcp, read_dcp
from fnshard.checkpoint.foreign.dcp_writing import (
    LAYOUTS,
    TORCH_SLOTS,
    Item,
    group_items,
    write_items,
    write_metadata,
)
from fnshard.checkpoint.foreign.deepspeed import find_deepspeed, read_deepspeed
from fnshard.checkpoint.foreign.dialects import SavedState
from fnshard.checkpoint.foreign.placing import Source, match_state
from fnshard.checkpoint.foreign.torch_files import find_torch_files, read_torch_files
from fnshard.checkpoint.manifest_file import NAME, Chunk, DataFile, Manifest, SavedLeaf
from fnshard.checkpoint.retention import find_complete
from fnshard.compiler.ir.values import MASTER
from fnshard.errors import CheckpointError
from fnshard.functional import make_functional
from fnshard.hf.names import family_of
from fnshard.hf.reading import INDEX, SINGLE, FileTensor, LeafSource, open_tensors, read_config
from fnshard.hf.writing import leaves_to_write, model_directory, put_leaf
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.rules import match_specs
from fnshard.layout.spec import LayoutSpec
from fnshard.runtime.files import tensorfile
from fnshard.runtime.files.folder import AtomicDirectory, data_file, flush_directory, flush_file
from fnshard.runtime.files.tensorfile import STATE_DTYPES, STATE_NAMES, Corrupt, TensorToWrite, bytes_of
from fnshard.runtime.files.torchfile import read_torch_file

FILE_BYTES = 5e9  # of one file of a Hugging Face folder


@dataclass(frozen=True)
class Format:
    """A format of checkpoints: its name, and functions that recognise, read and write it.

    A format without `write` is only read. `keeps_optimizer` says whether it has a place for moments.
    """

    title: str
    recognises: Callable[[Path], Any]
    read: Callable[[Path, ExitStack], SavedState]
    write: Callable[..., None] | None = None
    keeps_optimizer: bool = True


# ------------------------------------------------------------------ reading


@dataclass(frozen=True)
class CheckedChunk:
    """The data of a chunk of a fnshard checkpoint, compared with its checksums as it is read."""

    folder: Path
    manifest: Manifest
    leaf: str
    chunk: Chunk
    dtype: torch.dtype

    def __getitem__(self, slices: Any) -> Tensor:
        bounds = [s.indices(n)[:2] for s, n in zip(slices, self.chunk.shape, strict=True)]
        target = torch.empty([last - first for first, last in bounds], dtype=self.dtype)
        fd = open_and_check(self.folder, self.chunk.file, self.manifest.files[self.chunk.file])
        try:
            start = tuple(first for first, _ in bounds)
            fill_chunk(fd, ChunkRead(self.leaf, self.chunk, self.dtype, start, target))
        finally:
            os.close(fd)
        return target


def read_fnshard(path: Path, files: ExitStack) -> SavedState:
    """Return what a fnshard checkpoint holds, or the newest complete one of a root.

    Raises:
        Corrupt: there is none; it holds complex or coded leaves.
    """
    newest = next(find_complete(path), None)
    if newest is None:
        raise Corrupt("holds no complete checkpoint")
    _, folder, manifest = newest
    coded = [p for p, text in manifest.specs.items() if "codec='" in text]
    if odd := [*manifest.complex, *coded]:
        what = f"holds complex or coded leaves, such as {odd[0]!r}, which other formats lack"
        raise Corrupt(what, "read it by fs.checkpoint.restore.")

    # A leaf's chunks are its pieces, which open when they are read.
    def open_leaf(name: str) -> FileTensor:
        leaf = manifest.leaves[name]
        dtype = STATE_DTYPES[leaf.dtype]
        pieces = [
            Piece(c.offset, c.shape, lambda c=c: CheckedChunk(folder, manifest, name, c, dtype))
            for c in leaf.chunks
        ]
        return FileTensor(folder.name, Pieces(dtype, leaf.shape, pieces), dtype, leaf.shape)

    # Sort leaves by their names. A master copy has more digits than the parameter, and replaces it.
    params: dict[str, FileTensor] = {}
    slots: dict[str, dict[str, FileTensor]] = {}
    masters: dict[str, FileTensor] = {}
    for name in manifest.leaves:
        kind, _, rest = name.partition("/")
        leaf, _, slot = rest.rpartition("/")
        if kind == "params":
            params[rest] = open_leaf(name)
        elif kind == "optimizer" and slot == MASTER:
            masters[leaf] = open_leaf(name)
        elif kind == "optimizer":
            slots.setdefault(leaf, {})[slot] = open_leaf(name)
    return SavedState("fnshard", params | masters, slots, manifest.step)


def read_hugging_face(path: Path, files: ExitStack) -> SavedState:
    """Return the weights of a Hugging Face folder, or of a safetensors file."""
    return SavedState("Hugging Face", files.enter_context(open_tensors(path)))


def has_safetensors(path: Path) -> bool:
    """Return whether a path is a Hugging Face folder with safetensors, or a safetensors file."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


def has_manifest(path: Path) -> bool:
    """Return whether a path is a checkpoint of fnshard's, or a folder of some."""
    return path.is_dir() and any(map(Path.is_file, [path / NAME, *path.glob(f"*/{NAME}")]))


# ------------------------------------------------------------------ names by a module


def name_by_model(saved: SavedState, model: nn.Module) -> SavedState:
    """Return a state whose names are the paths of a module's leaves, with the buffers that the module makes.

    Raises:
        StateError: the tensors are of another module.
    """
    specs = ResolvedSpecs.of(match_specs(make_functional(model)[1], [("*", LayoutSpec())]))
    sources = match_state(saved, specs, model, None, {}, ())
    params = {p: _open_source(sources[f"params/{p}"]) for p in specs.leaves}
    slots: dict[str, dict[str, FileTensor]] = {}
    for name, source in sources.items():
        kind, _, rest = name.partition("/")
        path, _, slot = rest.rpartition("/")
        if kind == "optimizer":
            slots.setdefault(path, {})[slot] = _open_source(source)
    return SavedState(saved.kind, params, slots, saved.step)


@dataclass(frozen=True)
class _LeafData:
    """The data of a leaf, read from its source."""

    source: LeafSource

    def __getitem__(self, slices: Any) -> Tensor:
        whole = tuple(slice(0, size) for size in self.source.shape)
        return self.source.read(whole if slices is ... else slices)


def _open_source(source: Source) -> FileTensor:
    """Return what fills a leaf as a tensor that is read when needed."""
    if isinstance(source, Tensor):
        return FileTensor("the module", source, source.dtype, tuple(source.shape))
    return FileTensor(source.saved.file, _LeafData(source), source.saved.dtype, source.shape)


# ------------------------------------------------------------------ writing


def write_fnshard(path: Path, saved: SavedState, **options: Any) -> None:
    """Write a checkpoint as from a mesh of one rank; `restore` reads it onto any mesh."""
    named = {f"params/{name}": tensor for name, tensor in saved.params.items()}
    for name, own in saved.slots.items():
        named |= {f"optimizer/{name}/{slot}": tensor for slot, tensor in own.items()}

    # One data file, in which each leaf is a single chunk, and the manifest.
    with _write_atomically(path) as folder:
        entries = [
            TensorToWrite(name, tuple(t.shape), t.dtype, lambda t=t: t.data[...]) for name, t in named.items()
        ]
        file = data_file(0)
        done = tensorfile.write(folder / file, entries)
        leaves = {}
        for name, t in named.items():
            chunk = Chunk((0,) * len(t.shape), tuple(t.shape), file, done.at[name], done.crc32[name])
            leaves[name] = SavedLeaf(tuple(t.shape), STATE_NAMES[t.dtype], "P()", (chunk,))
        files = {file: DataFile(done.bytes, done.header_bytes, done.header_crc32)}
        number = int(path.name) if path.name.isdecimal() else None
        Manifest(
            step=saved.step, seed=0, mesh={"axes": {"shard": 1}, "data_axes": ["shard"]}, leaves=leaves,
            files=files, specs={}, data=(), config=None, metrics={},
            versions={"torch": str(torch.__version__)}, number=number,
        ).write(folder)  # fmt: skip


def write_dcp(
    path: Path, saved: SavedState, *, layout: str = "fsdp", optimizer: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Write a folder of `torch.distributed.checkpoint`.

    Args:
        optimizer: arguments of AdamW, for the group of the parameters that have moments.
    """
    param_path, slot_path, group_path = LAYOUTS[layout]
    groups = [] if optimizer is None else group_items(group_path, list(saved.slots), optimizer)

    def items() -> Iterator[Item]:
        for name, t in saved.params.items():
            yield make_item(param_path(name), t)
        for name, own in saved.slots.items():
            for slot, t in own.items():
                yield make_item(slot_path(name, TORCH_SLOTS.get(slot, slot)), t)
            step = torch.tensor(float(saved.step))
            yield Item(slot_path(name, "step"), (), step.dtype, [(((), ()), lambda step=step: step)])
        yield from groups

    def make_item(where: tuple[Any, ...], t: FileTensor) -> Item:
        return Item(where, t.shape, t.dtype, [(((0,) * len(t.shape), t.shape), lambda: t.data[...])])

    with _write_atomically(path) as folder:
        write_metadata(folder, write_items(folder, 0, items()))


def write_torch(path: Path, saved: SavedState, **options: Any) -> None:
    """Write a `torch.save` file, a state dict.

    If there is optimizer state, it is `{"model": ..., "optim": {"state": ...}}` by name, which
    `set_optimizer_state_dict` takes with the groups of an optimizer.
    """
    slots = {
        name: {TORCH_SLOTS.get(slot, slot): tensor for slot, tensor in own.items()}
        for name, own in saved.slots.items()
    }
    aside = path.with_name(f".{path.name}.writing")
    aside.unlink(missing_ok=True)

    def like(tensor: FileTensor) -> Tensor:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)

    try:
        # Lay the file out without values.
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            model = {name: like(tensor) for name, tensor in saved.params.items()}
            state = {name: {slot: like(t) for slot, t in own.items()} for name, own in slots.items()}
            steps = {name: {**own, "step": float(saved.step)} for name, own in state.items()}
            torch.save({"model": model, "optim": {"state": steps}} if slots else model, aside)

        # Write the values to their places one by one, so that no more than one is in memory.
        laid_out = read_torch_file(aside)
        model, state = (laid_out["model"], laid_out["optim"]["state"]) if slots else (laid_out, {})
        places = [(model[name], tensor) for name, tensor in saved.params.items()]
        places += [(state[name][slot], t) for name, own in slots.items() for slot, t in own.items()]
        fd = os.open(aside, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for place, tensor in places:
                # The system may write fewer bytes than it is given.
                data, at = bytes_of(tensor.data[...]), place.at
                while len(data):
                    count = os.pwrite(fd, data, at)
                    data, at = data[count:], at + count
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, path)
        flush_directory(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_hugging_face(
    path: Path,
    saved: SavedState,
    *,
    model: nn.Module | None = None,
    config: Path | None = None,
    **options: Any,
) -> None:
    """Write the weights as safetensors files, with the configuration and tokenizer of `config`.

    Args:
        model: the module whose paths the names are. It says how files call them, and which they leave out.
    """
    # Without a module, names are written as they are.
    known = read_config(config) if config is not None else {}
    if model is None:
        entries = [TensorToWrite(name, tuple(t.shape), t.dtype) for name, t in saved.params.items()]
        with model_directory(path, entries, FILE_BYTES, config or {}) as put:
            for name, tensor in saved.params.items():
                put(name, tensor.data[...])
        return

    # With a module, its family says how leaves are named in files, and which are left out.
    specs = ResolvedSpecs.of(match_specs(make_functional(model)[1], [("*", LayoutSpec())])).leaves
    specs = {p: replace(s, storage_dtype=saved.params[p].dtype) for p, s in specs.items()}
    plan = leaves_to_write({}, specs, family_of(known, model, specs), None)
    entries = [entry for leaf in plan for entry in leaf.entries]
    with model_directory(path, entries, FILE_BYTES, config or {}) as put:
        for leaf in plan:
            put_leaf(put, leaf, saved.params[leaf.path].data[...])


@contextmanager
def _write_atomically(path: Path) -> Iterator[Path]:
    """Yield a folder that is flushed and gets its name when the block ends, or is removed on an error."""
    directory = AtomicDirectory(path.absolute())
    try:
        directory.begin()
        yield directory.saving
        for file in directory.saving.iterdir():
            flush_file(file)
        flush_directory(directory.saving)
        directory.commit()
    finally:
        directory.end()


# In the order in which they are tried: a folder of DeepSpeed's may hold a pytorch_model.bin as well.
FORMATS: Mapping[str, Format] = {
    "fnshard": Format("fnshard checkpoint", has_manifest, read_fnshard, write_fnshard),
    "dcp": Format("DCP folder", find_dcp, lambda path, files: read_dcp(path), write_dcp),
    "deepspeed": Format("DeepSpeed folder", find_deepspeed, lambda path, files: read_deepspeed(path)),
    "hf": Format("Hugging Face folder", has_safetensors, read_hugging_face, write_hugging_face, False),
    "torch": Format("torch file", find_torch_files, lambda path, files: read_torch_files(path), write_torch),
}


def recognise_format(path: Path) -> str:
    """Return the name of the format of a folder or file.

    Raises:
        CheckpointError: it does not exist, or its format is not known.
    """
    if not path.exists():
        raise CheckpointError(f"{str(path)!r} is not there.", fix="name a folder or a file.")
    for name, each in FORMATS.items():
        if each.recognises(path):
            return name

    inside = sorted(each.name for each in path.iterdir())[:8] if path.is_dir() else []
    titles = ", ".join(each.title for each in FORMATS.values())
    what = f"{str(path)!r} is of no known format{'; in it are:' if inside else '.'}"
    raise CheckpointError(what, inside, f"name one of these: {titles}.")
