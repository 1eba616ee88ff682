"""Ways to ruin the files of a checkpoint; all of them seeded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from saved import MANIFEST, SEAL

# ------------------------------------------------------------------ bytes


def flip(folder: Path, name: str, bit: int) -> None:
    """Flip one bit of a file."""
    with (folder / name).open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def some_bits(folder: Path, count: int, seed: int) -> list[tuple[str, int]]:
    """Draw bits of all files: half of them spread over the files, half over the bytes."""
    rng, sizes = random.Random(seed), {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
    names = rng.choices(list(sizes), k=count // 2)
    names += rng.choices(list(sizes), weights=list(sizes.values()), k=count - count // 2)
    return [(name, rng.randrange(8 * sizes[name])) for name in names]


# Folder, a file in it, a source of whims; gives the names of the files it changed, if more than that.
Corruption = Callable[[Path, str, random.Random], list[str] | None]


def _rewrite(change: Callable[[bytearray, random.Random], bytes]) -> Corruption:
    def corrupted(folder: Path, name: str, rng: random.Random) -> None:
        (folder / name).write_bytes(change(bytearray((folder / name).read_bytes()), rng))

    return corrupted


def _run(content: bytearray, rng: random.Random, new: Callable[[bytes], bytes]) -> bytes:
    """Replace a run of bytes by new ones, and make sure that something changes."""
    first = rng.randrange(len(content))
    last = min(len(content), first + rng.randint(1, 64))
    made = new(bytes(content[first:last]))
    while made == content[first:last]:
        made = rng.randbytes(last - first)
    content[first:last] = made
    return bytes(content)


def _instead(put: Callable[[Path, Path], None]) -> Corruption:
    """Put something else by the file's name; the file itself is kept next to the checkpoint."""

    def corrupted(folder: Path, name: str, rng: random.Random) -> None:
        outside = folder.parent / f"outside-{name}"
        os.replace(folder / name, outside)
        put(folder / name, outside)

    return corrupted


def _socket(path: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _swap(folder: Path, name: str, rng: random.Random) -> list[str]:
    other = rng.choice(sorted(p.name for p in folder.iterdir() if p.name != name))
    first, second = (folder / name).read_bytes(), (folder / other).read_bytes()
    (folder / name).write_bytes(second)
    (folder / other).write_bytes(first)
    return [name, other]


def _nested(content: bytearray, rng: random.Random) -> bytes:
    return rng.choice([b"[", b'{"a":', b'{"leaves":{"a":']) * rng.randint(10_000, 200_000)


BYTES: dict[str, Corruption] = {
    "truncated": _rewrite(lambda c, rng: bytes(c[: rng.randrange(len(c))])),
    "longer": _rewrite(lambda c, rng: bytes(c) + rng.randbytes(rng.randint(1, 4096))),
    "longer by zeros": _rewrite(lambda c, rng: bytes(c) + bytes(rng.randint(1, 4096))),
    "a run flipped": _rewrite(lambda c, rng: _run(c, rng, lambda b: bytes(255 - x for x in b))),
    "a run zero": _rewrite(lambda c, rng: _run(c, rng, lambda b: bytes(len(b)))),
    "a run moved": _rewrite(lambda c, rng: _run(c, rng, lambda b: b[1:] + b[:1])),
    "a byte less": _rewrite(lambda c, rng: bytes(c[: (at := rng.randrange(len(c)))] + c[at + 1 :])),
    "empty": _rewrite(lambda c, rng: b""),
    "noise": _rewrite(lambda c, rng: rng.randbytes(len(c))),
    "no text": _rewrite(lambda c, rng: b"\xff\xfe\x80" + bytes(c)[3:]),
    "nested": _rewrite(_nested),
    "huge": lambda folder, name, rng: os.truncate(folder / name, 1 << rng.randint(33, 42)),
    "gone": lambda folder, name, rng: (folder / name).unlink(),
    "swapped": _swap,
    "a link outside": _instead(lambda path, outside: path.symlink_to(outside)),
    "a link out": _instead(lambda path, outside: path.symlink_to(Path("..") / outside.name)),
    "a link to zeros": _instead(lambda path, outside: path.symlink_to("/dev/zero")),
    "a link to nothing": _instead(lambda path, outside: path.symlink_to("nothing")),
    "a link to itself": _instead(lambda path, outside: path.symlink_to(path.name)),
    "a directory": _instead(lambda path, outside: path.mkdir()),
    "a pipe": _instead(lambda path, outside: os.mkfifo(path)),
    "a socket": _instead(_socket),
}


# ------------------------------------------------------------------ manifests with a seal that fits


def reseal(folder: Path, manifest: Any) -> None:
    """Put a manifest in the place of the one that is there, sealed."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / SEAL).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


# ------------------------------------------------------------------ payloads


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def payloads(marker: Path) -> dict[str, bytes]:
    """Return pickles of a `Payload` in several formats."""
    by_torch = marker.with_suffix(".pt")
    torch.save(Payload(marker), by_torch)
    out = {f"protocol {n}": pickle.dumps(Payload(marker), protocol=n) for n in (0, 2, 5)}
    return {**out, "torch": by_torch.read_bytes()}


def copy_pristine(pristine: Path, folder: Path) -> Path:
    """Make a fresh copy to be ruined."""
    for left in (folder, *folder.parent.glob("outside-*")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    shutil.copytree(pristine, folder)
    return folder
