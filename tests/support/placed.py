"""Placed programs, run on all ranks of an axis at once: plain tensors, plain autograd, no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fnshard.compiler.frontend.exchange import EXCHANGE
from fnshard.compiler.place.placement import Placement, Split, local_shape


def cut(value: Tensor, placement: Placement, ranks: int, padding: float = 0.0) -> list[Tensor]:
    """What each rank has of a whole value; differentiable."""
    if not isinstance(placement, Split):
        return [value] * ranks
    dim, outer = placement.dim, placement.outer
    shape, value = value.shape, value.unflatten(dim, (outer, -1))
    pads = [0, 0] * (value.dim() - 2 - dim) + [0, -value.shape[dim + 1] % ranks]
    parts = F.pad(value, pads, value=padding).unflatten(dim + 1, (ranks, -1)).unbind(dim + 1)
    return [p.reshape(local_shape(shape, placement, ranks)) for p in parts]


def run_on_ranks(graph: fx.Graph, inputs: Sequence[Sequence[Tensor]], ranks: int) -> list[list[Any]]:
    """The results of each rank; `inputs`: for each placeholder what each rank has."""
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
    if kind == "all_gather":
        return [torch.cat(sent, dim)] * ranks
    if kind == "all_to_all":
        return [torch.cat(rows, to) for rows in zip(*(s.chunk(ranks, dim) for s in sent), strict=True)]
    total = torch.stack(sent).sum(0)
    return [total] * ranks if kind == "psum" else list(total.chunk(ranks, dim))


def on_ranks(placed: Any, values: Mapping[str, Tensor], inputs: Mapping[Any, Placement], ranks: int):
    """A placed program's inputs for each rank, from whole values by name."""
    out = []
    for each in placed.inputs:
        if each.kind == "axis":
            out.append([torch.tensor(r) for r in range(ranks)])
        else:
            out.append(cut(values[each.name], inputs.get(each, None), ranks))
    return out
