"""JSONL: numbered lines of files that may be far larger than memory, and what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LONGEST = 2**26  # bytes; a longer "line" is some other file, which would be held whole
MARK = b"\xef\xbb\xbf"  # what some editors write in front of UTF-8


class LineError(ValueError):
    """A line cannot be used; the message says why."""


def read_lines(path: Path, watch: Callable[[bytes], Any]) -> Iterator[tuple[int, bytes]]:
    """Numbers from 1 and bytes of the lines that are not blank.

    Args:
        path: of the file.
        watch: is shown every byte that is read.

    At most `LONGEST` + 1 bytes of a line are handed out; `parse` refuses such a one.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            watch(line)
            if number == 1:
                line = line.removeprefix(MARK)
            rest = line
            while len(rest) > LONGEST and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST + 1)
                watch(rest)
            if line.strip():
                yield number, line


def parse(line: bytes) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        LineError: it holds none.

    >>> parse(b'{"text": "a"}')
    {'text': 'a'}
    """
    if len(line) > LONGEST:
        raise LineError(f"is longer than {LONGEST // 2**20} MiB; is this JSONL?")
    try:
        found = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise LineError(f"is no UTF-8 ({wrong})") from error
    except json.JSONDecodeError as error:
        raise LineError(f"is no JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise LineError(f"is no JSON that can be read ({error})") from error
    if not isinstance(found, dict):
        raise LineError(f"holds a {type(found).__name__}, expected an object: {{...}}")
    return found
