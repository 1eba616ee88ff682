"""Order: passes that choose when updates run, and when values die. They keep numerics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    Accumulate,
    ComputeStack,
    Free,
    Instruction,
    Norms,
    Publish,
    ReduceUpdate,
    Run,
    StackUpdate,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule, follow_aliases

_UPDATES = Update | ReduceUpdate | StackUpdate | ComputeStack


def update_in_backward(schedule: Schedule) -> Schedule:
    """Move each Update up, behind the line that makes its gradient and the last one that reads its leaves.

    So gradient shards live for a moment only (as with torch's post-accumulate-grad hooks). Norms move up
    before the updates, since an optimizer may scale its gradients in place. An Update that reads a number of
    all gradients, such as the global norm, stays behind it.
    """
    lines = [i for i in schedule.instructions if not _is_of_update(i)]
    sent = {i.writes[0]: i.reads for i in schedule.instructions if i.lane == COMMUNICATION}
    for line in [i for i in schedule.instructions if _is_of_update(i)]:
        lines.insert(_find_earliest(lines, line, sent), line)
    return schedule.with_instructions(lines)


def _is_of_update(line: Instruction) -> bool:
    """Return whether a line is part of the update.

    These are norms, stretches (`Update`, `ComputeStack`), exchanges between them, publishing, and the Waits.
    """
    waits = isinstance(line, Wait) and line.is_for(Publish, ReduceUpdate, StackUpdate)
    return waits or isinstance(line, Norms | _UPDATES | Publish)


def _find_earliest(
    lines: Sequence[Instruction], line: Instruction, sent: Mapping[ValueName, tuple[ValueName, ...]]
) -> int:
    """Return the place after the last line that makes what `line` reads or touches state that it changes.

    A collective touches what it sends until it has been waited for.

    Args:
        sent: by flight, what a collective sends.
    """
    reads = set(line.reads)
    changes = {n for n in (*line.writes, *line.overwrites) if n.kind in (Kind.STORED, Kind.REDUCED)}
    for index in range(len(lines) - 1, -1, -1):
        other = lines[index]
        under_way = sent.get(other.reads[0], ()) if isinstance(other, Wait) else ()
        touched = (*other.reads, *other.writes, *under_way)
        if reads.intersection(other.writes) or changes.intersection(touched):
            return index + 1
    return 0


def insert_frees(schedule: Schedule) -> Schedule:
    """Let each value die at its last reader: inside that line, or by a Free right after it.

    Stored shards and the step's other inputs belong to the caller and are never dropped. A transfer or an
    overlapped update reads its values until its Wait. A buffer of the host's pool is read as long as its
    aliases are.
    """
    memory = follow_aliases(schedule.instructions)
    read_until_waited = {
        line.writes[0]: line.reads for line in schedule.instructions if line.reads_until_waited
    }
    # Find the last line that needs each value, and which values die at each line.
    keep = set(schedule.inputs) | set(schedule.outputs)
    last: dict[ValueName, int] = {}
    for index, line in enumerate(schedule.instructions):
        under_way = read_until_waited.get(line.reads[0], ()) if isinstance(line, Wait) else ()
        read = (*line.reads, *under_way)
        pooled = (root for n in read for root in memory.get(n, ()) if root.is_pooled and root in last)
        for name in (*line.writes, *read, *pooled):
            if name not in keep:
                last[name] = index
    dying: dict[int, list[ValueName]] = {}
    for name, index in last.items():
        dying.setdefault(index, []).append(name)

    out: list[Instruction] = []
    for index, line in enumerate(schedule.instructions):
        names = dying.get(index, [])
        # A kernel lets go of all that it reads, a Wait of its flight, and a sum of the sum before, which it
        # hands on.
        handed_on = line.reads[-1:] if isinstance(line, Accumulate) and not line.first else ()
        gone = [n for n in names if isinstance(line, Run) or n.kind is Kind.FLIGHT or n in handed_on]
        inside = tuple(n for n in gone if n in line.reads)
        out.append(replace(line, drops=inside))
        after = tuple(n for n in names if n not in inside)
        if after:
            out.append(Free(line.unit, line.phase, drops=after))
    return schedule.with_instructions(out)
