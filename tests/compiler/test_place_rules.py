"""Every rule by force: each way in which an op runs on ranks gives what it gives on one device."""

from __future__ import annotations

import itertools
import operator
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import placement_cases
import pytest
import torch
from placed import cut, exchanges, run_on_ranks
from placement_cases import SPLIT_ATTENTION, Case, Draw
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from fnshard.compiler.ir.program import Input, Outputs, Program, propagate
from fnshard.compiler.kernels import block_attention
from fnshard.compiler.place.expand import EXPANSIONS
from fnshard.compiler.place.place import Axis, place
from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Placement, Split, fits
from fnshard.compiler.place.rules import rule_of
from fnshard.compiler.place.strategies import RULES, Call, OpStrategy
from fnshard.optim.fused import DECOMPOSITIONS

UNTESTED = {  # whose results nobody may compare, or that no program of one op has
    "aten::new_empty", "aten::empty_like", "fnshard::exchange", "aten::linalg_svd", "aten::_linalg_svd",
    *(op._schema.name for op in DECOMPOSITIONS),  # updates, which tests/optim trains
}  # fmt: skip
# Of how many results numbers are compared. The factors behind them are those of the matrix or of its
# transpose, as it lies in memory; what reads them knows that.
COMPARED = {torch.ops.aten._linalg_det.default: 1, torch.ops.aten._linalg_slogdet.default: 2}
ROUNDED = {torch.ops.fnshard.fp8_linear.default}  # gradients are: their parts add up to another number
SDPA = torch.ops.aten.scaled_dot_product_attention.default
CASES = placement_cases.cases()
IDS = [f"{i}-{c.op.name().split('::')[1]}" for i, c in enumerate(CASES)]


def test_every_rule_and_expansion_has_a_case() -> None:
    tested = {case.op._schema.name for case in CASES} | UNTESTED
    assert {op._schema.name for op in [*RULES, *EXPANSIONS]} - tested == set()


def values_of(case: Case) -> list[Tensor]:
    draws: list[Draw] = []
    _visit((case.args, case.kwargs), draws.append)
    return [d.value(seed) for seed, d in enumerate(draws)]


def _visit(arguments: Any, found: Any) -> Any:
    return map_aggregate(arguments, lambda v: found(v) if isinstance(v, Draw) else v)


def program_of(case: Case) -> tuple[Program, Call]:
    """Make the program of one op, and its call, replicated."""
    graph, mode, values = fx.Graph(), FakeTensorMode(), values_of(case)
    nodes = [graph.placeholder(f"x{i}") for i in range(len(values))]
    feed = iter(nodes)
    args, kwargs = _visit((case.args, case.kwargs), lambda _: next(feed))
    made = graph.call_function(case.op, args, kwargs)
    with mode, torch.enable_grad():
        fakes = [torch.empty(v.shape, dtype=v.dtype).requires_grad_(v.requires_grad) for v in values]
        feed = iter(fakes)
        args, kwargs = _visit((case.args, case.kwargs), lambda _: next(feed))
        value = case.op(*args, **kwargs)
        many = isinstance(value, list | tuple)
        graph.output(
            tuple(graph.call_function(operator.getitem, (made, i)) for i in range(len(value)))
            if many
            else (made,)
        )
        propagate(graph, fakes)
    inputs = tuple(Input("batch", n.name) for n in nodes)
    outputs = Outputs(None, None, None)
    call = Call(case.op, args, kwargs, value, (REPLICATED,) * len(values), Axis("tensor", 2, {}))
    return Program(graph, inputs, {}, outputs, mode), call


def placements(shape: Sequence[int], dtype: torch.dtype, ranks: int) -> list[Placement]:
    splits = [Split(d, outer) for d in range(len(shape)) for outer in (1, 2)]
    sums = [PARTIAL] if dtype != torch.bool else []
    return [REPLICATED, *sums, *(s for s in splits if fits(shape, s, ranks))]


def parts(value: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """Return what each rank has; the parts of a sum are leaves, each of which gets a gradient."""
    if placement != PARTIAL:
        return cut(value, placement, ranks)
    return [p.detach().requires_grad_(value.requires_grad) for p in cut(value, placement, ranks)]


def check(
    case: Case, program: Program, inputs: Sequence[Placement], ranks: int, attention: str = "auto"
) -> Program:
    """Check that results and gradients of a placed program are those of the op, and return it."""
    axis = Axis("tensor", ranks, dict(zip(program.inputs, inputs, strict=True)), attention=attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = place(program, axis)
    values = values_of(case)
    fed = [parts(v, to, ranks) for v, to in zip(values, inputs, strict=True)]
    needed = [i for i, v in enumerate(values) if v.requires_grad]
    indices = [[torch.tensor(r) for r in range(ranks)]] * (len(placed.inputs) - len(fed))
    got = run_on_ranks(placed.graph, [*fed, *indices], ranks)
    feed = iter(values)
    args, kwargs = _visit((case.args, case.kwargs), lambda _: next(feed))
    expected = case.op(*args, **kwargs)
    expected = list(expected) if isinstance(expected, list | tuple) else [expected]
    draw = torch.Generator().manual_seed(0)
    total, reference = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for rank, results in enumerate(got):
        assert len(results) == len(expected)
        for result, value in list(zip(results, expected, strict=True))[: COMPARED.get(case.op)]:
            torch.testing.assert_close(
                result, value, rtol=0, atol=1e-10, msg=lambda m, r=rank: f"rank {r}: {m}"
            )
            if value.requires_grad:
                weight = torch.randn(value.shape, generator=draw, dtype=value.dtype)
                total = total + (result * weight).sum().real / ranks
                reference = reference + (value * weight).sum().real / ranks
    if not reference.requires_grad:
        return placed
    total = total + 0 * sum(values[i].sum().real for i in needed)
    given = [fed[i] if inputs[i] == PARTIAL else [values[i]] for i in needed]
    options = {"allow_unused": True, "materialize_grads": True}
    ours = iter(torch.autograd.grad(total, list(itertools.chain(*given)), **options))
    grads = torch.autograd.grad(reference, [values[i] for i in needed], **options)
    for each, grad in zip(given, grads, strict=True):
        most = 0.25 * grad.abs().max() if case.op in ROUNDED else 1e-10
        for _ in each:
            torch.testing.assert_close(next(ours), grad, rtol=0, atol=most)
    return placed


# ------------------------------------------------------------------ all placements


def _combinations(case: Case, ranks: int, most: int) -> list[tuple[Placement, ...]]:
    found = list(itertools.product(*(placements(v.shape, v.dtype, ranks) for v in values_of(case))))
    found = [inputs for inputs in found if set(inputs) != {REPLICATED}] or found
    if len(found) <= most:
        return found
    return random.Random(str(case)).sample(found, most)


FIRST = {case.op: case for case in reversed(CASES)}


@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.op.name())
def test_any_placements_of_the_inputs(case: Case) -> None:
    """The first case of each op runs on three ranks; each way of each case runs on two by itself."""
    program, _ = program_of(case)
    for inputs in _combinations(case, 3, 1):
        check(case, program, inputs, 3)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_all_placements_of_the_inputs(case: Case) -> None:
    program, _ = program_of(case)
    for ranks in (2, 3, 4):
        for inputs in _combinations(case, ranks, 40):
            check(case, program, inputs, ranks)


# ------------------------------------------------------------------ each way by itself


def _ways(call: Call, ranks: int) -> Iterator[tuple[Placement, ...]]:
    """Yield the inputs of each way that the rule has of a call, however its tensors are split."""
    rule, seen = rule_of(call.target), set()
    options = [placements(t.shape, t.dtype, ranks) for t in call.tensors]
    for first in max(options, key=len, default=[]):
        current = tuple(first if first in o else REPLICATED for o in options)
        for way in rule(_replaced(call, current, ranks)) if rule else ():
            nonsense = any(
                p == PARTIAL and t.dtype == torch.bool for p, t in zip(way.inputs, call.tensors, strict=True)
            )
            seen.update([] if nonsense else [way.inputs])
    yield from seen - {(REPLICATED,) * len(options)}


def _replaced(call: Call, current: tuple[Placement, ...], ranks: int) -> Call:
    return Call(call.target, call.args, call.kwargs, call.value, current, Axis("tensor", ranks, {}))


@pytest.mark.parametrize("case", [c for c in CASES if rule_of(c.op)], ids=lambda c: c.op.name())
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_way_by_itself(case: Case, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, call = program_of(case)
    rule, ways = rule_of(case.op), [*_ways(call, ranks)]
    for inputs in ways:
        taken: list[OpStrategy] = []

        def only(call: Call, inputs=inputs, taken=taken) -> Iterator[OpStrategy]:
            found = [w for w in rule(call) if w.inputs == inputs]
            taken.extend(found[:1])
            yield from found[:1]

        monkeypatch.setitem(RULES, case.op, only)
        check(case, program, inputs, ranks)
        assert taken, inputs
    if not ways:  # the op is expanded into others, which have ways
        for inputs in _combinations(case, ranks, 1):
            check(case, program, inputs, ranks)


# ------------------------------------------------------------------ attention over a split sequence


WAYS = ["ring", "gather", "ulysses"]


@pytest.mark.parametrize(("name", "attention"), [
    pytest.param(name, way, id=f"{way}-{name}", marks=[pytest.mark.long] * ((i + j) % len(WAYS) > 0))
    for i, way in enumerate(WAYS) for j, name in enumerate(SPLIT_ATTENTION)
])  # fmt: skip
def test_attention_over_a_split_sequence(name: str, attention: str) -> None:
    """Each kind of attention is exchanged in one of the ways in the suite, and in all by hand."""
    case = placement_cases.case(SDPA, *SPLIT_ATTENTION[name])
    program, _ = program_of(case)
    for ranks in (2, 3):
        values = [draw for draw in case.args if isinstance(draw, Draw)]
        inputs = [Split(len(d.shape) - 2) if d.shape[-2] > 1 else REPLICATED for d in values]
        kinds = Counter(exchanges(check(case, program, inputs, ranks, attention)))
        if attention == "ring":
            assert kinds == {"permute": ranks - 1, "all_gather": 1}  # and of the result
        elif attention == "gather":
            assert kinds == {"all_gather": 3}
        else:
            assert kinds["all_to_all"] >= 2


def test_blocks_of_attention_do_not_depend_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spelled out, in runs of queries, as where torch has no fused kernel."""
    monkeypatch.setattr(block_attention, "_choose_fused", lambda query, bias: "")
    monkeypatch.setattr(block_attention, "CHUNK_BYTES", 2000)
    for name in [*SPLIT_ATTENTION][1::3]:
        test_attention_over_a_split_sequence(name, "ring")
