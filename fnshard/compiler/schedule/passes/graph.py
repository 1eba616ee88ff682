"""Graph: a step in two parts, of which a CUDA graph holds the first. Keeps numerics."""

from __future__ import annotations

from fnshard.compiler.schedule.instructions import (
    TRANSFER,
    Instruction,
    Publish,
    ReduceScalars,
    Update,
    UpdateGather,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule


def updates_last(schedule: Schedule) -> Schedule:
    """Move what depends on numbers of the host behind everything else: updates, and what they wait for.

    All gradient shards live until the end, as they do where gradients are clipped. A step with transfers
    stays as it is: no graph holds it.
    """
    lines = schedule.instructions
    if any(line.lane == TRANSFER for line in lines):
        return schedule
    return schedule.with_instructions(
        [*(i for i in lines if not of_host(i)), *(i for i in lines if of_host(i))]
    )


def of_host(line: Instruction) -> bool:
    """Whether an instruction reads rates, step counts or flags, which are numbers of Python."""
    waits = isinstance(line, Wait) and line.is_for(ReduceScalars, Publish, UpdateGather)
    return waits or isinstance(line, UpdateGather | Update | Publish)


def graph_length(schedule: Schedule) -> int:
    """How many lines stand before the first that is of the host."""
    lines = schedule.instructions
    return next((n for n, line in enumerate(lines) if of_host(line)), len(lines))
