"""Checkpoints with a forged manifest and a seal that fits: an error, or harmless; memory stays small."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corrupt
import pytest
from saved_states import MANIFEST, outcome, restored

import fnshard as fs
from fnshard import LayoutSpec

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("short_blocks")]

SIGNS = (MANIFEST, "rank-0000", "of another model")


# ------------------------------------------------------------------ what a manifest can say


def twice(manifest: Any) -> None:
    """Both chunks are the first: as many elements as there should be, but not all of them."""
    chunks = manifest["leaves"]["params/wide.weight"]["chunks"]
    chunks[1] = {**chunks[0]}


def shifted(manifest: Any) -> None:
    """Chunks [5, 3, 2] and [5, 2, 2] that overlap: the second begins earlier than the first ends."""
    chunks = manifest["leaves"]["params/cube"]["chunks"]
    chunks[1]["offset"][1] -= 1


def shared(manifest: Any) -> None:
    """Two leaves are the same bytes."""
    leaves = manifest["leaves"]
    leaves["optimizer/wide.weight/nu"] = {**leaves["optimizer/wide.weight/mu"]}


def file_of_chunks(name: str) -> Callable[[Any], None]:
    return lambda manifest: manifest["leaves"]["params/cube"]["chunks"][0].update(file=name)


def from_the_header(manifest: Any) -> None:
    manifest["leaves"]["params/gain"]["chunks"][0]["at"] = 0


def many_times(manifest: Any) -> None:
    """A leaf of a terabyte: a thousand and more times the same bytes."""
    leaf = manifest["leaves"]["params/bias"]
    chunk = {**leaf["chunks"][0], "shape": [4]}
    leaf["chunks"] = [{**chunk, "offset": [4 * n]} for n in range(5000)]
    leaf["shape"] = [20000]


def leaf_of(shape: list[int], name: str = "params/bias", **more: Any) -> Callable[[Any], None]:
    def edit(manifest: Any) -> None:
        chunk = {**manifest["leaves"][name]["chunks"][0], "offset": [0] * len(shape), "shape": shape}
        manifest["leaves"][name].update(shape=shape, chunks=[chunk], **more)

    return edit


def without_chunks(shape: list[int]) -> Callable[[Any], None]:
    return lambda manifest: manifest["leaves"]["params/empty"].update(shape=shape)


def file_named(name: str) -> Callable[[Any], Any]:
    """A data file elsewhere; what it would read there is what was saved."""
    return lambda manifest: json.loads(json.dumps(manifest).replace("rank-00000.safetensors", name))


def header_of(count: int) -> Callable[[Any], None]:
    return lambda manifest: manifest["files"]["rank-00000.safetensors"].update(
        header_bytes=count, bytes=count
    )


EDITS: dict[str, Callable[[Any], Any]] = {
    "a file that is not there": file_of_chunks("rank-00009.safetensors"),
    "half of the checksums": lambda manifest: manifest["leaves"]["params/cube"]["chunks"][0]["crc32"].pop(),
    "a header of 2^50": header_of(1 << 50),
    "../300": file_named("../300/rank-00000.safetensors"),
    "from the root": file_named("/etc/passwd"),
    "the manifest": file_named(MANIFEST),
    "no format": lambda manifest: manifest.pop("format") and None,
    "a later format": lambda manifest: manifest.update(format="fnshard checkpoint 4"),
    "a list": lambda manifest: [manifest],
    "nothing": lambda manifest: b"",
    "deep": lambda manifest: b"[" * 1_000_000,
    "a deep position": lambda manifest: manifest.update(
        data=[functools.reduce(lambda a, _: [a], range(900), 1)]
    ),
    "a number of 10^6 digits": lambda manifest: b'{"step":' + b"9" * 1_000_000 + b"}",
    "a tensor of 2^62 nothings": lambda manifest: manifest.update(
        data=[{"__is__": "tensor", "of": ["F32", [1 << 62, 1 << 62, 0], ""]}]
    ),
    "a key that is a list": lambda manifest: manifest.update(data=[{"__is__": "items", "of": [[[1], 2]]}]),
    "a chunk twice": twice,
    "chunks overlap": shifted,
    "no chunks": lambda manifest: manifest["leaves"]["params/bias"].update(chunks=[]),
    "one chunk of two": lambda manifest: manifest["leaves"]["params/bias"]["chunks"].pop(),
    "a chunk of an empty leaf": lambda manifest: manifest["leaves"]["params/empty"].update(
        chunks=[
            {**manifest["leaves"]["params/bias"]["chunks"][0], "offset": [0, 0], "shape": [0, 4], "crc32": []}
        ]
    ),
    "bytes of two leaves": shared,
    "bytes of the header": from_the_header,
    "a small file is a large leaf": many_times,
    "a tensor of 2^60": leaf_of([1 << 60]),
    "of 0 x 2^62": without_chunks([0, 1 << 62]),
}


# ------------------------------------------------------------------ what is made of it


def nodes(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of a JSON tree, and where it is."""
    if at:
        yield at, value
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from nodes(inner, (*at, key))


def test_a_number_that_is_off_is_an_error(roots: Any, restoring: Any, tmp_path: Path) -> None:
    """Any size, place or checksum of a leaf or file."""
    folder = corrupt.copied(roots["two"] / "300", tmp_path / "300")
    plain = json.loads((folder / MANIFEST).read_bytes())
    numbers = [(at, v) for at, v in nodes(plain) if type(v) is int and at[0] in ("leaves", "files")]
    for at, value in random.Random(1).sample(numbers, 100):
        for by in (-1, 1, 8, 1 << 40):
            changed = copy.deepcopy(plain)
            functools.reduce(lambda inner, key: inner[key], at[:-1], changed)[at[-1]] = value + by
            corrupt.reseal(folder, changed)
            _, got = restored(folder, restoring)
            assert isinstance(got, str) and any(sign in got for sign in SIGNS), (at, value, got)


def edited(
    edit: Callable[[dict[str, Any]], Any], root: Path, folder: Path, restoring: Any
) -> tuple[Any, Any]:
    """What comes of a checkpoint whose manifest `edit` has changed."""
    corrupt.copied(root / "300", folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    new = edit(manifest)
    corrupt.reseal(folder, manifest if new is None else new)
    return restored(folder, restoring)


@pytest.mark.parametrize("what", EDITS)
def test_a_manifest_that_lies_is_told(what: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    """By `verify`, by `restore` for a step, and for specs that take shapes from the checkpoint."""
    loose = {path: LayoutSpec() for path in restoring.specs}
    here = fs.make_mesh(shard=1, device="cpu")
    edit = EDITS[what]
    for message in (
        *edited(edit, roots["two"], tmp_path / "300", restoring),
        outcome(fs.checkpoint.restore, tmp_path / "300", loose, here),
    ):
        assert isinstance(message, str) and any(sign in message for sign in SIGNS), message


@pytest.mark.parametrize("leaf", ["params/gain", "optimizer/bias/mu", "optimizer/wide.weight/nu"])
def test_a_leaf_that_is_missing_or_not_asked_for_is_named(
    leaf: str, roots: Any, restoring: Any, tmp_path: Path
) -> None:
    """Nothing in the checkpoint itself is wrong then, so `verify` has nothing to say."""
    _, got = edited(
        lambda manifest: manifest["leaves"].pop(leaf) and None, roots["two"], tmp_path / "300", restoring
    )
    assert f"{leaf} [" in got and "is not in the checkpoint" in got

    def renamed(manifest: Any) -> None:
        manifest["leaves"][f"{leaf}.more" if leaf[0] == "p" else f"{leaf}more"] = manifest["leaves"].pop(leaf)

    _, got = edited(renamed, roots["two"], tmp_path / "300", restoring)
    assert f"{leaf} [" in got and "is in the checkpoint alone" in got


@pytest.mark.parametrize("dtype", ["I32", "U32", "I8", "BOOL"])
def test_numbers_of_another_kind_are_not_cast(dtype: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    def edit(manifest: Any) -> None:
        assert manifest["leaves"]["params/gain"]["dtype"] == "F32"
        manifest["leaves"]["params/gain"]["dtype"] = dtype

    _, got = edited(edit, roots["two"], tmp_path / "300", restoring)
    assert f"params/gain is torch.float32 here and {dtype} there" in got


def test_a_header_as_long_as_a_large_file_is_not_held(roots: Any, restoring: Any, tmp_path: Path) -> None:
    folder, name = corrupt.copied(roots["two"] / "300", tmp_path / "300"), "rank-00002.safetensors"
    (folder / name).touch()
    os.truncate(folder / name, 1 << 30)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][name] = {"bytes": 1 << 30, "header_bytes": 1 << 30, "header_crc32": 0}
    corrupt.reseal(folder, manifest)
    for message in restored(folder, restoring):
        assert isinstance(message, str) and name in message
