"""Reruns: the parts of a forward that run again for their backward, exchanges and all.

A segment that recomputes begins with its inputs, and these are kept. Where a unit sends rows to experts, the
inputs of its segments are the rows that have come: as many bytes as were sent, for every layer. Such a unit
keeps what it reads of other units alone. Its segments run forward again before its backward, and rows travel
once more (Chen et al. 2016, over a unit that an exchange cuts).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segments import Exchanged, Segment, Segments, last_first


@dataclass(frozen=True)
class Rerun:
    """The part of a unit that runs again for the unit's backward.

    Args:
        unit: the segments of the unit, in order.
        runs: the numbers of the segments that run again.
        exchanges: the exchanges that are issued again, by their results.
    """

    unit: tuple[Segment, ...]
    runs: frozenset[int]
    exchanges: frozenset[ValueName]


def plan_rerun(
    unit: Sequence[Segment],
    segments: Segments,
    kernels: Sequence[Kernel],
    active: Set[int],
    data_axes: Set[str],
) -> Rerun:
    """Find out what has to run again, so that the backward of a unit can read it.

    Values that other units read are kept for these, and so are the results of exchanges over data axes that
    `fn` itself asks for (`fs.psum`). Exchanges of rows with experts run again with what they are between.

    Args:
        kernels: the kernel of each segment.
        active: the segments whose backward runs.
        data_axes: the axes over which rows are split.
    """

    def is_over_data_axes(each: Exchanged) -> bool:
        return each.kind != "all_to_all" and not data_axes.isdisjoint(each.axes)

    # What is kept: what other units read or send on, and what `fn` itself exchanges over data axes.
    after, own = segments.exchanges_after(), {segment.index for segment in unit}
    kept = {n for segment in segments.segments if segment.index not in own for n in segment.inputs}
    kept |= {each.sent for each in segments.exchanges if each.after not in own}
    kept |= {e.received for index in own for e in after[index] if is_over_data_axes(e)}

    # What the backward reads, and its half for weight gradients if it is apart.
    wanted: set[ValueName] = set()
    runs: set[int] = set()
    exchanges: set[ValueName] = set()
    for segment in unit:
        halves = kernels[segment.index].halves.values() if segment.index in active else ()
        for ref in (ref for half in halves for ref in half.inputs):
            if ref.kind == "saved":  # it exists only once its segment has run
                runs.add(segment.index)
            elif ref.kind in ("input", "output"):
                names = segment.inputs if ref.kind == "input" else segment.outputs
                wanted.add(names[ref.index])
    # From the end: what makes a wanted value runs again, and what that reads is wanted.
    for segment in reversed(unit):
        for each in last_first(after[segment.index]):
            if each.received in wanted - kept:
                exchanges.add(each.received)
                wanted.add(each.sent)
        if segment.index in runs or not (wanted - kept).isdisjoint(segment.outputs):
            runs.add(segment.index)
            # Leaves are gathered once more.
            wanted |= {name for name in segment.inputs if name.kind is not Kind.LEAF}
    return Rerun(tuple(unit), frozenset(runs), frozenset(exchanges))
