"""Same program: whether one that has numbers as inputs computes what one with them as constants does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import Program

SMALL = 64  # elements of a result that is computed here
aten = torch.ops.aten


def same_program(constant: Program, general: Program, numbers: Mapping[str, float]) -> bool:
    """Whether both apply the same ops, with results of the same dtypes, to the same values.

    What depends on numbers alone is computed: Python's integers have no bounds, and `fn` may make a number
    out of a type. False proves nothing: `n / x` is a product where `n` is a constant.

    Args:
        constant: has the numbers as constants.
        general: has them as inputs; both are of the same batch otherwise.
    """
    nodes, others = _nodes(constant, {}), _nodes(general, numbers)
    return len(nodes) == len(others) and all(map(_same_node, nodes, others))


def _nodes(program: Program, numbers: Mapping[str, float]) -> list[tuple[Any, ...]]:
    """(op, results, arguments) of each node that is not computed; a node as an argument is (place,)."""
    program = program.traced or program
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    found: list[tuple[Any, ...]] = []
    values = dict[fx.Node, Any]()
    for node in program.graph.nodes:
        result, input = node.meta.get("val"), inputs.get(node)
        if input is not None and input.kind == "constant":
            values[node] = program.constants[input.name].detach().cpu().clone()
        elif input is not None and input.kind == "batch" and input.name in numbers:
            values[node] = torch.tensor(numbers[input.name], dtype=result.dtype)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            small = isinstance(result, Tensor) and result.numel() <= SMALL and not _grows(node)
            if small and input is None and all(isinstance(values[n], Tensor) for n in node.all_input_nodes):
                on_cpu = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
                values[node] = node.target(*args, **on_cpu)
                continue
            values[node] = (len(found),)
            results = [(v.shape, v.dtype) for v in _tensors(result)]
            op, args = _normal(input or node.target, args)
            found.append((op, results, [args, kwargs]))
    return found


def _grows(node: fx.Node) -> bool:
    """Whether it is a power of whole numbers, which has no bounds in Python alone: `1 / 2**n`."""
    is_power = getattr(node.target, "overloadpacket", None) is aten.pow
    return is_power and not node.meta["val"].dtype.is_floating_point


def _tensors(result: Any) -> list[Tensor]:
    return [v for v in (result if isinstance(result, tuple | list) else [result]) if isinstance(v, Tensor)]


def _normal(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """One form of `n - x` and `n * x`, whether `n` is a number or a tensor."""
    op = getattr(op, "overloadpacket", op)
    if op is aten.rsub and len(args) == 2:
        return aten.sub, args[::-1]
    if op in (aten.add, aten.mul) and not isinstance(args[0], tuple):
        return op, args[::-1]
    return op, args


def _same_node(node: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return node[:2] == other[:2] and _same(node[2], other[2])


def _same(value: Any, other: Any) -> bool:
    """Whether two arguments are the same; floats but for rounding."""
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(_same(v, other[k]) for k, v in value.items())
    if isinstance(value, tuple | list):
        is_list = isinstance(other, tuple | list) and len(value) == len(other)
        return is_list and all(map(_same, value, other))
    if isinstance(value, Tensor):
        like = isinstance(other, Tensor) and (value.shape, value.dtype) == (other.shape, other.dtype)
        return like and torch.allclose(value, other, rtol=_rounding(value.dtype), atol=0, equal_nan=True)
    if isinstance(value, float) and isinstance(other, Tensor):
        here = torch.tensor(value, dtype=torch.float64)
        return not other.dim() and torch.allclose(here, other.double(), _rounding(other.dtype), 0, True)
    return bool(value == (other.item() if isinstance(other, Tensor) and not other.dim() else other))


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps ** (2 / 3) if dtype.is_floating_point else 0.0
