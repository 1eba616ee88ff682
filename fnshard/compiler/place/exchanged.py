"""The rule of exchanges, which ranks of another axis make of their parts of one split."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fnshard.compiler.frontend.exchange import KINDS
from fnshard.compiler.place.placement import PARTIAL, Split
from fnshard.compiler.place.ways import Call, Way, rule


@rule(torch.ops.fnshard.exchange.default)
def _exchange(call: Call) -> Iterator[Way]:
    """What comes from others, or goes to them, lies in as many blocks as there are of them."""
    others = call["ranks"]
    scattered, joined = KINDS[call["kind"]].dims(call["dim"], call["to"])
    for split in call.splits(call.tensors[0].shape):
        outer = split.outer
        if split.dim == scattered and outer % others:
            continue
        outer = outer // others if split.dim == scattered else outer
        outer = outer * others if split.dim == joined else outer
        yield Way((split,), Split(split.dim, outer))
    yield Way((PARTIAL,), PARTIAL)
