"""Write: safetensors files that are filled run by run, and named when they are complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnshard.hf.files import INDEX, SINGLE
from fnshard.runtime.files.folder import flush_directory
from fnshard.runtime.files.tensorfile import TensorToWrite, bytes_of, file_layout
from fnshard.runtime.tiers import allocate

FORMAT = {"format": "pt"}  # without it transformers refuses a file
COPIED = (
    "config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.*", "preprocessor_config.json", "processor_config.json",
    "spiece.model",
)  # fmt: skip


# Write rows of a tensor, from an index on, in its dtype: (name, first, rows).
Put = Callable[[str, int, Tensor], None]
# One rank's writer: what it wrote takes its name at the end; after an exception nothing is left.
LeafWriter = AbstractContextManager[Put]


def staging_path(final: Path) -> Path:
    """The name of what is not complete yet."""
    return final.with_name(f".{final.name}.writing")


@contextmanager
def _staged(final: Path) -> Iterator[Path]:
    path = staging_path(final)
    _remove(path)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield path
        os.replace(path, final)  # of directories only an empty one is replaced
        flush_directory(final.parent)
    except BaseException:
        _remove(path)
        raise


@contextmanager
def _tensor_file(path: Path, entries: Sequence[TensorToWrite]) -> Iterator[Put]:
    """A safetensors file whose tensors may be written in any order; flushed to the disk at the end."""
    head, starts = file_layout(entries, FORMAT)
    row_bytes = {e.name: e.bytes // max(e.shape[0], 1) if e.shape else e.bytes for e in entries}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def write(data: memoryview, at: int) -> None:
        while len(data):
            count = os.pwrite(fd, data, at)
            data, at = data[count:], at + count

    try:
        write(memoryview(head), 0)
        yield lambda name, first, rows: write(bytes_of(rows), starts[name] + first * row_bytes[name])
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def safetensors_writer(final: Path, entries: Sequence[TensorToWrite]) -> Iterator[Put]:
    """A `.safetensors` file, replaced if there is one."""
    with _staged(final) as path, _tensor_file(path, entries) as put:
        yield put


@contextmanager
def state_dict_writer(
    final: Path, entries: Sequence[TensorToWrite], tied: Mapping[str, str], order: Sequence[str]
) -> Iterator[Put]:
    """A `state_dict` as `torch.save` writes it, replaced if there is one.

    Until then its tensors are in mapped files beside it, so that memory need not hold them all.

    Args:
        tied: `{other name: name}`.
        order: of all names, where it matters; what is no tensor of these is left out.
    """
    with _staged(final) as path:
        cpu, folder = torch.device("cpu"), str(final.parent)
        values = {e.name: allocate(e.shape, e.dtype, "disk", cpu, folder) for e in entries}

        def put(name: str, first: int, rows: Tensor) -> None:
            value = values[name] if values[name].dim() else values[name].view(1)
            value[first : first + rows.shape[0]].copy_(rows)

        yield put
        names = {name: tied.get(name, name) for name in order} or {n: n for n in values}
        with open(path, "xb") as file:
            torch.save({name: values[p] for name, p in names.items() if p in values}, file)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def model_directory_writer(
    final: Path, files: Sequence[Sequence[TensorToWrite]], write_config: Callable[[Path], None]
) -> Iterator[Put]:
    """A model directory: one file, or several and an index, and what stands beside them.

    Args:
        final: a directory that is not there yet, or is empty.
        files: entries, file by file; tensors are written in this order.
        write_config: writes config.json and the like into a directory.
    """
    file_of = {e.name: number for number, entries in enumerate(files) for e in entries}
    with _staged(final) as folder, ExitStack() as current:
        folder.mkdir()
        write_config(folder)
        opened: list[Put] = []

        def open_through(number: int) -> Put:
            while len(opened) <= number:
                current.close()
                path = folder / _file_name(len(opened), len(files))
                opened.append(current.enter_context(_tensor_file(path, files[len(opened)])))
            return opened[number]

        yield lambda name, first, rows: open_through(file_of[name])(name, first, rows)
        open_through(len(files) - 1)  # the last ones may hold nothing but empty tensors
        current.close()
        if len(files) > 1:
            weight_map = {n: _file_name(i, len(files)) for n, i in sorted(file_of.items())}
            total = sum(e.bytes for entries in files for e in entries)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_flushed(folder / INDEX, json.dumps(index, indent=2) + "\n")
        flush_directory(folder)


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def split_files(entries: Sequence[TensorToWrite], max_bytes: float) -> list[list[TensorToWrite]]:
    """Entries in files of at most so many bytes, in order; a tensor that is larger has one of its own."""
    files: list[list[TensorToWrite]] = [[]]
    room = max_bytes
    for e in entries:
        if files[-1] and e.bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(e)
        room -= e.bytes
    return files


def config_writer(config: Mapping[str, Any] | Path | None) -> Callable[[Path], None]:
    """What writes, into a directory, a configuration; or copies it and the tokenizer's files from another."""

    def write(folder: Path) -> None:
        if isinstance(config, Mapping):
            text = json.dumps(config, indent=2, sort_keys=True, default=str)
            write_flushed(folder / "config.json", text + "\n")
        elif config is not None:
            found = [config] if config.is_file() else sorted({p for g in COPIED for p in config.glob(g)})
            for source in found:
                if source.is_file():
                    target = folder / ("config.json" if config.is_file() else source.name)
                    shutil.copyfile(source, target)
                    flush_file(target)

    return write


def write_flushed(path: Path, text: str) -> None:
    """A small file, flushed to the disk."""
    path.write_text(text)
    flush_file(path)


def flush_file(path: Path) -> None:
    """Flush a file to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """As far as possible: the caller raises a better error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
