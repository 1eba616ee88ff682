"""Rules of views: reshapes, moved dims, broadcasts, slices, and tensors that are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Placement, Split, fits, through_view
from fnshard.compiler.place.strategies import Call, OpStrategy, broadcast, move_dims, rule

aten, own = torch.ops.aten, torch.ops.fnshard


@rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
)  # fmt: skip
def _view(call: Call) -> Iterator[OpStrategy]:
    """Split along each dim whose split the new shape can hold."""
    before = call.tensors[0].shape
    for split in call.splits(before):
        after_view = through_view(split, before, call.shape, call.ranks, call.axis.update)
        if after_view is not None:
            to = call.local(after_view)
            yield OpStrategy((split,), after_view, run=lambda index, x, *_, to=to: x.reshape(to))
    to = list(call.shape)
    for whole in (REPLICATED, PARTIAL):
        yield OpStrategy((whole,), whole, run=lambda index, x, *_: x.reshape(to))


@rule(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def _transpose(call: Call) -> Iterator[OpStrategy]:
    rank = call.value.dim()
    order = list(range(rank))
    one, other = (v % max(rank, 1) for v in list(call.arguments.values())[1:3])
    order[one], order[other] = other, one
    yield from move_dims(call, order)


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default, aten.mH.default)
def _t(call: Call) -> Iterator[OpStrategy]:
    rank = call.value.dim()
    whole = call.target in (aten.t.default, aten.numpy_T.default)
    yield from move_dims(call, list(range(rank))[::-1] if whole else [*range(rank - 2), rank - 1, rank - 2])


@rule(aten.permute.default)
def _permute(call: Call) -> Iterator[OpStrategy]:
    yield from move_dims(call, [d % call.value.dim() for d in call["dims"]])


@rule(aten.view_as_real.default, aten.view_as_complex.default)
def _last(call: Call) -> Iterator[OpStrategy]:
    """Split an op that adds a last dim, or takes one away."""
    rank = min(call.value.dim(), call.tensors[0].dim())
    more = [None] * (call.value.dim() - rank)
    yield from move_dims(call, [*range(rank), *more])


@rule(aten.diagonal.default)
def _diagonal(call: Call) -> Iterator[OpStrategy]:
    rank = call.tensors[0].dim()
    gone = {call["dim1"] % rank, call["dim2"] % rank}
    yield from move_dims(call, [*(d for d in range(rank) if d not in gone), None])


@rule(aten.unfold.default)
def _unfold(call: Call) -> Iterator[OpStrategy]:
    rank = call.tensors[0].dim()
    dim = call["dimension"] % rank
    yield from move_dims(call, [*(None if d == dim else d for d in range(rank)), None])


@rule(aten.expand.default, aten.broadcast_to.default)
def _expand(call: Call) -> Iterator[OpStrategy]:
    for split in call.splits(call.shape):
        inside = broadcast(call.tensors[0].shape, call.shape, split)
        yield OpStrategy((inside,), split, {"size": call.local(split)})
    yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.repeat.default)
def _repeat(call: Call) -> Iterator[OpStrategy]:
    """Place a repetition; the blocks of a dim that is repeated lie one after another."""
    more = len(call["repeats"]) - call.tensors[0].dim()
    for split in call.splits(call.tensors[0].shape):
        dim = split.dim + more
        if call["repeats"][dim]:
            yield OpStrategy((split,), Split(dim, split.outer * call["repeats"][dim]))
    yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(call: Call) -> Iterator[OpStrategy]:
    if call["dim"] is not None or call.tensors[0].dim() == 1:
        for split in call.splits(call.tensors[0].shape):
            if call.part(call.shape, split) == call.part(call.tensors[0].shape, split) * call["repeats"]:
                yield OpStrategy((split,), split, {"output_size": None})
    yield OpStrategy((PARTIAL,), PARTIAL)


def _cut(call: Call, split: Split, dim: int, start: int, end: int) -> tuple[Split, int, int] | None:
    """Return the split of a range of a dim, and where the range begins and ends in each rank's part.

    The range has to be a whole number of blocks, or all but a few entries of the last rank. None otherwise.
    """
    if split.dim != dim:
        return split, start, end
    shape = call.tensors[0].shape
    block, part = shape[dim] // split.outer, call.part(shape, split)
    if start % block == 0 and end % block == 0 and start < end:
        return Split(dim, (end - start) // block), start // block * part, end // block * part
    rest = [end - start if d == dim else size for d, size in enumerate(shape)]
    some = fits(rest, split, call.ranks, call.axis.update)
    if split.outer == 1 and start == 0 and some and call.part(rest, split) == part:
        return split, 0, part  # only the last rank loses some
    return None


def _without_last(dim: int, count: int, ranks: int) -> Callable[..., Tensor]:
    """Return a function that cuts off the last numbers of the last rank, by writing padding over them."""

    def run(index: Tensor, x: Tensor) -> Tensor:
        kept, cut = x.split([x.shape[dim] - count, count], dim)
        last = kept.narrow(dim, kept.shape[dim] - 1, 1).detach()
        return torch.cat([kept, torch.where(index == ranks - 1, last, cut)], dim)

    return run


@rule(aten.slice.Tensor, aten.narrow.default)
def _slice(call: Call) -> Iterator[OpStrategy]:
    """Split along other dims, or along this one where the ranks' parts stay equal."""
    shape, named = call.tensors[0].shape, call.arguments
    dim = call["dim"] % len(shape)
    size, step = shape[dim], named.get("step", 1)
    start = named["start"] or 0
    start = max(start + size, 0) if start < 0 else min(start, size)
    last = start + call.shape[dim] * step
    for split in call.splits(shape):
        if split.dim == dim and step != 1:
            continue
        if (found := _cut(call, split, dim, start, last)) is not None:
            after, first, end = found
            take = lambda index, x, first=first, end=end: aten.slice(x, dim, first, end, step)  # noqa: E731
            if split == Split(dim) and last < size and not call.axis.update:
                take = _without_last(dim, call.part(shape, split) * call.ranks - last, call.ranks)
            yield OpStrategy((split,), after, run=take)
    yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.select.int)
def _select(call: Call) -> Iterator[OpStrategy]:
    """Select from a split dim: one rank has the selected entry, and the others add zeros."""
    shape = call.tensors[0].shape
    dim = call["dim"] % len(shape)
    yield from move_dims(call, [d for d in range(len(shape)) if d != dim])
    if call.value.dtype == torch.bool:
        return
    for split in call.splits(shape, [dim]):
        part = call.part(shape, split)
        block, rest = divmod(call["index"] % shape[dim], shape[dim] // split.outer)
        owner, at = rest // part, block * part + rest % part

        def run(index: Tensor, x: Tensor, owner=owner, at=at) -> Tensor:
            return torch.where(index == owner, x.select(dim, at), 0)

        yield OpStrategy((split,), PARTIAL, run=run)


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default, aten.unbind.int,
)  # fmt: skip
def _split(call: Call) -> Iterator[OpStrategy]:
    """Split along other dims, or along its own if equal matrices lie side by side, each of them split."""
    shape, pieces = call.tensors[0].shape, call.value
    dim, gone = call["dim"] % len(shape), call.target is aten.unbind.int
    equal = len({v.shape for v in pieces}) == 1
    for split in call.splits(shape):
        if split.dim != dim:
            yield OpStrategy((split,), Split(split.dim - (gone and dim < split.dim), split.outer))
        elif not gone and equal and split.outer % len(pieces) == 0:
            size = call.part(shape, split) * split.outer // len(pieces)
            take = lambda index, x, size=size: x.split(size, dim)  # noqa: E731
            yield OpStrategy((split,), Split(dim, split.outer // len(pieces)), run=take)
    yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.cat.default, aten.stack.default)
def _cat(call: Call) -> Iterator[OpStrategy]:
    """Split along other dims, or along its own if the tensors are equal in shape; each is split then."""
    new, rank = call.target is aten.stack.default, call.value.dim()
    dim = call["dim"] % rank
    # torch leaves an empty tensor of one dim out, whatever the others are.
    full = [new or t.shape != (0,) for t in call.tensors]
    sizes = [t.shape[dim] for t, counts in zip(call.tensors, full, strict=True) if counts and not new]

    def each(placement: Placement) -> tuple[Placement, ...]:
        return tuple(placement if counts else REPLICATED for counts in full)

    for split in call.splits(call.shape, [d for d in range(rank) if d != dim]):
        yield OpStrategy(each(Split(split.dim - (new and dim < split.dim), split.outer)), split)
    if len(set(sizes)) == 1:
        for split in call.splits([sizes[0] if d == dim else s for d, s in enumerate(call.shape)], [dim]):
            yield OpStrategy(each(split), Split(dim, split.outer * len(sizes)))
    yield OpStrategy(each(PARTIAL), PARTIAL)


@rule(aten.constant_pad_nd.default, aten.pad.default)
def _pad(call: Call) -> Iterator[OpStrategy]:
    rank, pad = call.tensors[0].dim(), call["pad"]
    kept = [d for d in range(rank) if not any(pad[2 * (rank - 1 - d) :][:2])]
    yield from move_dims(call, [d if d in kept else None for d in range(rank)], linear=not call["value"])


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def _scatter(call: Call) -> Iterator[OpStrategy]:
    """Split along the dims that are written as a whole."""
    dim = call["dim"] % call.value.dim()
    gone = call.target is aten.select_scatter.default
    for split in call.splits(call.shape, [d for d in range(call.value.dim()) if d != dim]):
        yield OpStrategy((split, Split(split.dim - (gone and dim < split.dim), split.outer)), split)
    yield OpStrategy((PARTIAL, PARTIAL), PARTIAL)
