"""Custom gradients: values whose derivative is a graph of its own, as one node of a program.

It is what `jax.custom_vjp` is in JAX. The node's operator holds the graph. Where a segment is differentiated,
the graph becomes plain ATen ops, so that compilers, remat and dead code elimination see no boundary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import Program, eliminate_dead_code, replay


@dataclass(frozen=True, eq=False)
class CustomGradient:
    """An operator `(*values, *inputs, *captured) -> values`, with gradients for `inputs` alone.

    Args:
        name: the name of the function or hook whose backward it is.
        graph: `(*gradients of values, *values, *captured) -> gradients of inputs`, without side effects.
        values: the number of values, which are floating point or complex.
        inputs: the number of inputs.

    >>> graph = fx.Graph()
    >>> grad, value = graph.placeholder("grad"), graph.placeholder("value")
    >>> _ = graph.output((graph.call_function(torch.ops.aten.neg.default, (grad,)),))
    >>> reverse, x = CustomGradient("reverse", graph, 1, 1), torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(reverse(x, x).sum(), x)
    (tensor([-1., -1.]),)
    """

    name: str
    graph: fx.Graph = field(repr=False)
    values: int
    inputs: int

    def __call__(self, *args: Tensor) -> Any:
        """Return the values, in memory of their own; a tuple if there are several."""
        results = Attach.apply(self, *args)
        return results[0] if self.values == 1 else results

    @property
    def __name__(self) -> str:
        return self.name

    def __str__(self) -> str:
        """Return a text that is the same for the same graph."""
        return f"{self.name}.backward#{self._digest}"

    @cached_property
    def _digest(self) -> str:
        """Return a hash of the graph, whose nodes are named by their order."""
        names = {node: f"v{i}" for i, node in enumerate(self.graph.nodes)}
        lines = [str((self.values, self.inputs))]
        for node in self.graph.nodes:
            op = node.target if node.op == "call_function" else node.op
            arguments = () if node.op == "placeholder" else (node.args, node.kwargs)
            lines.append(f"{names[node]} = {op}{fx.map_arg(arguments, names.__getitem__)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def make_count_graph(program: Program) -> fx.Graph | None:
    """Return a graph from a program's inputs to the count of its Mean, if a `CustomGradient` needs that.

    A custom backward need not be linear in its gradients. So it has to get those of the mean itself, and not
    those of the sum, which is divided by the count later on. Return None if the program has no such node, or
    if the count depends on more than the batch.
    """
    program = program.traced or program
    has_custom = any(isinstance(node.target, CustomGradient) for node in program.graph.nodes)
    if program.outputs.count is None or not has_custom:
        return None

    # Copy the program, and keep of it what the count depends on.
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(program.graph, copies)
    graph.output((copies[program.results[program.outputs.count]],))
    eliminate_dead_code(graph)

    # The count is known ahead only if it reads the batch alone, and exchanges nothing.
    inputs = zip(program.inputs, program.placeholders, strict=True)
    kinds_read = {i.kind for i, node in inputs if copies[node].users}
    has_exchanges = any(getattr(node.target, "namespace", "") == "fnshard" for node in graph.nodes)
    return None if has_exchanges or kinds_read - {"batch", "constant"} else graph


class Attach(torch.autograd.Function):
    """A function of autograd that runs a `CustomGradient`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rule: CustomGradient, *args: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in args[: rule.values])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.rule, *args = inputs
        ctx.save_for_backward(*output, *args[ctx.rule.values + ctx.rule.inputs :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rule, saved = ctx.rule, ctx.saved_tensors
        of_inputs = replay(rule.graph, (*gradients, *saved))
        of_captured = [None] * (len(saved) - rule.values)
        return None, *[None] * rule.values, *of_inputs, *of_captured
