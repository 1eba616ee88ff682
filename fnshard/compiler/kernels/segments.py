"""Segments: a program that has been cut, as data: runs of code and the exchanges between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from fnshard.compiler.frontend.exchange import KINDS
from fnshard.compiler.ir.program import describe
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segment_source import Argument, SegmentSource


class Way(StrEnum):
    """A way through a segment; the enum's value is how a schedule prints it.

    BACKWARD makes all gradients. Where a backward is divided, BACKWARD makes the cotangents that others wait
    for, and WEIGHTS makes the gradients of leaves that are left.
    """

    FORWARD = "fwd"
    BACKWARD = "bwd"
    WEIGHTS = "wgrad"


@dataclass(frozen=True)
class Segment:
    """One run of the program.

    Args:
        index: its number.
        units: the units of those leaves that it reads and that are gathered or reduced.
        inputs, outputs: names of values, which print as "leaf:layers.0.w", "batch:0", "key:key0", "mul_3".
        source: the key of its code, which equal segments share.
    """

    index: int
    units: tuple[str, ...]
    inputs: tuple[ValueName, ...]
    outputs: tuple[ValueName, ...]
    source: str

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(n.path for n in self.inputs if n.kind is Kind.LEAF)


@dataclass(frozen=True)
class Exchanged:
    """An exchange between ranks that follows a segment.

    Args:
        dim, to: the dims along which values are split or joined; see `frontend.exchange`.
        after: the index of the segment.
        sent, received: the names of the value that is sent and of its result.
        like: a description of the value that is sent.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int
    after: int
    sent: ValueName
    received: ValueName
    like: Argument
    to: int = 0

    def __str__(self) -> str:
        dims = KINDS[self.kind].dims_text(self.dim, self.to)
        return f"{self.kind}({self.sent} {self.like}{dims}) over {', '.join(self.axes)} -> {self.received}"


def may_travel_again(kind: str, axes: Sequence[str], data_axes: Sequence[str]) -> bool:
    """Return whether ranks may exchange a value again for the backward, since they keep what they have sent.

    They may exchange again sequences that they gather, whose parts are smaller, and blocks that go round a
    ring. What `fn` itself gathers over data axes is kept.
    """
    return KINDS[kind].permutes or (kind == "all_gather" and set(data_axes).isdisjoint(axes))


def last_first(exchanges: Sequence[Exchanged]) -> list[Exchanged]:
    """Return exchanges in the order of a backward: each before the one whose result it sends.

    Exchanges that do not depend on each other keep their order.
    """
    depths: dict[ValueName, int] = {}
    for each in exchanges:
        depths[each.received] = depths.get(each.sent, -1) + 1
    return sorted(exchanges, key=lambda e: -depths[e.received])  # a stable sort


def group_by_unit(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Group consecutive segments of one unit, which exchanges have cut.

    A segment that reads no leaves belongs to the group before it.
    """
    groups: list[list[Segment]] = [[segment] for segment in segments[:1]]
    for earlier, later in itertools.pairwise(segments):
        units_before, units = set(earlier.units), set(later.units)
        if units <= units_before or (units_before and units_before <= units):
            groups[-1].append(later)
        else:
            groups.append([later])
    return [tuple(group) for group in groups]


@dataclass(frozen=True)
class Segments:
    """A program that has been cut.

    Args:
        sources: the distinct codes by their keys; equal segments share one.
        results: the names of what the program returns.
        values: fake tensors of the values that segments make for others, by name.
        alike: written leaves whose new values are the same on all ranks.
        exchanges: the exchanges between segments.
    """

    segments: tuple[Segment, ...]
    sources: Mapping[str, SegmentSource]
    results: tuple[ValueName, ...]
    values: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    alike: frozenset[str] = frozenset()
    exchanges: tuple[Exchanged, ...] = ()

    def exchanges_after(self) -> dict[int, list[Exchanged]]:
        """Return the exchanges by the index of the segment that they follow."""
        return {s.index: [e for e in self.exchanges if e.after == s.index] for s in self.segments}

    def as_text(self) -> str:
        """Return a text with one line per segment: what it reads, and what crosses out of it."""
        names = {key: f"k{i}" for i, key in enumerate(self.sources)}
        lines, exchanges = [], self.exchanges_after()
        for s in self.segments:
            out = ", ".join(f"{o} {describe(self.values[o])}" for o in s.outputs)
            reads = ", ".join(i for i in s.inputs if i.kind is not Kind.LEAF)
            lines.append(f"{s.index}: {names[s.source]}[{'+'.join(s.units)}]({reads}) -> {out}")
            lines += [f"   {e}" for e in exchanges[s.index]]
        return "\n".join(lines)

    __str__ = as_text
