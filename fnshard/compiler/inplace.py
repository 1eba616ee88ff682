"""In place: writes to activations become new values where nothing else looks at the memory.

So `x += block(x)` and `relu(inplace=True)` do not stop the program from being cut. What is left (a
write through a view) stays in one segment, and its views are copied once the last write is done.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from fnshard.compiler.program import OpOverload, mutated_args, storage_id

aten = torch.ops.aten


def settle(graph: fx.Graph, propagate: Callable[[], None]) -> None:
    """Rewrite `graph`, whose nodes carry fake values; `propagate` makes these anew after a change.

    >>> from fnshard.compiler.inplace import out_of_place
    >>> out_of_place(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    replaced = [_replace(graph, node) for node in list(graph.nodes) if mutated_args(node)]
    if any(replaced):
        propagate()
    if _copy_views(graph):
        propagate()


def out_of_place(target: OpOverload) -> OpOverload | None:
    """The op that returns what this one writes into its first argument, if there is one.

    `aten.copy` is none: it has no derivative.
    """
    if target is aten.copy_.default:
        return None
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name[-1] == "_" else None
    found = getattr(packet, target._overloadname, None)
    return found if found is not None and not found._schema.is_mutable else None


def _replace(graph: fx.Graph, node: fx.Node) -> bool:
    written = mutated_args(node)
    functional = out_of_place(node.target)
    if functional is None or len(written) != 1 or node.args[0] is not written[0]:
        return False
    (target,) = written
    place = {n: i for i, n in enumerate(graph.nodes)}
    here = place[node]
    late = [user for user in target.users if place[user] > here]
    memory = storage_id(target.meta["val"])
    others = [n for n in place if place[n] < here and n is not target and memory in _memories(n)]
    if any(place[user] > here for n in others for user in n.users) or _promotes(node, target):
        return False
    with graph.inserting_before(node):
        value = graph.call_function(functional, node.args, node.kwargs)
    value.meta = dict(node.meta)
    node.replace_all_uses_with(value)
    for user in late:
        user.replace_input_with(target, value)
    graph.erase_node(node)
    return True


def _promotes(node: fx.Node, target: fx.Node) -> bool:
    """Whether the new value might not have the shape and dtype that a write in place keeps."""
    kept = target.meta["val"]
    for source in node.all_input_nodes:
        for value in _tensors(source):
            wider = value.dtype != kept.dtype and value.dtype.is_floating_point
            if wider or torch.broadcast_shapes(value.shape, kept.shape) != kept.shape:
                return True
    return not kept.dtype.is_floating_point


def _copy_views(graph: fx.Graph) -> bool:
    """Give readers behind the last write to some memory a copy of the view they read."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    nodes = list(place)
    last = {storage_id(a.meta["val"]): place[n] for n in nodes for a in mutated_args(n)}
    first: dict[int, fx.Node] = {}
    changed = False
    for node in nodes:
        for memory in _memories(node):
            first.setdefault(memory, node)
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or storage_id(value) not in last or first[storage_id(value)] is node:
            continue
        behind = nodes[max(last[storage_id(value)], place[node])]
        late = [user for user in node.users if place[user] > place[behind]]
        if late:
            with graph.inserting_after(behind):
                copy = graph.call_function(
                    aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            copy.meta = {k: node.meta[k] for k in ("autocast", "nn_module_stack") if k in node.meta}
            for user in late:
                user.replace_input_with(node, copy)
            changed = True
    return changed


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Tensor)]


def _memories(node: fx.Node) -> set[int]:
    return {storage_id(value) for value in _tensors(node)}
