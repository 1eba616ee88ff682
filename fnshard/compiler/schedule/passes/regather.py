"""Regather: values that ranks have gathered are gathered again for the backward. Keeps numerics."""

from __future__ import annotations

from dataclasses import replace

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.derived import SMALL
from fnshard.compiler.schedule.instructions import Exchange, Instruction, Run, Wait
from fnshard.compiler.schedule.ir import Schedule


def regather(schedule: Schedule, segments: frozenset[int]) -> Schedule:
    """Issue the all-gathers whose results `segments` recompute from a second time, for their backward.

    What is kept between is what each rank sent: a sequence that a tensor axis splits stays split (Korthikanti
    et al. 2022). The second gather is a line like the first, with its bytes and its price. Small results, a
    maximum for each token, are kept.
    A block that came by a permutation is never kept.
    """
    lines = schedule.instructions
    forward = [i for i in lines if isinstance(i, Exchange) and i.phase.startswith("forward")]
    rows = set(schedule.mesh.data_axes)  # what `fn` gathers of other rows itself is kept
    sent = {line.writes[0]: line for line in forward if line.kind == "all_gather" and not rows & {*line.axes}}
    largest = max((line.sent_bytes for line in sent.values()), default=0)
    sent = {flight: line for flight, line in sent.items() if line.sent_bytes * SMALL >= largest}
    sent |= {line.writes[0]: line for line in forward if line.of_kind.permutes}
    received = {
        line.writes[0]: sent[line.reads[0]]
        for line in lines
        if isinstance(line, Wait) and line.is_for(Exchange) and line.reads[0] in sent
    }
    again: dict[ValueName, ValueName] = {}
    out: list[Instruction] = []
    for line in lines:
        if isinstance(line, Run) and line.backward:
            whole = line.segment in segments
            names = {n for n in line.reads if n in received and (whole or received[n].of_kind.permutes)}
            for name in [n for n in dict.fromkeys(line.reads) if n in names and n not in again]:
                issue, wait = _second(received[name], line, name)
                out += [issue, wait]
                again[name] = wait.writes[0]
            line = replace(line, reads=tuple(again[n] if n in names else n for n in line.reads))
        out.append(line)
    return schedule.with_instructions(out)


def _second(first: Exchange, reader: Run, name: ValueName) -> tuple[Exchange, Wait]:
    fresh = name.of(f"{name.version}@{reader.segment}")
    flight = ValueName(Kind.FLIGHT, fresh)
    issue = replace(first, unit=reader.unit, phase=reader.phase, writes=(flight,))
    return issue, Wait(reader.unit, reader.phase, (flight,), (fresh,), of=Exchange)
