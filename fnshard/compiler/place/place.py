"""Turn a Program of whole values into the one that each rank along a mesh axis runs, exchanges included.

`Placer` walks over the program once, forward: each value has a placement, and each op takes the cheapest of
its strategies (`rules`). A value that the op needs in another placement is converted, by an exchange that is
one line of the schedule. Several axes are placed one after another; in each walk the exchanges of earlier
ones are ops like others.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.exchange import CONSTRAIN, EXCHANGE, OUTGOING
from fnshard.compiler.ir.custom_gradient import CustomGradient
from fnshard.compiler.ir.program import Input, OpOverload, Program, eliminate_dead_code, propagate_gathered
from fnshard.compiler.place.check import Record
from fnshard.compiler.place.expand import expand_call
from fnshard.compiler.place.placement import (
    PARTIAL,
    REPLICATED,
    Partial,
    Placement,
    Split,
    fits,
    local_shape,
    local_value,
)
from fnshard.compiler.place.rules import rule_of
from fnshard.compiler.place.strategies import (
    Axis,
    Call,
    ContextAttention,
    Elsewhere,
    OpStrategy,
    Residual,
    local_arguments,
    operands_of,
)
from fnshard.compiler.place.writer import Writer
from fnshard.compiler.rewrites.pure import remove_writes
from fnshard.errors import TraceError, report
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh

aten = torch.ops.aten
NEVER = math.inf  # the bytes of a conversion that is impossible
LEAF_FACTOR = 1e6  # the factor on the bytes of a value that specs have split, so that it stays split


def place_axes(
    program: Program,
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    residual: Residual,
    sequences: Mapping[str, int],
    attention: ContextAttention = "auto",
) -> Program:
    """Return each rank's program, placed over the context axis and all axes that a spec's `compute` names.

    Data axes among these are left out; `place.experts` handles them.

    Args:
        sequences: the dim of each batch leaf that the context axis splits.
        residual, attention: as in `Axis`.
    """
    traced = program
    named = {"tensor", *(a for s in specs.values() for a in s.compute.axes)}
    tensor_axes = mesh.ordered(named - {"context", *mesh.data_axes})

    # The context axis comes first. It splits sequences of the batch, and no leaf.
    if "context" in mesh.ordered(set(mesh.names) - set(mesh.data_axes)):
        sliced = {Input("batch", name): Split(dim) for name, dim in sequences.items()}
        ranks, later = mesh.axis_size("context"), mesh.axes_size(tensor_axes)
        program = place(program, Axis("context", ranks, {}, residual, sliced, later, attention))

    # Then each axis that splits leaves. Only the first axis of a fused dim cuts each matrix in it.
    for axis in tensor_axes:
        inputs = {
            Input("leaf", path): Split(dim, spec.compute.fused(dim) if spec.compute.of(dim)[0] == axis else 1)
            for path, spec in specs.items()
            for dim in range(len(spec.shape))
            if axis in spec.compute.of(dim)
        }
        program = place(program, Axis(axis, mesh.axis_size(axis), inputs, residual))

    # What `fn` has said of placements was for this walk alone.
    for node in program.graph.find_nodes(op="call_function", target=CONSTRAIN):
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
    return program if program is traced else replace(program, traced=traced)


def place(program: Program, axis: Axis) -> Program:
    """Return the program of each rank along `axis`."""
    return Placer.walk_over(remove_writes(program), axis).finish()


@dataclass(frozen=True)
class Value:
    """A placed value.

    Args:
        node: its node in the new graph, or a tuple of values if an op has several results.
        placement: what each rank has of it.
        whole: the whole (fake) value.
        is_of_leaves: whether it is made of nothing but leaves that specs have split.
    """

    node: Any
    placement: Placement
    whole: Any
    is_of_leaves: bool = False


@dataclass
class Placer:
    """The walk over a program without writes: the placement of each value, and the graph that it writes.

    Args:
        values: the placed value of each node of the program.
        converted: conversions so far, by the value's node and its new placement; each is made once.
        gathered: texts of ops that have no rule and take whole values, for one warning.
        record: placements, calls and conversions of the walk, with which its end compares the graph.
    """

    program: Program
    axis: Axis
    values: dict[fx.Node, Value] = field(default_factory=dict)
    converted: dict[tuple[fx.Node, Placement], fx.Node] = field(default_factory=dict)
    gathered: list[str] = field(default_factory=list)
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        device = self.program.placeholders[0].meta["val"].device
        self.writer = Writer(self.axis.name, self.axis.ranks, device)
        self.graph, self.call = self.writer.graph, self.writer.call

    @classmethod
    def walk_over(cls, program: Program, axis: Axis) -> Placer:
        """Return a placer that has walked over a program."""
        placer = cls(program, axis)
        with program.fake_mode, torch.enable_grad():
            placer.walk()
        return placer

    def walk(self) -> None:
        """Place all nodes of the program, in order, and write the new graph up to its outputs."""
        # Inputs come first: leaves as specs split them, everything else whole.
        inputs = [self.graph.placeholder(node.name) for node in self.program.placeholders]
        self.index = self.writer.index = self.graph.placeholder(f"index_{self.axis.name}")
        self.record = Record(self.axis.name, self.axis.ranks, self.index, self.axis.update)
        for new, node, each in zip(inputs, self.program.placeholders, self.program.inputs, strict=True):
            placement = self.axis.inputs.get(each, REPLICATED)
            is_split_leaf = each.kind == "leaf" and isinstance(placement, Split)
            self.values[node] = Value(new, placement, node.meta["val"], is_split_leaf)
            self.record.values[new] = placement, node.meta["val"]

        # Each rank takes its part of the sequences that the context axis splits.
        for node, each in zip(self.program.placeholders, self.program.inputs, strict=True):
            value, to = self.values[node], self.axis.sliced.get(each)
            if to is not None and fits(value.whole.shape, to, self.axis.ranks):
                part = self.convert(value, to)
                self.values[node] = replace(value, node=part, placement=to)
                # Every rank has the whole already, should an op need it.
                self.converted[part, REPLICATED] = value.node

        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.visit(node)
        self.graph.output(self.write_results())

    def visit(self, node: fx.Node) -> None:
        """Place one node: an op by its strategies, or one result of an op that has several."""
        self.writer.follow(node)
        if node.target is not operator.getitem:
            sources = [self.values[n] for n in operands_of(node)]
            is_op = isinstance(node.target, OpOverload)
            default = Placer.place_op if is_op and sources else Placer.place_whole
            method = _SPECIAL.get(node.target if is_op else type(node.target), default)
            self.values[node] = method(self, node, sources)
            return

        source, number = self.values[node.args[0]], node.args[1]
        if isinstance(source.node, tuple):
            self.values[node] = source.node[number]
        else:
            new = self.call(operator.getitem, (source.node, number))
            self.values[node] = self.add_value(new, source.placement, node.meta["val"], source.is_of_leaves)

    # -------------------------------------------------------------- one op
    def place_op(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place an op by the cheapest of its strategies, or by the smaller ops that it is made of."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n].whole)
        placements = tuple(s.placement for s in sources)
        value, line = node.meta["val"], node.meta.get("stack_trace", "")
        call = Call(node.target, args, kwargs, value, placements, self.axis, line)

        # Whole values are always a choice, and the first: of strategies that cost the same, the first wins.
        rule = rule_of(node.target)
        strategies = [OpStrategy((REPLICATED,) * len(sources), REPLICATED), *(rule(call) if rule else ())]
        strategy = min(strategies, key=lambda strategy: self.rank_strategy(sources, strategy, value))
        cost = self.count_wire_bytes(sources, strategy)

        # Every strategy pays for parts of a sum, which have to be summed for an op that is not linear. Where
        # the best one pays more than that, the op's definition in smaller ops may do with less.
        needed = sum(map(self.price_sum, sources)) if cost else 0.0
        if cost > needed:
            cast = "autocast" in self.writer.meta
            body = self.writer.make_once((call.key, cast), lambda: expand_call(call, cast))
            if body is not None:
                return self.inline(node, body)
        if cost > needed and rule is None:
            self.gathered.append(f"{node.target}: {cost / 1e6:.3f} MB")

        # Convert what the op reads, and write the op.
        reads = [self.convert(s, to) for s, to in zip(sources, strategy.inputs, strict=True)]
        for read, to in zip(operands_of(node), strategy.inputs, strict=True):
            self.keep_sum(read, to)
        if node.target is EXCHANGE:
            # A message has memory of its own, so that what is sent must be a copy (`place_outgoing`).
            reads = [r if r.target is OUTGOING else self.call(OUTGOING, (r,)) for r in reads]
            (read,), (source,), (to,) = reads, sources, strategy.inputs
            self.record.values[read] = to, source.whole
        new = self.write_op(node, call, strategy, reads)

        # Note the call for `check`, and place its results.
        of_leaves = isinstance(strategy.output, Split) and all(s.is_of_leaves for s in sources)
        for result in new if isinstance(new, list | tuple) else [new]:
            self.record.calls.append((call, strategy, tuple(reads), result))
        if not isinstance(new, list | tuple):
            return self.add_value(new, strategy.output, value, of_leaves)
        results = [self.add_value(n, strategy.output, v, of_leaves) for n, v in zip(new, value, strict=True)]
        return Value(tuple(results), strategy.output, value, of_leaves)

    def write_op(self, node: fx.Node, call: Call, strategy: OpStrategy, reads: Sequence[fx.Node]) -> Any:
        """Write the op on this rank's parts, or the function that the strategy runs in its place."""
        if strategy.run is None:
            return self.call(node.target, *local_arguments(node, call, strategy, reads))
        # The function is traced on this rank's index and parts, once for all equal calls.
        wholes = zip(call.tensors, strategy.inputs, strict=True)
        parts = [t.new_empty(local_shape(t.shape, p, call.ranks)) for t, p in wholes]
        key = call.key, strategy.inputs, strategy.output
        return self.writer.inline(key, strategy.run, [self.make_index(), *parts], [self.index, *reads])

    def add_value(self, new: fx.Node, placement: Placement, whole: Any, is_of_leaves: bool = False) -> Value:
        """Return a new value, and note it for `check`."""
        self.record.values[new] = placement, whole
        return Value(new, placement, whole, is_of_leaves)

    # -------------------------------------------------------------- special targets
    def place_outgoing(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place the copy of a message: one for a single exchange is written anew, right before that."""
        (value,) = sources
        if [user.target for user in node.users] == [EXCHANGE]:
            return value
        copy = self.call(OUTGOING, (value.node,))
        return self.add_value(copy, value.placement, value.whole, value.is_of_leaves)

    def place_constraint(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place a value as `fn` says for this axis, or leave it as it is if `fn` says nothing.

        Raises:
            TraceError: the dim cannot be split over the axis.
        """
        (value,), (_, axes, dims) = sources, node.args
        dim = dict(zip(axes, dims, strict=True)).get(self.axis.name)
        if dim is None:
            new = self.call(CONSTRAIN, (value.node, list(axes), list(dims)))
            return self.add_value(new, value.placement, value.whole, value.is_of_leaves)

        # A dim of -1 says that all ranks have the value whole.
        to = Split(dim) if dim >= 0 else REPLICATED
        shape, axis = value.whole.shape, self.axis
        if isinstance(to, Split) and not fits(shape, to, axis.ranks):
            raise TraceError(
                f"fs.constrain splits dim {dim} of {list(shape)} over {axis.name!r}, {axis.ranks} ranks.",
                fix="split a dim of which every rank gets something.",
            )
        new = self.call(CONSTRAIN, (self.convert(value, to), list(axes), list(dims)))  # for the other axes
        return self.add_value(new, to, value.whole, value.is_of_leaves)

    def place_whole(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place an op that takes whole values, or a write that could not be replaced by an op without one."""
        # To sum parts cannot be avoided. To gather split values might be, and is worth a warning.
        cost = sum(self.price_conversion(s, REPLICATED) for s in sources)
        if cost > sum(map(self.price_sum, sources)):
            self.gathered.append(f"{node.target}: {cost / 1e6:.3f} MB")
        reads = iter([self.convert(s, REPLICATED) for s in sources])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(reads))
        return self.add_value(self.call(node.target, args, kwargs), REPLICATED, node.meta["val"])

    def place_elsewhere(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place a call that one rank runs for all, on whole values. Split values are sent to it as blocks."""
        # No exchange of blocks adds parts up, so that these are summed before.
        reads = [self.convert(s, REPLICATED) if isinstance(s.placement, Partial) else s.node for s in sources]
        to = [each.get(self.axis.name, REPLICATED) for each in node.target.results]
        pairs = zip(node.target.values, to, strict=True)
        target = replace(node.target, values=tuple(local_value(v, p, self.axis.ranks) for v, p in pairs))
        new = self.call(target, tuple(reads))
        results = [
            self.add_value(self.call(operator.getitem, (new, i)), placement, whole)
            for i, (placement, whole) in enumerate(zip(to, node.target.values, strict=True))
        ]
        return Value(tuple(results), REPLICATED, node.target.values)

    def place_custom_gradient(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place values with a gradient of `fn`'s own, which need not be linear in the gradient that it gets.

        The results become a sum to which only the first rank contributes. So that rank is given their whole
        gradient, and computes the whole gradient of the inputs from it.
        """
        # The inputs are detached on all ranks but the first.
        is_first = self.call(aten.eq.Scalar, (self.index, 0))
        reads = [self.convert(s, REPLICATED) for s in sources]
        inputs = range(node.target.values, node.target.values + node.target.inputs)
        for i in inputs:
            detached = self.call(aten.detach.default, (reads[i],))
            reads[i] = self.call(aten.where.self, (is_first, reads[i], detached))

        # The results are zeros there.
        made, results = self.call(node.target, tuple(reads)), []
        has_several = node.target.values > 1
        for i, whole in enumerate(node.meta["val"] if has_several else [node.meta["val"]]):
            value = self.call(operator.getitem, (made, i)) if has_several else made
            part = self.call(aten.where.ScalarOther, (is_first, value, 0))
            results.append(self.add_value(part, PARTIAL, whole))
        return Value(tuple(results), PARTIAL, node.meta["val"]) if has_several else results[0]

    def inline(self, node: fx.Node, body: fx.Graph) -> Value:
        """Place the smaller ops that an op is made of in its stead."""
        outside = dict(zip(body.find_nodes(op="placeholder"), operands_of(node), strict=True))
        self.values |= {inner: self.values[n] for inner, n in outside.items()}
        # The body has its casts written out already (`expand_call`).
        meta = {k: v for k, v in self.writer.meta.items() if k != "autocast"}
        for inner in body.nodes:
            if inner.op == "call_function":
                inner.meta = {"val": inner.meta["val"], **meta}
                self.visit(inner)
        # An operand that the body has summed stays summed for later readers (`keep_sum`).
        self.values |= {n: self.values[inner] for inner, n in outside.items()}
        returned = body.output_node().args[0]
        if isinstance(returned, fx.Node):
            return self.values[returned]
        return Value(tuple(self.values[n] for n in returned), REPLICATED, node.meta["val"])

    # -------------------------------------------------------------- conversions
    def rank_strategy(self, sources: Sequence[Value], strategy: OpStrategy, value: Any) -> tuple[float, int]:
        """Return the key by which strategies are compared: bytes on the wire, then values to convert.

        The bytes include those of the sum that a strategy leaves to its readers. Slices do not count as
        conversions.
        """
        changed = [s.placement for s, to in zip(sources, strategy.inputs, strict=True) if s.placement != to]
        summed = strategy.output == PARTIAL and PARTIAL not in strategy.inputs and isinstance(value, Tensor)
        later = value.numel() * value.element_size() if summed else 0
        return self.count_wire_bytes(sources, strategy) + later, sum(p != REPLICATED for p in changed)

    def count_wire_bytes(self, sources: Sequence[Value], strategy: OpStrategy) -> float:
        """Return the bytes on the wire of all conversions that a strategy needs."""
        return sum(map(self.price_conversion, sources, strategy.inputs))

    def price_conversion(self, value: Value, to: Placement) -> float:
        """Return the bytes on the wire, of all ranks' parts, that a conversion takes."""
        now = value.placement
        scale = LEAF_FACTOR if value.is_of_leaves and not self.axis.update else 1.0
        if now == to or (value.node, to) in self.converted:
            return 0.0
        size = value.whole.numel() * value.whole.element_size() * scale
        if isinstance(to, Partial):
            return NEVER
        if isinstance(to, Split) and not fits(value.whole.shape, to, self.axis.ranks, self.axis.update):
            return NEVER

        if isinstance(now, Partial):
            # To sum parts on all ranks takes two passes over them, to scatter the sum one.
            if to == REPLICATED or self.axis.update:
                return 2.0 * size
            return size if self.axis.residual == "split" and now == PARTIAL else NEVER
        if not isinstance(now, Split):
            return 0.0  # each rank slices what it has
        # An all-to-all moves each rank's part once, a gather the whole to every rank.
        if isinstance(to, Split) and now.dim != to.dim and not self.axis.update:
            return size / self.axis.ranks
        return size

    def price_sum(self, value: Value) -> float:
        """Return the bytes on the wire that parts of a sum take at least, however they are summed."""
        if not isinstance(value.placement, Partial):
            return 0.0
        shape = value.whole.shape
        return min(
            self.price_conversion(value, to) for to in (REPLICATED, *(Split(d) for d in range(len(shape))))
        )

    def keep_sum(self, node: fx.Node, to: Placement) -> None:
        """Keep a sum that an op needs summed: its later readers get the sum, not the parts."""
        value = self.values[node]
        if isinstance(value.placement, Partial) and not isinstance(to, Partial):
            to = REPLICATED if self.axis.update else to
            self.values[node] = replace(value, node=self.convert(value, to), placement=to)

    def convert(self, value: Value, to: Placement) -> fx.Node:
        """Return the value in another placement; the conversion is written once."""
        if value.placement == to:
            return value.node
        key = value.node, to
        if key not in self.converted:
            self.converted[key] = self.write_conversion(value, to)
        return self.converted[key]

    def write_conversion(self, value: Value, to: Placement) -> fx.Node:
        """Write a conversion; a move within a dim, and an update's, goes through the whole value."""
        now, writer = value.placement, self.writer
        same_dim = isinstance(now, Split) and isinstance(to, Split) and now.dim == to.dim
        if same_dim or (self.axis.update and isinstance(to, Split) and now != REPLICATED):
            whole = replace(value, node=self.convert(value, REPLICATED), placement=REPLICATED)
            return self.convert(whole, to)

        # A conversion keeps the value's dtype, whatever autocast would do to its ops.
        meta, writer.meta = writer.meta, {k: v for k, v in writer.meta.items() if k != "autocast"}
        new = writer.convert(value.node, value.whole.shape, now, to)
        writer.meta = meta
        self.record.conversions.append((value.node, new, now, to))
        self.record.values[new] = to, value.whole
        return new

    # -------------------------------------------------------------- the end
    def write_results(self) -> list[fx.Node]:
        """Write the program's results: parts of sums, whole values, and new values of leaves split as these.

        Losses and scalars of ranks are averaged later on, so that a part is multiplied by the number of
        ranks.
        """
        written = {index: Input("leaf", path) for path, index in self.program.outputs.writes.items()}
        summed = set(self.program.outputs.summed) if self.program.outputs.loss is not None else set()
        out = []
        for number, node in enumerate(self.program.results):
            value, due = self.values[node], REPLICATED
            if self.axis.update:
                self.writer.follow(node)  # a gather for a result belongs to the node that makes it
            if number in summed and value.placement == PARTIAL:
                out.append(self.call(aten.mul.Tensor, (value.node, self.axis.ranks)))
            else:
                due = self.axis.inputs.get(written.get(number), REPLICATED)
                out.append(self.convert(value, due))
            self.record.results.append((number in summed, value.node, out[-1], due))
        return out

    def finish(self) -> Program:
        """Return the new program, checked, with the fake value of each node."""
        if self.gathered and not self.axis.update:
            warnings.warn(
                report(
                    f"{len(self.gathered)} op(s) have no rule for a split dim, and take whole values over "
                    f"{self.axis.name!r}:",
                    self.gathered[:8],
                    "write them with ops of torch that have a rule, or where their operands are small.",
                ),
                stacklevel=2,
            )

        # Inputs become each rank's parts, and its index is an input if something reads it.
        axis, inputs = self.axis, list(self.program.inputs)
        wholes = zip(self.program.placeholders, inputs, strict=True)
        with self.program.fake_mode:
            fakes = [
                local_value(n.meta["val"], axis.inputs.get(i, REPLICATED), axis.ranks) for n, i in wholes
            ]
            if self.index.users:
                fakes.append(self.make_index())
        if self.index.users:
            inputs.append(Input("axis", axis.name))
        else:
            self.graph.erase_node(self.index)

        # Remove dead nodes, and copies of received messages that nothing else reads: these can be sent on.
        eliminate_dead_code(self.graph)
        for node in self.graph.find_nodes(op="call_function", target=OUTGOING):
            (sent,) = node.all_input_nodes
            if sent.target is EXCHANGE and len(sent.users) == 1:
                node.replace_all_uses_with(sent)
                self.graph.erase_node(node)

        with self.program.fake_mode, torch.enable_grad():
            self.record.check(self.graph, lambda: propagate_gathered(self.graph, fakes))
        return replace(self.program, graph=self.graph, inputs=tuple(inputs))

    def make_index(self) -> Tensor:
        """Make a fake value of this rank's index."""
        return torch.empty((), dtype=torch.int64, device=self.writer.device)


# Targets that have no strategies, by the target itself or its type.
_SPECIAL: dict[Any, Callable[[Placer, fx.Node, Sequence[Value]], Value]] = {
    OUTGOING: Placer.place_outgoing,
    CONSTRAIN: Placer.place_constraint,
    CustomGradient: Placer.place_custom_gradient,
    Elsewhere: Placer.place_elsewhere,
}
