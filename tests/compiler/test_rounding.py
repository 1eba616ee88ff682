"""Compiled kernels round as eager ones where it shows: by a cast and back, and where values decide."""

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
    """Check that values and gradients are torch's, up to the rounding of the wide type."""
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


@pytest.mark.suite({
    "torch.float32-torch.bfloat16-eager": "the row without a compiler",
})  # fmt: skip
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


@pytest.mark.long
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


# ------------------------------------------------------------------ decisions


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: F.silu(x * 1.7) * 1.1 + 0.3,
    # No rsqrt: torch rounds that of a short tensor twice, and that of a long one once.
    "sums": lambda x: (x * 1.3 - x.mean(-1, keepdim=True)) / (x * x).sum(-1, keepdim=True).sqrt(),
    "softmax": lambda x: x.softmax(-1) * 1.7,
    "moved and filled": lambda x: F.pad(torch.where(x > 0.07, x * 1.3, 0.3), (1, 0), value=0.1).flip(-1) * 3,
}
DECISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ties": lambda h: h == h.amax(-1, keepdim=True),
    "ties in fp32": lambda h: h.float() == h.max().float(),
    "equal pairs": lambda h: (h[:, None] == h[:, :, None]).sum(-1),
    "a number": lambda h: h * 0.7 == 0.3,
    "argmax": lambda h: (h * 1.1).argmax(-1),
    "sort": lambda h: h.sort(stable=True, dim=-1)[1],
    "cummax": lambda h: (h * 0.9).cummax(-1)[1],
    "a cast": lambda h: (h * 40).long(),
    "floor": lambda h: (h * 8).floor(),
    "where": lambda h: torch.where(h * 1.9 >= h.mean(), 1.0, h),
}
EXTREMES: tuple[Callable[[Tensor], Tensor], ...] = (  # whose gradients count ties
    lambda h: h.amax(-1), lambda h: h.max() * h.min(), lambda h: torch.linalg.vector_norm(h, torch.inf, -1),
    lambda h: torch.zeros_like(h).scatter_reduce(1, torch.arange(h.numel()).view_as(h) % 3, h, "amax"),
    lambda h: torch.ones_like(h[:2]).index_reduce(0, torch.arange(len(h)) % 2, h, "amin"),
    lambda h: h * (h == h.max()) / (h == h.max()).sum(),
)  # fmt: skip


def decide(p: dict[str, Tensor], x: Tensor) -> Any:
    values = [chain(x.to(w.dtype) * (1 + w)) for chain, w in zip(CHAINS.values(), p["w"], strict=True)]
    loss = sum(extreme(h).float().sum() for h in values for extreme in EXTREMES)
    return loss, {f"{c}, {d}": decision(h) for c, h in zip(CHAINS, values, strict=True)
                  for d, decision in DECISIONS.items()}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_what_decides_is_rounded_as_in_torch(narrow: torch.dtype) -> None:
    x = torch.randn(6, 19, generator=torch.Generator().manual_seed(0))
    params = {"w": torch.zeros(len(CHAINS), dtype=narrow)}
    (_, made), grads = step_of(decide, params, backend="inductor")(params, x)
    (_, expected), eager = step_of(decide, params)(params, x)
    wrong = [name for name, value in expected.items() if not torch.equal(made[name], value)]
    assert not wrong
    torch.testing.assert_close(grads, eager, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_maximum_counts_ties(narrow: torch.dtype) -> None:
    """In torch.compile no element equals the rounded maximum, so that the gradient is 0 / 0."""
    x = torch.randn(8, 17, generator=torch.Generator().manual_seed(0))
    params = {"w": torch.ones((), dtype=narrow)}
    grads = [
        step_of(lambda p, x: (F.silu(x.to(narrow) * p["w"]) * 1.1).amax(-1).float().sum(), params, **options)(
            params, x
        )[1]["w"]
        for options in ({}, {"backend": "inductor"})
    ]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0)


def kernels_of(fn: Any, params: Any, *batch: Any) -> str:
    return "".join(str(k) for k in lower(fn, params, *batch).kernels.values())


def test_nothing_is_rounded_where_nothing_decides() -> None:
    fn, params, tokens = llama(dtype=torch.bfloat16)
    assert "rounded" not in kernels_of(fn, params, tokens)

    def beside(p: Any, x: Tensor) -> Tensor:
        """Compute a value that decides, and one beside it that does not."""
        h = x.bfloat16() @ p["w"]
        return (F.silu(h.sin()) * (h.cos() > 0.5)).float().sum() + torch.logsumexp(h.float(), -1).sum()

    params = {"w": torch.ones(4, 4, dtype=torch.bfloat16)}
    text = kernels_of(beside, params, torch.ones(8, 4))
    lines = [line for line in text.splitlines() if "fnshard.rounded" in line]
    assert {line.split("rounded.default(")[1].split(")")[0] for line in lines} == {"mm", "cos"}


@pytest.mark.timeout(60)
def test_a_value_whose_parts_are_moved_many_times_is_followed_once() -> None:
    """Each turn has two ways for a number to go, so that 60 turns have 2**60."""

    def fn(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = (p["w"] * x).bfloat16()
        for _ in range(60):
            y = torch.cat([y[:, 1:], y[:, :1]], 1)
        return y.float().square().sum(), {"y": y.float()}

    draw = torch.Generator().manual_seed(0)
    w, x = (torch.randn(4, 8, generator=draw) for _ in range(2))
    check(fn, {"w": w}, x, "eager")
