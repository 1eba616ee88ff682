"""Files: write them completely or not at all, and compare them with what was written before they are used.

An error of the system names the file. A *record* is a JSON object that holds its checksum. A folder of files
is compared with the sizes and checksums that `digests_of` returned. CRC-32 guards against damage, not against
somebody who changes a file and its checksum.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from experiments.lib.checks import ConfigError
from fnshard.runtime.files.folder import flush_directory, flush_file, make_directory

LOCK = "run.lock"
PARTIAL = ".partial"  # the end of the name that a file has while it is written
SUM = "crc32"  # the last key of a record
SEAL = "# crc32 of what follows: "
PIECE_BYTES = 16 << 20  # the bytes of a file that are read at once
UNREADABLE = (ValueError, RecursionError)  # the errors of `json.loads`


class LineError(ValueError):
    """A line or record of a data file cannot be used; the message says why."""


class DamagedError(ConfigError):
    """A file does not hold what was written to it. One rank alone may find it."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError in the block that names no file, as of `file.write` and `file.flush`, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str | Iterable[str], *, durable: bool = False) -> None:
    """Write a file under another name and rename it: a reader finds all of it, or what was there before.

    Args:
        durable: whether it must outlive a power cut.
    """
    parts = [text] if isinstance(text, str) else text
    _write_aside(path, (part.encode() for part in parts), durable=durable)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file as `write_text` does; it outlives a power cut."""
    _write_aside(path, [content], durable=True)


def _write_aside(path: Path, parts: Iterable[bytes], *, durable: bool) -> None:
    """Write a file under another name, flush it if it is to be durable, and rename it."""
    make_directory(path.parent)
    partial = path.with_name(f"{path.name}{PARTIAL}")
    try:
        with naming(path), partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:  # a name is content of its directory
        flush_directory(path.parent)


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSONL. Processes may write the same file at once, so each writes under a name of its own."""
    aside = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
    write_text(aside, (f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
    return aside.replace(path)


def write_json(path: Path, values: Any, *, durable: bool = False) -> None:
    """Write a value as JSON, as `write_text` does."""
    write_text(path, json.dumps(values, indent=1) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; {} if there is no such file, or it holds something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *UNREADABLE):
        return {}
    return values if isinstance(values, dict) else {}


def write_record(path: Path, values: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write an object with its checksum, for `read_record`."""
    write_json(path, {**values, SUM: checksum(values)}, durable=durable)


def checksum(values: Mapping[str, Any]) -> str:
    """Return the CRC-32 of an object as JSON. An object that was written and read back has the same.

    >>> checksum({"a": (1, 0.1)}) == checksum({"a": [1, 0.1]})
    True
    """
    return f"{zlib.crc32(json.dumps(values).encode()):08x}"


def read_record(path: Path, *, need_checksum: bool = False) -> dict[str, Any] | None:
    """Read what `write_record` wrote; None if there is no such file.

    Args:
        need_checksum: whether to refuse an object without one, which an older version may have written.

    Raises:
        DamagedError: the file holds something else; the message has the path, and the caller adds a way out.
    """
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, no object")
        # The checksum is the last key, if there is one. Its name may be what is damaged.
        last = next(reversed(values), None)
        content = {name: value for name, value in values.items() if name != last}
        fits = values.get(last) == checksum(content)
        is_intact = fits and last == SUM
        if (fits or SUM in values) and not is_intact:
            raise ValueError("its checksum differs")
        if need_checksum and not is_intact:
            raise ValueError("it has no checksum")
        return content if is_intact else values
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise DamagedError(f"{path} is not what was written ({error}).") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror}).") from None


def write_sealed(path: Path, text: str) -> None:
    """Write a text below a comment with its checksum, for `read_sealed`."""
    write_text(path, f"{SEAL}{zlib.crc32(text.encode()):08x}\n{text}")


def read_sealed(path: Path) -> str:
    """Read what `write_sealed` wrote. A text without such a first line is an older version's.

    Raises:
        DamagedError: the file holds something else.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path} is not what was written ({error}).") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror}).") from None
    head, _, content = text.partition("\n")
    crc = f"{zlib.crc32(content.encode()):08x}"
    # The words before the checksum may be what is damaged, or the file may end in them.
    is_sealed = head.startswith(SEAL) or head.endswith(crc)
    if SEAL.startswith(text) or (is_sealed and head != f"{SEAL}{crc}"):
        raise DamagedError(
            f"{path} is not what was written (its checksum differs). Fix: put it back; or, if you changed "
            "it, delete its first line."
        )
    return content if is_sealed else text


def digest_of(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file, which is read a piece at a time."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def digests_of(folder: Path) -> dict[str, list[int]]:
    """Return `digest_of` each file in a folder and below it, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_of(path) for path in files}


def differences(folder: Path, digests: Mapping[str, Sequence[int]], *, read_all: bool) -> list[str]:
    """Say which files of a folder are not what `digests_of` saw there.

    Args:
        read_all: whether to read every byte; if not, only sizes are compared.
    """
    wrong = []
    for name, (size, crc) in digests.items():
        path = folder / name
        try:
            present = path.stat().st_size
            if present != size:
                wrong.append(f"{name}: {present} of {size} bytes")
            elif read_all and digest_of(path)[1] != crc:
                wrong.append(f"{name}: its checksum differs")
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
    return wrong


def commit_folder(aside: Path, final: Path) -> None:
    """Flush all files of a folder, and rename it.

    If a folder of that name exists, that one is kept, and `aside` is left for the caller to delete.
    """
    for path in aside.rglob("*"):
        if path.is_dir():
            flush_directory(path)
        else:
            flush_file(path)
    flush_directory(aside)
    try:
        aside.rename(final)
    except OSError:
        if not final.exists():
            raise
    flush_directory(final.parent)


@contextmanager
def lock_folder(folder: Path, name: str = LOCK) -> Iterator[bool]:
    """Lock a folder while the block runs, and yield whether this process has the lock: another may have it.

    A process that is killed gives it back.

    Args:
        name: the name of the file that is locked.
    """
    # The lock belongs to the open file, which the system closes when the process ends, however that is.
    with (folder / name).open("a") as file:
        has_lock = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            has_lock = False
        except OSError:  # a file system without locks
            pass
        yield has_lock


@contextmanager
def take_turns(folder: Path) -> Iterator[None]:
    """Let one process at a time run the block with this folder.

    All may run it if there is no such folder, or its file system has no locks.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def first_few(lines: Sequence[str], most: int) -> list[str]:
    """Return some lines of a message, and a line that says how many are left out.

    >>> first_few(["a", "b", "c"], 1)
    ['a', 'and 2 more']
    """
    if len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"and {len(lines) - most} more"]


def append(path: Path, text: str) -> None:
    """Add a text to the end of a file."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(text)
