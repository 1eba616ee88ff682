"""Op search: the op of a kernel where NaN or inf arose, found by running its graph again, node by node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import describe, replay
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.debug.values import Health, health, tensors, worst_health


def first_nonfinite_op(kernel: Kernel, args: Sequence[Tensor], backward: bool) -> dict[str, str] | None:
    """Where what a kernel returns for `args` began not to be finite; None where no op of it is to blame.

    An infinity among an op's own constants (a mask) is none; one that an input holds is none either, but the
    NaN that an op makes of it.

    Returns:
        `kind`; `op` and `node` in the graph that ran; `inputs`, whether they are finite; `gives`, its
        result's dtype and shape; `of`, for an op of a backward, the forward's op that it belongs to;
        `source`, its line in the user's code, "" if that is not known.
    """
    with torch.no_grad():
        if backward:
            found = _trouble(kernel.backward.graph, args, _interpret(kernel.backward))
            of, source = _forward_of(kernel, found["node"]) if found else ("", "")
        else:
            run = lambda args, seen: replay(kernel.source.graph, args, seen)  # noqa: E731
            found = _trouble(kernel.source.graph, args, run)
            of, source = "", _line(found["node"]) if found else ""
            # As it is compiled, some of its ops may have another range.
            found = found or _trouble(kernel.forward.graph, args, _interpret(kernel.forward))
    if not found:
        return None
    return {**found, "op": _op(found["node"]), "node": found["node"].name, "of": of, "source": source}


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


def _trouble(graph: fx.Graph, args: Sequence[Any], run: Interpret) -> dict[str, Any]:
    """The first op to blame: its node, and how it is; empty where there is none."""
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
        inputs = "finite inputs" if not _inputs(node, kinds) else "an input that holds inf"
        gives = describe(node.meta.get("val"))
        return {"node": node, "kind": kinds[node], "inputs": inputs, "gives": gives}
    return {}


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


def _op(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


# ------------------------------------------------------------------ from a backward to the forward


def _forward_of(kernel: Kernel, node: fx.Node) -> tuple[str, str]:
    """The forward's op whose derivative (or recomputation) a backward's node is part of, and its source line.

    Autograd numbers its functions, and the export keeps the number on the nodes of both ways; what is
    recomputed keeps its name.
    """
    number = node.meta.get("seq_nr")
    ahead = [n for n in kernel.forward.graph.nodes if n.op == "call_function"]
    again = [n for n in ahead if n.name == node.name and n.target == node.target]  # recomputed
    own = again or [n for n in ahead if number is not None and n.meta.get("seq_nr") == number]
    for candidate in reversed(own):
        mine, its = (
            [n for n in g if n.target == candidate.target] for g in (ahead, kernel.source.graph.nodes)
        )
        if its:  # the export may fold or split ops: then nobody knows which
            return _op(candidate), _line(its[mine.index(candidate)]) if len(mine) == len(its) else ""
    return "", ""


def _line(node: fx.Node) -> str:
    return node.meta.get("stack_trace", "")
