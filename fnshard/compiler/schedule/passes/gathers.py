"""Gathers: passes that choose when leaves and values of other ranks are gathered, and how long they live.

They keep numerics.
"""

from __future__ import annotations

from dataclasses import replace

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.derived_values import SMALL
from fnshard.compiler.kernels.segments import may_travel_again
from fnshard.compiler.schedule.instructions import Cast, Exchange, Gather, Instruction, Run, ToDevice, Wait
from fnshard.compiler.schedule.instructions.kernels import end_rounds, of_one_micro_batch, tiny_runs
from fnshard.compiler.schedule.ir import Schedule, with_wait


def reshard(schedule: Schedule) -> Schedule:
    """Drop the gathers of leaves that need not have been freed.

    These are gathers before which no kernel runs since the leaves were read last (those of the last unit,
    between forward and backward), and, for units with `reshard=False`, those between the forward and the
    backward of one micro-batch. In a pipeline leaves of such units stay for the whole step, since some
    micro-batch is always between its forward and its backward.
    """
    # By value, after how many kernels it is read last; by flight, the leaves that its Wait makes.
    lines = list(schedule.instructions)
    last_run = _find_last_reads(lines)
    results = {line.reads[0]: line.writes for line in lines if isinstance(line, Wait)}
    renamed: dict[str, str] = {}
    latest: dict[str, tuple[int, str, tuple[str, ...]]] = {}  # bucket -> (last run, phase, names)
    dropped: set[str] = set()
    out: list[Instruction] = []
    runs = 0
    for line in lines:
        if isinstance(line, Gather | Cast):
            names = line.writes if isinstance(line, Cast) else results[line.writes[0]]
            earlier = latest.get(line.bucket)
            # Drop the gather: those who read its leaves read the earlier ones, which live on.
            if earlier is not None and _can_live_on(schedule, line, earlier, runs):
                renamed |= dict(zip(names, earlier[2], strict=True))
                last = max(last_run.get(names[0], runs), *(last_run.get(n, 0) for n in names))
                latest[line.bucket] = (last, *earlier[1:])
                dropped.update(line.writes)
                continue
            latest[line.bucket] = (max(last_run.get(n, 0) for n in names), line.phase, names)
        if isinstance(line, Wait) and line.reads[0] in dropped:
            continue
        runs += isinstance(line, Run)
        out.append(replace(line, reads=tuple(renamed.get(n, n) for n in line.reads)))
    return schedule.with_instructions(out)


def _can_live_on(schedule: Schedule, line: Gather | Cast, earlier: tuple, runs: int) -> bool:
    """Return whether a bucket's earlier leaves may live on until a later gather of them.

    Args:
        earlier: after how many kernels they were read last, the phase of their gather, and their names.
        runs: how many kernels have run before the later gather.
    """
    last, phase, _ = earlier
    if last == runs:
        return True
    keeps = not all(schedule.specs[p].reshard for p in schedule.buckets[line.bucket].paths)  # reshard=False
    if schedule.mesh.stages > 1:
        return keeps
    same_micro = phase.replace("forward", "backward") == line.phase
    return keeps and same_micro and phase != line.phase


def _find_last_reads(lines: list[Instruction]) -> dict[str, int]:
    """Return, for each value, how many kernels have run when the last of its readers has run."""
    out: dict[str, int] = {}
    runs = 0
    for line in lines:
        runs += isinstance(line, Run)
        if isinstance(line, Run):
            out.update(dict.fromkeys(line.reads, runs))
    return out


def prefetch(schedule: Schedule, forward: int, backward: int) -> Schedule:
    """Move each gather above at most `forward` (`backward`) kernels, and the load of what it sends above
    one more.

    The depth bounds how much is alive: at most depth + 1 resharded units at once (FSDP's
    `limit_all_gathers`), and a tiny one, since a norm before a head hides no gather of the head. With depth 0
    nothing moves. The kernels of one round count as one, except for values of one micro-batch.
    """
    tiny, ends = tiny_runs(schedule), end_rounds(schedule)
    sent = {n for line in schedule.instructions if isinstance(line, Gather) for n in line.reads}
    out: list[Instruction] = []
    for line in schedule.instructions:
        depth = forward if line.phase.startswith("forward") else backward
        # A gather moves, and so do the load of new copies of what it sends and the Wait between the two.
        if isinstance(line, Wait):
            moving = line.is_for(ToDevice) and bool(sent.intersection(line.writes))
        else:
            moving = isinstance(line, Gather) or (isinstance(line, ToDevice) and not line.into)
        if moving and depth:
            # A load of stored shards is one kernel earlier than the gather that sends them.
            extra = isinstance(line, ToDevice) and any(n.kind is Kind.STORED for n in line.reads)
            round_ends = None if of_one_micro_batch(line.reads) else ends
            out.insert(_find_place(out, line, depth + extra, tiny, round_ends), line)
        else:
            out.append(line)
    planned = 1 + max(forward, backward)
    return replace(schedule.with_instructions(out), planned=planned)


def _find_place(
    lines: list[Instruction],
    moved: Instruction,
    depth: int,
    tiny: frozenset[Run],
    ends: frozenset[Run] | None,
) -> int:
    """Return the earliest place that a line may move up to.

    On its way it passes `depth` rounds and one of `tiny`. It passes no write to what it reads, and no reader
    of an earlier version of its leaves: two versions of a leaf are never alive at once.

    Args:
        ends: the last kernels of rounds; with None each kernel counts.
    """
    may_pass_tiny = True  # whether a tiny kernel may still be passed without counting
    reads = set(moved.reads)
    leaves = {n.path for n in moved.reads if n.original.kind is Kind.STORED}
    loaded = {n for n in moved.reads if n.kind is Kind.STORED}

    def is_earlier_version(name: ValueName) -> bool:
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
            # A kernel counts, unless its round ends later, or it is the first tiny one.
            is_within_round = ends is not None and line not in ends
            is_free = is_within_round or (may_pass_tiny and line in tiny)
            may_pass_tiny = may_pass_tiny and line not in tiny
            if (depth == 0 and not is_free) or any(is_earlier_version(n) for n in line.reads):
                break
            if not is_free:
                depth -= 1
            place = index
    return place


def regather(schedule: Schedule) -> Schedule:
    """Issue all-gathers a second time for the backward, where segments recompute from their results.

    Between forward and backward each rank keeps what it sent: a sequence that a tensor axis splits stays
    split (Korthikanti et al. 2022). The second gather is a line like the first, with its bytes and its price.
    Small results, as a maximum for each token, are kept. A block that came by a permutation is never kept.
    """
    # The exchanges of the forward that may travel again.
    lines = schedule.instructions
    forward = [
        line
        for line in lines
        if isinstance(line, Exchange)
        and line.phase.startswith("forward")
        and may_travel_again(line.kind, line.axes, schedule.mesh.data_axes)
    ]
    # Results that are small beside the largest are kept; permuted blocks travel again whatever their size.
    largest = max((line.sent_bytes for line in forward if not line.of_kind.permutes), default=0)
    sent = {
        line.writes[0]: line
        for line in forward
        if line.of_kind.permutes or line.sent_bytes * SMALL >= largest
    }
    received = {
        line.writes[0]: sent[line.reads[0]]
        for line in lines
        if isinstance(line, Wait) and line.is_for(Exchange) and line.reads[0] in sent
    }

    # Before the first kernel of the backward that reads a result, issue its exchange again under another
    # name.
    again: dict[ValueName, ValueName] = {}
    out: list[Instruction] = []
    for line in lines:
        if isinstance(line, Run) and line.of_backward:
            is_recomputed = line.segment in schedule.recomputed
            names = {
                n for n in line.reads if n in received and (is_recomputed or received[n].of_kind.permutes)
            }
            for name in [n for n in dict.fromkeys(line.reads) if n in names and n not in again]:
                fresh = name.of(name.micro, f"{name.version}@{line.segment}")
                second = replace(
                    received[name], unit=line.unit, phase=line.phase,
                    writes=(ValueName(Kind.FLIGHT, fresh),),
                )  # fmt: skip
                out += with_wait(second, fresh)
                again[name] = fresh
            line = replace(line, reads=tuple(again[n] if n in names else n for n in line.reads))
        out.append(line)
    return schedule.with_instructions(out)
