"""Route all readers of a hooked tensor through its hook, wherever the hook was registered."""

from __future__ import annotations

from torch import fx


def apply_hooks(graph: fx.Graph, count: int) -> None:
    """Route readers through the hooks of a graph without writes.

    Args:
        count: the number of hooks, which are `CustomGradient`s of one value and the graph's last results. In
            torch the hook that was registered first sees a gradient first, so it stands next to the readers.
    """
    output = graph.output_node()
    results = list(output.args[0])
    end = len(results) - count
    output.args = (results[:end],)
    copies: set[fx.Node] = set()
    waiting = [_move_to_tensor(graph, hook, copies) for hook in results[end:]]
    # One hook after the other: hooks that wait, and copies for them, still read the tensor itself.
    while waiting:
        hook, raw = waiting[0], copies.union(waiting)
        hook.args[0].replace_all_uses_with(hook, delete_user_cb=lambda user, raw=raw: user not in raw)
        waiting.pop(0)


def _move_to_tensor(graph: fx.Graph, hook: fx.Node, copies: set[fx.Node]) -> fx.Node:
    """Move a hook to right after its tensor, behind copies of values that it captures and come later."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = sum(node.op == "placeholder" for node in graph.nodes)
    end = max(order[hook.args[0]] + 1, inputs)
    early: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if order[node] < end:
            return node
        if node not in early:
            early[node] = graph.node_copy(node, copy)
        return early[node]

    with graph.inserting_before(list(graph.nodes)[end]):
        placed = graph.node_copy(hook, copy)
    copies.update(early.values())
    graph.erase_node(hook)
    return placed
