"""Read and write tensors in safetensors files, streamed, with a checksum for every block of bytes.

The format is that of https://github.com/huggingface/safetensors: a length, a JSON header, raw bytes. Its own
library reads these files, but does not write them here: it needs all tensors of a file in memory at once.
CRC-32 guards against corruption, not against somebody who changes a file and its checksum.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 8 << 20  # the bytes that one checksum covers, and that are read to trust any of them
# Errors that say nothing against the file itself, and so no reason to take an older checkpoint.
PASSING = (
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN,
    errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Dtypes of checkpoints. complex128, which the format lacks, is stored as pairs of F64.
STATE_DTYPES = {**DTYPES, "C128": torch.complex128}
STATE_NAMES = {dtype: name for name, dtype in STATE_DTYPES.items()}


class Corrupt(ValueError):
    """An error: a file is not what was written, or is of no kind that is read; the message says which.

    Args:
        fix: a way out, if it is another than to bring the file again.
    """

    def __init__(self, what: str | Path = "", fix: str = ""):
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to be written.

    Args:
        make: returns the tensor, on any device, when its turn comes. `write` needs it; it is None in an
            entry for `file_layout` alone, whose caller writes the data.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor] | None = None

    @property
    def bytes(self) -> int:
        """The bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A record of a written file.

    Args:
        bytes, header_bytes: the sizes of the file and of its header.
        header_crc32: the checksum of the header.
        at: where each tensor's data begins in the file.
        crc32: the checksums of each `BLOCK_BYTES` of each tensor's data.
    """

    bytes: int
    header_bytes: int
    header_crc32: int
    at: Mapping[str, int]
    crc32: Mapping[str, tuple[int, ...]]


def write(
    path: str | Path, entries: Sequence[TensorToWrite], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write a safetensors file and flush it to the disk; one tensor at a time is in memory.

    Args:
        path: a file that does not exist yet.
        entries: tensors with distinct names.
        metadata: strings for the header's `__metadata__`.

    Raises:
        OSError: the system's own error; an incomplete file stays.
        ValueError: the format lacks a dtype, or a tensor is not what its entry says.
    """
    head, at = file_layout(entries, metadata)
    named, crcs, size = {e.name: e for e in entries}, {}, len(head)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        _write_all(fd, memoryview(head))
        for e in (named[name] for name in at):
            tensor = e.make()
            if tuple(tensor.shape) != e.shape or tensor.dtype != e.dtype:
                raise ValueError(f"{e.name}: {list(tensor.shape)} {tensor.dtype}, announced as {e}")

            # Each block has a checksum of its own, so that a reader of a part need not read the whole tensor.
            data, sums = bytes_of(tensor), []
            for start in range(0, len(data), BLOCK_BYTES):
                part = data[start : start + BLOCK_BYTES]
                sums.append(zlib.crc32(part))
                _write_all(fd, part)
            crcs[e.name] = tuple(sums)
            size += e.bytes
        os.fsync(fd)
    finally:
        os.close(fd)
    return WrittenFile(size, len(head), zlib.crc32(head), at, crcs)


def file_layout(
    entries: Sequence[TensorToWrite], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return the head of a file, and where in the file each tensor's data begins, in that order."""
    # Wide dtypes first, so that every tensor lies at a multiple of its item size.
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    offset, starts = 0, {}
    for e in ordered:
        if e.dtype not in STATE_NAMES:
            raise ValueError(f"{e.name}: safetensors files know no {e.dtype}")
        pairs = e.dtype not in NAMES
        header[e.name] = {
            "dtype": "F64" if pairs else NAMES[e.dtype],
            "shape": [*e.shape, 2] if pairs else list(e.shape),
            "data_offsets": [offset, offset + e.bytes],
        }
        starts[e.name] = offset
        offset += e.bytes

    # Pad the header with spaces to a multiple of eight, as the format allows: the data then begins at one.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}


def _write_all(fd: int, data: memoryview) -> None:
    """Write all bytes; the system writes at most 2 GB by one call."""
    while len(data):
        data = data[os.write(fd, data) :]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's data as bytes, without a copy if it is contiguous and on the host."""
    # A conjugate or negative view has a flag and the bytes of other numbers.
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def open_regular(folder: str | Path, name: str, size: int | None = None) -> int:
    """Open a plain file in a folder; a link, a device, or a path to another folder is Corrupt.

    Args:
        size: the bytes that it must have; None if they are unknown.
    """
    if not name or os.path.basename(name) != name or name in (".", "..") or "\0" in name:
        raise Corrupt(f"{name!r} is no name of a file in this directory")

    # An error that may pass is raised unchanged: it says nothing against the file.
    path = Path(folder) / name
    try:
        # O_NONBLOCK: to open a pipe would wait for somebody who writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in PASSING:
            raise
        linked = error.errno == errno.ELOOP
        raise Corrupt(f"{name}: {'is a link' if linked else error.strerror}") from error
    except UnicodeEncodeError as error:
        raise Corrupt(f"{name!r} is no name of a file ({error.reason})") from error

    # Look at the open file itself, since the path may name another by now.
    status = os.fstat(fd)
    is_file = stat.S_ISREG(status.st_mode)
    if is_file and size in (None, status.st_size):
        return fd
    os.close(fd)
    what = f"has {status.st_size} bytes, written were {size}" if is_file else "is no file"
    raise Corrupt(f"{name}: {what}")


def read_exactly(fd: int, at: int, buffer: memoryview) -> None:
    """Fill a buffer from a place of a file; a file that ends before is Corrupt."""
    while len(buffer):
        count = os.preadv(fd, [buffer], at)
        if count == 0:
            raise Corrupt(f"ends at byte {at}")
        buffer, at = buffer[count:], at + count


def read_and_check(fd: int, at: int, size: int, crc32: Sequence[int], start: int, out: memoryview) -> None:
    """Read bytes `[start, start + len(out))` of a tensor's data, checking every block that they touch.

    Args:
        at: where the tensor's data begins in the file.
        size: the bytes of all of its data.
        crc32: the checksums of its blocks.
    """
    end = start + len(out)
    for index in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
        # A block that is wanted in full is read into its place; any other is read apart, and a part copied.
        low, high = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, size)
        is_inside = start <= low and high <= end
        block = out[low - start : high - start] if is_inside else memoryview(bytearray(high - low))
        read_exactly(fd, at + low, block)
        if zlib.crc32(block) != crc32[index]:
            raise Corrupt(f"bytes {at + low} to {at + high} are not what was written (checksum differs)")
        if not is_inside:
            first, last = max(start, low), min(end, high)
            out[first - start : last - start] = block[first - low : last - low]
