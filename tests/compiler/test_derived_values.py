"""Values that are computed from leaves alone: each program equals plain autograd, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import reference
import sharded
import torch
from errors import raises
from torch import Tensor
from toys import chain, lower, rows

import fnshard as fs
from fnshard import ScheduleError
from fnshard.compiler.kernels import split
from fnshard.compiler.kernels.derived_values import Derived

WIDE = 32  # a row is over 16 times smaller than its leaf, so that it may cross
BLOCKS = 3


def params(blocks: int = BLOCKS) -> dict[str, Tensor]:
    return {p: v.double() for p, v in chain(blocks, WIDE).items()}


def batch() -> Tensor:
    return rows(WIDE).double()


def assert_same_everywhere(fn: Callable[..., Tensor], leaves: dict[str, Tensor], x: Tensor) -> None:
    """Assert that `fn`, a mean over rows, gives the same on two simulated ranks as in plain autograd."""
    expected, value = reference.gradients(fn, leaves, x)
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(leaves, mesh)
    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        loss, grads = step(fs.shard(leaves, specs, mesh), *sharded.part((x,), rank, mesh.size))
        return loss, fs.unshard(grads, specs, mesh, layout="gradient")

    for loss, grads in fs.simulate(mesh, run):
        torch.testing.assert_close(loss, value, rtol=0, atol=sharded.ATOL)
        torch.testing.assert_close(grads, expected, rtol=0, atol=sharded.ATOL)


# ------------------------------------------------------------------ ops of several results

SEVERAL: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda w: w.abs().max(0)[0],
    "both of slogdet": lambda w: torch.linalg.slogdet(w),
    "aminmax": lambda w: torch.aminmax(w, dim=0),
    "chunk of a max": lambda w: w.abs().max(0)[0].chunk(2)[1].sum(),
}


@pytest.mark.suite({
    "max": "values beside indices",
})  # fmt: skip
@pytest.mark.parametrize("kind", SEVERAL)
def test_one_result_of_several(kind: str) -> None:
    """An op on a leaf returns several, read by its unit and by another, as in per-channel quantisation."""

    def fn(p: Any, x: Tensor) -> Tensor:
        weights = list(p.values())
        for i, w in enumerate(weights):
            x = torch.tanh(x @ w)
            for source in (w, weights[(i + 1) % BLOCKS]):
                found = SEVERAL[kind](source)
                for value in found if isinstance(found, tuple) else (found,):
                    x = torch.tanh(x * value)
        return x.square().sum(-1).mean()

    low = lower(fn, params(), batch())
    assert low.schedule.counts()["gather"] <= 2 * BLOCKS
    assert_same_everywhere(fn, params(), batch())


def test_results_of_an_op_on_values_of_several_units() -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        least, most = torch.aminmax(torch.stack([w.norm() for w in p.values()]))
        for factor, w in zip((least, 1.0, most), p.values(), strict=True):
            x = torch.tanh(x @ w) * factor
        return x.square().sum(-1).mean()

    assert lower(fn, params(), batch()).schedule.counts()["gather"] <= 2 * BLOCKS + 2
    assert_same_everywhere(fn, params(), batch())


# ------------------------------------------------------------------ shapes of activations, values of leaves

SHAPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a leaf [WIDE, WIDE] and an activation
    "expand_as": lambda w, h: w.sum().expand_as(h) * 0.1,
    "zeros_like": lambda w, h: torch.zeros_like(h) + w[0],
    "copy_": lambda w, h: torch.empty_like(h).copy_(torch.tanh(w[0])),
    "expand": lambda w, h: w.norm().expand(h.shape) * 0.1,
}


@pytest.mark.suite({
    "zeros_like": "values that are made in the shape of an activation",
})  # fmt: skip
@pytest.mark.parametrize("kind", SHAPED)
def test_values_of_leaves_in_the_shape_of_an_activation(kind: str) -> None:
    """They cross as activations do; nothing is gathered again for them."""

    def fn(p: Any, x: Tensor) -> Tensor:
        first, *rest = p.values()
        x = torch.tanh(x @ first)
        made = SHAPED[kind](first, x)
        for w in rest:
            x = torch.tanh(x @ w) + made
            x[:, :2] *= 2
        return x.square().sum(-1).mean()

    low = lower(fn, params(), batch(), ranks=2)
    assert [s.units for s in low.segments.segments] == [(f"layers.{i}",) for i in range(BLOCKS)]
    assert low.schedule.counts()["gather"] <= 2 * BLOCKS - 1
    assert_same_everywhere(fn, params(), batch())


# ------------------------------------------------------------------ values of leaves of several units


def product_of_two(p: Any, x: Tensor) -> Tensor:
    a, b, *rest = p.values()
    both = a @ b / WIDE
    for w in (a, b, *rest):
        x = torch.tanh(x @ w @ both)
    return x


def parts_of_a_cat(p: Any, x: Tensor) -> Tensor:
    a, b, *rest = p.values()
    left, right = torch.cat([a, b], 1).split(WIDE, 1)
    for w in rest:
        x = torch.tanh(torch.tanh(x @ w) @ left)
    return x @ right


def running_average(p: Any, x: Tensor) -> Tensor:
    average = torch.zeros(())
    for w in p.values():
        average = average * 0.9 + w * 0.1
        x = torch.tanh(x @ average)
    return x


@pytest.mark.suite({
    "running_average-2": "units one after the other",
    "parts_of_a_cat-1": "parts of one value",
})  # fmt: skip
@pytest.mark.parametrize(
    ("layers", "gathers_per_unit"),
    # Each unit forward and backward; what the average is made of is read again by its second block.
    [(product_of_two, 2), (parts_of_a_cat, 1), (running_average, 2)],
)
def test_values_of_several_units(layers: Callable[..., Tensor], gathers_per_unit: int) -> None:
    """They cross as activations do: to make them again would gather all those units again."""

    def fn(p: Any, x: Tensor) -> Tensor:
        return layers(p, x).square().sum(-1).mean()

    low = lower(fn, params(4), batch(), ranks=2)
    assert low.schedule.counts()["gather"] <= gathers_per_unit * 4 + 1
    assert_same_everywhere(fn, params(4), batch())


def test_a_view_of_a_value_of_several_units_is_no_small_value_of_one() -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        norms = torch.stack([w.norm() for w in p.values()])
        for w in p.values():
            x = torch.tanh(x @ w) / norms.view(-1, 1)[0]
        return x.square().sum(-1).mean()

    assert lower(fn, params(), batch(), ranks=2).schedule.counts()["gather"] <= 3 * BLOCKS
    assert_same_everywhere(fn, params(), batch())


# ------------------------------------------------------------------ what may cross


def test_verify_finds_a_weight_that_is_handed_on() -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        first, second, *_ = p.values()
        first = torch.tanh(first)
        return (x @ first @ second @ first).sum()

    def nothing(graph: Any, leaves: Any, constants: Any) -> Derived:
        return Derived({}, leaves)

    lower(fn, params(), batch())
    with (
        mock.patch.object(split, "find_derived", nothing),
        raises(ScheduleError, says="handed on"),
    ):
        lower(fn, params(), batch())
