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

    # Find what the hook needs of the nodes from there on.
    needed, to_visit = {hook}, [hook]
    while to_visit:
        new = {n for n in to_visit.pop().all_input_nodes if order[n] >= position} - needed
        needed |= new
        to_visit += new

    # Copy these in the graph's order, the hook as the last one.
    copy_of: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(list(graph.nodes)[position]):
        for node in sorted(needed, key=order.__getitem__):
            copy_of[node] = graph.node_copy(node, lambda n: copy_of.get(n, n))
    moved = copy_of.pop(hook)
    copies.update(copy_of.values())
    graph.erase_node(hook)
    return moved
