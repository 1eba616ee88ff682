"""Split: Program -> Segments, one for each run of the program between the first uses of two units.

What is lazy (views of a value, and whatever depends on the leaves of one unit alone) is made again
in each segment that reads it, so that neither ever crosses a cut. What is left, the *main* nodes,
is cut where a node first reads a leaf of another unit; between the last read of one unit and the
first of the next, where the fewest bytes cross.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import Input, Program, describe, storage_id
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.canonical import Source, extract
from fnshard.compiler.kernels.derived import Derived, derived
from fnshard.layout.spec import LayoutSpec


@dataclass(frozen=True)
class Segment:
    """One run of the program.

    `inputs`, `outputs`: printed as "leaf:layers.0.w", "batch:0", "key:key0", "mul_3"; `source`:
    key of the distinct code; `units`: whose leaves it reads (those that are gathered or reduced).
    """

    index: int
    units: tuple[str, ...]
    inputs: tuple[ValueName, ...]
    outputs: tuple[ValueName, ...]
    source: str

    @property
    def leaves(self) -> tuple[str, ...]:
        """Paths of the leaves it reads."""
        return tuple(n.path for n in self.inputs if n.kind is Kind.LEAF)


@dataclass(frozen=True)
class Segments:
    """The cut program.

    `sources`: the distinct codes, each shared by all segments equal to it. `alike`: written leaves whose new
    values are the same on all ranks.
    """

    segments: tuple[Segment, ...]
    sources: Mapping[str, Source]
    results: tuple[ValueName, ...]
    values: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    alike: frozenset[str] = frozenset()

    def as_text(self) -> str:
        """One line per segment: what it reads, what crosses out of it."""
        names = {key: f"k{i}" for i, key in enumerate(self.sources)}
        lines = []
        for s in self.segments:
            out = ", ".join(f"{o} {describe(self.values[o])}" for o in s.outputs)
            reads = ", ".join(i for i in s.inputs if i.kind is not Kind.LEAF)
            lines.append(f"{s.index}: {names[s.source]}[{'+'.join(s.units)}]({reads}) -> {out}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


def split(program: Program, specs: Mapping[str, LayoutSpec], cuts: frozenset[str]) -> Segments:
    """Cut `program`; `cuts` are the paths whose reading matters (gathered or reduced leaves)."""
    alike = _alike(program, specs)
    facts = _classify(program, {p: specs[p].unit for p in cuts})
    order = _order(program, facts)
    bounds = _bounds(order, facts, program)
    return replace(_segments(program, facts, order, bounds), alike=alike)


def _alike(program: Program, specs: Mapping[str, LayoutSpec]) -> frozenset[str]:
    """Written leaves whose new values rest on leaves alone: counters, averages of leaves."""
    if not program.outputs.writes:
        return frozenset()
    inputs = zip(program.placeholders, program.inputs, strict=True)
    same = {
        n: None
        for n, i in inputs
        if i.kind == "constant" or (i.kind == "leaf" and specs[i.name].aggregated != "local")
    }
    rests = derived(program.graph, same)
    return frozenset(p for p, index in program.outputs.writes.items() if program.results[index] in rests)


# ------------------------------------------------------------------ which nodes are lazy


@dataclass(frozen=True)
class _Facts:
    """What cutting needs to know of each node.

    `units`: those it reads, itself or through lazy nodes. `lazy`: made again where they are read. `deferred`:
    small derived values, made once: by unit where they rest on one (`terms`), else on demand.
    """

    inputs: Mapping[fx.Node, Input]
    units: Mapping[fx.Node, frozenset[str]]
    lazy: set[fx.Node]
    deferred: set[fx.Node]
    terms: Mapping[str, list[fx.Node]]


def _classify(program: Program, unit_of: Mapping[str, str]) -> _Facts:
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    leaves = {n: unit_of.get(i.name) for n, i in inputs.items() if i.kind == "leaf"}
    rests = derived(program.graph, leaves, [n for n, i in inputs.items() if i.kind == "constant"])
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    lazy: set[fx.Node] = set()
    for node in calls:
        if node.target is operator.getitem:  # it stays with its producer
            lazy.update([node] if node.args[0] in lazy else [])
        elif (node in rests and len(rests.units(node)) <= 1) or _is_view(node):
            lazy.add(node)
    terms = _find_terms(calls, rests, lazy)
    lazy -= {n for of_unit in terms.values() for n in of_unit}
    deferred = _find_deferred(calls, rests, lazy, terms)
    units = {n: frozenset([u] if (u := leaves.get(n)) else []) for n in inputs}
    for node in calls:
        reads = (units[n] for n in node.all_input_nodes if n in lazy or n in inputs)
        units[node] = frozenset().union(*reads)
    return _Facts(inputs, units, lazy, deferred, terms)


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


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Tensor)]


def _is_view(node: fx.Node) -> bool:
    outs = {storage_id(t) for t in _tensors(node)}
    ins = {storage_id(t) for n in node.all_input_nodes for t in _tensors(n)}
    return bool(outs) and outs <= ins


# ------------------------------------------------------------------ order and cuts


def _order(program: Program, facts: _Facts) -> list[fx.Node]:
    """Main nodes in program order; terms right after their unit is first read, sums on demand."""
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
            for result in _results(node):
                if result not in facts.lazy:
                    place(result)

    wanted = {n for r in program.results for n in [r, *_closure(r, facts)]}
    for node in program.graph.nodes:
        if node.op != "call_function" or node in facts.lazy:
            continue
        if node in facts.deferred:
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


def _bounds(order: list[fx.Node], facts: _Facts, program: Program) -> list[tuple[int, tuple[str, ...]]]:
    """(first position, units) of each segment."""
    cost, forbidden = _crossing(order, facts, program)
    cuts: list[_Cut] = []
    first: tuple[str, ...] = ()
    last_read, current = -1, frozenset[str]()
    for position, node in enumerate(order):
        reads = facts.units[node]
        if not reads:
            continue
        if last_read < 0:
            first = tuple(sorted(reads))
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
    return [(0, first), *((p, c.units) for p, c in zip(_place(cuts), cuts, strict=True))]


def _family(units: frozenset[str]) -> str:
    """Units that differ in numbers alone are of one family: blocks that should be equal code."""
    return "+".join(sorted({re.sub(r"\d+", "#", u) for u in units}))


def _place(cuts: list[_Cut]) -> list[int]:
    """Of equally cheap positions, the one that makes blocks alike.

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
            delta[i + 1] += sum(t.numel() * t.element_size() for t in _tensors(node))
            delta[until + 1] -= sum(t.numel() * t.element_size() for t in _tensors(node))
    cost, total = [], 0
    for d in delta[: end + 1]:
        total += d
        cost.append(total)
    return cost, _forbidden(position)


def _forbidden(position: Mapping[fx.Node, int]) -> set[int]:
    """Between an op of several results and these: what crosses is a tensor.

    A result of a lazy op makes its own op again, wherever it is.
    """
    out: set[int] = set()
    for node, i in position.items():
        for result in _results(node):
            out.update(range(i + 1, position.get(result, i) + 1))
    return out


# ------------------------------------------------------------------ building


def _segments(program: Program, facts: _Facts, order: list[fx.Node], bounds: list) -> Segments:
    starts = [b[0] for b in bounds] + [len(order)]
    home = {n: i for i in range(len(bounds)) for n in order[starts[i] : starts[i + 1]]}
    extra = _materialise_results(program, facts, home, bounds)
    crossing: dict[fx.Node, None] = {}
    for node in order:
        for source in _closure(node, facts):
            if source in home and home[source] != home[node]:
                crossing[source] = None
    for result in program.results:
        if result in home:
            crossing[result] = None
    for node in extra:
        for source in _closure(node, facts):
            if source in home and home[source] != home[node]:
                crossing[source] = None
    segments, sources = [], {}
    for i, (start, units) in enumerate(bounds):
        nodes = order[start : starts[i + 1]] + [n for n in extra if home[n] == i]
        outs = [n for n in nodes if n in crossing]
        source, inputs = extract(nodes, outs, facts.lazy, facts.inputs)
        sources.setdefault(source.key, source)
        names = tuple(ValueName(Kind.VALUE, n.name) for n in outs)
        segments.append(Segment(i, units, inputs, names, source.key))
    values = {n.name: n.meta["val"] for n in [*crossing, *extra]}
    results = tuple(ValueName(Kind.VALUE, n.name) for n in program.results)
    return Segments(tuple(segments), sources, results, values)


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
        copy.meta["val"] = torch.empty_like(
            value, requires_grad=value.requires_grad and value.is_floating_point()
        )
        home[copy] = len(bounds) - 1
        if number in written and result in facts.lazy:
            units, made = facts.units[result], [home[n] for n in _closure(copy, facts) if n in home]
            first = [i for i, (_, read) in enumerate(bounds) if units <= set(read)] if units or made else []
            home[copy] = max([*first[:1], *made], default=home[copy])
        extra.append(copy)
        results.append(copy)
    output.args = (results,)
    return extra


def _aliases_another(node: fx.Node, others: list[fx.Node]) -> bool:
    mine = {storage_id(t) for t in _tensors(node)}
    return any(mine & {storage_id(t) for t in _tensors(o)} for o in others)
