"""A checkpoint's directory, which exists whole or not at all.

It is written as `.name.saving`, and renamed when every byte of it is on the disk. If another directory has
the name by then, that one is first moved aside as `.name.old`. A process that saves holds a lock on the
directory, which the system releases when the process is killed: a directory that nobody has locked is a
leftover, and the next save removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnshard.errors import CheckpointError

DATA = re.compile(r"rank-[0-9]{5,10}\.safetensors")
MEMORY, SHARED_MEMORY, MEMORY_PREFIX = "FNSHARD_MEMORY", "/dev/shm", "fnshard-memory-"
OWNER = "owner"  # a file in a directory in memory: the process that would start its users anew
KEPT = ".kept"  # a file that marks a temporary directory as left to the user
OURS = re.compile(rf"{DATA.pattern}|manifest\.json(\.sha256)?")
DCP = re.compile(r"__\d+_\d+\.distcp|\.metadata")  # what is left of a `save_dcp` that was killed


def as_path(path: Any, call: str) -> Path:
    """Return an argument of a call as a path."""
    if not isinstance(path, str | os.PathLike):
        name, kind = call.partition("(")[0], type(path).__name__
        raise CheckpointError(f"{name} is given a {kind} for a path.", fix=f"in this order: {call}.")
    return Path(path)


def data_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


@dataclass
class AtomicDirectory:
    """A directory for one checkpoint; rank 0 calls `begin`, `commit` and, in any case, `end`."""

    final: Path
    _lock_fd: int | None = None
    _is_committed: bool = False

    @property
    def saving(self) -> Path:
        """The directory that is written to until it is whole."""
        return self.final.with_name(f".{self.final.name}.saving")

    def begin(self) -> None:
        """Make the directory that is written to, and hold its lock.

        Raises:
            OSError: it cannot be made, another process is saving there, or something that is no checkpoint
                has the name.
        """
        make_directory(self.final.parent)
        if os.path.lexists(self.final) and not is_checkpoint_directory(self.final):
            raise FileExistsError(errno.EEXIST, "there is something else by that name", str(self.final))
        # The parent is locked, so that no other process removes the directory before this one has locked it.
        with _open_directory(self.final.parent) as parent:
            _lock(parent)
            _remove_leftovers(self.final.parent)
            if self.saving.exists():
                raise FileExistsError(errno.EEXIST, "another process is saving there", str(self.saving))
            self.saving.mkdir()
            self._lock_fd, self._is_committed = _open(self.saving), False
            _lock(self._lock_fd)

    def commit(self) -> None:
        """Give the directory its name."""
        # A process that is killed between the two renames leaves the old checkpoint as `.name.old`, to which
        # the next save gives its name back.
        aside = self.final.with_name(f".{self.final.name}.old")
        if self.final.exists():
            os.rename(self.final, aside)
        os.rename(self.saving, self.final)
        self._is_committed = True
        flush_directory(self.final.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def end(self) -> None:
        """Release the lock, and remove the directory if it has not been committed."""
        if self._lock_fd is not None:
            # After a commit the name is free: what has it now is another process's.
            if not self._is_committed:
                shutil.rmtree(self.saving, ignore_errors=True)
            # The lock goes last, so that no other save begins while the directory is being removed.
            os.close(self._lock_fd)
            self._lock_fd = None


def remove_directory(folder: Path) -> None:
    """Delete a checkpoint's directory, which disappears at once for readers: it is renamed first."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def is_checkpoint_directory(folder: Path, names: re.Pattern[str] = OURS) -> bool:
    """Return whether a folder is a directory that holds only files of a save, which `names` matches."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(names.fullmatch(name) for name in os.listdir(folder))


@contextmanager
def scratch_directory(prefix: str, keep: tuple[type[BaseException], ...] = ()) -> Iterator[Path]:
    """Make a temporary directory that this process has locked, and remove it after the block.

    Directories of that prefix that killed processes have left are removed too.

    Args:
        keep: exceptions after which the directory stays, for the user.
    """
    # Try again if another process took the directory for a leftover before it was locked.
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            fd = _open(folder)
        except FileNotFoundError:
            continue
        _lock(fd)
        if folder.exists():
            break
        os.close(fd)

    # Remove what killed processes left, and run the block; `KEPT` tells others to spare the directory.
    try:
        for left in sorted(folder.parent.glob(f"{prefix}*")):
            _remove_if_unlocked(left)
        yield folder
    except keep:
        (folder / KEPT).touch()
        raise
    finally:
        if not (folder / KEPT).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def memory_directory(name: str, owner: int) -> Path:
    """Make, or find, a directory in this machine's memory, for this user alone.

    The processes that use it share a lock, which ends with them. The directory stays, with all that they left
    in it, for processes of that name which are started after them. Directories of other names are removed
    when their owner has ended too.

    Args:
        owner: the process that would start the users of the directory anew.

    Raises:
        OSError: the machine has no such memory, another user has the name, or another owner the directory.
    """
    # Make it and lock it; try again if another process took it for a leftover before it was locked.
    folder = memory_root() / f"{MEMORY_PREFIX}{name}"
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        status, other = os.fstat(fd), _read_owner(folder)
        is_open = status.st_uid != os.geteuid() or status.st_mode & 0o077
        if is_open or (other not in (None, owner) and _is_alive(other)):
            os.close(fd)
            raise FileExistsError(errno.EEXIST, "it is in use, or open to others", str(folder))
        fcntl.flock(fd, fcntl.LOCK_SH)  # until this process ends
        if folder.exists():
            break
        os.close(fd)

    # Note the owner in a file that is renamed, so that a reader finds a whole number or none.
    written = folder / f".{OWNER}.{os.getpid()}"
    written.write_text(str(owner))
    os.rename(written, folder / OWNER)
    clear_memory()
    return folder


def clear_memory(owner: int | None = None) -> None:
    """Remove directories that ended processes left in memory, if their owner has ended too, or is `owner`."""
    for left in sorted(memory_root().glob(f"{MEMORY_PREFIX}*")):
        pid = _read_owner(left)
        if pid is None or pid == owner or not _is_alive(pid):
            _remove_if_unlocked(left)


def in_memory(name: str) -> bool:
    """Return whether processes of that name have left a directory in this machine's memory."""
    return (memory_root() / f"{MEMORY_PREFIX}{name}").is_dir()


def memory_root() -> Path:
    """Return the folder of the directories in memory: `FNSHARD_MEMORY`, by default `/dev/shm`."""
    return Path(os.environ.get(MEMORY, SHARED_MEMORY))


def _read_owner(folder: Path) -> int | None:
    """Read which process a directory in memory belongs to; None if nothing readable says so."""
    try:
        return int((folder / OWNER).read_text())
    except (OSError, ValueError):
        return None


def _is_alive(pid: int) -> bool:
    """Return whether a process exists, by sending it no signal."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and belongs to another user
        pass
    return True


def _remove_if_unlocked(left: Path) -> None:
    """Remove a directory of this user that nobody has locked; without locks, it stays."""
    try:
        fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it belongs to another user, or is gone
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid == os.getuid() and not (left / KEPT).exists():
            shutil.rmtree(left, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(fd)


def make_directory(folder: Path) -> None:
    """Make a directory and its missing parents, whose names survive a power cut."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_directory(each.parent)


def flush_directory(folder: Path) -> None:
    """Make new names in a directory survive a power cut."""
    with _open_directory(folder) as fd:
        os.fsync(fd)


def flush_file(path: Path) -> None:
    """Make the bytes of a file survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove_leftovers(root: Path) -> None:
    """Remove the leftovers of killed processes, and give a replaced checkpoint its name back."""
    for left in [path for end in ("saving", "old", "gone") for path in sorted(root.glob(f".*.{end}"))]:
        # Remove nothing but a save's own files, and only if no process is still writing them.
        is_unfinished_dcp = left.suffix == ".saving" and is_checkpoint_directory(left, DCP)
        if not (is_unfinished_dcp or is_checkpoint_directory(left)) or _is_held(left):
            continue
        final = left.with_name(left.stem[1:])
        if left.suffix == ".old" and not final.exists():
            os.rename(left, final)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _open(folder: Path) -> int:
    """Open a directory, which can then be locked and flushed."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(fd: int, flags: int = 0) -> bool:
    """Lock an open directory, and return whether that worked; a file system without locks grants all."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | flags)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_held(folder: Path) -> bool:
    """Return whether a live process has locked a directory."""
    with _open_directory(folder) as fd:
        return not _lock(fd, fcntl.LOCK_NB)


@contextmanager
def _open_directory(folder: Path) -> Iterator[int]:
    """Open a directory for the block."""
    fd = _open(folder)
    try:
        yield fd
    finally:
        os.close(fd)
