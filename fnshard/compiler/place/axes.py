"""Axes: what a program is placed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fnshard.compiler.ir.program import Input
from fnshard.compiler.place.placement import Placement, Split
from fnshard.compiler.place.ways import ContextAttention

Residual = Literal["split", "whole"]


@dataclass(frozen=True)
class Axis:
    """A mesh axis to place a program over.

    Args:
        inputs: what placeholders are; those not named are replicated.
        later: ranks along the axes that are placed after this one.
        sliced: inputs that every rank has whole, of which it takes its part: a batch along its sequence.
        residual: "split": where parts are summed, the sum may be split along another dim (sequence
            parallelism, Korthikanti et al. 2022); "whole": it is on all ranks.
    """

    name: str
    ranks: int
    inputs: Mapping[Input, Placement]
    residual: Residual = "split"
    sliced: Mapping[Input, Split] = field(default_factory=dict)
    later: int = 1
    attention: ContextAttention = "auto"
