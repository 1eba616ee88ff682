"""Symbolic: one compiled kernel for graphs that differ in one size, the length of a batch.

The graphs of a kernel at two lengths tell which of their numbers follow the length, and how: each is
`a * n + b`. With these as expressions of a symbol, Inductor compiles once for all lengths. The graph of a
third length takes that kernel only if all its numbers are what the expressions say, and is compiled for
itself otherwise: nothing is assumed of a length that was not traced.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from fnshard.compiler.ir.program import tensors_of
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.compiler.kernels.inductor import Boxed, compile_graph

Expression = tuple[int, int]  # (a, b) of a * n + b
NUMBER = "number"  # its place in a skeleton


@dataclass(frozen=True)
class Form:
    """A graph as what no size changes, and the integers of its arguments, shapes and strides."""

    skeleton: tuple[Any, ...]
    numbers: tuple[int, ...]

    @staticmethod
    def of(module: fx.GraphModule) -> Form:
        """Of a flat graph, before Inductor rewrites it."""
        numbers: list[int] = []

        def note(number: int) -> str:
            numbers.append(number)
            return NUMBER

        places = {node: index for index, node in enumerate(module.graph.nodes)}

        skeleton = []
        for node in module.graph.nodes:
            arguments = rebuilt([node.args, node.kwargs], note, lambda n: ("node", places[n]))
            layouts = [rebuilt(layout, note, places.get) for layout in layouts_of(node)]
            kinds = [(v.dtype, v.device) for v in tensors_of(node)]
            target = _content(getattr(module, node.target)) if node.op == "get_attr" else node.target
            skeleton.append((node.op, target, arguments, layouts, kinds))
        return Form(tuple(skeleton), tuple(numbers))

    def expressions(self, n: int, other: Form, m: int) -> list[Expression] | None:
        """Each number of two forms at the lengths `n` and `m`; None where they are other graphs."""
        if self.skeleton != other.skeleton or n == m:
            return None
        found = []
        for here, there in zip(self.numbers, other.numbers, strict=True):
            slope, odd = divmod(there - here, m - n)
            if odd:
                return None
            found.append((slope, here - slope * n))
        return found

    def fits(self, expressions: Sequence[Expression], n: int) -> bool:
        pairs = zip(self.numbers, expressions, strict=True)
        return all(number == slope * n + offset for number, (slope, offset) in pairs)


def rebuilt(value: Any, number: Callable[[int], Any], node: Callable[[fx.Node], Any]) -> Any:
    """An argument of a node with its integers and nodes replaced, in one order."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return node(leaf)
        return number(leaf) if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf

    return map_aggregate(value, replaced)


def layouts_of(node: fx.Node) -> list[tuple[list[Any], list[Any]]]:
    """Shape and strides of each of its results."""
    return [(list(v.shape), list(v.stride())) for v in tensors_of(node)]


def _content(constant: Any) -> Any:
    """What a constant that a backward has made of its own is compared by: its name tells nothing."""
    if not isinstance(constant, Tensor):
        return constant
    return (
        constant.dtype,
        constant.device,
        constant.shape,
        constant.flatten().view(torch.uint8).cpu().tolist(),
    )


def symbolic_module(
    module: fx.GraphModule, expressions: Sequence[Expression], n: int
) -> tuple[fx.GraphModule, Callable[[int], bool]]:
    """The graph with expressions of a symbol, its first argument, in the place of numbers.

    Args:
        n: the length that `module` is of.

    Returns:
        It, and whether what was assumed so far while tracing and compiling holds at a length.
    """
    from torch._dynamo.source import ConstantSource  # here: they bring sympy and Dynamo
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env, source = ShapeEnv(), ConstantSource("n")
    symbol = env.create_unspecified_symbol(n, source, DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=n, source=source)
    mode = FakeTensorMode(shape_env=env)
    graph, nodes, made = fx.Graph(), dict[fx.Node, fx.Node](), dict[Expression, fx.Node]()
    first = graph.placeholder("n")
    first.meta["val"] = size
    rest = iter(expressions)

    def symbolic(_: int) -> Any:
        slope, offset = next(rest)
        return slope * size + offset if slope else offset

    def as_node(_: int) -> Any:
        slope, offset = key = next(rest)
        if not slope:
            return offset
        if key not in made:
            node = graph.call_function(operator.mul, (first, slope))
            node.meta["val"] = slope * size
            if offset:
                node = graph.call_function(operator.add, (node, offset))
                node.meta["val"] = slope * size + offset
            made[key] = node
        return made[key]

    for old in module.graph.nodes:
        args, kwargs = rebuilt([old.args, old.kwargs], as_node, nodes.__getitem__)
        layouts = [rebuilt(layout, symbolic, nodes.get) for layout in layouts_of(old)]
        with mode, torch.no_grad():
            if old.op == "placeholder":
                nodes[old] = graph.placeholder(old.name)
                like, (shape, stride) = old.meta["val"], layouts[0]
                nodes[old].meta["val"] = torch.empty_strided(
                    shape, stride, dtype=like.dtype, device=like.device
                )
            elif old.op == "call_function":
                nodes[old] = graph.call_function(old.target, args, kwargs)
                values, options = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
                nodes[old].meta["val"] = old.target(*values, **options)
                if layouts_of(nodes[old]) != layouts:  # comparing symbols adds guards: see `holds`
                    raise ValueError(f"{old.target} has other strides where a size is a symbol")
            elif old.op == "get_attr":
                nodes[old] = graph.get_attr(old.target)
                nodes[old].meta["val"] = mode.from_tensor(getattr(module, old.target), static_shapes=True)
            else:
                graph.output(args[0])

    def holds(length: int) -> bool:
        return all(bool(guard.expr.subs({symbol: length})) for guard in env.guards)

    return fx.GraphModule(module, graph), holds


@dataclass(frozen=True, eq=False)
class Sized:
    """A symbolic kernel at one length."""

    compiled: Boxed
    n: int

    def __call__(self, args: list[Tensor]) -> Sequence[Tensor]:
        values = [self.n, *args]
        args.clear()
        return self.compiled(values)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled graph: of the length `n` alone, or of all where its expressions and `holds` say so."""

    form: Form
    n: int
    boxed: Boxed
    expressions: Sequence[Expression] | None = None
    holds: Callable[[int], bool] | None = None

    def at(self, form: Form, n: int) -> Boxed | None:
        """The kernel of a graph of length `n`, if this is one."""
        if self.form.skeleton != form.skeleton:
            return None
        if self.expressions is None or self.holds is None:
            return self.boxed if self.form.numbers == form.numbers else None
        return Sized(self.boxed, n) if form.fits(self.expressions, n) and self.holds(n) else None


@dataclass(eq=False)
class SharedKernels:
    """What is compiled for batches of several lengths, forward and backward (`compiled[True]`)."""

    compiled: dict[bool, list[Compiled]] = field(default_factory=lambda: {False: [], True: []})

    def __len__(self) -> int:
        return sum(map(len, self.compiled.values()))

    def compile(
        self, kernels: Iterable[Kernel], n: int, *, options: Mapping[str, Any]
    ) -> dict[str, tuple[Boxed, Boxed | None]]:
        """Forward and backward of each kernel, by name, compiled where nothing that is compiled fits.

        Args:
            n: the length of the batch that they are of, in any unit.
        """

        def boxed(graph: fx.GraphModule | None, is_backward: bool) -> Any:
            if graph is None:
                return None
            form, known = Form.of(graph), self.compiled[is_backward]
            for each in known:
                if (found := each.at(form, n)) is not None:
                    return found
            compile = partial(compile_graph, backend="inductor", options=options, is_backward=is_backward)
            known.append(_compiled(graph, form, n, known, compile))
            return known[-1].at(form, n)

        return {k.name: (boxed(k.forward, False), boxed(k.backward, True)) for k in kernels}


def _compiled(
    graph: fx.GraphModule, form: Form, n: int, known: Sequence[Compiled], compile: Callable[..., Boxed]
) -> Compiled:
    """For all lengths, where a graph of another one is known; else for this one."""
    for other in known:
        expressions = other.form.expressions(other.n, form, n)
        if expressions is None:
            continue
        try:
            module, holds = symbolic_module(graph, expressions, n)
            made = Compiled(form, n, compile(module), expressions, holds)
        except Exception as error:
            warnings.warn(f"a kernel is compiled for each length by itself: {error}", stacklevel=2)
            break
        if made.at(form, n) is not None:
            return made
    return Compiled(form, n, compile(graph))
