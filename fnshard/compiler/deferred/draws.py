"""Draw random numbers of a leaf as functions of a key and of each element's place in memory alone.

So any part of a leaf can be drawn by itself, and is the same as in the whole. An operator that is not in the
table here draws its tensor whole, from a generator that the key seeds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.bits import GOLDEN, mix, shift, to_int64

Draw = Callable[[Tensor, torch.dtype], Tensor]  # from random bits to numbers, in fp32 or fp64
_RUN = 1 << 15  # elements that are drawn at once: few enough to stay in cache


def key_of(seed: int, path: str, number: int) -> int:
    """Return the key of a leaf's random operator."""
    digest = hashlib.blake2b(f"{seed} {number} {path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def fill(out: Tensor, start: int, key: int, draw: Draw) -> None:
    """Draw a tensor, or a run of one, whose first element is at place `start` of its memory."""
    # The number at place i is a hash of key + (i + 1) * GOLDEN: a run needs nothing of the runs before it.
    flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
    states = torch.arange(min(_RUN, flat.numel())) * GOLDEN
    for offset in range(0, flat.numel(), _RUN):
        part = flat[offset : offset + _RUN]
        bits = mix(states[: part.numel()] + to_int64(key + (start + offset + 1) * GOLDEN))
        part.copy_(draw(bits, torch.promote_types(out.dtype, torch.float32)))
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def _convert_to_unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return multiples of 2^-24, or of 2^-53 in fp64, in [0, 1)."""
    digits = 53 if dtype == torch.float64 else 24
    return shift(bits, 64 - digits).to(dtype) * 2.0**-digits


def normal(mean: float = 0.0, std: float = 1.0) -> Draw:
    """Return the draw of a normal distribution, by the transform of Box and Muller (1958)."""

    def draw(bits: Tensor, dtype: torch.dtype) -> Tensor:
        # u is above 0 in both cases, since its logarithm is taken.
        if dtype == torch.float64:
            u, turn = 1 - _convert_to_unit(bits, dtype), _convert_to_unit(mix(bits + GOLDEN), dtype)
        else:  # 32 bits each
            u, turn = (shift(bits, 32).float() + 0.5) * 2.0**-32, (bits & 0xFFFFFFFF).float() * 2.0**-32
        return u.log_().mul_(-2).sqrt_().mul_(turn.mul_(2 * math.pi).cos_()).mul_(std).add_(mean)

    return draw


def uniform(low: float = 0.0, high: float = 1.0) -> Draw:
    """Return the draw of a uniform distribution."""

    def draw(bits: Tensor, dtype: torch.dtype) -> Tensor:
        return _convert_to_unit(bits, dtype).mul_(high - low).add_(low)

    return draw


def truncated_normal(mean: float, std: float, low: float, high: float) -> Draw:
    """Return the draw of a normal distribution between two bounds, by inverting its distribution function."""
    # A range above the mean is mirrored below it, where the function is near 0 and has all its digits.
    sign = -1.0 if low > mean else 1.0
    first, last = sorted(sign * (bound - mean) / std for bound in (low, high))
    # The probabilities of lying below each bound.
    below, up_to = (0.5 * math.erfc(-z / 2**0.5) for z in (first, last))

    def draw(bits: Tensor, dtype: torch.dtype) -> Tensor:
        # Half a step is added, since the quantile of 0 is infinite.
        u = (_convert_to_unit(bits, torch.float64) + 2.0**-54).mul_(up_to - below).add_(below)
        return torch.special.ndtri(u).mul_(sign * std).add_(mean).clamp_(low, high)

    return draw


_DRAWS: dict[str, tuple[Callable[..., Draw], tuple[str, ...]]] = {
    "normal_": (normal, ("mean", "std")),
    "uniform_": (uniform, ("from", "to")),
    "trunc_normal_": (truncated_normal, ("mean", "std", "a", "b")),
    **dict.fromkeys(("randn", "randn_like"), (normal, ())),
    **dict.fromkeys(("rand", "rand_like"), (uniform, ())),
}


def draw_of(name: str, given: Mapping[str, Any], dtype: torch.dtype) -> Draw | None:
    """Return the draw of a random operator, given its arguments; None if it draws tensors whole."""
    if name not in _DRAWS or not dtype.is_floating_point:
        return None
    make_draw, names = _DRAWS[name]
    return make_draw(*(given[n] for n in names))
