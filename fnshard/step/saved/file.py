"""File: named members in one file that is there whole or not at all, of a folder that one user may write.

A file is one line, the SHA-256 of all that follows, and behind it a safetensors file, whose tensors are the
members: nothing is unpickled, and a file of which any byte is another is refused before anything of it is
looked at. The digest guards against damage, not against somebody who may write to the folder: compiled code
is code, and whoever can put a file there runs code as its owner. So folders are made with mode 0700, and
those that others may write to are refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from torch import Tensor

from fnshard.errors import StateError

SUFFIX = ".fnstep"
LIMIT_bytes = 1 << 30  # of a cache folder, by default
LEFT_s = 3600.0  # nobody writes for so long
_MAGIC = b"fnshard step 1 "
_HEAD = len(_MAGIC) + 64 + 1


class Refused(Exception):
    """A file that is not used; the message says why."""


def write(path: Path, members: Mapping[str, Tensor]) -> None:
    """Write a file in a folder that exists, in the place of one that has its name.

    Raises:
        StateError: others may write to the folder.
    """
    check_folder(path.parent)
    body = safetensors.torch.save(dict(members))
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n")
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def read(path: Path) -> dict[str, Tensor]:
    """The members.

    Raises:
        FileNotFoundError: there is none.
        StateError: others may write to it, or to its folder.
        Refused: it is damaged, or no such file at all.
    """
    check_folder(path.parent)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link
        raise Refused(f"it cannot be opened ({error.strerror})") from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Refused("it is no regular file")
        _check(path, status, "file")
        data = file.read()
    head, body = data[:_HEAD], data[_HEAD:]
    if head != _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise Refused("it is damaged, cut short, or no file of fnshard's")
    try:
        return safetensors.torch.load(body)
    except Exception as error:  # whatever the library raises for bytes that are whole, and no such file
        raise Refused(f"it is no safetensors file ({error})") from error


def make_folder(folder: Path) -> Path:
    """A cache folder, made for this user alone if it is not there.

    Raises:
        StateError: others may write to it.
    """
    folder = folder.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Refuse a folder that others can write, or can put another in the place of.

    Raises:
        StateError: names it.
    """
    folder = Path(folder).resolve()
    _check(folder, os.stat(folder), "folder")
    for above in folder.parents:
        status = os.stat(above)
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if (shared and not status.st_mode & stat.S_ISVTX) or status.st_uid not in (0, os.getuid()):
            _refuse(above, status, f"folder above {folder}")


def _check(path: Path, status: os.stat_result, what: str) -> None:
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _refuse(path, status, what)


def _refuse(path: Path, status: os.stat_result, what: str) -> None:
    raise StateError(
        f"others than this user may write to the {what} {path} (mode {stat.S_IMODE(status.st_mode):04o}, "
        f"owner {status.st_uid}): compiled steps in it are not loaded, as they would run as this user.",
        fix="a folder of your own, chmod 700.",
    )


def prune(folder: Path, limit_bytes: int = LIMIT_bytes) -> list[Path]:
    """Remove the files that were used longest ago, until those that are left take at most `limit_bytes`, and
    what processes that were killed have left half written."""
    found = []
    for path in folder.glob(f".*{SUFFIX}.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFT_s:
                path.unlink()
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    total, removed = sum(size for _, size, _ in found), []
    for _, size, path in sorted(found):
        if total <= limit_bytes:
            break
        with suppress(OSError):
            path.unlink()
            removed.append(path)
        total -= size
    return removed


def touch(path: Path) -> None:
    """Note that a file was used."""
    with suppress(OSError):
        os.utime(path)
