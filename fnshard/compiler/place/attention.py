"""Rules of attention: along rows and heads, and over a sequence that is split.

Ring attention (Liu, Zaharia & Abbeel 2023): blocks of keys and values go round the ranks. Each rank keeps its
queries. In each turn it has one other rank's keys and values and sends its own to another: one `permute` a
turn, issued before the product of the turn before. For the backward a rank keeps only its own keys and
values, which go round again then (`schedule.passes.regather`); the gradients of a block go back to its rank
by the permutes' duals. Masks are whole along the keys. With a causal mask, blocks after a rank's own are
computed and count for nothing, on every rank alike. That takes no longer, since the last rank needs all
blocks; a zigzag order of the sequence would halve the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.frontend.random import key_at
from fnshard.compiler.kernels import document_attention  # noqa: F401  (its operator)
from fnshard.compiler.place.draws import first_drawn, strides_of
from fnshard.compiler.place.placement import REPLICATED, Split, divides, fits
from fnshard.compiler.place.strategies import Call, OpStrategy, broadcast, rule
from fnshard.errors import TraceError

aten, own = torch.ops.aten, torch.ops.fnshard


@rule(aten.scaled_dot_product_attention.default, own.attention.default)
def _attention(call: Call) -> Iterator[OpStrategy]:
    """Split along batch and heads. Of fewer heads of keys and values each rank takes those that it needs.

    Without a causal mask queries may be split too. Over a split sequence it runs as `context_attention` says.
    """
    now = call.current[0]
    over_sequence = isinstance(now, Split) and now.dim == call.tensors[0].dim() - 2
    if call.axis.attention == "auto" or not over_sequence:
        yield from _split_rows_or_heads(call)
    else:
        yield from {"ulysses": _ulysses, "gather": _gather, "ring": _ring}[call.axis.attention](call)


def _split_rows_or_heads(call: Call) -> Iterator[OpStrategy]:
    """Split along the batch, heads, or queries without a causal mask."""
    query, key = call.tensors[0], call.tensors[1]
    scores, rank = (*query.shape[:-1], key.shape[-2]), query.dim()
    draws = call.target is own.attention.default
    splits = call.splits(query.shape, range(rank - 1), more=() if draws else (call.axis.later,))

    # Heads come first, as the products before have them.
    for split in sorted(splits, key=lambda split: split.dim != rank - 3):
        # A rank draws from one first number, by the strides of whole scores (`_attend_with_dropout`); several
        # blocks would need one more dim.
        if draws and split.outer > 1:
            continue
        others = tuple(broadcast(t.shape, scores, split) for t in call.tensors[3:])  # a mask, a random key
        attend = partial(_attend_with_dropout, call, split) if draws else None
        if split.dim == rank - 2:
            # A rank's queries begin anywhere in the sequence, and the op's causal mask at its start.
            if not call["is_causal"]:
                yield OpStrategy((split, REPLICATED, REPLICATED, *others), split, run=attend)
        elif divides(key.shape, split, call.ranks) or query.shape[split.dim] == key.shape[split.dim]:
            yield OpStrategy((split, split, split, *others), split, run=attend)
        elif split.dim == rank - 3 and (take := _take_heads(call, split)):
            yield OpStrategy(
                (split, REPLICATED, REPLICATED, *others),
                split,
                run=partial(_attend_to_shared_heads, call, take, attend),
            )


@rule(own.document_attention.default)
def _documents(call: Call) -> Iterator[OpStrategy]:
    """Split along rows and heads, or queries of a split sequence, with whole keys."""
    query, key = call.tensors[:2]
    now, whole = call.current[0], (REPLICATED,) * (len(call.tensors) - 4)
    over_sequence, mode = isinstance(now, Split) and now.dim == 2, call.axis.attention
    if over_sequence and mode == "ring":
        raise _make_error(call, "it is of documents or a window", "'auto', 'ulysses' or 'gather'.")

    # By queries, with gathered keys.
    if over_sequence and mode != "ulysses":
        for split in call.splits(query.shape, (2,), even=True):
            if split.outer == 1:
                run = partial(_attend_from_offset, call)
                yield OpStrategy((split, *[REPLICATED] * 3, *whole), split, run=run)

    # By rows, or by heads, with all of a row's keys.
    for split in call.splits(query.shape, (0, 1)) if not over_sequence or mode != "gather" else ():
        documents = split if split.dim == 0 else REPLICATED
        if divides(key.shape, split, call.ranks) or query.shape[split.dim] == key.shape[split.dim]:
            yield OpStrategy((split, split, split, documents, *whole), split)
        elif split.dim == 1 and (take := _take_heads(call, split)):
            inputs = (split, REPLICATED, REPLICATED, documents, *whole)
            yield OpStrategy(inputs, split, run=partial(_attend_to_shared_heads, call, take, None))

    if over_sequence and mode == "ulysses" and query.shape[1] % call.ranks:
        raise _make_error(call, f"its {query.shape[1]} heads cannot be split", "'gather' or 'auto'.")


def _attend_from_offset(call: Call, index: Tensor, *tensors: Tensor) -> Any:
    """Attend from a rank's queries, which begin at an offset of the sequence."""
    offset = index * tensors[0].shape[2]
    return call.on(tensors[:4], offset=offset if call["offset"] is None else tensors[4] + offset)


def _take_heads(call: Call, split: Split) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a function that takes the heads of keys or values which a rank's queries share.

    None if the heads cannot be split evenly.
    """
    dim, outer = split.dim, split.outer
    heads, shared = call.tensors[0].shape[dim], call.tensors[1].shape[dim]
    local_heads, group = heads // outer // call.ranks, heads // shared
    # A rank's heads must all lie in one group, so that they share a single head of keys and values.
    if heads % (outer * call.ranks) or group % local_heads or shared % outer:
        return None

    def take(index: Tensor, x: Tensor) -> Tensor:
        shared_head = (index * local_heads // group).reshape(1)
        return x.unflatten(dim, (outer, -1)).index_select(dim + 1, shared_head).flatten(dim, dim + 1)

    return take


def _attend_to_shared_heads(
    call: Call, take: Any, attend: Any, index: Tensor, query: Tensor, key: Tensor, value: Tensor,
    *others: Tensor,
) -> Tensor:  # fmt: skip
    """Attend to the heads of keys and values that this rank's queries share.

    Args:
        attend: a function to call in place of the op, or None.
    """
    tensors = [query, take(index, key), take(index, value), *others]
    return call.on(tensors) if attend is None else attend(index, *tensors)


def _attend_with_dropout(call: Call, split: Split, index: Tensor, *tensors: Tensor, **changes: Any) -> Tensor:
    """Attend with the dropout that whole scores would have."""
    *tensors, key = tensors
    scores = (*call.tensors[0].shape[:-1], call.tensors[1].shape[-2])
    key = key_at(key, first_drawn(call, index, split, scores))
    return call.on([*tensors, key], strides=strides_of(call, scores), **changes)


def _ulysses(call: Call) -> Iterator[OpStrategy]:
    """Split along the heads (DeepSpeed Ulysses, Jacobs et al. 2023)."""
    heads = call.tensors[0].dim() - 3
    strategies = [strategy for strategy in _split_rows_or_heads(call) if strategy.output.dim == heads]
    if not strategies:
        raise _make_error(
            call, f"its {call.shape[heads]} heads cannot be split", "'ring', 'gather' or 'auto'."
        )
    yield from strategies


def _make_error(call: Call, why: str, fix: str) -> TraceError:
    """Return the error of an attention that the chosen way cannot split."""
    option = f"context_attention={call.axis.attention!r} over {call.axis.name!r}, {call.ranks} ranks"
    place = f", at {call.source_line}" if call.source_line else ""
    error = TraceError(f"{option}: an attention cannot run so.", [why + place], fix)
    error.placed = bool(call.source_line)  # without a line, `lower` traces once more to find it
    return error


def _split_queries(call: Call) -> tuple[Split, list[Any]]:
    """Return a split of the queries' sequence, and the placements of masks and random keys under it."""
    query, key = call.tensors[:2]
    split, scores = Split(query.dim() - 2), (*query.shape[:-1], key.shape[-2])
    return split, [broadcast(t.shape, scores, split) for t in call.tensors[3:]]


def _gather(call: Call) -> Iterator[OpStrategy]:
    """Split along the queries; keys and values are whole."""
    split, others = _split_queries(call)
    draws = call.target is own.attention.default
    attend = partial(_attend_with_dropout, call, split) if draws else None
    run = partial(_attend_causally, call, split) if call["is_causal"] else attend
    yield OpStrategy((split, REPLICATED, REPLICATED, *others), split, run=run)


def _attend_causally(call: Call, split: Split, index: Tensor, *tensors: Tensor) -> Tensor:
    """Attend with a rank's rows of the causal mask."""
    rows, columns = call.part(call.tensors[0].shape, split), call.tensors[1].shape[-2]
    positions = torch.arange(rows, device=index.device) + index * rows
    seen = positions.unsqueeze(1) >= torch.arange(columns, device=index.device)
    if call.target is own.attention.default:
        return _attend_with_dropout(call, split, index, *tensors, mask=seen, is_causal=False)
    return call.on(tensors, attn_mask=seen, is_causal=False)


def _ring(call: Call) -> Iterator[OpStrategy]:
    """Split along the queries and the keys."""
    if why := find_problem(call):
        raise _make_error(call, why, "'auto', 'ulysses' or 'gather'.")
    split, others = _split_queries(call)
    yield OpStrategy((split, split, split, *others), split, run=partial(attend_in_ring, call))


@rule(own.attention_turn.default)
def _attention_turn(call: Call) -> Iterator[OpStrategy]:
    """Split along batch and heads, as attention is."""
    query, block = call.tensors[:2]
    scores, rank = (*query.shape[:-1], block.shape[-2]), query.dim()
    for split in call.splits(query.shape, range(rank - 2), even=True):
        carry = (split,) * len(call["carry"])
        mask = tuple(broadcast(t.shape, scores, split) for t in call.tensors[3 + len(carry) :])
        others = (*carry, REPLICATED, *mask)  # the turn's source is a number, which all ranks have
        if divides(block.shape, split, call.ranks):
            yield OpStrategy((split, split, *others), split)
        elif split.dim == rank - 3 and (take := _take_heads(call, split)):
            run = partial(_attend_to_block, call, take)
            yield OpStrategy((split, REPLICATED, *others), split, run=run)


def _attend_to_block(
    call: Call, take: Any, index: Tensor, query: Tensor, block: Tensor, *others: Tensor
) -> Any:
    """Attend to a block of the heads that this rank's queries share."""
    return call.on([query, take(index, block), *others])


@rule(own.attention_merged.default)
def _merge_attention(call: Call) -> Iterator[OpStrategy]:
    """Split along every dim but the values'."""
    for split in call.splits(call.shape, range(len(call.shape) - 1)):
        yield OpStrategy((split, split), split)


def attend_in_ring(
    call: Call, index: Tensor, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor
) -> Tensor:
    """Compute this rank's part of an attention from its queries, keys and values."""
    dtype, ranks, carry = call.value.dtype, call.ranks, []
    query, key, value = (t.to(dtype) for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
    block = sent = OUTGOING(torch.cat([key, value], -1))  # keys and values travel as one message

    source, seen = index, _pad_mask(call, mask[0] if mask else None)
    for turn in range(1, ranks + 1):
        # The next block travels while this one is attended to. None follows the last turn.
        following = EXCHANGE(sent, "permute", call.axis.name, turn, ranks) if turn < ranks else None
        carry = own.attention_turn(query, block, carry, source, seen, ranks, call["is_causal"], scale)
        # The source is handed on as a value, so that all turns are one kernel.
        block, source = following, OUTGOING(source - 1)
    return own.attention_merged(carry[0], carry[1], dtype)


def _pad_mask(call: Call, mask: Tensor | None) -> Tensor | None:
    """Return a mask over the keys of all blocks, which hides the padding of the last ones.

    A causal mask hides it already: it comes after all queries.
    """
    key = call.tensors[1]
    keys, part = key.shape[-2], call.part(key.shape, Split(key.dim() - 2))
    missing = part * call.ranks - keys
    if not missing or (mask is None and call["is_causal"]):
        return mask
    if mask is None:
        mask = torch.ones([1] * key.dim(), dtype=torch.bool, device=key.device)
    unseen = False if mask.dtype == torch.bool else -torch.inf
    return F.pad(mask.expand(*mask.shape[:-1], keys), (0, missing), value=unseen)


def find_problem(call: Call) -> str:
    """Return why a call cannot run as a ring; "" if it can."""
    query, key, *others = call.tensors
    split = Split(query.dim() - 2)
    if call.target is not aten.scaled_dot_product_attention.default or call["dropout_p"]:
        return "it has dropout"
    if not all(fits(t.shape, split, call.ranks) for t in (query, key)):
        return f"of {query.shape[-2]} queries and {key.shape[-2]} keys some ranks would have none"
    if call["is_causal"] and query.shape[-2] != key.shape[-2]:
        return f"it is causal, of {query.shape[-2]} queries and {key.shape[-2]} keys"
    if query.dim() not in (3, 4) or query.shape[:-3] != key.shape[:-3]:
        return f"its queries are {list(query.shape)} and its keys {list(key.shape)}"
    if any(mask.requires_grad for mask in others[1:]):
        return "its mask has a gradient"
    return ""
