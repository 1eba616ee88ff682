"""Forged manifests: sealed, so that only reading them shows that they are wrong."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saved_states import MANIFEST, SEAL


def reseal(folder: Path, manifest: Any) -> None:
    """Put a manifest in the place of the one that is there, sealed."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / SEAL).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def adopt(folder: Path) -> None:
    """Let the manifest say what the data files now are: their lengths, and their old headers' places."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name, file in manifest["files"].items():
        content = (folder / name).read_bytes()
        file.update(bytes=len(content), header_crc32=zlib.crc32(content[: file["header_bytes"]]))
    reseal(folder, manifest)


Where = tuple[Any, ...]  # keys and places, from the top


def nodes(value: Any, at: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Every value of a JSON tree, and where it is."""
    if at:
        yield at, value
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from nodes(inner, (*at, key))


NOTHING = object()


def replaced(tree: Any, at: Where, value: Any) -> Any:
    """A copy of the tree with another value there, or with `NOTHING`."""
    out = copy.deepcopy(tree)
    inner = out
    for key in at[:-1]:
        inner = inner[key]
    if value is NOTHING:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return out


_WRONG = [
    None, True, False, 0, -1, 3, 1 << 63, 1 << 70, -(1 << 63), 10**400, 1.5, 3.0, -0.0, float("nan"),
    float("inf"), "", "3", "F32", "a\0b", "\ud800", [], [[]], ["a"], [0], [1 << 62, 1 << 62], [None], {},
    {"a": 1}, {"__is__": "no"},
]  # fmt: skip


def wrong_for(value: Any) -> list[Any]:
    """Values of other types than this one; numbers also of no possible size."""
    impossible = [-1, 1 << 63, 1 << 70, -(1 << 63) - 1] if type(value) is int else []
    return [w for w in _WRONG if type(w) is not type(value)] + impossible


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
    "..": file_named("../rank-00000.safetensors"),
    "../300": file_named("../300/rank-00000.safetensors"),
    "from the root": file_named("/etc/passwd"),
    "this directory": file_named("."),
    "the one above": file_named(".."),
    "no name": file_named(""),
    "a nul": file_named("rank-00000.safetensors\\u0000"),
    "half a letter": file_named("rank-\\ud800.safetensors"),
    "the manifest": file_named(MANIFEST),
    "a tilde": file_named("~/rank-00000.safetensors"),
    "an earlier format": lambda manifest: manifest.update(format="fnshard checkpoint 1"),
    "no format": lambda manifest: manifest.pop("format") and None,
    "a later format": lambda manifest: manifest.update(format="fnshard checkpoint 4"),
    "a list": lambda manifest: [manifest],
    "nothing": lambda manifest: b"",
    "null": lambda manifest: b"null",
    "no text": lambda manifest: b"\xff\xfe\xff",
    "deep": lambda manifest: b"[" * 1_000_000,
    "deep objects": lambda manifest: b'{"leaves":' * 100_000,
    "a deep position": lambda manifest: manifest.update(
        data=[functools.reduce(lambda a, _: [a], range(900), 1)]
    ),
    "a number of 10^6 digits": lambda manifest: b'{"step":' + b"9" * 1_000_000 + b"}",
    "a tensor that multiplies lists": lambda manifest: manifest.update(
        data=[{"__is__": "tensor", "of": ["F32", [1 << 30, [0]], ""]}]
    ),
    "a tensor of 2^62 nothings": lambda manifest: manifest.update(
        data=[{"__is__": "tensor", "of": ["F32", [1 << 62, 1 << 62, 0], ""]}]
    ),
    "a key that is a list": lambda manifest: manifest.update(data=[{"__is__": "items", "of": [[[1], 2]]}]),
    "a chunk twice": twice,
    "chunks overlap": shifted,
    "no chunks": lambda manifest: manifest["leaves"]["params/bias"].update(chunks=[]),
    "one chunk of two": lambda manifest: manifest["leaves"]["params/bias"]["chunks"].pop(),
    "a chunk too many": lambda manifest: manifest["leaves"]["params/gain"]["chunks"].append(
        manifest["leaves"]["params/gain"]["chunks"][0]
    ),
    "a chunk of an empty leaf": lambda manifest: manifest["leaves"]["params/empty"].update(
        chunks=[
            {**manifest["leaves"]["params/bias"]["chunks"][0], "offset": [0, 0], "shape": [0, 4], "crc32": []}
        ]
    ),
    "bytes of two leaves": shared,
    "bytes of the header": from_the_header,
    "a small file is a large leaf": many_times,
    "a tensor of 2^60": leaf_of([1 << 60]),
    "of 2^40 x 2^40": leaf_of([1 << 40, 1 << 40]),
    "of 10,000 dims": leaf_of([1] * 10_000),
    "of 0 x 2^62": without_chunks([0, 1 << 62]),
    "of 0 x 2^62 x 8": without_chunks([0, 1 << 62, 8]),
    "of 0 in 1,000 dims": without_chunks([0] * 1000),
}
