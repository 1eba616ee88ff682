"""Spans: which bytes of which files a shard is made of: the same whoever makes it, and in whatever order.

The files of one side, laid end to end, are cut every so many bytes; then each cut moves on behind the next
end of a line. A shard needs no other shard to know where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from experiments.data.text_files import TextFile

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
    inside = 0  # bytes that go on with a character
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
