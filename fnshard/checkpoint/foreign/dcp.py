"""DCP: folders of `torch.distributed.checkpoint`, as FSDP2, torchtitan, Lightning and Accelerate write them.

A folder has `.metadata`, a pickle of dataclasses that say which file has which box of each tensor, and at
which byte. A stream of `torch.save` begins there. Nothing in either is run (`runtime.files.torchfile`). The
format has no checksums: a flipped bit of a value is not found.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fnshard.checkpoint.foreign.boxes import Piece, Pieces, check_pieces
from fnshard.checkpoint.foreign.dialects import Leaf, SavedState, recognise
from fnshard.hf.reading import FileTensor
from fnshard.runtime.files.tensorfile import Corrupt, open_regular
from fnshard.runtime.files.torchfile import Inert, PlacedTensor, read_torch_file, resolve_torch_name, unpickle

METADATA = ".metadata"
# The classes in `.metadata`, by name alone, since torch has moved them between modules.
RECORDS = frozenset({
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING",
})  # fmt: skip


def find_dcp(path: Path) -> list[Path]:
    """Return the folders of a checkpoint; none if it is no such checkpoint.

    They are the folder itself, or those of model and optimizer side by side, as Accelerate saves them.
    """
    if (path / METADATA).is_file():
        return [path]
    folders = sorted(each.parent for each in path.glob(f"*/{METADATA}")) if path.is_dir() else []
    names = sorted(each.name.rstrip("0123456789") for each in folders)
    is_accelerate = names in (["pytorch_model_fsdp_"], ["optimizer_", "pytorch_model_fsdp_"])
    return folders if is_accelerate else []


def read_dcp(path: Path) -> SavedState:
    """Return what a checkpoint of `torch.distributed.checkpoint` holds; values are read when asked for.

    Raises:
        Corrupt: no such checkpoint; a file that is missing or too short; a tensor of which parts are missing.
        Refused: it names what may not run.
    """
    folders = find_dcp(path)
    if not folders:
        nearby = sorted(each.parent.name for each in path.glob(f"*/{METADATA}")) if path.is_dir() else []
        inside = f"; there are some in it: {', '.join(nearby[:8])}" if nearby else ""
        what = f"has no {METADATA}, so it is no checkpoint of torch.distributed.checkpoint{inside}"
        raise Corrupt(what, f"name the folder in which {METADATA} lies.")
    tree: dict[tuple[str, ...], Leaf] = {}
    for folder in folders:
        tree |= _read_folder(folder)
    return recognise(tree, "DCP")


def _read_folder(folder: Path) -> dict[tuple[str, ...], Leaf]:
    """Return the tensors and other values of one folder, by their paths in the saved tree."""
    # The entries by name, their places in files, and their paths in the saved tree.
    fd = open_regular(folder, METADATA)
    with open(fd, "rb") as file:
        metadata = unpickle(io.BytesIO(file.read()), _resolve_metadata_name)
    if not isinstance(metadata, Inert) or not isinstance(metadata.state, dict):
        raise Corrupt(f"has a {METADATA} that holds no metadata")
    saved = metadata.state.get("state_dict_metadata") or {}
    stored = metadata.state.get("storage_data") or {}
    paths = metadata.state.get("planner_data") or {}

    # Places in files, by the entry's name and, for tensors, where the box begins.
    places: dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]] = {}
    for index, info in stored.items():
        at = index.state.get("offset")
        places[index.state["fqn"], None if at is None else tuple(at)] = info.state

    missing = sorted(
        {p["relative_path"] for p in places.values() if not (folder / p["relative_path"]).is_file()}
    )
    if missing:
        names = ", ".join(missing[:8])
        raise Corrupt(f"has a {METADATA} that names {len(missing)} files that are not there: {names}")

    # Values are read when they are needed. A tensor consists of the boxes that ranks have written.
    out: dict[tuple[str, ...], Leaf] = {}
    for name, entry in saved.items():
        path = tuple(str(part) for part in paths.get(name, (name,)))
        if "chunks" not in entry.state:
            place = places.get((name, None))
            if place is not None:
                out[path] = partial(_open_item, folder, name, place)
            continue

        # `TensorProperties` has been written as a tuple and as a dict.
        shape, properties = tuple(entry.state["size"]), entry.state["properties"].state
        dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
        pieces = []
        for chunk in entry.state["chunks"]:
            offset, size = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
            # The box at the tensor's beginning may be stored without an offset.
            place = places.get((name, offset)) or (places.get((name, None)) if not any(offset) else None)
            if place is None:
                raise Corrupt(
                    f"has a {METADATA} that does not say where {name!r} from {list(offset)} on lies"
                )
            pieces.append(Piece(offset, size, partial(_open_box, folder, name, place, size, dtype)))
        check_pieces(name, shape, pieces)
        out[path] = FileTensor(folder.name, Pieces(dtype, shape, pieces), dtype, shape)
    return out


def _resolve_metadata_name(module: str, name: str) -> Any:
    """Return a stand-in for torch's classes of metadata, so that none of them is constructed."""
    if module.startswith("torch.distributed.") and name in RECORDS:
        return Inert
    return resolve_torch_name(module, name)


def _open_item(folder: Path, name: str, place: Mapping[str, Any]) -> Any:
    """Read the `torch.save` stream of an item."""
    if place.get("transform_descriptors"):
        kind = ", ".join(map(str, place["transform_descriptors"]))
        what = f"has {name!r} stored through the extension {kind}, which is not read here"
        raise Corrupt(what, "save it without extensions.")
    try:
        return read_torch_file(folder / place["relative_path"], place["offset"], place["length"])
    except Corrupt as error:
        raise type(error)(f"has {name!r} in {place['relative_path']}, which {error}", error.fix) from error


def _open_box(
    folder: Path, name: str, place: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> PlacedTensor:
    """Read a box, of the shape and dtype that the metadata name."""
    box = _open_item(folder, name, place)
    if isinstance(box, PlacedTensor) and box.shape == shape and box.dtype == dtype:
        return box
    kind = f"{list(box.shape)} {box.dtype}" if isinstance(box, PlacedTensor) else type(box).__name__
    raise Corrupt(
        f"has {name!r} in {place['relative_path']} as {kind}, and {METADATA} says {list(shape)} {dtype}"
    )
