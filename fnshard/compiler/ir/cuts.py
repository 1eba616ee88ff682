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

    graph, forward = networkx.DiGraph(), outermost == "source"
    graph.add_nodes_from([source, sink])
    for one, other, price in edges:
        ends = (one, other) if forward else (other, one)
        # Capacities are integers, so that the flow is exact. Prices have fractions of a byte.
        graph.add_edge(*ends, **({} if price is None else {"capacity": round(price * 1024)}))
    # Of equal cuts networkx returns the one with the fewest nodes on the side of its last argument.
    _, (near, far) = networkx.minimum_cut(graph, *((source, sink) if forward else (sink, source)))
    return near if forward else far
