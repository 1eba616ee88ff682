"""Tasks: in which order the micro-batches of a step run forward and backward, as data.

`build` writes the tasks out in this order; what a round gathers serves all tasks of the round. Depth-first is
the usual accumulation: a micro-batch runs forward and backward through the whole program before the next
one begins, and gathers every leaf for itself. Breadth-first runs all micro-batches through one chunk of the
program before the next chunk (Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism"): a leaf is gathered
once for all of them and its gradient is reduced once, while the activations between chunks are kept for every
micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fnshard.compiler.kernels.segments import Segment

MicroOrder = Literal["depth", "breadth"]


@dataclass(frozen=True)
class Task:
    """A stretch of the program that runs for one micro-batch, forward or backward.

    Args:
        segments: the stretch; a backward runs through it from its end.
        micro: the number of the micro-batch.
        is_last: it is the last micro-batch that runs through these segments in this direction.
    """

    segments: Sequence[Segment]
    micro: int
    backward: bool
    is_last: bool


Round = tuple[Task, ...]  # tasks that run one after another and share what they gather


def order_tasks(
    segments: Sequence[Segment],
    written: Iterable[tuple[str, int]],
    accumulate: int,
    order: MicroOrder,
    differentiate: bool = True,
) -> list[Round]:
    """Return the tasks of a step, in rounds.

    Args:
        written: leaves that `fn` writes to, by path and the segment that makes the new value.
        accumulate: how many micro-batches there are.
        differentiate: False leaves the backward out.
    """
    micros, directions = range(accumulate), (False, True) if differentiate else (False,)
    if order == "depth" or accumulate == 1:
        last = accumulate - 1
        return [(Task(segments, m, backward, m == last),) for m in micros for backward in directions]

    def run(chunk: Sequence[Segment], micro: int, backward: bool) -> Task:
        return Task(chunk, micro, backward, micro == accumulate - 1)

    *chunks, end = make_chunks(segments, written)
    forward = [tuple(run(chunk, m, False) for m in micros) for chunk in chunks]
    backward = [tuple(run(chunk, m, True) for m in micros) for chunk in reversed(chunks)]
    # The backward of the last chunk needs nothing but its forward, so that the logits of one micro-batch live
    # at a time.
    last_round = tuple(run(end, m, backward) for m in micros for backward in directions)
    return [*forward, last_round, *(backward if differentiate else ())]


def make_chunks(segments: Sequence[Segment], written: Iterable[tuple[str, int]]) -> list[tuple[Segment, ...]]:
    """Cut a program into the shortest stretches that all micro-batches may run through before the next one.

    Consecutive segments of one unit stay together: an exchange has cut the unit in two. A segment that reads
    no leaves stays with the one before it. So do all segments between the first reader of a leaf that `fn`
    writes to and its writer, because a micro-batch reads what the one before has written.
    """
    joined = set[int]()
    for earlier, later in itertools.pairwise(segments):
        before, units = set(earlier.units), set(later.units)
        if units <= before or (before and before <= units):
            joined.add(later.index)
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
