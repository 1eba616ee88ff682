"""Segments: a program that is cut, as data: runs of code, and the exchanges between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from fnshard.compiler.frontend.exchange import KINDS
from fnshard.compiler.ir.program import describe
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.canonical import Argument, Source


class Way(StrEnum):
    """A way through a segment; the enum's value is how a schedule prints it.

    BACKWARD makes all gradients, or, where those of leaves are apart, the cotangents that others wait for;
    WEIGHTS then makes what is left of the gradients of leaves.
    """

    FORWARD = "fwd"
    BACKWARD = "bwd"
    WEIGHTS = "wgrad"


@dataclass(frozen=True)
class Segment:
    """One run of the program.

    `inputs`, `outputs`: printed as "leaf:layers.0.w", "batch:0", "key:key0", "mul_3"; `source`:
    key of the distinct code; `units`: whose leaves it reads (those that are gathered or reduced).
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
    """An exchange after segment `after`: which value is sent, and what its result is called.

    `dim`, `to`: along which it is split or joined; see `frontend.exchange`.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int
    after: int
    sent: ValueName
    received: ValueName
    like: Argument  # what is sent
    to: int = 0

    def __str__(self) -> str:
        dims = KINDS[self.kind].dims_text(self.dim, self.to)
        return f"{self.kind}({self.sent} {self.like}{dims}) over {', '.join(self.axes)} -> {self.received}"


def last_first(exchanges: Sequence[Exchanged]) -> list[Exchanged]:
    """Each before the one whose result it sends, as a backward runs them; else in their order."""
    depths: dict[ValueName, int] = {}
    for each in exchanges:
        depths[each.received] = depths.get(each.sent, -1) + 1
    return sorted(exchanges, key=lambda e: -depths[e.received])


@dataclass(frozen=True)
class Segments:
    """The cut program.

    `sources`: the distinct codes, each shared by all segments equal to it. `alike`: written leaves whose new
    values are the same on all ranks.
    """

    segments: tuple[Segment, ...]
    sources: Mapping[str, Source]
    results: tuple[ValueName, ...]
    values: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    alike: frozenset[str] = frozenset()
    exchanges: tuple[Exchanged, ...] = ()

    def exchanges_after(self) -> dict[int, list[Exchanged]]:
        """Return the exchanges by the index of the segment they stand after."""
        return {s.index: [e for e in self.exchanges if e.after == s.index] for s in self.segments}

    def as_text(self) -> str:
        """One line per segment: what it reads, what crosses out of it."""
        names = {key: f"k{i}" for i, key in enumerate(self.sources)}
        lines, after = [], self.exchanges_after()
        for s in self.segments:
            out = ", ".join(f"{o} {describe(self.values[o])}" for o in s.outputs)
            reads = ", ".join(i for i in s.inputs if i.kind is not Kind.LEAF)
            lines.append(f"{s.index}: {names[s.source]}[{'+'.join(s.units)}]({reads}) -> {out}")
            lines += [f"   {e}" for e in after[s.index]]
        return "\n".join(lines)

    __str__ = as_text
