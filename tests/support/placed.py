"""Placed programs, run on all ranks of an axis at once: plain tensors, plain autograd, no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx

import fnshard as fs
from fnshard.compiler.frontend.exchange import EXCHANGE
from fnshard.compiler.frontend.trace import trace
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.program import Program, replay
from fnshard.compiler.place.place import Axis, Residual, place
from fnshard.compiler.place.placement import PARTIAL, Placement, Split, local_shape
from fnshard.layout.resolved import ResolvedSpecs


def cut(value: Tensor, placement: Placement | None, ranks: int, padding: float | None = None) -> list[Tensor]:
    """Return what each rank has of a whole value. It is differentiable, but for a sum: its parts are random.

    Args:
        padding: the number that fills up parts that are not even; None stands for random ones.
    """
    draw = torch.Generator().manual_seed(0)
    if placement == PARTIAL:
        some = [(9 * torch.randn(value.shape, generator=draw)).to(value.dtype) for _ in range(ranks - 1)]
        return [*some, value - sum(some)]
    if not isinstance(placement, Split):
        return [value] * ranks
    dim, outer = placement.dim, placement.outer
    blocks = value.unflatten(dim, (outer, -1))
    missing = -blocks.shape[dim + 1] % ranks
    if missing:
        more = blocks.narrow(dim + 1, 0, 1).repeat_interleave(missing, dim + 1).detach()
        if padding is not None:
            more = torch.full_like(more, padding)
        elif value.is_floating_point():  # of one sign, lest a function is not defined
            more = more * (0.5 + torch.rand(more.shape, generator=draw, dtype=value.dtype))
        blocks = torch.cat([blocks, more], dim + 1)
    parts = blocks.unflatten(dim + 1, (ranks, -1)).unbind(dim + 1)
    return [p.reshape(local_shape(value.shape, placement, ranks)) for p in parts]


def run_on_ranks(graph: fx.Graph, inputs: Sequence[Sequence[Tensor]], ranks: int) -> list[list[Any]]:
    """Run a placed graph on all ranks, node by node, and return the results of each.

    Args:
        inputs: for each placeholder what each rank has.
    """
    env: dict[fx.Node, list[Any]] = {}
    feed = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = list(next(feed))
        elif node.op == "output":
            return [[env[n][r] for n in node.args[0]] for r in range(ranks)]
        elif node.target is EXCHANGE:
            env[node] = exchange_on_ranks([env[node.args[0]][r] for r in range(ranks)], *node.args[1:])
        else:
            env[node] = []
            with ExitStack() as stack:
                for device, dtype, enabled in node.meta.get("autocast") or ():
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                for r in range(ranks):
                    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, r=r: env[n][r])
                    env[node].append(node.target(*args, **kwargs))
    raise AssertionError("a graph without an output")


def exchange_on_ranks(
    sent: list[Tensor], kind: str, axes: str, dim: int, ranks: int, to: int = 0
) -> list[Tensor]:
    """Return what each rank receives of what all have sent."""
    if kind == "permute":
        return [sent[(rank - dim) % ranks] for rank in range(ranks)]
    if kind == "all_gather":
        return [torch.cat(sent, dim)] * ranks
    if kind == "all_to_all":
        return [torch.cat(rows, to) for rows in zip(*(s.chunk(ranks, dim) for s in sent), strict=True)]
    total = torch.stack(sent).sum(0)
    return [total] * ranks if kind == "psum" else list(total.chunk(ranks, dim))


def on_ranks(placed: Any, values: Mapping[str, Tensor], inputs: Mapping[Any, Placement], ranks: int):
    """Return a placed program's inputs for each rank, cut from whole values by name."""
    out = []
    for each in placed.inputs:
        if each.kind == "axis":
            out.append([torch.tensor(r) for r in range(ranks)])
        else:
            out.append(cut(values[each.name], inputs.get(each), ranks))
    return out


def trace_whole(fn: Any, params: Mapping[str, Tensor], batch: Sequence[Tensor]) -> Program:
    """Trace `fn(params, *batch)` as one device runs it."""
    mesh = fs.make_mesh(abstract=True)
    specs = ResolvedSpecs.of(fs.presets.no_shard(params, mesh)).resolve(params)
    shapes = {p: (tuple(s.shape), s.compute_dtype) for p, s in specs.stored.items()}
    return trace(
        fn, shapes, specs.structure, specs.stored, Arguments.of(batch), device=torch.device("cpu"), mesh=mesh
    )


def assert_placed(
    program: Program,
    params: Mapping[str, Tensor],
    batch: Sequence[Tensor],
    inputs: Mapping[str, Placement],
    ranks: int = 2,
    residual: Residual = "split",
    atol: float = 1e-10,
) -> Program:
    """Place a program, assert that all ranks' loss and gradients are those of the whole one, and return it.

    Args:
        inputs: the placements of leaves and batch leaves, by name.
    """
    named = {i: inputs[i.name] for i in program.inputs if i.name in inputs}
    placed = place(program, Axis("tensor", ranks, named, residual))
    keys = {i.name: torch.tensor(1 << 40) + n for n, i in enumerate(program.inputs) if i.kind == "key"}
    rest = {str(n): v for n, v in enumerate(batch)} | dict(program.constants) | keys
    trained = [p for p in params if p in program_leaves(program)]
    grads = []
    for count in (1, ranks):
        leaves = {p: v.detach().clone().requires_grad_(v.is_floating_point()) for p, v in params.items()}
        values = {**leaves, **rest}
        if count == 1:
            loss = replay(program.graph, [values[i.name] for i in program.inputs])[program.outputs.loss]
        else:
            results = run_on_ranks(placed.graph, on_ranks(placed, values, named, ranks), ranks)
            loss = sum(r[program.outputs.loss] for r in results) / ranks
        needed = [leaves[p] for p in trained]
        found = torch.autograd.grad(loss, needed, allow_unused=True, materialize_grads=True)
        grads.append([loss, *found])
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=atol, atol=atol, equal_nan=True)
    return placed


def program_leaves(program: Program) -> set[str]:
    """Return the leaves that take gradients."""
    named = zip(program.inputs, program.placeholders, strict=True)
    return {i.name for i, n in named if i.kind == "leaf" and n.meta["val"].requires_grad}


def exchanges(placed: Program) -> list[str]:
    """Return the kind of each exchange."""
    return [n.args[1] for n in placed.graph.find_nodes(op="call_function", target=EXCHANGE)]
