"""Meeting folder: the files through which the agents of a job tell each other where they stand."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fnshard.errors import FnshardError

LARGEST = 1 << 20  # bytes of a file


class NodesError(FnshardError, RuntimeError):
    """The machines of a job did not meet."""


@contextmanager
def entered(folder: Path) -> Iterator[int]:
    """The folder, opened anew: on a network file system that is what makes new files visible.

    Raises:
        NodesError: it is not this user's alone.
    """
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NodesError(f"{folder}, where nodes meet, is no folder ({error.strerror}).") from None
    try:
        found = os.fstat(number)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            raise NodesError(
                f"{folder}, where nodes meet, is open to others (owner {found.st_uid}, mode {mode:04o}).",
                fix="remove it: it is made for this user alone; or name another folder.",
            )
        os.listdir(number)
        yield number
    finally:
        os.close(number)


def write(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """Into the same file, again and again: on a network file system a new one may be seen late."""
    line = json.dumps(values).encode()
    with entered(folder) as inside:
        number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=inside)
        with open(number, "wb") as file:
            file.write(b"%08x %s\n" % (zlib.crc32(line), line))
            file.truncate()


def claim(folder: Path, name: str) -> bool:
    """Make a file; whether it was not there. One agent of several makes it, on a network file system too."""
    with entered(folder) as inside:
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=inside))
        except FileExistsError:
            return False
    return True


def newest(folder: Path, prefix: str) -> int:
    """The largest number behind `prefix-` in the names of files; -1: none."""
    with entered(folder):
        numbers = (path.stem.partition("-")[2] for path in folder.glob(f"{prefix}-*.json"))
        return max((int(attempt) for attempt in numbers if attempt.isdecimal()), default=-1)


def read(folder: Path, name: str) -> dict[str, Any]:
    """What an agent wrote; empty where there is no file, or no complete one."""
    with entered(folder) as inside, suppress(OSError, ValueError):
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
        with open(number, "rb") as file:
            if stat.S_ISREG(os.fstat(number).st_mode):
                checksum, _, line = file.read(LARGEST).partition(b"\n")[0].partition(b" ")
                if checksum == b"%08x" % zlib.crc32(line) and isinstance(values := json.loads(line), dict):
                    return values
    return {}
