"""Write the nodes of a rank's program, and the conversions between placements, by one exchange at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.place.placement import (
    PARTIAL,
    REPLICATED,
    Partial,
    Placement,
    Split,
    divides,
    local_shape,
)

aten = torch.ops.aten


@dataclass
class Writer:
    """A writer of the nodes of a rank's program along an axis.

    Args:
        axis, ranks: the axis's name and size.
        device: the device of the program's values.
        index: this rank's index along the axis, int64 0-d, which conversions read.
        meta: the `meta` of the next nodes.
        bodies: graphs of calls; equal blocks have equal calls, which are traced once.
    """

    axis: str
    ranks: int
    device: torch.device
    graph: fx.Graph = field(default_factory=fx.Graph)
    index: fx.Node | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    bodies: dict[Any, fx.Graph | None] = field(default_factory=dict)

    def follow(self, node: fx.Node) -> None:
        """Give the next nodes the `meta` of a node of the program."""
        self.meta = {k: node.meta[k] for k in ("autocast", "stack_trace", "origin") if k in node.meta}

    def call(self, target: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Write the call of an op, with the `meta` of the node that is placed."""
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta |= self.meta
        return node

    def exchange(self, node: fx.Node, kind: str, dim: int, *to: int) -> fx.Node:
        """Write an exchange of a copy of a value: a message has memory of its own."""
        sent = self.call(OUTGOING, (node,))
        return self.call(EXCHANGE, (sent, kind, self.axis, dim, self.ranks, *to))

    def make_once(self, key: Any, make: Callable[[], fx.Graph | None]) -> fx.Graph | None:
        """Return a graph that is made once for all equal keys."""
        if key not in self.bodies:
            self.bodies[key] = make()
        return self.bodies[key]

    def inline(
        self, key: Any, run: Callable[..., Any], fakes: Sequence[Tensor], reads: Sequence[fx.Node]
    ) -> Any:
        """Write the nodes of a function, traced on `fakes`, that reads the nodes `reads`."""
        # make_fx would take a function's defaults for inputs, so that it gets a function without any.
        trace = make_fx(lambda *values: run(*values), tracing_mode="fake", pre_dispatch=True)
        body = self.make_once(key, lambda: trace(*fakes).graph)
        made = dict(zip(body.find_nodes(op="placeholder"), reads, strict=True))
        for node in body.nodes:
            if node.op == "call_function":
                made[node] = self.call(node.target, *fx.map_arg((node.args, node.kwargs), made.__getitem__))
        return map_aggregate(body.output_node().args[0], lambda n: made[n])

    def convert(self, node: fx.Node, shape: Sequence[int], now: Placement, to: Placement) -> fx.Node:
        """Turn this rank's part of a value of that (whole) shape into its part by another placement.

        A split cannot become another split of the same dim, except through the whole value.
        """
        if now == REPLICATED:
            return self.slice(node, shape, to)
        if now == Partial("max"):  # there is no exchange of this kind: gather all parts, and take the maximum
            row = self.call(aten.unsqueeze.default, (node, 0))
            return self.call(aten.amax.default, (self.exchange(row, "all_gather", 0), [0]))
        if now == PARTIAL and to == REPLICATED:
            return self.exchange(node, "psum", 0)
        return self.exchange_dims(node, shape, now, to)

    def slice(self, node: fx.Node, shape: Sequence[int], to: Split) -> fx.Node:
        """Cut this rank's part from a value that all ranks have."""
        # The dim is seen as [outer, ranks, rest]. The index of the rank chooses in the middle.
        ranks = self.ranks
        if divides(shape, to, ranks):
            node = self.unflatten(node, shape, to, [to.outer, ranks, shape[to.dim] // to.outer // ranks])
            place = self.call(aten.reshape.default, (self.index, [1]))
        else:  # pad with the last number, so that no op makes an infinity of the padding alone
            size = shape[to.dim] // to.outer
            length = -(-size // ranks)
            node = self.unflatten(node, shape, to, [to.outer, size])
            first = self.call(aten.mul.Tensor, (self.index, length))
            offsets = self.call(aten.arange.default, (length,), {"device": self.device})
            place = self.call(aten.add.Tensor, (offsets, first))
            place = self.call(aten.clamp.default, (place, None, size - 1))
        part = self.call(aten.index_select.default, (node, to.dim + 1, place))
        return self.call(aten.reshape.default, (part, list(local_shape(shape, to, ranks))))

    def unflatten(self, node: fx.Node, shape: Sequence[int], split: Split, dims: list[int]) -> fx.Node:
        """Reshape the split dim into several."""
        shape = [*shape[: split.dim], *dims, *shape[split.dim + 1 :]]
        return self.call(aten.reshape.default, (node, shape))

    def exchange_dims(self, node: fx.Node, shape: Sequence[int], now: Placement, to: Placement) -> fx.Node:
        """Gather along the dim that is split, and scatter along that of `to`; uneven parts travel padded."""
        ranks = self.ranks
        splits = [p for p in (to, now) if isinstance(p, Split)]
        if len(splits) == 2:
            kind = "all_to_all"
        elif splits[0] is now:
            kind = "all_gather"
        else:
            kind = "reduce_scatter"

        # For the exchange, a dim that is cut in its middle becomes two: a part is then a run along one.
        sizes: list[int] = []
        outers = {s.dim: s.outer for s in splits if s.outer != 1}
        for dim, size in enumerate(local_shape(shape, now, ranks)):
            sizes += [outers[dim], size // outers[dim]] if dim in outers else [size]
        node = self.call(aten.reshape.default, (node, sizes)) if outers else node
        dims = [s.dim + sum(d <= s.dim for d in outers) for s in splits]

        # Equal parts are sent: padding is added before the exchange, and cut off after it.
        if isinstance(to, Split) and not divides(shape, to, ranks):
            node = self.pad(node, sizes, dims[0])
        node = self.exchange(node, kind, *dims)
        if isinstance(now, Split) and not divides(shape, now, ranks):
            node = self.call(aten.slice.Tensor, (node, dims[-1], 0, shape[now.dim] // now.outer))
        if not outers:
            return node
        return self.call(aten.reshape.default, (node, list(local_shape(shape, to, ranks))))

    def pad(self, node: fx.Node, sizes: Sequence[int], dim: int) -> fx.Node:
        """Pad with the last number, without a gradient: no op makes an infinity of the padding alone."""
        count = -sizes[dim] % self.ranks
        last = self.call(aten.slice.Tensor, (node, dim, sizes[dim] - 1, sizes[dim]))
        shape = [*sizes[:dim], count, *sizes[dim + 1 :]]
        padding = self.call(aten.expand.default, (self.call(aten.detach.default, (last,)), shape))
        return self.call(aten.cat.default, ([node, padding], dim))
