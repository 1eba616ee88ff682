"""File blocks: a block of a tensor out of a file, read through a small buffer.

`safetensors.safe_open().get_slice` does the same by a mapping of the file. It is not used: a file that is
cut short meanwhile ends the process by SIGBUS, where this raises `Corrupt`; and mapped pages stay resident
(387 MB besides half of a 512 MB tensor), where this keeps 8 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from fnshard.runtime.files.tensorfile import read_exactly

BUFFER_bytes = 8 << 20  # all memory that it takes besides the block
GAP_bytes = 4096  # what is skipped by reading on: the disk reads pages anyway


def read_block(
    fd: int, at: int, dtype: torch.dtype, shape: Sequence[int], slices: Sequence[slice], out: Tensor
) -> None:
    """Fill the first elements of `out`, along every dim, with `full[slices]`; cast to the dtype of `out`.

    Reads what the block covers and no more, but for gaps of less than a page between its rows.

    Args:
        fd: the file.
        at: where the data of the full tensor begins in it, row-major.
        dtype, shape: of the full tensor.
        slices: one for each dim, within the shape.
        out: contiguous, on any device, at least as large as the slices; what they do not cover stays.

    Raises:
        Corrupt: the file ends before.
    """
    if not shape:
        shape, slices, out = (1,), (slice(0, 1),), out.view(1)
    sizes = [s.stop - s.start for s in slices]
    if 0 in sizes:
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # The last dim that is cut: what it keeps lies in one run, together with all that follows.
    cut = max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=0)
    lines, step = (sizes[cut - 1], strides[cut - 1]) if cut else (1, 0)
    run = sizes[cut] * strides[cut]
    into = out.view(*out.shape[:cut], -1) if cut else out.view(1, -1)
    reader = _Lines(fd, dtype, min(BUFFER_bytes, max(lines * step, run) * dtype.itemsize))
    outer = max(cut - 1, 0)
    for index in product(*(range(size) for size in sizes[:outer])):
        place = sum(i * stride for i, stride in zip(index, strides, strict=False))
        place += sum(s.start * stride for s, stride in zip(slices, strides, strict=True))
        reader.read(at + place * dtype.itemsize, step, into[index][:lines, :run])


class _Lines:
    """Reads equal runs at equal distances, many at a time."""

    def __init__(self, fd: int, dtype: torch.dtype, nbytes: int):
        self.fd, self.dtype = fd, dtype
        self.buffer = torch.empty(max(nbytes, dtype.itemsize), dtype=torch.uint8)
        self.bytes = memoryview(self.buffer.numpy())

    def read(self, at: int, step: int, into: Tensor) -> None:
        """[lines, run] from `at` on, `step` elements from line to line."""
        item, room = self.dtype.itemsize, len(self.bytes) // self.dtype.itemsize
        lines, run = into.shape
        if run > room:
            for line in range(lines):
                self._one(at + line * step * item, into[line])
            return
        dense = lines > 1 and (step - run) * item < GAP_bytes and step <= room
        width = step if dense else run
        many = max(1, room // width)
        for low in range(0, lines, many):
            part, place = into[low : low + many], at + low * step * item
            if dense:
                self._fill(place, 0, (part.shape[0] - 1) * step + run)
            else:
                for line in range(part.shape[0]):
                    self._fill(place + line * step * item, line * run, run)
            part.copy_(self.buffer[: room * item].view(self.dtype).as_strided(part.shape, (width, 1)))

    def _one(self, at: int, into: Tensor) -> None:
        """A run that is longer than the buffer."""
        item, room = self.dtype.itemsize, len(self.bytes) // self.dtype.itemsize
        for low in range(0, into.numel(), room):
            part = into[low : low + room]
            self._fill(at + low * item, 0, part.numel())
            part.copy_(self.buffer[: part.numel() * item].view(self.dtype))

    def _fill(self, at: int, first: int, count: int) -> None:
        item = self.dtype.itemsize
        read_exactly(self.fd, at, self.bytes[first * item : (first + count) * item])
