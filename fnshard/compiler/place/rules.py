"""Rules: how an op can run over a mesh axis, given what its arguments can be split along.

A rule is of one op, or of a family of them, and yields an `OpStrategy` for each way; that of whole values on
all ranks is always there. A strategy whose local form is the op itself names other arguments (sizes) at most;
else it has a `run`. What no strategy fits without a gather may have an expansion (`expand`): its definition
by smaller ops. Each rule is tested by force, `tests/compiler/test_place_rules.py`.
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
    """The rule of an op; None where it has none, and takes whole values."""
    if target in RULES:
        return RULES[target]
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return elementwise if pointwise else None


@rule(torch.ops.fnshard.exchange.default)
def _exchange(call: Call) -> Iterator[OpStrategy]:
    """What comes from others, or goes to them, lies in as many blocks as there are of them."""
    others = call["ranks"]
    scattered, joined = KINDS[call["kind"]].dims(call["dim"], call["to"])
    for split in call.splits(call.tensors[0].shape):
        outer = split.outer
        if split.dim == scattered and outer % others:
            continue
        outer = outer // others if split.dim == scattered else outer
        outer = outer * others if split.dim == joined else outer
        yield OpStrategy((split,), Split(split.dim, outer))
    yield OpStrategy((PARTIAL,), PARTIAL)
