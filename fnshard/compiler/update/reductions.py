"""Place an update over the axes that split it, and write its exchanges as sums and maxima over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.ir.program import ANY_STRIDES, Input, Outputs, Program, eliminate_dead_code
from fnshard.compiler.place.place import Placer
from fnshard.compiler.place.placement import REPLICATED, Placement, local_shape
from fnshard.compiler.place.strategies import Axis, Elsewhere
from fnshard.compiler.update.splits import Splits, bytes_of, name_of
from fnshard.compiler.update.trace import PARAM, TracedUpdate
from fnshard.layout.partition import block_shape

aten = torch.ops.aten
How = Literal["sum", "max"]


@dataclass(frozen=True, eq=False)
class PlacedUpdate:
    """An update as each rank runs it.

    Args:
        splits: how its tensors are split.
        outputs: names of the results.
        where: the placements of each node of the update, by flat axis.
        program: the update, placed over all flat axes but the last.
        last: the walk over the last flat axis; None if there is no such axis.
    """

    splits: Splits
    outputs: tuple[str, ...]
    where: Mapping[fx.Node, Mapping[str, Placement]]
    program: Program
    last: Placer | None

    @cached_property
    def walked(self) -> list[fx.Node]:
        """The nodes that ranks run, exchanges included, before their values are propagated."""
        graph = self.program.graph if self.last is None else self.last.graph
        eliminate_dead_code(graph)
        return list(graph.nodes)

    def shape_of(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return the shape of a rank's part of a walked value; None within an exchange."""
        if self.last is None:
            return tuple(node.meta["val"].shape)
        placement, whole = self.last.record.values.get(node, (None, None))
        return None if whole is None else local_shape(whole.shape, placement, self.last.axis.ranks)

    @property
    def estimated_bytes(self) -> float:
        """An estimate of the bytes that a rank sends along a single flat axis; 0 for none or several."""
        if self.last is None or len(self.splits.flat) > 1:
            return 0.0
        # A gather becomes a sum too (`write_reductions`), so that each conversion sends its whole twice.
        ranks, record, alive = self.last.axis.ranks, self.last.record, set(self.walked)
        wholes = [
            record.values[new][1]
            for _, new, now, _ in record.conversions
            if new in alive and now != REPLICATED
        ]
        return 2 * (ranks - 1) / ranks * sum(map(bytes_of, wholes))

    @cached_property
    def _finished(self) -> tuple[fx.Graph, tuple[str, ...]]:
        """The graph, with exchanges written as reductions, and the names of its placeholders."""
        program = self.program if self.last is None else self.last.finish()
        with program.fake_mode, torch.no_grad():
            return write_reductions(program, self.splits)

    @property
    def graph(self) -> fx.Graph:
        """The graph, checked, with `reduced` and `Elsewhere` nodes."""
        return self._finished[0]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the placeholders."""
        return self._finished[1]


def reduced(x: Tensor, how: How, axes: tuple[str, ...]) -> Tensor:
    """Mark a reduction in a graph; no kernel runs this function."""
    return x.clone()


def place_update(traced: TracedUpdate, graph: fx.Graph, splits: Splits) -> PlacedUpdate:
    """Place a graph of the update's inputs and results over all axes that split something."""
    # An elementwise update needs no walk: each rank runs it on its block. But a constant of the leaf's shape
    # has to be cut as the leaf is, so that its update is placed in full.
    has_constants = any(value.dim() for value in traced.constants.values())
    if graph is traced.graph and traced.is_elementwise and not splits.apart and not has_constants:
        traced = traced.resize(block_shape(splits.shapes[PARAM], splits.layouts[PARAM], splits.mesh))
        graph, splits = traced.graph, replace(splits, flat=())

    # Make a program of the graph, as `place` takes it: leaves, and a batch of numbers and constants.
    env: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, env))
    for node, copied in env.items():
        copied.meta.setdefault("origin", node.name)
        # Blocks have other strides than the leaf.
        copied.target = ANY_STRIDES.get(copied.target, copied.target)
    kinds = {name: "leaf" if name in splits.layouts else "batch" for name in traced.inputs}
    inputs = tuple(Input(kinds[name], name) for name in traced.inputs)
    outputs = Outputs(None, None, None, writes={name: i for i, name in enumerate(traced.outputs)})
    program = Program(copy, inputs, {}, outputs, traced.fake_mode)

    # Place it over one axis after another, and note the placement of each node of the update.
    now = dict(env)
    where: dict[fx.Node, dict[str, Placement]] = {node: {} for node in env}
    last = None
    for axes in splits.flat:
        program = program if last is None else last.finish()
        name = name_of(axes)
        placements = {Input("leaf", n): of[name] for n, of in splits.of.items() if name in of}
        axis = Axis(name, splits.mesh.axes_size(axes), placements, residual="whole", update=True)
        last = Placer.walk_over(program, axis)
        for node, current in now.items():
            if (value := last.values.get(current)) is not None:
                where[node][axis.name] = value.placement
                now[node] = value.node
    return PlacedUpdate(splits, traced.outputs, where, program, last)


def is_maximum(exchange: fx.Node) -> bool:
    """Return whether an exchange gathers parts of a maximum, which its only reader takes."""
    # `Writer.convert` writes it as unsqueeze, gather and amax.
    sent, kind, *_ = exchange.args
    users = list(exchange.users)
    takes_maximum = [u.target for u in users] == [aten.amax.default] and users[0].args[1] == [0]
    sent = sent.args[0] if sent.target is OUTGOING else sent
    return kind == "all_gather" and takes_maximum and sent.target is aten.unsqueeze.default


def write_reductions(program: Program, splits: Splits) -> tuple[fx.Graph, tuple[str, ...]]:
    """Write every exchange as a reduction, and merge equal nodes."""
    # The inputs, and this rank's number along each axis.
    graph, env, known = fx.Graph(), {}, {}
    names = [i.name if i.kind != "axis" else f"index.{i.name}" for i in program.inputs]
    has_region = any(isinstance(n.target, Elsewhere) for n in program.graph.nodes)
    for name, node in zip(names, program.placeholders, strict=True):
        env[node] = known[name] = graph.placeholder(node.name)
        value = node.meta["val"]
        if name in splits.apart and has_region:  # otherwise it is read as if it were whole
            value = value.new_empty(block_shape(value.shape, splits.layouts[name], splits.mesh))
        env[node].meta["val"] = value
    for axes in splits.flat:
        name = f"index.{name_of(axes)}"
        if name not in known:
            known[name] = graph.placeholder(name.replace(".", "_").replace(",", "_"))
            known[name].meta["val"] = torch.empty((), dtype=torch.int64)
            names.append(name)

    def write(target: Any, args: Any, kwargs: Any, like: fx.Node | None = None) -> fx.Node:
        """Write a node, once for equal ones; its value is that of the node `like`, or else computed."""
        key = target, repr((args, kwargs))
        if key not in known:
            known[key] = node = graph.call_function(target, args, kwargs)
            if like is None:
                args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
                node.meta["val"] = target(*args, **kwargs)
            else:
                node.meta["val"] = like.meta["val"]
        return known[key]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return write(target, args, kwargs)

    def reduce(x: fx.Node, how: How, axes: str) -> fx.Node:
        over = axes.split(",")
        # A sum of a sum over other axes is one sum over all of them.
        if x.target is reduced and x.args[1] == how:
            x, over = x.args[0], [*x.args[2], *over]
        return call(reduced, x, how, splits.mesh.ordered(over))

    def gather(x: fx.Node, local: Tensor, axes: str, dim: int, ranks: int) -> fx.Node:
        """Write a gather as a sum: each rank adds its own part, and zeros for the others'."""
        numbers = call(aten.arange.default, ranks, device=local.device)
        is_own = call(aten.eq.Tensor, numbers, known[f"index.{axes}"])
        is_own = call(aten.reshape.default, is_own, [ranks, *[1] * (local.dim() - dim)])
        if local.dtype == torch.bool:
            x = call(aten.to.dtype, x, torch.uint8)
        parts = call(aten.where.ScalarOther, is_own, call(aten.unsqueeze.default, x, dim), 0)
        shape = [s * ranks if d == dim else s for d, s in enumerate(local.shape)]
        x = reduce(call(aten.reshape.default, parts, shape), "sum", axes)
        return call(aten.to.dtype, x, torch.bool) if local.dtype == torch.bool else x

    # The nodes: an exchange becomes a sum or a maximum over ranks, all others are copied.
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is OUTGOING:
            env[node] = env[node.args[0]]
        elif node.target is EXCHANGE:
            sent, kind, axes, dim, ranks = node.args
            x, local = env[sent], sent.meta["val"]
            if is_maximum(node):
                # The unsqueeze before it is undone, and the amax behind it is the maximum itself.
                x, is_boolean = x.args[0], local.dtype == torch.bool
                top = reduce(call(aten.to.dtype, x, torch.uint8) if is_boolean else x, "max", axes)
                (user,) = node.users
                env[user] = call(aten.to.dtype, top, torch.bool) if is_boolean else top
            elif kind == "psum":
                env[node] = reduce(x, "sum", axes)
            else:
                env[node] = gather(x, local, axes, dim, ranks)
            if node in env:
                env[node].meta["origin"] = node.meta.get("origin")
        elif node not in env:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = write(node.target, args, kwargs, like=node)
            env[node].meta.setdefault("origin", node.meta.get("origin"))
    graph.output(tuple(env[n] for n in program.results))
    graph.eliminate_dead_code()
    return graph, tuple(names)
