"""Draws have torch's limits and distributions in every dtype, and randint the whole of its range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor
from toys import step_of

from fnshard import TraceError

COUNT = 1 << 15
HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DIGITS = {HALF: 11, BFLOAT: 8, SINGLE: 24, DOUBLE: 53}


def drawn(draw: Callable[[], Any], backend: str = "eager") -> Any:
    """Return what `draw()` gives inside a step."""
    params = {"w": torch.ones(())}
    step = step_of(lambda p, x: (p["w"] * x, draw()), params, backend=backend)
    (_, values), _ = step(params, torch.ones(()))
    return values


@pytest.mark.long
def test_floats_keep_their_limits_in_every_dtype() -> None:
    def draw() -> dict[str, list[Tensor]]:
        return {
            str(d): [
                torch.rand(COUNT, dtype=d),
                torch.empty(COUNT, dtype=d).uniform_(1, 2),
                torch.empty(COUNT, dtype=d).uniform_(-3e-3, 1e-3),
                torch.randn(COUNT, dtype=d),
                torch.empty(COUNT, dtype=d).exponential_(4),
                torch.empty(COUNT, dtype=d).bernoulli_(0.3),
            ]
            for d in DIGITS
        }

    for dtype, values in zip(DIGITS, drawn(draw).values(), strict=True):
        assert all(v.dtype == dtype for v in values)
        rand, ones, small, normal, waiting, coins = (v.double() for v in values)
        step = 2.0 ** -DIGITS[dtype]
        assert rand.min() >= 0 and rand.max() <= 1 - step  # multiples of it, as torch's
        assert abs(rand.mean() - (1 - step) / 2) < 0.01
        assert ones.min() >= 1 and ones.max() < 2 and abs(ones.mean() - 1.5) < 0.01
        low, high = torch.tensor([-3e-3, 1e-3], dtype=dtype).double()
        assert small.min() >= low and small.max() <= high and abs(small.mean() + 1e-3) < 3e-5
        assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.02 and normal.abs().max() > 3.5
        assert waiting.min() > 0 and abs(waiting.mean() - 0.25) < 0.01
        assert abs(coins.mean() - 0.3) < 0.01


def test_complex_numbers_are_drawn_in_both_parts() -> None:
    normal, shifted, uniform = drawn(
        lambda: (
            torch.randn(COUNT, dtype=torch.complex64),
            torch.empty(COUNT, dtype=torch.complex64).normal_(1, 2),
            torch.rand(COUNT, dtype=torch.complex128),
        )
    )
    for value, std in ((normal, 0.5**0.5), (shifted, 2**0.5)):
        assert abs(value.real.std() - std) < 0.02 and abs(value.imag.std() - std) < 0.02
    assert abs(shifted.mean() - 1) < 0.03
    assert abs(uniform.real.mean() - 0.5) < 0.01 and abs(uniform.imag.mean() - 0.5) < 0.01


SPANS = [
    (0, 10), (-7, 2**33), (0, 3 * 2**29), (0, 2**63 - 1), (-(2**63), 0), (-3 * 2**61, 3 * 2**60),
]  # fmt: skip
MORE = [(0, 2**31), (0, 2**40), (-(2**63), 2**63 - 1), (0, 3 * 2**61), (-(2**62), 2**63 - 1)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("spans", "backend"),
    [
        (SPANS, "eager"),
        (MORE, "eager"),
        ([(0, 2**40), (-(2**63), 2**63 - 1)], "inductor"),
    ],
)
def test_integers_are_as_often_everywhere_in_their_range(spans: list[tuple[int, int]], backend: str) -> None:
    values = drawn(lambda: [torch.randint(low, high, (COUNT,)) for low, high in spans], backend)
    for (low, high), value in zip(spans, values, strict=True):
        assert value.min() >= low and value.max() < high
        share = (value.double() - low) / (high - low)
        tenths = torch.histc(share, 10, 0, 1) / COUNT
        assert (tenths - 0.1).abs().max() < 0.01, (low, high)
        if high - low > 1000:
            residues = torch.stack([(value % 3 == i).double().mean() for i in range(3)])
            assert (residues - 1 / 3).abs().max() < 0.015, (low, high)


def test_integers_in_narrow_dtypes() -> None:
    narrow = [(0, 256, torch.uint8), (-128, 128, torch.int8), (0, 2, torch.bool), (-300, 300, torch.int16)]
    floats = [(-5001, 5000, HALF), (-1001, 1000, BFLOAT), (2**24 + 1, 2**24 + 8, SINGLE), (0, 2049, HALF)]
    values = drawn(lambda: [torch.randint(a, b, (COUNT,), dtype=d) for a, b, d in narrow + floats])
    for (low, high, dtype), value in zip(narrow + floats, values, strict=True):
        assert value.dtype == dtype and value.double().min() >= low and value.double().max() < high
        if not dtype.is_floating_point:
            assert value.unique().numel() == high - low
    assert values[-1].max() == 2048


@pytest.mark.parametrize(
    ("draw", "leaves"),
    [
        (lambda: torch.randint(0, 300, (3,), dtype=torch.uint8), ["randint", "unsigned char"]),
        (lambda: torch.randint(0, 70000, (3,), dtype=HALF), ["randint", "c10::Half"]),
        (lambda: torch.empty(3).uniform_(2, 1), ["uniform_", "[from, to)"]),
        (lambda: torch.empty(3).bernoulli_(2.0), ["bernoulli_", "[0, 1]"]),
    ],
)
def test_what_torch_refuses_is_refused(draw: Callable[[], Tensor], leaves: list[str]) -> None:
    with raises(TraceError, leaves=leaves, fix="limits that the dtype has"):
        drawn(draw)


def test_dropout_in_a_half_type_keeps_the_mean() -> None:
    """A factor of 1 / 0.9 in bf16 would be off by 0.16%."""
    params = {"w": torch.ones(())}
    step = step_of(lambda p, x: (p["w"] * x.float().mean(), torch.nn.functional.dropout(x, 0.1)), params)
    x = torch.linspace(1, 2, COUNT).bfloat16()
    (_, kept), _ = step(params, x)
    expected = (x.float() / 0.9).bfloat16()
    assert torch.equal(kept[kept != 0], expected[kept != 0])
    assert float((kept != 0).double().mean()) == pytest.approx(0.9, abs=0.01)
