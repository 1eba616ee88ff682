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
    """Split along any dim; `.T` reverses all dims, `.mT` and `.mH` the last two."""
    order = list(range(call.value.dim()))
    if call.target in (aten.t.default, aten.numpy_T.default):
        order.reverse()
    else:
        order[-2:] = reversed(order[-2:])
    yield from move_dims(call, order)


@rule(aten.permute.default)
def _permute(call: Call) -> Iterator[OpStrategy]:
    yield from move_dims(call, [d % call.value.dim() for d in call["dims"]])


@rule(aten.view_as_real.default, aten.view_as_complex.default)
def _complex_view(call: Call) -> Iterator[OpStrategy]:
    """Split along all dims but the last, of real and imaginary parts, which the op adds or takes away."""
    rank = min(call.value.dim(), call.tensors[0].dim())
    added = [None] * (call.value.dim() - rank)
    yield from move_dims(call, [*range(rank), *added])


@rule(aten.diagonal.default)
def _diagonal(call: Call) -> Iterator[OpStrategy]:
    rank = call.tensors[0].dim()
    removed = {call["dim1"] % rank, call["dim2"] % rank}
    yield from move_dims(call, [*(d for d in range(rank) if d not in removed), None])


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
    """Split along any dim; a dim that is repeated becomes several blocks, each of them split."""
    new_dims = len(call["repeats"]) - call.tensors[0].dim()
    for split in call.splits(call.tensors[0].shape):
        dim = split.dim + new_dims
        if call["repeats"][dim]:
            yield OpStrategy((split,), Split(dim, split.outer * call["repeats"][dim]))
    yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(call: Call) -> Iterator[OpStrategy]:
    if call["dim"] is not None or call.tensors[0].dim() == 1:
        for split in call.splits(call.tensors[0].shape):
            # Each rank's part of the result must be its own entries, repeated: with uneven parts it is not.
            if call.part(call.shape, split) == call.part(call.tensors[0].shape, split) * call["repeats"]:
                yield OpStrategy((split,), split, {"output_size": None})
    yield OpStrategy((PARTIAL,), PARTIAL)


def _cut_range(call: Call, split: Split, dim: int, start: int, end: int) -> tuple[Split, int, int] | None:
    """Return the split of a range of a dim, and where the range begins and ends in each rank's part.

    The range has to be a whole number of blocks, or all but a few entries of the last rank. None otherwise.
    """
    if split.dim != dim:
        return split, start, end
    # Whole blocks, of each of which every rank has a part.
    shape = call.tensors[0].shape
    block, part = shape[dim] // split.outer, call.part(shape, split)
    if start % block == 0 and end % block == 0 and start < end:
        return Split(dim, (end - start) // block), start // block * part, end // block * part
    # All but a few entries at the end: parts stay as long, and the last rank's are padded.
    shortened = [end - start if d == dim else size for d, size in enumerate(shape)]
    can_split = fits(shortened, split, call.ranks, call.axis.update)
    if split.outer == 1 and start == 0 and can_split and call.part(shortened, split) == part:
        return split, 0, part
    return None


def _pad_last_rank(dim: int, count: int, ranks: int) -> Callable[..., Tensor]:
    """Return a function that writes padding over the last `count` numbers of the last rank's part."""

    def run(index: Tensor, x: Tensor) -> Tensor:
        kept, cut = x.split([x.shape[dim] - count, count], dim)
        last = kept.narrow(dim, kept.shape[dim] - 1, 1).detach()
        return torch.cat([kept, torch.where(index == ranks - 1, last, cut)], dim)

    return run


@rule(aten.slice.Tensor, aten.narrow.default)
def _slice(call: Call) -> Iterator[OpStrategy]:
    """Split along other dims, or along this one where the ranks' parts stay equal."""
    # The range, as torch reads it: a negative start counts from the end, and one past the end is the end.
    shape, named = call.tensors[0].shape, call.arguments
    dim = call["dim"] % len(shape)
    size, step = shape[dim], named.get("step", 1)
    start = named["start"] or 0
    start = max(start + size, 0) if start < 0 else min(start, size)
    end = start + call.shape[dim] * step

    for split in call.splits(shape):
        if split.dim == dim and step != 1:
            continue
        local_range = _cut_range(call, split, dim, start, end)
        if local_range is None:
            continue
        after, first, last = local_range

        def run(index: Tensor, x: Tensor, first=first, last=last) -> Tensor:
            return aten.slice(x, dim, first, last, step)

        # Entries that are cut off become padding, which in an update may hold anything.
        if split == Split(dim) and end < size and not call.axis.update:
            run = _pad_last_rank(dim, call.part(shape, split) * call.ranks - end, call.ranks)
        yield OpStrategy((split,), after, run=run)
    yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.select.int)
def _select(call: Call) -> Iterator[OpStrategy]:
    """Select from a split dim: one rank has the selected entry, and the others add zeros."""
    shape = call.tensors[0].shape
    dim = call["dim"] % len(shape)
    yield from move_dims(call, [d for d in range(len(shape)) if d != dim])
    if call.value.dtype == torch.bool:  # ranks cannot sum booleans
        return
    for split in call.splits(shape, [dim]):
        # The block of all ranks that has the entry, the rank in it, and the place in that rank's part.
        part = call.part(shape, split)
        block, offset = divmod(call["index"] % shape[dim], shape[dim] // split.outer)
        owner, place = offset // part, block * part + offset % part

        def run(index: Tensor, x: Tensor, owner=owner, place=place) -> Tensor:
            return torch.where(index == owner, x.select(dim, place), 0)

        yield OpStrategy((split,), PARTIAL, run=run)


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default, aten.unbind.int,
)  # fmt: skip
def _split(call: Call) -> Iterator[OpStrategy]:
    """Split along other dims, or along its own if equal matrices lie side by side, each of them split."""
    shape, pieces = call.tensors[0].shape, call.value
    dim, removes_dim = call["dim"] % len(shape), call.target is aten.unbind.int
    equal = len({v.shape for v in pieces}) == 1
    for split in call.splits(shape):
        if split.dim != dim:
            yield OpStrategy((split,), Split(split.dim - (removes_dim and dim < split.dim), split.outer))
        elif not removes_dim and equal and split.outer % len(pieces) == 0:
            size = call.part(shape, split) * split.outer // len(pieces)

            def run(index: Tensor, x: Tensor, size=size) -> list[Tensor]:
                return x.split(size, dim)

            yield OpStrategy((split,), Split(dim, split.outer // len(pieces)), run=run)
    yield OpStrategy((PARTIAL,), PARTIAL)


@rule(aten.cat.default, aten.stack.default)
def _cat(call: Call) -> Iterator[OpStrategy]:
    """Split along other dims, or along its own if the tensors are equal in shape; each is split then."""
    adds_dim, rank = call.target is aten.stack.default, call.value.dim()
    dim = call["dim"] % rank
    # torch leaves an empty tensor of one dim out, whatever the others are.
    counted = [adds_dim or t.shape != (0,) for t in call.tensors]
    sizes = [t.shape[dim] for t, counts in zip(call.tensors, counted, strict=True) if counts and not adds_dim]

    def place_each(placement: Placement) -> tuple[Placement, ...]:
        return tuple(placement if counts else REPLICATED for counts in counted)

    for split in call.splits(call.shape, [d for d in range(rank) if d != dim]):
        yield OpStrategy(place_each(Split(split.dim - (adds_dim and dim < split.dim), split.outer)), split)

    # Along its own dim: the tensors lie side by side in the result, and each of them stays split.
    if len(set(sizes)) == 1:
        for split in call.splits([sizes[0] if d == dim else s for d, s in enumerate(call.shape)], [dim]):
            yield OpStrategy(place_each(split), Split(dim, split.outer * len(sizes)))
    yield OpStrategy(place_each(PARTIAL), PARTIAL)


@rule(aten.constant_pad_nd.default, aten.pad.default)
def _pad(call: Call) -> Iterator[OpStrategy]:
    """Split along the dims that are not padded."""
    rank, pad = call.tensors[0].dim(), call["pad"]
    # Torch lists pairs (before, after) from the last dim. Only padding with zeros is linear.
    kept = [d for d in range(rank) if not any(pad[2 * (rank - 1 - d) :][:2])]
    yield from move_dims(call, [d if d in kept else None for d in range(rank)], linear=not call["value"])


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def _scatter(call: Call) -> Iterator[OpStrategy]:
    """Split along the dims that are written as a whole."""
    dim = call["dim"] % call.value.dim()
    lacks_dim = call.target is aten.select_scatter.default  # whether what is written lacks the dim
    for split in call.splits(call.shape, [d for d in range(call.value.dim()) if d != dim]):
        yield OpStrategy((split, Split(split.dim - (lacks_dim and dim < split.dim), split.outer)), split)
    yield OpStrategy((PARTIAL, PARTIAL), PARTIAL)
