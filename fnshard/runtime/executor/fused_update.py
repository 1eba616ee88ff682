"""Run updates that consist of one operator with a fused kernel (AdamW, SGD) in place on many leaves.

A traced update that scales its gradient, calls such an operator, and perhaps keeps an average of the new
parameters is recognised by its graph. It then runs as torch's own fused optimizers do.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.update.family import Family
from fnshard.compiler.update.trace import GRAD, PARAM, UPDATE
from fnshard.optim.fused import IN_PLACE, prepare_gradients

aten = torch.ops.aten
NEW = "new"  # the parameter after the update
_CASTS = {aten._to_copy.default, aten.alias.default, aten.detach.default}


@dataclass(frozen=True, eq=False)
class FusedUpdate:
    """An update that an operator makes in place.

    Args:
        operator: a key of `IN_PLACE`.
        arguments: its arguments in order: names of the update's inputs, or constants.
        factors: names of numbers that the gradient is multiplied by first.
        tail: a graph from `reads` to slots `writes` that runs after the operator, and may read the new
            parameter; None if there is nothing else to compute.
    """

    operator: Any
    arguments: tuple[Any, ...]
    factors: tuple[str, ...]
    tail: fx.GraphModule | None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


_known_updates: weakref.WeakKeyDictionary[Family, FusedUpdate | None] = weakref.WeakKeyDictionary()


def find_fused(family: Family) -> FusedUpdate | None:
    """Return how the operator in a family's update runs in place; None if that would be another update."""
    if family not in _known_updates:
        _known_updates[family] = _match_fused(family)
    return _known_updates[family]


def _match_fused(family: Family) -> FusedUpdate | None:
    """Recognise an update by its graph: scale the gradient, call the operator, compute other slots."""
    (step, *later_steps) = family.derived.steps
    nodes = [n for n in step.graph.nodes if n.target in IN_PLACE]
    if later_steps or len(nodes) != 1:
        return None
    node, graph = nodes[0], step.graph
    names = dict(zip(graph.find_nodes(op="placeholder"), step.reads, strict=True))
    results = dict(zip(step.writes, graph.output_node().args[0], strict=True))

    # Its arguments are inputs; the gradient may be scaled by numbers.
    arguments, factors = [], []
    for place, argument in enumerate(node.args):
        if not isinstance(argument, fx.Node):
            arguments.append(argument)
            continue
        source = _skip_casts(argument)
        while place == 1 and source.target is aten.mul.Tensor:
            factor = source.args[1]
            if not isinstance(factor, fx.Node) or not names.get(factor, "").startswith("number."):
                break
            factors.append(names[factor])
            source = _skip_casts(source.args[0])
        if source not in names:
            return None
        arguments.append(names[source])
    if arguments[:2] != [PARAM, GRAD]:
        return None

    # Its results are the new values of the arguments that the kernel overwrites, in their order.
    values = {n.args[1]: n for n in node.users if n.target is operator.getitem}
    if not values:  # the operator has a single result
        values = {0: node}
    written = [UPDATE, *(a for a in arguments[2:] if isinstance(a, str) and a.startswith("slots."))]
    outputs = {name: _skip_casts(results[name]) for name in written if name in results}
    if any(outputs.get(name) is not values.get(i) for i, name in enumerate(written)):
        return None

    # Other results may read the new parameter, but nothing else that is overwritten, gradients included.
    others = {name: value for name, value in results.items() if name not in written}
    extracted = _extract_tail(graph, node, values[0], names, others, {PARAM, GRAD, *written})
    if extracted is None:
        return None
    return FusedUpdate(node.target, tuple(arguments), tuple(factors), *extracted)


def _skip_casts(node: fx.Node) -> fx.Node:
    """Return the node that a node casts, or itself; a cast of a rounded value is not looked through."""
    while node.target in _CASTS:
        inner = node.args[0]
        rounded = inner.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize
        if rounded and inner.op != "placeholder":
            break
        node = inner
    return node


def _extract_tail(
    update: fx.Graph, fused: fx.Node, change: fx.Node, names: Mapping[fx.Node, str],
    results: Mapping[str, fx.Node], overwritten: set[str],
) -> tuple[fx.GraphModule | None, tuple[str, ...], tuple[str, ...]] | None:  # fmt: skip
    """Return the graph of further results, from the new parameter ("new") and others, its reads and writes.

    Return None if they read something that is overwritten by then.
    """
    if not results:
        return None, (), ()

    # Walk from the results back to inputs, and to sums of parameter and update, which are the new parameter.
    sources: dict[fx.Node, str] = {}
    needed, waiting = set(), list(results.values())
    while waiting:
        node = waiting.pop()
        terms = [_skip_casts(n) for n in node.args if isinstance(n, fx.Node)]
        others = [names.get(n) for n in terms if n is not change]
        if node.target is aten.add.Tensor and not node.kwargs and len(terms) == 2 and others == [PARAM]:
            sources[node] = NEW
        elif node in names:
            sources[node] = names[node]
        elif node is fused or node is change:
            return None
        elif node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    if overwritten & set(sources.values()):
        return None

    # Copy the nodes on the way into a graph of their own.
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name.replace(".", "_")) for name in dict.fromkeys(sources.values())}
    env = {node: inputs[name] for node, name in sources.items()}
    for node in update.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results.values()))
    return fx.GraphModule({}, graph), tuple(inputs), tuple(results)


@dataclass(frozen=True, eq=False)
class Leaves:
    """Tensors without padding of leaves of one family and device.

    Args:
        params, grads: the parameter, or its master copy, and the gradient of each leaf.
        slots: the slots of each leaf, by name.
        copies: the stored copies of leaves that have a master copy, by their number.
    """

    params: list[Tensor]
    grads: list[Tensor]
    slots: Mapping[str, list[Tensor]]
    copies: Mapping[int, Tensor]


def run_fused(
    fused: FusedUpdate, leaves: Leaves, numbers: Callable[[str], Tensor], scale: Tensor | None
) -> None:
    """Update leaves in place, and overwrite gradients.

    Args:
        numbers: returns an input of the update that is no tensor of a leaf, by its name.
        scale: the factor of gradients besides the update's own.
    """
    # Run the operator itself, once for all leaves.
    for name in fused.factors:
        scale = numbers(name) if scale is None else scale * numbers(name)
    grads = prepare_gradients(leaves.grads, leaves.params, scale)
    lists = {PARAM: leaves.params, GRAD: grads, **{f"slots.{n}": own for n, own in leaves.slots.items()}}
    arguments = []
    for argument in fused.arguments:
        if not isinstance(argument, str):  # a constant
            arguments.append(argument)
        else:
            arguments.append(lists[argument] if argument in lists else float(numbers(argument)))
    IN_PLACE[fused.operator](*arguments)

    # Compute other slots from the new parameters, such as their average, leaf by leaf.
    if fused.tail is not None:
        for i, param in enumerate(leaves.params):
            given = {NEW: param, **{name: tensors[i] for name, tensors in lists.items()}}
            results = fused.tail(*[given[n] if n in given else numbers(n) for n in fused.reads])
            for name, value in zip(fused.writes, results, strict=True):
                given[name].copy_(value)
    # Round the master copies into the stored leaves.
    if leaves.copies:
        torch._foreach_copy_(list(leaves.copies.values()), [leaves.params[i] for i in leaves.copies])
