"""Tasks: the order in which the micro-batches of a step run forward and backward, as data.

`build` writes the tasks out in this order; what a round gathers serves all tasks of the round. Depth-first is
the usual accumulation: a micro-batch runs forward and backward through the whole program before the next
one begins, and gathers every leaf for itself. Breadth-first runs all micro-batches through one chunk of the
program before the next chunk (Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism"): a leaf is gathered
once for all of them and its gradient is reduced once, while the activations between chunks are kept for every
micro-batch.

In a pipeline the tasks of all stages are one list. Each stage runs its own tasks in this order, and receives
what other stages send behind a task at the same place of the list. A list scheduler makes the list
(`order_stages`). It gives 1F1B (Narayanan et al. 2019), GPipe (Huang et al. 2019) where nothing limits how
many micro-batches are under way, and interleaved stages (Narayanan et al. 2021) where a stage has several
chunks. Where a backward is in two, the half that makes gradients of leaves fills time that would be idle, as
far as a limit of bytes lets it wait: that is ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fnshard.compiler.kernels.segments import Segment, Way, group_by_unit
from fnshard.compiler.schedule.kept_bytes import KeptBytes

MicroOrder = Literal["depth", "breadth", "zero_bubble"]
Costs = Callable[[int, Way], float]  # the seconds, or any unit, that a chunk takes one way


@dataclass(frozen=True)
class Task:
    """A stretch of the program that runs for one micro-batch, one way.

    Args:
        segments: the stretch; a backward runs through it from its end.
        micro: the number of the micro-batch.
        is_last: whether it is the last micro-batch that runs through these segments in this direction.
        stage: the stage of a pipeline that runs it.
    """

    segments: Sequence[Segment]
    micro: int
    way: Way
    is_last: bool
    stage: int = 0

    @property
    def backward(self) -> bool:
        """Whether it makes cotangents of values."""
        return self.way is Way.BACKWARD


Round = tuple[Task, ...]  # tasks that run one after another and share the leaves that they gather


def order_tasks(
    segments: Sequence[Segment],
    written: Iterable[tuple[str, int]],
    accumulate: int,
    order: MicroOrder,
    differentiate: bool = True,
) -> list[Round]:
    """Return the tasks of a step, in rounds.

    Args:
        written: leaves that `fn` writes to, as pairs of a path and the segment that makes the new value.
        accumulate: the number of micro-batches.
        differentiate: whether there is a backward.
    """
    micros, ways = range(accumulate), (Way.FORWARD, Way.BACKWARD) if differentiate else (Way.FORWARD,)
    # Depth-first: each micro-batch runs forward and then backward through the whole program, each in a round
    # of its own.
    if order == "depth" or accumulate == 1:
        last = accumulate - 1
        return [(Task(segments, m, way, m == last),) for m in micros for way in ways]

    def make_task(chunk: Sequence[Segment], micro: int, way: Way) -> Task:
        return Task(chunk, micro, way, micro == accumulate - 1)

    # Breadth-first: all micro-batches run through a chunk in one round.
    *chunks, end = make_chunks(segments, written)
    forward = [tuple(make_task(chunk, m, Way.FORWARD) for m in micros) for chunk in chunks]
    backward = [tuple(make_task(chunk, m, Way.BACKWARD) for m in micros) for chunk in reversed(chunks)]
    # The backward of the last chunk needs nothing but its forward, so that the logits of one micro-batch live
    # at a time.
    last_round = tuple(make_task(end, m, way) for m in micros for way in ways)
    return [*forward, last_round, *(backward if differentiate else ())]


def make_chunks(segments: Sequence[Segment], written: Iterable[tuple[str, int]]) -> list[tuple[Segment, ...]]:
    """Cut a program into the shortest stretches that all micro-batches may run through before the next one.

    Consecutive segments of one unit stay together: an exchange has cut the unit in two. A segment that reads
    no leaves stays with the one before it. So do all segments between the first reader of a leaf that `fn`
    writes to and its writer, because a micro-batch reads what the one before has written.
    """
    # The numbers of segments that stay with the one before them.
    joined = {segment.index for unit in group_by_unit(segments) for segment in unit[1:]}
    for path, writer in written:
        readers = [s.index for s in segments if path in s.leaves]
        first, last = min([*readers, writer]), max([*readers, writer])
        joined.update(range(first + 1, last + 1))
    chunks: list[list[Segment]] = []
    for segment in segments:
        if segment.index in joined:
            chunks[-1].append(segment)
        else:
            chunks.append([segment])
    return [tuple(chunk) for chunk in chunks]


def order_pipeline(
    chunks: Sequence[tuple[int, Sequence[Segment]]],
    accumulate: int,
    order: MicroOrder,
    differentiate: bool,
    costs: Costs,
    keeps: Sequence[KeptBytes] = (),
    zero_bubble_memory: float = 1.0,
) -> list[Task]:
    """Return the tasks of all stages of a pipeline, in one order.

    Args:
        chunks: consecutive segments, with the stage that runs them.
        order: "depth" limits the micro-batches that are under way, "breadth" does not; "zero_bubble" limits
            them, and has the gradients of leaves apart.
        costs: a function from the number of a chunk and a way to the time that it takes.
        keeps: what each chunk keeps of a micro-batch.
        zero_bubble_memory: with "zero_bubble", the bytes that a stage may keep, as a multiple of the most
            that a stage keeps with "depth".
    """
    # How many micro-batches a stage may have under way.
    stage_of = [stage for stage, _ in chunks]
    room = usual_room(max(stage_of) + 1, len(chunks)) if order != "breadth" else None
    ways: tuple[Way, ...] = (Way.FORWARD, Way.BACKWARD)
    limit = math.inf
    if order == "zero_bubble":
        ways += (Way.WEIGHTS,)

    # The limit of "zero_bubble" is relative to what stages keep with "depth", whose backwards are whole.
    if differentiate and order == "zero_bubble":

        def whole_costs(chunk: int, way: Way) -> float:
            return costs(chunk, way) + (costs(chunk, Way.WEIGHTS) if way is Way.BACKWARD else 0.0)

        keeps = keeps or [KeptBytes()] * len(chunks)
        depth_first = order_stages(stage_of, accumulate, room, whole_costs)
        limit = zero_bubble_memory * max(count_kept(depth_first, stage_of, keeps).values())

    return [
        Task(
            chunks[task.chunk][1],
            task.micro,
            task.way,
            task.micro == accumulate - 1,
            stage_of[task.chunk],
        )
        for task in order_stages(
            stage_of, accumulate, room, costs, ways if differentiate else ways[:1], keeps, limit
        )
    ]


@dataclass(frozen=True)
class ScheduledTask:
    """A task of a pipeline, by the number of its chunk, with the time at which it would run."""

    chunk: int
    micro: int
    way: Way
    start: float
    end: float

    @property
    def backward(self) -> bool:
        """Whether it makes cotangents of values."""
        return self.way is Way.BACKWARD


def order_stages(
    stage_of: Sequence[int],
    micros: int,
    room: Sequence[int] | None,
    costs: Costs | None = None,
    ways: Sequence[Way] = (Way.FORWARD, Way.BACKWARD),
    keeps: Sequence[KeptBytes] = (),
    limit: float = math.inf,
) -> list[ScheduledTask]:
    """Return the tasks of all stages, in the order in which they would be done.

    Time goes on from task to task: the stage whose next task can begin first takes it. Of two tasks that
    could begin, a forward goes first while the stage has room for one more micro-batch, so that the stages
    behind it have work sooner. Without room it waits for a backward. Separate gradients of leaves come when
    nothing else can. They come earlier when a stage keeps each of its chunks for as many micro-batches as
    there are stages, which is what the first stage keeps in 1F1B, or when it would keep more bytes than the
    limit.

    Args:
        stage_of: by chunk, the stage that runs it.
        room: by stage, how many forwards it may have run whose backward it has not run; None is any number.
        costs: the seconds of a chunk, or any unit, one way. With None a whole backward takes twice as long as
            a forward, and each half of one as long as a forward.
        ways: the tasks of each chunk.
        keeps: what each chunk keeps of a micro-batch; by default one byte from task to task.
        limit: the bytes that a stage may keep while gradients of leaves wait.
    """
    # The state of the simulation: what is done, and what each stage keeps.
    chunks, stages = len(stage_of), max(stage_of) + 1
    apart = Way.WEIGHTS in ways
    costs = costs or (lambda chunk, way: 2.0 if way is Way.BACKWARD and not apart else 1.0)
    following = {(c, way): 0 for c in range(chunks) for way in ways}  # by chunk and way, the next micro-batch
    done: dict[tuple[int, int, Way], float] = {}  # by task, when it ends
    free = [0.0] * stages  # by stage, when it has done its last task
    # By stage, how many micro-batches wait for their backward, and for the last task that reads what is kept.
    held, kept = [0] * stages, [0] * stages
    waiting = [0] * stages  # by stage, how many tasks of separate gradients could run
    keeps, full = keeps or [KeptBytes()] * chunks, [0.0] * stages  # by stage, the bytes that it keeps
    last = ways[-1]
    out: list[ScheduledTask] = []

    def find_start(chunk: int, way: Way) -> float | None:
        """Return when all that the next task of a chunk needs is done; None if that is not planned yet."""
        micro = following[chunk, way]
        before = {
            Way.FORWARD: [(chunk - 1, micro, way)],
            Way.BACKWARD: [(chunk, micro, Way.FORWARD), (chunk + 1, micro, way)],
            Way.WEIGHTS: [(chunk, micro, Way.BACKWARD)],
        }[way]
        before = [task for task in before if 0 <= task[0] < chunks]
        return max((done[b] for b in before), default=0.0) if all(b in done for b in before) else None

    def has_room(chunk: int, way: Way) -> bool:
        # Separate gradients that wait give bytes back: they run before a task that would exceed the limit.
        stage = stage_of[chunk]
        bytes_then = full[stage] + count_byte_change(keeps[chunk], way, apart)
        if way is not last and waiting[stage] and bytes_then > limit:
            return False
        if way is not Way.FORWARD or room is None:
            return True
        return held[stage] < room[stage] and (kept[stage] < chunks or not apart)

    # By task that can begin, when what it needs is done.
    possible: dict[tuple[int, Way], float] = {}
    for task in following:
        if (at := find_start(*task)) is not None:
            possible[task] = at

    while possible:
        begins = {(c, way): max(at, free[stage_of[c]]) for (c, way), at in possible.items()}
        # The task that begins first comes first. Of a stage's chunks it is the one that a group of as many
        # micro-batches as there are stages has to go through next.
        chunk, way = min(
            [task for task in possible if has_room(*task)] or possible,
            key=lambda t: (
                begins[t], ways.index(t[1]), following[t] // stages,
                t[0] if t[1] is Way.FORWARD else -t[0], following[t],
            ),
        )  # fmt: skip

        # Run it, and note what its stage keeps then.
        micro, stage, start = following[chunk, way], stage_of[chunk], begins[chunk, way]
        end = start + costs(chunk, way)
        out.append(ScheduledTask(chunk, micro, way, start, end))
        done[chunk, micro, way] = free[stage] = end
        held[stage] += {Way.FORWARD: 1, Way.BACKWARD: -1, Way.WEIGHTS: 0}[way]
        if way is Way.FORWARD:
            kept[stage] += 1
        if way is last:
            kept[stage] -= 1
        full[stage] += count_byte_change(keeps[chunk], way, apart)
        waiting[stage] += {Way.FORWARD: 0, Way.BACKWARD: 1, Way.WEIGHTS: -1}[way]
        following[chunk, way] += 1
        if micro == micros - 1:
            del following[chunk, way]

        # The tasks whose start this changes: those of its chunk, and the one that reads what it has made.
        neighbour = chunk + 1 if way is Way.FORWARD else chunk - 1
        for task in ((chunk, way), (neighbour, way), *((chunk, other) for other in ways)):
            possible.pop(task, None)
            if task in following and (at := find_start(*task)) is not None:
                possible[task] = at
    return sorted(out, key=lambda task: (task.end, task.start, task.chunk))


def count_byte_change(keeps: KeptBytes, way: Way, apart: bool) -> float:
    """Return how many more bytes a stage keeps behind a task of a chunk than before it."""
    for_weights = keeps.for_weights if apart else 0.0
    return {
        Way.FORWARD: keeps.for_backward,
        Way.BACKWARD: for_weights - keeps.for_backward,
        Way.WEIGHTS: -for_weights,
    }[way]


def count_kept(
    tasks: Sequence[ScheduledTask], stage_of: Sequence[int], keeps: Sequence[KeptBytes]
) -> dict[int, float]:
    """Return the most bytes that each stage keeps in an order of tasks."""
    apart = any(task.way is Way.WEIGHTS for task in tasks)
    now, most = dict.fromkeys(stage_of, 0.0), dict.fromkeys(stage_of, 0.0)
    for task in sorted(tasks, key=lambda task: task.start):
        stage = stage_of[task.chunk]
        now[stage] += count_byte_change(keeps[task.chunk], task.way, apart)
        most[stage] = max(most[stage], now[stage])
    return most


def usual_room(stages: int, chunks: int) -> list[int]:
    """Return how many micro-batches each stage may have under way, so that no stage waits for another.

    These are the numbers of 1F1B, and of interleaved stages where a stage has several chunks.

    >>> usual_room(4, 4), usual_room(2, 4)
    ([4, 3, 2, 1], [5, 3])
    """
    each = chunks // stages
    if each <= 1:
        return [stages - stage for stage in range(stages)]
    return [2 * (stages - stage - 1) + (each - 1) * stages + 1 for stage in range(stages)]


def bubble(tasks: Sequence[ScheduledTask], stage_of: Sequence[int]) -> float:
    """Return the share of their time in which stages have nothing to do."""
    end, stages = max(task.end for task in tasks), max(stage_of) + 1
    return 1 - sum(task.end - task.start for task in tasks) / (stages * end)
