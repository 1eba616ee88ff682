"""Rules: the ways in which an op can run over a mesh axis, given what its arguments can be split along.

A rule is of one op, or of a family of them, and yields `Way`s; that of whole values on all ranks is always
there. A way whose local form is the op itself names other arguments (sizes) at most; else it has a `run`.
What no way fits without a gather may have an expansion (`expand`): its definition by smaller ops. Each rule
is tested by force, `tests/compiler/test_place_rules.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fnshard.compiler.frontend.exchange import KINDS
from fnshard.compiler.ir.program import OpOverload
from fnshard.compiler.place.placement import (
    PARTIAL,
    REPLICATED,
    Partial,
    Placement,
    Split,
    divides,
    fits,
    local_shape,
    through_view,
)

aten, own = torch.ops.aten, torch.ops.fnshard


@dataclass(frozen=True)
class Call:
    """A call of an op, on whole (fake) values.

    `current`: the placements that its tensors have now. `ranks`: along the axis. `later`: along the axes that
    are placed after it: heads that are cut in so many runs can be split over these, too.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    current: tuple[Placement, ...]
    ranks: int
    later: int = 1

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All of them by name, defaults filled in."""
        schema = self.target._schema.arguments
        positional = [a for a in schema if not a.kwarg_only]
        named = {a.name: a.default_value for a in schema if a.has_default_value()}
        named |= {a.name: v for a, v in zip(positional, self.args, strict=False)}
        return {a.name: (named | dict(self.kwargs))[a.name] for a in schema}

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Its tensor arguments, in the order of the schema, lists taken apart."""
        flat = (v for value in self.arguments.values() for v in (value if _is_list(value) else [value]))
        return [v for v in flat if isinstance(v, Tensor)]

    @cached_property
    def outers(self) -> tuple[int, ...]:
        """How the dims of its tensors are cut, or may be."""
        return tuple(dict.fromkeys([1, *sorted(p.outer for p in self.current if isinstance(p, Split))]))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def rebuilt(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of a call with some arguments changed."""
        named = self.arguments | dict(changes)
        schema = self.target._schema.arguments
        args = tuple(named[a.name] for a in schema if not a.kwarg_only)
        return args, {a.name: named[a.name] for a in schema if a.kwarg_only}

    def splits(self, dim: int) -> Iterator[Split]:
        """The splits of a dim of the (first) result that come out even."""
        shape = (self.value if isinstance(self.value, Tensor) else self.value[0]).shape
        for outer in self.outers:
            if fits(shape, Split(dim, outer), self.ranks):
                yield Split(dim, outer)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


@dataclass(frozen=True)
class Way:
    """One way to run a call over the axis.

    Args:
        inputs: what its tensors must be, in order.
        output: what its results then are; one placement for all of several.
        changes: arguments of the local call that differ, by name.
        run: what runs instead of the op, `run(index, *tensors)`; `index`: this rank's on the axis, int64 0-d.
    """

    inputs: tuple[Placement, ...]
    output: Placement
    changes: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] | None = None


Rule = Callable[[Call], Iterator[Way]]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """The rule of these ops."""

    def add(of: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, of))
        return of

    return add


def rule_of(target: Any) -> Rule | None:
    """The rule of an op; None where it has none, and takes whole values."""
    if target in RULES:
        return RULES[target]
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return elementwise if pointwise else None


def by_preference(shape: Sequence[int]) -> list[int]:
    """Dims in the order in which a sum is best scattered: a long one, not the last, which norms reduce."""
    return sorted(range(len(shape)), key=lambda d: (d == len(shape) - 1, -shape[d]))


# ------------------------------------------------------------------ elementwise

_LINEAR = {
    aten.neg.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default,
    aten.positive.default, own.outgoing.default,
}  # fmt: skip
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def elementwise(call: Call) -> Iterator[Way]:
    """Split like the result, where a tensor is not broadcast along the dim; sums pass what is linear."""
    shape = call.value.shape
    for dim in by_preference(shape):
        for split in call.splits(dim):
            yield Way(tuple(broadcast(t.shape, shape, split) for t in call.tensors), split)
    count = len(call.tensors)
    if call.target in _LINEAR or (call.target in _SUMS and count == 2):
        yield Way((PARTIAL,) * count, PARTIAL)
    elif call.target in _PRODUCTS:
        yield Way((PARTIAL, REPLICATED)[:count], PARTIAL)
        if count == 2 and call.target is aten.mul.Tensor:
            yield Way((REPLICATED, PARTIAL), PARTIAL)


def broadcast(shape: Sequence[int], to: Sequence[int], split: Split) -> Placement:
    """What an operand is where the result is split, and it is broadcast to it."""
    dim = split.dim - (len(to) - len(shape))
    return Split(dim, split.outer) if dim >= 0 and shape[dim] != 1 else REPLICATED


for _op in (
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default, aten.to.dtype,
    aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.gelu.default, aten.silu.default, aten.where.self, aten.where.ScalarSelf,
    aten.where.ScalarOther, aten.where.Scalar, aten.zeros_like.default, aten.ones_like.default,
    aten.full_like.default, aten.empty_like.default, aten.square.default, aten.softplus.default,
    aten.relu6.default, aten.selu.default, aten.rsub.Scalar, aten.rsub.Tensor, aten.clamp.default,
    aten.float_power.Tensor_Scalar, aten.subtract.Tensor, aten.multiply.Tensor, aten.divide.Tensor,
    aten.mish.default, aten.hardswish.default, aten.positive.default, own.outgoing.default,
    aten.log_sigmoid.default, aten.relu.default,
):  # fmt: skip
    RULES[_op] = elementwise


# ------------------------------------------------------------------ products


def contraction(call: Call, operands: Sequence[str], result: str) -> Iterator[Way]:
    """Of operands whose dims have labels: split along one of the result's, or a part of a sum over another.

    A label in capitals (a bias's) is of a tensor that is added.
    """
    sizes = {
        label.lower(): t.shape[dim]
        for labels, t in zip(operands, call.tensors, strict=True)
        for dim, label in enumerate(labels)
    }
    added = [labels.isupper() for labels in operands]
    for label in dict.fromkeys(sizes):
        for outer in call.outers:
            inputs = tuple(
                Split(labels.lower().index(label), outer) if label in labels.lower() else REPLICATED
                for labels in operands
            )
            even = sizes[label] % (outer * call.ranks) == 0
            if not even and (label not in result or not fits((sizes[label],), Split(0, outer), call.ranks)):
                continue
            if label in result:
                yield Way(inputs, Split(result.index(label), outer))
            elif not any(added):
                yield Way(inputs, PARTIAL)


_LETTERS = "abcdefgh"


@rule(aten.linear.default)
def _linear(call: Call) -> Iterator[Way]:
    rows = _LETTERS[: call.tensors[0].dim() - 1]
    operands = [rows + "k", "nk", "N"][: len(call.tensors)]
    yield from contraction(call, operands if call.tensors[1].dim() == 2 else [rows + "k", "k"], rows + "n")


@rule(aten.mm.default, aten.bmm.default, aten.matmul.default)
def _matmul(call: Call) -> Iterator[Way]:
    one, other = (t.dim() for t in call.tensors)
    batch = _LETTERS[: max(one, other, 2) - 2]
    left = "k" if one == 1 else batch[len(batch) - (one - 2) :] + "mk"
    right = "k" if other == 1 else batch[len(batch) - (other - 2) :] + "kn"
    if any(  # a batch dim that is broadcast
        t.shape[:-2] != call.value.shape[: max(t.dim() - 2, 0)] and t.dim() > 2 for t in call.tensors
    ):
        return
    result = batch + ("m" if one > 1 else "") + ("n" if other > 1 else "")
    yield from contraction(call, [left, right], result)


@rule(aten.addmm.default)
def _addmm(call: Call) -> Iterator[Way]:
    bias = {1: "N", 2: "MN"}[call.tensors[0].dim()]
    yield from contraction(call, [bias, "mk", "kn"], "mn")


@rule(aten.baddbmm.default)
def _baddbmm(call: Call) -> Iterator[Way]:
    if call.tensors[0].shape == call.value.shape:
        yield from contraction(call, ["AMN", "amk", "akn"], "amn")


@rule(aten.einsum.default)
def _einsum(call: Call) -> Iterator[Way]:
    equation = call["equation"].replace(" ", "")
    if "->" not in equation or "." in equation or not equation.replace("->", "").replace(",", "").islower():
        return
    operands, result = equation.split("->")
    if all(len(set(o)) == len(o) for o in operands.split(",")):
        yield from contraction(call, operands.split(","), result)


@rule(aten.scaled_dot_product_attention.default, own.attention.default)
def _attention(call: Call) -> Iterator[Way]:
    """Along the batch and the heads; of keys and values that are fewer, each rank takes those it needs."""
    query, key = call.tensors[0], call.tensors[1]
    drawn = call.target is own.attention.default and call["p"] > 0
    dims = [
        (dim, outer) for dim in range(query.dim() - 2) for outer in dict.fromkeys([call.later, *call.outers])
    ]
    for split in [Split(dim, outer) for dim, outer in dims if not drawn]:
        dim = split.dim
        rest = [broadcast(t.shape, (*query.shape[:-1], key.shape[-2]), split) for t in call.tensors[3:]]
        if not divides(query.shape, split, call.ranks):
            continue
        if divides(key.shape, split, call.ranks):
            yield Way((split, split, split, *rest), split)
        elif dim == query.dim() - 3 and (take := _take_heads(call, split)):
            yield Way((split, REPLICATED, REPLICATED, *rest), split, run=take)


def _take_heads(call: Call, split: Split) -> Callable[..., Tensor] | None:
    """Attention of a rank's query heads to those of all key heads that they share."""
    dim, outer = split.dim, split.outer
    heads, shared = call.tensors[0].shape[dim], call.tensors[1].shape[dim]
    here, group = heads // outer // call.ranks, heads // shared
    if group % here or shared % outer:
        return None

    def run(index: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        place = (index * here // group).reshape(1)
        chosen = [
            t.unflatten(dim, (outer, shared // outer)).index_select(dim + 1, place).flatten(dim, dim + 1)
            for t in (key, value)
        ]
        feed = iter([query, *chosen, *rest])
        named = {n: next(feed) if isinstance(v, Tensor) else v for n, v in call.arguments.items()}
        args, kwargs = call.rebuilt(named)
        return call.target(*args, **kwargs)

    return run


# ------------------------------------------------------------------ reductions and what works along a dim


def _dims(value: Any, rank: int) -> list[int]:
    """The dims that an argument names; all where it is None or empty."""
    if value is None or value == []:
        return list(range(rank))
    return [d % max(rank, 1) for d in (value if _is_list(value) else [value])]


def _reduced(call: Call, how: Literal["sum", "max"] | None = None) -> Iterator[Way]:
    """Along the dims that are left; and each rank's part of a sum or a maximum, without its padding."""
    value = call.tensors[0]
    named = call.arguments
    dims = _dims(named.get("dim"), value.dim())
    keep = bool(named.get("keepdim", False))
    for dim in range(value.dim()):
        for outer in call.outers:
            split = Split(dim, outer)
            if not fits(value.shape, split, call.ranks):
                continue
            if dim not in dims:
                yield Way((split,), Split(dim if keep else dim - sum(d < dim for d in dims), outer))
            elif how is not None and divides(value.shape, split, call.ranks):
                yield Way((split,), Partial(how))
            elif how is not None:
                neutral = 0 if how == "sum" else -torch.inf if value.is_floating_point() else None
                if neutral is not None:
                    yield Way((split,), Partial(how), run=_without_padding(call, split, neutral))


def _without_padding(call: Call, split: Split, neutral: float) -> Callable[..., Tensor]:
    """The op on a rank's part whose padding is neutral to it."""
    shape = call.tensors[0].shape
    size = shape[split.dim] // split.outer
    part = -(-size // call.ranks)
    wide = [1] * (len(shape) - split.dim - 1)

    def run(index: Tensor, x: Tensor) -> Tensor:
        at = torch.arange(part, device=x.device) + index * part
        inside = (at < size).expand(split.outer, part).reshape(split.outer * part, *wide)
        return call.target(torch.where(inside, x, neutral), *call.args[1:], **call.kwargs)

    return run


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(call: Call) -> Iterator[Way]:
    yield from _reduced(call, "sum")
    if call["dtype"] is None:
        yield Way((PARTIAL,), PARTIAL)


@rule(aten.amax.default, aten.max.default)
def _amax(call: Call) -> Iterator[Way]:
    yield from _reduced(call, "max")


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> Iterator[Way]:
    """Of a split dim, the parts' sums by the number of all."""
    for way in _reduced(call, "sum"):
        if way.output == PARTIAL:
            yield Way(way.inputs, PARTIAL, run=_mean_of_all(call, way))
        else:
            yield way


def _mean_of_all(call: Call, way: Way) -> Callable[..., Tensor]:
    (split,), shape = way.inputs, call.tensors[0].shape
    scale = local_shape(shape, split, call.ranks)[split.dim] / shape[split.dim]
    op = way.run or (lambda index, x: call.target(x, *call.args[1:], **call.kwargs))
    return lambda index, x: op(index, x) * scale


@rule(
    aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default,
    aten.cumsum.default, aten.cumprod.default, aten.flip.default, aten.sort.default, aten.topk.default,
    aten.roll.default, aten.logcumsumexp.default,
)  # fmt: skip
def _along(call: Call) -> Iterator[Way]:
    """Along dims that the op does not work along."""
    value, named = call.tensors[0], call.arguments
    key = "dims" if "dims" in named else "dim"
    for dim in set(range(value.dim())) - set(_dims(named[key], value.dim())):
        for outer in call.outers:
            if fits(value.shape, Split(dim, outer), call.ranks):
                yield Way((Split(dim, outer),), Split(dim, outer))


@rule(
    aten.logsumexp.default, aten.amin.default, aten.prod.dim_int, aten.any.dim, aten.all.dim,
    aten.argmax.default, aten.argmin.default, aten.var.correction, aten.std.correction,
    aten.var.dim, aten.std.dim, aten.max.dim, aten.min.dim,
)  # fmt: skip
def _other_reductions(call: Call) -> Iterator[Way]:
    yield from _reduced(call)


@rule(aten.linalg_vector_norm.default)
def _vector_norm(call: Call) -> Iterator[Way]:
    yield from _reduced(call)


@rule(aten.layer_norm.default, aten.rms_norm.default)
def _norm(call: Call) -> Iterator[Way]:
    value = call.tensors[0]
    for dim in range(value.dim() - len(call["normalized_shape"])):
        for split in call.splits(dim):
            yield Way((split, *[REPLICATED] * (len(call.tensors) - 1)), split)


@rule(aten.native_layer_norm.default)
def _native_layer_norm(call: Call) -> Iterator[Way]:
    yield from _norm(call)


@rule(aten.group_norm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def _by_rows(call: Call) -> Iterator[Way]:
    """Along the batch."""
    if fits(call.tensors[0].shape, Split(0), call.ranks) and call.tensors[0].dim() == call.value.dim():
        yield Way((Split(0), *[REPLICATED] * (len(call.tensors) - 1)), Split(0))


@rule(aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default)
def _of_targets(call: Call) -> Iterator[Way]:
    """Along the rows where nothing is reduced; else by its expansion."""
    if call["reduction"] == 0 and call["weight"] is None:
        for split in call.splits(0):
            yield Way((split,) * len(call.tensors), split)


# ------------------------------------------------------------------ views


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(call: Call) -> Iterator[Way]:
    before, after = call.tensors[0].shape, call.value.shape
    key = "shape" if "shape" in call.arguments else "size"
    for dim in range(len(before)):
        for outer in call.outers:
            split = Split(dim, outer)
            if not fits(before, split, call.ranks):
                continue
            behind = through_view(split, before, after, call.ranks)
            if behind is not None:
                yield Way((split,), behind, {key: list(local_shape(after, behind, call.ranks))})
    yield Way((PARTIAL,), PARTIAL)


@rule(aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default, aten.reshape_as.default)
def _reshape(call: Call) -> Iterator[Way]:
    """As a view to the shape of the result; of another tensor, the shape alone is looked at."""
    count = len(call.tensors)
    before, after = call.tensors[0].shape, call.value.shape
    for dim in range(len(before)):
        for outer in call.outers:
            split = Split(dim, outer)
            behind = through_view(split, before, after, call.ranks)
            if fits(before, split, call.ranks) and behind is not None:
                to = local_shape(after, behind, call.ranks)
                others = call.current[1:count]
                yield Way((split, *others), behind, run=lambda index, x, *_, to=to: x.reshape(to))


def _moved(call: Call, order: Sequence[int]) -> Iterator[Way]:
    """`order`: for each dim of the result the one of the argument, or None."""
    for after, dim in enumerate(order):
        for outer in call.outers:
            if dim is not None and fits(call.tensors[0].shape, Split(dim, outer), call.ranks):
                yield Way((Split(dim, outer),), Split(after, outer))
    yield Way((PARTIAL,), PARTIAL)


@rule(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def _transpose(call: Call) -> Iterator[Way]:
    rank = call.value.dim()
    order = list(range(rank))
    one, other = (v % rank for v in list(call.arguments.values())[1:3])
    order[one], order[other] = other, one
    yield from _moved(call, order)


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def _t(call: Call) -> Iterator[Way]:
    rank = call.value.dim()
    whole = call.target is not aten.mT.default
    order = list(range(rank))[::-1] if whole else [*range(rank - 2), rank - 1, rank - 2]
    yield from _moved(call, order)


@rule(aten.permute.default)
def _permute(call: Call) -> Iterator[Way]:
    yield from _moved(call, [d % call.value.dim() for d in call["dims"]])


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Iterator[Way]:
    dim, rank = call["dim"] % call.value.dim(), call.tensors[0].dim()
    yield from _moved(call, [*range(dim), None, *range(dim, rank)])


@rule(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims)
def _squeeze(call: Call) -> Iterator[Way]:
    shape = call.tensors[0].shape
    dims = set(_dims(call.arguments.get("dim"), len(shape)))
    yield from _moved(call, [d for d, size in enumerate(shape) if size != 1 or d not in dims])


@rule(aten.expand.default)
def _expand(call: Call) -> Iterator[Way]:
    before, after = call.tensors[0].shape, call.value.shape
    for dim in range(len(after)):
        for split in call.splits(dim):
            size = {"size": list(local_shape(after, split, call.ranks))}
            yield Way((broadcast(before, after, split),), split, size)
    yield Way((PARTIAL,), PARTIAL)


@rule(aten.slice.Tensor)
def _slice(call: Call) -> Iterator[Way]:
    shape = call.tensors[0].shape
    dim = call["dim"] % len(shape)
    for other in range(len(shape)):
        for outer in call.outers:
            if other != dim and fits(shape, Split(other, outer), call.ranks):
                yield Way((Split(other, outer),), Split(other, outer))
    if call["step"] == 1 and call["start"] in (0, None):  # all of it, or all but some of the last rank's
        for split in [Split(dim)]:
            here, there = (local_shape(s, split, call.ranks)[dim] for s in (shape, call.value.shape))
            if here == there and fits(shape, split, call.ranks) and fits(call.value.shape, split, call.ranks):
                yield Way((split,), split, {"start": 0, "end": here})
    yield Way((PARTIAL,), PARTIAL)


@rule(aten.select.int)
def _select(call: Call) -> Iterator[Way]:
    rank = call.tensors[0].dim()
    dim = call["dim"] % rank
    yield from _moved(call, [d for d in range(rank) if d != dim])


@rule(aten.narrow.default)
def _narrow(call: Call) -> Iterator[Way]:
    rank = call.tensors[0].dim()
    dim = call["dim"] % rank
    yield from (
        w for w in _moved(call, range(rank)) if not (isinstance(w.output, Split) and w.output.dim == dim)
    )


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default, aten.unbind.int)
def _split(call: Call) -> Iterator[Way]:
    """Along other dims; along its own where equal matrices lie side by side, each of them split."""
    shape = call.tensors[0].shape
    dim, gone = call["dim"] % len(shape), call.target is aten.unbind.int
    for other in range(len(shape)):
        for outer in call.outers:
            split = Split(other, outer)
            if not fits(shape, split, call.ranks):
                continue
            if other != dim:
                yield Way((split,), Split(other - (gone and dim < other), outer))
            elif not gone and outer == len(call.value) and len({v.shape for v in call.value}) == 1:
                size = local_shape(shape, split, call.ranks)[dim] // outer
                yield Way((split,), Split(dim), run=lambda index, x, size=size: x.split(size, dim))


@rule(aten.cat.default, aten.stack.default)
def _cat(call: Call) -> Iterator[Way]:
    rank, count = call.value.dim(), len(call.tensors)
    dim, new = call["dim"] % rank, call.target is aten.stack.default
    if any(t.dim() != rank - new for t in call.tensors):  # an empty one, which cat leaves out
        return
    for other in set(range(rank)) - {dim}:
        for split in call.splits(other):
            inside = Split(other - (new and dim < other), split.outer)
            yield Way((inside,) * count, split)
    yield Way((PARTIAL,) * count, PARTIAL)


@rule(operator.getitem)
def _getitem(call: Call) -> Iterator[Way]:
    raise AssertionError("a result is placed with its op")


# ------------------------------------------------------------------ lookups


@rule(aten.embedding.default)
def _embedding(call: Call) -> Iterator[Way]:
    """Of a table split by rows, each rank looks up what it has, and the sum has all."""
    table, indices = call.tensors
    for dim in range(indices.dim()):
        for split in call.splits(dim):
            yield Way((REPLICATED, split), split)
    for split in call.splits(indices.dim()):
        yield Way((Split(1, split.outer), REPLICATED), split)
    if fits(table.shape, Split(0), call.ranks):
        rows, padding = -(-table.shape[0] // call.ranks), call["padding_idx"]

        def run(index: Tensor, table: Tensor, indices: Tensor) -> Tensor:
            here = indices - index * rows
            inside = (here >= 0) & (here < rows)
            trained = inside if padding < 0 else inside & (indices != padding)
            found = aten.embedding.default(table, torch.where(inside, here, 0))
            found = torch.where(trained.unsqueeze(-1), found, found.detach())
            return torch.where(inside.unsqueeze(-1), found, 0.0)

        yield Way((Split(0), REPLICATED), PARTIAL, run=run)


@rule(aten.gather.default)
def _gather(call: Call) -> Iterator[Way]:
    value, index = call.tensors
    dim = call["dim"] % max(value.dim(), 1)
    for other in set(range(value.dim())) - {dim}:
        for split in call.splits(other):
            if value.shape[other] == index.shape[other]:
                yield Way((split, split), split)
    if value.dim() and fits(value.shape, Split(dim), call.ranks):
        size = -(-value.shape[dim] // call.ranks)

        def run(at: Tensor, value: Tensor, index: Tensor) -> Tensor:
            here = index - at * size
            inside = (here >= 0) & (here < size)
            found = aten.gather.default(value, dim, torch.where(inside, here, 0))
            return torch.where(inside, found, 0)

        yield Way((Split(dim), REPLICATED), PARTIAL, run=run)


@rule(aten.index_select.default)
def _index_select(call: Call) -> Iterator[Way]:
    value, dim = call.tensors[0], call["dim"] % max(call.tensors[0].dim(), 1)
    for other in set(range(value.dim())) - {dim}:
        for split in call.splits(other):
            yield Way((split, REPLICATED), split)


# ------------------------------------------------------------------ what other axes do


@rule(own.exchange.default)
def _exchange(call: Call) -> Iterator[Way]:
    """Ranks of another axis exchange parts of the same split."""
    value, moved = call.tensors[0], KINDS[call["kind"]].dims(call["dim"], call["to"])
    for other in set(range(value.dim())) - set(moved):
        for outer in call.outers:
            if fits(value.shape, Split(other, outer), call.ranks):
                yield Way((Split(other, outer),), Split(other, outer))
    yield Way((PARTIAL,), PARTIAL)
