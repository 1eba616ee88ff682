"""Rules of ops that work element by element, and of those that only read a shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Split
from fnshard.compiler.place.strategies import Call, OpStrategy, broadcast, rule
from fnshard.compiler.rewrites.pure import WITH_VALUES
from fnshard.optim.fused import DECOMPOSITIONS

aten, own = torch.ops.aten, torch.ops.fnshard

# Linear ops. A pattern has a character for each tensor of the call. If those at "x" are parts of a sum, and
# those at "." are whole, the result is a part of a sum: the op is linear in all at "x" together.
_LINEAR = {
    **dict.fromkeys(
        (
            aten.neg.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
            aten.alias.default, aten.positive.default, aten.conj.default,
            aten._conj.default, aten.resolve_conj.default, aten.conj_physical.default, aten.mul.Scalar,
            aten.div.Scalar,
        ),
        ("x",),
    ),
    aten.add.Tensor: ("xx",), aten.sub.Tensor: ("xx",), aten.rsub.Tensor: ("xx",),
    aten.subtract.Tensor: ("xx",), aten.lerp.Scalar: ("xx",), aten.complex.default: ("xx",),
    aten.mul.Tensor: ("x", "x.", ".x"), aten.multiply.Tensor: ("x", "x.", ".x"),
    aten.div.Tensor: ("x", "x."), aten.divide.Tensor: ("x", "x."), aten.true_divide.Tensor: ("x", "x."),
    aten.where.self: (".xx",), WITH_VALUES: ("xx",),
}  # fmt: skip
_CASTS = {aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout, aten.to.device}


def elementwise(call: Call) -> Iterator[OpStrategy]:
    """Split tensors like the result, unless they are broadcast along the dim.

    Linear ops pass parts of sums.
    """
    for split in call.splits(call.shape):
        yield OpStrategy(tuple(broadcast(t.shape, call.shape, split) for t in call.tensors), split)
    patterns = _LINEAR.get(call.target, ())
    # A cast to the same dtype is a copy. Others may round, and rounded parts have another sum.
    if call.target in _CASTS and call.value.dtype == call.tensors[0].dtype:
        patterns = ("x" + "." * (len(call.tensors) - 1),)
    for pattern in patterns:
        # Fewer tensors mean a number among the operands: `x + 2` would add 2 on every rank.
        if len(pattern) == len(call.tensors) and call.value.dtype != torch.bool:
            yield OpStrategy(tuple(PARTIAL if c == "x" else REPLICATED for c in pattern), PARTIAL)

    # A whole tensor that is broadcast, as a bias is, is added to the first rank's part alone.
    if "xx" in patterns and len(call.tensors) == 2:
        for number, bias in enumerate(call.tensors):
            if bias.numel() < call.value.numel() and call.tensors[1 - number].shape == call.value.shape:
                inputs = [PARTIAL, PARTIAL]
                inputs[number] = REPLICATED
                yield OpStrategy(tuple(inputs), PARTIAL, run=partial(_add_on_first_rank, call, number))


def _add_on_first_rank(call: Call, number: int, index: Tensor, *tensors: Tensor) -> Tensor:
    """Add the bias on the first rank, and zeros on all others."""
    bias = torch.where(index == 0, tensors[number], 0)
    return call.on([bias if n == number else t for n, t in enumerate(tensors)])


rule(
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default, aten.to.dtype,
    aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther,
    aten.where.Scalar, aten.square.default, aten.rsub.Scalar, aten.rsub.Tensor, aten.clamp.default,
    aten.float_power.Tensor_Scalar, aten.subtract.Tensor, aten.multiply.Tensor, aten.divide.Tensor,
    aten.positive.default, aten.log_sigmoid.default, aten.conj.default, aten._conj.default,
    aten.resolve_conj.default, aten.complex.default, aten.polar.default, own.rounded.default,
    aten.fill.Scalar, aten.fill.Tensor, WITH_VALUES, *DECOMPOSITIONS,
)(elementwise)  # fmt: skip


@rule(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
)  # fmt: skip
def _fill_like(call: Call) -> Iterator[OpStrategy]:
    """Split the result like the tensor, of which only the shape is read."""
    now = call.current[0]
    # Parts of a sum have the shape of the whole, and nothing else of them is read.
    yield OpStrategy((now,), now if isinstance(now, Split) else REPLICATED)


@rule(
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip
def _new_filled(call: Call) -> Iterator[OpStrategy]:
    """Take a tensor of any placement, of which only the dtype is read."""
    yield OpStrategy(call.current, REPLICATED)


@rule(aten.bucketize.Tensor, aten.searchsorted.Tensor)
def _bucketize(call: Call) -> Iterator[OpStrategy]:
    """Split along the numbers that are looked up, if all have the same boundaries."""
    names = [n for n, v in call.arguments.items() if isinstance(v, torch.Tensor)]
    values = names.index("self") if call["self"].shape == call.shape else None
    if values is None or any(t.dim() > 1 for n, t in zip(names, call.tensors, strict=True) if n != "self"):
        return
    for split in call.splits(call.shape):
        yield OpStrategy(tuple(split if i == values else REPLICATED for i in range(len(names))), split)
