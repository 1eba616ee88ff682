"""Split: it cuts a Program into Segments, one for each run between the first uses of two units.

Nodes that are *lazy* (views of a value, and values that depend on the leaves of one unit alone) are copied
into each segment that reads them, so that they never cross a cut. All others, the *main* nodes, are cut where
a node first reads a leaf of another unit: between the last read of one unit and the first of the next, where
the fewest bytes cross.

Exchanges stand between segments. Each stands right before its first reader, together with all others whose
values are there by then. A permutation stands where the program has it, and its reader begins a segment, so
that it travels while the nodes between run.
"""

from __future__ import annotations

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
    program: Program, specs: Mapping[str, LayoutSpec], cuts: frozenset[str], data_axes: tuple[str, ...] = ()
) -> Segments:
    """Cut a program into segments.

    Args:
        cuts: the paths of leaves whose reading matters, because they are gathered or reduced.
        data_axes: the data axes of the mesh that have several ranks.
    """
    alike = _find_alike(program, specs, data_axes)
    facts = _classify(program, {p: specs[p].unit for p in cuts})
    order = _order_nodes(program, facts)
    bounds = _find_bounds(order, facts, program)
    return replace(_make_segments(program, facts, order, bounds), alike=alike)


def _find_alike(
    program: Program, specs: Mapping[str, LayoutSpec], data_axes: tuple[str, ...]
) -> frozenset[str]:
    """Return the written leaves whose new values are the same on all ranks.

    These values depend on nothing but leaves and what all ranks have exchanged: counters, averages of leaves,
    statistics of the whole batch. A value that depends on a leaf that ranks write differently would be alike
    in their first micro-batch alone, and is not counted.
    """
    if not program.outputs.writes:
        return frozenset()
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    same = {
        n: None
        for n, i in inputs.items()
        if i.kind == "constant" or (i.kind == "leaf" and specs[i.name].aggregated != "local")
    }
    exchanges = program.graph.find_nodes(op="call_function", target=EXCHANGE)
    same |= {
        n: None for n in exchanges if KINDS[n.args[1]].shared and set(data_axes) <= set(n.args[2].split(","))
    }

    writes = {p: program.results[index] for p, index in program.outputs.writes.items()}
    # Begin with all leaves, and leave those out that ranks write differently, until none is left.
    while True:
        rests = find_derived(program.graph, same)
        alike = frozenset(p for p, value in writes.items() if value in rests)
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
        units: for each node, the units whose leaves it reads, itself or through lazy nodes.
        lazy: nodes that are copied to where they are read.
        deferred: nodes that stand once, where they are read first: small values of leaves, exchanges, and
            values of leaves with a custom gradient.
        terms: small values that depend on one unit, by that unit; they stand behind its first read.
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
    rests = find_derived(
        program.graph, leaves, [n for n, i in inputs.items() if i.kind in ("constant", "axis")]
    )
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    lazy: set[fx.Node] = set()
    for node in calls:
        if node.target is operator.getitem:  # a result stays with its op
            lazy.update([node] if node.args[0] in lazy else [])
        elif has_own_gradient(node):
            continue
        elif (node in rests and len(rests.units(node)) <= 1) or _is_view(node):
            lazy.add(node)
    terms = _find_terms(calls, rests, lazy)
    lazy -= {n for of_unit in terms.values() for n in of_unit}
    exchanges = [n for n in calls if n.target is EXCHANGE and not permutes(n)]
    own = {n for n in calls if n in rests and has_own_gradient(n)}
    deferred = _find_deferred(calls, rests, lazy, terms) | set(exchanges) | own
    units = {n: frozenset([u] if (u := leaves.get(n)) else []) for n in inputs}
    for node in calls:
        reads = (units[n] for n in node.all_input_nodes if n in lazy or n in inputs or n in own)
        units[node] = frozenset().union(*reads)
    return _Facts(inputs, units, lazy, deferred, terms, exchanges)


def _find_terms(calls: list[fx.Node], rests: Derived, lazy: set[fx.Node]) -> dict[str, list[fx.Node]]:
    """Return the small values of one unit's leaves that main nodes depend on, by unit.

    They can cross a cut in place of the leaves. A large value that is made of small ones alone (a norm,
    expanded) is made again from these.
    """

    @cache
    def small_sources(node: fx.Node) -> tuple[fx.Node, ...] | None:
        if not rests.units(node):
            return ()
        if node.op != "call_function":
            return None
        if rests.is_small(node) and not _is_view(node):
            return (node,)
        found = [small_sources(n) for n in node.all_input_nodes]
        if None in found:
            return (node,) if rests.is_small(node) else None
        return tuple(dict.fromkeys(n for each in found for n in each))

    terms: dict[str, list[fx.Node]] = {}
    for node in [n for n in calls if n not in lazy]:
        read = [n for n in node.all_input_nodes if n in lazy and len(rests.units(n)) == 1]
        for term in [t for n in read for t in small_sources(n) or ()]:
            (unit,) = rests.units(term)
            if term not in terms.setdefault(unit, []):
                terms[unit].append(term)
    return terms


def _find_deferred(
    calls: list[fx.Node], rests: Derived, lazy: set[fx.Node], terms: Mapping[str, list[fx.Node]]
) -> set[fx.Node]:
    """Return the terms, and the nodes that are made of terms of several units, such as their sum."""
    deferred = {n for of_unit in terms.values() for n in of_unit}
    rest_on_terms = set(deferred)
    for node in calls:
        sources = [n for n in node.all_input_nodes if rests.units(n)]
        if sources and node in rests and rest_on_terms.issuperset(sources):
            rest_on_terms.add(node)
            deferred.update([] if node in lazy else [node])
    return deferred


def _is_view(node: fx.Node) -> bool:
    outs = {storage_id(t) for t in tensors_of(node)}
    ins = {storage_id(t) for n in node.all_input_nodes for t in tensors_of(n)}
    return bool(outs) and outs <= ins


def _order_nodes(program: Program, facts: _Facts) -> list[fx.Node]:
    """Return main nodes in program order, with deferred nodes between them.

    Terms stand behind the first read of their unit; all other deferred nodes right before their first reader.
    """
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    home: set[str] = set()

    def place(node: fx.Node) -> None:
        # What it reads comes before it, and behind it the results of an op that returns several.
        for source in _closure(node, facts):
            if source in facts.deferred and source not in placed:
                place(source)
        if node not in placed:
            placed.add(node)
            order.append(node)
            if node.target is EXCHANGE and node in facts.exchanges:
                for other in [n for n in facts.exchanges if n.args[0] in placed]:
                    place(other)
            for result in _results(node):
                if result not in facts.lazy:
                    place(result)

    # Main nodes in their order, then deferred ones that only results need.
    wanted = {n for r in program.results for n in [r, *_closure(r, facts)]}
    for node in program.graph.nodes:
        if node.op != "call_function" or node in facts.lazy or node in facts.deferred:
            continue
        place(node)
        for unit in sorted(facts.units[node] - home):
            home.add(unit)
            for term in facts.terms.get(unit, []):
                place(term)
    for node in program.graph.nodes:
        if node in facts.deferred and node in wanted:
            place(node)
    return order


def _results(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take the tensors of an op that returns several; no cut comes between."""
    return [n for n in node.users if n.target is operator.getitem]


def _closure(node: fx.Node, facts: _Facts) -> list[fx.Node]:
    """Return the main and deferred nodes and placeholders that a node reads, itself or through lazy nodes."""
    found: dict[fx.Node, None] = {}
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
            found[source] = None
    return list(found)


@dataclass(frozen=True)
class _Cut:
    """A boundary that is to be placed between two positions.

    Args:
        before, after: the families of the units that are read in front of it and behind it.
        units: the units that are read behind it.
        last_read, first_read: the positions between which it may stand.
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
    cuts: list[_Cut] = []
    firsts: dict[int, Units] = {0: ()}
    first, last_read, current = 0, -1, frozenset[str]()
    arrivals = _find_arrivals(order, facts)
    for position, node in enumerate(order):
        # A run of exchanges begins or ends here, or the result of a permutation is read: here is a bound.
        earlier = order[position - 1]
        exchanges = [n.target is EXCHANGE for n in (node, earlier)]
        if position and (exchanges[0] != exchanges[1] or node in arrivals):
            first, last_read = position, -1
            firsts[first] = None if node.target is EXCHANGE else tuple(sorted(current))
            # Rows that come back from experts are many more bytes than what is made of them, so that the next
            # unit may be cut off behind that, unless the first reader of these rows is of the next unit.
            if exchanges[1] and earlier.args[1] == "all_to_all" and current and not facts.units[node]:
                last_read = position
        reads = facts.units[node]
        if not reads:
            continue
        if last_read < 0:
            firsts[first] = tuple(sorted(reads))
        elif not reads <= current:
            # The first node that reads another unit: cut between the last read of the one before and this,
            # where the fewest bytes cross.
            options = [c for c in range(last_read + 1, position + 1) if c not in forbidden]
            least = min(cost[c] for c in options)
            cheapest = tuple(c for c in options if cost[c] == least)
            cuts.append(
                _Cut(_family(current), _family(reads), tuple(sorted(reads)), last_read, position, cheapest)
            )
        if last_read < 0 or not reads <= current:
            current = reads
        last_read = position
    placed = dict(zip(_place_cuts(cuts), (c.units for c in cuts), strict=True))
    if order and order[-1].target is EXCHANGE:  # a last segment copies the result of the exchange
        firsts[len(order)] = ()
    return sorted((firsts | placed).items())


def _find_arrivals(order: list[fx.Node], facts: _Facts) -> set[fx.Node]:
    """Return the first reader of each permutation's result."""
    first: dict[fx.Node, fx.Node] = {}
    if any(map(permutes, order)):
        for node in order:
            for source in _closure(node, facts):
                if permutes(source):
                    first.setdefault(source, node)
    return set(first.values())


def _family(units: frozenset[str]) -> str:
    """Return the family of units: units that differ in numbers alone are blocks that should be equal code."""
    return "+".join(sorted({re.sub(r"\d+", "#", u) for u in units}))


def _place_cuts(cuts: list[_Cut]) -> list[int]:
    """Choose, among equally cheap positions, those that make blocks alike.

    Between two blocks of a family it is the earliest. In front of the first block and behind the last one it
    is the position at which these begin and end as the others do.
    """
    begins = {c.after: c.first_read - c.options[0] for c in cuts if c.before == c.after}
    ends = {c.before: c.options[0] - c.last_read for c in cuts if c.before == c.after}
    places = []
    for cut in cuts:
        wanted = cut.options[-1]
        if cut.before == cut.after:
            wanted = cut.options[0]
        elif cut.after in begins:
            wanted = cut.first_read - begins[cut.after]
        elif cut.before in ends:
            wanted = cut.last_read + ends[cut.before]
        places.append(wanted if wanted in cut.options else cut.options[-1])
    return places


def _price_cuts(order: list[fx.Node], facts: _Facts, program: Program) -> tuple[list[int], set[int]]:
    """Return the bytes that are alive across a cut before each position, and where no cut may be."""
    position = {n: i for i, n in enumerate(order)}
    end = len(order)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for source in _closure(node, facts):
            last[source] = i
    for result in program.results:
        for source in [result, *_closure(result, facts)]:
            last[source] = end
    # A value is alive from behind its maker to its last reader.
    delta = [0] * (end + 2)
    for node, i in position.items():
        until = last.get(node, i)
        if until > i and node.target is not operator.getitem:
            delta[i + 1] += sum(t.numel() * t.element_size() for t in tensors_of(node))
            delta[until + 1] -= sum(t.numel() * t.element_size() for t in tensors_of(node))
    cost, total = [], 0
    for d in delta[: end + 1]:
        total += d
        cost.append(total)
    # No cut comes between an op of several results and these, since only tensors cross. (A result of a lazy
    # op has a copy of the op where it stands.)
    spans = [range(i + 1, position.get(r, i) + 1) for node, i in position.items() for r in _results(node)]
    return cost, {p for span in spans for p in span}


def _make_segments(program: Program, facts: _Facts, order: list[fx.Node], bounds: list) -> Segments:
    """Return the segments between the bounds, with the exchanges between them."""
    starts = [b[0] for b in bounds] + [len(order)]
    # By node, the segment that makes it; then the values that others read, or the program returns.
    home = {n: i for i in range(len(bounds)) for n in order[starts[i] : starts[i + 1]]}
    extra = _materialise_results(program, facts, home, bounds)
    crossing: dict[fx.Node, None] = {}
    for node in [*order, *extra]:
        for source in _closure(node, facts):
            if source in home and home[source] != home[node]:
                crossing[source] = None
    crossing |= dict.fromkeys(r for r in program.results if r in home)
    # Write out each segment, and the exchanges behind it.
    segments, sources, exchanges = [], {}, []
    for i, (start, units) in enumerate(bounds):
        nodes = order[start : starts[i + 1]] + [n for n in extra if home[n] == i]
        if units is None:
            exchanges += [_make_exchange(n, len(segments) - 1) for n in nodes]
            continue
        # Behind the last exchanges nothing may be left to run.
        if not nodes and exchanges:
            continue
        outs = [n for n in nodes if n in crossing]
        source, inputs = extract(nodes, outs, facts.lazy, facts.inputs)
        sources.setdefault(source.key, source)
        names = tuple(ValueName(Kind.VALUE, n.name) for n in outs)
        segments.append(Segment(len(segments), units, inputs, names, source.key))
    values = {n.name: n.meta["val"] for n in [*crossing, *extra]}
    results = tuple(ValueName(Kind.VALUE, n.name) for n in program.results)
    return Segments(tuple(segments), sources, results, values, exchanges=tuple(exchanges))


def _make_exchange(node: fx.Node, after: int) -> Exchanged:
    """Return an exchange of the program as it stands behind a segment."""
    sent, kind, axes, dim, _, *to = node.args
    names = (ValueName(Kind.VALUE, n.name) for n in (sent, node))
    return Exchanged(
        kind, tuple(axes.split(",")), dim, after, *names, Argument.of(sent.meta["val"], "value"),
        *(to or [0]),
    )  # fmt: skip


def _materialise_results(program: Program, facts: _Facts, home: dict, bounds: list) -> list[fx.Node]:
    """Give each result that is a view, a leaf or an input a copy, so that no segment returns an alias.

    The copy is made in the last segment; that of a written leaf's new value where the unit that it depends on
    is read first.
    """
    output, written = program.graph.output_node(), set(program.outputs.writes.values())
    results, extra = [], []
    for number, result in enumerate(program.results):
        others = {storage_id(t) for other in results for t in tensors_of(other)}
        if result in home and others.isdisjoint(storage_id(t) for t in tensors_of(result)):
            results.append(result)
            continue
        with program.graph.inserting_before(output):
            copy = program.graph.call_function(torch.ops.aten.clone.default, (result,))
        value = result.meta["val"]
        copy.meta["val"] = torch.empty_like(value, requires_grad=value.requires_grad)
        home[copy] = len(bounds) - 1
        if number in written and result in facts.lazy:
            units, sources = facts.units[result], [home[n] for n in _closure(copy, facts) if n in home]
            segments = [i for i, (_, read) in enumerate(bounds) if read is not None]
            first = [i for i in segments if units <= set(bounds[i][1])] if units or sources else []
            earliest = max([*first[:1], *sources], default=home[copy])
            home[copy] = next(i for i in segments if i >= earliest)
        extra.append(copy)
        results.append(copy)
    output.args = (results,)
    return extra
