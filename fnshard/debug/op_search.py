"""Op search: the op of a kernel where NaN or inf arose, found by running its graph again, node by node."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import describe, replay
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.debug.values import Health, health, tensors, worst_health


@dataclass(frozen=True)
class NonFiniteOp:
    """An op of a kernel. `graph`: "source" (as `fn` calls it), "forward" or "backward" (as it is compiled).

    `of`: for an op of a backward, the forward's op that it belongs to, as `(op, node)` of the source.
    `gives`: its result's dtype and shape.
    """

    op: str
    node: str
    kind: Health
    graph: str
    inputs: str = ""
    gives: str = ""
    of: tuple[str, str] | None = None

    @property
    def source_node(self) -> str | None:
        """Its node in the segment's source, if that is known."""
        return self.node if self.graph == "source" else self.of and self.of[1]


def first_nonfinite_op(kernel: Kernel, args: Sequence[Tensor], backward: bool) -> NonFiniteOp | None:
    """Where what a kernel returns for `args` began not to be finite; None where no op of it is to blame.

    An infinity among an op's own constants (a mask) is none; one that an input holds is none either, but the
    NaN that an op makes of it.
    """
    with torch.no_grad():
        if backward:
            found = _trouble(kernel.backward.graph, args, _interpret(kernel.backward))
            return found and _origin(*found, "backward", _forward_of(kernel, found[0]))
        for graph, run, name in (
            (kernel.source.graph, lambda given, seen: replay(kernel.source.graph, given, seen), "source"),
            (kernel.forward.graph, _interpret(kernel.forward), "forward"),  # its ops may differ in range
        ):
            found = _trouble(graph, args, run)
            if found:
                return _origin(*found, name, None)
    return None


Interpret = Callable[[Sequence[Any], Callable[[fx.Node, Any], None]], Any]


def _interpret(module: fx.GraphModule) -> Interpret:
    def run(args: Sequence[Any], seen: Callable[[fx.Node, Any], None]) -> Any:
        class Watched(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                seen(n, value)
                return value

        return Watched(module).run(*args)

    return run


def _trouble(
    graph: fx.Graph, args: Sequence[Any], run: Interpret
) -> tuple[fx.Node, Health, Mapping[fx.Node, Health]] | None:
    kinds: dict[fx.Node, Health] = {}

    def seen(node: fx.Node, value: Any) -> None:
        if node.op != "output":
            kinds[node] = worst_health([health(t) for _, t in tensors(value)])

    run(args, seen)
    order = [n for n in graph.nodes if n.op != "output"]
    ill = set()
    stack = [n for n in graph.output_node().all_input_nodes if kinds[n]]
    while stack:  # only what leads to a result: an infinity that was masked away again is no trouble
        node = stack.pop()
        if node not in ill:
            ill.add(node)
            stack += [n for n in node.all_input_nodes if kinds[n]]
    born = [n for n in order if n in ill and n.op != "placeholder" and not _inputs(n, kinds)]
    born = [n for n in born if kinds[n] == "nan" or not _deliberate(n)]
    turned = [n for n in order if n in ill and n.op != "placeholder" and kinds[n] == "nan"]
    turned = [n for n in turned if _inputs(n, kinds) == "inf"]
    for node in (*born, *turned):
        return node, kinds[node], kinds
    return None


def _inputs(node: fx.Node, kinds: Mapping[fx.Node, Health]) -> Health:
    return worst_health([kinds[n] for n in node.all_input_nodes])


def _deliberate(node: fx.Node) -> bool:
    """Whether an infinity is among the op's own constants."""
    return any(isinstance(v, float) and math.isinf(v) for v in _constants((node.args, node.kwargs)))


def _constants(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _constants(each)
    else:
        yield value


def _origin(
    node: fx.Node, kind: Health, kinds: Mapping[fx.Node, Health], graph: str, of: tuple[str, str] | None
) -> NonFiniteOp:
    inputs = "finite inputs" if not _inputs(node, kinds) else "an input that holds inf"
    return NonFiniteOp(_op(node), node.name, kind, graph, inputs, describe(node.meta.get("val")), of)


def _op(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


# ------------------------------------------------------------------ from a backward to the forward


def _forward_of(kernel: Kernel, node: fx.Node) -> tuple[str, str] | None:
    """The source's op whose derivative (or recomputation) a backward's node is part of.

    Autograd numbers its functions, and the export keeps the number on the nodes of both ways; what is
    recomputed keeps its name.
    """
    number = node.meta.get("seq_nr")
    ahead = [n for n in kernel.forward.graph.nodes if n.op == "call_function"]
    again = [n for n in ahead if n.name == node.name and n.target == node.target]  # recomputed
    own = again or [n for n in ahead if number is not None and n.meta.get("seq_nr") == number]
    sources = [n for n in kernel.source.graph.nodes if n.op == "call_function"]
    for candidate in reversed(own):
        alike = sorted((n for n in ahead if n.target == candidate.target), key=_place)
        matching = [n for n in sources if n.target == candidate.target]
        if len(alike) == len(matching):
            match = matching[alike.index(candidate)]
            return _op(match), match.name
        if matching:
            return _op(candidate), _aligned(ahead, sources, candidate)
    return None


def _aligned(ahead: Sequence[fx.Node], sources: Sequence[fx.Node], node: fx.Node) -> str:
    """The source's node at a forward's node's place, where the export has folded or split some of the ops."""
    names = [[str(n.target) for n in nodes] for nodes in (ahead, sources)]
    place = ahead.index(node)
    for block in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
        if block.a <= place < block.a + block.size:
            return sources[block.b + place - block.a].name
    return ""


def _place(node: fx.Node) -> int:
    """Names of the same op are numbered in the order of the trace: log, log_1, log_2."""
    number = re.search(r"_(\d+)$", node.name)
    return int(number.group(1)) if number else 0
