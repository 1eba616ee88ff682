"""Unroll: make the segments of a model with many layers from a trace of few.

Layers are alike, so tracing each of them would find the same again. The segments of one layer from the middle
are copied for all layers that were not traced. A copy has the leaves of its own layer, and reads the values
of the copy before it.
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
BEHIND = 2  # layers of the trace that follow those that are added: the last one may differ


@dataclass(frozen=True)
class Layer:
    """A layer of a program that is cut into segments.

    Args:
        exchanges: the exchanges after each of its segments.
    """

    number: int
    segments: tuple[Segment, ...]
    exchanges: tuple[tuple[Exchanged, ...], ...]

    @property
    def places(self) -> dict[ValueName, tuple[int, int]]:
        """Return the place in the layer of each value that the layer makes."""
        places = {}
        for index, (segment, exchanges) in enumerate(zip(self.segments, self.exchanges, strict=True)):
            names = [*segment.outputs, *(each.received for each in exchanges)]
            places |= {name: (index, number) for number, name in enumerate(names)}
        return places


def trace_few_layers(trace: Callable[[int], Front], layers: int, odd_layers: int = 0) -> Front | None:
    """Trace few layers of a model, and return the front of a model with `layers` layers.

    Its program is that of the few layers.

    Args:
        trace: a function that traces a model of so many layers, without a pipeline, whose stages would be cut
            where units are.
        odd_layers: the number of first layers after which all are alike.

    Returns:
        The front; None if there are too few layers to gain by it, or they are not alike.
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
        The segments; None if the layers of `segments` are not alike, or read more than the layer before them.
    """
    # The pattern is a layer that the next one repeats, and whose values only the next one reads.
    traced = find_layers(segments)
    if traced is None or len(traced) < BEHIND + 2:
        return None
    before, pattern, behind = traced[-BEHIND - 2 : -BEHIND + 1]
    if describe(pattern, before) != describe(behind, pattern):
        return None
    last = pattern.segments[-1].index
    pattern_places = pattern.places
    behind_indices = {segment.index for segment in behind.segments}
    later = [segment for segment in segments.segments if segment.index > last]
    for segment in later:
        if segment.index not in behind_indices and any(name in pattern_places for name in segment.inputs):
            return None

    # Each copy of the pattern reads the values of the copy before it, the first those of the pattern itself.
    unrolled = [segment for segment in segments.segments if segment.index <= last]
    exchanges = [exchange for exchange in segments.exchanges if exchange.after <= last]
    values, extra = dict(segments.values), layers - len(traced)
    before_names = {place: name for name, place in before.places.items()}
    pattern_names = {place: name for name, place in pattern_places.items()}
    for copy in range(1, extra + 1):
        names = {name: name_copy(name, copy) for name in pattern_places}
        for place in before_names.keys() & pattern_names:
            names[before_names[place]] = name_copy(pattern_names[place], copy - 1)
        values |= {names[name]: values[name] for name in pattern_places if name in values}
        for segment, following in zip(pattern.segments, pattern.exchanges, strict=True):
            unrolled.append(rename_segment(segment, len(unrolled), names, copy))
            exchanges += [rename_exchange(each, len(unrolled) - 1, names) for each in following]

    # What followed the pattern follows the last copy.
    names, shift = {name: name_copy(name, extra) for name in pattern_places}, len(unrolled) - last - 1
    unrolled += [rename_segment(segment, segment.index + shift, names, extra) for segment in later]
    exchanges += [rename_exchange(e, e.after + shift, names) for e in segments.exchanges if e.after > last]
    return replace(segments, segments=tuple(unrolled), exchanges=tuple(exchanges), values=values)


def find_layers(segments: Segments) -> list[Layer] | None:
    """Return the layers of a program, in order.

    The result is None if a segment belongs to two layers, or layers do not follow one another.

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
        Layer(number, tuple(members), tuple(tuple(after[segment.index]) for segment in members))
        for number, members in by_number.items()
    ]


def describe(layer: Layer, before: Layer) -> list[Any]:
    """Return what a layer does, which is equal for equal layers.

    Names of values are replaced by places in the layer or in the one before it.
    """
    own, earlier = layer.places, before.places

    def place(name: ValueName) -> Any:
        if name.kind is Kind.LEAF and layer_of(name.path) == layer.number:
            return "leaf", name.path.removeprefix(f"layers.{layer.number}")
        if name in own:
            return "own", own[name]
        return ("before", earlier[name]) if name in earlier else name

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
