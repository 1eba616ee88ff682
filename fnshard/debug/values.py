"""Values: what a running schedule holds, as tensors with names, and whether they are finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fnshard.compiler.ir.values import LOSS_TANGENT, SCALARS, Kind, ValueName
from fnshard.compiler.schedule.instructions import Instruction, Reduced

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


_WORDS = {
    Kind.STORED: "stored leaf", Kind.GATHERED: "gathered leaf", Kind.GRADIENT: "gradient of leaf",
    Kind.SLOTS: "optimizer state of leaf", Kind.ACCUMULATED: "accumulated gradient of leaf",
    Kind.BATCH: "batch leaf", Kind.CONSTANT: "constant", Kind.TANGENT: "gradient of value",
    Kind.AXIS: "index on axis", Kind.NORMS: "squared norms", Kind.KEY: "random key",
}  # fmt: skip


def describe_value(name: str, part: str = "") -> str:
    """`gathered leaf 'layers.0.w'`, for a value's name and which part of it."""
    plain = name.original if isinstance(name, ValueName) else ValueName(Kind.VALUE, name)
    text = plain.path + plain.version
    if plain.leaf:
        return f"{_WORDS[plain.kind]} {plain.leaf!r}" + (f", slot {part!r}" if part else "")
    if plain.kind is Kind.REDUCED:
        return f"reduced gradient of leaf {part!r}" if part else f"reduced gradients {text!r}"
    if plain.kind is Kind.ACCUMULATED:
        return f"{_WORDS[plain.kind]} {part!r}"
    if plain.kind in _WORDS:
        return f"{_WORDS[plain.kind]} {text!r}" + (f", {part}" if part else "")
    if plain == SCALARS:
        return f"the step's {part}"
    return "the loss scale" if plain == LOSS_TANGENT else f"value {plain!r}"


def describe_line(line: Instruction) -> str:
    """`forward layers.0 run k0.fwd(...)`."""
    return f"{line.phase} {line.unit} {line.verb} {line.detail}"
