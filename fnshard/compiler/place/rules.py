"""Rules: the ways in which an op can run over a mesh axis, given what its arguments can be split along.

A rule is of one op, or of a family of them, and yields `Way`s; that of whole values on all ranks is always
there. A way whose local form is the op itself names other arguments (sizes) at most; else it has a `run`.
What no way fits without a gather may have an expansion (`expand`): its definition by smaller ops. Each rule
is tested by force, `tests/compiler/test_place_rules.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from fnshard.compiler.ir.program import OpOverload
from fnshard.compiler.place import (  # noqa: F401 - a family adds its rules to RULES
    attention,
    draws,
    exchanged,
    lookups,
    products,
    reductions,
    views,
    windows,
)
from fnshard.compiler.place.elementwise import elementwise
from fnshard.compiler.place.ways import RULES, Rule


def rule_of(target: Any) -> Rule | None:
    """The rule of an op; None where it has none, and takes whole values."""
    if target in RULES:
        return RULES[target]
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return elementwise if pointwise else None
