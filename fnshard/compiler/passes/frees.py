"""Frees: say where each value dies. Keeps numerics; always the last pass."""

from __future__ import annotations

from dataclasses import replace

from fnshard.compiler.schedule import Free, Instruction, Run, Schedule


def insert_frees(schedule: Schedule) -> Schedule:
    """A value dies at its last reader: inside a kernel's call, or by a Free right behind it.

    Stored shards and the step's own inputs belong to the caller and are never dropped.
    """
    keep = set(schedule.inputs) | set(schedule.outputs)
    last: dict[str, int] = {}
    for index, line in enumerate(schedule.instructions):
        for name in (*line.writes, *line.reads):
            if name not in keep:
                last[name] = index
    dying: dict[int, list[str]] = {}
    for name, index in last.items():
        dying.setdefault(index, []).append(name)
    out: list[Instruction] = []
    for index, line in enumerate(schedule.instructions):
        names = dying.get(index, [])
        inside = tuple(n for n in names if n in line.reads and (isinstance(line, Run) or n.startswith("~")))
        out.append(replace(line, drops=inside))
        after = tuple(n for n in names if n not in inside)
        if after:
            out.append(Free(line.unit, line.phase, drops=after))
    return schedule.with_instructions(out)
