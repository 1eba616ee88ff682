"""A cast to a narrower float type and back rounds, in compiled kernels as in eager ones, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import llama, lower, plain_grads, step_of

Round = Callable[[Tensor], Tensor]  # to the narrow type


def straight_through(x: Tensor, narrow: Round) -> Tensor:
    return x + (narrow(x).to(x.dtype) - x).detach()


def twice(x: Tensor, narrow: Round) -> Tensor:
    y = narrow(x)
    return y.to(x.dtype) * 3 - y.to(x.dtype).sin()


FORMS: dict[str, Callable[[Tensor, Round], Tensor]] = {
    "at once": lambda x, narrow: narrow(x).to(x.dtype),
    "through views": lambda x, narrow: narrow(x).view(4, -1).t()[1:].to(x.dtype),
    "in parts": lambda x, narrow: torch.stack([y.to(x.dtype) for y in narrow(x).chunk(2)]),
    "moved": lambda x, narrow: torch.where(x > 0, narrow(x), 0).flip(0).clone().to(x.dtype),
    "straight through": straight_through,
    "twice": twice,
}


def losses(p: dict[str, Tensor], x: Tensor, narrow: Round) -> tuple[Tensor, dict[str, Tensor]]:
    values = {name: form(w * x, narrow) for (name, form), w in zip(FORMS.items(), p["w"], strict=True)}
    return sum((v * (v.detach() + 0.3)).sum() for v in values.values()), values


def check(fn: Any, params: dict[str, Tensor], x: Tensor, backend: str) -> Any:
    """Values and gradients are torch's, up to the rounding of the wide type."""
    (_, values), grads = step_of(fn, params, backend=backend)(params, x)
    _, expected = plain_grads(fn, params, x)
    tolerance = 8 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(values, fn(params, x)[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grads, expected, rtol=tolerance, atol=tolerance)
    return values


def draws(wide: torch.dtype, forms: int = len(FORMS)) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*shape, dtype=wide, generator=draw) for shape in ((forms, 16, 4), (16, 4)))
    return {"w": w}, x


@pytest.mark.parametrize(
    ("wide", "narrow", "backend"),
    [
        (torch.float32, torch.bfloat16, "eager"),
        (torch.float32, torch.bfloat16, "inductor"),
        (torch.float64, torch.float32, "inductor"),
        pytest.param(torch.float32, torch.float16, "inductor", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_round_trip_rounds_as_in_torch(wide: torch.dtype, narrow: torch.dtype, backend: str) -> None:
    params, x = draws(wide)
    check(lambda p, x: losses(p, x, lambda v: v.to(narrow)), params, x, backend)


def test_numbers_at_the_limits_are_rounded_alike() -> None:
    x = torch.tensor(
        [0.0, -0.0, 1e-40, 6e-8, 65519.0, 65520.0, 3.4e38, float("inf"), float("nan"), 1 + 2**-8]
    )

    def fn(p: Any, x: Tensor) -> Any:
        trips = [x.to(d).float() for d in (torch.bfloat16, torch.float16)]
        return p["w"] * 1.0, [*trips, *(1 / v for v in trips)]

    params = {"w": torch.ones(())}
    step = step_of(fn, params, backend="inductor")
    values = step(params, x)[0][1]
    torch.testing.assert_close(values, fn(params, x)[1], rtol=0, atol=0, equal_nan=True)


def ops_of(lowered: Any) -> list[str]:
    return [str(node.target) for node in lowered.program.graph.nodes]


def test_programs_without_round_trips_are_left_as_they_are() -> None:
    fn, params, tokens = llama(dtype=torch.bfloat16)
    assert "fnshard.rounded.default" not in ops_of(lower(fn, params, tokens))


def test_arithmetic_in_the_narrow_type_is_left_to_the_compiler() -> None:
    def trips(between: Callable[[Tensor], Tensor]) -> int:
        lowered = lower(
            lambda p, x: between((x @ p["w"]).bfloat16()).float().sum(),
            {"w": torch.ones(4, 4)},
            torch.ones(8, 4),
        )
        return ops_of(lowered).count("fnshard.rounded.default")

    assert trips(lambda x: x) == 1
    assert trips(lambda x: F.silu(x)) == trips(lambda x: x @ x.T) == trips(lambda x: x * 2) == 0
