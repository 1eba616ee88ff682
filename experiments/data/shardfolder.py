"""Shards: a folder of arrays of token ids, mapped: memory holds what is read and no more.

`shards.json` says what they hold. It is written last, so a folder without it is not whole; only plain
`.npy` arrays that somebody else wrote are looked through, and get one. People copy such folders from each
other, so nothing in it is believed: it names plain files of its own folder, as long as its counts say, and
every window that is read is compared with its largest token.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from experiments.cli.schema import options_of
from experiments.configs.train import ConfigError
from experiments.data.files import first_few
from fnshard.errors import report
from fnshard.runtime.files.tensorfile import open_regular

HEADER = "shards.json"
FORMAT = 1
DTYPES = ("<u2", "<u4", ">u2", ">u4")
NPY = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
UNREADABLE = (OSError, ValueError, KeyError, TypeError)  # what comes of an `.npy` that is none
LIMIT_bytes = 64 << 20  # of a header: some 400,000 arrays
BLOCK = 2**22  # tokens that are looked through at once
LOOKED = 2**25  # tokens of a folder that are looked through before ranks start; the rest as it is read
SHOWN = 8


@dataclass(frozen=True)
class Shard:
    """One array: its file, how many tokens, bytes of the file, and a sum of the tokens."""

    file: str
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shards:
    """All tokens of a folder, as one stream: an array ends anywhere, and the next goes on.

    Args:
        folder: where they lie.
        dtype: of all arrays, numpy's short name.
        largest: id that there is.
        documents: how many; None where nobody knows.
        vocab, tokenizer, eos: of the tokenizer that made them: one more than its largest id, its key, and
            what stands behind each document; None where nobody knows.
        broken: lines that were left out, and parts of files in which bytes were replaced.
        made_from: a key of what they were made from, and how; None where nobody knows.
        shards: the arrays, in order.
    """

    folder: Path
    dtype: str
    largest: int
    documents: int | None
    vocab: int | None
    tokenizer: str | None
    eos: int | None
    broken: int
    made_from: str | None
    shards: tuple[Shard, ...]

    @cached_property
    def key(self) -> str:
        """Equal for equal tokens."""
        sums = [(shard.tokens, shard.sha256) for shard in self.shards]
        return hashlib.sha256(json.dumps([self.dtype, sums]).encode()).hexdigest()

    @cached_property
    def tokens(self) -> int:
        """In all arrays."""
        return sum(shard.tokens for shard in self.shards)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of `starts` on; int64 [starts, length].

        Raises:
            IndexError: a window is not inside.
            ValueError: a token is larger than `largest`.
        """
        if starts.size and (starts.min() < 0 or starts.max() + length > self.tokens):
            raise IndexError(f"windows of {length} from {starts.min()} to {starts.max()} of {self.tokens}.")
        out = np.empty((len(starts), length), np.int64)
        arrays = np.searchsorted(self._ends, starts, side="right")
        for row, (start, array) in enumerate(zip(starts.tolist(), arrays.tolist(), strict=True)):
            done = 0
            while done < length:
                place = start + done - (int(self._ends[array - 1]) if array else 0)
                part = self._array(array)[place : place + length - done]
                out[row, done : done + len(part)] = part
                done, array = done + len(part), array + 1
        if out.size and out.max() > self.largest:
            raise ValueError(
                f"{self.folder}: holds the token {out.max()}, and {HEADER} says that {self.largest} is the "
                f"largest. Fix: write the shards anew; where you changed arrays of your own, delete {HEADER}."
            )
        return out

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.array(list(accumulate(shard.tokens for shard in self.shards)), np.int64)

    @cached_property
    def _mapped(self) -> list[np.ndarray | None]:
        return [None] * len(self.shards)

    def _array(self, number: int) -> np.ndarray:
        found = self._mapped[number]
        if found is None:
            found = self._mapped[number] = mapped(self.folder, self.shards[number].file, self.dtype)
        return found


def mapped(folder: Path, file: str, dtype: str | None = None) -> np.ndarray:
    """An array of tokens, not read yet.

    Args:
        dtype: None: as the file says, which an `.npy` does.

    Raises:
        ValueError: it is no plain file of this folder, or holds something else.
    """
    with open(open_regular(folder, file), "rb") as opened:
        if not file.endswith(".npy"):
            return np.memmap(opened, dtype, "r")
        shape, _, found = NPY[np.lib.format.read_magic(opened)](opened)
        if len(shape) != 1 or found.str not in DTYPES or not shape[0] or found != np.dtype(dtype or found):
            raise ValueError(f"{found} {list(shape)}")
        if opened.tell() + shape[0] * found.itemsize != os.fstat(opened.fileno()).st_size:
            raise ValueError(f"is not as long as {list(shape)} of {found}")
        return np.memmap(opened, found, "r", opened.tell(), shape)


def write_header(shards: Shards) -> None:
    """All or nothing."""
    values = {
        "format": FORMAT,
        "tokens": shards.tokens,
        **{n: getattr(shards, n) for n in ("dtype", "largest", "documents", "vocab", "tokenizer", "eos")},
        "broken": shards.broken,
        "made_from": shards.made_from,
        "shards": [vars(shard) for shard in shards.shards],
    }
    partial = shards.folder / f"{HEADER}.{uuid4().hex[:8]}.partial"
    try:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        partial.replace(shards.folder / HEADER)
    finally:
        partial.unlink(missing_ok=True)


def open_shards(folder: str | Path) -> Shards:
    """Map a folder of shards.

    Arrays that were changed in place, and are as long as before, are not noticed.

    Raises:
        ConfigError: there are none, or not all that its header names.
    """
    folder = Path(folder)
    if not os.path.lexists(folder / HEADER):
        return _others(folder)
    try:
        with open(open_regular(folder, HEADER), encoding="utf-8") as opened:
            found = _believing_nothing(folder, json.loads(opened.read(LIMIT_bytes)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{folder / HEADER} is no header of shards ({error}). Fix: write the shards anew."
        ) from None
    wrong = [f"{shard.file}: {why}" for shard in found.shards if (why := _misfit(found, shard))]
    if wrong:
        raise ConfigError(
            report(
                f"{folder} is not whole:",
                first_few(wrong, SHOWN),
                f"write the shards anew; where you changed arrays of your own, delete {HEADER}.",
            )
        )
    return found


def _believing_nothing(folder: Path, values: Any) -> Shards:
    """What a header says, where that can be."""
    shards = tuple(Shard(**_typed(Shard, each)) for each in values.pop("shards"))
    tokens, known = values.pop("tokens"), values.pop("format")
    found = Shards(folder=folder, shards=shards, **_typed(Shards, values))
    if known != FORMAT or not shards or tokens != found.tokens or found.dtype not in DTYPES:
        raise ValueError(f"format {known}, {tokens} tokens of {found.dtype} in {len(shards)} arrays")
    if len({shard.file for shard in shards}) < len(shards):
        raise ValueError("an array is named twice")
    return found


def _typed(kind: type, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of a dataclass; numbers are counts."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if type(value) not in options_of(hints[name]) or (type(value) is int and not 0 <= value < 2**63):
            raise ValueError(f"{name} is {value!r}"[:80])
    return values


def _misfit(shards: Shards, shard: Shard) -> str:
    """Why a file is not what the header says; "" if it is."""
    try:
        os.close(open_regular(shards.folder, shard.file, shard.bytes))
        tokens = len(mapped(shards.folder, shard.file, shards.dtype))
    except UNREADABLE as error:
        return str(error).removeprefix(f"{shard.file}: ")
    return "" if tokens == shard.tokens else f"holds {tokens} tokens, {shard.tokens} are told of"


# ------------------------------------------------------------------ arrays of others


def _others(folder: Path) -> Shards:
    """Look through plain `.npy` arrays, once: what was found is written beside them, where that can be."""
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        there = "no such folder" if not folder.is_dir() else f"neither {HEADER} nor *.npy in it"
        raise ConfigError(
            f"{folder} holds no shards, or not all yet: {there}. "
            "Fix: python -m experiments.tokenize writes them; the same command goes on where it was killed."
        )
    wrong, arrays = [], []
    for path in paths:
        try:
            arrays.append(mapped(folder, path.name))
        except UNREADABLE as error:
            wrong.append(f"{path.name}: {str(error).removeprefix(f'{path.name}: ')}")
    if len({array.dtype.str for array in arrays}) > 1:
        wrong.append(f"several types: {', '.join(sorted({str(array.dtype) for array in arrays}))}")
    if wrong:
        fix = "one array of uint16 or uint32 [tokens] a file, of one type in all."
        raise ConfigError(report(f"{folder}: not arrays of tokens:", wrong, fix))
    looked = [_look(path, array) for path, array in zip(paths, arrays, strict=True)]
    shards, largest = [shard for shard, _ in looked], max(largest for _, largest in looked)
    unknown: dict[str, Any] = dict.fromkeys(("documents", "vocab", "tokenizer", "eos", "made_from"))
    found = Shards(folder, arrays[0].dtype.str, largest, broken=0, shards=tuple(shards), **unknown)
    try:
        write_header(found)
        note = f"; {HEADER} says so from now on"
    except OSError:  # not ours to write to
        note = ""
    print(f"{folder}: {len(paths)} arrays, {found.tokens} tokens{note}", file=sys.stderr, flush=True)
    return found


def _look(path: Path, array: np.ndarray) -> tuple[Shard, int]:
    digest, largest = hashlib.sha256(), 0
    for start in range(0, len(array), BLOCK):
        block = array[start : start + BLOCK]
        largest = max(largest, int(block.max()))
        digest.update(block.tobytes())
    return Shard(path.name, len(array), path.stat().st_size, digest.hexdigest()), largest


def check_vocab(shards: Sequence[Shards], vocab: int) -> None:
    """Refuse tokens that a model of `vocab` rows does not know.

    Raises:
        ConfigError: there are some, or larger ones than a header names among the first `LOOKED`.
    """
    for each in shards:
        try:
            for start in range(0, min(each.tokens, LOOKED), BLOCK):
                each.windows(np.array([start]), min(BLOCK, each.tokens - start))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    wrong = [f"{s.folder}: the largest is {s.largest}" for s in shards if s.largest >= vocab]
    if wrong:
        needed = max(s.vocab or s.largest + 1 for s in shards)
        raise ConfigError(
            report(f"model.vocab={vocab}: shards hold larger tokens:", wrong, f"model.vocab={needed}.")
        )
