"""Rules: how an op can run over a mesh axis, given the dims that its arguments can be split along.

A rule belongs to one op, or to a family of them, and yields an `OpStrategy` for each way to run it. To run on
whole values on all ranks is always possible, and needs no rule. A strategy that runs the op itself on parts
changes some arguments (sizes) at most; any other has a `run`. An op that would need a gather under all its
strategies may have an expansion (`expand`), its definition in smaller ops. Each rule is tested by brute
force, `tests/compiler/test_place_rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fnshard.compiler.frontend.exchange import KINDS
from fnshard.compiler.ir.program import OpOverload
from fnshard.compiler.place import (  # noqa: F401 - a family adds its rules to RULES
    attention,
    draws,
    lookups,
    products,
    reductions,
    views,
    windows,
)
from fnshard.compiler.place.elementwise import elementwise
from fnshard.compiler.place.placement import PARTIAL, Split
from fnshard.compiler.place.strategies import RULES, Call, OpStrategy, Rule, rule


def rule_of(target: Any) -> Rule | None:
    """Return the rule of an op, or None if it has none and takes whole values."""
    if target in RULES:
        return RULES[target]
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return elementwise if pointwise else None


@rule(torch.ops.fnshard.exchange.default)
def _exchange(call: Call) -> Iterator[OpStrategy]:
    """Split a message; a dim that is scattered or joined has as many blocks as the exchange has ranks."""
    others = call["ranks"]
    scattered, joined = KINDS[call["kind"]].dims(call["dim"], call["to"])
    for split in call.splits(call.tensors[0].shape):
        outer = split.outer
        if split.dim == scattered:
            if outer % others:
                continue
            outer //= others
        if split.dim == joined:
            outer *= others
        yield OpStrategy((split,), Split(split.dim, outer))
    yield OpStrategy((PARTIAL,), PARTIAL)
