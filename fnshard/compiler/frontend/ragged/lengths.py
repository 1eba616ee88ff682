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

_ROOTS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: lambda v: v,
    torch.sym_max: torch.maximum,
    torch.sym_min: torch.minimum,
    operator.neg: torch.neg,
}


class Unbounded(Exception):
    """An error: nothing says how long a tensor can be whose length depends on data."""


@dataclass
class Ragged:
    """A graph with symbolic lengths while it is run with tensors of known sizes.

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
        """Return expressions that `fn` takes for a simpler one, which torch would assert when it runs."""
        asserted = [a.expr for each in self.shape_env.deferred_runtime_asserts.values() for a in each]
        pairs = [map(self.shape_env.replace, e.args) for e in asserted if type(e).__name__ == "Equality"]
        ordered = [sorted(p, key=lambda e: (not e.is_Integer, not e.is_Symbol, str(e))) for p in pairs]
        return {other: simple for simple, other in ordered if simple != other}

    def expression(self, length: Any) -> Any:
        """Return the simplest sympy expression of a length that is a SymInt; an int as it is."""
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
        return expression if isinstance(expression, int) else _most(expression, self.sizes)

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
        found = []
        for dim, length in self.dims(value).items():
            if dims is None or dim in dims:
                known = torch.arange(self.size(length), device=value.device) < self.count(length)
                found.append(known.view(-1, *[1] * (value.dim() - dim - 1)))
        return functools.reduce(operator.and_, found) if found else None

    def fill(self, node: fx.Node, fill: Any, dims: Collection[int] | None = None) -> Tensor:
        """Return a node's tensor with the number `fill` where its entries are no values."""
        valid, value = self.valid(node.meta["val"], dims), self.values[node]
        return value if valid is None else value.masked_fill(~valid, fill)

    def index(self, node: fx.Node) -> Tensor:
        """Return a node's integers, with the first of them, or 0, where entries are no values."""
        value = self.values[node]
        for dim, length in self.dims(node.meta["val"]).items():
            first = torch.where(self.count(length) > 0, value.narrow(dim, 0, 1), 0)
            value = torch.where(self.valid(node.meta["val"], [dim]), value, first)
        return value

    def number(self, node: fx.Node) -> Any:
        """Return the true value of a length, or of what Python's arithmetic made of one, as a tensor."""
        if not isinstance(node, fx.Node):
            return node
        if isinstance(node.meta["val"], torch.SymInt):
            return self.count(node.meta["val"])
        values = [v.double() if isinstance(v, Tensor) else v for v in map(self.number, node.args)]
        return _ROOTS.get(node.target, node.target)(*values)

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

        # The step reports a length that exceeds its size, or that differs from one it is combined with.
        is_new = length.node._expr not in self.met
        excess = self._count(length, needed.clamp(max=size), needed)
        if is_new and excess is None and (size != most or is_promised(length)):
            excess = needed - size
        self.sizes.setdefault(self.expression(length), size)
        size = self.size(length)
        if excess is not None:
            require(excess, size, op_name(node), node.meta.get("stack_trace", ""))
        return size

    def check_equal(self) -> None:
        """Have the step report lengths that differ although `fn` takes them for equal."""
        known = [p for p in self.equal.items() if symbols(p[0]) | symbols(p[1]) <= self.counts.keys()]
        values = [[_evaluate(e, self.counts) for e in pair] for pair in known]
        if values:
            require(sum((a - b).abs() for a, b in values), 0, "a length that `fn` takes for another")

    def _count(self, length: Any, count: Tensor, needed: Tensor) -> Tensor | None:
        """Record a count; or return by how much it differs from the length that `fn` combines it with."""
        own, expression = length.node._expr, self.expression(length)
        is_met, is_known = own in self.met, symbols(expression) <= self.counts.keys()
        self.met.add(own)
        if not is_known:
            self.counts[expression] = count
            return None
        return None if is_met else (needed - self.count(length)).abs()


@dataclass(frozen=True)
class RaggedOp:
    """A node whose inputs or outputs are ragged, with its arguments by name, of known sizes."""

    ragged: Ragged
    node: fx.Node
    arguments: dict[str, Any]
    raw: dict[str, Any]  # nodes in the place of tensors

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def name(self) -> str:
        """The op's name, without the underscore of an op in place."""
        return op_name(self.node).rstrip("_")

    def dims(self, name: str) -> dict[int, Any]:
        node = self.raw[name]
        return self.ragged.dims(node.meta["val"]) if isinstance(node, fx.Node) else {}

    def fill(self, name: str, fill: Any, dims: Collection[int] | None = None) -> Any:
        """Return an argument with the number `fill` where its entries are no values."""
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
        [*([f"at {place}"] if place else []), f"{name} {text}"],
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


def _most(expression: Any, sizes: Mapping[Any, int]) -> int:
    """Return the largest value of an expression of lengths, each between 0 and its size."""
    if expression.is_Symbol or expression.is_Integer:
        return _evaluate(expression, sizes)
    operation = _operation(expression)
    if operation == "Mul" and any(e.is_Integer and e < 0 for e in expression.args):
        return 0
    if operation == "Min":
        return min(_most(e, sizes) for e in expression.args if symbols(e) <= sizes.keys())
    return functools.reduce(_ARITHMETIC[operation], [_most(e, sizes) for e in expression.args])


def _evaluate(expression: Any, counts: Mapping[Any, Any]) -> Any:
    """Compute a sympy expression of known counts."""
    if expression.is_Symbol:
        if expression not in counts:
            raise Unbounded
        return counts[expression]
    if expression.is_Integer:
        return int(expression)
    values = [_evaluate(e, counts) for e in expression.args]
    return functools.reduce(_ARITHMETIC[_operation(expression)], values)


def _operation(expression: Any) -> str:
    """Return the name of a sympy expression's operation, if it is one that is known."""
    name = "Add" if expression.is_Add else "Mul" if expression.is_Mul else type(expression).__name__
    if name not in _ARITHMETIC:
        raise Unbounded
    return name


def _extreme(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    """Return a minimum or maximum of numbers and 0-d tensors."""

    def of(a: Any, b: Any) -> Any:
        found = choose(torch.as_tensor(a), torch.as_tensor(b))
        return found if isinstance(a, Tensor) or isinstance(b, Tensor) else int(found)

    return of


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "Min": _extreme(torch.minimum),
    "Max": _extreme(torch.maximum),
}
