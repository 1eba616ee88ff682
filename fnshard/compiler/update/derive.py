"""Derive the steps that each rank runs on its block from the traced update of one whole leaf.

`place` types every value over the axes that split the leaf: elementwise ops stay local, and sums and maxima
over split dims become reductions. Ops that need whole matrices run on one rank for each leaf, between two
exchanges of stacks (`whole`), wherever that is cheaper than the plan of `place` alone. `derive` chooses,
`sort_by_depth` and `assign_nodes` decide what is computed between which exchanges, and `write_steps` writes
that down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fnshard.compiler.ir.cuts import Edge, minimum_cut
from fnshard.compiler.ir.program import OpOverload
from fnshard.compiler.place.strategies import Elsewhere
from fnshard.compiler.update.reductions import How, PlacedUpdate, place_update, reduced
from fnshard.compiler.update.splits import Splits, bytes_of, find_axes
from fnshard.compiler.update.trace import PARAM, UPDATE, ShapeAndDtype, TracedUpdate
from fnshard.compiler.update.whole import Region, find_region, find_whole
from fnshard.layout.partition import P, block_shape
from fnshard.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Compute:
    """A graph that a rank computes on its (padded) blocks, between two exchanges.

    Args:
        graph: takes `reads` in order, and returns a tuple of `writes`.
        reads: the update's inputs, values "v0", "v1", ..., and "index.AXES", this rank's number along these
            axes, int64 0-d.
        writes: values, and results "update", "slots.NAME".
        whole: whether it runs once for each leaf, on the rank that has the leaf whole. It then reads tensors
            that the stack received, and values that all ranks have.
    """

    graph: fx.Graph
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    whole: bool = False

    @cached_property
    def run(self) -> fx.GraphModule:
        """The graph as a function, generated when it is first run: planning needs no code."""
        return fx.GraphModule({}, self.graph)


@dataclass(frozen=True)
class Reduce:
    """A sum of all ranks' values along axes, or their maximum."""

    how: How
    axes: tuple[str, ...]
    sends: tuple[str, ...]
    receives: tuple[str, ...]


@dataclass(frozen=True)
class Stack:
    """An exchange that brings a leaf's blocks to the one rank along `axes` that computes it whole, or back.

    Args:
        sends: values and inputs of the update, or on the way back whole values.
        receives: values, and on the way back results too.
        layouts, shapes, dtypes: the layout of each tensor's blocks (all ranks have one that is `P()`), its
            whole shape and its dtype.
        back: whether whole tensors go back to become blocks.
    """

    sends: tuple[str, ...]
    receives: tuple[str, ...]
    layouts: tuple[P, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    axes: tuple[str, ...]
    back: bool = False


@dataclass(frozen=True, eq=False)
class DerivedUpdate:
    """The update of a leaf that is split.

    Args:
        steps: computations and exchanges in turn. A result is written after the last read of the input of its
            name. Exchanges between the same computations follow one another.
        values: the shape and dtype that each value has on a rank. A value that a stack brings to the one
            rank, or that this rank computes of the whole leaf, has its whole shape.
        sent_bytes: the bytes that a rank sends for one leaf, on average over many leaves.
        flops: the FLOPs of products and decompositions that a rank computes for one leaf, on average too.
    """

    steps: tuple[Compute | Reduce | Stack, ...]
    values: Mapping[str, ShapeAndDtype]
    sent_bytes: float
    flops: float

    @property
    def price(self) -> float:
        """The price of an update: its bytes, and its FLOPs as bytes."""
        return self.sent_bytes + self.flops / FLOPS_OF_A_BYTE


# FLOPs that a rank computes while a link sends a byte: 50 TFLOP/s and 50 GB/s, or 1 TFLOP/s and 1 GB/s.
FLOPS_OF_A_BYTE = 1000.0


def derive(traced: TracedUpdate, shape: Sequence[int], layouts: Mapping[str, P], mesh: Mesh) -> DerivedUpdate:
    """Return the cheapest steps that each rank can run for a leaf.

    Args:
        shape: the shape of the whole leaf.
        layouts: the layouts of "grad", "param", "update" and each "slots.NAME".
    """
    shapes = {name: tuple(node.meta["val"].shape) for name, node in traced.placeholders.items()}
    shapes[UPDATE] = tuple(shape)
    splits = find_axes(shapes, {name: each for name, each in layouts.items() if name in shapes}, mesh)
    # The update by placement alone. It is the plan where nothing of it needs whole values.
    local = place_update(traced, traced.graph, splits)
    marked = find_whole(traced, local, splits, first=True)
    if not marked:
        return write_steps(local, splits)

    # Each round moves the nodes that still gather to the rank that has the leaf whole, until none does.
    plans = []
    while True:
        region = find_region(traced, local, marked, splits)
        placed = place_update(traced, region.outside, splits)
        plans.append(write_steps(placed, splits, region))
        more = find_whole(traced, placed, splits) - marked
        if not more:
            break
        marked |= more

    # Take the cheapest round: with more nodes on whole values, an update may be cheaper or dearer.
    best = min(plans, key=lambda plan: plan.price)
    # The plan of `place` alone is written out only if it may be cheaper.
    if splits.apart or 2 * best.price < local.estimated_bytes:
        return best
    return min(best, write_steps(local, splits), key=lambda plan: plan.price)


# ------------------------------------------------------------------ steps
@dataclass(frozen=True, eq=False)
class Order:
    """The order in which the nodes of a placed update are computed.

    Args:
        inputs: names of the placeholders.
        elsewhere: the node that is computed on whole values.
        returned: its results, and their numbers.
        depth: how many exchanges come before each node. A computation elsewhere counts as two, one there and
            one back.
        results: the results that are written at each depth.
        direct: results that come back from elsewhere as they are.
    """

    graph: fx.Graph
    inputs: Mapping[fx.Node, str]
    elsewhere: fx.Node | None
    returned: Mapping[fx.Node, int]
    depth: Mapping[fx.Node, int]
    results: Mapping[int, Sequence[tuple[str, fx.Node]]]
    direct: Mapping[fx.Node, str]

    @property
    def stack_depth(self) -> int | None:
        """The depth after which blocks are sent to the rank that has the leaf whole, or None."""
        return None if self.elsewhere is None else self.depth[self.elsewhere] - 2

    @property
    def last(self) -> int:
        """The depth after which nothing is exchanged."""
        return max([0, *self.results, *self.depth.values()])

    def is_local(self, node: fx.Node) -> bool:
        """Return whether ranks compute a node on their blocks."""
        exchanged = node.target is reduced or node is self.elsewhere or node in self.returned
        return node.op == "call_function" and not exchanged

    def find_sent(self, depth: int) -> list[fx.Node]:
        """Return the values of a depth that are sent."""
        sent = [n.args[0] for n in self.graph.nodes if n.target is reduced]
        if self.elsewhere is not None:
            sent += self.elsewhere.args
        return [n for n in dict.fromkeys(sent) if self.depth[n] == depth]


def sort_by_depth(placed: PlacedUpdate) -> Order:
    """Find when each node can be computed, and when results can be written."""
    # The depth of a node: that of what it reads, and its own exchanges.
    graph = placed.graph
    inputs = dict(zip(graph.find_nodes(op="placeholder"), placed.inputs, strict=True))
    elsewhere = next((n for n in graph.nodes if isinstance(n.target, Elsewhere)), None)
    returned = {} if elsewhere is None else {n: n.args[1] for n in elsewhere.users}
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depth[node] = max((depth[n] for n in node.all_input_nodes), default=0)
        if node.target is reduced:
            depth[node] += 1
        elif node is elsewhere:
            depth[node] += 2

    # While blocks are away, at the depth in between, ranks compute what reductions need. If no reduction
    # needs the nodes that could run then, they run when the blocks are back.
    if elsewhere is not None:
        back = depth[elsewhere]
        if not any(n.target is reduced and depth[n] == back for n in graph.nodes):
            for node in graph.nodes:
                if depth[node] == back - 1 and node.target is not reduced and node.op != "output":
                    depth[node] = back

    # A result is written when the input of its name has been read for the last time.
    last = {}
    for node, name in inputs.items():
        read = [depth[u] for u in node.users if u.op == "call_function"]
        last[name] = max(read, default=0)
    last[UPDATE] = last[PARAM]  # the update is written into the parameter

    # A result that comes back from elsewhere, and that nothing else reads, is written as it arrives.
    results: dict[int, list[tuple[str, fx.Node]]] = {}
    direct: dict[fx.Node, str] = {}
    outputs = graph.output_node().args[0]
    for name, node in zip(placed.outputs, outputs, strict=True):
        is_read_once = len(node.users) == 1 and outputs.count(node) == 1
        if node in returned and is_read_once and last[name] <= depth[node]:
            direct[node] = name
        else:
            results.setdefault(max(depth[node], last[name]), []).append((name, node))
    return Order(graph, inputs, elsewhere, returned, depth, results, direct)


def assign_nodes(order: Order) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Return for each depth the nodes that are computed there, and those of them that are kept for later.

    A value that a later depth reads is kept, or computed anew from the update's inputs: a minimum cut finds
    the choice with the fewest bytes of memory traffic.
    """
    # An input can be read until the result of its name is written.
    replaced = {name: when for when, pairs in order.results.items() for name, _ in pairs}
    if UPDATE in replaced:
        replaced[PARAM] = replaced[UPDATE]

    kept: set[fx.Node] = set()
    parts: list[list[fx.Node]] = []
    for now in range(order.last, -1, -1):  # backwards: later depths say what earlier ones have to keep
        # What this depth must have computed: results, what is sent, and what later depths asked for.
        due = {n for _, n in order.results.get(now, ())} | set(order.find_sent(now))
        due |= {n for n in kept if order.depth[n] == now}
        needed = set(due)
        for node in reversed(order.graph.nodes):
            if node in needed and order.is_local(node):
                needed.update(node.all_input_nodes)
        own = {n for n in needed if order.is_local(n) and order.depth[n] == now}
        read = {n for node in own for n in node.all_input_nodes}

        # The cut: a kept value is written once and read, an input is read once more or was read anyway. An
        # input that has been replaced by its result cannot be read. Products are not computed a second time.
        earlier = needed - own
        edges: list[Edge] = []
        for node in earlier:
            size = bytes_of(node.meta["val"])
            price: float | None = (1 if node in kept else 2) * size
            if not order.is_local(node):
                price = 0 if node in read else size
                if replaced.get(order.inputs.get(node), now) < now:
                    price = None
            if not order.is_local(node) or count_flops(node):
                edges.append(("inputs", (node, "in"), None))
            edges.append(((node, "in"), (node, "out"), price))
            edges += [
                ((node, "out"), (u, "in"), None) for u in node.users if u in earlier and order.is_local(u)
            ]
            if node in due or any(u in own for u in node.users):
                edges.append(((node, "out"), "here", None))

        # A node through which the cut goes is kept; those behind it are computed again.
        local = {n for n in earlier if order.is_local(n)}
        before = minimum_cut(edges, "inputs", "here", outermost="sink") if local else set()
        kept |= {n for n in local if (n, "in") in before and (n, "out") not in before}
        again = {n for n in local if (n, "in") not in before}
        parts.append([n for n in order.graph.nodes if n in own or n in again])
    parts.reverse()
    return [
        (nodes, [n for n in nodes if n in kept and order.depth[n] == now]) for now, nodes in enumerate(parts)
    ]


def write_steps(placed: PlacedUpdate, splits: Splits, region: Region | None = None) -> DerivedUpdate:
    """Write the steps of a placed update, which is cut at its exchanges."""
    order = sort_by_depth(placed)
    mesh, sent_at, elsewhere = splits.mesh, order.stack_depth, order.elsewhere
    names, values = {**order.inputs, **order.direct}, {}

    def add_value(shape: Sequence[int], dtype: torch.dtype) -> str:
        """Note a new value, and return its name."""
        values[f"v{len(values)}"] = tuple(shape), dtype
        return f"v{len(values) - 1}"

    def name_of(node: fx.Node) -> str:
        """Return the name of a value that is read in another step than it is computed in."""
        if node not in names:
            value, shape = node.meta["val"], node.meta["val"].shape
            if (number := order.returned.get(node)) is not None:
                shape = block_shape(region.values[number].shape, region.layouts[number], mesh)
            names[node] = add_value(shape, value.dtype)
        return names[node]

    steps: list[Compute | Reduce | Stack] = []
    whole_reads: list[str] = []
    flops = sent = 0.0
    share = (splits.ranks - 1) / splits.ranks
    for now, (nodes, kept) in enumerate(assign_nodes(order)):
        # Whole leaves first, if they have come. Each rank computes its share of them.
        if sent_at is not None and now == sent_at + 1:
            writes = [add_value(value.shape, value.dtype) for value in region.values]
            steps.append(Compute(region.graph, tuple(whole_reads), tuple(writes), whole=True))
            flops += sum(map(count_flops, region.graph.nodes)) / splits.ranks

        # Then this rank's blocks: what later steps read, what is sent, and results.
        leaving = [n for n in dict.fromkeys([*kept, *order.find_sent(now)]) if order.is_local(n)]
        written = [*((name_of(n), n) for n in leaving), *order.results.get(now, ())]
        if written:
            steps.append(write_compute(nodes, written, name_of))
            flops += sum(map(count_flops, nodes))

        # Then reductions: those of one kind over the same axes travel together.
        exchanges: dict[tuple[How, tuple[str, ...]], list[fx.Node]] = {}
        for node in order.graph.nodes:
            if node.target is reduced and order.depth[node] == now + 1:
                exchanges.setdefault((node.args[1], node.args[2]), []).append(node)
        for (how, axes), reductions in exchanges.items():
            sends = tuple(name_of(n.args[0]) for n in reductions)
            steps.append(Reduce(how, axes, sends, tuple(map(name_of, reductions))))
            ranks = mesh.axes_size(axes)
            sent += sum(2 * (ranks - 1) / ranks * bytes_of(n.meta["val"]) for n in reductions)

        # And blocks that go to the rank that computes the leaf whole, or come back from it. What all ranks
        # have is not sent.
        if sent_at is not None and now == sent_at:
            stacked = []
            reads = zip(elsewhere.args, region.reads, region.find_layouts(placed, splits), strict=True)
            for node, read, layout in reads:
                whole = read.meta["val"]
                whole_reads.append(add_value(whole.shape, whole.dtype) if layout.axes else name_of(node))
                if layout.axes:
                    stacked.append((name_of(node), whole_reads[-1], layout, tuple(whole.shape), whole.dtype))
                    sent += share * bytes_of(whole) / mesh.axes_size(mesh.ordered(layout.axes))
            columns = list(zip(*stacked, strict=True)) or [()] * 5
            steps.append(Stack(*columns, splits.axes))
        elif sent_at is not None and now == sent_at + 1:
            stacked = []
            for node, number in sorted(order.returned.items(), key=lambda pair: pair[1]):
                layout, whole = region.layouts[number], region.values[number]
                stacked.append((writes[number], name_of(node), layout, tuple(whole.shape), whole.dtype))
                sent += share * bytes_of(whole) / (splits.ranks if layout.axes else 1)
            steps.append(Stack(*zip(*stacked, strict=True), splits.axes, back=True))
    return DerivedUpdate(tuple(steps), values, sent, flops)


def write_compute(
    nodes: Sequence[fx.Node], writes: Sequence[tuple[str, fx.Node]], name_of: Callable[[fx.Node], str]
) -> Compute:
    """Write a step with the nodes that `writes` depend on; all other values become its reads."""
    needed = {n for _, n in writes}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    nodes = [n for n in nodes if n in needed]

    # Copy them into a graph of their own, whose inputs are all values from elsewhere.
    here, graph, env = set(nodes), fx.Graph(), {}
    outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in here)
    outside |= dict.fromkeys(n for _, n in writes if n not in here)
    reads = tuple(map(name_of, outside))
    for node, name in zip(outside, reads, strict=True):
        env[node] = graph.placeholder(name.replace(".", "_").replace(",", "_"))
        env[node].meta["val"] = node.meta["val"]
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for _, n in writes))
    return Compute(graph, reads, tuple(n for n, _ in writes))


def count_flops(node: fx.Node) -> float:
    """Return the FLOPs of a product, or of a decomposition of matrices."""
    target = node.target
    if not isinstance(target, OpOverload):
        return 0.0
    # torch's registry has no decompositions: an estimate, 10 m n min(m, n) for each matrix.
    if "linalg" in str(target) and node.all_input_nodes:
        value = node.all_input_nodes[0].meta["val"]
        return 10.0 * value.numel() * min(value.shape[-2:], default=0) if value.dim() > 1 else 0.0
    if target.overloadpacket not in flop_registry:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(flop_registry[target.overloadpacket](*args, **kwargs, out_val=node.meta["val"]))
