"""Torchfile: find the tensors of `torch.save` streams, and read parts of them, without running any code.

A stream is a zip archive: a pickle that says what lies where, and the bytes of each storage, not compressed.
The pickle is read with a table of the names that it may use. Tensors become `PlacedTensor`s, which hold a
place in a file and no data. A name that is not in the table is never looked up: an `Inert` takes its place,
and the stream is refused with a list of all such names.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnshard.runtime.files.tensorfile import Corrupt, open_regular, read_exactly

SPARE_BYTES = 1 << 16  # the largest gap that is read along with what lies around it
LIMIT_BYTES = 2 << 30  # of a pickle


class Refused(Corrupt):
    """An error: a pickle names what may not run here."""


class Inert:
    """A stand-in for an object of a pickle: it keeps what the object would be made of, and does nothing."""

    def __new__(cls, *args: Any, **keywords: Any) -> Inert:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *args: Any, **keywords: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Drop an element, if the object is a list."""

    def extend(self, values: Any) -> None:
        """Drop elements, if the object is a list."""

    def add(self, value: Any) -> None:
        """Drop an element, if the object is a set."""


class _Function(NamedTuple):
    """A function that a pickle may call. It may do nothing else with it: a tuple has no state to set."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor in a file: its first element's byte, and the steps between elements along each dim.

    `placed[slices]` reads a box of it, and hardly more bytes than the box has.
    """

    path: Path
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __setstate__(self, state: Any) -> None:
        """Refuse a state: a planted pickle would name another file by it."""
        raise Corrupt("sets the state of a tensor that it has made")

    def __getitem__(self, slices: Any) -> Tensor:
        whole = tuple(slice(0, size) for size in self.shape)
        bounds = [s.indices(n) for s, n in zip(whole if slices is ... else slices, self.shape, strict=True)]
        sizes = [max(0, stop - start) for start, stop, _ in bounds]
        out = torch.empty(sizes, dtype=self.dtype)
        if not out.numel():
            return out
        first = self.at + self.dtype.itemsize * sum(
            b[0] * s for b, s in zip(bounds, self.stride, strict=True)
        )

        # Order dims by their steps, the widest first: a box is then runs of bytes, one behind another.
        order = sorted(range(len(sizes)), key=lambda dim: -self.stride[dim])
        fd = open_regular(self.path.parent, self.path.name)
        try:
            _read_box(fd, first, [self.stride[dim] for dim in order], out.permute(order))
        finally:
            os.close(fd)
        return out

    def part(self, first: int, shape: Sequence[int]) -> PlacedTensor:
        """Return the tensor of this shape that begins at element number `first` of this one."""
        if self.stride != contiguous(self.shape):
            what = f"has a tensor in {self.path.name} whose elements do not lie in order"
            raise Corrupt(what, "save it by .contiguous().")
        at = self.at + first * self.dtype.itemsize
        return replace(self, at=at, shape=tuple(shape), stride=contiguous(shape))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the steps between elements along each dim of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _read_box(fd: int, at: int, stride: Sequence[int], out: Tensor) -> None:
    """Fill a tensor whose dims' steps in the file are `stride`, the widest first."""
    # A box that lies in the file as it will lie here is read into its place. One with small gaps is read with
    # these, and copied; so is one whose elements share bytes (by `expand` or `unfold`). Any other is read
    # index by index along its widest step.
    item = out.element_size()
    lies_alike = all(n == 1 or a == b for n, a, b in zip(out.shape, stride, out.stride(), strict=True))
    span = 1 + sum((size - 1) * step for size, step in zip(out.shape, stride, strict=True))
    gaps = (span - out.numel()) * item
    if lies_alike and out.is_contiguous():
        read_exactly(fd, at, memoryview(out.view(-1).view(torch.uint8).numpy()))
    elif gaps <= SPARE_BYTES:
        buffer = torch.empty(span, dtype=out.dtype)
        read_exactly(fd, at, memoryview(buffer.view(torch.uint8).numpy()))
        out.copy_(buffer.as_strided(out.shape, stride))
    else:
        for index in range(out.shape[0]):
            _read_box(fd, at + index * stride[0] * item, stride[1:], out[index])


# ------------------------------------------------------------------ pickles

_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # modules by their names in protocol 2
Known = Callable[[str, str], Any]  # (module, name) -> what the name stands for, or None if it may not be used

_CONTAINERS: Mapping[str, Any] = {
    "builtins.set": set,
    "builtins.complex": complex,
    "builtins.bytearray": bytearray,
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": dict,
    "collections.defaultdict": lambda *args: {},
    "torch.Size": tuple,
    "torch.device": str,
    "torch.serialization._get_layout": str,
    "_codecs.encode": lambda text, *args: text.encode("latin1"),
}


def unpickle(stream: io.BufferedIOBase, known: Known, storage: Callable[[Any], Any] | None = None) -> Any:
    """Read a pickle, and make nothing but containers, numbers, dtypes and what `known` gives.

    Args:
        storage: makes what the pickle refers to from outside of it.

    Raises:
        Refused: it names something else; the error lists all such names.
        Corrupt: it is no pickle.
    """
    refused: dict[str, None] = {}

    def get_member(owner: Any, name: str) -> Inert:
        """Stand in for `getattr`, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
        if owner is not Inert:
            refused["builtins.getattr"] = None
        return Inert(name)

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            # Look the name up in the tables alone: to import a module would run its code.
            module = _PYTHON_2.get(module, module)
            if (module, name) == ("builtins", "getattr"):
                return _Function(get_member)
            found = _CONTAINERS.get(f"{module}.{name}") or known(module, name)
            # A dtype is pickled as an attribute of torch.
            if found is None and module == "torch" and "." not in name:
                dtype = getattr(torch, name, None)
                found = dtype if isinstance(dtype, torch.dtype) else None
            if found is None:
                refused[f"{module}.{name}"] = None
                found = Inert
            return _Function(found) if isinstance(found, FunctionType) else found

        def persistent_load(self, saved: Any) -> Any:
            if storage is None:
                raise pickle.UnpicklingError("it refers to what is not in it")
            return storage(saved)

    # Keep an error for later: names that were refused say more, if there are any.
    value, failure = None, None
    try:
        value = Reader(stream, encoding="latin1").load()
    except Corrupt:
        raise
    except Exception as error:  # whatever a broken or a planted pickle asks of these few types
        failure = error
    if refused:
        fix = "load it by what wrote it, where you trust it, and save nothing but tensors and numbers."
        if any("DTensor" in name for name in refused):
            fix = "save it by torch.distributed.checkpoint: a DTensor here is one rank's part of a state."
        raise Refused(f"is a pickle that would run or make {', '.join(refused)}", fix)
    if failure is not None:
        raise Corrupt(f"holds no readable pickle ({type(failure).__name__}: {failure})") from failure
    return value


# ------------------------------------------------------------------ streams of torch.save

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip

# Prefixes of the names of objects that a training state has beside its tensors, and that nobody needs here.
IDLE = ("argparse.Namespace", "deepspeed.", "lightning.", "numpy.", "omegaconf.", "pathlib.",
        "pytorch_lightning.")  # fmt: skip


class _StorageKind(NamedTuple):
    """A kind of storage, which a pickle names by a class."""

    dtype: torch.dtype


class _Storage(NamedTuple):
    """A storage, as a range of bytes in a file."""

    path: Path
    at: int
    size: int
    dtype: torch.dtype


def _make_tensor(
    storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], requires_grad: bool = False,
    hooks: Any = None, metadata: Any = None,
) -> PlacedTensor:  # fmt: skip
    """Describe a tensor as it lies in the file; a pickle calls this in place of torch's function."""
    _check_storage(storage, storage.dtype)
    item = storage.dtype.itemsize
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else 0
    # A planted stream may name memory before its storage, or behind it.
    if metadata or min([offset, *size, *stride]) < 0 or (offset + span) * item > storage.size:
        raise Corrupt("names a tensor that is not in it")
    return PlacedTensor(storage.path, storage.at + offset * item, storage.dtype, tuple(size), tuple(stride))


def _check_storage(storage: Any, dtype: Any) -> None:
    """Refuse what is no storage: a planted pickle may pass any object with such attributes."""
    if type(storage) is not _Storage or not isinstance(dtype, torch.dtype):
        raise Corrupt("names a tensor of something that is no storage")


def _make_tensor_of_dtype(
    storage: _Storage, offset: int, size: Any, stride: Any, grad: bool, hooks: Any, dtype: torch.dtype,
    metadata: Any = None,
) -> PlacedTensor:  # fmt: skip
    """Describe a tensor whose dtype the pickle names apart from its storage, as it does for newer dtypes."""
    _check_storage(storage, dtype)
    return _make_tensor(storage._replace(dtype=dtype), offset, size, stride, metadata=metadata)


_REBUILD: Mapping[str, Any] = {
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_tensor_of_dtype,
    "torch._utils._rebuild_parameter": lambda data, *args: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *args: data,
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, args, state: make(*args),
    "torch.nn.parameter.Parameter": Inert,  # as the type that the line above is told
    "torch.Tensor": Inert,
}


def resolve_torch_name(module: str, name: str) -> Any:
    """Return what a name in the pickle of a `torch.save` stream stands for."""
    full = f"{module}.{name}"
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return _StorageKind(_STORAGES[name])
    return _REBUILD.get(full) or (Inert if full.startswith(IDLE) else None)


class _FilePart(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, fd: int, start: int, length: int):
        self.fd, self.start, self.length, self.position = fd, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning of the file")
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.length - self.position))
        read_exactly(self.fd, self.start + self.position, memoryview(buffer)[:size])
        self.position += size
        return size


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Return the object of a `torch.save` stream, with a `PlacedTensor` for every tensor.

    Args:
        start, length: where the stream lies in the file; by default it is all of it.

    Raises:
        Refused: the stream holds objects of other kinds; the error names their classes.
        Corrupt: it is no such stream, or ends too early.
    """
    fd = open_regular(path.parent, path.name)
    try:
        # Find the stream.
        size = os.fstat(fd).st_size
        if length is None:
            length = size - start
        if start < 0 or length < 0 or start + length > size:
            raise Corrupt(f"ends at byte {size}, and {start + length} are needed")

        # List the archive, whose files all lie in one folder of any name.
        archive = zipfile.ZipFile(_FilePart(fd, start, length))
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        # An archive of TorchScript is a zip of the same form, with a file of constants besides.
        if "constants.pkl" in entries or "data.pkl" not in entries:
            raise Corrupt("is a zip archive, and not one of torch.save", "save a state dict by torch.save.")
        if "byteorder" in entries and archive.read(entries["byteorder"]).decode() != sys.byteorder:
            what = "was written on a machine of another byte order"
            raise Corrupt(what, "load it by torch.load there, and save it by safetensors.")
        if entries["data.pkl"].file_size > LIMIT_BYTES:
            raise Corrupt("has a pickle of more than 2 GiB", "save tensors and numbers alone.")

        def find_storage(saved: Any) -> _Storage:
            """Find the bytes of a storage, given what the pickle says of it."""
            _, kind, key, _, count = saved
            if type(kind) is not _StorageKind:
                raise Corrupt(f"has storage {key} of no known kind")
            entry, head = entries[f"data/{key}"], bytearray(4)
            if entry.compress_type != zipfile.ZIP_STORED:
                raise Corrupt("is compressed", "save it by torch.save, as that leaves it.")
            # The name and the extra field of a local header have lengths of their own.
            read_exactly(fd, start + entry.header_offset + 26, memoryview(head))
            data = start + entry.header_offset + 30 + sum(struct.unpack("<HH", head))
            if count * kind.dtype.itemsize > entry.file_size or data + entry.file_size > start + length:
                raise Corrupt(f"has less of storage {key} than it says")
            return _Storage(path, data, entry.file_size, kind.dtype)

        return unpickle(io.BytesIO(archive.read(entries["data.pkl"])), resolve_torch_name, find_storage)
    except zipfile.BadZipFile as error:
        raise Corrupt(
            f"is no zip archive of torch.save ({error})",
            "bring it again, whole; what torch before 1.6 wrote becomes one by torch.load and torch.save.",
        ) from error
    except (KeyError, NotImplementedError, RuntimeError, EOFError) as error:
        raise Corrupt(f"cannot be read ({type(error).__name__}: {error})") from error
    finally:
        os.close(fd)
