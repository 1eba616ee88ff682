"""Weight gradients: divide the graph of a backward, so that the gradients of leaves may be made later.

The first half makes the cotangents of the values that a segment reads, for which the segment before it waits,
or in a pipeline another stage. The second half makes the gradients of leaves, for which only the update waits
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). No product runs twice. What the second half reads of the
first, or of what the forward has saved, is the cheapest cut between the two in bytes: views and elementwise
ops may run again in the second half.

The second half reads no leaf, so that nothing is gathered for it. Ops that read a leaf are in the first half,
and so are gradients that take no product (those of norms and biases), since the first half has read all that
they are made of.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.cuts import Edge, minimum_cut

aten = torch.ops.aten
_PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.dot, aten.convolution,
    aten.convolution_backward, aten._grouped_mm, aten._scaled_mm, aten._scaled_grouped_mm,
}  # fmt: skip
_ON_HAND = 1 / 1024  # the price in bytes of a value that is in memory anyway: a batch, a constant, a key


@dataclass(frozen=True, eq=False)
class Halves:
    """The two halves of a backward.

    Args:
        first: the graph `(*inputs) -> (*gradients, *between)`; None where it has nothing to do.
        first_inputs: the numbers of the whole backward's inputs that it reads.
        first_grads: the numbers of the whole backward's results that it returns.
        between: what it hands on to the second half, as nodes of its graph.
        second: the graph `(*inputs, *between) -> gradients`; None where the first half returns all.
        second_inputs, second_grads: the numbers of its inputs and results.
    """

    first: fx.GraphModule | None
    first_inputs: tuple[int, ...]
    first_grads: tuple[int, ...]
    between: tuple[fx.Node, ...]
    second: fx.GraphModule | None
    second_inputs: tuple[int, ...]
    second_grads: tuple[int, ...]


def split_backward(
    backward: fx.GraphModule, of_leaves: Sequence[bool], leaves: Set[int], on_hand: Set[int]
) -> Halves:
    """Divide the graph of a backward.

    Args:
        of_leaves: for each result, whether it is the gradient of a leaf.
        leaves: the numbers of the inputs that are leaves.
        on_hand: the numbers of the inputs that are in memory in any case.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(backward.graph, {}))
    _divide_convolutions(graph)
    inputs, results = graph.find_nodes(op="placeholder"), graph.output_node().args[0]

    # Assign nodes and results to the halves, and find what the second reads of the first.
    first = _find_first_half(graph, of_leaves, {inputs[i] for i in leaves})
    early, late = [], []
    for number, (result, of_leaf) in enumerate(zip(results, of_leaves, strict=True)):
        is_late = of_leaf and result not in first and result.op != "placeholder"
        (late if is_late else early).append(number)
    second = _find_ancestors([results[n] for n in late]) - first - set(inputs)
    crossing = _find_cheapest_cut(graph, second, {inputs[i] for i in leaves}, {inputs[i] for i in on_hand})
    between = [n for n in crossing if n.op != "placeholder"]

    # Write both halves out as graphs.
    outputs = [results[n] for n in early] + between
    first_module, first_reads, copies = _extract(backward, graph, outputs, ())
    second_module, second_reads, _ = _extract(backward, graph, [results[n] for n in late], crossing)
    number_of = {node: number for number, node in enumerate(inputs)}
    return Halves(
        first_module if outputs else None,
        tuple(number_of[n] for n in first_reads),
        tuple(early),
        tuple(copies[n] for n in between),
        second_module if late else None,
        tuple(number_of[n] for n in second_reads if n in number_of),
        tuple(late),
    )


def _divide_convolutions(graph: fx.Graph) -> None:
    """Make two ops of each convolution's backward: the input's gradient, and those of weight and bias.

    The second needs nothing of the weight but its shape, and gets an empty tensor.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        grad, x, weight, *options, mask = node.args
        if not (mask[1] or mask[2]):
            continue
        value = weight.meta["val"]
        with graph.inserting_before(node):
            shape = tuple(value.shape), tuple(value.stride())
            kind = {"dtype": value.dtype, "device": value.device}
            empty = graph.call_function(aten.empty_strided.default, shape, kind)
            empty.meta["val"] = value

            masks = [[mask[0], False, False], [False, mask[1], mask[2]]]
            halves = [
                graph.call_function(node.target, (grad, x, w, *options, m))
                for w, m in zip((weight, empty), masks, strict=True)
            ]
        for half, half_mask in zip(halves, masks, strict=True):
            pairs = zip(node.meta["val"], half_mask, strict=True)
            half.meta = {**node.meta, "val": tuple(v if is_made else None for v, is_made in pairs)}

        # Result 0 is the input's gradient.
        for item in list(node.users):
            item.replace_input_with(node, halves[0 if item.args[1] == 0 else 1])
        graph.erase_node(node)
        if not mask[0]:  # unread, this op would still count as a reader of a leaf
            graph.erase_node(halves[0])


def _find_first_half(graph: fx.Graph, of_leaves: Sequence[bool], leaves: Set[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the first half.

    They are the nodes that cotangents depend on, those that read a leaf, and those of gradients that take no
    further product.
    """
    results = graph.output_node().args[0]
    first = _find_ancestors(r for r, of_leaf in zip(results, of_leaves, strict=True) if not of_leaf)

    # Readers of a leaf, or of a value of leaves alone, with all that they read.
    on_leaves = _find_made_of_leaves(graph, leaves)
    readers = [n for n in graph.nodes if n.op == "call_function" and n not in on_leaves]
    first |= _find_ancestors(n for n in readers if not on_leaves.isdisjoint(n.all_input_nodes))

    # Gradients of leaves that take no product beyond those of the first half.
    for result, of_leaf in zip(results, of_leaves, strict=True):
        if of_leaf and result not in first:
            added = _find_ancestors([result]) - first
            if result in on_leaves or not any(map(_is_product, added)):
                first |= added
    # An op of several results has these in its half, since only tensors cross.
    return first | {n for n in graph.nodes if n.target is operator.getitem and n.args[0] in first}


def _find_made_of_leaves(graph: fx.Graph, leaves: Set[fx.Node]) -> set[fx.Node]:
    """Return the leaves, and the nodes that depend on leaves alone."""
    made = set(leaves)
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return made


def _find_ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes with all nodes that they depend on."""
    ancestors, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in ancestors:
            ancestors.add(node)
            stack += node.all_input_nodes
    return ancestors


def _find_cheapest_cut(
    graph: fx.Graph, second: Set[fx.Node], leaves: Set[fx.Node], on_hand: Set[fx.Node]
) -> list[fx.Node]:
    """Return the values that the second half reads.

    They are the fewest bytes from which cheap ops can make it. Among cuts of equally many bytes it is the one
    that runs the fewest ops again; and the second half reads a value, not a view of it.
    """
    # A flow from the first half to the second. Each value is an edge from its node to (node, "made") that
    # costs its bytes: where this edge is cut, the second half reads the value. An op that may not run again
    # has an edge from the first half that cannot be cut.
    on_leaves = _find_made_of_leaves(graph, leaves)
    edges: list[Edge] = []
    seen, stack = set[fx.Node](), []

    def read(node: fx.Node, reader: object) -> None:
        edges.append(((node, "made"), reader, None))
        if node not in seen:
            seen.add(node)
            stack.append(node)

    # Begin with what the second half reads, and go back through the ops that may run again.
    for node in [n for n in graph.nodes if n in second]:
        for source in node.all_input_nodes:
            if source not in second:
                read(source, "second")
    while stack:
        node = stack.pop()
        edges.append((node, (node, "made"), _ON_HAND if node in on_hand else _price_value(node)))
        if _is_cheap(node) and on_leaves.isdisjoint(node.all_input_nodes):
            for source in node.all_input_nodes:
                read(source, node)
        else:
            edges.append(("first", node, None))
    if not edges:
        return []

    # The second half reads each value whose edge leaves the side of the first half.
    near = minimum_cut(edges, "first", "second", outermost="source")
    return [n for n in graph.nodes if n in near and n in seen and (n, "made") not in near]


def _price_value(node: fx.Node) -> float | None:
    """Return the bytes of a node's value, as a price; None for several values, which do not cross."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    is_view = getattr(node.target, "is_view", False)
    return value.numel() * value.element_size() + (2 * _ON_HAND if is_view else _ON_HAND)


def _is_product(node: fx.Node) -> bool:
    """Return whether an op takes the time of a product: it is one, or somebody's custom op."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None:
        return False
    return packet in _PRODUCTS or node.target.namespace not in ("aten", "prims", "fnshard")


@cache
def _list_known_ops() -> Any:
    """Return the lists of torch's partitioner: the views, and the ops that may run a second time."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def _is_cheap(node: fx.Node) -> bool:
    """Return whether an op may run a second time: it is a view, or elementwise, and sums nothing up."""
    known = _list_known_ops()
    if node.op != "call_function":
        return False
    if known.is_view(node):
        return True
    if not known.is_recomputable(node):
        return False

    # A result with fewer elements than an input is a reduction.
    value = node.meta.get("val")
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    sizes = [each.numel() for each in inputs if isinstance(each, Tensor)]
    return not isinstance(value, Tensor) or value.numel() >= max(sizes, default=0)


def _extract(
    root: fx.GraphModule, graph: fx.Graph, results: Sequence[fx.Node], given: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node], dict[fx.Node, fx.Node]]:
    """Return the graph that makes `results`, the nodes that it takes as inputs, and its copies of nodes.

    Args:
        given: nodes besides placeholders that are inputs; these come last.
    """
    extracted = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    stops = set(given)

    # Go back from the results to what is given.
    needed, stack = set[fx.Node](), list(results)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in stops:
                stack += node.all_input_nodes

    # Placeholders come first, then what is given; then all other nodes in their order.
    read = [n for n in graph.nodes if n.op == "placeholder" and n in needed]
    read += [n for n in graph.nodes if n.op != "placeholder" and n in needed and n in stops]
    for node in read:
        copies[node] = extracted.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    for node in graph.nodes:
        if node in needed and node not in copies:
            copies[node] = extracted.node_copy(node, copies.__getitem__)
    extracted.output(tuple(copies[n] for n in results))
    return fx.GraphModule(root, extracted), read, copies
