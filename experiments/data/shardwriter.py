"""One shard: which bytes of which files it is made of, and their text as token ids in a file.

The files of one side, laid end to end, are cut every so many bytes; then each cut moves on behind the next
end of a line. So the spans of a shard are the same whoever writes it, in whatever order, and a shard needs no
other shard to know where it begins. Each document has an end token behind it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np

from experiments.data.layouts import LONGEST, MARK, LineError, parse
from experiments.data.text_files import TextFile
from experiments.data.tokenizer import Tokenizer

REACH = 2**12  # bytes a cut of text looks for an end of line
BLOCK = 2**16
PIECE = 2**18  # bytes of text that are tokenised at once


@dataclass(frozen=True)
class TextSpan:
    """Bytes `start` to `stop` of a file, before the cuts move."""

    source: TextFile
    start: int
    stop: int


def spans_of(sources: Sequence[TextFile], shard_bytes: int) -> list[tuple[TextSpan, ...]]:
    """The spans of every shard.

    >>> from pathlib import Path
    >>> files = [TextFile("a", Path("a"), 5, 0), TextFile("b", Path("b"), 4, 0)]
    >>> [[(s.source.name, s.start, s.stop) for s in shard] for shard in spans_of(files, 6)]
    [[('a', 0, 5), ('b', 0, 1)], [('b', 1, 4)]]
    """
    shards: list[tuple[TextSpan, ...]] = []
    spans: list[TextSpan] = []
    room = shard_bytes
    for source in sources:
        start = 0
        while start < source.size:
            stop = min(source.size, start + room)
            spans.append(TextSpan(source, start, stop))
            room -= stop - start
            start = stop
            if not room:
                shards.append(tuple(spans))
                spans, room = [], shard_bytes
    return [*shards, tuple(spans)] if spans else shards


def cut(file: BinaryIO, at: int, source: TextFile) -> int:
    """Where the text behind the cut `at` begins: at a line; in text of endless lines at a character."""
    if at <= 0 or at >= source.size:
        return min(max(at, 0), source.size)
    file.seek(at - 1)
    if source.lines:
        return min(_behind_line(file, at - 1, source.size), source.size)
    near = file.read(REACH)
    end = near.find(b"\n")
    if end >= 0:
        return min(at + end, source.size)
    inside = 0  # continuation bytes of a character
    while inside < 3 and near[1 + inside : 2 + inside] and near[1 + inside] & 0xC0 == 0x80:
        inside += 1
    return at + inside


def pieces(file: BinaryIO, span: TextSpan) -> Iterator[tuple[int, bytes]]:
    """The text of a span in parts of some `PIECE` bytes, and where each begins."""
    begin, end = cut(file, span.start, span.source), cut(file, span.stop, span.source)
    while begin < end:
        stop = min(cut(file, begin + PIECE, span.source), end)
        file.seek(begin)
        yield begin, file.read(stop - begin)
        begin = stop


def lines(file: BinaryIO, span: TextSpan, longest: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a span and are not blank, and where; at most `longest` + 1 bytes of one."""
    begin, end = cut(file, span.start, span.source), cut(file, span.stop, span.source)
    file.seek(begin)
    while begin < end and (line := file.readline(longest + 1)):
        size, rest = len(line), line
        while len(rest) > longest and not rest.endswith(b"\n"):
            rest = file.readline(longest + 1)
            size += len(rest)
        if line.strip():
            yield begin, line
        begin += size


def line_number(file: BinaryIO, at: int) -> int:
    """Of the line that byte `at` is in, from 1."""
    file.seek(0)
    number = 1
    while at > 0 and (block := file.read(min(BLOCK, at))):
        number += block.count(b"\n")
        at -= len(block)
    return number


def _behind_line(file: BinaryIO, at: int, size: int) -> int:
    while block := file.read(BLOCK):
        end = block.find(b"\n")
        if end >= 0:
            return at + end + 1
        at += len(block)
    return size


SHOWN = 8
PARTIAL = ".partial"
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Recipe:
    """How text becomes tokens.

    Args:
        tokenizer: whose ids they are.
        dtype: of the file, "<u2" or "<u4".
        broken: "refuse", or "skip": lines that hold no text are left out, bytes that are no UTF-8 replaced.
    """

    tokenizer: Tokenizer
    dtype: str
    broken: str

    @property
    def width(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass
class Made:
    """What a shard holds, as JSON has it; with `refused`, what stood in its way, and there is no file.

    `broken`: lines left out, and parts of a file that had bytes replaced. `largest`: of the ids.
    """

    tokens: int = 0
    documents: int = 0
    largest: int = 0
    broken: int = 0
    sha256: str = ""
    refused: int = 0
    problems: list[str] = field(default_factory=list)


def dtype_of(vocab: int) -> str:
    """The smaller of the two little-endian types that holds every id below `vocab`.

    >>> dtype_of(65536), dtype_of(65537)
    ('<u2', '<u4')
    """
    return "<u2" if vocab <= 2**16 else "<u4"


def write_shard(spans: Sequence[TextSpan], recipe: Recipe, path: Path, advance: Advance) -> Made:
    """Write under a name of its own and rename: a shard is complete or absent."""
    made, digest = Made(), hashlib.sha256()
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        with partial.open("wb") as out:
            for span in spans:
                for ids in _ids(span, recipe, made, advance):
                    made.tokens += len(ids)
                    made.largest = max(made.largest, int(ids.max(initial=0)))
                    data = ids.astype(recipe.dtype).tobytes()
                    digest.update(data)
                    out.write(data)
            out.flush()
            os.fsync(out.fileno())
        made.sha256 = digest.hexdigest()
        if not made.refused:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return made


def _ids(span: TextSpan, recipe: Recipe, made: Made, advance: Advance) -> Iterator[np.ndarray]:
    """Ids of a span, some `PIECE` bytes of text at a time."""
    source, tokenizer = span.source, recipe.tokenizer
    end = np.array([tokenizer.eos], np.uint32)
    try:
        opened = source.path.open("rb")
    except OSError as error:
        _refuse(made, f"{source.path}: {error.strerror or error}")
        return
    with opened as file:
        about = os.fstat(file.fileno())
        if (about.st_size, about.st_mtime_ns) != (source.size, source.stamp):
            _refuse(made, f"{source.path}: changed while it was read")
            return
        texts = _documents if source.lines else _parts
        for size, batch in texts(file, span, recipe, made):
            found = tokenizer.encode_many(batch)
            if source.lines:
                made.documents += len(found)
                found = [part for ids in found for part in (ids, end)]
            if found:
                yield np.concatenate(found)
            advance(size)
        if not source.lines and span.stop == source.size:
            made.documents += 1
            yield end


def _parts(file: BinaryIO, span: TextSpan, recipe: Recipe, made: Made) -> Iterator[tuple[int, list[str]]]:
    """A text file is one document, however many parts it is read in."""
    for at, part in pieces(file, span):
        size = len(part)
        if at == 0:
            part = part.removeprefix(MARK)
        try:
            text = part.decode()
        except UnicodeDecodeError as error:
            made.broken += 1
            if recipe.broken == "refuse":
                where = _where(made, file, span, at + error.start)
                _refuse(made, f"{where}: is no UTF-8 (byte 0x{part[error.start]:02x})")
                continue
            text = part.decode(errors="replace")
        yield size, [text]


def _documents(file: BinaryIO, span: TextSpan, recipe: Recipe, made: Made) -> Iterator[tuple[int, list[str]]]:
    """The "text" of each line; one that is empty is no document."""
    batch: list[str] = []
    size = 0
    for at, line in lines(file, span, LONGEST):
        size += len(line)
        try:
            text = _text(line.removeprefix(MARK) if at == 0 else line)
        except LineError as error:
            made.broken += 1
            if recipe.broken == "refuse":
                here = file.tell()
                _refuse(made, f"{_where(made, file, span, at)}: {error}")
                file.seek(here)
            continue
        if text:
            batch.append(text)
        if size >= PIECE:
            yield size, batch
            batch, size = [], 0
    yield size, batch


def _text(line: bytes) -> str:
    record = parse(line)
    if not isinstance(record.get("text"), str):
        has = ", ".join(list(record)[:SHOWN]) or "no keys"
        raise LineError(f'has no "text" that is a string (it has {has})')
    try:
        record["text"].encode()
    except UnicodeEncodeError:
        raise LineError('"text" holds half of a surrogate pair, which is no character') from None
    return record["text"]


def _where(made: Made, file: BinaryIO, span: TextSpan, at: int) -> str:
    """File and line; counting lines takes a while, and only the first few problems are shown."""
    path = span.source.path
    return f"{path}:{line_number(file, at)}" if len(made.problems) < SHOWN else str(path)


def _refuse(made: Made, problem: str) -> None:
    made.refused += 1
    if len(made.problems) < SHOWN:
        made.problems.append(problem)
