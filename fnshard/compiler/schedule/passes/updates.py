"""Updates: update a unit as soon as its gradient has arrived. Keeps numerics."""

from __future__ import annotations

from fnshard.compiler.ir.values import Kind
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    Instruction,
    Norms,
    Publish,
    Update,
    UpdateGather,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule


def update_in_backward(schedule: Schedule) -> Schedule:
    """Move each Update up, to where its gradient is there and its leaves are read no more.

    So gradient shards live for a moment only (as with torch's post-accumulate-grad hooks). Norms move
    up before them: an optimizer may scale its gradients in place. Where
    something global stands between, the Update reads it and stays where it is.
    """
    lines = [i for i in schedule.instructions if not _moves(i)]
    for line in [i for i in schedule.instructions if _moves(i)]:
        lines.insert(_earliest(lines, line), line)
    return schedule.with_instructions(lines)


def _moves(line: Instruction) -> bool:
    waits = isinstance(line, Wait) and line.is_for(Publish, UpdateGather)
    return waits or isinstance(line, Norms | UpdateGather | Update | Publish)


def _earliest(lines: list[Instruction], line: Instruction) -> int:
    """Right behind the last line that makes what it reads, or touches state that it changes.

    A collective touches what it reads until it has been waited for.
    """
    reads = set(line.reads)
    changes = {n for n in (*line.writes, *line.overwrites) if n.kind in (Kind.STORED, Kind.REDUCED)}
    issued = {i.writes[0]: i.reads for i in lines if i.lane == COMMUNICATION}
    for index in range(len(lines) - 1, -1, -1):
        other = lines[index]
        under_way = issued.get(other.reads[0], ()) if isinstance(other, Wait) else ()
        touched = (*other.reads, *other.writes, *under_way)
        if reads.intersection(other.writes) or changes.intersection(touched):
            return index + 1
    return 0
