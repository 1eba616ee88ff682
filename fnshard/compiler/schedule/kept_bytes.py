"""Kept bytes: how much a chunk of a pipeline keeps of one micro-batch, from task to task.

The scheduler weighs orders by them. They are sizes of values, counted before there is a schedule; the ledger
counts storages, line by line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from fnshard.compiler.frontend.exchange import KINDS
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.kernel import Kernel, Ref
from fnshard.compiler.kernels.segment_source import Argument
from fnshard.compiler.kernels.segments import Segment, Segments, Way, may_travel_again
from fnshard.compiler.schedule.reruns import Rerun


@dataclass(frozen=True)
class KeptBytes:
    """The bytes that a chunk keeps of one micro-batch.

    Args:
        for_backward: from its forward to its backward.
        for_weights: from its backward to the separate gradients of its leaves.
    """

    for_backward: float = 1.0
    for_weights: float = 1.0


def count_kept_bytes(
    chunk: Sequence[Segment],
    segments: Segments,
    kernels: Sequence[Kernel],
    active: Set[int],
    reruns: Sequence[Rerun],
    fetched_again: Set[ValueName],
) -> KeptBytes:
    """Count what a chunk keeps.

    Args:
        kernels: the kernel of each segment.
        active: the segments whose backward runs.
        reruns: the parts of the forward that run again for their backward.
        fetched_again: values that ranks exchange a second time for the backward, instead of keeping them.
    """
    # What is computed or exchanged a second time is not kept.
    own = {segment.index for segment in chunk}
    again = {index: rerun for rerun in reruns for index in rerun.runs}
    made_again = {n for index in again.keys() & own for n in segments.segments[index].outputs}
    made_again |= {name for index in again.keys() & own for name in again[index].exchanges}
    not_kept = made_again | fetched_again

    early: dict[object, int] = {}  # by value, the bytes that wait for the backward
    late: dict[object, int] = {}  # those that wait for the gradients of leaves
    for segment in chunk:
        if segment.index not in active:
            continue
        kernel = kernels[segment.index]
        for way, half in kernel.halves.items():
            for ref in half.inputs:
                name, size = _describe_value(ref, segment, kernel, segments)
                is_of_forward = ref.kind in ("input", "output", "saved")
                is_saved_again = ref.kind == "saved" and segment.index in again
                if is_of_forward and name not in not_kept and not is_saved_again:
                    early[name] = size
                if way is Way.WEIGHTS:
                    late[name] = size
        # What a unit reads when it runs again waits for its backward, too.
        for name in segment.inputs if segment.index in again else ():
            if name.kind is Kind.VALUE and name not in not_kept:
                early[name] = _bytes_of(segments.values[name])
    return KeptBytes(float(sum(early.values())), float(sum(late.values())))


def find_fetched_again(
    segments: Segments, recomputed: Set[int], data_axes: Sequence[str]
) -> frozenset[ValueName]:
    """Return the values that the pass `regather` exchanges a second time for the backward.

    Args:
        recomputed: segments that gather sequences again for their backward.
        data_axes: the axes over which rows are split.
    """
    readers: dict[ValueName, set[int]] = {}
    for segment in segments.segments:
        for name in segment.inputs:
            readers.setdefault(name, set()).add(segment.index)
    return frozenset(
        each.received
        for each in segments.exchanges
        if may_travel_again(each.kind, each.axes, data_axes)
        and (KINDS[each.kind].permutes or readers.get(each.received, set()) <= recomputed)
    )


def _describe_value(ref: Ref, segment: Segment, kernel: Kernel, segments: Segments) -> tuple[object, int]:
    """Return a name for a value that a backward reads, and its bytes.

    Leaves, the batch, constants and keys are there anyway, and count as 0 bytes.
    """
    if ref.kind == "input":
        name = segment.inputs[ref.index]
        return name, _bytes_of(segments.values[name]) if name.kind is Kind.VALUE else 0
    if ref.kind in ("output", "tangent"):
        name = segment.outputs[ref.index]
        return (name if ref.kind == "output" else ("tangent", name)), _bytes_of(segments.values[name])
    described = kernel.saved if ref.kind == "saved" else kernel.between
    return (ref.kind, segment.index, ref.index), _bytes_of(described[ref.index])


def _bytes_of(value: Tensor | Argument) -> int:
    return math.prod(value.shape) * value.dtype.itemsize
