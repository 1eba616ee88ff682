"""Place: how a value of one placement becomes one of another."""

from __future__ import annotations

import itertools

import pytest
import torch
from placed import cut, exchange_on_ranks, run_on_ranks
from torch import Tensor
from toys import lower

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.ir.program import Input
from fnshard.compiler.place.place import Axis, place
from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Placement, Split, fits
from fnshard.compiler.place.rules import rule_of
from fnshard.compiler.place.strategies import Call
from fnshard.compiler.place.writer import Writer

SHAPE, RANKS = (4, 12, 10), (2, 4)
SPLITS = [Split(0), Split(1), Split(1, outer=3), Split(0, outer=2)]
SPLITS += [Split(2), Split(2, outer=2)]  # 10 is uneven over 4
PAIRS = [
    (now, to, ranks)
    for now, to, ranks in itertools.product([REPLICATED, PARTIAL, *SPLITS], [REPLICATED, *SPLITS], RANKS)
    if not (now == to or (isinstance(now, Split) and isinstance(to, Split) and now.dim == to.dim))
    and all(not isinstance(p, Split) or fits(SHAPE, p, ranks) for p in (now, to))
]


def write_conversion(now: Placement, to: Placement, ranks: int) -> torch.fx.Graph:
    """Write a graph from (this rank's index, its part as placed `now`) to its part as placed `to`."""
    graph = torch.fx.Graph()
    index, here = graph.placeholder("index"), graph.placeholder("here")
    by = Writer("tensor", ranks, torch.device("cpu"), graph, index)
    graph.output([by.convert(here, SHAPE, now, to)])
    return graph


@pytest.mark.parametrize(("now", "to", "ranks"), PAIRS, ids=str)
def test_a_value_is_converted_by_one_exchange(now: Placement, to: Placement, ranks: int) -> None:
    graph = write_conversion(now, to, ranks)
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = cut(whole, now, ranks, padding=torch.nan)
    if now == PARTIAL:
        parts = [whole * (r + 1) / sum(range(1, ranks + 1)) for r in range(ranks)]
    got = run_on_ranks(graph, [[torch.tensor(r) for r in range(ranks)], parts], ranks)
    for (one,), expected in zip(got, cut(whole, to, ranks, padding=torch.nan), strict=True):
        assert one.isfinite().all()
        expected = torch.where(expected.isnan(), one, expected)  # padding is any number
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    sent = [n.args[1] for n in graph.find_nodes(op="call_function", target=EXCHANGE)]
    expected = "psum" if to == REPLICATED else "reduce_scatter"
    if isinstance(now, Split):
        expected = "all_gather" if to == REPLICATED else "all_to_all"
    assert sent == ([] if now == REPLICATED else [expected])


@pytest.mark.parametrize("split", [Split(1), Split(1, outer=2)], ids=str)
def test_what_an_exchange_of_another_axis_sends_is_made_for_it(split: Split) -> None:
    """What it sends is a copy that it alone reads, not a view, and not what others read too."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        y = p["w"] * x
        gathered, swapped = EXCHANGE(y, "all_gather", "shard", 1, 2), EXCHANGE(y, "all_to_all", "shard", 1, 2)
        return gathered.mean() * swapped.mean()

    whole = torch.empty(4, 8)
    program = lower(fn, {"w": whole}, whole, ranks=2).program
    placed = place(program, Axis("tensor", 2, {Input("leaf", "w"): split, Input("batch", "0"): split}))
    for node in placed.graph.find_nodes(op="call_function", target=EXCHANGE):
        (sent,) = node.all_input_nodes
        assert sent.target in (OUTGOING, EXCHANGE) and list(sent.users) == [node]


SENDS = [("psum", 0, 0), ("all_gather", 1, 0), ("reduce_scatter", 1, 0),
         ("all_to_all", 1, 0), ("all_to_all", 0, 1), ("all_to_all", 1, 1)]  # fmt: skip


@pytest.mark.parametrize(("kind", "dim", "to"), SENDS)
def test_an_exchange_of_another_axis_takes_parts_as_they_lie(kind: str, dim: int, to: int) -> None:
    draw = torch.Generator().manual_seed(0)
    sent = [torch.randn(8, 16, generator=draw) for _ in range(2)]
    received = exchange_on_ranks(sent, kind, "shard", dim, 2, to)
    args, axis = (sent[0], kind, "shard", dim, 2, to), Axis("tensor", 2, {})
    call = Call(EXCHANGE, args, {}, received[0], (Split(1, outer=2),), axis)
    ways = [w for w in rule_of(EXCHANGE)(call) if w.output != PARTIAL]
    assert len(ways) >= 3
    for way in ways:
        parts = zip(*(cut(v, way.inputs[0], 2) for v in sent), strict=True)
        expected = zip(*(cut(v, way.output, 2) for v in received), strict=True)
        for of_all, of_each in zip(parts, expected, strict=True):
            got = exchange_on_ranks(list(of_all), kind, "shard", dim, 2, to)
            torch.testing.assert_close(got, list(of_each), rtol=0, atol=0)
