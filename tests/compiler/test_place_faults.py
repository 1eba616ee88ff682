"""Planted faults of a tensor axis: each is refused where a step is lowered, or found by `check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from errors import raises
from tensor_models import decoder
from torch import Tensor

import fnshard as fs
from fnshard import ScheduleError
from fnshard.compiler.place import place as placing
from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Split
from fnshard.compiler.place.rules import RULES, rule_of
from fnshard.compiler.place.strategies import OpStrategy
from fnshard.compiler.place.writer import Writer
from fnshard.compiler.schedule import build
from fnshard.layout.spec import LayoutSpec

aten = torch.ops.aten
convert, exchange, slice_part = Writer.convert, Writer.exchange, Writer.slice
write_results = placing.Placer.write_results
Plant = Callable[[], AbstractContextManager[Any]]


def converting(**kinds: Any) -> Plant:
    """Give each exchange another kind, axis or dim."""

    def other(self: Writer, node: Any, kind: str, dim: int, *to: int) -> Any:
        if kind in kinds:
            kind, axis, dim = kinds[kind](self, dim)
            self = replace(self, axis=axis)
        return exchange(self, node, kind, dim, *to)

    return lambda: mock.patch.object(Writer, "exchange", other)


def unconverted(self: Writer, node: Any, shape: Any, now: Any, to: Any) -> Any:
    return node if (now, to) == (PARTIAL, REPLICATED) else convert(self, node, shape, now, to)


def first_part(self: Writer, node: Any, shape: Any, to: Split) -> Any:
    part = shape[to.dim] // self.ranks
    return self.call(aten.slice.Tensor, (node, to.dim, 0, part))


def part_of_another_rank(self: Writer, node: Any, shape: Any, to: Split) -> Any:
    other = self.call(aten.rsub.Scalar, (self.index, self.ranks - 1))
    return slice_part(replace(self, index=other), node, shape, to)


def shifted(call: Any) -> Iterator[OpStrategy]:
    yield OpStrategy((Split(1),), Split(1))


def unscaled(self: Any) -> list[Any]:
    write_results(self)
    return [source for _, source, *_ in self.record.results]


def one_way(self: Any, *args: Any) -> None:
    """Send no cotangent of an exchange back."""


def same_way(each: Any, mesh: Any, unit: str, phase: str, sent: Any, received: Any, backward: bool = False):
    issue, wait = ONE_EXCHANGE(each, mesh, unit, phase, sent, received, backward)
    return (replace(issue, kind="all_to_all"), wait) if backward else (issue, wait)


def other_axis(each: Any, mesh: Any, unit: str, phase: str, sent: Any, received: Any, backward: bool = False):
    issue, wait = ONE_EXCHANGE(each, mesh, unit, phase, sent, received, backward)
    return (replace(issue, axes=("shard",)), wait) if backward else (issue, wait)


ONE_EXCHANGE, SUMMED = build.exchange, build.replica_axes
REFUSED: dict[str, tuple[Plant, str | list[str]]] = {
    "a partial sum meets an op": (
        lambda: mock.patch.object(Writer, "convert", unconverted),
        ["from P to R", "psum over tensor is due"],
    ),
    "an exchange over another axis": (
        converting(all_gather=lambda c, dim: ("all_gather", "shard", dim)),
        ["all_gather over shard", "all_gather over tensor is due"],
    ),
    "a gather along another dim": (
        converting(all_gather=lambda c, dim: ("all_gather", c.axis, 0)), "broadcast"
    ),
    "a sum where it is scattered": (
        converting(reduce_scatter=lambda c, dim: ("psum", c.axis, dim)), "reduce_scatter over tensor is due"
    ),
    "a scatter where it is summed": (
        converting(psum=lambda c, dim: ("all_gather", c.axis, 0)), "psum over tensor is due"
    ),
    "every rank takes the first part": (
        lambda: mock.patch.object(Writer, "slice", first_part), "same part"
    ),
    "a split label is shifted": (
        lambda: mock.patch.dict(RULES, {aten.slice.Tensor: shifted}), "is invalid for input of size"
    ),
    "a part of the loss is the loss": (
        lambda: mock.patch.object(placing.Placer, "write_results", unscaled), "returned"
    ),
    "a gradient is not summed over tensor": (
        lambda: mock.patch.object(
            build, "replica_axes", lambda b, s, axes: tuple(a for a in SUMMED(b, s, axes) if a != "tensor")
        ),
        ["summed over", "tensor is due"],
    ),
    "a gradient is summed over tensor, which splits it": (
        lambda: mock.patch.object(
            build, "replica_axes", lambda b, s, axes: tuple(dict.fromkeys((*SUMMED(b, s, axes), "tensor")))
        ),
        ["summed over", "tensor, where"],
    ),
    "a leaf is gathered over tensor, which splits it": (
        lambda: mock.patch.object(LayoutSpec, "local", lambda spec, mesh: spec), "shard is due"
    ),
    "a norm counts an element twice": (
        lambda: mock.patch.object(build, "Norms", lambda *a, replicas, **k: NORMS(*a, replicas=1, **k)),
        "1 replicas",
    ),
    "no cotangent comes back": (
        lambda: mock.patch.object(build._Builder, "exchange_back", one_way), "not exchanged back"
    ),
    "another dual": (lambda: mock.patch.object(build, "exchange", same_way), "not exchanged back"),
    "a dual over another axis": (
        lambda: mock.patch.object(build, "exchange", other_axis), "not exchanged back"
    ),
}  # fmt: skip
NORMS = build.Norms


@pytest.mark.parametrize("fault", REFUSED)
def test_a_fault_is_refused_where_a_step_is_lowered(fault: str) -> None:
    plant, found = REFUSED[fault]
    model, mesh = decoder(), fs.make_mesh(shard=2, tensor=2, abstract=True)
    specs = fs.presets.full_shard(model.params, mesh, tensor="tensor")
    # A residual that is kept whole is what is summed; split, it is scattered.
    residual = "whole" if "psum" in str(found) else "split"
    step = fs.shard_step(
        model.loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), backend="eager", grad_norm=True,
        residual=residual,
    )  # fmt: skip
    with plant(), raises(ScheduleError, says=found):
        step.lower(model.params, *model.batch(0))


def columns_of_all(call: Any) -> Iterator[OpStrategy]:
    """Run a norm on the columns of each rank, whose means are then of these columns alone."""
    yield OpStrategy((Split(1),), Split(1), {"normalized_shape": [4]})


def once(rule: Any) -> Any:
    """Return a rule that has its strategies once, and none when it is asked again."""
    left = [rule]
    return lambda call: left.pop()(call) if left else iter(())


def two_parts(call: Any) -> Iterator[OpStrategy]:
    yield OpStrategy((Split(1),), Split(1), run=lambda index, x: list(x.split([3, 1])))


SEVERAL: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], Any, Callable[[], Any], str]] = {
    "a split that the first result alone can have": (
        lambda h: torch.native_layer_norm(h, (8,), None, None, 1e-5)[:2],
        aten.native_layer_norm.default, lambda: columns_of_all, "[4, 1]",
    ),
    "a strategy that the rule has not": (
        lambda h: h.split([3, 1]), aten.split_with_sizes.default, lambda: once(two_parts), "no rule from S(1)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SEVERAL)
def test_a_wrong_rule_of_an_op_with_several_results_is_refused(fault: str) -> None:
    op, target, rule, found = SEVERAL[fault]

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        first, second = op(x @ p["w"])
        return first.square().mean() + second.square().mean()

    params, mesh = {"w": torch.randn(3, 8)}, fs.make_mesh(tensor=2, abstract=True)
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(fs.P(), compute=fs.P(None, "tensor")))])
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")
    with mock.patch.dict(RULES, {target: rule()}), raises(ScheduleError, says=found):
        step.lower(params, torch.randn(4, 3))


def other_rank(op: Any) -> Plant:
    """Let a rank compute by another's index what it computes by its own."""
    find = rule_of(op)

    def rule(call: Any) -> Iterator[OpStrategy]:
        for way in find(call):
            run = way.run
            yield way if run is None else replace(way, run=lambda i, *x, run=run: run(call.ranks - 1 - i, *x))

    return lambda: mock.patch.dict(RULES, {op: rule})


def without_run(op: Any) -> Plant:
    find = rule_of(op)

    def rule(call: Any) -> Iterator[OpStrategy]:
        yield from (replace(way, run=None) for way in find(call))

    return lambda: mock.patch.dict(RULES, {op: rule})


def added_on_every_rank(call: Any) -> Iterator[OpStrategy]:
    yield OpStrategy((PARTIAL, REPLICATED), PARTIAL)
    yield from rule_of(aten.sub.Tensor)(call)


FOUND: dict[str, tuple[dict[str, int], Plant]] = {
    "a bias is added on every rank": (
        {"tensor": 2}, lambda: mock.patch.dict(RULES, {aten.add.Tensor: added_on_every_rank})
    ),
    "rows of another rank's table": ({"tensor": 2}, other_rank(aten.embedding.default)),
    "targets among another rank's words": ({"tensor": 2}, other_rank(aten.gather.default)),
    "the part of another rank": (
        {"context": 2}, lambda: mock.patch.object(Writer, "slice", part_of_another_rank)
    ),
    "padding is summed": ({"context": 2}, without_run(aten.sum.default)),
}  # fmt: skip


@pytest.mark.suite({
    "padding is summed": "parts that are not equal",
})  # fmt: skip
@pytest.mark.parametrize("fault", FOUND)
def test_a_wrong_rule_is_found_by_check(fault: str) -> None:
    axes, plant = FOUND[fault]
    model, mesh = decoder(layers=1), fs.make_mesh(**axes, simulated=True)
    split = fs.presets.full_shard(model.params, mesh, tensor="tensor" if "tensor" in axes else None)
    assert fs.debug.check(model.loss, model.params, *model.batch(0), split, mesh=mesh)
    with plant(), raises(fs.errors.DebugError, leaves="the loss"):
        fs.debug.check(model.loss, model.params, *model.batch(0), split, mesh=mesh)
