"""Split: cut a Program into Segments, one for each run between the first uses of two units.

A unit is the leaves that are gathered together, such as those of a layer.

Nodes that are *lazy* (views of a value, and values that depend on the leaves of one unit alone) are copied
into each segment that reads them, so that they never cross a cut. All others, the *main* nodes, are cut where
a node first reads a leaf of another unit: between the last read of one unit and the first of the next, where
the fewest bytes cross.

Exchanges lie between segments. Each is inserted right before its first reader, together with all others whose
values have been made by then. A permutation stays where the program has it, and its reader begins a segment,
so that it travels while the nodes between run.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import fx

from fnshard.compiler.frontend.exchange import EXCHANGE, KINDS, permutes
from fnshard.compiler.ir.program import Input, Program, storage_id, tensors_of
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.derived_values import Derived, find_derived, has_own_gradient
from fnshard.compiler.kernels.segment_source import Argument, extract
from fnshard.compiler.kernels.segments import Exchanged, Segment, Segments
from fnshard.layout.spec import LayoutSpec


def split(
    program: Program, specs: Mapping[str, LayoutSpec], communicated: frozenset[str],
    data_axes: tuple[str, ...] = (),
) -> Segments:  # fmt: skip
    """Cut a program into segments.

    Args:
        communicated: the paths of leaves that are gathered or reduced; cuts are made between reads of their
            units.
        data_axes: the data axes of the mesh that have several ranks.
    """
    alike = _find_alike(program, specs, data_axes)
    facts = _classify(program, {p: specs[p].unit for p in communicated})
    order = _order_nodes(program, facts)
    bounds = _find_bounds(order, facts, program)
    return replace(_make_segments(program, facts, order, bounds), alike=alike)


def _find_alike(
    program: Program, specs: Mapping[str, LayoutSpec], data_axes: tuple[str, ...]
) -> frozenset[str]:
    """Return the written leaves whose new values are the same on all ranks.

    These values depend on nothing but leaves and what all ranks have exchanged: counters, averages of leaves,
    statistics of the whole batch. A value that depends on a leaf that ranks write differently would be alike
    in their first micro-batch alone, and does not count as alike.
    """
    if not program.outputs.writes:
        return frozenset()

    # Inputs that all ranks have alike, and exchanges over all data axes whose result is the same on all.
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    same: dict[fx.Node, None] = {}
    for node, each in inputs.items():
        if each.kind == "constant" or (each.kind == "leaf" and specs[each.name].aggregated != "local"):
            same[node] = None
    for node in program.graph.find_nodes(op="call_function", target=EXCHANGE):
        if KINDS[node.args[1]].shared and set(data_axes) <= set(node.args[2].split(",")):
            same[node] = None

    # Begin with all leaves, and drop those that ranks write differently, until all that are left are alike.
    writes = {p: program.results[index] for p, index in program.outputs.writes.items()}
    while True:
        derived = find_derived(program.graph, same)
        alike = frozenset(p for p, value in writes.items() if value in derived)
        written_otherwise = [n for n in same if n in inputs and inputs[n].name in writes.keys() - alike]
        if not written_otherwise:
            return alike
        for node in written_otherwise:
            del same[node]


@dataclass(frozen=True)
class _Facts:
    """The facts of a program's nodes that cutting needs.

    Args:
        inputs: the inputs of the program, by their placeholders.
        units: for each node, the units whose leaves it reads, directly or through lazy nodes.
        lazy: nodes that are copied into each segment that reads them.
        deferred: nodes that are inserted once, before their first reader: small values of leaves, exchanges,
            and values of leaves with a custom gradient.
        terms: small values that depend on one unit, by that unit; they are inserted after its first read.
        exchanges: the exchanges, except permutations.
    """

    inputs: Mapping[fx.Node, Input]
    units: Mapping[fx.Node, frozenset[str]]
    lazy: set[fx.Node]
    deferred: set[fx.Node]
    terms: Mapping[str, list[fx.Node]]
    exchanges: list[fx.Node]


def _classify(program: Program, unit_of: Mapping[str, str]) -> _Facts:
    """Find out what cutting needs to know of each node of a program."""
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    leaves = {n: unit_of.get(i.name) for n, i in inputs.items() if i.kind == "leaf"}
    constants = [n for n, i in inputs.items() if i.kind in ("constant", "axis")]
    derived = find_derived(program.graph, leaves, constants)

    # Lazy nodes: views, and values of one unit's leaves. A result is lazy if its op is.
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    lazy: set[fx.Node] = set()
    for node in calls:
        if node.target is operator.getitem:
            if node.args[0] in lazy:
                lazy.add(node)
        elif has_own_gradient(node):
            continue
        elif (node in derived and len(derived.units(node)) <= 1) or _is_view(node):
            lazy.add(node)

    # Deferred nodes: small values, which cross cuts in place of leaves; exchanges; custom gradients.
    terms = _find_terms(calls, derived, lazy)
    lazy -= {n for of_unit in terms.values() for n in of_unit}
    exchanges = [n for n in calls if n.target is EXCHANGE and not permutes(n)]
    custom = {n for n in calls if n in derived and has_own_gradient(n)}
    deferred = _find_deferred(calls, derived, lazy, terms) | set(exchanges) | custom

    # The units that each node reads: directly, through lazy nodes, or through values with a custom gradient.
    units: dict[fx.Node, frozenset[str]] = {}
    for node in inputs:
        unit = leaves.get(node)
        units[node] = frozenset([unit]) if unit else frozenset()
    for node in calls:
        reads = (units[n] for n in node.all_input_nodes if n in lazy or n in inputs or n in custom)
        units[node] = frozenset().union(*reads)
    return _Facts(inputs, units, lazy, deferred, terms, exchanges)


def _find_terms(calls: list[fx.Node], derived: Derived, lazy: set[fx.Node]) -> dict[str, list[fx.Node]]:
    """Return the small values of one unit's leaves that main nodes depend on, by unit.

    They can cross a cut in place of the leaves. A large value that is made of small ones alone (a norm,
    expanded) is made again from these.
    """

    @cache
    def find_small_sources(node: fx.Node) -> tuple[fx.Node, ...] | None:
        """Return the small values that a value can be made of; None if it needs a leaf itself."""
        if not derived.units(node):
            return ()
        if node.op != "call_function":
            return None
        if derived.is_small(node) and not _is_view(node):
            return (node,)
        sources = [find_small_sources(n) for n in node.all_input_nodes]
        if None in sources:
            return (node,) if derived.is_small(node) else None
        return tuple(dict.fromkeys(n for each in sources for n in each))

    terms: dict[str, list[fx.Node]] = {}
    for node in [n for n in calls if n not in lazy]:
        read = [n for n in node.all_input_nodes if n in lazy and len(derived.units(n)) == 1]
        for term in [t for n in read for t in find_small_sources(n) or ()]:
            (unit,) = derived.units(term)
            if term not in terms.setdefault(unit, []):
                terms[unit].append(term)
    return terms


def _find_deferred(
    calls: list[fx.Node], derived: Derived, lazy: set[fx.Node], terms: Mapping[str, list[fx.Node]]
) -> set[fx.Node]:
    """Return the terms, and the nodes that are made of terms of several units, such as their sum."""
    deferred = {n for of_unit in terms.values() for n in of_unit}
    made_of_terms = set(deferred)
    for node in calls:
        sources = [n for n in node.all_input_nodes if derived.units(n)]
        if sources and node in derived and made_of_terms.issuperset(sources):
            made_of_terms.add(node)
            if node not in lazy:
                deferred.add(node)
    return deferred


def _is_view(node: fx.Node) -> bool:
    """Return whether a node's tensors lie in the storages of what it reads."""
    outs = {storage_id(t) for t in tensors_of(node)}
    ins = {storage_id(t) for n in node.all_input_nodes for t in tensors_of(n)}
    return bool(outs) and outs <= ins


def _order_nodes(program: Program, facts: _Facts) -> list[fx.Node]:
    """Return main nodes in program order, with deferred nodes between them.

    Terms are inserted after the first read of their unit; all other deferred nodes right before their first
    reader.
    """
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    units_read: set[str] = set()

    def place(node: fx.Node) -> None:
        # First what it reads, then the node, and after it the results of an op that returns several.
        for source in _find_sources(node, facts):
            if source in facts.deferred and source not in placed:
                place(source)
        if node not in placed:
            placed.add(node)
            order.append(node)
            # An exchange takes along all others that can be sent by now, so that they are one run.
            if node.target is EXCHANGE and node in facts.exchanges:
                for other in [n for n in facts.exchanges if n.args[0] in placed]:
                    place(other)
            for result in _find_results(node):
                if result not in facts.lazy:
                    place(result)

    # Main nodes in their order, then deferred ones that only results need.
    wanted = {n for r in program.results for n in [r, *_find_sources(r, facts)]}
    for node in program.graph.nodes:
        if node.op != "call_function" or node in facts.lazy or node in facts.deferred:
            continue
        place(node)
        for unit in sorted(facts.units[node] - units_read):
            units_read.add(unit)
            for term in facts.terms.get(unit, []):
                place(term)
    for node in program.graph.nodes:
        if node in facts.deferred and node in wanted:
            place(node)
    return order


def _find_results(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take the tensors of an op that returns several; no cut comes between."""
    return [n for n in node.users if n.target is operator.getitem]


def _find_sources(node: fx.Node, facts: _Facts) -> list[fx.Node]:
    """Return the main nodes, deferred nodes and placeholders that a node reads, also through lazy nodes."""
    sources: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if source in facts.lazy:
            stack.extend(source.all_input_nodes)
        else:
            sources[source] = None
    return list(sources)


@dataclass(frozen=True)
class _Cut:
    """A boundary that is to be placed between two positions.

    Args:
        before, after: the families of the units that are read before the cut and after it.
        units: the units that are read after the cut.
        last_read, first_read: the positions between which the cut may be.
        options: the cheapest positions, in order.
    """

    before: str
    after: str
    units: tuple[str, ...]
    last_read: int
    first_read: int
    options: tuple[int, ...]


Units = tuple[str, ...] | None  # the units that a segment reads; a run of exchanges has None


def _find_bounds(order: list[fx.Node], facts: _Facts, program: Program) -> list[tuple[int, Units]]:
    """Return the first position and the units of each segment and each run of exchanges."""
    cost, forbidden = _price_cuts(order, facts, program)
    cuts: list[_Cut] = []  # between units; the other bounds have no choice of position
    units_from: dict[int, Units] = {0: ()}  # by the first position of a run
    # The current run: where it starts, where it last read a unit (-1 before it reads one), and its units.
    start, last_read, current = 0, -1, frozenset[str]()
    permutation_readers = _find_permutation_readers(order, facts)
    for position, node in enumerate(order):
        # Begin a run where exchanges begin or end, and where the result of a permutation is read.
        earlier = order[position - 1]
        is_exchange, was_exchange = node.target is EXCHANGE, earlier.target is EXCHANGE
        if position and (is_exchange != was_exchange or node in permutation_readers):
            start, last_read = position, -1
            units_from[start] = None if is_exchange else tuple(sorted(current))
            # Rows that come back from experts are many more bytes than what is made of them, so that the next
            # unit may be cut off after that, unless the first reader of these rows belongs to the next unit.
            if was_exchange and earlier.args[1] == "all_to_all" and current and not facts.units[node]:
                last_read = position

        reads = facts.units[node]
        if not reads:
            continue
        if last_read < 0:
            units_from[start] = tuple(sorted(reads))
            current = reads
        elif not reads <= current:
            # The first node that reads another unit: cut between the last read of the one before and this,
            # where the fewest bytes cross.
            options = [c for c in range(last_read + 1, position + 1) if c not in forbidden]
            least = min(cost[c] for c in options)
            cheapest = tuple(c for c in options if cost[c] == least)
            families = _name_family(current), _name_family(reads)
            cuts.append(_Cut(*families, tuple(sorted(reads)), last_read, position, cheapest))
            current = reads
        last_read = position

    placed = dict(zip(_place_cuts(cuts), (c.units for c in cuts), strict=True))
    if order and order[-1].target is EXCHANGE:  # a last segment copies the result of the exchange
        units_from[len(order)] = ()
    return sorted((units_from | placed).items())


def _find_permutation_readers(order: list[fx.Node], facts: _Facts) -> set[fx.Node]:
    """Return the first reader of each permutation's result."""
    readers: dict[fx.Node, fx.Node] = {}
    if any(map(permutes, order)):
        for node in order:
            for source in _find_sources(node, facts):
                if permutes(source):
                    readers.setdefault(source, node)
    return set(readers.values())


def _name_family(units: frozenset[str]) -> str:
    """Name the family of units: units that differ in numbers alone are blocks that should be equal code."""
    return "+".join(sorted({re.sub(r"\d+", "#", u) for u in units}))


def _place_cuts(cuts: list[_Cut]) -> list[int]:
    """Choose, among equally cheap positions, those that make blocks alike.

    Between two blocks of a family, the cut is at the earliest position. Before the first block and after the
    last one, it is where these blocks begin and end as the others do.
    """
    # How far the blocks of a family begin before their first read, and end after their last.
    lead = {c.after: c.first_read - c.options[0] for c in cuts if c.before == c.after}
    tail = {c.before: c.options[0] - c.last_read for c in cuts if c.before == c.after}
    positions = []
    for cut in cuts:
        wanted = cut.options[-1]
        if cut.before == cut.after:
            wanted = cut.options[0]
        elif cut.after in lead:
            wanted = cut.first_read - lead[cut.after]
        elif cut.before in tail:
            wanted = cut.last_read + tail[cut.before]
        positions.append(wanted if wanted in cut.options else cut.options[-1])
    return positions


def _price_cuts(order: list[fx.Node], facts: _Facts, program: Program) -> tuple[list[int], set[int]]:
    """Return the bytes that are alive across a cut before each position, and where no cut may be."""
    # Find the last reader of each value; what the program returns is read at the end.
    position = {n: i for i, n in enumerate(order)}
    end = len(order)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for source in _find_sources(node, facts):
            last[source] = i
    for result in program.results:
        for source in [result, *_find_sources(result, facts)]:
            last[source] = end

    # A value is alive from the position after it to its last reader.
    change = [0] * (end + 2)
    for node, i in position.items():
        until = last.get(node, i)
        if until > i and node.target is not operator.getitem:
            size = sum(t.numel() * t.element_size() for t in tensors_of(node))
            change[i + 1] += size
            change[until + 1] -= size
    cost = list(itertools.accumulate(change[: end + 1]))

    # No cut comes between an op of several results and these, since only tensors cross. (A result of a lazy
    # op has a copy of the op in its segment.)
    forbidden: set[int] = set()
    for node, i in position.items():
        for result in _find_results(node):
            forbidden.update(range(i + 1, position.get(result, i) + 1))
    return cost, forbidden


def _make_segments(
    program: Program, facts: _Facts, order: list[fx.Node], bounds: list[tuple[int, Units]]
) -> Segments:
    """Return the segments between the bounds, with the exchanges between them."""
    # Number the runs, and find the values that other runs read, or the program returns.
    starts = [position for position, _ in bounds] + [len(order)]
    run_of = {n: i for i in range(len(bounds)) for n in order[starts[i] : starts[i + 1]]}
    copies = _copy_aliased_results(program, facts, run_of, bounds)
    crossing: dict[fx.Node, None] = {}
    for node in [*order, *copies]:
        for source in _find_sources(node, facts):
            if source in run_of and run_of[source] != run_of[node]:
                crossing[source] = None
    crossing |= dict.fromkeys(r for r in program.results if r in run_of)

    # Write out each segment, and the exchanges after it.
    segments, sources, exchanges = [], {}, []
    for i, (start, units) in enumerate(bounds):
        nodes = order[start : starts[i + 1]] + [n for n in copies if run_of[n] == i]
        if units is None:
            exchanges += [_make_exchange(n, len(segments) - 1) for n in nodes]
            continue
        # After the last exchanges nothing may be left to run.
        if not nodes and exchanges:
            continue
        outs = [n for n in nodes if n in crossing]
        source, inputs = extract(nodes, outs, facts.lazy, facts.inputs)
        sources.setdefault(source.key, source)
        names = tuple(ValueName(Kind.VALUE, n.name) for n in outs)
        segments.append(Segment(len(segments), units, inputs, names, source.key))
    values = {n.name: n.meta["val"] for n in [*crossing, *copies]}
    results = tuple(ValueName(Kind.VALUE, n.name) for n in program.results)
    return Segments(tuple(segments), sources, results, values, exchanges=tuple(exchanges))


def _make_exchange(node: fx.Node, after: int) -> Exchanged:
    """Return the description of an exchange that follows a segment."""
    sent, kind, axes, dim, _, *to = node.args
    return Exchanged(
        kind=kind,
        axes=tuple(axes.split(",")),
        dim=dim,
        after=after,
        sent=ValueName(Kind.VALUE, sent.name),
        received=ValueName(Kind.VALUE, node.name),
        like=Argument.of(sent.meta["val"], "value"),
        to=to[0] if to else 0,
    )


def _copy_aliased_results(
    program: Program, facts: _Facts, run_of: dict[fx.Node, int], bounds: list[tuple[int, Units]]
) -> list[fx.Node]:
    """Give each result that is a view, a leaf or an input a copy, so that no segment returns an alias.

    The copy is made in the last run; that of a written leaf's new value where the unit that it depends on is
    read first.
    """
    output, written = program.graph.output_node(), set(program.outputs.writes.values())
    results, copies = [], []
    for number, result in enumerate(program.results):
        # Keep a result that a main node makes, in a storage that no earlier result has.
        others = {storage_id(t) for other in results for t in tensors_of(other)}
        if result in run_of and others.isdisjoint(storage_id(t) for t in tensors_of(result)):
            results.append(result)
            continue
        with program.graph.inserting_before(output):
            copy = program.graph.call_function(torch.ops.aten.clone.default, (result,))
        value = result.meta["val"]
        copy.meta["val"] = torch.empty_like(value, requires_grad=value.requires_grad)

        # A written leaf's new value is copied as early as possible: not before the first segment that reads
        # its unit, nor before a run that makes what it depends on.
        run_of[copy] = len(bounds) - 1
        if number in written and result in facts.lazy:
            units = facts.units[result]
            sources = [run_of[n] for n in _find_sources(copy, facts) if n in run_of]
            segments = [i for i, (_, read) in enumerate(bounds) if read is not None]
            first = [i for i in segments if units <= set(bounds[i][1])] if units or sources else []
            earliest = max([*first[:1], *sources], default=run_of[copy])
            run_of[copy] = next(i for i in segments if i >= earliest)
        copies.append(copy)
        results.append(copy)
    output.args = (results,)
    return copies
