"""Write the code of a distinct segment with fresh numbers, so that equal blocks are equal text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import ANY_STRIDES, Input, describe, replay, short_dtype
from fnshard.compiler.ir.values import Kind, ValueName


@dataclass(frozen=True)
class Argument:
    """A description of a segment's input or output."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: str  # "leaf", "batch", "constant", "axis", "key" or "value"

    @staticmethod
    def of(value: Tensor, kind: str) -> Argument:
        return Argument(
            tuple(value.shape), tuple(value.stride()), value.dtype, value.device, value.requires_grad, kind
        )

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{self.kind} {short_dtype(self.dtype)}[{shape}]" + ("'" if self.requires_grad else "")


@dataclass(frozen=True)
class SegmentSource:
    """One distinct segment: a graph over `inputs` that returns `outputs`, and its key."""

    graph: fx.Graph
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    key: str
    code: str

    def __call__(self, *args: Tensor) -> tuple[Any, ...]:
        """Run the graph, whose ops are not decomposed yet, each in the autocast mode it was traced in."""
        return replay(self.graph, args)

    def __str__(self) -> str:
        return self.code


def extract(
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    lazy: set[fx.Node],
    placeholders: Mapping[fx.Node, Input],
) -> tuple[SegmentSource, tuple[ValueName, ...]]:
    """Return the source of a segment, and the program names of its inputs in order.

    Args:
        nodes: its main nodes.
        outputs: the nodes that others read.
        lazy: nodes that are copied into each segment that reads them.
        placeholders: the inputs of the program.
    """
    main = set(nodes)
    copied: dict[fx.Node, fx.Node] = {}
    inputs: dict[fx.Node, str] = {}
    graph = fx.Graph()

    def copy(node: fx.Node) -> fx.Node:
        if node in copied:
            return copied[node]
        # What another segment makes, and each input of the program, is an input of this segment.
        if node in placeholders or (node not in main and node not in lazy):
            inputs[node] = placeholders[node].kind if node in placeholders else "value"
            copied[node] = graph.placeholder(f"a{len(inputs) - 1}")
            copied[node].meta = {"val": node.meta["val"]}
            return copied[node]

        args, kwargs = fx.map_arg((node.args, node.kwargs), copy)
        # Numbers follow the order of copying, whatever the program calls its nodes: equal blocks are equal
        # text.
        target, name = ANY_STRIDES.get(node.target, node.target), f"n{len(copied) - len(inputs)}"
        copied[node] = graph.create_node("call_function", target, args, kwargs, name)
        copied[node].meta = {k: node.meta[k] for k in ("autocast", "val", "stack_trace") if k in node.meta}
        return copied[node]

    # Copy the nodes, and move placeholders to the front, in the order of their first use.
    for node in nodes:
        copy(node)
    first = next((n for n in graph.nodes if n.op == "call_function"), None)
    if first is not None:
        for placeholder in graph.find_nodes(op="placeholder"):
            first.prepend(placeholder)
    graph.output([copied[n] for n in outputs])

    # Describe the ends, and name the inputs as the program does.
    names = tuple(
        placeholders[n].value_name if n in placeholders else ValueName(Kind.VALUE, n.name) for n in inputs
    )
    ins = tuple(Argument.of(n.meta["val"], kind) for n, kind in inputs.items())
    outs = tuple(Argument.of(n.meta["val"], "value") for n in outputs)
    code = _print_code(graph, ins, outs)
    return SegmentSource(graph, ins, outs, hashlib.sha256(code.encode()).hexdigest()[:16], code), names


def _print_code(graph: fx.Graph, inputs: Sequence[Argument], outputs: Sequence[Argument]) -> str:
    """Print everything that a kernel depends on: equal texts are one kernel."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    lines = [f"{n.name}: {a} {a.stride} {a.device}" for n, a in zip(placeholders, inputs, strict=True)]
    for node in graph.nodes:
        if node.op == "call_function":
            kwargs = "".join(f", {k}={v!r}" for k, v in node.kwargs.items())
            args = ", ".join(repr(a) for a in node.args)
            mode = f" under autocast{node.meta['autocast']}" if node.meta.get("autocast") else ""
            lines.append(f"{node.name} = {node.target}({args}{kwargs}){mode}  # {describe(node.meta['val'])}")
        elif node.op == "output":
            lines.append(f"return {[n.name for n in node.args[0]]}")
    lines += [f"out: {a} {a.stride}" for a in outputs]
    return "\n".join(lines)
