"""Prefetch: issue gathers and loads early, so that they travel while other units compute. Keeps numerics."""

from __future__ import annotations

from dataclasses import replace

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.instructions import Gather, Instruction, Run, ToDevice, Wait
from fnshard.compiler.schedule.ir import Schedule


def prefetch(schedule: Schedule, forward: int, backward: int) -> Schedule:
    """Move each gather above at most `forward` (`backward`) kernels, and the load of what it sends above
    one more.

    The depth bounds what is alive: at most depth + 1 resharded units at once (FSDP's
    `limit_all_gathers`). 0 is none.
    """
    sent = {n for line in schedule.instructions if isinstance(line, Gather) for n in line.reads}
    out: list[Instruction] = []
    for line in schedule.instructions:
        depth = forward if line.phase.startswith("forward") else backward
        moving = _moving(line, sent)
        if moving and depth:
            extra = isinstance(line, ToDevice) and any(n.kind is Kind.STORED for n in line.reads)
            out.insert(_place(out, line, depth + extra), line)
        else:
            out.append(line)
    planned = 1 + max(forward, backward)
    return replace(schedule.with_instructions(out), planned=planned)


def _moving(line: Instruction, sent: set[str]) -> bool:
    """Gathers, loads of new copies, and the Wait between a load and its gather."""
    if isinstance(line, Wait):
        return line.is_for(ToDevice) and bool(sent.intersection(line.writes))
    return isinstance(line, Gather) or (isinstance(line, ToDevice) and not line.into)


def _place(lines: list[Instruction], moved: Instruction, depth: int) -> int:
    """The earliest place that passes `depth` runs, no write to what is read, and no reader of the version
    before: two versions of a leaf are never alive at once.
    """
    reads = set(moved.reads)
    leaves = {n.path for n in moved.reads if n.original.kind is Kind.STORED}
    loaded = {n for n in moved.reads if n.kind is Kind.STORED}

    def earlier(name: ValueName) -> bool:
        gathered = name.kind is Kind.GATHERED and name.path in leaves
        return gathered or (name.kind is Kind.LOADED and name.source in loaded)

    place = len(lines)
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        # Issues of a kind keep their order: it is the order in which they are waited for.
        overtakes = type(line) is type(moved) and not isinstance(moved, Wait)
        if overtakes or reads.intersection(line.writes):
            break
        if isinstance(line, Run):
            if depth == 0 or any(earlier(n) for n in line.reads):
                break
            depth -= 1
            place = index
    return place
