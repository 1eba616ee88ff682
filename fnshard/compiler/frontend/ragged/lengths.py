"""Lengths that depend on data, and ops that have them, while a graph is run on tensors of known sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.size_bounds import is_promised, require
from fnshard.compiler.ir.failures import way_out
from fnshard.errors import TraceError

# Functions of Python's arithmetic with lengths, each with the one that computes it on tensors.
_NODE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: lambda v: v,
    torch.sym_max: torch.maximum,
    torch.sym_min: torch.minimum,
    operator.neg: torch.neg,
}


class Unbounded(Exception):
    """A signal that a length depends on data, and that no bound of it is known."""


@dataclass
class Ragged:
    """A run of a graph with symbolic lengths on tensors of known sizes.

    Args:
        values: the value of each node that has run.
        sizes, counts: the size and the count of every symbol that is known; a count is a 0-d int64 tensor, at
            most the size.
        met: the symbols that nodes have made so far, before some were found to be equal.
    """

    shape_env: Any
    values: dict[fx.Node, Any] = field(default_factory=dict)
    sizes: dict[Any, int] = field(default_factory=dict)
    counts: dict[Any, Tensor] = field(default_factory=dict)
    met: set[Any] = field(default_factory=set)

    @cached_property
    def equal(self) -> dict[Any, Any]:
        """Return expressions that `fn` takes for a simpler one, each with the latter.

        torch would assert at run time that they are equal.
        """
        equal: dict[Any, Any] = {}
        for asserts in self.shape_env.deferred_runtime_asserts.values():
            for each in asserts:
                if type(each.expr).__name__ != "Equality":
                    continue
                # An integer is simpler than a symbol, and a symbol than an expression.
                sides = map(self.shape_env.replace, each.expr.args)
                simple, other = sorted(sides, key=lambda e: (not e.is_Integer, not e.is_Symbol, str(e)))
                if simple != other:
                    equal[other] = simple
        return equal

    def expression(self, length: Any) -> Any:
        """Return the simplest sympy expression of a length that is a SymInt; an int itself."""
        if not isinstance(length, torch.SymInt):
            return length
        expression = self.shape_env.replace(length.node.expr)
        while expression in self.equal:
            expression = self.equal[expression]
        return expression

    def size(self, length: Any) -> int:
        """Return the size of a dim of this length.

        Raises:
            Unbounded: it is not known.
        """
        expression = self.expression(length)
        return expression if isinstance(expression, int) else _compute_most(expression, self.sizes)

    def count(self, length: Any) -> Any:
        """Return how many entries of a dim of this length are values: an int, or a 0-d int64 tensor."""
        expression = self.expression(length)
        if isinstance(expression, int) or not expression.free_symbols:
            return int(expression)
        return _evaluate(expression, self.counts)

    def dims(self, value: Any) -> dict[int, Any]:
        """Return the ragged dims of a tensor of the symbolic trace, each with its length."""
        if not isinstance(value, Tensor):
            return {}
        return {d: n for d, n in enumerate(value.shape) if symbols(self.expression(n))}

    def valid(self, value: Tensor, dims: Collection[int] | None = None) -> Tensor | None:
        """Return which entries along ragged dims are values, as bools that broadcast; None if all are.

        Args:
            value: a tensor of the symbolic trace.
            dims: the dims to look at; None is all.
        """
        masks = []
        for dim, length in self.dims(value).items():
            if dims is None or dim in dims:
                mask = torch.arange(self.size(length), device=value.device) < self.count(length)
                masks.append(mask.view(-1, *[1] * (value.dim() - dim - 1)))
        return functools.reduce(operator.and_, masks) if masks else None

    def fill(self, node: fx.Node, fill: Any, dims: Collection[int] | None = None) -> Tensor:
        """Return a node's tensor with the number `fill` where its entries are padding."""
        valid, value = self.valid(node.meta["val"], dims), self.values[node]
        return value if valid is None else value.masked_fill(~valid, fill)

    def index(self, node: fx.Node) -> Tensor:
        """Return a node's integers, with the first of them, or 0, where entries are padding."""
        value = self.values[node]
        for dim, length in self.dims(node.meta["val"]).items():
            first = torch.where(self.count(length) > 0, value.narrow(dim, 0, 1), 0)
            value = torch.where(self.valid(node.meta["val"], [dim]), value, first)
        return value

    def number(self, node: fx.Node) -> Any:
        """Return the true value of a length, or of Python's arithmetic with lengths, as a tensor."""
        if not isinstance(node, fx.Node):
            return node
        if isinstance(node.meta["val"], torch.SymInt):
            return self.count(node.meta["val"])
        values = [v.double() if isinstance(v, Tensor) else v for v in map(self.number, node.args)]
        return _NODE_FUNCTIONS.get(node.target, node.target)(*values)

    def define(self, node: fx.Node, length: Any, needed: Tensor, most: int | None) -> int:
        """Record the count of a length that a node makes, and return its size.

        Args:
            needed: the true length, 0-d int64.
            most: the largest that it can be without any promise; None if that is not known.

        Raises:
            Unbounded: neither `most` nor a promise bounds it.
        """
        upper = self.shape_env.bound_sympy(length.node.expr).upper  # promised, or what torch knows by itself
        promised = int(upper) if upper.is_Integer and int(upper) < (1 << 62) else None
        bounds = [v for v in (promised, most) if v is not None]
        if not bounds:
            raise Unbounded
        size = min(bounds)

        # The step reports a length that exceeds its size, or that differs from one that it is combined with.
        is_new = length.node._expr not in self.met
        excess = self._record_count(length, needed.clamp(max=size), needed)
        if is_new and excess is None and (size != most or is_promised(length)):
            excess = needed - size
        self.sizes.setdefault(self.expression(length), size)
        size = self.size(length)
        if excess is not None:
            require(excess, size, op_name(node), node.meta.get("stack_trace", ""))
        return size

    def check_equal(self) -> None:
        """Have the step report lengths that differ although `fn` takes them for equal."""
        pairs = []
        for other, simple in self.equal.items():
            if symbols(other) | symbols(simple) <= self.counts.keys():
                pairs.append((_evaluate(other, self.counts), _evaluate(simple, self.counts)))
        if pairs:
            require(sum((a - b).abs() for a, b in pairs), 0, "a length that `fn` takes for another")

    def _record_count(self, length: Any, count: Tensor, needed: Tensor) -> Tensor | None:
        """Record a count; or return by how much it differs from the length that `fn` combines it with."""
        symbol, expression = length.node._expr, self.expression(length)
        is_met, is_known = symbol in self.met, symbols(expression) <= self.counts.keys()
        self.met.add(symbol)
        if not is_known:  # the first length of this expression defines its count
            self.counts[expression] = count
            return None
        return None if is_met else (needed - self.count(length)).abs()


@dataclass(frozen=True)
class RaggedOp:
    """A node whose inputs or outputs are ragged.

    Args:
        ragged: the run that it is a part of.
        node: the node.
        arguments: its arguments by name, with tensors of known sizes.
        raw: its arguments by name, with nodes in the place of tensors.
    """

    ragged: Ragged
    node: fx.Node
    arguments: dict[str, Any]
    raw: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def name(self) -> str:
        """The name of the op, without the underscore of one that works in place."""
        return op_name(self.node).rstrip("_")

    def dims(self, name: str) -> dict[int, Any]:
        """Return the ragged dims of an argument, each with its length."""
        node = self.raw[name]
        return self.ragged.dims(node.meta["val"]) if isinstance(node, fx.Node) else {}

    def fill(self, name: str, fill: Any, dims: Collection[int] | None = None) -> Any:
        """Return an argument with the number `fill` where its entries are padding."""
        return self.ragged.fill(self.raw[name], fill, dims) if self.dims(name) else self[name]

    def run(self, /, **changed: Any) -> Any:
        """Call the op, with some of its arguments changed."""
        given, schema, op = self.arguments | changed, self.node.target._schema.arguments, self.node.target
        if any(isinstance(given[a.name], Tensor) and "number" in str(a.real_type) for a in schema):
            op = op.overloadpacket  # as div.Tensor takes what div.Scalar does not
        args = [given[a.name] for a in schema if not a.kwarg_only]
        return op(*args, **{a.name: given[a.name] for a in schema if a.kwarg_only})

    def make_error(self, text: str) -> TraceError:
        """Make the error for a call that has no exact form on known sizes."""
        return make_error(self.node, text)


def make_error(node: fx.Node, text: str) -> TraceError:
    """Make the error for a node that lengths which depend on data cannot pass."""
    name, place = op_name(node), node.meta.get("stack_trace", "")
    error = TraceError(
        "a shape in `fn` depends on a tensor's value, where known sizes cannot stand for it:",
        [f"at {place}", f"{name} {text}"] if place else [f"{name} {text}"],
        way_out(
            name,
            "fs.bounded(x, size) says how long x is at most; or mask instead of selecting: torch.where, "
            "weights of 0 and 1; or put rows back, out.index_add(0, index, rows), before what mixes them.",
        ),
    )
    error.placed = True
    return error


def op_name(node: fx.Node) -> str:
    """Return `index_add_` for `aten.index_add_.default`, say."""
    return getattr(getattr(node.target, "overloadpacket", node.target), "__name__", str(node.target))


def symbols(expression: Any) -> set[Any]:
    """Return the symbols of a sympy expression or an int."""
    return getattr(expression, "free_symbols", set())


def _compute_most(expression: Any, sizes: Mapping[Any, int]) -> int:
    """Return the largest value of an expression of lengths, each between 0 and its size."""
    if expression.is_Symbol or expression.is_Integer:
        return _evaluate(expression, sizes)
    operation = _name_operation(expression)
    # A product with a negative factor is at most 0, since lengths are not negative.
    if operation == "Mul" and any(e.is_Integer and e < 0 for e in expression.args):
        return 0
    if operation == "Min":
        return min(_compute_most(e, sizes) for e in expression.args if symbols(e) <= sizes.keys())
    return functools.reduce(_ARITHMETIC[operation], [_compute_most(e, sizes) for e in expression.args])


def _evaluate(expression: Any, counts: Mapping[Any, Any]) -> Any:
    """Compute a sympy expression of known counts."""
    if expression.is_Symbol:
        if expression not in counts:
            raise Unbounded
        return counts[expression]
    if expression.is_Integer:
        return int(expression)
    values = [_evaluate(e, counts) for e in expression.args]
    return functools.reduce(_ARITHMETIC[_name_operation(expression)], values)


def _name_operation(expression: Any) -> str:
    """Return the name of a sympy expression's operation.

    Raises:
        Unbounded: it is none of those that are known here.
    """
    name = type(expression).__name__
    if expression.is_Add or expression.is_Mul:
        name = "Add" if expression.is_Add else "Mul"
    if name not in _ARITHMETIC:
        raise Unbounded
    return name


def _make_extreme(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    """Return a minimum or maximum of numbers and 0-d tensors."""

    def compute(a: Any, b: Any) -> Any:
        value = choose(torch.as_tensor(a), torch.as_tensor(b))
        return value if isinstance(a, Tensor) or isinstance(b, Tensor) else int(value)

    return compute


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "Min": _make_extreme(torch.minimum),
    "Max": _make_extreme(torch.maximum),
}
