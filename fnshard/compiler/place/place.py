"""Place: a Program of whole values -> the one that each rank along a mesh axis runs, exchanges included.

One walk over the program, forward: each value has a placement, each op takes the cheapest of its strategies
(`rules`), and what it reads is converted where it is otherwise, by an exchange that is one line of the
schedule. Several axes are placed in turn; to each the exchanges of those before are ops like others.
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
from fnshard.compiler.place.expand import expanded
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
NEVER, OF_LEAVES = math.inf, 1e6  # bytes: what cannot be; how much dearer what specs have split is


def place_axes(
    program: Program,
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    residual: Residual,
    sequences: Mapping[str, int],
    attention: ContextAttention = "auto",
) -> Program:
    """The program of each rank, placed over the context axis and every axis that a spec's `compute` names but
    data axes (`place.experts`).

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
    for node in program.graph.find_nodes(op="call_function", target=CONSTRAIN):
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
    return program if program is traced else replace(program, traced=traced)


def place(program: Program, axis: Axis) -> Program:
    """The program of each rank along `axis`."""
    return Placer.of(remove_writes(program), axis).placed()


@dataclass(frozen=True)
class Value:
    """A value that is placed: its node, what it is, and the whole (fake) value.

    `node`: a tuple of values where an op's several results are placed each by itself. `of_leaf`: it is made
    of leaves that specs have split.
    """

    node: Any
    placement: Placement
    whole: Any
    of_leaf: bool = False


@dataclass
class Placer:
    """The walk over a program without writes: what each of its values is, and the graph that comes of it."""

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
        inputs = [self.graph.placeholder(node.name) for node in self.program.placeholders]
        self.index = self.write.index = self.graph.placeholder(f"index_{self.axis.name}")
        self.record = Record(self.axis.name, self.axis.ranks, self.index)
        for new, node, each in zip(inputs, self.program.placeholders, self.program.inputs, strict=True):
            placement = self.axis.inputs.get(each, REPLICATED)
            split = each.kind == "leaf" and isinstance(placement, Split)
            self.values[node] = Value(new, placement, node.meta["val"], split)
            self.record.values[new] = placement, node.meta["val"]
        for node, each in zip(self.program.placeholders, self.program.inputs, strict=True):
            value, to = self.values[node], self.axis.sliced.get(each)
            if to is not None and fits(value.whole.shape, to, self.axis.ranks):
                part = self.convert(value, to)
                self.values[node] = replace(value, node=part, placement=to)
                self.converted[part, REPLICATED] = value.node
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.visit(node)
        self.graph.output(self.results())

    def visit(self, node: fx.Node) -> None:
        self.write.follow(node)
        if node.target is operator.getitem:
            source, number = self.values[node.args[0]], node.args[1]
            if isinstance(source.node, tuple):
                self.values[node] = source.node[number]
            else:
                new = self.call(operator.getitem, (source.node, number))
                self.values[node] = self.recorded(new, source.placement, node.meta["val"], source.of_leaf)
        else:
            self.values[node] = self.run(node)

    # -------------------------------------------------------------- one op
    def run(self, node: fx.Node) -> Value:
        sources = [self.values[n] for n in operands_of(node)]
        is_op = isinstance(node.target, OpOverload)
        default = Placer.op if is_op and sources else Placer.replicated
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
        # What every strategy pays: parts of a sum have to be summed for an op that is not linear.
        needed = sum(map(self.least, sources)) if cost >= 1 else 0.0
        if cost > needed:
            cast = "autocast" in self.write.meta
            body = self.write.once((call.key, cast), lambda: expanded(call, cast))
            if body is not None:
                return self.inlined(node, body)
        if cost > needed and find is None:
            self.gathered.append(f"{node.target}: {cost / 1e6:.3f} MB")
        reads = [self.convert(s, to) for s, to in zip(sources, strategy.inputs, strict=True)]
        for read, to in zip(operands_of(node), strategy.inputs, strict=True):
            self.keep_sum(read, to)
        if node.target is EXCHANGE:
            reads = [r if r.target is OUTGOING else self.call(OUTGOING, (r,)) for r in reads]
            (read,), (source,), (to,) = reads, sources, strategy.inputs
            self.record.values[read] = to, source.whole
        new = self.called(node, call, strategy, reads)
        of_leaf = isinstance(strategy.output, Split) and all(s.of_leaf for s in sources)
        if not isinstance(new, list | tuple):
            self.record.calls.append((call, strategy, tuple(reads), new))
            return self.recorded(new, strategy.output, value, of_leaf)
        results = [self.recorded(n, strategy.output, v, of_leaf) for n, v in zip(new, value, strict=True)]
        return Value(tuple(results), strategy.output, value, of_leaf)

    def called(self, node: fx.Node, call: Call, strategy: OpStrategy, reads: Sequence[fx.Node]) -> Any:
        """The op on this rank's parts, or what the strategy runs in its place."""
        if strategy.run is None:
            return self.call(node.target, *local_arguments(node, call, strategy, reads))
        whole = zip(call.tensors, strategy.inputs, strict=True)
        fakes = [t.new_empty(local_shape(t.shape, p, call.ranks)) for t, p in whole]
        key = call.key, strategy.inputs, strategy.output
        return self.write.inline(key, strategy.run, [self.local_index(), *fakes], [self.index, *reads])

    def recorded(self, new: fx.Node, placement: Placement, whole: Any, of_leaf: bool = False) -> Value:
        """A new value, which `check` will see."""
        self.record.values[new] = placement, whole
        return Value(new, placement, whole, of_leaf)

    # -------------------------------------------------------------- special targets
    def outgoing(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """For one exchange alone it comes right before it, after what that converts."""
        (value,) = sources
        if [user.target for user in node.users] == [EXCHANGE]:
            return value
        return self.recorded(self.call(OUTGOING, (value.node,)), value.placement, value.whole, value.of_leaf)

    def constrained(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """Place a value as `fn` says of this axis; leave it as it is where `fn` says nothing.

        Raises:
            TraceError: the dim cannot be split over the axis.
        """
        (value,), (_, axes, dims) = sources, node.args
        dim = dict(zip(axes, dims, strict=True)).get(self.axis.name)
        if dim is None:
            new = self.call(CONSTRAIN, (value.node, list(axes), list(dims)))
            return self.recorded(new, value.placement, value.whole, value.of_leaf)
        to = Split(dim) if dim >= 0 else REPLICATED
        shape, axis = value.whole.shape, self.axis
        if isinstance(to, Split) and not fits(shape, to, axis.ranks):
            raise TraceError(
                f"fs.constrain splits dim {dim} of {list(shape)} over {axis.name!r}, {axis.ranks} ranks.",
                fix="a dim that has something for every rank.",
            )
        new = self.call(CONSTRAIN, (self.convert(value, to), list(axes), list(dims)))  # for the other axes
        return self.recorded(new, to, value.whole, value.of_leaf)

    def replicated(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """An op that takes whole values, or a write that no op without one replaces."""
        cost = sum(self.cost(s, REPLICATED) for s in sources)
        if cost > sum(map(self.least, sources)):
            self.gathered.append(f"{node.target}: {cost / 1e6:.3f} MB")
        reads = iter([self.convert(s, REPLICATED) for s in sources])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(reads))
        return self.recorded(self.call(node.target, args, kwargs), REPLICATED, node.meta["val"])

    def elsewhere(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """On whole values, each of which is sent as it lies. Parts of a sum are summed first."""
        reads = [self.convert(s, REPLICATED) if isinstance(s.placement, Partial) else s.node for s in sources]
        to = [each.get(self.axis.name, REPLICATED) for each in node.target.results]
        pairs = zip(node.target.values, to, strict=True)
        target = replace(node.target, values=tuple(local_value(v, p, self.axis.ranks) for v, p in pairs))
        new = self.call(target, tuple(reads))
        results = [
            self.recorded(self.call(operator.getitem, (new, i)), placement, whole)
            for i, (placement, whole) in enumerate(zip(to, node.target.values, strict=True))
        ]
        return Value(tuple(results), REPLICATED, node.target.values)

    def on_the_first(self, node: fx.Node, sources: Sequence[Value]) -> Value:
        """A gradient that `fn` computes by itself, which need not be linear in the one that it is given.

        The results are a sum of which the first rank alone has a part: it is given their whole gradient, and
        makes of it the whole gradient of the inputs.
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
            results.append(self.recorded(part, PARTIAL, whole))
        return Value(tuple(results), PARTIAL, node.meta["val"]) if many else results[0]

    def inlined(self, node: fx.Node, body: fx.Graph) -> Value:
        """Return what an op does in smaller ops, placed in its stead."""
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
        """Return what a strategy costs, parts that are then to be summed among it; of equal ones the one that
        takes what is split as it is."""
        changed = [s.placement for s, to in zip(sources, strategy.inputs, strict=True) if s.placement != to]
        summed = strategy.output == PARTIAL and PARTIAL not in strategy.inputs and isinstance(value, Tensor)
        later = value.numel() * value.element_size() if summed else 0
        return self.wire_bytes(sources, strategy) + later, sum(p != REPLICATED for p in changed)

    def wire_bytes(self, sources: Sequence[Value], strategy: OpStrategy) -> float:
        return sum(map(self.cost, sources, strategy.inputs))

    def cost(self, value: Value, to: Placement) -> float:
        """Bytes on the wire, of all ranks' parts."""
        now = value.placement
        scale = OF_LEAVES if value.of_leaf and not self.axis.update else 1.0
        if now == to or (value.node, to) in self.converted:
            return 0.0
        size = value.whole.numel() * value.whole.element_size() * scale
        if isinstance(to, Partial):
            return NEVER
        if isinstance(to, Split) and not fits(value.whole.shape, to, self.axis.ranks, self.axis.update):
            return NEVER
        if isinstance(now, Partial):
            if to == REPLICATED or self.axis.update:
                return 2.0 * size
            return size if self.axis.residual == "split" and now == PARTIAL else NEVER
        if not isinstance(now, Split):
            return 0.0  # a slice
        if isinstance(to, Split) and now.dim != to.dim and not self.axis.update:
            return size / self.axis.ranks
        return size

    def least(self, value: Value) -> float:
        """Bytes on the wire of a sum's parts, however it is summed."""
        if not isinstance(value.placement, Partial):
            return 0.0
        shape = value.whole.shape
        return min(self.cost(value, to) for to in (REPLICATED, *(Split(d) for d in range(len(shape)))))

    def keep_sum(self, node: fx.Node, to: Placement) -> None:
        """What has been summed is a sum to all that read it from here on."""
        value = self.values[node]
        if isinstance(value.placement, Partial) and not isinstance(to, Partial):
            to = REPLICATED if self.axis.update else to
            self.values[node] = replace(value, node=self.convert(value, to), placement=to)

    def convert(self, value: Value, to: Placement) -> fx.Node:
        """The value as `to`, made once."""
        if value.placement == to:
            return value.node
        key = value.node, to
        if key not in self.converted:
            self.converted[key] = self.conversion(value, to)
        return self.converted[key]

    def conversion(self, value: Value, to: Placement) -> fx.Node:
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
        """Return what the program returns: sums of all ranks' parts, and whole values; as the leaf itself
        what is written to one.

        Ranks' losses and scalars are averaged, so that a part counts for as many as there are ranks.
        """
        written = {index: Input("leaf", path) for path, index in self.program.outputs.writes.items()}
        summed = set(self.program.outputs.summed) if self.program.outputs.loss is not None else set()
        out = []
        for number, node in enumerate(self.program.results):
            value, due = self.values[node], REPLICATED
            if self.axis.update:
                self.write.follow(
                    node
                )  # what is gathered for a result is gathered for the node that makes it
            if number in summed and value.placement == PARTIAL:
                out.append(self.call(aten.mul.Tensor, (value.node, self.axis.ranks)))
            else:
                due = self.axis.inputs.get(written.get(number), REPLICATED)
                out.append(self.convert(value, due))
            self.record.results.append((number in summed, value.node, out[-1], due))
        return out

    def placed(self) -> Program:
        """The new program, its values propagated."""
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
            if sent.target is EXCHANGE and len(sent.users) == 1:  # nobody else reads what that has made
                node.replace_all_uses_with(sent)
                self.graph.erase_node(node)
        with self.program.fake_mode, torch.enable_grad():
            self.record.check(self.graph, lambda: propagate(self.graph, fakes))
        return replace(self.program, graph=self.graph, inputs=tuple(inputs))

    def local_index(self) -> Tensor:
        return torch.empty((), dtype=torch.int64, device=self.write.device)


# What is no op with strategies of its own: by its target, or the type of that.
_SPECIAL: dict[Any, Callable[[Placer, fx.Node, Sequence[Value]], Value]] = {
    OUTGOING: Placer.outgoing,
    CONSTRAIN: Placer.constrained,
    CustomGradient: Placer.on_the_first,
    Elsewhere: Placer.elsewhere,
}
