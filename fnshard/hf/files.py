"""Files: the safetensors files of a model directory, found and opened. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fnshard.errors import StateError
from fnshard.runtime.files.json_reader import JsonError, from_json
from fnshard.runtime.files.tensorfile import (
    Corrupt,
    HEADER_LIMIT_bytes,
    TensorFileHeader,
    open_regular,
    read_exactly,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class FileTensor:
    """A tensor in an open file: its data begin at byte `at`."""

    file: str
    fd: int
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} in {self.file}"


@contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, FileTensor]]:
    """Every tensor of a model directory, or of one file, by name. The files are open meanwhile.

    Raises:
        StateError: there are none, or they are not what they should be; names all.
    """
    folder, where = (path, None) if path.is_dir() else (path.parent, {})
    if where is None:
        where = _index(path)
        files = sorted(set(where.values())) if where else [SINGLE]
    elif path.is_file():
        files = [path.name]
    else:
        raise _nothing(path, "no such directory, and no file of that name")
    with ExitStack() as stack:
        tensors, problems = _tensors(folder, files, where, stack)
        if problems:
            raise StateError(
                f"the weights in {str(path)!r} cannot be read:",
                problems,
                "fetch or copy them once more; all that a directory needs is its *.safetensors files, "
                f"and {INDEX} if there are several.",
            )
        yield tensors


def _tensors(
    folder: Path, files: list[str], where: Mapping[str, str], stack: ExitStack
) -> tuple[dict[str, FileTensor], list[str]]:
    tensors: dict[str, FileTensor] = {}
    problems: list[str] = []
    read: set[str] = set()
    for name in files:
        try:
            fd = open_regular(folder, name, links=True)
            stack.callback(os.close, fd)
            header = TensorFileHeader.read(fd)
        except (Corrupt, OSError) as error:
            text = str(error)
            problems.append(text if text.startswith((name, repr(name))) else f"{name}: {text}")
            continue
        read.add(name)
        for tensor, (dtype, shape, at) in header.tensors.items():
            if tensor in tensors:
                problems.append(f"{tensor!r} is in {tensors[tensor].file} and in {name}")
            tensors[tensor] = FileTensor(name, fd, at, dtype, shape)
    for tensor, name in where.items():
        if name in read and (tensor not in tensors or tensors[tensor].file != name):
            problems.append(f"{name}: the index says that {tensor!r} is there, and it is not")
    return tensors, problems


def _index(folder: Path) -> dict[str, str]:
    """`{tensor: file}` of the index; nothing where there is one file alone."""
    if (folder / SINGLE).exists():
        return {}
    if not (folder / INDEX).exists():
        raise _nothing(folder, f"there is neither {SINGLE} nor {INDEX}")
    values = read_json(folder, INDEX)
    try:
        found = from_json(dict[str, str], values.get("weight_map"))
    except JsonError:
        found = {}
    if not found:
        raise StateError(
            f"{INDEX} in {str(folder)!r} has no weight_map from tensors to files.",
            fix="fetch or copy it once more.",
        )
    return found


def _nothing(path: Path, why: str) -> StateError:
    there = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    pickles = [name for name in there if name.endswith(PICKLES)]
    others = [name for name in there if name.endswith(".safetensors")]
    if pickles and not others:
        return StateError(
            f"{str(path)!r} holds pickled weights alone, and reading a pickle runs what is in it:",
            pickles,
            "have the model's own library write safetensors once, where you trust the files: "
            "AutoModelForCausalLM.from_pretrained(path).save_pretrained(other).",
        )
    return StateError(
        f"no weights in {str(path)!r}: {why}.",
        others,
        "name one of these files."
        if others
        else "path= is a local directory of a Hugging Face model (of "
        "a model on the hub: what huggingface_hub.snapshot_download returns), or a .safetensors file.",
    )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a directory.

    Raises:
        StateError: it is none, cannot be read, or is larger than any is.
    """
    try:
        fd = open_regular(folder, name, links=True)
        try:
            size = os.fstat(fd).st_size
            if size > HEADER_LIMIT_bytes:
                raise Corrupt(f"{name}: {size} bytes")
            text = bytearray(size)
            read_exactly(fd, 0, memoryview(text))
        finally:
            os.close(fd)
        values = json.loads(text)
        if not isinstance(values, dict):
            raise Corrupt(f"{name}: no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(
            f"{name} in {str(folder)!r} cannot be read:", [str(error)], "fetch or copy it once more."
        ) from error
    return values


def read_config(path: Path) -> dict[str, Any]:
    """The config.json beside the weights; empty where there is none."""
    folder = path if path.is_dir() else path.parent
    return read_json(folder, "config.json") if (folder / "config.json").exists() else {}
