"""Reductions: an update as `place` types it, its exchanges written as sums and maxima over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.ir.program import ANY_STRIDES, Input, Outputs, Program, propagate
from fnshard.compiler.place.place import place_values
from fnshard.compiler.place.placement import Placement
from fnshard.compiler.place.strategies import Axis, Elsewhere
from fnshard.compiler.update.splits import Splits, name_of
from fnshard.compiler.update.trace import Traced
from fnshard.layout.partition import block_shape

aten = torch.ops.aten
How = Literal["sum", "max"]


@dataclass(frozen=True, eq=False)
class Placed:
    """An update as each rank runs it: a graph with `reduced` and `Elsewhere` nodes.

    Args:
        inputs: names of the placeholders.
        outputs: names of the results.
        where: by node of the update, the placement over each flat axis.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    where: Mapping[fx.Node, Mapping[str, Placement]]


def reduced(x: Tensor, how: How, axes: tuple[str, ...]) -> Tensor:
    """Stand for a reduction in a graph; no kernel runs it."""
    return x.clone()


def place_update(traced: Traced, graph: fx.Graph, splits: Splits) -> Placed:
    """Place a graph of the update's inputs and results over all axes that split something."""
    env: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, env))
    for node, own in env.items():
        own.meta.setdefault("origin", node.name)
        own.target = ANY_STRIDES.get(own.target, own.target)
    kinds = {name: "leaf" if name in splits.layouts else "batch" for name in traced.inputs}
    inputs = tuple(Input(kinds[name], name) for name in traced.inputs)
    outputs = Outputs(None, None, None, writes={name: i for i, name in enumerate(traced.outputs)})
    program = Program(copy, inputs, {}, outputs, traced.fake_mode)
    now = dict(env)
    where: dict[fx.Node, dict[str, Placement]] = {node: {} for node in env}
    for axes in splits.flat:
        own = {Input("leaf", n): of[name_of(axes)] for n, of in splits.of.items() if name_of(axes) in of}
        axis = Axis(name_of(axes), splits.mesh.axes_size(axes), own, residual="whole", update=True)
        program, values = place_values(program, axis)
        for node, current in now.items():
            if (value := values.get(current)) is not None:
                where[node][axis.name] = value.placement
                now[node] = value.node
    with traced.fake_mode, torch.no_grad():
        graph, names = as_reductions(program, splits)
    return Placed(graph, names, traced.outputs, where)


def as_reductions(program: Program, splits: Splits) -> tuple[fx.Graph, tuple[str, ...]]:
    """Write every exchange as a reduction; nodes that are equal become one."""
    graph, env, known = fx.Graph(), {}, {}
    names = [i.name if i.kind != "axis" else f"index.{i.name}" for i in program.inputs]
    fakes, cut_out = [], any(isinstance(n.target, Elsewhere) for n in program.graph.nodes)
    for name, node in zip(names, program.placeholders, strict=True):
        env[node] = known[name] = graph.placeholder(node.name)
        value = node.meta["val"]
        if name in splits.apart and cut_out:  # else it is read as if it were whole
            value = value.new_empty(block_shape(value.shape, splits.layouts[name], splits.mesh))
        fakes.append(value)
    for axes in splits.flat:
        name = f"index.{name_of(axes)}"
        if name not in known:
            known[name] = graph.placeholder(name.replace(".", "_").replace(",", "_"))
            names.append(name)
            fakes.append(torch.empty((), dtype=torch.int64))

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        key = target, repr((args, kwargs))
        if key not in known:
            known[key] = graph.call_function(target, args, kwargs)
        return known[key]

    def reduce(x: fx.Node, how: How, axes: str) -> fx.Node:
        over = axes.split(",")
        if x.target is reduced and x.args[1] == how:
            x, over = x.args[0], [*x.args[2], *over]
        return call(reduced, x, how, splits.mesh.ordered(over))

    def gather(x: fx.Node, local: Tensor, axes: str, dim: int, ranks: int) -> fx.Node:
        """The sum of what is zero but for each rank's own part."""
        mine = call(
            aten.eq.Tensor, call(aten.arange.default, ranks, device=local.device), known[f"index.{axes}"]
        )
        mine = call(aten.reshape.default, mine, [ranks, *[1] * (local.dim() - dim)])
        if local.dtype == torch.bool:
            x = call(aten.to.dtype, x, torch.uint8)
        parts = call(aten.where.ScalarOther, mine, call(aten.unsqueeze.default, x, dim), 0)
        shape = [s * ranks if d == dim else s for d, s in enumerate(local.shape)]
        x = reduce(call(aten.reshape.default, parts, shape), "sum", axes)
        x.meta["gathers"] = node.meta.get("origin")
        return call(aten.to.dtype, x, torch.bool) if local.dtype == torch.bool else x

    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is OUTGOING:
            env[node] = env[node.args[0]]
        elif node.target is EXCHANGE:
            sent, kind, axes, dim, ranks = node.args
            x, local = env[sent], sent.meta["val"]
            users = list(node.users)
            of_maximum = [u.target for u in users] == [aten.amax.default] and users[0].args[1] == [0]
            if kind == "all_gather" and of_maximum and x.target is aten.unsqueeze.default:
                x, boolean = x.args[0], local.dtype == torch.bool
                top = reduce(call(aten.to.dtype, x, torch.uint8) if boolean else x, "max", axes)
                env[users[0]] = call(aten.to.dtype, top, torch.bool) if boolean else top
            elif kind == "psum":
                env[node] = reduce(x, "sum", axes)
            else:
                env[node] = gather(x, local, axes, dim, ranks)
            if node in env:
                env[node].meta["origin"] = node.meta.get("origin")
        elif node not in env:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = call(node.target, *args, **kwargs)
            env[node].meta.setdefault("origin", node.meta.get("origin"))
    graph.output(tuple(env[n] for n in program.results))
    graph.eliminate_dead_code()
    propagate(graph, fakes)
    return graph, tuple(names)
