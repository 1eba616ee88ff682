"""Cuts: the cheapest way to divide a graph in two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

Edge = tuple[Any, Any, float | None]  # from, to, and what it costs to cut it; None: it cannot be cut


def minimum_cut(
    edges: Iterable[Edge], source: str, sink: str, outermost: Literal["source", "sink"]
) -> set[Any]:
    """Return what is on the source's side of a minimum cut.

    Args:
        outermost: whose side has the more, of cuts that cost the same.
    """
    import networkx  # comes with torch; most steps need no cut

    graph, forward = networkx.DiGraph(), outermost == "source"
    graph.add_nodes_from([source, sink])
    for one, other, price in edges:
        ends = (one, other) if forward else (other, one)
        graph.add_edge(*ends, **({} if price is None else {"capacity": round(price * 1024)}))
    # networkx gives the cut that leaves the fewest nodes on the side of the last argument.
    _, (near, far) = networkx.minimum_cut(graph, *((source, sink) if forward else (sink, source)))
    return near if forward else far
