"""Overlap: passes that wait later for what leaves, as a reduction or a transfer to the host does.

They keep numerics.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    Exchange,
    Instruction,
    OverlappedUpdate,
    Recv,
    Run,
    Send,
    Update,
    Wait,
)
from fnshard.compiler.schedule.instructions.kernels import end_rounds, of_one_micro_batch
from fnshard.compiler.schedule.ir import Schedule, with_wait
from fnshard.mesh import PIPELINE


def overlap(schedule: Schedule, depth: int) -> Schedule:
    """Move the Waits of what leaves, and all lines that depend on them, below `depth` more kernels.

    Reductions, permutations, transfers to the host and exchanges of updates leave: no kernel reads their
    results soon. So a unit's gradients travel while the next unit's backward computes, and at most `depth` +
    1 buckets of full gradients are in flight. The kernels of one round count as one, except for values of one
    micro-batch.

    A stage of a pipeline waits for reductions behind all its kernels. If it waited earlier, it would hold up
    the stages that wait for what it makes, and each of these the next; and the sums of gradients are in
    memory for most of the step anyway. A kernel never moves: what it reads is waited for in time, and no
    gather overtakes a kernel. Collectives of all stages keep the order in which other stages come to them.
    """
    permuted = {i.writes[0] for i in schedule.instructions if isinstance(i, Exchange) and i.of_kind.permutes}
    ends = end_rounds(schedule) if schedule.mesh.stages == 1 else ()
    queue = _Queue(depth, permuted, ends, spans_stages(schedule))
    for line in schedule.instructions:
        queue.feed(line)
    queue.flush()
    return schedule.with_instructions(queue.out)


def overlap_updates(schedule: Schedule, depth: int) -> Schedule:
    """Issue each update on another stream and wait for it `depth` kernels later.

    This holds where the device has streams, where all that the update reads and writes is on the device,
    and where a kernel runs before anything depends on the update.
    """
    if not depth or schedule.mesh.device_type != "cuda":
        return schedule
    lines, ends = schedule.instructions, end_rounds(schedule)
    waiting: dict[Wait, int] = {}
    out: list[Instruction] = []
    for number, line in enumerate(lines):
        # First the Waits whose time has come, or that this line needs.
        due = [w for w, left in waiting.items() if not left or _depends_on(line, w)]
        out += due
        ends_round = isinstance(line, Run) and line in ends
        waiting = {w: left - ends_round for w, left in waiting.items() if w not in due}
        if _can_overlap(line, schedule):
            # The line becomes an issue of the same fields, with a Wait for what it writes.
            same = {f.name: getattr(line, f.name) for f in fields(line)}
            flight = ValueName(Kind.FLIGHT, f"update {line.bucket}")
            issue, wait = with_wait(OverlappedUpdate(**same | {"writes": (flight,)}), *line.writes)
            if _comes_after_kernel(wait, lines[number + 1 :]):
                line = issue
                waiting[wait] = depth
        out.append(line)
    return schedule.with_instructions([*out, *waiting])


def _comes_after_kernel(wait: Wait, later: Sequence[Instruction]) -> bool:
    """Return whether a kernel comes before the first line that needs the Wait."""
    first = next((line for line in later if isinstance(line, Run) or _depends_on(line, wait)), None)
    return isinstance(first, Run) and not _depends_on(first, wait)


def _can_overlap(line: Instruction, schedule: Schedule) -> bool:
    """Return whether a line is an update that can run beside kernels.

    It is a whole Update, which reads nothing but a bucket's gradients and state, all on the device; and it is
    limited by memory, since products would take their time from the kernels'.
    """
    kinds = (Kind.REDUCED, Kind.SLOTS, Kind.STORED)
    if type(line) is not Update or not all(n.kind in kinds for n in (*line.reads, *line.writes)):
        return False
    has_products = any(schedule.families[path].derived.flops for path in line.paths)
    return not has_products and not line.on_host(schedule)


def wait_late(schedule: Schedule) -> Schedule:
    """Wait for an exchange where its result is read first, so that consecutive exchanges travel together."""
    waiting: dict[ValueName, Wait] = {}
    out: list[Instruction] = []
    for line in schedule.instructions:
        out += [waiting.pop(n) for n in dict.fromkeys(line.reads) if n in waiting]
        if isinstance(line, Wait) and line.is_for(Exchange):
            waiting[line.writes[0]] = line
        else:
            out.append(line)
    return schedule.with_instructions([*out, *waiting.values()])


def issue_early(schedule: Schedule) -> Schedule:
    """Move each permutation of a backward above one kernel that does not make what it sends.

    So it travels while the block before it computes. In a forward, permutations travel during a kernel
    already.
    """
    out: list[Instruction] = []
    for line in schedule.instructions:
        place = len(out)
        if isinstance(line, Exchange) and line.of_kind.permutes and line.phase.startswith("backward"):
            while place and not set(line.reads) & set(out[place - 1].writes):
                place -= 1
                if isinstance(out[place], Run):
                    break
        out.insert(place, line)
    return schedule.with_instructions(out)


def spans_stages(schedule: Schedule) -> frozenset[ValueName]:
    """Return the flights of collectives that all stages of a pipeline take part in."""
    lines = [i for i in schedule.instructions if i.lane == COMMUNICATION and not isinstance(i, Send | Recv)]
    return frozenset(i.writes[0] for i in lines if PIPELINE in i.axes_of(schedule))


@dataclass
class _Group:
    """A Wait that is delayed by `left` kernels or rounds, and the lines that must stay behind it."""

    left: int
    lines: list[Instruction]
    written: set[ValueName] = field(default_factory=set)
    touched: set[ValueName] = field(default_factory=set)
    is_ordered: bool = False

    def add(self, line: Instruction, is_ordered: bool) -> None:
        self.lines.append(line)
        self.written.update(line.writes)
        self.touched.update(line.reads, line.writes)
        self.is_ordered = self.is_ordered or is_ordered

    def holds_up(self, line: Instruction, is_ordered: bool) -> bool:
        """Return whether `line` must stay behind a line of the group."""
        depends = not (self.written.isdisjoint(line.reads) and self.touched.isdisjoint(line.writes))
        return depends or (is_ordered and self.is_ordered)


class _Queue:
    """A queue of Waits that are delayed, each with the lines that depend on it.

    Args:
        depth: the number of rounds, or kernels, by which a Wait is delayed.
        permuted: flights whose Waits are delayed though kernels read their results.
        ends: the last kernels of rounds.
        ordered: flights of collectives that keep their order.
    """

    def __init__(
        self,
        depth: int,
        permuted: Collection[ValueName],
        ends: Collection[Run],
        ordered: frozenset[ValueName],
    ):
        self.depth, self.permuted, self.ends, self.ordered = depth, permuted, ends, ordered
        self.out: list[Instruction] = []
        self.waiting: list[_Group] = []

    def feed(self, line: Instruction) -> None:
        """Write a line, delay it, or put it into the group of a Wait that it must stay behind."""
        # A kernel never moves: the Waits that it needs are written out before it.
        while isinstance(line, Run) and self.find_group(line) is not None:
            self.release()
        # Any other line waits with the first group that it depends on.
        is_ordered = self.is_ordered(line)
        if (group := self.find_group(line)) is not None:
            group.add(line, is_ordered)
            return
        # A Wait for what leaves begins a group.
        outgoing = isinstance(line, Wait) and (line.of.outgoing or line.reads[0] in self.permuted)
        if outgoing and self.depth:
            group = _Group(self.depth, [])
            group.add(line, is_ordered)
            self.waiting.append(group)
            return
        self.out.append(line)
        if isinstance(line, Run):
            self.tick(line in self.ends)

    def is_ordered(self, line: Instruction) -> bool:
        """Return whether it issues a collective that keeps its order."""
        return not self.ordered.isdisjoint(line.writes)

    def find_group(self, line: Instruction) -> _Group | None:
        """Return the first of the delayed groups that `line` must stay behind."""
        is_ordered = self.is_ordered(line)
        return next((group for group in self.waiting if group.holds_up(line, is_ordered)), None)

    def tick(self, ends_round: bool) -> None:
        """Count a kernel: Waits for values of one micro-batch count each, all others count rounds."""
        for group in self.waiting:
            group.left -= ends_round or of_one_micro_batch(group.lines[0].writes)
        while due := [number for number, group in enumerate(self.waiting) if group.left <= 0]:
            self.release(due[0])

    def release(self, number: int = 0) -> None:
        """Write out a delayed Wait, and feed the lines behind it again: some may depend on another Wait."""
        wait, *dependent = self.waiting.pop(number).lines
        self.out.append(wait)
        for line in dependent:
            self.feed(line)

    def flush(self) -> None:
        """Write out all Waits that are still delayed."""
        while self.waiting:
            self.release()


def _depends_on(line: Instruction, other: Instruction) -> bool:
    """Return whether `line` must stay behind `other`: it reads or writes what that writes, or the reverse."""
    return bool(
        set(line.reads) & set(other.writes)
        or set(line.writes) & set(other.reads)
        or set(line.writes) & set(other.writes)
    )
