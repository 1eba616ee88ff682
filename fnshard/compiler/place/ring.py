"""Ring: attention over a sequence that an axis splits, whose blocks of keys and values go round the ranks.

Liu, Zaharia & Abbeel 2023. Each rank keeps its queries; in each turn it has one other rank's keys and values
and sends its own to another: one `permute` a turn, issued before the product of the turn before. Of keys and
values only a rank's own are kept for the backward, where they go round again (`schedule.passes.regather`);
the gradients of a block go back to its rank by the permutes' duals. Masks are whole along the keys.

With a causal mask the blocks behind a rank's own are computed and count for nothing, on every rank alike: the
last rank needs all of them, so that it takes no longer; a zigzag order of the sequence would halve it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.compiler.frontend.exchange import EXCHANGE, OUTGOING
from fnshard.compiler.place.placement import Split, fits
from fnshard.compiler.place.ways import Call

aten, own = torch.ops.aten, torch.ops.fnshard


def ring(call: Call, index: Tensor, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
    """This rank's part of an attention, of its queries, keys and values."""
    dtype, ranks, carry = call.value.dtype, call.ranks, []
    query, key, value = (t.to(dtype) for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
    block = sent = OUTGOING(torch.cat([key, value], -1))
    source, seen = index, _over_blocks(call, mask[0] if mask else None)
    for turn in range(1, ranks + 1):
        following = EXCHANGE(sent, "permute", call.axis, turn, ranks) if turn < ranks else None
        carry = own.attention_turn(query, block, carry, source, seen, ranks, call["is_causal"], scale)
        # Handed on as a value, so that the turns are one kernel.
        block, source = following, OUTGOING(source - 1)
    return own.attention_merged(carry[0], carry[1], dtype)


def _over_blocks(call: Call, mask: Tensor | None) -> Tensor | None:
    """A mask over the keys of all blocks; those that pad the last ones are not seen.

    With a causal mask they lie behind all queries.
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


def problem(call: Call) -> str:
    """Why a call cannot go round; "" if it can."""
    query, key, *rest = call.tensors
    split = Split(query.dim() - 2)
    if call.target is not aten.scaled_dot_product_attention.default or call["dropout_p"]:
        return "it has dropout"
    if not all(fits(t.shape, split, call.ranks) for t in (query, key)):
        return f"of {query.shape[-2]} queries and {key.shape[-2]} keys some ranks would have none"
    if call["is_causal"] and query.shape[-2] != key.shape[-2]:
        return f"it is causal, of {query.shape[-2]} queries and {key.shape[-2]} keys"
    if query.dim() not in (3, 4) or query.shape[:-3] != key.shape[:-3]:
        return f"its queries are {list(query.shape)} and its keys {list(key.shape)}"
    if any(mask.requires_grad for mask in rest[1:]):
        return "its mask has a gradient"
    return ""
