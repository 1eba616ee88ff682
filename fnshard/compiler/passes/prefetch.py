"""Prefetch: issue gathers early, so that they travel while other units compute. Keeps numerics."""

from __future__ import annotations

from dataclasses import replace

from fnshard.compiler.schedule import Gather, Instruction, Run, Schedule


def prefetch(schedule: Schedule, forward: int, backward: int) -> Schedule:
    """Move each gather above at most `forward` (`backward`) kernels.

    The depth bounds what is alive: at most depth + 1 resharded units at once (FSDP's
    `limit_all_gathers`). 0 is none.
    """
    out: list[Instruction] = []
    for line in schedule.instructions:
        if isinstance(line, Gather):
            depth = forward if line.phase.startswith("forward") else backward
            out.insert(_place(out, line, depth, schedule.buckets[line.bucket].paths), line)
        else:
            out.append(line)
    planned = 1 + max(forward, backward)
    return replace(schedule.with_instructions(out), planned=planned)


def _place(lines: list[Instruction], gather: Gather, depth: int, paths: tuple[str, ...]) -> int:
    """The earliest place that passes `depth` runs, no write to what the gather reads, and no reader
    of the version before: two versions of a leaf are never alive at once.
    """
    reads = set(gather.reads)
    versions = tuple(f"p:{path}#" for path in paths)
    place = len(lines)
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if isinstance(line, Gather) or reads.intersection(line.writes):
            # Gathers keep their order: it is the order in which they are waited for.
            break
        if isinstance(line, Run):
            if depth == 0 or any(n.startswith(versions) for n in line.reads):
                break
            depth -= 1
            place = index
    return place
