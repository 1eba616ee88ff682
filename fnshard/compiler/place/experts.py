"""Experts: stacks of leaves that a data axis splits while they compute, and the rows that go to them.

Over such an axis ranks have rows of their own, and each has whole experts: `LayoutSpec(compute=P("expert"))`.
`fn` multiplies rows that are sorted by expert with the stack (`F.grouped_mm`). Here each product's rows go to
the ranks of their experts and back, by all-to-alls of a fixed size (GShard, Lepikhin et al. 2020). Ops
between two products that work row by row (a gate, an activation) run where the rows are. Any other use of a
stack gathers it whole. This rewrite runs before `place`, to which the exchanges are ops like others.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import Limit, OpOverload, Program, eliminate_dead_code, propagate_gathered
from fnshard.compiler.place.placement import Split, local_value
from fnshard.compiler.place.rules import rule_of
from fnshard.compiler.place.strategies import Axis, Call, local_arguments, operands_of
from fnshard.compiler.place.writer import Writer
from fnshard.compiler.rewrites.pure import remove_writes
from fnshard.errors import TraceError, report
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh

aten = torch.ops.aten
GROUPED = (torch.ops.fnshard.grouped_mm.default, aten._grouped_mm.default)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
ALONG_A_DIM = (
    aten.slice.Tensor, aten.select.int, aten.chunk.default, aten.split.Tensor, aten.split.default,
    aten.split_with_sizes.default, aten.unbind.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.cat.default, aten.stack.default,
)  # fmt: skip
COPIES = (
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default,
    aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default,
)  # fmt: skip


def place_experts(
    program: Program, specs: Mapping[str, LayoutSpec], mesh: Mesh, capacity: float | None
) -> Program:
    """Return the program of each rank, along every data axis that a spec's `compute` names.

    Args:
        capacity: how many rows a rank has room for from each other, as a multiple of an even share; None is
            room for all.

    Raises:
        TraceError: `fn` writes to a stack.
    """
    for axis in mesh.ordered(mesh.data_axes):
        stacks = {p for p, s in specs.items() if axis in s.compute.axes}
        if stacks:
            with program.fake_mode, torch.enable_grad():
                pure = remove_writes(program)
                program = _ExpertPlacer(pure, axis, mesh.axis_size(axis), stacks, capacity).place()
    return program


# ------------------------------------------------------------------ where rows go
def plan_departures(ends: Tensor, rows: int, experts: int, ranks: int, room: int) -> tuple[Tensor, ...]:
    """Plan where rows go that are sorted by expert.

    Args:
        ends: [experts], the end of each expert's rows.
        room: how many rows may go to each rank.

    Returns:
        int64 [ranks * room], the row that each place of the message holds; [experts], how many rows each
        expert gets; [rows], the place that each row comes back from; and 0-d, how many rows have no room. An
        index past the end means no row.
    """
    # The rows of each rank's experts are one run, `first` to `last`; the message has `room` places for it.
    ends = ends.to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    last = ends.view(ranks, -1)[:, -1]
    first = starts.view(ranks, -1)[:, 0]
    slots = first[:, None] + torch.arange(room, device=ends.device)
    sent = torch.where(slots < last[:, None], slots, rows).flatten()

    # How many of each expert's rows have room: those before the row at which the run is cut off.
    cut_off = (first + room)[:, None].expand(ranks, experts // ranks).reshape(experts)
    counts = torch.minimum(ends, cut_off) - torch.minimum(starts, cut_off)

    # The way back: the place of a row in the message of its expert's rank.
    row = torch.arange(rows, device=ends.device)
    owner = torch.searchsorted(last.contiguous(), row, right=True)
    place = row - first[owner.clamp(max=ranks - 1)]
    back = torch.where((owner < ranks) & (place < room), owner * room + place, ranks * room)
    return sent, counts, back, (last - first - room).clamp(min=0).sum()


def plan_arrivals(counts: Tensor, ranks: int, room: int) -> tuple[Tensor, ...]:
    """Plan how to sort rows that have come, each rank's sorted by expert.

    Args:
        counts: int64 [ranks * experts of this rank], how many came from each rank for each expert.
        room: how many rows each rank may send.

    Returns:
        int64 [ranks * room], the order by expert; [ranks * room], the way back; and [experts of this rank],
        the end of each expert's rows.
    """
    # A group is the rows of one rank for one expert. In the message groups are in the order of ranks, then of
    # experts.
    counts = counts.view(ranks, -1)
    upto, experts, total = counts.cumsum(1), counts.shape[1], ranks * room
    before, sorted_counts = upto - counts, counts.t().reshape(-1)  # sorted: by expert, then by rank

    # The order: for each place in the sorted rows, the place in the message that holds its row.
    sums = sorted_counts.cumsum(0)
    number = torch.arange(total, device=counts.device)
    group = torch.searchsorted(sums, number, right=True).clamp(max=len(sums) - 1)
    expert, rank = group // ranks, group % ranks
    place = rank * room + before[rank, expert] + number - (sums - sorted_counts)[group]
    order = torch.where(number < sums[-1], place, total)

    # The way back is its inverse: for each place in the message, that in the sorted rows.
    slot = torch.arange(room, device=counts.device).expand(ranks, room).contiguous()
    expert = torch.searchsorted(upto, slot, right=True)
    is_used, expert = expert < experts, expert.clamp(max=experts - 1)
    start = (sums - sorted_counts).view(experts, ranks).t().gather(1, expert)
    back = torch.where(is_used, start + slot - before.gather(1, expert), total).flatten()
    return order, back, counts.sum(0).cumsum(0)


# ------------------------------------------------------------------ the program
@dataclass(frozen=True)
class _Route:
    """A route of rows to their experts and back.

    Args:
        rows, room: how many rows there are, and how many of them may go to each rank.
        sent, back: nodes with results of `plan_departures`.
        order, restored, ends: nodes with the results of `plan_arrivals`.
    """

    rows: int
    room: int
    sent: fx.Node
    back: fx.Node
    order: fx.Node
    restored: fx.Node
    ends: fx.Node


@dataclass(frozen=True)
class _RoutedValue:
    """A value of the new program.

    Args:
        node: its node.
        is_stack: whether each rank has the part of its own experts alone.
        route: the route on which its rows have gone to their experts, or None if they have not.
    """

    node: fx.Node
    is_stack: bool = False
    route: _Route | None = None


@dataclass
class _ExpertPlacer:
    """A walk over a program that writes one in which rows travel to the ranks of their experts and back.

    Args:
        axis, ranks: the axis that splits stacks, and how many ranks it has.
        stacks: the paths of the leaves that it splits.
        capacity: as in `place_experts`.
        values: the value of each node of the program.
        wholes: values that were made whole again, by their node of the program.
        routes: routes by the ends of experts' rows and the number of rows.
        excesses: how many rows found no room, with the limit that this breaks.
        gathered: texts of ops for which whole stacks are gathered, for one warning.
    """

    program: Program
    axis: str
    ranks: int
    stacks: set[str]
    capacity: float | None
    values: dict[fx.Node, _RoutedValue] = field(default_factory=dict)
    wholes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    routes: dict[tuple[fx.Node, int], _Route] = field(default_factory=dict)
    excesses: list[tuple[Limit, fx.Node]] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.program.placeholders[0].meta["val"].device
        self.writer = Writer(self.axis, self.ranks, device)
        self.graph, self.call = self.writer.graph, self.writer.call

    def place(self) -> Program:
        """Walk over the program, forward, and return the new one."""
        # Inputs, then ops in order, then outputs.
        for node, each in zip(self.program.placeholders, self.program.inputs, strict=True):
            is_stack = each.kind == "leaf" and each.name in self.stacks
            self.values[node] = _RoutedValue(self.graph.placeholder(node.name), is_stack)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.writer.follow(node)
                self.values[node] = self.visit(node)
        outputs = self.write_outputs()
        eliminate_dead_code(self.graph)

        if self.gathered:
            warnings.warn(
                report(
                    f"{len(self.gathered)} op(s) take whole stacks of experts, which ranks gather over "
                    f"{self.axis!r}:",
                    list(dict.fromkeys(self.gathered))[:8],
                    "multiply rows that are sorted by expert with the stack, by F.grouped_mm; or compute=P() "
                    "for the leaf.",
                ),
                stacklevel=2,
            )

        # Each rank is given its experts' part of a stack, and every other input whole.
        inputs = [(n.meta["val"], self.values[n].is_stack) for n in self.program.placeholders]
        fakes = [local_value(v, Split(0), self.ranks) if is_stack else v for v, is_stack in inputs]
        propagate_gathered(self.graph, fakes)
        return replace(self.program, graph=self.graph, outputs=outputs, traced=self.program)

    def write_outputs(self) -> Any:
        """Write the outputs. Results are whole, so that no new value of a stack can be among them."""
        old, written = self.program.outputs, self.stacks & self.program.outputs.writes.keys()
        if written:
            raise TraceError(
                f"`fn` writes to params[{min(written)!r}], a stack that {self.axis!r} splits.",
                fix="keep what `fn` writes to whole: LayoutSpec(compute=P()).",
            )
        # The numbers of rows without room, to which limits refer, follow the program's results.
        results = [self.make_whole(n) for n in self.program.results]
        limits = tuple(replace(n, result=len(results) + i) for i, (n, _) in enumerate(self.excesses))
        self.graph.output((*results, *(excess for _, excess in self.excesses)))
        return replace(old, limits=old.limits + limits)

    # -------------------------------------------------------------- one op
    def visit(self, node: fx.Node) -> _RoutedValue:
        """Place one op: by expert, by row where the rows are, or of whole values."""
        sources = [self.values[n] for n in operands_of(node)]
        if node.target is operator.getitem:
            # The results of an op that has several are placed as the op is.
            (source,) = sources
            return replace(source, node=self.call(operator.getitem, (source.node, node.args[1])))
        if any(s.is_stack for s in sources):
            for rule in (self.place_product, self.place_by_expert):
                if (value := rule(node, sources)) is not None:
                    return value
        if any(s.route for s in sources) and (value := self.place_by_row(node, sources)) is not None:
            return value

        # No rule takes it. Rows come back, and stacks are gathered.
        stacks = [n.meta["val"] for n, s in zip(operands_of(node), sources, strict=True) if s.is_stack]
        self.gathered += [f"{node.target}: {v.numel() * v.element_size() / 1e6:.3f} MB" for v in stacks]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.make_whole)
        return _RoutedValue(self.call(node.target, args, kwargs))

    def place_product(self, node: fx.Node, sources: Sequence[_RoutedValue]) -> _RoutedValue | None:
        """Multiply rows by a stack, on the ranks of its experts."""
        if node.target not in GROUPED or len(sources) != 3:
            return None
        (rows, stack, ends), (rows_now, stack_now, ends_now) = operands_of(node), sources
        if rows.meta["val"].dim() != 2 or not stack_now.is_stack or ends_now.is_stack or ends_now.route:
            return None
        route = self.find_route(ends, rows.meta["val"].shape[0], stack.meta["val"].shape[0], node)
        # Rows that a product before has sent there, by the same ends, are there already.
        local_rows = rows_now.node
        if rows_now.route is not route:
            local_rows = self.send_to_experts(self.make_whole(rows), route)
        # The rows that have come are other ones, so that their groups have other ends.
        local_ends = self.call(aten.to.dtype, (route.ends, ends.meta["val"].dtype))
        feed = iter([local_rows, stack_now.node, local_ends])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(feed))
        return _RoutedValue(self.call(node.target, args, kwargs), route=route)

    def place_by_expert(self, node: fx.Node, sources: Sequence[_RoutedValue]) -> _RoutedValue | None:
        """Place an op that works expert by expert, as for a leaf that is split along its first dim."""
        if not all(s.is_stack for s in sources) or not isinstance(node.target, OpOverload):
            return None
        find = rule_of(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        split = (Split(0),) * len(sources)
        call = Call(node.target, args, kwargs, node.meta["val"], split, Axis(self.axis, self.ranks, {}))
        for strategy in find(call) if find else ():
            if strategy.inputs == split and strategy.output == Split(0) and strategy.run is None:
                local = local_arguments(node, call, strategy, [s.node for s in sources])
                return _RoutedValue(self.call(node.target, *local), is_stack=True)
        return None

    def place_by_row(self, node: fx.Node, sources: Sequence[_RoutedValue]) -> _RoutedValue | None:
        """Place an op that works row by row, where the rows are."""
        routes = {s.route for s in sources}
        if len(routes) > 1 or not isinstance(node.target, OpOverload):
            return None

        # The first dim is that of the rows. A view must keep it, an op along a dim must take another one, and
        # all that an elementwise op reads must have it.
        (route,) = routes
        values = [n.meta["val"] for n in operands_of(node)]
        dims, args = values[0].dim(), list(node.args)
        if node.target in VIEWS:
            size = list(args[1])
            if not size or size[0] != route.rows:
                return None
            args[1] = [self.ranks * route.room, *size[1:]]
        elif node.target in ALONG_A_DIM:
            names = [a.name for a in node.target._schema.arguments]
            number = names.index("dim")
            dim = args[number] if number < len(args) else node.kwargs.get("dim", 0)
            adds_dim = node.target in (aten.unsqueeze.default, aten.stack.default)
            if dim % (dims + adds_dim) == 0:
                return None
        elif torch.Tag.pointwise in node.target.tags:
            if any(v.dim() != dims or v.shape[0] != route.rows for v in values):
                return None
        elif node.target not in COPIES:
            return None
        args, kwargs = fx.map_arg((tuple(args), node.kwargs), lambda n: self.values[n].node)
        return _RoutedValue(self.call(node.target, args, kwargs), route=route)

    # -------------------------------------------------------------- exchanges
    def find_route(self, ends: fx.Node, rows: int, experts: int, node: fx.Node) -> _Route:
        """Return the route of these rows, which is written once for all products of them."""
        if (ends, rows) not in self.routes:
            # An even share of the rows, times the capacity, has room on each rank.
            ranks, share = self.ranks, -(-rows // self.ranks)
            room = rows if self.capacity is None else min(rows, math.ceil(share * self.capacity))
            shape = (experts, rows, room)
            sent, counts, back, excess = self.writer.inline(
                ("departures", *shape), lambda e: plan_departures(e, rows, experts, ranks, room),
                [ends.meta["val"]], [self.make_whole(ends)],
            )  # fmt: skip

            # Ranks tell each other how many rows come for each expert; from that each knows their order.
            arriving = self.exchange_rows(counts)
            order, restored, local_ends = self.writer.inline(
                ("arrivals", *shape), lambda c: plan_arrivals(c, ranks, room),
                [ends.meta["val"].new_empty(experts, dtype=torch.int64)], [arriving],
            )  # fmt: skip

            # A step whose routing needs more room than there is fails: a limit checks it when the step runs.
            if room < rows:
                op = f"the experts of another rank over {self.axis!r} (shard_step(expert_capacity=))"
                limit = Limit(-1, room, op, node.meta.get("stack_trace", ""))
                self.excesses.append((limit, self.call(aten.to.dtype, (excess, torch.float64))))
            self.routes[ends, rows] = _Route(rows, room, sent, back, order, restored, local_ends)
        return self.routes[ends, rows]

    def send_to_experts(self, rows: fx.Node, route: _Route) -> fx.Node:
        """Send rows to the ranks of their experts, sorted there by expert."""
        received = self.exchange_rows(self.take_rows(rows, route.sent))
        return self.take_rows(received, route.order)

    def make_whole(self, node: fx.Node) -> fx.Node:
        """Return a value as the traced program has it: rows in this rank's order, and all experts."""
        value = self.values[node]
        if not value.is_stack and value.route is None:
            return value.node
        if node not in self.wholes:
            if value.route is not None:
                # Sort rows by the ranks that they came from, send them back, and put them in their own order.
                dims, route = node.meta["val"].dim(), value.route
                by_rank = self.take_rows(value.node, route.restored, dims)
                self.wholes[node] = self.take_rows(self.exchange_rows(by_rank), route.back, dims)
            else:
                self.wholes[node] = self.writer.exchange(value.node, "all_gather", 0)
        return self.wholes[node]

    def exchange_rows(self, node: fx.Node) -> fx.Node:
        """Exchange rows: each rank gets its share of every rank's."""
        return self.writer.exchange(node, "all_to_all", 0, 0)

    def take_rows(self, rows: fx.Node, index: fx.Node, dims: int = 2) -> fx.Node:
        """Take rows by their index; one past the end is zeros."""
        padded = self.call(aten.constant_pad_nd.default, (rows, [0, 0] * (dims - 1) + [0, 1]))
        return self.call(aten.index_select.default, (padded, 0, index))
