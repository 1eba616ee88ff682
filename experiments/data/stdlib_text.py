"""Real text that every machine has: the Python standard library's own source files, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

# Tests repeat themselves and tables of them; what is installed next to the library differs by machine.
SKIP = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
SEPARATOR = 0  # one byte that no source file holds ends every file


@dataclass(frozen=True)
class ByteStream:
    """Bytes as tokens: what `windows` draws from. `values`: uint8 [bytes]; a file ends in a `SEPARATOR`."""

    values: Tensor

    @cached_property
    def key(self) -> str:
        return f"{crc32(self.values.numpy()):08x}"

    @property
    def tokens(self) -> int:
        return self.values.numel()

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` bytes from each of `starts` on; int64 [starts, length]."""
        return self.values.numpy()[starts[:, None] + np.arange(length)].astype(np.int64)


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path, suffix: str = ".py") -> list[str]:
    """Names below `root` with `suffix`, with forward slashes, sorted; `SKIP`ped folders left out."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIP]
        names += [(Path(folder) / f).relative_to(root).as_posix() for f in files if f.endswith(suffix)]
    return sorted(names)


def is_held_out(name: str, percent: int) -> bool:
    """Whether a file is held out: by a hash of its name, so that other files never move it.

    >>> is_held_out("asyncio/runners.py", 0), is_held_out("asyncio/runners.py", 100)
    (False, True)
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100 < percent


def load_text(
    root: Path | None = None, *, suffix: str = ".py", held_out_percent: int = 10, least: int = 1
) -> tuple[ByteStream, ByteStream]:
    """The files below `root` (default: the standard library) in the order of their names, split by file: what
    is trained on, and what is held out.

    Raises:
        ValueError: no such folder, or one side of the split holds fewer than `least` bytes.
    """
    root = root or standard_library()
    if not root.is_dir():
        raise ValueError(f"{root} is no folder. Fix: name one as data.root.")
    sides: tuple[list[str], list[str]] = [], []
    for name in source_files(root, suffix):
        sides[is_held_out(name, held_out_percent)].append(name)
    train, held_out = (ByteStream(_join(root, names)) for names in sides)
    if min(train.tokens, held_out.tokens) < least:
        raise ValueError(
            f"{root}: the files that end in {suffix!r} hold {train.tokens} bytes to train on "
            f"({len(sides[0])} files) and {held_out.tokens} held out ({len(sides[1])} files); each side "
            f"needs {least}. Fix: name a folder with more text as data.root, or change data.held_out_percent."
        )
    return train, held_out


def _join(root: Path, names: list[str]) -> Tensor:
    joined = bytearray()
    for name in names:
        joined += (root / name).read_bytes()
        joined.append(SEPARATOR)
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
