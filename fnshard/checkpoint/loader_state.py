"""Loader state: write a loader's position as JSON, read it back, and say which meshes it fits.

Types that JSON lacks are tagged, and nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnshard.errors import CheckpointError
from fnshard.mesh import Mesh
from fnshard.runtime.files.tensorfile import DTYPES, NAMES, bytes_of

TAG = "__is__"


def take_same_rows(one: Mesh, other: Mesh) -> bool:
    """Return whether each rank takes the same slice of the batch on both meshes: its position fits both.

    >>> from fnshard import make_mesh
    >>> flat = make_mesh(shard=4, abstract=True)
    >>> take_same_rows(flat, make_mesh(replicate=2, shard=2, abstract=True))
    True
    >>> take_same_rows(flat, make_mesh(shard=2, tensor=2, abstract=True))
    False
    """

    def list_data_ranks(mesh: Mesh) -> list[int]:
        numbers = []
        for rank in range(mesh.size):
            coordinate, number = mesh.coordinate(rank), 0
            for axis in mesh.data_axes:
                number = number * mesh.axis_size(axis) + coordinate[axis]
            numbers.append(number)
        return numbers

    return one.size == other.size and list_data_ranks(one) == list_data_ranks(other)


def encode(value: Any, name: str = "data") -> Any:
    """Encode a tree of numbers, strings, lists, tuples, dicts, bytes, tensors and arrays as values of JSON.

    >>> encode({"step": 3, "random": (1, b"ab")})
    {'step': 3, 'random': {'__is__': 'tuple', 'of': [1, {'__is__': 'bytes', 'of': 'YWI='}]}}

    Raises:
        CheckpointError: a value is none of these; it names the first.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value

    # Numbers and arrays of NumPy, tensors and bytes.
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return encode(value.item(), name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.itemsize <= 8:
        # torch refuses another byte order, and warns of a read-only array: `astype` makes a copy.
        native = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
        return _tag("array", encode(native, name))
    if isinstance(value, Tensor) and value.dtype in NAMES and value.layout == torch.strided:
        text = base64.b64encode(bytes_of(value)).decode()
        return _tag("tensor", [NAMES[value.dtype], list(value.shape), text])
    if isinstance(value, bytes):
        return _tag("bytes", base64.b64encode(value).decode())

    # Containers. Only dicts whose keys are strings, and not mistaken for a tag, are JSON's own.
    if isinstance(value, tuple):
        return _tag("tuple", [encode(v, f"{name}[{i}]") for i, v in enumerate(value)])
    if isinstance(value, list):
        return [encode(v, f"{name}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        if all(type(k) is str for k in value) and TAG not in value:
            return {k: encode(v, f"{name}[{k!r}]") for k, v in value.items()}
        return _tag("items", [[encode(k, name), encode(v, f"{name}[{k!r}]")] for k, v in value.items()])

    dtype = f" of {value.dtype}" if isinstance(value, Tensor | np.ndarray) else ""
    raise CheckpointError(
        f"{name} is {type(value).__name__}{dtype}, which a checkpoint does not hold (it never pickles).",
        fix="numbers, strings, lists, tuples, dicts, bytes, tensors and arrays are kept.",
    )


def decode(value: Any) -> Any:
    """Decode a value that `encode` has made."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {k: decode(v) for k, v in value.items()}
    return _DECODERS[value[TAG]](value["of"])


def _tag(kind: str, of: Any) -> dict[str, Any]:
    return {TAG: kind, "of": of}


def _read_tensor(of: Any) -> Tensor:
    """Return the tensor of a dtype's name, a shape and bytes in base64."""
    name, shape, text = of
    # `frombuffer` refuses an empty buffer.
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=DTYPES[name])
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=DTYPES[name]).reshape(shape)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": lambda of: tuple(decode(v) for v in of),
    "bytes": lambda of: base64.b64decode(of),
    "tensor": _read_tensor,
    "array": lambda of: decode(of).numpy(),
    "items": lambda of: {decode(k): decode(v) for k, v in of},
}
