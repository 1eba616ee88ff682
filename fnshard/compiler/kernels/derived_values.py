"""Derived values: which values of a graph are computed from leaves alone, and which of those may cross a cut.

A value of one unit's leaves is computed again where it is read, with the leaves gathered there. It crosses a
cut only if it is much smaller than the leaves; otherwise the cut would keep alive, as an activation, what
sharding has divided among ranks. A value of several units' leaves (a product of two matrices, a running
average) may cross as activations do, since computing it again would gather all of those units at once, time
and again. So may a value that is sent to other ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.ir.custom_gradient import CustomGradient

SMALL = 16  # a value this many times smaller than its leaves may cross: a norm, a penalty


@dataclass(frozen=True, eq=False)
class Derived:
    """The values of a graph that depend on leaves and constants alone.

    Args:
        leaves: for each such value, the leaves that it depends on.
        unit_of: the units of the leaves.
    """

    leaves: Mapping[fx.Node, frozenset[fx.Node]]
    unit_of: Mapping[fx.Node, str | None]

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.leaves

    def units(self, node: fx.Node) -> frozenset[str]:
        """Return the units whose leaves a value depends on; an activation has none."""
        return frozenset(u for n in self.leaves.get(node, ()) if (u := self.unit_of[n]) is not None)

    def is_small(self, node: fx.Node) -> bool:
        """Return whether a node is one tensor, made by an op, and much smaller than the leaves behind it."""
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            return False
        return value.numel() * SMALL <= sum(n.meta["val"].numel() for n in self.leaves.get(node, ()))

    def may_cross(self, node: fx.Node) -> bool:
        """Return whether another segment may read a value, in place of computing it again."""
        has_several_units = len(self.units(node)) > 1
        return node not in self or has_several_units or self.is_small(node) or has_own_gradient(node)


def has_own_gradient(node: fx.Node) -> bool:
    """Return whether a `CustomGradient` has made a value.

    If it were made twice, its backward would get the gradient in parts.
    """
    made_by = node.args[0] if node.target is operator.getitem else node
    return isinstance(made_by.target, CustomGradient)


def find_derived(
    graph: fx.Graph, leaves: Mapping[fx.Node, str | None], constants: Collection[fx.Node] = ()
) -> Derived:
    """Find the values of a program, or of one segment, that depend on leaves and constants alone.

    Args:
        leaves: placeholders that are leaves, with their units; a leaf that is nowhere gathered has None.
        constants: placeholders that are constants. An op that reads nothing (an arange) is a constant too.
    """
    leaves_of: dict[fx.Node, frozenset[fx.Node]] = {n: frozenset() for n in constants}
    leaves_of |= {n: frozenset([n]) for n in leaves}
    for node in graph.nodes:
        # What is sent to other ranks cannot be computed again by one rank alone.
        if node.op != "call_function" or node.target in (OUTGOING, EXCHANGE):
            continue
        if all(n in leaves_of for n in node.all_input_nodes):
            leaves_of[node] = frozenset().union(*(leaves_of[n] for n in node.all_input_nodes))
    return Derived(leaves_of, leaves)
