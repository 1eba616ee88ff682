"""The rule of exchanges, which ranks of another axis make of their parts of one split."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fnshard.compiler.frontend.exchange import KINDS
from fnshard.compiler.place.placement import PARTIAL, Split
from fnshard.compiler.place.ways import Call, Way, rule


@rule(torch.ops.fnshard.exchange.default)
def _exchange(call: Call) -> Iterator[Way]:
    """What is gathered from others lies in as many blocks as there are of them."""
    kind, dim, others = call["kind"], call["dim"], call["ranks"]
    moved = KINDS[kind].dims(dim, call["to"])
    for split in call.splits(call.tensors[0].shape):
        if split.dim not in moved:
            yield Way((split,), split)
        elif kind == "all_gather":
            yield Way((split,), Split(dim, split.outer * others))
        elif kind == "reduce_scatter" and split.outer % others == 0:
            yield Way((split,), Split(dim, split.outer // others))
    yield Way((PARTIAL,), PARTIAL)
