"""Split: Program -> Segments, one for each run of the program between the first uses of two units.

What is lazy (views of a value, and whatever depends on the leaves of one unit alone) is made again
in each segment that reads it, so that neither ever crosses a cut. What is left, the *main* nodes,
is cut where a node first reads a leaf of another unit; between the last read of one unit and the
first of the next, where the fewest bytes cross. Exchanges stand between segments: each right before its
first reader, together with all others whose values are there by then; a permutation where the program has it,
and what reads a permutation begins a segment: so it travels during what stands between.
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
from fnshard.compiler.kernels.canonical import Argument, extract
from fnshard.compiler.kernels.derived import Derived, derived, has_own_gradient
from fnshard.compiler.kernels.segments import Exchanged, Segment, Segments
from fnshard.layout.spec import LayoutSpec


def split(
    program: Program, specs: Mapping[str, LayoutSpec], cuts: frozenset[str], data_axes: tuple[str, ...] = ()
) -> Segments:
    """Cut `program`.

    Args:
        cuts: the paths whose reading matters (gathered or reduced leaves).
        data_axes: of the mesh, those of one rank left out.
    """
    alike = _alike(program, specs, data_axes)
    facts = _classify(program, {p: specs[p].unit for p in cuts})
    order = _order(program, facts)
    bounds = _bounds(order, facts, program)
    return replace(_segments(program, facts, order, bounds), alike=alike)


def _alike(program: Program, specs: Mapping[str, LayoutSpec], data_axes: tuple[str, ...]) -> frozenset[str]:
    """Written leaves whose new values rest on leaves, or on what all ranks have exchanged, alone: counters,
    averages of leaves, statistics of the whole batch. What rests on a leaf that ranks write otherwise is
    alike in their first micro-batch alone.
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
    while True:
        rests = derived(program.graph, same)
        alike = frozenset(p for p, value in writes.items() if value in rests)
        written_otherwise = [n for n in same if n in inputs and inputs[n].name in writes.keys() - alike]
        if not written_otherwise:
            return alike
        for node in written_otherwise:
            del same[node]


@dataclass(frozen=True)
class _Facts:
    """The facts of each node that cutting needs.

    `units`: those it reads, itself or through lazy nodes. `lazy`: made again where they are read. `deferred`:
    made once: small derived values, by unit where they rest on one (`terms`), else on demand; exchanges and
    derived values with a gradient of their own, on demand.
    """

    inputs: Mapping[fx.Node, Input]
    units: Mapping[fx.Node, frozenset[str]]
    lazy: set[fx.Node]
    deferred: set[fx.Node]
    terms: Mapping[str, list[fx.Node]]
    exchanges: list[fx.Node]


def _classify(program: Program, unit_of: Mapping[str, str]) -> _Facts:
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    leaves = {n: unit_of.get(i.name) for n, i in inputs.items() if i.kind == "leaf"}
    rests = derived(program.graph, leaves, [n for n, i in inputs.items() if i.kind in ("constant", "axis")])
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    lazy: set[fx.Node] = set()
    for node in calls:
        if node.target is operator.getitem:  # it stays with its producer
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
    """Small values of one unit's leaves that main nodes rest on, by unit: what can cross instead of leaves.

    A large one that is made of small ones alone (a norm, expanded) is made again from these.
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
    """Terms, and what is made of terms of several units (their sum): wherever it is read first."""
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


def _order(program: Program, facts: _Facts) -> list[fx.Node]:
    """Main nodes in program order; terms after the first read of their unit, sums, exchanges on demand."""
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    home: set[str] = set()

    def place(node: fx.Node) -> None:
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
    """The tensors of an op that returns several: no cut comes between it and these."""
    return [n for n in node.users if n.target is operator.getitem]


def _closure(node: fx.Node, facts: _Facts) -> list[fx.Node]:
    """The main and deferred nodes and placeholders that `node` reads, through lazy ones."""
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
    """A boundary to place: between `last_read` (of unit set `before`) and `first_read` (of `after`)."""

    before: str
    after: str
    units: tuple[str, ...]
    last_read: int
    first_read: int
    options: tuple[int, ...]  # the cheapest positions, in order


Units = tuple[str, ...] | None  # that a segment reads; None of a run of exchanges


def _bounds(order: list[fx.Node], facts: _Facts, program: Program) -> list[tuple[int, Units]]:
    """First position and units of each segment and each run of exchanges."""
    cost, forbidden = _crossing(order, facts, program)
    cuts: list[_Cut] = []
    firsts: dict[int, Units] = {0: ()}
    first, last_read, current = 0, -1, frozenset[str]()
    arrivals = _arrivals(order, facts)
    for position, node in enumerate(order):
        exchanges = [n.target is EXCHANGE for n in (node, order[position - 1])]
        if position and (exchanges[0] != exchanges[1] or node in arrivals):
            first, last_read = position, -1
            firsts[first] = None if node.target is EXCHANGE else tuple(sorted(current))
        reads = facts.units[node]
        if not reads:
            continue
        if last_read < 0:
            firsts[first] = tuple(sorted(reads))
        elif not reads <= current:
            options = [c for c in range(last_read + 1, position + 1) if c not in forbidden]
            least = min(cost[c] for c in options)
            cheapest = tuple(c for c in options if cost[c] == least)
            cuts.append(
                _Cut(_family(current), _family(reads), tuple(sorted(reads)), last_read, position, cheapest)
            )
        if last_read < 0 or not reads <= current:
            current = reads
        last_read = position
    placed = dict(zip(_place(cuts), (c.units for c in cuts), strict=True))
    if order and order[-1].target is EXCHANGE:  # what copies its result
        firsts[len(order)] = ()
    return sorted((firsts | placed).items())


def _arrivals(order: list[fx.Node], facts: _Facts) -> set[fx.Node]:
    """The first reader of each permutation's result."""
    first: dict[fx.Node, fx.Node] = {}
    if any(map(permutes, order)):
        for node in order:
            for source in _closure(node, facts):
                if permutes(source):
                    first.setdefault(source, node)
    return set(first.values())


def _family(units: frozenset[str]) -> str:
    """Units that differ in numbers alone are of one family: blocks that should be equal code."""
    return "+".join(sorted({re.sub(r"\d+", "#", u) for u in units}))


def _place(cuts: list[_Cut]) -> list[int]:
    """Choose, of equally cheap positions, the one that makes blocks alike.

    Inside a family (block to block) the earliest. Into its first and out of its last block, where the
    first and the last block then begin and end as the others do.
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


def _crossing(order: list[fx.Node], facts: _Facts, program: Program) -> tuple[list[int], set[int]]:
    """Bytes alive across a cut before each position, and the positions where a cut is forbidden."""
    position = {n: i for i, n in enumerate(order)}
    end = len(order)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for source in _closure(node, facts):
            last[source] = i
    for result in program.results:
        for source in [result, *_closure(result, facts)]:
            last[source] = end
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
    # Between an op of several results and these: what crosses is a tensor. A result of a lazy op makes its
    # own op again, wherever it is.
    spans = [range(i + 1, position.get(r, i) + 1) for node, i in position.items() for r in _results(node)]
    return cost, {p for span in spans for p in span}


def _segments(program: Program, facts: _Facts, order: list[fx.Node], bounds: list) -> Segments:
    starts = [b[0] for b in bounds] + [len(order)]
    home = {n: i for i in range(len(bounds)) for n in order[starts[i] : starts[i + 1]]}
    extra = _materialise_results(program, facts, home, bounds)
    crossing: dict[fx.Node, None] = {}
    for node in [*order, *extra]:
        for source in _closure(node, facts):
            if source in home and home[source] != home[node]:
                crossing[source] = None
    crossing |= dict.fromkeys(r for r in program.results if r in home)
    segments, sources, exchanges = [], {}, []
    for i, (start, units) in enumerate(bounds):
        nodes = order[start : starts[i + 1]] + [n for n in extra if home[n] == i]
        if units is None:
            exchanges += [_exchanged(n, len(segments) - 1) for n in nodes]
            continue
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


def _exchanged(node: fx.Node, after: int) -> Exchanged:
    sent, kind, axes, dim, _, *to = node.args
    names = (ValueName(Kind.VALUE, n.name) for n in (sent, node))
    return Exchanged(
        kind, tuple(axes.split(",")), dim, after, *names, Argument.of(sent.meta["val"], "value"),
        *(to or [0]),
    )  # fmt: skip


def _materialise_results(program: Program, facts: _Facts, home: dict, bounds: list) -> list[fx.Node]:
    """A result that is a view, a leaf or an input gets a copy: no segment returns an alias.

    It is made in the last segment; a written leaf's new value where the unit that it rests on is read first.
    """
    output, written = program.graph.output_node(), set(program.outputs.writes.values())
    results, extra = [], []
    for number, result in enumerate(program.results):
        if result in home and not _aliases_another(result, results):
            results.append(result)
            continue
        with program.graph.inserting_before(output):
            copy = program.graph.call_function(torch.ops.aten.clone.default, (result,))
        value = result.meta["val"]
        copy.meta["val"] = torch.empty_like(value, requires_grad=value.requires_grad)
        home[copy] = len(bounds) - 1
        if number in written and result in facts.lazy:
            units, made = facts.units[result], [home[n] for n in _closure(copy, facts) if n in home]
            segments = [i for i, (_, read) in enumerate(bounds) if read is not None]
            first = [i for i in segments if units <= set(bounds[i][1])] if units or made else []
            earliest = max([*first[:1], *made], default=home[copy])
            home[copy] = next(i for i in segments if i >= earliest)
        extra.append(copy)
        results.append(copy)
    output.args = (results,)
    return extra


def _aliases_another(node: fx.Node, others: list[fx.Node]) -> bool:
    mine = {storage_id(t) for t in tensors_of(node)}
    return any(mine & {storage_id(t) for t in tensors_of(o)} for o in others)
