"""Write: safetensors files that are filled run by run, and named when they are whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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


class LeafWriter(Protocol):
    """Where one rank writes leaves: `begin`, `put` in the order of the entries, `commit` or `abort`."""

    def begin(self) -> None:
        """Before any leaf."""

    def put(self, name: str, first: int, rows: Tensor) -> None:
        """Rows of a tensor, from the `first` on, in its dtype."""

    def commit(self) -> None:
        """All is written: flush it, and give it its name."""

    def abort(self) -> None:
        """Leave nothing behind."""


def staging_path(final: Path) -> Path:
    """The name of what is not whole yet."""
    return final.with_name(f".{final.name}.writing")


class PartialTensorFile:
    """One safetensors file; its tensors may be written in any order."""

    def __init__(self, path: Path, entries: Sequence[TensorToWrite]):
        head, self._at = file_layout(entries, FORMAT)
        self._row_bytes = {e.name: e.bytes // max(e.shape[0], 1) if e.shape else e.bytes for e in entries}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._write(memoryview(head), 0)

    def put(self, name: str, first: int, rows: Tensor) -> None:
        """Rows of a tensor, from the `first` on."""
        self._write(bytes_of(rows), self._at[name] + first * self._row_bytes[name])

    def _write(self, data: memoryview, at: int) -> None:
        while len(data):
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def close(self, *, flushed: bool) -> None:
        """Give the file back; `flushed`: to the disk."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if flushed:
                os.fsync(fd)
        finally:
            os.close(fd)


@dataclass
class SafetensorsWriter:
    """A `.safetensors` file, replaced if there is one."""

    final: Path
    entries: Sequence[TensorToWrite]
    _file: PartialTensorFile | None = None

    def begin(self) -> None:
        """Make what is written to."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        _remove(staging_path(self.final))
        self._file = PartialTensorFile(staging_path(self.final), self.entries)

    def put(self, name: str, first: int, rows: Tensor) -> None:
        """Rows of a tensor, from the `first` on."""
        self._file.put(name, first, rows)

    def commit(self) -> None:
        """Flush it, and give it its name."""
        self._file.close(flushed=True)
        _replace(self.final)

    def abort(self) -> None:
        """Leave nothing behind."""
        if self._file is not None:
            self._file.close(flushed=False)
        _remove(staging_path(self.final))


@dataclass
class StateDictWriter:
    """A `state_dict` as `torch.save` writes it, replaced if there is one.

    Until then its tensors are in mapped files beside it: nobody's memory need hold them all.
    """

    final: Path
    entries: Sequence[TensorToWrite]
    tied: Mapping[str, str]  # {other name: name}
    order: Sequence[str]  # of all names, if it matters; what is no tensor of these is left out
    _values: dict[str, Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Make what is written to."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        _remove(staging_path(self.final))
        for e in self.entries:
            folder = str(self.final.parent)
            self._values[e.name] = allocate(e.shape, e.dtype, "disk", torch.device("cpu"), folder)

    def put(self, name: str, first: int, rows: Tensor) -> None:
        """Rows of a tensor, from the `first` on."""
        value = self._values[name]
        (value if value.dim() else value.view(1))[first : first + rows.shape[0]].copy_(rows)

    def commit(self) -> None:
        """Flush it, and give it its name."""
        names = {name: self.tied.get(name, name) for name in self.order} or {n: n for n in self._values}
        values = {name: self._values[path] for name, path in names.items() if path in self._values}
        with open(staging_path(self.final), "xb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        self._values.clear()
        _replace(self.final)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._values.clear()
        _remove(staging_path(self.final))


@dataclass
class ModelDirectoryWriter:
    """A model directory: one file, or several and an index, and what stands beside them.

    Args:
        final: a directory that is not there yet, or is empty.
        files: entries, file by file.
        write_config: writes config.json and the like into a directory.
    """

    final: Path
    files: Sequence[Sequence[TensorToWrite]]
    write_config: Callable[[Path], None]
    _open: PartialTensorFile | None = None
    _number: int = -1
    _where: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Make what is written to."""
        _remove(staging_path(self.final))
        self.final.parent.mkdir(parents=True, exist_ok=True)
        staging_path(self.final).mkdir()
        self._where = {e.name: number for number, entries in enumerate(self.files) for e in entries}
        self.write_config(staging_path(self.final))

    def put(self, name: str, first: int, rows: Tensor) -> None:
        """Rows of a tensor, from the `first` on."""
        while self._number < self._where[name]:
            self._next()
        self._open.put(name, first, rows)

    def _next(self) -> None:
        if self._open is not None:
            self._open.close(flushed=True)
        self._number += 1
        path = staging_path(self.final) / _file_name(self._number, len(self.files))
        self._open = PartialTensorFile(path, self.files[self._number])

    def commit(self) -> None:
        """Flush it, and give it its name."""
        while self._number < len(self.files) - 1:  # files of nothing but empty tensors
            self._next()
        self._open.close(flushed=True)
        folder = staging_path(self.final)
        if len(self.files) > 1:
            weight_map = {n: _file_name(i, len(self.files)) for n, i in sorted(self._where.items())}
            total = sum(e.bytes for entries in self.files for e in entries)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_flushed(folder / INDEX, json.dumps(index, indent=2) + "\n")
        flush_directory(folder)
        os.rename(folder, self.final)  # replaces an empty directory, and no other
        flush_directory(self.final.parent)

    def abort(self) -> None:
        """Leave nothing behind."""
        if self._open is not None:
            self._open.close(flushed=False)
        _remove(staging_path(self.final))


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
                    _flush_file(target)

    return write


def write_flushed(path: Path, text: str) -> None:
    """A small file, flushed to the disk."""
    path.write_text(text)
    _flush_file(path)


def _flush_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _replace(final: Path) -> None:
    os.replace(staging_path(final), final)
    flush_directory(final.parent)


def _remove(path: Path) -> None:
    """As far as that goes: whoever comes here has a better error to tell."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
