"""Reshard: which gathered leaves live on until their next use. Keeps numerics."""

from __future__ import annotations

from dataclasses import replace

from fnshard.compiler.schedule.instructions import Cast, Gather, Instruction, Run, Wait
from fnshard.compiler.schedule.ir import Schedule


def reshard(schedule: Schedule) -> Schedule:
    """Drop a gather whose leaves need not have been freed.

    That is where no kernel runs between the last reading of one version and the next gather (the
    last unit, between forward and backward), and, for units with `reshard=False`, between the
    forward and the backward of one micro-batch.
    """
    lines = list(schedule.instructions)
    last_run = _last_run_reading(lines)
    renamed: dict[str, str] = {}
    latest: dict[str, tuple[int, str, tuple[str, ...]]] = {}  # bucket -> (last run, phase, names)
    dropped: set[str] = set()
    out: list[Instruction] = []
    runs = 0
    for line in lines:
        if isinstance(line, Gather | Cast):
            made = _made(lines, line)
            earlier = latest.get(line.bucket)
            if earlier is not None and _live_on(schedule, line, earlier, runs):
                renamed |= dict(zip(made, earlier[2], strict=True))
                last = max(last_run.get(made[0], runs), *(last_run.get(n, 0) for n in made))
                latest[line.bucket] = (last, *earlier[1:])
                dropped.update(line.writes)
                continue
            latest[line.bucket] = (max(last_run.get(n, 0) for n in made), line.phase, made)
        if isinstance(line, Wait) and line.reads[0] in dropped:
            continue
        runs += isinstance(line, Run)
        out.append(replace(line, reads=tuple(renamed.get(n, n) for n in line.reads)))
    return schedule.with_instructions(out)


def _live_on(schedule: Schedule, line: Gather | Cast, earlier: tuple, runs: int) -> bool:
    last, phase, _ = earlier
    if last == runs:
        return True
    keeps = not all(schedule.specs[p].reshard for p in schedule.buckets[line.bucket].paths)
    same_micro = phase.replace("forward", "backward") == line.phase
    return keeps and same_micro and phase != line.phase


def _made(lines: list[Instruction], line: Gather | Cast) -> tuple[str, ...]:
    if isinstance(line, Cast):
        return line.writes
    return next(w.writes for w in lines if isinstance(w, Wait) and w.reads == line.writes)


def _last_run_reading(lines: list[Instruction]) -> dict[str, int]:
    """For each value, how many kernels have run when the last of its readers has."""
    out: dict[str, int] = {}
    runs = 0
    for line in lines:
        runs += isinstance(line, Run)
        if isinstance(line, Run):
            out.update(dict.fromkeys(line.reads, runs))
    return out
