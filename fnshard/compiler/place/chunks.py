"""Chunks: exchanges of rows, and the products beside them, in parts: one travels while another computes.

Async tensor parallelism (Wang et al., ASPLOS 2023). A *region* begins where ranks gather rows, or where a
product makes rows that are then summed and scattered; it goes on as long as rows are computed one by one, up
to a reduce-scatter if one follows, as behind an MLP. Its rows are cut as over a mesh axis of as many ranks as
there are chunks: the rules of `place` say what each op of the region is of a part.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.ir.program import OpOverload, Program, eliminate_dead_code, propagate
from fnshard.compiler.place.placement import REPLICATED, Split, divides, local_shape
from fnshard.compiler.place.rules import rule_of
from fnshard.compiler.place.ways import Call, Way, local_arguments, tensors_of

aten = torch.ops.aten
# Products, by which of their arguments has the rows; and what only shows the same numbers otherwise.
ROWS = {aten.linear.default: 0, aten.mm.default: 0, aten.matmul.default: 0, aten.addmm.default: 1}
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)
Chunks = int | Mapping[str, int]  # of all regions, or by their keys


@dataclass(frozen=True)
class OfChunk:
    """What a node of a region is: how its value is cut; of an op its call, its way and what runs instead."""

    split: Split
    call: Call | None = None
    way: Way | None = None
    body: fx.Graph | None = None


@dataclass(frozen=True)
class Region:
    """What is computed chunk by chunk.

    `key`: equal of the regions of equal blocks. `start`: the value whose rows it takes, or, where `gathers`,
    the all-gather that it begins with. `steps`: its nodes in order, `start` among them.
    """

    key: str
    start: fx.Node
    steps: Mapping[fx.Node, OfChunk] = field(repr=False)
    gathers: bool

    @property
    def inside(self) -> list[fx.Node]:
        """What is there chunk by chunk alone."""
        return [n for n in self.steps if self.gathers or n is not self.start]


def regions(program: Program, count: int, data_axes: Sequence[str] = ()) -> list[Region]:
    """What can be computed in `count` chunks; no two overlap.

    Args:
        data_axes: what is exchanged over these is what `fn` itself says.
    """
    finder = _RegionFinder(count, program)
    exchanges = [
        n
        for n in program.graph.find_nodes(op="call_function", target=EXCHANGE)
        if not {*n.args[2].split(",")} & {*data_axes}
    ]
    with program.fake_mode, torch.enable_grad():
        for node in exchanges:
            sent, kind, _, dim, ranks = node.args[:5]
            if kind == "all_gather" and sent.meta["val"].shape[dim] % count == 0:
                finder.add(node, Split(dim, ranks))
        for node in exchanges:
            _, kind, _, dim, ranks = node.args[:5]
            if kind == "reduce_scatter" and node not in finder.taken and (rows := _rows_of(node)):
                finder.add(rows, Split(dim, ranks), node)
    return finder.found


def chunked(program: Program, chunks: Chunks, data_axes: Sequence[str] = ()) -> Program:
    """The program with its regions in chunks; itself where none is."""
    counts = {chunks} if isinstance(chunks, int) else {*chunks.values()}
    chosen: dict[fx.Node, tuple[Region, int]] = {}
    for count in sorted(counts - {1}, reverse=True):
        for region in regions(program, count, data_axes):
            named = isinstance(chunks, int) or chunks.get(region.key) == count
            if named and not chosen.keys() & {*region.inside}:
                chosen |= dict.fromkeys(region.inside, (region, count))
    if not chosen:
        return program
    writer = _ChunkWriter(chosen)
    with program.fake_mode, torch.enable_grad():
        for node in program.graph.nodes:
            writer.emit(node)
        eliminate_dead_code(writer.graph)
        propagate(writer.graph, [node.meta["val"] for node in program.placeholders])
    return replace(program, graph=writer.graph)


# ------------------------------------------------------------------ finding


@dataclass
class _RegionFinder:
    count: int
    program: Program
    found: list[Region] = field(default_factory=list)
    taken: set[fx.Node] = field(default_factory=set)
    bodies: dict[Any, fx.Graph | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """`leaves`: what is made of leaves alone."""
        self.position = {n: i for i, n in enumerate(self.program.graph.nodes)}
        given = zip(self.program.placeholders, self.program.inputs, strict=True)
        self.leaves = {n for n, i in given if i.kind != "batch"}
        for node in self.program.graph.nodes:
            if node.op == "call_function" and self.leaves.issuperset(node.all_input_nodes):
                self.leaves.add(node)

    def add(self, start: fx.Node, split: Split, until: fx.Node | None = None) -> None:
        """The region from `start` on; `until`: to this exchange."""
        if start in self.taken or not divides(start.meta["val"].shape, split, self.count):
            return
        steps = _needed(self.grown(start, split), start, until)
        if any(n.target in ROWS for n in steps):
            key = "; ".join(f"{n.target} {[*t.shape]}" for n in steps for t in _tensors(n)[:1])
            self.found.append(Region(key, start, steps, gathers=until is None))
            self.taken.update(self.found[-1].inside)

    def grown(self, start: fx.Node, split: Split) -> dict[fx.Node, OfChunk]:
        """All that is computed of rows alone, in order, up to a reduce-scatter.

        What it reads beside is there before it begins, or is made of leaves: regions rest on one another in
        one direction alone.
        """
        steps, first = {start: OfChunk(split)}, self.position[start]
        queue = [(self.position[user], user) for user in start.users]
        heapq.heapify(queue)
        while queue:
            _, node = heapq.heappop(queue)
            outside = [n for n in node.all_input_nodes if n not in steps]
            early = all(self.position[n] <= first or n in self.leaves for n in outside)
            if node in steps or node in self.taken or not early:
                continue
            if (step := self.step(node, steps)) is not None:
                steps[node] = step
                if node.target is not EXCHANGE:
                    for user in node.users:
                        heapq.heappush(queue, (self.position[user], user))
        return steps

    def step(self, node: fx.Node, steps: Mapping[fx.Node, OfChunk]) -> OfChunk | None:
        """How it runs on the rows of a chunk; None where it does not."""
        if node.target in (operator.getitem, OUTGOING):
            return OfChunk(steps[node.args[0]].split)
        if node.target is EXCHANGE and node.args[1] != "reduce_scatter":
            return None
        if not isinstance(node.target, OpOverload) or (find := rule_of(node.target)) is None:
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        now = tuple(steps[n].split if n in steps else REPLICATED for n in tensors_of(node))
        call = Call(node.target, args, kwargs, node.meta["val"], now, self.count)
        for way in find(call):
            even = isinstance(way.output, Split) and all(
                divides(t.shape, way.output, self.count) for t in _tensors(node)
            )
            if way.inputs == now and even:
                if way.run is None:
                    return OfChunk(way.output, call, way)
                body = self.body(call, way)
                return body and OfChunk(way.output, call, way, body)
        return None

    def body(self, call: Call, way: Way) -> fx.Graph | None:
        """What a way runs; None where that depends on which chunk it is."""
        key = call.key, way.inputs, way.output
        if key not in self.bodies:
            inputs = zip(call.tensors, way.inputs, strict=True)
            fakes = [t.new_empty(local_shape(t.shape, p, call.ranks)) for t, p in inputs]
            index = torch.empty((), dtype=torch.int64, device=fakes[0].device)
            traced = make_fx(lambda *v: way.run(*v), tracing_mode="fake", pre_dispatch=True)
            graph = traced(index, *fakes).graph
            eliminate_dead_code(graph)
            self.bodies[key] = None if next(iter(graph.nodes)).users else graph
        return self.bodies[key]


def _needed(
    steps: Mapping[fx.Node, OfChunk], start: fx.Node, until: fx.Node | None
) -> dict[fx.Node, OfChunk]:
    """What leads to a product or a reduce-scatter, or to `until` alone."""
    kept: set[fx.Node] = set()
    for node in reversed(steps):
        last = node is until if until else node.target in ROWS or node.target is EXCHANGE
        if (last and node is not start) or kept.intersection(node.users):
            kept.add(node)
    kept |= {n for n in steps if n.target is operator.getitem and n.args[0] in kept}
    return {node: step for node, step in steps.items() if node in kept}


def _rows_of(scatter: fx.Node) -> fx.Node | None:
    """The value whose rows a product takes that are scattered then, with their dim as it is there."""
    shape, dim = scatter.args[0].meta["val"].shape, scatter.args[3]
    node = scatter.args[0]
    while node.target not in ROWS:
        alike = node.target in (OUTGOING, *VIEWS) or torch.Tag.pointwise in getattr(node.target, "tags", ())
        size = node.meta["val"].numel()
        sources = [n for n in node.all_input_nodes if alike and n.meta["val"].numel() == size]
        if not sources:
            return None
        node = sources[0]
    rows = node.args[ROWS[node.target]]
    while rows.meta["val"].shape[: dim + 1] != shape[: dim + 1]:
        if rows.target not in VIEWS:
            return None
        rows = rows.args[0]
    return rows


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


# ------------------------------------------------------------------ writing


@dataclass
class _ChunkWriter:
    """Writes the new graph. `env`: the nodes there of what is whole."""

    chosen: Mapping[fx.Node, tuple[Region, int]]
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    done: set[fx.Node] = field(default_factory=set)
    meta: dict[str, Any] = field(default_factory=dict)

    def emit(self, node: fx.Node) -> None:
        if node in self.done:
            return
        if node in self.chosen:
            self.region(*self.chosen[node])
            return
        self.done.add(node)
        for source in node.all_input_nodes:
            self.emit(source)
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)

    def region(self, region: Region, count: int) -> None:
        """All chunks, one after another; what others read of them is put together."""
        steps, start = region.steps, region.start
        self.done.update(n for n in steps if n in self.chosen)
        for source in dict.fromkeys(s for n in steps for s in n.all_input_nodes if s not in steps):
            self.emit(source)
        self.emit(start)
        split = steps[start].split
        rows = self.gathers(start, count) if region.gathers else self.slices(start, split, count)
        made = []
        for number in range(count):
            values: dict[fx.Node, Any] = {start: rows(number)}
            for node, step in steps.items():
                if node is not start:
                    values[node] = self.part(node, step, values, (number, count))
            made.append(values)
        for node, step in steps.items():
            if node not in self.env and any(user not in steps for user in node.users):
                self.env[node] = self.joined([v[node] for v in made], node, step.split)

    def gathers(self, start: fx.Node, count: int) -> Callable[[int], fx.Node]:
        """The rows of each chunk, gathered; what is sent for all of them is there before."""
        sent, kind, axes, dim, *more = start.args
        source = self.env[sent.args[0] if sent.target is OUTGOING else sent]
        size = sent.meta["val"].shape[dim] // count
        pieces = [
            self.call(aten.slice.Tensor, (source, dim, number * size, (number + 1) * size))
            for number in range(count)
        ]
        outgoing = [self.call(OUTGOING, (piece,)) for piece in pieces]
        return lambda i: self.exchange((outgoing[i], kind, axes, dim, *more), (i, count))

    def slices(self, start: fx.Node, split: Split, count: int) -> Callable[[int], fx.Node]:
        """The rows of each chunk, of all of them."""
        shape, dim = list(start.meta["val"].shape), split.dim
        dims = [split.outer, count, shape[dim] // split.outer // count]
        whole = self.call(aten.reshape.default, (self.env[start], [*shape[:dim], *dims, *shape[dim + 1 :]]))
        shape = list(local_shape(shape, split, count))

        def rows(i: int) -> fx.Node:
            return self.call(aten.reshape.default, (self.call(aten.select.int, (whole, dim + 1, i)), shape))

        return rows

    def part(
        self, node: fx.Node, step: OfChunk, values: Mapping[fx.Node, Any], chunk: tuple[int, int]
    ) -> Any:
        """What a node is of one chunk."""
        self.meta = {k: node.meta[k] for k in ("autocast", "stack_trace") if k in node.meta}
        try:
            if node.target is operator.getitem and isinstance(values[node.args[0]], list | tuple):
                return values[node.args[0]][node.args[1]]
            if node.target in (operator.getitem, OUTGOING):
                return self.call(node.target, (values[node.args[0]], *node.args[1:]))
            if node.target is EXCHANGE:
                return self.exchange((values[node.args[0]], *node.args[1:]), chunk)
            reads = [values[n] if n in values else self.env[n] for n in tensors_of(node)]
            if step.body is None:
                return self.call(node.target, *local_arguments(node, step.call, step.way, reads))
            _, *placeholders = (n for n in step.body.nodes if n.op == "placeholder")
            made = dict(zip(placeholders, reads, strict=True))
            for inner in step.body.nodes:
                if inner.op == "call_function":
                    args, kwargs = fx.map_arg((inner.args, inner.kwargs), made.__getitem__)
                    made[inner] = self.call(inner.target, args, kwargs)
            return map_aggregate(step.body.output_node().args[0], made.__getitem__)
        finally:
            self.meta = {}

    def exchange(self, args: tuple[Any, ...], chunk: tuple[int, int]) -> fx.Node:
        node = self.call(EXCHANGE, args)
        node.meta["chunk"] = chunk
        return node

    def joined(self, parts: Sequence[fx.Node], node: fx.Node, split: Split) -> fx.Node:
        """The whole value again, its rows in order."""
        whole, (dim, outer) = list(node.meta["val"].shape), (split.dim, split.outer)
        if outer == 1:
            return self.call(aten.cat.default, (list(parts), dim))
        seen = [*whole[:dim], outer, whole[dim] // outer // len(parts), *whole[dim + 1 :]]
        runs = [self.call(aten.reshape.default, (part, seen)) for part in parts]
        return self.call(aten.reshape.default, (self.call(aten.cat.default, (runs, dim + 1)), whole))

    def call(self, target: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta |= self.meta
        return node
