"""Frees: say where each value dies. Keeps numerics; always the last pass."""

from __future__ import annotations

from dataclasses import replace

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.instructions import TRANSFER, Accumulate, Free, Instruction, Run, Wait
from fnshard.compiler.schedule.ir import Schedule


def insert_frees(schedule: Schedule) -> Schedule:
    """A value dies at its last reader: inside a kernel's call, or by a Free right behind it.

    Stored shards and the step's own inputs belong to the caller and are never dropped. What a transfer
    reads is read until its Wait.
    """
    sent = {line.writes[0]: line.reads for line in schedule.instructions if line.lane == TRANSFER}
    keep = set(schedule.inputs) | set(schedule.outputs)
    last: dict[ValueName, int] = {}
    for index, line in enumerate(schedule.instructions):
        behind = sent.get(line.reads[0], ()) if isinstance(line, Wait) else ()
        for name in (*line.writes, *line.reads, *behind):
            if name not in keep:
                last[name] = index
    dying: dict[int, list[ValueName]] = {}
    for name, index in last.items():
        dying.setdefault(index, []).append(name)
    out: list[Instruction] = []
    for index, line in enumerate(schedule.instructions):
        names = dying.get(index, [])
        inside = tuple(n for n in names if n in line.reads and _dies_inside(n, line))
        out.append(replace(line, drops=inside))
        after = tuple(n for n in names if n not in inside)
        if after:
            out.append(Free(line.unit, line.phase, drops=after))
    return schedule.with_instructions(out)


def _dies_inside(name: ValueName, line: Instruction) -> bool:
    """Whether the instruction itself lets go of it: kernels, waits, sums that hand their accumulator on."""
    handed_on = isinstance(line, Accumulate) and not line.first and name == line.reads[-1]
    return isinstance(line, Run) or name.kind is Kind.FLIGHT or handed_on
