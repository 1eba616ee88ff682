"""Files: written completely or not at all; an error of the system names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4


class LineError(ValueError):
    """A record cannot be used; the message says why."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError in here that names no file names this one: `write` and `flush` do not say what they fill."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str | Iterable[str], *, durable: bool = False) -> None:
    """Write aside, then rename: who reads the file finds all of it, or what was there before.

    Args:
        durable: it outlives a power cut, too.
    """
    from fnshard.runtime.files.folder import (  # and with it torch, which this module does not wait for
        flush_directory,
        make_directory,
    )

    make_directory(path.parent)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        flush_directory(path.parent)


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """JSONL, at its own path; another process may be writing the same."""
    aside = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
    write_text(aside, (f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
    return aside.replace(path)


def write_json(path: Path, values: Any, *, durable: bool = False) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; {} where there is no such file, or it is torn, or no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def first_few(lines: Sequence[str], most: int) -> list[str]:
    """Some lines of a message, and how many are left out.

    >>> first_few(["a", "b", "c"], 1)
    ['a', 'and 2 more']
    """
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def append(path: Path, text: str) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(text)
