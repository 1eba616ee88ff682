"""Capture `fn` with symbols for lengths that depend on data; run its graph on tensors of known sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from fnshard.compiler.frontend.ragged.lengths import Ragged, RaggedOp, Unbounded, refused, symbols
from fnshard.compiler.frontend.ragged.rules import rule_of
from fnshard.compiler.frontend.transforms import Differentiable, plain_attention
from fnshard.compiler.ir import source_lines
from fnshard.compiler.ir.program import (
    OpOverload,
    arguments_of,
    eliminate_dead_code,
    mutated_args,
    storage_id,
)

_VALUES = ("Tensor", "number", "Scalar")  # types of arguments that take a length as a value


def capture(flat: Callable[..., Any], *inputs: Sequence[Tensor]) -> Callable[..., list[Any]]:
    """`flat` as a function whose tensors have known sizes; it is traced here, with symbolic lengths.

    Args:
        inputs: fake tensors by argument.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # here: it brings sympy

    shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)

    def same(value: Tensor) -> Tensor:
        with mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)

    fakes = [[*map(same, v)] for v in inputs]
    with source_lines.kept(), plain_attention():  # which asks for no length; the op is the same
        if isinstance(flat, Differentiable):  # at once: ops that run again have other symbols, without bounds
            graph = flat.capture(*fakes)
        else:
            graph = make_fx(flat, tracing_mode="fake", pre_dispatch=True)(*fakes)

    def padded(*inputs: Sequence[Tensor]) -> list[Any]:
        return run(graph, shape_env, [v for values in inputs for v in values])

    return padded


def run(module: fx.GraphModule, shape_env: Any, inputs: Sequence[Tensor]) -> list[Any]:
    """Run a graph with symbolic lengths on tensors of known sizes."""
    ragged, feed = Ragged(shape_env), iter(inputs)
    copied: set[int] = set()  # memory of the symbolic trace of which a view is a copy here
    eliminate_dead_code(module.graph)
    with fx_traceback.preserve_node_meta():
        for node in module.graph.nodes:
            fx_traceback.set_stack_trace([node.meta.get("stack_trace", "")])
            if node.op == "placeholder":
                ragged.values[node] = next(feed)
            elif node.op == "get_attr":
                ragged.values[node] = getattr(module, node.target)
            elif node.op == "output":
                for result in node.args[0]:
                    if ragged.dims(result.meta["val"]):
                        raise refused(result, "is returned with a length that depends on data")
                ragged.check_equal()
                return [ragged.values[n] for n in node.args[0]]
            else:
                if any(storage_id(n.meta["val"]) in copied for n in mutated_args(node)):
                    raise refused(node, "writes to a tensor of which a view is a copy here")
                try:
                    ragged.values[node] = _run_node(ragged, node)
                except Unbounded:
                    text = "makes a length that depends on data, of which no bound is known"
                    raise refused(node, text) from None
                copied |= _copied(ragged, node)
    raise AssertionError("a graph without an output")


def _copied(ragged: Ragged, node: fx.Node) -> set[int]:
    """The memory that a node shares with its inputs in the symbolic trace, and not on known sizes."""
    tensors = [n for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)]
    if node not in tensors:
        return set()
    memory, own = storage_id(node.meta["val"]), storage_id(ragged.values[node])
    shared = [n for n in tensors if storage_id(n.meta["val"]) == memory]
    return {memory for n in shared if storage_id(ragged.values[n]) != own}


def _run_node(ragged: Ragged, node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return ragged.size(value) if symbols(ragged.expression(value)) <= ragged.sizes.keys() else None
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return None
    involved = [value, *(n.meta.get("val") for n in node.all_input_nodes)]
    if not isinstance(node.target, OpOverload) or not any(map(_is_symbolic, involved)):
        args, kwargs = fx.map_arg((node.args, node.kwargs), ragged.values.__getitem__)
        return node.target(*args, **kwargs)
    schema, raw = node.target._schema.arguments, arguments_of(node.target, node.args, node.kwargs)
    as_value = {a.name: any(name in str(a.real_type) for name in _VALUES) for a in schema}
    arguments = {
        name: fx.map_arg(given, lambda n, v=as_value[name]: _argument(ragged, n, v, value))
        for name, given in raw.items()
    }
    call = RaggedOp(ragged, node, arguments, raw)
    made = rule_of(call)(call)
    if isinstance(value, Tensor) and list(made.shape) != [ragged.size(n) for n in value.shape]:
        raise call.refused("has another shape on known sizes")
    target = arguments[schema[0].name]
    writes = schema[0].alias_info is not None and schema[0].alias_info.is_write
    return target.copy_(made) if writes and made is not target else made


def _argument(ragged: Ragged, node: fx.Node, as_value: bool, result: Any) -> Any:
    if not as_value or not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat):
        return ragged.values[node]
    number = ragged.number(node)  # of a result in float, it is one like Python's: of no dtype of its own
    is_float = isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex())
    return number.to(result.dtype) if is_float and isinstance(number, Tensor) else number


def _is_symbolic(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(
        isinstance(v, torch.SymInt | torch.SymFloat)
        or (isinstance(v, Tensor) and any(isinstance(n, torch.SymInt) for n in v.shape))
        for v in values
    )
