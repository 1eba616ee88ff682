"""Shards: a folder of `.npy` arrays of token ids, which ranks map.

Next to them lies a CRC-32 of each `BLOCK_BYTES` of each array. A process compares a block with it when it
first touches the block. All of 1 GB takes about 0.2 s, spread over the steps that read it, and a window in a
fresh block takes 0.02 ms more. Opening shards compares sizes and the first block of each array.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.checks import ConfigError
from experiments.lib.files import (
    DamagedError,
    differences,
    read_record,
    take_turns,
    write_bytes,
    write_record,
)
from fnshard.errors import report

# Next to folders of shards lie a record of the command that wrote them, and its tokenizer.
COMMAND_FILE, TOKENIZER = "tokenize.json", "tokenizer"
TOKENIZER_FILES = "tokenizer_files"  # in the command's record, the digests of the tokenizer's files
HEADER, SUMS = "shards.json", "shards.crc32"
BLOCK_BYTES = 2**17  # bytes of a checksum, no more than the system reads ahead
ANEW = f"write the shards anew; where the arrays are your own, delete {HEADER} and {SUMS}."
READ_TOKENS = 2**22  # tokens that are read at once


@dataclass(frozen=True)
class Shards:
    """All tokens of a folder, as one stream. An array ends anywhere, and the next one goes on.

    Args:
        folder: the folder of the arrays.
        key: a text that is equal for equal tokens.
        files: the arrays in order, uint16 or uint32, and the number of tokens of each.
        largest: the largest id.
        documents: the number of documents; None if it is unknown.
        vocab: one more than the largest id of the tokenizer that made them; None if that is unknown.
        tokenizer: the key of that tokenizer; None if it is unknown.
        eos: the token that ends each document; None if it is unknown.
        broken: the number of lines that were left out, and of parts of files in which bytes were replaced.
        sizes: the bytes of each array's file. They are None where there are no checksums: an older version
            wrote the header, or the folder is not ours to write to. Then only the numbers of tokens are
            compared.
        sums: the CRC-32 of the file of checksums.
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
    sizes: Mapping[str, int] | None = None
    sums: int = 0

    @cached_property
    def tokens(self) -> int:
        """Count the tokens of all arrays."""
        return sum(self.files.values())

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each of `starts` on; int64 [starts, length].

        Raises:
            IndexError: a window is not inside.
            DamagedError: the tokens are not those that were written.
        """
        if starts.size and (starts.min() < 0 or starts.max() + length > self.tokens):
            raise IndexError(f"windows of {length} from {starts.min()} to {starts.max()} of {self.tokens}.")
        out = np.empty((len(starts), length), np.int64)
        # An array's end is the start of the next one, so a start at it belongs to the next.
        arrays = np.searchsorted(self._ends, starts, side="right")
        for row, (start, array) in enumerate(zip(starts.tolist(), arrays.tolist(), strict=True)):
            done = 0
            # A window may begin in one array and end in a later one.
            while done < length:
                place = start + done - (int(self._ends[array - 1]) if array else 0)
                part = self._arrays[array][place : place + length - done]
                if self.sizes is not None:
                    self._check(array, place, place + len(part))
                out[row, done : done + len(part)] = part
                done, array = done + len(part), array + 1
        return out

    @cached_property
    def _ends(self) -> np.ndarray:
        """Return the end of each array in the stream."""
        return np.array(list(accumulate(self.files.values())), np.int64)

    @cached_property
    def _arrays(self) -> list[np.ndarray]:
        """Map the arrays."""
        return [np.load(self.folder / name, mmap_mode="r") for name in self.files]

    def _check(self, array: int, start: int, stop: int) -> None:
        """Compare the blocks that hold these tokens with their checksums, each block once."""
        tokens, seen = self._arrays[array], self._seen[array]
        # Checksums are of blocks of the file, which begins with the array's header.
        first, last = (tokens.offset + at * tokens.itemsize for at in (start, stop - 1))
        first, last = first // BLOCK_BYTES, last // BLOCK_BYTES
        if seen[first : last + 1].all():
            return
        for block in range(first, last + 1):
            found = zlib.crc32(self._bytes[array][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
            if found != self._sums[array][block]:
                path = self.folder / list(self.files)[array]
                raise DamagedError(
                    f"{path} is not what was written: bytes from {block * BLOCK_BYTES} on (checksum differs)."
                    f" Fix: {ANEW}"
                )
            seen[block] = True

    @cached_property
    def _bytes(self) -> list[np.ndarray]:
        """Map the arrays' files."""
        return [np.memmap(self.folder / name, np.uint8, "r") for name in self.files]

    @cached_property
    def _sums(self) -> list[np.ndarray]:
        """Read the checksums of each array's blocks."""
        content = (self.folder / SUMS).read_bytes()
        counts = [-(-size // BLOCK_BYTES) for size in self.sizes.values()]
        if len(content) != 4 * sum(counts) or zlib.crc32(content) != self.sums:
            raise DamagedError(f"{self.folder / SUMS} is not what was written. Fix: {ANEW}")
        return np.split(np.frombuffer(content, "<u4"), list(accumulate(counts))[:-1])

    @cached_property
    def _seen(self) -> list[np.ndarray]:
        """Return a flag for each block of each array, which says whether it has been compared."""
        return [np.zeros(len(sums), bool) for sums in self._sums]

    def check(self, *, read_all: bool) -> None:
        """Compare every block, or the first of each array, with its checksum.

        Raises:
            DamagedError: one differs.
        """
        if self.sizes is None:
            return
        for array, count in enumerate(self.files.values()):
            self._check(array, 0, count if read_all else 1)


def open_shards(folder: str | Path) -> Shards:
    """Map a folder of shards.

    Arrays [tokens] of uint16 or uint32 without a header, which another program wrote, are read once to write
    it (`write_header`). Of several processes that open them at once, one does so, and the others wait.

    Raises:
        ConfigError: there are no arrays, or not all that the header names.
        DamagedError: the header or the checksums are not what was written.
    """
    folder = Path(folder)
    header = _read_header(folder)
    if header is None:
        with take_turns(folder):
            header = _read_header(folder)  # another process may have written it by now
            if header is None and (folder / SUMS).exists():
                raise DamagedError(f"{folder / HEADER} is missing. Fix: {ANEW}")
            if header is None:
                return write_header(folder)
    try:
        shards = Shards(folder=folder, **header)
    except TypeError:
        raise ConfigError(f"{folder / HEADER} is no header of shards. Fix: write the shards anew.") from None

    # Compare the arrays' tokens and bytes with the header.
    present = {n: (folder / n).stat().st_size if (folder / n).is_file() else 0 for n in shards.files}
    sizes = shards.sizes or {}
    cut = [f"{n}: {present[n]} of {size} bytes" for n, size in sizes.items() if present.get(n) != size]
    try:
        tokens = _count_tokens(folder)
    except ConfigError:  # an array cannot be read, and its size says more
        if not cut:
            raise
        tokens = shards.files
    wrong = [f"{n}: {tokens.get(n, 0)} of {m} tokens" for n, m in shards.files.items() if tokens.get(n) != m]
    wrong = wrong or cut
    if wrong:
        fix = f"write the shards anew; where you changed arrays of your own, delete {HEADER} and {SUMS}."
        raise ConfigError(report(f"{folder} is not whole:", wrong, fix))
    # The first block of each array is compared at once, and the others when they are read.
    try:
        shards.check(read_all=False)
    except OSError as error:
        raise DamagedError(f"{folder / SUMS} cannot be read ({error.strerror}). Fix: {ANEW}") from None
    return shards


def _read_header(folder: Path) -> dict[str, Any] | None:
    """Read the header of a folder of shards; None if there is none."""
    try:
        return read_record(folder / HEADER)
    except DamagedError as error:
        raise DamagedError(f"{error} Fix: {ANEW}") from None


def write_header(folder: Path, **known: Any) -> Shards:
    """Read the arrays of a folder once, and write its header and checksums if the folder can be written to.

    Args:
        known: further fields of `Shards`.

    Raises:
        ConfigError: the folder has no arrays, or some that are not of tokens.
    """
    files = _count_tokens(folder)
    if not files:
        there = f"neither {HEADER} nor *.npy in it" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"{folder} holds no shards: {there}. Fix: python -m experiments.tokenize writes them."
        )
    # The key is a digest of the tokens alone, whatever their type and their division into arrays.
    digest, largest = hashlib.sha256(), 0
    sums: list[int] = []
    for name in files:
        array, content = np.load(folder / name, mmap_mode="r"), np.memmap(folder / name, np.uint8, "r")
        sums += [zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)]
        for start in range(0, len(array), READ_TOKENS):
            block = array[start : start + READ_TOKENS]
            largest = max(largest, int(block.max()))
            digest.update(block.astype("<u4").tobytes())
    content = np.array(sums, "<u4").tobytes()
    sizes = {name: (folder / name).stat().st_size for name in files}
    shards = Shards(
        folder, digest.hexdigest(), files, largest, **known, sizes=sizes, sums=zlib.crc32(content)
    )
    try:
        # The header is written last: with it the folder counts as described, so the checksums must exist.
        write_bytes(folder / SUMS, content)
        write_record(
            folder / HEADER, {k: v for k, v in asdict(shards).items() if k != "folder"}, durable=True
        )
    except OSError:  # the folder is not ours to write to, so the next process reads it again
        with suppress(OSError):
            (folder / SUMS).unlink()
        return replace(shards, sizes=None)
    return shards


def _count_tokens(folder: Path) -> dict[str, int]:
    """Return the number of tokens of each array of a folder.

    Raises:
        ConfigError: arrays cannot be read, or are not of tokens. The error names all of them.
    """
    counts, wrong = {}, []
    for path in sorted(folder.glob("*.npy")):
        try:
            array = np.load(path, mmap_mode="r")  # nothing is unpickled
        except (OSError, ValueError, EOFError) as error:
            wrong.append(f"{path.name}: {error}")
            continue
        if array.ndim != 1 or array.dtype.kind != "u" or array.dtype.itemsize not in (2, 4) or not len(array):
            wrong.append(f"{path.name}: {array.dtype} {list(array.shape)}")
        counts[path.name] = array.size
    if wrong:
        fix = "one array of uint16 or uint32 [tokens] a file."
        raise ConfigError(report(f"{folder}: not arrays of tokens:", wrong, fix))
    return counts


def check_tokenizer(root: Path) -> None:
    """Compare the tokenizer next to folders of shards with its digests.

    Raises:
        DamagedError: the tokenizer or the record of the command that wrote it is not what was written.
    """
    fix = f"write the shards anew; where the tokenizer is your own, delete {root / COMMAND_FILE}."
    try:
        command = read_record(root / COMMAND_FILE) or {}
    except DamagedError as error:
        raise DamagedError(f"{error} Fix: {fix}") from None
    if wrong := differences(root / TOKENIZER, command.get(TOKENIZER_FILES, {}), read_all=True):
        raise DamagedError(report(f"{root / TOKENIZER} is not what was written:", wrong, fix))


def check_vocab(shards: Sequence[Shards], vocab: int) -> None:
    """Check that a model of `vocab` rows knows all tokens.

    Raises:
        ConfigError: it does not.
    """
    wrong = [f"{s.folder}: the largest is {s.largest}" for s in shards if s.largest >= vocab]
    if wrong:
        needed = max(s.vocab or s.largest + 1 for s in shards)
        raise ConfigError(
            report(f"model.vocab={vocab}: shards hold larger tokens:", wrong, f"model.vocab={needed}.")
        )
