"""Shards: a folder of `.npy` arrays of token ids, mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from experiments.configs.train import ConfigError
from experiments.data.files import read_json, write_json
from fnshard.errors import report

HEADER = "shards.json"
BLOCK = 2**22  # tokens that are looked through at once


@dataclass(frozen=True)
class Shards:
    """All tokens of a folder, as one stream: an array ends anywhere, and the next goes on.

    Args:
        folder: where they lie.
        key: equal for equal tokens.
        files: the arrays in order, and how many tokens each has; uint16 or uint32.
        largest: id that there is.
        documents: how many; None where that is unknown.
        vocab, tokenizer, eos: of the tokenizer that made them: one more than its largest id, its key, and
            what ends each document; None where that is unknown.
        broken: lines that were left out, and parts of files in which bytes were replaced.
    """

    folder: Path
    key: str
    files: Mapping[str, int]
    largest: int
    documents: int | None = None
    vocab: int | None = None
    tokenizer: str | None = None
    eos: int | None = None
    broken: int = 0

    @cached_property
    def tokens(self) -> int:
        """In all arrays."""
        return sum(self.files.values())

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of `starts` on; int64 [starts, length].

        Raises:
            IndexError: a window is not inside.
        """
        if starts.size and (starts.min() < 0 or starts.max() + length > self.tokens):
            raise IndexError(f"windows of {length} from {starts.min()} to {starts.max()} of {self.tokens}.")
        out = np.empty((len(starts), length), np.int64)
        arrays = np.searchsorted(self._ends, starts, side="right")
        for row, (start, array) in enumerate(zip(starts.tolist(), arrays.tolist(), strict=True)):
            done = 0
            while done < length:
                place = start + done - (int(self._ends[array - 1]) if array else 0)
                part = self._arrays[array][place : place + length - done]
                out[row, done : done + len(part)] = part
                done, array = done + len(part), array + 1
        return out

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.array(list(accumulate(self.files.values())), np.int64)

    @cached_property
    def _arrays(self) -> list[np.ndarray]:
        return [np.load(self.folder / name, mmap_mode="r") for name in self.files]


def open_shards(folder: str | Path) -> Shards:
    """Map a folder of shards; `.npy` arrays of others, [tokens] of uint16 or uint32, are described first.

    Raises:
        ConfigError: there are none, or not all that the header names.
    """
    folder = Path(folder)
    header = read_json(folder / HEADER)
    if not header:
        return describe(folder)
    try:
        found = Shards(folder=folder, **header)
    except TypeError:
        raise ConfigError(f"{folder / HEADER} is no header of shards. Fix: write the shards anew.") from None
    there = _lengths(folder)
    wrong = [
        f"{n}: {there.get(n, 0)} of {many} tokens" for n, many in found.files.items() if there.get(n) != many
    ]
    if wrong:
        fix = f"write the shards anew; where you changed arrays of your own, delete {HEADER}."
        raise ConfigError(report(f"{folder} is not whole:", wrong, fix))
    return found


def describe(folder: Path, **known: Any) -> Shards:
    """Look through the arrays of a folder once, and write its header where that can be.

    Args:
        known: further fields of `Shards`.
    """
    files = _lengths(folder)
    if not files:
        there = f"neither {HEADER} nor *.npy in it" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"{folder} holds no shards: {there}. Fix: python -m experiments.tokenize writes them."
        )
    digest, largest = hashlib.sha256(), 0
    for name in files:
        array = np.load(folder / name, mmap_mode="r")
        for start in range(0, len(array), BLOCK):
            block = array[start : start + BLOCK]
            largest = max(largest, int(block.max()))
            digest.update(block.astype("<u4").tobytes())
    found = Shards(folder, digest.hexdigest(), files, largest, **known)
    with suppress(OSError):  # not ours to write to: the next one looks through them again
        write_json(folder / HEADER, {k: v for k, v in asdict(found).items() if k != "folder"})
    return found


def _lengths(folder: Path) -> dict[str, int]:
    """How many tokens each array of a folder has."""
    found, wrong = {}, []
    for path in sorted(folder.glob("*.npy")):
        try:
            array = np.load(path, mmap_mode="r")  # nothing is unpickled
        except (OSError, ValueError, EOFError) as error:
            wrong.append(f"{path.name}: {error}")
            continue
        if array.ndim != 1 or array.dtype.kind != "u" or array.dtype.itemsize not in (2, 4) or not len(array):
            wrong.append(f"{path.name}: {array.dtype} {list(array.shape)}")
        found[path.name] = array.size
    if wrong:
        fix = "one array of uint16 or uint32 [tokens] a file."
        raise ConfigError(report(f"{folder}: not arrays of tokens:", wrong, fix))
    return found


def check_vocab(shards: Sequence[Shards], vocab: int) -> None:
    """Refuse tokens that a model of `vocab` rows does not know.

    Raises:
        ConfigError: there are some.
    """
    wrong = [f"{s.folder}: the largest is {s.largest}" for s in shards if s.largest >= vocab]
    if wrong:
        needed = max(s.vocab or s.largest + 1 for s in shards)
        raise ConfigError(
            report(f"model.vocab={vocab}: shards hold larger tokens:", wrong, f"model.vocab={needed}.")
        )
