"""Turn a Program of whole values into the one that each rank along a mesh axis runs, exchanges included.

One walk over the program, forward: each value has a placement, and each op takes the cheapest of its
strategies (`rules`). A value that the op needs in another placement is converted, by an exchange that is one
line of the schedule. Several axes are placed in turn; to each the exchanges of those before are ops like
others.
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
from fnshard.compiler.ir.program import Input, OpOverload, Program, eliminate_dead_code, propagate
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
LEAF_FACTOR = 1e6  # the factor by which it is dearer to gather a value that specs have split


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
    """
    traced = program
    named = {"tensor", *(a for s in specs.values() for a in s.compute.axes)}
    tensor = mesh.ordered(named - {"context", *mesh.data_axes})
    if "context" in mesh.ordered(set(mesh.names) - set(mesh.data_axes)):
        sliced = {Input("batch", name): Split(dim) for name, dim in sequences.items()}
        ranks, later = mesh.axis_size("context"), mesh.axes_size(tensor)
        program = place(program, Axis("context", ranks, {}, residual, sliced, later, attention))

    for axis in tensor:
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
    return Placer.of(remove_writes(program), axis).finish()


@dataclass(frozen=True)
class Value:
    """A placed value.

    Args:
        node: its node in the new graph, or a tuple of values if an op has several results.
        placement: what each rank has of it.
        whole: the whole (fake) value.
        of_leaf: whether it is made of nothing but leaves that specs have split.
    """

    node: Any
    placement: Placement
    whole: Any
    of_leaf: bool = False


@dataclass
class Placer:
    """The walk over a program without writes: the placement of each value, and the graph that it writes.

    Args:
        values: the placed value of each node of the program.
        converted: conversions so far; each is made once.
        gathered: texts of ops that have no rule and take whole values, for one warning.
    """

    program: Program
    axis: Axis
    values: dict[fx.Node, Value] = field(default_factory=dict)
    converted: dict[tuple[fx.Node, Placement], fx.Node] = field(default_factory=dict)
    gathered: list[str] = field(default_factory=list)
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        device = self.program.placeholders[0].meta["val"].device
        self.write = Writer(self.axis.name, self.axis.ranks, device)
        self.graph, self.call = self.write.graph, self.write.call

    @classmethod
    def of(cls, program: Program, axis: Axis) -> Placer:
        """Walk over a program."""
        placer = cls(program, axis)
        with program.fake_mode, torch.enable_grad():
            placer.walk()
        return placer

    def walk(self) -> None:
        # Inputs come first: leaves as specs split them, everything else whole.
        inputs = [self.graph.placeholder(node.name) for node in self.program.placeholders]
        self.index = self.write.index = self.graph.placeholder(f"index_{self.axis.name}")
        self.record = Record(self.axis.name, self.axis.ranks, self.index)
        for new, node, each in zip(inputs, self.program.placeholders, self.program.inputs, strict=True):
            placement = self.axis.inputs.get(each, REPLICATED)
            split = each.kind == "leaf" and isinstance(placement, Split)
            self.values[node] = Value(new, placement, node.meta["val"], split)
            self.record.values[new] = placement, node.meta["val"]

        # Of a batch that the context axis splits, each rank takes its part of the sequence.
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
        self.graph.output(self.results())

    def visit(self, node: fx.Node) -> None:
        """Place one node: an op by its strategies, or one result of an op that has several."""
        self.write.follow(node)
        if node.target is operator.getitem:
            source, number = self.values[node.args[0]], node.args[1]
            if isinstance(source.node, tuple):
                self.values[node] = source.node[number]
            else:
                new = self.call(operator.getitem, (source.node, number))
                self.values[node] = self.add_value(new, source.placement, node.meta["val"], source.of_leaf)
        else:
            self.values[node] = self.run(node)

    # -------------------------------------------------------------- one op
    def run(self, node: fx.Node) -> Value:
        """Place an op, or a target that is none."""
        sources = [self.values[n] for n in operands_of(node)]
        is_op = isinstance(node.target, OpOverload)
        default = Placer.op if is_op and sources else Placer.take_whole
        return _SPECIAL.get(node.target if is_op else type(node.target), default)(self, node, sources)

    def op(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place an op by the cheapest of its strategies, or by the smaller ops that it is made of."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n].whole)
        placements = tuple(s.placement for s in sources)
        value, line = node.meta["val"], node.meta.get("stack_trace", "")
        call = Call(node.target, args, kwargs, value, placements, self.axis, line)
        find = rule_of(node.target)
        strategies = [OpStrategy((REPLICATED,) * len(sources), REPLICATED), *(find(call) if find else ())]
        strategy = min(strategies, key=lambda strategy: self.preference(sources, strategy, value))
        cost = self.wire_bytes(sources, strategy)

        # Every strategy pays for parts of a sum, which have to be summed for an op that is not linear. Where
        # the best one pays more than that, the op's definition in smaller ops may do with less.
        needed = sum(map(self.least, sources)) if cost >= 1 else 0.0
        if cost > needed:
            cast = "autocast" in self.write.meta
            body = self.write.once((call.key, cast), lambda: expand_call(call, cast))
            if body is not None:
                return self.inline(node, body)
        if cost > needed and find is None:
            self.gathered.append(f"{node.target}: {cost / 1e6:.3f} MB")

        # Convert what the op reads, and write the op.
        reads = [self.convert(s, to) for s, to in zip(sources, strategy.inputs, strict=True)]
        for read, to in zip(operands_of(node), strategy.inputs, strict=True):
            self.keep_sum(read, to)
        if node.target is EXCHANGE:
            reads = [r if r.target is OUTGOING else self.call(OUTGOING, (r,)) for r in reads]
            (read,), (source,), (to,) = reads, sources, strategy.inputs
            self.record.values[read] = to, source.whole
        new = self.write_op(node, call, strategy, reads)

        # Note the call for `check`, and place its results.
        of_leaf = isinstance(strategy.output, Split) and all(s.of_leaf for s in sources)
        if not isinstance(new, list | tuple):
            self.record.calls.append((call, strategy, tuple(reads), new))
            return self.add_value(new, strategy.output, value, of_leaf)
        results = [self.add_value(n, strategy.output, v, of_leaf) for n, v in zip(new, value, strict=True)]
        return Value(tuple(results), strategy.output, value, of_leaf)

    def write_op(self, node: fx.Node, call: Call, strategy: OpStrategy, reads: Sequence[fx.Node]) -> Any:
        """Write the op on this rank's parts, or the function that the strategy runs in its place."""
        if strategy.run is None:
            return self.call(node.target, *local_arguments(node, call, strategy, reads))
        whole = zip(call.tensors, strategy.inputs, strict=True)
        fakes = [t.new_empty(local_shape(t.shape, p, call.ranks)) for t, p in whole]
        key = call.key, strategy.inputs, strategy.output
        return self.write.inline(key, strategy.run, [self.local_index(), *fakes], [self.index, *reads])

    def add_value(self, new: fx.Node, placement: Placement, whole: Any, of_leaf: bool = False) -> Value:
        """Return a new value, and note it for `check`."""
        self.record.values[new] = placement, whole
        return Value(new, placement, whole, of_leaf)

    # -------------------------------------------------------------- special targets
    def outgoing(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place the copy of a message: one for a single exchange is written anew, right before that."""
        (value,) = sources
        if [user.target for user in node.users] == [EXCHANGE]:
            return value
        return self.add_value(self.call(OUTGOING, (value.node,)), value.placement, value.whole, value.of_leaf)

    def constrain(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place a value as `fn` says for this axis, or leave it as it is if `fn` says nothing.

        Raises:
            TraceError: the dim cannot be split over the axis.
        """
        (value,), (_, axes, dims) = sources, node.args
        dim = dict(zip(axes, dims, strict=True)).get(self.axis.name)
        if dim is None:
            new = self.call(CONSTRAIN, (value.node, list(axes), list(dims)))
            return self.add_value(new, value.placement, value.whole, value.of_leaf)
        to = Split(dim) if dim >= 0 else REPLICATED
        shape, axis = value.whole.shape, self.axis
        if isinstance(to, Split) and not fits(shape, to, axis.ranks):
            raise TraceError(
                f"fs.constrain splits dim {dim} of {list(shape)} over {axis.name!r}, {axis.ranks} ranks.",
                fix="split a dim of which every rank gets something.",
            )
        new = self.call(CONSTRAIN, (self.convert(value, to), list(axes), list(dims)))  # for the other axes
        return self.add_value(new, to, value.whole, value.of_leaf)

    def take_whole(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place an op that takes whole values, or a write that could not be replaced by an op without one."""
        cost = sum(self.cost(s, REPLICATED) for s in sources)
        if cost > sum(map(self.least, sources)):
            self.gathered.append(f"{node.target}: {cost / 1e6:.3f} MB")
        reads = iter([self.convert(s, REPLICATED) for s in sources])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(reads))
        return self.add_value(self.call(node.target, args, kwargs), REPLICATED, node.meta["val"])

    def elsewhere(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place a call that another rank runs on whole values, sent as they lie; parts are summed."""
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

    def run_on_first(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place values with a gradient of `fn`'s own, which need not be linear in the gradient that it gets.

        The results become a sum to which only the first rank contributes. So that rank is given their whole
        gradient, and makes the whole gradient of the inputs of it.
        """
        first = self.call(aten.eq.Scalar, (self.index, 0))
        reads = [self.convert(s, REPLICATED) for s in sources]
        inputs = range(node.target.values, node.target.values + node.target.inputs)
        for i in inputs:
            alone = self.call(aten.detach.default, (reads[i],))
            reads[i] = self.call(aten.where.self, (first, reads[i], alone))
        made, results = self.call(node.target, tuple(reads)), []
        many = node.target.values > 1
        for i, whole in enumerate(node.meta["val"] if many else [node.meta["val"]]):
            value = self.call(operator.getitem, (made, i)) if many else made
            part = self.call(aten.where.ScalarOther, (first, value, 0))
            results.append(self.add_value(part, PARTIAL, whole))
        return Value(tuple(results), PARTIAL, node.meta["val"]) if many else results[0]

    def inline(self, node: fx.Node, body: fx.Graph) -> Value:
        """Place the smaller ops that an op is made of in its stead."""
        outside = dict(zip(body.find_nodes(op="placeholder"), operands_of(node), strict=True))
        self.values |= {inner: self.values[n] for inner, n in outside.items()}
        meta = {k: v for k, v in self.write.meta.items() if k != "autocast"}
        for inner in body.nodes:
            if inner.op == "call_function":
                inner.meta = {"val": inner.meta["val"], **meta}
                self.visit(inner)
        self.values |= {n: self.values[inner] for inner, n in outside.items()}
        returned = body.output_node().args[0]
        if isinstance(returned, fx.Node):
            return self.values[returned]
        return Value(tuple(self.values[n] for n in returned), REPLICATED, node.meta["val"])

    # -------------------------------------------------------------- conversions
    def preference(self, sources: Sequence[Value], strategy: OpStrategy, value: Any) -> tuple[float, int]:
        """Return the order of strategies: bytes on the wire first, then how many split values they convert.

        The bytes include those of the sum that a strategy leaves to its readers.
        """
        changed = [s.placement for s, to in zip(sources, strategy.inputs, strict=True) if s.placement != to]
        summed = strategy.output == PARTIAL and PARTIAL not in strategy.inputs and isinstance(value, Tensor)
        later = value.numel() * value.element_size() if summed else 0
        return self.wire_bytes(sources, strategy) + later, sum(p != REPLICATED for p in changed)

    def wire_bytes(self, sources: Sequence[Value], strategy: OpStrategy) -> float:
        """Return the bytes on the wire of all conversions that a strategy needs."""
        return sum(map(self.cost, sources, strategy.inputs))

    def cost(self, value: Value, to: Placement) -> float:
        """Return the bytes on the wire, of all ranks' parts, that a conversion takes."""
        now = value.placement
        scale = LEAF_FACTOR if value.of_leaf and not self.axis.update else 1.0
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
        if isinstance(to, Split) and now.dim != to.dim and not self.axis.update:
            return size / self.axis.ranks
        return size

    def least(self, value: Value) -> float:
        """Return the bytes on the wire that parts of a sum take at least, however they are summed."""
        if not isinstance(value.placement, Partial):
            return 0.0
        shape = value.whole.shape
        return min(self.cost(value, to) for to in (REPLICATED, *(Split(d) for d in range(len(shape)))))

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
        now, write = value.placement, self.write
        same_dim = isinstance(now, Split) and isinstance(to, Split) and now.dim == to.dim
        if same_dim or (self.axis.update and isinstance(to, Split) and now != REPLICATED):
            whole = replace(value, node=self.convert(value, REPLICATED), placement=REPLICATED)
            return self.convert(whole, to)
        meta, write.meta = write.meta, {k: v for k, v in write.meta.items() if k != "autocast"}
        new = write.convert(value.node, value.whole.shape, now, to)
        write.meta = meta
        self.record.conversions.append((value.node, new, now, to))
        self.record.values[new] = to, value.whole
        return new

    # -------------------------------------------------------------- the end
    def results(self) -> list[fx.Node]:
        """Return the program's results: parts of sums, whole values, and new values of leaves split as these.

        Losses and scalars of ranks are averaged later on, so that a part is multiplied by the number of
        ranks.
        """
        written = {index: Input("leaf", path) for path, index in self.program.outputs.writes.items()}
        summed = set(self.program.outputs.summed) if self.program.outputs.loss is not None else set()
        out = []
        for number, node in enumerate(self.program.results):
            value, due = self.values[node], REPLICATED
            if self.axis.update:
                self.write.follow(node)  # a gather for a result belongs to the node that makes it
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
            fakes += [self.local_index()] if self.index.users else []
        if self.index.users:
            inputs.append(Input("axis", axis.name))
        else:
            self.graph.erase_node(self.index)

        eliminate_dead_code(self.graph)
        for node in self.graph.find_nodes(op="call_function", target=OUTGOING):
            (sent,) = node.all_input_nodes
            if sent.target is EXCHANGE and len(sent.users) == 1:  # the received message itself can be sent on
                node.replace_all_uses_with(sent)
                self.graph.erase_node(node)
        with self.program.fake_mode, torch.enable_grad():
            self.record.check(self.graph, lambda: propagate(self.graph, fakes))
        return replace(self.program, graph=self.graph, inputs=tuple(inputs))

    def local_index(self) -> Tensor:
        """Make a fake value of this rank's index."""
        return torch.empty((), dtype=torch.int64, device=self.write.device)


# Targets that are no ops with strategies of their own, by the target or its type.
_SPECIAL: dict[Any, Callable[[Placer, fx.Node, Sequence[Value]], Value]] = {
    OUTGOING: Placer.outgoing,
    CONSTRAIN: Placer.constrain,
    CustomGradient: Placer.run_on_first,
    Elsewhere: Placer.elsewhere,
}
