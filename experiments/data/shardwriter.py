"""One shard: the text of its spans as token ids in a file, each document behind it an end token."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np

from experiments.data.lines import LONGEST, MARK, LineError, parse
from experiments.data.spans import PIECE, TextSpan, line_number, lines, pieces
from experiments.data.tokenizer import Tokenizer

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
    """Write under a name of its own and rename: a shard is whole or absent.

    Args:
        advance: is told of bytes of text as they are done.
    """
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
