"""Multiply in linear layers in eight bits (Micikevicius et al. 2022), with one scale a tensor or a row.

A leaf whose `LayoutSpec.wire_dtype` is `float8_e4m3fn` is rounded to it before it is gathered (`Scales`), and
`fn` gets the rounded numbers in bf16. Here a `linear` of such a leaf becomes `fp8_linear`, which rounds its
input (e4m3) and, in the backward, its gradient (e5m2). Scales are powers of two, so bf16 holds every rounded
number exactly: the emulation in bf16 and `torch._scaled_mm` compute the same products.

With a scale a row (torchao's "rowwise_with_gw_hp"), the gradient of the input sums over the rows of the leaf.
So it is multiplied by their scales before it is rounded, row by row. The gradient of the leaf is a product in
bf16.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from fnshard.compiler.ir.program import Program
from fnshard.errors import leaves, report

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # `_scaled_mm` takes dims that are multiples of this


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two by which numbers up to `largest` fit best into a dtype, in fp32; 1 for zero.

    >>> scale_of(torch.tensor([1.0, 448.0, 0.0]), E4M3)
    tensor([256.,   1.,   1.])
    """
    largest = largest.float()
    # frexp gives a mantissa from 0.5 on: 2^(exponent - 1) is the largest power of two that is no larger. The
    # bound keeps the quotient finite.
    _, exponent = torch.frexp(torch.finfo(dtype).max / largest.clamp(min=2.0**-100))
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent - 1), 1.0)


def round_to_fp8(x: Tensor, dtype: torch.dtype, rowwise: bool = False) -> tuple[Tensor, Tensor]:
    """Return x [M, K] times its scale in a dtype of eight bits, and the scale's inverse, 0-d or [M, 1]."""
    if not x.numel():
        return x.to(dtype), x.new_ones((len(x), 1) if rowwise else (), dtype=torch.float32)
    scale = scale_of(x.abs().amax(1, keepdim=True) if rowwise else x.abs().amax(), dtype)
    return (x * scale).to(dtype), 1 / scale


def has_products(device: torch.device, rowwise: bool = False) -> bool:
    """Return whether a device multiplies in eight bits.

    NVIDIA's do from Ada on, and with a scale for each row from Hopper on.
    """
    least = (9, 0) if rowwise else (8, 9)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= least


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Multiply rounded numbers [M, K] and [K, N], and sum in fp32.

    The inverse scales are 0-d, or [M, 1] and [1, N].
    """
    (left, of_left), (right, of_right) = a, b
    if has_products(left.device, bool(of_left.dim())) and not any(
        size % MULTIPLE for size in (*left.shape, *right.shape)
    ):
        # `_scaled_mm` takes its second operand by columns.
        columns = right.t().contiguous().t()
        return torch._scaled_mm(
            left.contiguous(), columns, scale_a=of_left, scale_b=of_right.contiguous(), out_dtype=dtype
        )
    return (left.to(dtype) * of_left.to(dtype)) @ (right.to(dtype) * of_right.to(dtype))


@torch.library.custom_op("fnshard::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, weight: Tensor, rowwise: bool = False) -> Tensor:
    """Multiply x [..., K], rounded to e4m3, by a weight [N, K] that a scale fits into e4m3; [..., N]."""
    columns = _transpose(round_to_fp8(weight, E4M3, rowwise))
    rows = round_to_fp8(x.reshape(-1, x.shape[-1]), E4M3, rowwise)
    return product(rows, columns, x.dtype).view(*x.shape[:-1], weight.shape[0])


def _transpose(rounded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Transpose rounded numbers and their inverse scales."""
    numbers, inverse = rounded
    return numbers.t(), inverse.t()


@fp8_linear.register_fake
def _(x: Tensor, weight: Tensor, rowwise: bool = False) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("fnshard::fp8_linear_backward", mutates_args=())
def fp8_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, made of the output's gradient rounded to e5m2."""
    flat, rows = (t.reshape(-1, t.shape[-1]) for t in (grad, x))
    of_grad, of_rows = round_to_fp8(flat, E5M2), round_to_fp8(rows, E4M3)
    to_x = product(of_grad, round_to_fp8(weight, E4M3), x.dtype).view(x.shape)
    return to_x, product(_transpose(of_grad), of_rows, weight.dtype)


@fp8_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


@torch.library.custom_op("fnshard::fp8_linear_to_input", mutates_args=())
def fp8_linear_to_input(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the input's gradient, from the output's times the scales of the leaf's rows, rounded to e5m2."""
    # The sum runs over the weight's rows, so that their scales go into the other factor, and ones remain.
    numbers, inverse = round_to_fp8(weight, E4M3, rowwise=True)
    flat = round_to_fp8(grad.reshape(-1, grad.shape[-1]) * inverse.t().to(grad.dtype), E5M2, rowwise=True)
    to_x = product(flat, (numbers, inverse.new_ones(1, weight.shape[1])), grad.dtype)
    return to_x.view(*grad.shape[:-1], weight.shape[1])


@fp8_linear_to_input.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


LINEAR = torch.ops.fnshard.fp8_linear.default


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.rowwise = inputs
    ctx.save_for_backward(*tensors)


def _compute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    if not ctx.rowwise:
        return *fp8_linear_backward(grad, x, weight), None
    flat, rows = (t.reshape(-1, t.shape[-1]) for t in (grad, x))
    return fp8_linear_to_input(grad, weight), flat.t() @ rows, None


fp8_linear.register_autograd(_compute_gradients, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.fnshard.fp8_linear)
def _count_flops(x: Any, weight: Any, *_args: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * torch.Size(x).numel() * weight[0]


@register_flop_formula(torch.ops.fnshard.fp8_linear_to_input)
def _count_input_flops(grad: Any, weight: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * torch.Size(grad).numel() * weight[1]


@register_flop_formula(torch.ops.fnshard.fp8_linear_backward)
def _count_backward_flops(grad: Any, x: Any, weight: Any, out_shape: Any = None, **_: Any) -> int:
    return 4 * torch.Size(x).numel() * weight[0]


def fp8_products(program: Program, rowwise: Mapping[str, bool]) -> Program:
    """Replace `linear` by products in eight bits for some leaves; a warning lists those that none reads.

    Args:
        rowwise: the leaves by path, with whether each row has a scale.
    """
    graph = fx.Graph()  # a copy, since other specs may share the trace
    graph.output(graph.graph_copy(program.graph, {}))
    program = replace(program, graph=graph)
    inputs = zip(program.placeholders, program.inputs, strict=True)
    paths = {node: each.name for node, each in inputs if each.kind == "leaf" and each.name in rowwise}

    # Replace each linear layer of such a leaf, with its bias in an op of its own.
    replaced: set[str] = set()
    for node in program.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight, *bias = node.args
        if (
            weight not in paths
            or node.meta.get("autocast")
            or x.meta["val"].dtype != weight.meta["val"].dtype
        ):
            continue
        replaced.add(paths[weight])
        with program.graph.inserting_before(node):
            out = _insert_call(program.graph, LINEAR, (x, weight, rowwise[paths[weight]]), node)
            if bias and bias[0] is not None:
                out = _insert_call(program.graph, aten.add.Tensor, (out, bias[0]), node)
        node.replace_all_uses_with(out)
        program.graph.erase_node(node)

    idle = sorted(set(paths.values()) - replaced)
    if idle:
        warnings.warn(
            report(
                f"{leaves(len(idle))} in fp8 that no linear layer reads, rounded and multiplied as they are:",
                [f"params[{path!r}]" for path in idle[:8]],
                "compute_dtype=torch.bfloat16 for them, or F.linear.",
            ),
            stacklevel=2,
        )
    return program


def _insert_call(graph: fx.Graph, target: Any, args: Any, like: fx.Node) -> fx.Node:
    """Insert a call with the metadata of another node, whose value has the same shape and dtype."""
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node
