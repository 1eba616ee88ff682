"""Rules of products: linear layers, matrix products, einsum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Placement, Split, divides, fits
from fnshard.compiler.place.strategies import Call, OpStrategy, rule
from fnshard.compiler.rewrites import fp8

aten, own = torch.ops.aten, torch.ops.fnshard


def contraction(
    call: Call, operands: Sequence[str], result: str, along: str | None = None
) -> Iterator[OpStrategy]:
    """Split operands whose dims have labels: along one of the result's, or into parts of a sum over another.

    Labels in capitals belong to a tensor that is added (a bias). A dim of size 1 is broadcast.

    Args:
        along: the labels that may be split; None is all.
    """
    # The size of each label.
    sizes: dict[str, int] = {}
    for labels, t in zip(operands, call.tensors, strict=True):
        for label, size in zip(labels.lower(), t.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    added = any(labels == labels.upper() for labels in operands)

    def place_operand(labels: str, t: Tensor, label: str, outer: int) -> Placement:
        dim = labels.lower().find(label)
        return REPLICATED if dim < 0 or t.shape[dim] == 1 else Split(dim, outer)

    # The longest comes first, and is taken where several are free: a sequence rather than rows.
    longest = sorted(sizes, key=lambda label: -sizes[label])
    for label in longest if along is None else along:
        for outer in call.outers:
            kept, size = label in result, (sizes[label],)
            # In a sum over the split dim every rank would add the bias, and padding would count.
            if not kept and (added or not divides(size, Split(0, outer), call.ranks)):
                continue
            if not fits(size, Split(0, outer), call.ranks, call.axis.update):
                continue
            pairs = zip(operands, call.tensors, strict=True)
            inputs = tuple(place_operand(labels, t, label, outer) for labels, t in pairs)
            yield OpStrategy(inputs, Split(result.index(label), outer) if kept else PARTIAL)


_LETTERS = "abcdefgh"


@rule(aten.linear.default)
def _linear(call: Call) -> Iterator[OpStrategy]:
    """Split along rows, along outputs, or along inputs into parts of a sum."""
    rows = _LETTERS[: call.tensors[0].dim() - 1]
    if call.tensors[1].dim() == 2:
        yield from contraction(call, [rows + "k", "nk", "N"][: len(call.tensors)], rows + "n")


@rule(fp8.LINEAR)
def _fp8_linear(call: Call) -> Iterator[OpStrategy]:
    """Split along rows: a rank rounds those that it has, as it does where batches are split."""
    rows = _LETTERS[: call.tensors[0].dim() - 1]
    yield from contraction(call, [rows + "k", "nk"], rows + "n", along=rows)


@rule(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def _matmul(call: Call) -> Iterator[OpStrategy]:
    """Split along batch dims, rows or columns, or along the contracted dim."""
    # Batch dims are broadcast from the last one; a vector has only the contracted dim.
    left_dims, right_dims = (t.dim() for t in call.tensors)
    batch = _LETTERS[: max(left_dims, right_dims, 2) - 2]
    left = "k" if left_dims == 1 else batch[len(batch) - (left_dims - 2) :] + "mk"
    right = "k" if right_dims == 1 else batch[len(batch) - (right_dims - 2) :] + "kn"
    result = batch + ("m" if left_dims > 1 else "") + ("n" if right_dims > 1 else "")
    yield from contraction(call, [left, right], result)


@rule(own.grouped_mm.default)
def _grouped_mm(call: Call) -> Iterator[OpStrategy]:
    """Split along the dims that the groups do not cut."""
    # By the dims of both operands: their labels, those of the result, and those that may be split.
    forms = {
        (2, 3): ("mk", "gkn", "mn", "kn"),
        (3, 2): ("gmk", "kn", "mn", "mk"),
        (2, 2): ("mk", "kn", "gmn", "mn"),
        (3, 3): ("gmk", "gkn", "gmn", "mnk"),
    }
    left, right, result, along = forms[call["a"].dim(), call["b"].dim()]
    yield from contraction(call, [left, right, "e"], result, along)


@rule(aten.outer.default, aten.ger.default)
def _outer(call: Call) -> Iterator[OpStrategy]:
    yield from contraction(call, ["m", "n"], "mn")


@rule(aten.addmm.default, aten.baddbmm.default)
def _add_product(call: Call) -> Iterator[OpStrategy]:
    result = "amn"[3 - call.value.dim() :]
    batch, bias = result[:-2], result[len(result) - call.tensors[0].dim() :].upper()
    yield from contraction(call, [bias, f"{batch}mk", f"{batch}kn"], result)


@rule(aten.einsum.default)
def _einsum(call: Call) -> Iterator[OpStrategy]:
    """Split as a contraction, with the dims of an ellipsis given letters."""
    equation = call["equation"].replace(" ", "")
    if "->" not in equation or not equation.replace("->", "").replace(",", "").replace(".", "").islower():
        return
    left, result = equation.split("->")
    operands = left.split(",")

    # The dims of an ellipsis get letters that the equation does not use, from the end of the alphabet.
    most = max(t.dim() - len(o.replace("...", "")) for o, t in zip(operands, call.tensors, strict=True))
    batch = [c for c in "zyxwvutsrqponmlkjihgfedcba" if c not in equation][:most]
    for i, (o, t) in enumerate(zip(operands, call.tensors, strict=True)):
        count = t.dim() - len(o.replace("...", ""))
        operands[i] = o.replace("...", "".join(batch[most - count :]))
    # A letter twice in one operand is a diagonal, which no contraction describes.
    if all(len(set(o)) == len(o) for o in operands):
        yield from contraction(call, operands, result.replace("...", "".join(batch)))
