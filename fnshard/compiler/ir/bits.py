"""SplitMix64 (Steele, Lea & Flood 2014) on tensors of int64, whose arithmetic wraps as the generator's."""

from __future__ import annotations

from torch import Tensor


def to_int64(value: int) -> int:
    """Return an integer's low 64 bits as an int64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN = to_int64(0x9E3779B97F4A7C15)  # the distance between two states of the generator
_MIX1 = to_int64(0xBF58476D1CE4E5B9)
_MIX2 = to_int64(0x94D049BB133111EB)


def shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros; `>>` alone would repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Return the number that the generator gives in a state, elementwise."""
    x = (x ^ shift(x, 30)) * _MIX1
    x = (x ^ shift(x, 27)) * _MIX2
    return x ^ shift(x, 31)
