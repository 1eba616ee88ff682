"""Rules of random ops: a rank draws the same number for an element as a single device does, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fnshard.compiler.frontend.random import key_at
from fnshard.compiler.place.placement import REPLICATED, Split
from fnshard.compiler.place.strategies import Call, OpStrategy, broadcast, rule

own = torch.ops.fnshard


def strides_of(call: Call, shape: Sequence[int]) -> list[int]:
    """Return how far apart elements are in the tensor that a single device draws."""
    return call["strides"] or [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def first_drawn(call: Call, index: Tensor, split: Split, shape: Sequence[int]) -> Tensor:
    """Return the number of a rank's first element in a drawn tensor of this shape."""
    return index * (call.part(shape, split) * strides_of(call, shape)[split.dim])


@rule(own.dropout.default)
def _dropout(call: Call) -> Iterator[OpStrategy]:
    """Split along any dim; blocks that are not contiguous are drawn with one more dim."""
    shape = call.shape
    strides = strides_of(call, shape)
    for split in call.splits(shape):
        dim, count = split.dim, call.part(shape, split)
        # With the split dim seen as [outer, block], one step along `outer` passes a block of all ranks.
        apart = [*strides[:dim], strides[dim] * (shape[dim] // split.outer), *strides[dim:]]

        def run(index: Tensor, x: Tensor, key: Tensor, split=split, count=count, apart=apart) -> Tensor:
            key = key_at(key, first_drawn(call, index, split, shape))
            blocks = x.reshape(*x.shape[: split.dim], split.outer, count, *x.shape[split.dim + 1 :])
            return call.on([blocks, key], strides=apart).reshape(x.shape)

        yield OpStrategy((split, REPLICATED), split, run=run)


@rule(own.feature_dropout.default, own.alpha_dropout.default)
def _feature_dropout(call: Call) -> Iterator[OpStrategy]:
    """Split ops that draw a number for each feature, or element; dims that share it see it on all ranks."""
    features = call.arguments.get("features", True)
    drawn = [*call.shape[:2], *[1] * (len(call.shape) - 2)] if features else call.shape
    for split in call.splits(call.shape):
        if split.outer > 1:
            continue

        def run(index: Tensor, x: Tensor, key: Tensor, split=split) -> Tensor:
            if drawn[split.dim] > 1:  # else all ranks draw the same numbers, by the same key
                key = key_at(key, first_drawn(call, index, split, drawn))
            return call.on([x, key], strides=strides_of(call, drawn))

        yield OpStrategy((split, REPLICATED), split, run=run)


@rule(own.bernoulli.default)
def _bernoulli(call: Call) -> Iterator[OpStrategy]:
    """Draw a rank's part of the numbers, by a key that counts from its first."""
    shape = call.shape
    for split in call.splits(shape):
        if split.outer > 1:
            continue

        def run(index: Tensor, p: Tensor, key: Tensor, split=split) -> Tensor:
            key = key_at(key, first_drawn(call, index, split, shape))
            return call.on([p, key], shape=call.local(split), strides=strides_of(call, shape))

        yield OpStrategy((broadcast(call.tensors[0].shape, shape, split), REPLICATED), split, run=run)
