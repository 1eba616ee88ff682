"""Check a placed program against the recorded placements. A fault that is found here would train wrong.

The walk of `place` records the placement of each value and the strategy of each op. This module reads the
graph that the walk has written, and checks them again: whether an op's rule has its strategy, what the
op reads, which exchange turns one placement into another, and how large each rank's part is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fnshard.compiler.frontend.exchange import EXCHANGE
from fnshard.compiler.ir.program import tensors_in, tensors_of
from fnshard.compiler.place.placement import (
    PARTIAL,
    REPLICATED,
    Partial,
    Placement,
    Replicated,
    Split,
    fits,
    local_shape,
)
from fnshard.compiler.place.rules import rule_of
from fnshard.compiler.place.strategies import Call, OpStrategy
from fnshard.errors import ScheduleError

# The exchange from one placement to another; None where each rank slices what it has.
EXCHANGES: dict[tuple[type, type], str | None] = {
    (Replicated, Split): None,
    (Split, Replicated): "all_gather",
    (Partial, Replicated): "psum",
    (Partial, Split): "reduce_scatter",
    (Split, Split): "all_to_all",
}


@dataclass(frozen=True)
class Record:
    """A record of what a walk did along an axis.

    Args:
        axis, ranks: the name of the axis, and how many ranks it has.
        index: the node of this rank's index along it.
        update: whether the program is an optimizer's, in which a rank may have padding alone.
        values: the placement and the whole (fake) value of each node.
        calls: each op with its strategy, the nodes that it reads and its own node. An op of which a strategy
            runs a function instead has an entry for each result.
        conversions: node, result, and both placements.
        results: for each output whether ranks sum it, its value's node, the returned node, and the placement
            that this must have, unless it is a part of a sum.
    """

    axis: str
    ranks: int
    index: fx.Node
    update: bool = False
    values: dict[fx.Node, tuple[Placement, Any]] = field(default_factory=dict)
    calls: list[tuple[Call, OpStrategy, tuple[fx.Node, ...], fx.Node]] = field(default_factory=list)
    conversions: list[tuple[fx.Node, fx.Node, Placement, Placement]] = field(default_factory=list)
    results: list[tuple[bool, fx.Node, fx.Node, Placement]] = field(default_factory=list)

    def check(self, graph: fx.Graph, run: Callable[[], None]) -> None:
        """Raise one error with everything that does not fit.

        Args:
            run: propagates the graph's (fake) values.

        Raises:
            ScheduleError: there is a bug in a rule, in the walk, or in a rewrite after it.
        """
        # Nodes that nothing reads have left the graph, and their records are not looked at.
        alive = set(graph.nodes)
        returned = list(graph.output_node().args[0])
        problems = [
            *self._check_reads(alive), *self._check_exchanges(alive), *self._check_results(returned)
        ]  # fmt: skip
        # Parts have sizes only once values are propagated, which a graph with a fault may not survive.
        if not problems:
            try:
                run()
            except (RuntimeError, ValueError) as error:  # fake tensors raise both
                problems = [(str(error) or repr(error)).splitlines()[0]]
            else:
                problems = list(self._check_shapes(alive))
        if problems:
            raise ScheduleError(
                f"{len(problems)} faults in the program placed over {self.axis!r}:", problems[:20]
            )

    def _check_reads(self, alive: set[fx.Node]) -> Iterator[str]:
        """Yield ops that read something else than their strategy says, or whose rule lacks that strategy."""
        asked: set[int] = set()  # calls of several results have an entry for each
        for call, strategy, reads, node in self.calls:
            if node not in alive:
                continue
            for read, to in zip(reads, strategy.inputs, strict=True):
                now = self.values[read][0]
                if now != to:
                    yield f"{node}: {call.target} reads {read}, which is {now}, as {to}"
                if strategy.run is None and read in alive and read not in node.all_input_nodes:
                    yield f"{node}: {call.target} does not read {read}, as it was placed to"

            # The rule is asked again for its strategies. Whole values are right for every op.
            if {*strategy.inputs, strategy.output} <= {REPLICATED} or id(call) in asked:
                continue
            asked.add(id(call))
            rule = rule_of(call.target)
            known = rule(call) if rule else ()
            placed = strategy.inputs, strategy.output, strategy.changes
            if not any((s.inputs, s.output, s.changes) == placed for s in known):
                taken = ", ".join(map(str, strategy.inputs))
                yield f"{node}: {call.target} has no rule from {taken} to {strategy.output}"

    def _check_exchanges(self, alive: set[fx.Node]) -> Iterator[str]:
        """Yield conversions without their one exchange over this axis, or with another."""
        for source, result, now, to in self.conversions:
            if result not in alive:
                continue
            # Parts of a maximum are gathered, and each rank takes the maximum of them.
            expected = "all_gather" if now == Partial("max") else EXCHANGES[type(now), type(to)]
            exchanges = [n for n in _find_between(source, result) if n.target is EXCHANGE]
            kinds = [(n.args[1], n.args[2], n.args[4]) for n in exchanges]
            if kinds != ([(expected, self.axis, self.ranks)] if expected else []):
                shown = ", ".join(f"{kind} over {axis}" for kind, axis, _ in kinds) or "nothing"
                due = f"{expected} over {self.axis}" if expected else "nothing"
                yield f"{result}: from {now} to {to} stands {shown}, where {due} is due"
            # A slice that does not read the rank's index would cut the same part on all ranks.
            if expected is None and self.index not in _find_between(source, result):
                yield f"{result}: every rank takes the same part of {source}"

    def _check_shapes(self, alive: set[fx.Node]) -> Iterator[str]:
        """Yield nodes whose parts are not as large as their placement says, or that cannot be placed so.

        The results of an op all have the placement of its strategy, which may fit the first alone: a norm's
        mean has one number where its output has a row.
        """
        for node, (placement, whole) in self.values.items():
            if node not in alive:
                continue
            for value, full in zip(tensors_of(node), tensors_in(whole), strict=True):
                expected = local_shape(full.shape, placement, self.ranks)
                if tuple(value.shape) != expected:
                    actual, full_shape = list(value.shape), list(full.shape)
                    yield f"{node}: {placement} of {full_shape} is {list(expected)}, not {actual}"
                    continue
                # What has no numbers cannot be wrong.
                is_split = isinstance(placement, Split) and full.numel() > 0
                if is_split and not fits(full.shape, placement, self.ranks, self.update):
                    yield f"{node}: {list(full.shape)} has no part for each rank by {placement}"

    def _check_results(self, outputs: Sequence[fx.Node]) -> Iterator[str]:
        """Yield results that are neither placed as is due, nor parts of a sum times the number of ranks."""
        for (summed, source, result, due), returned in zip(self.results, outputs, strict=True):
            placement = self.values[source][0]
            if result is not returned:
                yield f"{returned} is returned for {result}"
            elif summed and placement == PARTIAL:
                # Results of ranks are averaged later, so that a part must be scaled by their number.
                if result.args[:2] != (source, self.ranks):
                    yield f"{result}: a part of a sum is returned, and not times {self.ranks}"
            elif self.values[result][0] != due:
                yield f"{result}: {self.values[result][0]} is returned"


def _find_between(source: fx.Node, result: fx.Node) -> list[fx.Node]:
    """Return the nodes between a value and a result that was made of it, and all else that these read."""
    seen, stack, between = {source}, [result], []
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            between.append(node)
            stack += node.all_input_nodes
    return between
