"""Place: how a value of one placement becomes one of another."""

from __future__ import annotations

import itertools

import pytest
import torch
from placed import cut, run_on_ranks
from toys import lower

from fnshard.compiler.frontend.exchange import EXCHANGE
from fnshard.compiler.place.place import Axis, _Placer, _Value
from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Placement, Split, fits

SHAPE, RANKS = (4, 12, 10), (2, 4)
SPLITS = [
    Split(0),
    Split(1),
    Split(1, 3),
    Split(2),
    Split(2, 2),
    Split(0, 2),
]  # the last dim is uneven over 4
PAIRS = [
    (now, to, ranks)
    for now, to, ranks in itertools.product([REPLICATED, PARTIAL, *SPLITS], [REPLICATED, *SPLITS], RANKS)
    if now != to and all(not isinstance(p, Split) or fits(SHAPE, p, ranks) for p in (now, to))
]


def converted(now: Placement, to: Placement, ranks: int) -> torch.fx.Graph:
    """The graph that makes of this rank's part of a value, behind the rank's index, the other part."""
    whole = torch.empty(SHAPE, dtype=torch.float64)
    program = lower(lambda p, x: p["w"].sum() * x.sum(), {"w": whole}, whole, ranks=1).program
    placer = _Placer(program, Axis("tensor", ranks, {}))
    placer.index, here = placer.graph.placeholder("index"), placer.graph.placeholder("here")
    placer.graph.output([placer.convert(_Value(here, now, whole), to)])
    return placer.graph


@pytest.mark.parametrize(("now", "to", "ranks"), PAIRS, ids=str)
def test_a_value_is_converted_by_one_exchange(now: Placement, to: Placement, ranks: int) -> None:
    graph = converted(now, to, ranks)
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
    across = isinstance(now, Split) and isinstance(to, Split) and now.dim != to.dim
    expected = "psum" if to == REPLICATED else "reduce_scatter"
    if isinstance(now, Split):
        expected = "all_to_all" if across else "all_gather"
    assert sent == ([] if now == REPLICATED else [expected])
