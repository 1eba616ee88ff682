"""Find the cheapest way to divide a graph in two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

Edge = tuple[Any, Any, float | None]  # from, to, and the price of cutting it; None if it cannot be cut


def minimum_cut(
    edges: Iterable[Edge], source: str, sink: str, outermost: Literal["source", "sink"]
) -> set[Any]:
    """Return the nodes on the source's side of a minimum cut.

    Args:
        outermost: the end whose side is the larger, among cuts of the same price.
    """
    import networkx  # comes with torch; most steps need no cut

    # Of equal cuts networkx returns the one with the fewest nodes on the side of its last argument. So all
    # edges are turned round if the sink's side is to be the larger.
    graph, is_forward = networkx.DiGraph(), outermost == "source"
    graph.add_nodes_from([source, sink])
    for tail, head, price in edges:
        ends = (tail, head) if is_forward else (head, tail)
        if price is None:  # an edge without capacity has an infinite one
            graph.add_edge(*ends)
        else:  # capacities are integers, so that the flow is exact; prices have fractions of a byte
            graph.add_edge(*ends, capacity=round(price * 1024))

    first, last = (source, sink) if is_forward else (sink, source)
    _, (near, far) = networkx.minimum_cut(graph, first, last)
    return near if is_forward else far
