"""Route all readers of a hooked tensor through its hook, wherever the hook was registered."""

from __future__ import annotations

from torch import fx


def apply_hooks(graph: fx.Graph, count: int) -> None:
    """Route readers through the hooks of a graph without writes.

    Args:
        count: the number of hooks, which are `CustomGradient`s of one value and the graph's last results. In
            torch the hook that was registered first sees a gradient first, so it is next to the readers.
    """
    # Remove the hooks from the results, and move each to its tensor.
    output = graph.output_node()
    results = list(output.args[0])
    end = len(results) - count
    output.args = (results[:end],)
    copies: set[fx.Node] = set()
    hooks = [_move_to_tensor(graph, hook, copies) for hook in results[end:]]

    # One hook after the other: hooks that wait, and copies for them, still read the tensor itself.
    for number, hook in enumerate(hooks):
        kept = copies.union(hooks[number:])
        hook.args[0].replace_all_uses_with(hook, delete_user_cb=lambda user, kept=kept: user not in kept)


def _move_to_tensor(graph: fx.Graph, hook: fx.Node, copies: set[fx.Node]) -> fx.Node:
    """Move a hook to right after its tensor, and add the copies that this takes to `copies`.

    Values that the hook captures, and that are made after its tensor, are copied before the hook.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = sum(node.op == "placeholder" for node in graph.nodes)
    position = max(order[hook.args[0]] + 1, inputs)
    copy_of: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if order[node] < position:
            return node
        if node not in copy_of:
            copy_of[node] = graph.node_copy(node, copy)
        return copy_of[node]

    with graph.inserting_before(list(graph.nodes)[position]):
        moved = graph.node_copy(hook, copy)
    copies.update(copy_of.values())
    graph.erase_node(hook)
    return moved
