"""Unroll: it makes the segments of a model with many layers from a trace of few.

Layers are alike, so tracing each of them would find the same again. The segments of one from the middle stand
for all that were not traced: their leaves are of other layers, and what they read of the layer before is that
of the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.plan.config import layer_of
from fnshard.analysis.flops import kernel_flops
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segments import Exchanged, Segment, Segments
from fnshard.compiler.lower import Front, schedule_for
from fnshard.compiler.options import StepOptions
from fnshard.step.batches import bytes_of_batch
from fnshard.step.lowered import Lowered
from fnshard.step.settings import step_settings
from fnshard.step.step import Step

TRACED_LAYERS = 4  # so many layers are traced in place of more
BEHIND = 2  # layers of the trace that stay behind those that are added: the last one may differ


@dataclass(frozen=True)
class Layer:
    """A layer of a program that is cut into segments.

    Args:
        exchanges: the exchanges behind each of its segments.
    """

    number: int
    segments: tuple[Segment, ...]
    exchanges: tuple[tuple[Exchanged, ...], ...]

    @property
    def places(self) -> dict[ValueName, tuple[int, int]]:
        """Return the place in the layer of each value that the layer makes."""
        out = {}
        for place, (segment, exchanges) in enumerate(zip(self.segments, self.exchanges, strict=True)):
            names = [*segment.outputs, *(each.received for each in exchanges)]
            out |= {name: (place, number) for number, name in enumerate(names)}
        return out


def trace_few_layers(trace: Callable[[int], Front], layers: int, odd_layers: int = 0) -> Front | None:
    """Trace few layers of a model, and return the front of a model with `layers` layers.

    Its program is that of the few layers.

    Args:
        trace: a function that traces a model of so many layers, without a pipeline, whose stages would be cut
            where units are.
        odd_layers: the number of first layers behind which all are alike.

    Returns:
        None where that many layers are too few to gain by it, or are not alike.
    """
    few = odd_layers + TRACED_LAYERS
    if layers <= few:
        return None
    front = trace(few)
    segments = unroll(front.segments, layers)
    return None if segments is None else replace(front, segments=segments)


def lower_from(
    front: Front, step: Step, batch: tuple[Any, ...], options: StepOptions, known: MutableMapping[str, Kernel]
) -> Lowered:
    """Lower a step on paper from a trace that it may share with others. Its schedules are not verified.

    Args:
        batch: a rank's batch.
        options: the step's, or others that change nothing in its trace.
        known: the kernels that were made from this trace before; new ones are added.
    """
    resolved, mesh = step.resolved, step.mesh
    settings = step_settings(step.optimizer, resolved, mesh, options).for_program(front.program)
    stages = schedule_for(
        replace(front, settings=settings),
        resolved.stored,
        mesh,
        options,
        known,
        verified=False,
        cost_of=kernel_flops,
    )
    return Lowered(
        stages, options, optimizer=step.optimizer, batch_bytes=bytes_of_batch(Arguments(batch, {}))
    )


def unroll(segments: Segments, layers: int) -> Segments | None:
    """Return the segments of a program with `layers` layers.

    Args:
        segments: the segments of a program with fewer.

    Returns:
        None where the layers of `segments` are not alike, or read more than the layer before them.
    """
    found = find_layers(segments)
    if found is None or len(found) < BEHIND + 2:
        return None
    before, pattern, behind = found[-BEHIND - 2 : -BEHIND + 1]
    if describe(pattern, before) != describe(behind, pattern):
        return None
    last = pattern.segments[-1].index
    of_pattern, of_before = pattern.places, {place: name for name, place in before.places.items()}
    of_behind = {segment.index for segment in behind.segments}
    later = [s for s in segments.segments if s.index > last]
    leaps = (n for s in later if s.index not in of_behind for n in s.inputs if n in of_pattern)
    if next(leaps, None) is not None:
        return None

    # The copies: what they read of the layer before is the pattern's own, or the last copy's.
    made = [s for s in segments.segments if s.index <= last]
    exchanges = [e for e in segments.exchanges if e.after <= last]
    values, extra = dict(segments.values), layers - len(found)
    in_pattern = {place: name for name, place in of_pattern.items()}
    for copy in range(1, extra + 1):
        names = {name: name_copy(name, copy) for name in of_pattern}
        names |= {of_before[p]: name_copy(in_pattern[p], copy - 1) for p in of_before.keys() & in_pattern}
        values |= {names[name]: values[name] for name in of_pattern if name in values}
        for segment, behind_it in zip(pattern.segments, pattern.exchanges, strict=True):
            made.append(rename_segment(segment, len(made), names, copy))
            exchanges += [rename_exchange(each, len(made) - 1, names) for each in behind_it]

    # What was behind the pattern is behind the last copy.
    names, shift = {name: name_copy(name, extra) for name in of_pattern}, len(made) - last - 1
    made += [rename_segment(segment, segment.index + shift, names, extra) for segment in later]
    exchanges += [rename_exchange(e, e.after + shift, names) for e in segments.exchanges if e.after > last]
    return replace(segments, segments=tuple(made), exchanges=tuple(exchanges), values=values)


def find_layers(segments: Segments) -> list[Layer] | None:
    """Return the layers of a program, in order; None if a segment belongs to two, or they do not follow one
    another.

    A segment without leaves belongs to the layer before it.
    """
    after = segments.exchanges_after()
    by_number: dict[int, list[Segment]] = {}
    latest = None
    for segment in segments.segments:
        numbers = {layer_of(unit) for unit in segment.units} or {latest}
        if len(numbers) > 1 or (latest is not None and not numbers <= {latest, latest + 1, None}):
            return None
        (latest,) = numbers
        if latest is not None:
            by_number.setdefault(latest, []).append(segment)
    if [*by_number] != [*range(len(by_number))]:
        return None
    return [
        Layer(number, tuple(own), tuple(tuple(after[s.index]) for s in own))
        for number, own in by_number.items()
    ]


def describe(layer: Layer, before: Layer) -> list[Any]:
    """Return what a layer does, with places in it and in the layer before for names. It is equal for equal
    layers."""
    own, earlier = layer.places, before.places

    def place(name: ValueName) -> Any:
        if name.kind is Kind.LEAF and layer_of(name.path) == layer.number:
            return "leaf", name.path.removeprefix(f"layers.{layer.number}")
        return ("own", own[name]) if name in own else ("before", earlier[name]) if name in earlier else name

    def lines() -> Iterator[Any]:
        for segment, exchanges in zip(layer.segments, layer.exchanges, strict=True):
            yield segment.source, [place(n) for n in segment.inputs], len(segment.outputs), len(segment.units)
            for e in exchanges:
                yield e.kind, e.axes, e.dim, e.to, e.like, place(e.sent)

    return list(lines())


def name_copy(name: ValueName, copy: int) -> ValueName:
    """Return the name of a value in a copy of the layer that makes it."""
    return ValueName(name.kind, f"{name.path}~{copy}", name.version) if copy else name


def rename_segment(segment: Segment, index: int, names: dict[ValueName, ValueName], by: int) -> Segment:
    """Return a segment with other values, and with the leaves of a layer that comes `by` layers later."""

    def later(text: str) -> str:
        number = layer_of(text)
        if number is None:
            return text
        return f"layers.{number + by}{text.removeprefix(f'layers.{number}')}"

    def name_of(name: ValueName) -> ValueName:
        return ValueName(name.kind, later(name.path)) if name.kind is Kind.LEAF else names.get(name, name)

    return replace(
        segment,
        index=index,
        units=tuple(map(later, segment.units)),
        inputs=tuple(map(name_of, segment.inputs)),
        outputs=tuple(names.get(n, n) for n in segment.outputs),
    )


def rename_exchange(each: Exchanged, after: int, names: dict[ValueName, ValueName]) -> Exchanged:
    """Return an exchange of other values, after another segment."""
    sent, received = (names.get(n, n) for n in (each.sent, each.received))
    return replace(each, after=after, sent=sent, received=received)
