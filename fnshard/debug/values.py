"""Values: what a running schedule holds, as tensors with names, and whether they are finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fnshard.compiler.ir.values import LOSS_TANGENT, SCALARS, Kind, ValueName
from fnshard.compiler.schedule.instructions import Instruction, Reduced
from fnshard.errors import DebugError, FnshardError

Health = Literal["", "inf", "nan"]  # the worst that a value holds; "" is finite
ORDER: tuple[Health, ...] = ("", "inf", "nan")


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """What a value holds, by leaf, slot or field; a tensor is itself, under "". In flight: nothing."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Reduced):
        yield from value.blocks.items()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            for name, tensor in tensors(part):
                yield "/".join(filter(None, (str(key), name))), tensor
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "wait"):
        yield from tensors({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    elif isinstance(value, list | tuple):
        yield from tensors(dict(enumerate(value)))


def health(tensor: Tensor) -> Health:
    """Whether a tensor holds NaN, or infinities, or neither."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return ""
    tensor = widen_float8(tensor)
    if bool(torch.isfinite(tensor).all()):
        return ""
    return "nan" if bool(torch.isnan(tensor).any()) else "inf"


def widen_float8(tensor: Tensor) -> Tensor:
    """8-bit floats in fp32: they have next to no ops of their own."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def worst_health(kinds: Iterator[Health] | list[Health]) -> Health:
    """NaN before inf before finite."""
    return max(kinds, key=ORDER.index, default="")


def count_nonfinite(tensor: Tensor) -> str:
    """`3 of 64 NaN, 1 inf`."""
    tensor = widen_float8(tensor)
    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    parts = [f"{n} {word}" for n, word in ((nan, "NaN"), (inf, "inf")) if n]
    return f"{' and '.join(parts) or 'none'} of {tensor.numel()}"


def describe_value(name: str, part: str = "") -> str:
    """`gathered 'layers.0.w'`, for a value's name and which part of it."""
    plain = name.original if isinstance(name, ValueName) else ValueName(Kind.VALUE, name)
    if plain in (SCALARS, LOSS_TANGENT):
        return f"the step's {part}" if plain == SCALARS else "the loss scale"
    kind = plain.kind.name.lower()
    return f"{kind} {plain.leaf or plain.path + plain.version!r}" + (f", {part!r}" if part else "")


def describe_line(line: Instruction) -> str:
    """`forward layers.0 run k0.fwd(...)`."""
    return f"{line.phase} {line.unit} {line.verb} {line.detail}"


@contextmanager
def located(number: int, line: Instruction) -> Iterator[None]:
    """Say at which line of the schedule a rank broke off, and why.

    Raises:
        DebugError: an instruction failed by itself, and not because of a peer.
    """
    try:
        yield
    except FnshardError:
        raise
    except Exception as error:
        raise DebugError(
            f"the run broke off at line {number}: {describe_line(line)}",
            [f"{type(error).__name__}: {error}".splitlines()[0]],
            "fs.debug.bisect with the specs of fs.presets.no_shard says whether it is the layout.",
        ) from error
