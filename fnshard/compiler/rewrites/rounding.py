"""Make compiled kernels round numbers where the program does, wherever it shows.

Inductor computes half types in fp32 and rounds where a kernel writes to memory. That differs from eager torch
in two places that no tolerance covers:

- A cast to a narrower float type and back: Inductor makes `x.to(torch.bfloat16).float()` x, and fake
  quantisation nothing. `keep_rounding` puts `fnshard.rounded` after such casts of a program, so that
  gradients are rounded as well. Casts between which something is computed in the narrow type are left alone.
- A decision: `x == x.max()` is false everywhere where one side is rounded and the other is not, and the
  gradient of `amax` divides by the number of ties, 0. `fnshard.rounded` is inserted after every operation in
  a half type that a decision depends on: by `round_for_decisions` into a program, op by op as eager torch
  rounds, and by `round_for_joint_decisions` into a kernel's joint graph, which has the comparisons of
  gradients.

Kernels hold `rounded` as an operation. `kernels.inductor` lowers it to integer operations on the number's
bits (BITS), which cost next to nothing, and through which no wider number can pass. The eager backend rounds
anyway, so `drop_rounding` leaves the operation out there.
"""

from __future__ import annotations

import copy
import math
import operator
import re

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import OpOverload

# An integer type of the same width. Inductor keeps casts to fp8 by itself.
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_HALF = {torch.float16, torch.bfloat16}
_CASTS = frozenset(["aten::to", "aten::_to_copy", "aten::type_as", "prims::convert_element_type"])
_MOVERS = frozenset(f"aten::{name}" for name in (
    "clone", "cat", "stack", "index", "index_select", "gather", "where", "masked_fill", "flip", "roll",
    "repeat", "repeat_interleave", "constant_pad_nd", "pad", "embedding",
))  # fmt: skip
# Operations that return one of the numbers that they read, or its negative.
_CHOOSE = frozenset(f"aten::{name}" for name in (
    "neg", "abs", "relu", "amax", "amin", "maximum", "minimum", "max", "min", "cummax", "cummin",
    "sort", "topk",
))  # fmt: skip
_EXTREMES = frozenset(f"aten::{name}" for name in (
    "amax", "amin", "max", "min", "aminmax", "scatter_reduce", "index_reduce", "segment_reduce",
))  # fmt: skip
# Operations that read from memory and write to it, so that no unrounded number passes them.
_PRODUCTS = frozenset(f"aten::{name}" for name in (
    "matmul", "linear", "einsum", "mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "inner", "addbmm",
    "chain_matmul", "tensordot", "bilinear", "_scaled_mm", "_grouped_mm", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution",
    "convolution_backward", "scaled_dot_product_attention",
))  # fmt: skip
_ORDERS = frozenset(f"aten::{name}" for name in ("sort", "topk", "kthvalue", "median", "nanmedian", "mode"))
# Operations that jump between floats. Those that make no float of floats (eq, argmax, a cast) decide as well.
_COMPARISONS = frozenset(f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_STEPS = frozenset(f"aten::{name}" for name in (
    "sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "floor_divide",
    "heaviside", "threshold_backward", "hardtanh_backward", "hardshrink", "hardshrink_backward",
    "softshrink_backward",
))  # fmt: skip
# Operations whose integers depend on no number that they read.
_NO_VALUES = re.compile(
    r"aten::(\w+_like|new_\w+|_scaled_dot_product_\w+|_\w+_attention_\w+|native_dropout)$"
)


@torch.library.custom_op("fnshard::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    """Return x rounded to its own dtype."""
    return x.clone()


@rounded.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


rounded.register_autograd(lambda ctx, grad: rounded(grad))


_ROUNDED, _CAST = torch.ops.fnshard.rounded.default, torch.ops.prims.convert_element_type.default


def keep_rounding(graph: fx.Graph) -> None:
    """Put `rounded` between the casts of a program that round a float and widen it again."""
    for cast in list(graph.nodes):
        if not _is_narrowing(cast):
            continue
        casts_back = _find_later_casts(cast)
        has_one_reader = len(cast.users) == 1
        if casts_back:
            _insert_rounding(graph, cast, list(cast.users))
        for widening in casts_back:
            if not has_one_reader or widening.args[0].target is not _ROUNDED:
                # The gradient of each cast is rounded before it is added to others.
                _insert_rounding(graph, widening.args[0], [widening])


def round_for_decisions(graph: fx.Graph) -> None:
    """Round the values that a decision of a program depends on, as eager torch rounds each of them.

    A decision makes no float of floats (a comparison, an index, a cast to integers), or it jumps (`floor`,
    `sign`), or its gradient compares (`amax`). The walk back from it ends at inputs and products, which are
    in memory in their own type. Values that no decision depends on are left alone.
    """
    decisions = {node for node in graph.nodes if _is_decision(node) or _has_ties(node)}
    for node in _find_dependencies(graph, decisions):
        if not _is_in_memory(node):
            _insert_rounding(graph, node, [r for r in node.users if r.target is not _ROUNDED])


def round_for_joint_decisions(graph: fx.Graph) -> None:
    """Round as `round_for_decisions` does, in a joint graph, where gradients decide too.

    Python numbers that half values are compared with are rounded as well.
    """
    # Eager torch rounds a Python number to the type of the tensor that it is compared with.
    decisions = {node for node in graph.nodes if _is_decision(node)}
    for node in decisions:
        types = {v.dtype for n in node.all_input_nodes for v in _list_floats(n)}
        if len(types) == 1 and types < _HALF and _get_name(node) in (_COMPARISONS | _STEPS):
            [dtype] = types
            node.args = tuple(
                torch.tensor(a, dtype=dtype).item() if isinstance(a, float) else a for a in node.args
            )

    # Round the values that decisions depend on.
    dependencies = _find_dependencies(graph, decisions)
    relevant = {*dependencies, *decisions}
    for node in dependencies:
        readers = [r for r in node.users if r.target is not _ROUNDED]
        if _is_in_memory(node):
            # A reader may be fused with a product and get it in fp32. Only readers that a decision depends on
            # need it rounded.
            readers = [r for r in readers if r in relevant and _get_name(r) not in _ORDERS]
        _insert_rounding(graph, node, readers)


def hide_rounding(graph: fx.Graph) -> bool:
    """Replace every `rounded` by a cast to its value's own type, which torch's partitioner may recompute.

    `show_rounding` undoes it.

    Returns:
        Whether the graph has any.
    """
    nodes = graph.find_nodes(op="call_function", target=_ROUNDED)
    if not nodes:
        return False

    # Existing casts to their own type do nothing, and `show_rounding` could not tell them apart.
    for cast in _find_idle_casts(graph):
        cast.replace_all_uses_with(cast.args[0])
        graph.erase_node(cast)
    for node in nodes:
        node.target, node.args = _CAST, (node.args[0], node.meta["val"].dtype)
    return True


def show_rounding(graph: fx.Graph) -> None:
    """Turn every cast to its value's own type into `rounded`."""
    for node in _find_idle_casts(graph):
        node.target, node.args = _ROUNDED, (node.args[0],)


def drop_rounding(graph: fx.Graph) -> fx.Graph:
    """Return a graph without those `rounded` that only copy a value which nothing else reads."""
    if not graph.find_nodes(op="call_function", target=_ROUNDED):
        return graph
    graph = copy.deepcopy(graph)
    for node in graph.find_nodes(op="call_function", target=_ROUNDED):
        value = node.args[0]
        if value.op == "call_function" and not _is_move(value) and len(value.users) == 1:
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return graph


def _find_dependencies(graph: fx.Graph, decisions: set[fx.Node]) -> list[fx.Node]:
    """Return the operations in a half type that decisions depend on."""
    reached: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in decisions or (node in reached and not _is_in_memory(node)):
            reached.update(n for n in node.all_input_nodes if _list_floats(n))
    return [n for n in graph.nodes if n in reached and _is_half_computation(n)]


def _has_ties(node: fx.Node) -> bool:
    """Return whether the gradient of an operation compares its input with its result."""
    if _get_name(node) in ("aten::linalg_vector_norm", "aten::norm"):
        return any(isinstance(a, float) and math.isinf(a) for a in node.args)
    return _get_name(node) in _EXTREMES


def _is_decision(node: fx.Node) -> bool:
    """Return whether an op makes of floats something that a rounding error may change altogether."""
    inputs = [n for n in node.all_input_nodes if _list_floats(n)]
    if not inputs or not isinstance(node.target, OpOverload) or _NO_VALUES.match(_get_name(node)):
        return False
    if _get_name(node) in _STEPS or node.kwargs.get("rounding_mode"):
        return True

    # A comparison with infinity is a mask, or the guard of a softmax. Rounding makes no infinity of another
    # number, except in fp16.
    compares_infinity = any(isinstance(a, float) and math.isinf(a) for a in node.args)
    if compares_infinity and not any(v.dtype is torch.float16 for n in inputs for v in _list_floats(n)):
        return False

    # An op that makes integers or booleans of floats decides. Of several results only those count that are
    # read.
    read = [u for u in node.users if u.target is operator.getitem and u.users] or [node]
    values = [v for each in read for v in _list_tensors(each)]
    return any(not v.is_floating_point() and not v.is_complex() for v in values)


def _is_in_memory(node: fx.Node) -> bool:
    """Return whether a compiler writes a node's value to memory in its own type.

    It does so for products, attention, and operators that are not ATen's.
    """
    if not isinstance(node.target, OpOverload):
        return False
    if _get_name(node).startswith("aten::_scaled_dot_product"):
        return True
    is_custom = node.target.namespace not in ("aten", "prims") and node.target is not _ROUNDED
    return is_custom or _get_name(node) in _PRODUCTS


def _is_half_computation(node: fx.Node) -> bool:
    """Return whether a node computes numbers of a half type, which a compiler may hold in a wider one."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    # A move that fills gaps with a Python number computes, since that number is not rounded yet.
    has_fill = any(isinstance(a, float) for a in (*node.args, *node.kwargs.values()))
    is_copy = _is_move(node) and not has_fill and not _is_narrowing(node)
    computes = not is_copy and _get_name(node) not in _CHOOSE and node.target is not _ROUNDED
    return computes and node.meta["val"].dtype in _HALF


def _find_idle_casts(graph: fx.Graph) -> list[fx.Node]:
    """Return the casts of values to the type that they have."""
    casts = graph.find_nodes(op="call_function", target=_CAST)
    return [n for n in casts if n.args[0].meta["val"].dtype == n.args[1]]


def _list_floats(node: fx.Node) -> list[Tensor]:
    return [v for v in _list_tensors(node) if v.is_floating_point()]


def _list_tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, Tensor)]


def _insert_rounding(graph: fx.Graph, value: fx.Node, readers: list[fx.Node]) -> None:
    """Round a value for some of its readers."""
    if not readers:
        return
    takes_all = len(readers) == len(value.users)
    with graph.inserting_after(value):
        node = graph.call_function(_ROUNDED, (value,))
    node.meta = {**value.meta, "val": value.meta["val"].clone()}
    if takes_all:  # views among the readers must keep sharing memory with the value that they read
        node.meta["val"], value.meta["val"] = value.meta["val"], node.meta["val"]
    for reader in readers:
        reader.replace_input_with(value, node)


def _is_narrowing(node: fx.Node) -> bool:
    """Return whether a node is a cast that loses digits or range."""
    if not _is_cast(node) or node.meta["val"].dtype not in BITS:
        return False
    before, after = (torch.finfo(n.meta["val"].dtype) for n in (node.args[0], node))
    return after.eps > before.eps or after.max < before.max


def _is_cast(node: fx.Node) -> bool:
    """Return whether a node casts one float type to another."""
    if _get_name(node) not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return before.is_floating_point() and after.is_floating_point() and before.dtype != after.dtype


def _find_later_casts(node: fx.Node) -> list[fx.Node]:
    """Return later casts of a node's value to another float type, between which ops may have moved it."""
    # Parts of a value may be moved apart and put together again many times, so each node is visited once.
    casts: list[fx.Node] = []
    seen, to_visit = {node}, list(reversed(node.users))
    while to_visit:
        user = to_visit.pop()
        if user in seen:
            continue
        seen.add(user)
        if _is_cast(user):
            casts.append(user)
        elif _is_move(user):
            to_visit += reversed(user.users)
    return casts


def _is_move(node: fx.Node) -> bool:
    """Return whether a node moves numbers without computing any: a view, a copy, an item of several."""
    if node.target is operator.getitem:
        return True
    return _get_name(node) in _MOVERS or (isinstance(node.target, OpOverload) and node.target.is_view)


def _get_name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""
