"""Torch files: read state dicts that `torch.save` wrote, in one file or in several with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnshard.checkpoint.foreign.dialects import Leaf, SavedState, recognise, walk
from fnshard.errors import StateError
from fnshard.hf.reading import FileTensor, read_json
from fnshard.runtime.files.tensorfile import Corrupt
from fnshard.runtime.files.torchfile import Inert, PlacedTensor, read_torch_file

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SUFFIXES = (".pt", ".bin", ".pth", ".ckpt")


def find_torch_files(path: Path) -> list[Path]:
    """Return the files of a state dict; none if there is no state dict at the path.

    The path is a file, or a folder as Hugging Face and DeepSpeed write it.

    Raises:
        Corrupt: an index that names no files.
    """
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        return []
    try:
        files = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    except (StateError, KeyError, AttributeError, TypeError) as error:
        raise Corrupt(f"has an {INDEX} that names no files ({error})") from error
    if missing := [name for name in files if not (path / name).is_file()]:
        raise Corrupt(f"has an {INDEX} that names {len(missing)} files that are not there: {missing[0]}")
    return [path / name for name in files]


def read_torch_files(path: Path) -> SavedState:
    """Return what `torch.save` files hold: a state dict, alone or within a training state.

    Raises:
        Corrupt: there are none; they hold no tensors, or cannot be read.
        Refused: they name what may not run.
    """
    files = find_torch_files(path)
    if not files:
        what = f"is no file {', '.join(SUFFIXES)}, and no folder with {SINGLE} or {INDEX}"
        raise Corrupt(what, "name such a file, or the folder in which it lies.")
    tree: dict[tuple[str, ...], Leaf] = {}
    for file in files:
        for where, leaf in walk(read_object(file, is_alone=file == path)):
            if isinstance(leaf, PlacedTensor):
                tree[where] = FileTensor(file.name, leaf, leaf.dtype, leaf.shape)
            elif not isinstance(leaf, Inert):  # an object that was not constructed
                tree[where] = lambda leaf=leaf: leaf
    return recognise(tree, "torch.save")


def read_object(file: Path, is_alone: bool = False) -> Mapping[str, Any]:
    """Return the dict that a file holds, with tensors that are not read yet.

    Args:
        is_alone: whether it is the whole checkpoint, so that an error need not name it again.
    """
    try:
        saved = read_torch_file(file)
        if not isinstance(saved, Mapping):
            raise Corrupt(f"holds a {type(saved).__name__}, and no dict", "name the file of a state dict.")
    except Corrupt as error:
        what = str(error) if is_alone else f"has {file.name}, which {error}"
        raise type(error)(what, error.fix) from error
    return saved
