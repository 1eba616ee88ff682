"""Diff: what one lowered step has that another has not: instructions, bytes, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fnshard.analysis.memory import MemoryAnalysis
from fnshard.analysis.tables import columns, megabytes
from fnshard.analysis.traffic import Traffic
from fnshard.compiler.schedule.instructions import Instruction
from fnshard.compiler.schedule.ir import Schedule


@dataclass(frozen=True)
class Change:
    """A number before and after."""

    before: int
    after: int

    @property
    def by(self) -> int:
        """How much it grew."""
        return self.after - self.before


@dataclass(frozen=True)
class Difference:
    """From one lowered step to another.

    `gone`, `come`: instructions by (phase, unit, verb), how many. `bytes`: what changed of the peak,
    by category too, of what is resident, of host and disk, and of what is sent. `collectives`: counts by
    verb. Empty where nothing changed.
    """

    gone: Mapping[tuple[str, str, str], int]
    come: Mapping[tuple[str, str, str], int]
    bytes: Mapping[str, Change]
    collectives: Mapping[str, Change]

    def __bool__(self) -> bool:
        return bool(self.gone or self.come or self.bytes or self.collectives)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts."""
        return {
            "gone": {" ".join(k): n for k, n in self.gone.items()},
            "come": {" ".join(k): n for k, n in self.come.items()},
            "bytes": {k: {"before": c.before, "after": c.after} for k, c in self.bytes.items()},
            "collectives": {k: {"before": c.before, "after": c.after} for k, c in self.collectives.items()},
        }

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = []
        for sign, lost in (("-", self.gone), ("+", self.come)):
            for (phase, verb), (count, units) in _by_verb(lost).items():
                lines.append(f"{sign} {count} {verb} in {phase}: {_shortened(units)}")
        rows = [("MB", "before", "after", "change")]
        rows += [
            (name, megabytes(c.before), megabytes(c.after), ("+" if c.by > 0 else "") + megabytes(c.by))
            for name, c in self.bytes.items()
        ]
        lines += columns(rows) if self.bytes else []
        counts = [("collectives", "before", "after")]
        counts += [(verb, str(c.before), str(c.after)) for verb, c in self.collectives.items()]
        return "\n".join(lines + (columns(counts) if self.collectives else []))


def _by_verb(lines: Mapping[tuple[str, str, str], int]) -> dict[tuple[str, str], tuple[int, list[str]]]:
    out: dict[tuple[str, str], tuple[int, list[str]]] = {}
    for (phase, unit, verb), count in lines.items():
        total, units = out.get((phase, verb), (0, []))
        out[phase, verb] = total + count, [*units, unit]
    return out


def _shortened(units: list[str]) -> str:
    names = list(dict.fromkeys(units))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def compare(
    before: tuple[Schedule, MemoryAnalysis, Traffic], after: tuple[Schedule, MemoryAnalysis, Traffic]
) -> Difference:
    """What came and went between two steps, each as schedule, memory and traffic."""
    lines = [Counter(map(_key, schedule.instructions)) for schedule, _, _ in (before, after)]
    sizes = [_bytes(memory, traffic) for _, memory, traffic in (before, after)]
    counts = [{verb: traffic[verb]["count"] for verb in traffic} for _, _, traffic in (before, after)]
    return Difference(
        gone=dict(lines[0] - lines[1]),
        come=dict(lines[1] - lines[0]),
        bytes=_changes(*sizes),
        collectives=_changes(*counts),
    )


def _key(line: Instruction) -> tuple[str, str, str]:
    return line.phase, line.unit, line.verb


def _bytes(memory: MemoryAnalysis, traffic: Traffic) -> dict[str, int]:
    out = {"peak": memory.peak_bytes}
    out |= {f"peak, {category}": size for category, size in memory.peak.items()}
    out |= {"between steps": memory.resident_bytes, "host": memory.host_bytes, "disk": memory.disk_bytes}
    out |= {"sent": traffic.sent_bytes}
    return out | {"to device": traffic.to_device_bytes, "to host": traffic.to_host_bytes}


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Change]:
    names = dict.fromkeys([*before, *after])
    changes = {n: Change(before.get(n, 0), after.get(n, 0)) for n in names}
    return {n: c for n, c in changes.items() if c.by}
