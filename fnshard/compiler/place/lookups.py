"""Rules of ops that read or write at indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Split
from fnshard.compiler.place.strategies import Call, OpStrategy, broadcast, move_dims, rule

aten = torch.ops.aten


def _look_up_masked(
    call: Call, dims: Sequence[int], trailing: int = 0, **changes: Any
) -> Iterator[OpStrategy]:
    """Look up in a dim that is split: each rank finds entries that it has, and the sum has all.

    Args:
        dims: dims of the first tensor, each looked up by one of the tensors after it.
        trailing: the number of dims of the result after those of the index.
        changes: arguments of the local call that differ.
    """
    value, others = call.tensors[0], (REPLICATED,) * (len(call.tensors) - 1)
    if value.dtype == torch.bool:  # ranks cannot sum booleans
        return
    for split in call.splits(value.shape, dims):
        number, rows = 1 + dims.index(split.dim), call.part(value.shape, split)

        def run(rank: Tensor, *read: Tensor, number=number, rows=rows) -> Tensor:
            local = read[number] - rank * rows
            # What another rank has is looked up at 0 here, and counts for nothing in the sum.
            inside = (local >= 0) & (local < rows)
            entries = call.on([*read[:number], torch.where(inside, local, 0), *read[number + 1 :]], **changes)
            return torch.where(inside.reshape(*inside.shape, *[1] * trailing), entries, 0)

        if split.outer == 1:
            yield OpStrategy((split, *others), PARTIAL, run=run)
    yield OpStrategy((PARTIAL, *others), PARTIAL)


@rule(aten.embedding.default)
def _embedding(call: Call) -> Iterator[OpStrategy]:
    """Split indices, columns, or rows of the table: each rank looks up its rows, and the sum has all."""
    table, indices = call.tensors
    # By frequency, the gradient of a row depends on how often all ranks' indices name it.
    by_frequency = call["scale_grad_by_freq"]
    if not by_frequency:
        for split in call.splits(indices.shape):
            yield OpStrategy((REPLICATED, split), split)
    for split in call.splits(table.shape, [1]):
        yield OpStrategy((split, REPLICATED), Split(indices.dim(), split.outer))
    # The padding row has no gradient. Its index is another on each rank, so that the op itself cannot leave
    # it out.
    padding = call["padding_idx"]
    for strategy in _look_up_masked(call, [] if by_frequency else [0], 1, padding_idx=-1):
        if strategy.run is None or padding < 0:
            yield strategy
            continue

        def run(rank: Tensor, table: Tensor, indices: Tensor, find=strategy.run) -> Tensor:
            rows = find(rank, table, indices)
            return torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)

        yield replace(strategy, run=run)


@rule(aten.gather.default, aten.take_along_dim.default)
def _gather(call: Call) -> Iterator[OpStrategy]:
    """Split along dims that are not looked up in, or split the indices, or the table's own dim."""
    value, index = call.tensors
    if call["dim"] is None or value.dim() == 0 or value.dim() != index.dim():
        return
    dim = call["dim"] % value.dim()
    same = [d for d in range(value.dim()) if d != dim and value.shape[d] == index.shape[d]]
    for split in call.splits(value.shape, same):
        yield OpStrategy((split, split), split)
    for split in call.splits(index.shape, [dim]):
        yield OpStrategy((REPLICATED, split), split)
    yield from _look_up_masked(call, [dim])


@rule(aten.index_select.default)
def _index_select(call: Call) -> Iterator[OpStrategy]:
    """Split along other dims, along the index, or along the dim that is looked up in."""
    value, index = call.tensors
    dim = call["dim"] % max(value.dim(), 1)
    yield from move_dims(call, [None if d == dim else d for d in range(value.dim())], linear=False)
    for split in call.splits(index.shape):
        yield OpStrategy((REPLICATED, split), Split(dim, split.outer))
    if index.dim():
        yield from _look_up_masked(call, [dim], value.dim() - dim - 1)


@rule(aten.index.Tensor)
def _index(call: Call) -> Iterator[OpStrategy]:
    """Split along dims that no index names, along an index, or along a named dim.

    Along a named dim, each rank finds its own rows.
    """
    value, indices = call["self"], call["indices"]
    named = [d for d, i in enumerate(indices) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices if i is not None):
        return
    # The dims of the indices take the place of the named ones if these are adjacent, else they come first.
    shape = torch.broadcast_shapes(*(indices[d].shape for d in named))
    are_adjacent = named == list(range(named[0], named[0] + len(named)))
    first = named[0] if are_adjacent else 0
    kept = [d for d in range(value.dim()) if d not in named]
    after = {d: i + (len(shape) if i >= first else 0) for i, d in enumerate(kept)}

    whole = (REPLICATED,) * len(named)
    for split in call.splits(value.shape, kept):
        yield OpStrategy((split, *whole), Split(after[split.dim], split.outer))
    for split in call.splits(shape):
        parts = (broadcast(indices[d].shape, shape, split) for d in named)
        yield OpStrategy((REPLICATED, *parts), Split(first + split.dim, split.outer))
    for strategy in _look_up_masked(call, named, call.value.dim() - first - len(shape)):
        if strategy.run is None:
            yield strategy
            continue

        def run(rank: Tensor, part: Tensor, *read: Tensor, find=strategy.run) -> Tensor:
            # A negative index counts from the end of the whole dim.
            sizes = (value.shape[d] for d in named)
            indices = (torch.where(i < 0, i + size, i) for i, size in zip(read, sizes, strict=True))
            return find(rank, part, *(index.expand(shape) for index in indices))

        yield replace(strategy, run=run)


@rule(
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
    aten.scatter.reduce, aten.scatter.value_reduce,
)  # fmt: skip
def _scatter(call: Call) -> Iterator[OpStrategy]:
    """Split along dims in which all tensors have the same length."""
    value = call.tensors[0]
    dim = call["dim"] % max(value.dim(), 1)
    same = [d for d in range(value.dim()) if d != dim and len({t.shape[d] for t in call.tensors}) == 1]
    for split in call.splits(value.shape, same):
        yield OpStrategy((split,) * len(call.tensors), split)
    if call.target in (aten.scatter.src, aten.scatter_add.default):
        yield OpStrategy((PARTIAL, REPLICATED, PARTIAL), PARTIAL)


@rule(aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar)
def _index_write(call: Call) -> Iterator[OpStrategy]:
    value = call.tensors[0]
    dim = call["dim"] % max(value.dim(), 1)
    for split in call.splits(value.shape, [d for d in range(value.dim()) if d != dim]):
        yield OpStrategy((split, REPLICATED, split)[: len(call.tensors)], split)


@rule(aten.index_put.default)
def _index_put(call: Call) -> Iterator[OpStrategy]:
    """Split along the dims after the indices, or along those of a mask if it writes a single value."""
    value, indices, values = call["self"], call["indices"], call["values"]
    named = [d for d, i in enumerate(indices) if i is not None]
    if named != list(range(len(named))):
        return
    # A mask covers as many dims of the value as it has itself, an index of numbers covers one.
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    covered = len(named) - len(masks) + sum(mask.dim() for mask in masks)
    after = value.shape[covered:]
    picked = values.shape[: max(0, values.dim() - len(after))]  # the dims of `values` before `after`
    for split in call.splits(value.shape, range(covered, value.dim())):
        written = (*[1] * len(picked), *after)
        inside = broadcast(values.shape, written, Split(split.dim - value.dim() + len(written), split.outer))
        yield OpStrategy((split, *[REPLICATED] * len(named), inside), split)
    if len(named) == len(masks) == 1 and math.prod(picked) == 1:
        for split in call.splits(value.shape, range(covered)):
            yield OpStrategy((split, split, REPLICATED), split)
