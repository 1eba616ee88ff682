"""Find the part of an update that needs whole matrices, and runs on one rank for each leaf.

Products over a split dim, decompositions, sorts and branches are computed where a leaf is whole. How much
else is computed there is chosen by bytes: two minimum cuts find the values that are sent to that rank and
those that come back. Of cuts with equal bytes the outermost are taken: a norm right before the products, or
after them, then needs no sum of its own. That costs no time, since each rank has its share of leaves: work on
a whole leaf is no more than the same work on blocks of all leaves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.exchange import EXCHANGE
from fnshard.compiler.ir.cuts import Edge, minimum_cut
from fnshard.compiler.ir.program import ANY_STRIDES, tensors_in
from fnshard.compiler.place.elementwise import elementwise
from fnshard.compiler.place.placement import Placement, Split
from fnshard.compiler.place.rules import rule_of
from fnshard.compiler.place.strategies import Elsewhere
from fnshard.compiler.update.reductions import PlacedUpdate, is_maximum
from fnshard.compiler.update.splits import Splits, bytes_of, name_of, split_over
from fnshard.compiler.update.trace import TracedUpdate
from fnshard.errors import ScheduleError
from fnshard.layout.partition import Fused, P, like_leaf

aten = torch.ops.aten

# Products, each with the number of the argument that is contracted along its last dim.
PRODUCTS = {
    aten.mm.default: 0, aten.bmm.default: 0, aten.matmul.default: 0, aten.mv.default: 0, aten.dot.default: 0,
    aten.vdot.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1, aten.addmv.default: 1,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Region:
    """A region that runs on whole values, and the update without it.

    Args:
        graph: the region: it takes whole values of `reads`, and returns a tuple.
        reads: nodes of `outside`.
        layouts, values: the layouts of results when they are back, and fake values of them.
        outside: the update, with a node whose target is `Elsewhere` in place of the region.
        apart: names of those reads that are inputs whose blocks are no splits.
    """

    graph: fx.Graph
    reads: tuple[fx.Node, ...]
    layouts: tuple[P, ...]
    values: tuple[Tensor, ...]
    outside: fx.Graph
    apart: Mapping[fx.Node, str]

    def find_layouts(self, placed: PlacedUpdate, splits: Splits) -> list[P]:
        """Return the layout of each of `reads`, once `outside` is placed.

        Raises:
            ScheduleError: one has a placement that no layout expresses.
        """
        out = []
        for node in self.reads:
            if node in self.apart:
                out.append(splits.layouts[self.apart[node]])
            else:
                out.append(layout_of(node.meta["val"].shape, placed.where[node], splits))
            if out[-1] is None:
                shown = ", ".join(f"{p} over {axes}" for axes, p in placed.where[node].items())
                raise ScheduleError(f"{node}: a value that is sent whole is {shown}, which is no layout.")
        return out


# ------------------------------------------------------------------ which nodes
def find_whole(traced: TracedUpdate, placed: PlacedUpdate, splits: Splits, first: bool = False) -> set[str]:
    """Find the nodes that need whole values, by their names in the trace.

    They are those for which `place` gathers, those that sum products over a split dim, and those that read or
    make tensors whose blocks are no splits.

    Args:
        first: leave elementwise nodes out, if there are others. They need no whole values by themselves, and
            gather only because of the others.
    """
    # Nodes for which `place` gathers.
    traced_nodes = {node.name: node for node in traced.graph.nodes}
    nodes = placed.walked
    gathers = [n for n in nodes if n.target is EXCHANGE and n.args[1] == "all_gather" and not is_maximum(n)]
    names = {node.meta["origin"] for node in gathers}
    if first:
        names = {name for name in names if rule_of(traced_nodes[name].target) is not elementwise} or names

    # Products that sum over a part of their dim, of which `place` would add up the results over ranks.
    for node in nodes:
        source = traced_nodes.get(node.meta.get("origin"))
        if source is not None and node.target in PRODUCTS and source.target in PRODUCTS:
            shape = placed.shape_of(find_summed(node))
            if shape is not None and shape[-1] < find_summed(source).meta["val"].shape[-1]:
                names.add(source.name)

    # Readers and makers of tensors whose blocks are no splits.
    for name, node in traced.placeholders.items():
        if name in splits.apart:
            names |= {user.name for user in node.users if user.op == "call_function"}
    for name, node in traced.results.items():
        if name in splits.apart and node.op == "call_function":
            names.add(node.name)
    return names


def find_summed(product: fx.Node) -> fx.Node:
    """Return the argument of a product whose last dim it sums over."""
    return product.args[PRODUCTS[product.target]]


# ------------------------------------------------------------------ the region
def find_region(
    traced: TracedUpdate, placed: PlacedUpdate, marked: Collection[str], splits: Splits
) -> Region:
    """Find the nodes to compute on whole values, so that the fewest bytes are sent, and cut them out.

    Args:
        placed: the update by placement alone, which has the placements of its values.
        marked: names of the nodes that need whole values.
    """
    # The core is all that is between marked nodes; nodes before and after it may join the region or not.
    graph, prices = traced.graph, Prices(traced, placed, splits)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    before, after = set(), set()  # nodes that marked nodes depend on, and nodes that depend on marked ones
    for node in calls:
        if node.name in marked or any(n in after for n in node.all_input_nodes):
            after.add(node)
    for node in reversed(graph.nodes):
        if node.op != "output" and any(u.name in marked or u in before for u in node.users):
            before.add(node)
    core = {node for node in calls if node.name in marked or (node in before and node in after)}
    before, after = before - core, after - core

    # The way in: a value that is computed on all ranks and read by the region is sent.
    edges: list[Edge] = []
    for node in before:
        if node.op == "placeholder":
            edges.append(("inputs", (node, "in"), None))
        edges.append(((node, "in"), (node, "out"), prices.send_bytes(node)))
        edges += [((node, "out"), (u, "in"), None) for u in node.users if u in before]
        edges += [((node, "out"), "core", None) for u in node.users if u in core]
    outside = minimum_cut(edges, "inputs", "core", outermost="sink")
    inside = core | {node for node in before if (node, "in") not in outside and node.op == "call_function"}
    read = {n for node in inside for n in node.all_input_nodes if n not in inside}

    # The way out: later nodes may be computed before results are sent back, if their other inputs are cheap
    # to send. Values that all ranks have are free, and a sum over blocks that have come back is not. On the
    # source's side of the cut, "out" means that the region computes a node, and "back" that it computes all
    # later readers of it, too: a cut between them sends the value back. "read" means that the region reads an
    # outer node, and "made" that it computes it a second time: a cut between them sends it there.
    edges = []
    results = set(graph.output_node().args[0])
    for node in core | after:
        back = [u for u in node.users if u in after]
        edges.append(("core" if node in core else (node, "out"), (node, "back"), prices.return_bytes(node)))
        edges += [((node, "back"), (u, "out"), None) for u in back]
        if node in results:
            edges.append(((node, "back"), "results", None))
        if node in after:
            beside = {n for n in node.all_input_nodes if n not in after and n not in inside and n not in read}
            edges += [((node, "out"), (n, "read"), None) for n in beside]
            edges += [((node, "out"), (n, "out"), None) for n in node.all_input_nodes if n in after]
            edges.append(("core", (node, "out"), prices.sum_bytes(node)))
    for node in graph.nodes:
        if node.op == "output" or node in after or node in inside or node in read:
            continue
        price = prices.send_bytes(node) if prices.is_split(node) else 0.0
        if node.op == "placeholder":
            edges.append(((node, "read"), "results", price))
        else:
            edges.append(((node, "read"), (node, "made"), price))
            beside = {n for n in node.all_input_nodes if n not in inside and n not in read}
            edges += [((node, "made"), (n, "read"), None) for n in beside]
    within = minimum_cut(edges, "core", "results", outermost="source")
    inside |= {node for node in calls if (node, "out") in within or (node, "made") in within}
    return cut_out(traced, inside, core | {n for n in after if n in inside}, prices)


def cut_out(traced: TracedUpdate, inside: set[fx.Node], owned: set[fx.Node], prices: Prices) -> Region:
    """Cut nodes out of an update.

    Args:
        inside: the nodes that the region computes.
        owned: those of them that are not computed outside as well.
    """
    # The region itself, and the values that it reads.
    nodes = [n for n in traced.graph.nodes if n.op != "output"]
    read = (n for node in nodes if node in inside for n in node.all_input_nodes)
    reads = list(dict.fromkeys(n for n in read if n not in inside))
    whole, env = fx.Graph(), {}
    for node in reads:
        env[node] = whole.placeholder(node.name)
        env[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        if node in inside:
            env[node] = whole.node_copy(node, env.__getitem__)
            env[node].target = ANY_STRIDES.get(node.target, node.target)

    outputs = dict(zip(traced.outputs, traced.graph.output_node().args[0], strict=True))
    # Values that come back, each with the result that it is (None for others) and its layout.
    returned: list[tuple[fx.Node, str | None, P]] = []
    for node in nodes:
        if node not in owned:
            continue
        apart = [name for name, n in outputs.items() if n is node and name in prices.splits.apart]
        returned += [(node, name, prices.splits.layouts[name]) for name in apart]
        others = [u for u in node.users if u.op != "output" and u not in inside]
        if others or any(n is node and name not in apart for name, n in outputs.items()):
            returned.append((node, None, prices.layout(node)))
    whole.output(tuple(env[n] for n, _, _ in returned))

    # The update outside: nodes that need nothing of the region come before it, all others after it.
    outside, new = fx.Graph(), {}
    splits = prices.splits
    for node in nodes:
        if node not in owned and all(n in new for n in node.all_input_nodes):
            new[node] = outside.node_copy(node, new.__getitem__)
    # A result whose blocks are no splits is placed as if all ranks had it whole.
    by_axis = tuple(
        {} if name is not None else split_over(n.meta["val"].shape, layout, splits.flat, splits.mesh) or {}
        for n, name, layout in returned
    )
    target = Elsewhere(by_axis, tuple(n.meta["val"] for n, _, _ in returned))
    elsewhere = outside.call_function(target, tuple(new[n] for n in reads))
    elsewhere.meta["val"] = target.values
    made: dict[Any, fx.Node] = {}
    for number, (node, name, _) in enumerate(returned):
        made[node, name] = outside.call_function(operator.getitem, (elsewhere, number))
        made[node, name].meta["val"] = node.meta["val"]
        if name is None:
            new[node] = made[node, name]
    for node in nodes:
        if node not in owned and node not in new:
            new[node] = outside.node_copy(node, new.__getitem__)
    outside.output(tuple(made.get((n, name)) or new[n] for name, n in outputs.items()))
    outside.eliminate_dead_code()
    apart = {new[n]: name for name, n in traced.placeholders.items() if name in splits.apart}
    layouts = tuple(layout for _, _, layout in returned)
    return Region(whole, elsewhere.args, layouts, target.values, outside, apart)


# ------------------------------------------------------------------ bytes
@dataclass(frozen=True, eq=False)
class Prices:
    """A calculator of the bytes to send values to the rank that has the leaf whole, and back."""

    traced: TracedUpdate
    placed: PlacedUpdate
    splits: Splits

    def send_bytes(self, node: fx.Node) -> float | None:
        """Return the bytes that a rank sends for one leaf; None if it cannot be sent."""
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return None
        ranks = self.splits.ranks
        share = (ranks - 1) / ranks
        if self.name_of(node) in self.splits.apart:
            return share * bytes_of(value) / ranks
        # All ranks have it: its price is that of the reductions on which it depends.
        if not self.is_split(node):
            return self.reductions[node]
        placements = self.placed.where[node]
        if layout_of(value.shape, placements, self.splits) is None:
            return None
        parts = math.prod(self.splits.size(name) for name, p in placements.items() if isinstance(p, Split))
        return share * bytes_of(value) / parts

    def is_split(self, node: fx.Node) -> bool:
        """Return whether ranks have parts of a value."""
        split = any(isinstance(p, Split) for p in self.placed.where[node].values())
        return split or self.name_of(node) in self.splits.apart

    def sum_bytes(self, node: fx.Node) -> float:
        """Return the bytes of a sum over ranks, if a node sums values that have come back as blocks."""
        value = node.meta["val"]
        sizes = [v.numel() for n in node.all_input_nodes for v in tensors_in(n.meta["val"])]
        if not isinstance(value, Tensor) or value.numel() >= max(sizes, default=0):
            return 0.0
        return 2 * (self.splits.ranks - 1) / self.splits.ranks * bytes_of(value)

    @cached_property
    def reductions(self) -> dict[fx.Node, float]:
        """The bytes of the reductions on which each value that all ranks have depends."""
        out, ranks = {}, self.splits.ranks
        split = set(filter(self.is_split, self.placed.where))
        for node in self.traced.graph.nodes:
            of_blocks = any(n in split for n in node.all_input_nodes)
            own = 2 * (ranks - 1) / ranks * bytes_of(node.meta.get("val")) if of_blocks else 0.0
            out[node] = max([own, *(out[n] for n in node.all_input_nodes if n not in split)])
        return out

    def return_bytes(self, node: fx.Node) -> float | None:
        """Return the bytes that a rank sends back for one leaf; None if it cannot be sent."""
        value, ranks = node.meta["val"], self.splits.ranks
        if not isinstance(value, Tensor):
            return None
        layout = self.layout(node)
        return (ranks - 1) / ranks * bytes_of(value) / (ranks if layout.axes else 1)

    def layout(self, node: fx.Node) -> P:
        """Return the layout of a value that comes back: that of the result that it is, or of the leaf."""
        splits, shape = self.splits, tuple(node.meta["val"].shape)
        for name, result in self.traced.results.items():
            if result is node and name not in splits.apart:
                return splits.layouts[name]
        layout = like_leaf(shape, splits.shapes["param"], splits.layouts["param"], splits.mesh)
        if layout is None or split_over(shape, layout, splits.flat, splits.mesh) is None:
            return P()
        return layout

    def name_of(self, node: fx.Node) -> str | None:
        """Return the name of a node that is an input, or None."""
        return next((name for name, n in self.traced.placeholders.items() if n is node), None)


def layout_of(shape: Sequence[int], placements: Mapping[str, Placement], splits: Splits) -> P | None:
    """Return the layout that expresses the placements of a value, or None if no layout does."""
    parts: list[list[Any]] = [[] for _ in shape]
    for axes in splits.flat:
        to = placements.get(name_of(axes))
        if isinstance(to, Split):
            first = Fused(axes[0], to.outer) if to.outer > 1 else axes[0]
            if to.outer > 1 and (parts[to.dim] or len(axes) > 1):
                return None
            parts[to.dim] += [first, *axes[1:]]
    # The layout must mean the very splits of the placements, those of fused and uneven dims too.
    layout = P(*map(tuple, parts))
    given = {name: p for name, p in placements.items() if isinstance(p, Split)}
    return layout if split_over(shape, layout, splits.flat, splits.mesh) == given else None
