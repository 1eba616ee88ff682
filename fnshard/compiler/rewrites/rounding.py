"""Rounding: a cast to a narrower float type and back rounds, where a compiler would leave it out.

Inductor computes half types in fp32, and takes `x.to(torch.bfloat16).float()` for x: fake quantisation
becomes nothing. Here `fnshard.rounded` stands after such a cast, and is taken apart into integer operations
on the number's bits: they cost next to nothing, and no compiler moves a wider number through them. Gradients
are rounded as in eager torch. Casts between which something is computed in the narrow type stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import OpOverload

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}  # fp8 is kept
_CASTS = frozenset(["aten::to", "aten::_to_copy", "aten::type_as", "prims::convert_element_type"])
_MOVERS = frozenset(f"aten::{name}" for name in (
    "clone", "cat", "stack", "index", "index_select", "gather", "where", "masked_fill", "flip", "roll",
    "repeat", "repeat_interleave", "constant_pad_nd", "pad", "embedding",
))  # fmt: skip


@torch.library.custom_op("fnshard::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    """x, as its dtype has it."""
    return x.clone()


@rounded.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


rounded.register_autograd(lambda ctx, grad: rounded(grad))


def _by_bits(x: Tensor) -> Tensor:
    return torch.bitwise_or(x.view(_BITS[x.dtype]), 0).view(x.dtype)  # two views alone would be one


DECOMPOSITIONS: dict[Any, Any] = {torch.ops.fnshard.rounded.default: _by_bits}


def keep_rounding(graph: fx.Graph) -> None:
    """Put `rounded` between the casts of a program that round a float and widen it again."""
    for cast in list(graph.nodes):
        if not _rounds(cast):
            continue
        back = list(dict.fromkeys(_casts_after(cast)))
        alone = len(cast.users) == 1
        if back:
            _insert(graph, cast, list(cast.users))
        for widening in back:
            if not alone or widening.args[0].target is not torch.ops.fnshard.rounded.default:
                # Its gradient is rounded before others are added.
                _insert(graph, widening.args[0], [widening])


def _insert(graph: fx.Graph, value: fx.Node, readers: list[fx.Node]) -> None:
    with graph.inserting_after(value):
        made = graph.call_function(torch.ops.fnshard.rounded.default, (value,))
    made.meta = {**value.meta, "val": value.meta["val"].clone()}
    for reader in readers:
        reader.replace_input_with(value, made)


def _rounds(node: fx.Node) -> bool:
    """Whether it is a cast that loses digits or range."""
    if not _is_cast(node) or node.meta["val"].dtype not in _BITS:
        return False
    before, after = (torch.finfo(n.meta["val"].dtype) for n in (node.args[0], node))
    return after.eps > before.eps or after.max < before.max


def _is_cast(node: fx.Node) -> bool:
    if _name(node) not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return before.is_floating_point() and after.is_floating_point() and before.dtype != after.dtype


def _casts_after(cast: fx.Node) -> Iterator[fx.Node]:
    """Casts to another float type of what is the cast's value but for its place."""
    for user in cast.users:
        if _is_cast(user):
            yield user
        elif _moves(user):
            yield from _casts_after(user)


def _moves(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return _name(node) in _MOVERS or (isinstance(node.target, OpOverload) and node.target.is_view)


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""
