"""Traffic: count the bytes that a step's collectives and transfers move, from its schedule.

Each collective has two numbers. `bytes` counts the whole buffer: all rows of a gather, a scatter or an
all-to-all, the flat of a sum, or a rank's block of a permutation. `sent_bytes` counts what one rank sends:
(n-1)/n of the first three, 2(n-1)/n of a sum, and the block. These are exact for fnshard's own sends from
rank to rank, and for rings (Patarasuk & Yuan, 2009). Ranks that share memory send nothing. The small sum of
scalars is counted by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fnshard.analysis.tables import columns, megabytes
from fnshard.compiler.ir.values import ValueName
from fnshard.compiler.schedule.instructions import TRANSFER, ReduceScalars
from fnshard.compiler.schedule.ir import Schedule


@dataclass(frozen=True)
class Row:
    """The messages of one kind, of one unit in one phase ("forward", "backward" or "update").

    Args:
        axes: the axes of the mesh, which are none for transfers between device and host.
    """

    verb: str
    axes: tuple[str, ...]
    unit: str
    phase: str
    count: int
    bytes: int
    sent_bytes: int


@dataclass(frozen=True, eq=False)
class Traffic(Mapping[str, dict[str, int]]):
    """A step's messages.

    For collectives that move buckets, `traffic[verb]` is `{"count": n, "bytes": b}` of whole buffers.

    Args:
        rows: all messages, by collective, axes, unit and phase.
        scalar_bytes: the bytes of the sum of scalars.
    """

    rows: tuple[Row, ...]
    scalar_bytes: int = 0

    def __getitem__(self, verb: str) -> dict[str, int]:
        rows = [r for r in self.rows if r.verb == verb and r.axes]
        if not rows:
            raise KeyError(verb)
        return {"count": sum(r.count for r in rows), "bytes": sum(r.bytes for r in rows)}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(r.verb for r in self.rows if r.axes))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def sent_bytes(self) -> int:
        """Count the bytes that this rank sends to others in a step, except for scalars."""
        return sum(r.sent_bytes for r in self.rows if r.axes)

    @property
    def to_device_bytes(self) -> int:
        """Count the bytes that are copied from the host or the disk to the device."""
        return sum(r.bytes for r in self.rows if r.verb == "to_device")

    @property
    def to_host_bytes(self) -> int:
        """Count the bytes that are copied from the device to the host or the disk."""
        return sum(r.bytes for r in self.rows if r.verb == "to_host")

    def by(self, what: str) -> dict[Any, dict[str, int]]:
        """Return sums over one column: "verb", "axes", "unit" or "phase"."""
        out: dict[Any, dict[str, int]] = {}
        for row in self.rows:
            entry = out.setdefault(getattr(row, what), {"count": 0, "bytes": 0, "sent_bytes": 0})
            for name in entry:
                entry[name] += getattr(row, name)
        return out

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and dicts, in which axes are joined by commas."""
        return {
            "sent_bytes": self.sent_bytes,
            "to_device_bytes": self.to_device_bytes,
            "to_host_bytes": self.to_host_bytes,
            "scalar_bytes": self.scalar_bytes,
            "verbs": self.by("verb"),
            "axes": {", ".join(axes): sums for axes, sums in self.by("axes").items() if axes},
            "units": self.by("unit"),
            "phases": self.by("phase"),
        }

    def __str__(self) -> str:
        grouped: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            grouped.setdefault((row.verb, ", ".join(row.axes) or "-", row.phase), []).append(row)
        grouped["all", "", ""] = [row for row in self.rows if row.axes]  # without transfers

        cells = [("collective", "axes", "phase", "count", "MB", "MB sent")]
        for key, rows in grouped.items():
            count = sum(row.count for row in rows)
            size = sum(row.bytes for row in rows)
            sent = sum(row.sent_bytes for row in rows)
            cells.append((*key, str(count), megabytes(size), megabytes(sent)))
        return "\n".join(columns(cells))


def analyse(schedule: Schedule, sizes: Mapping[ValueName, int]) -> Traffic:
    """Count the bytes that a schedule moves between ranks, and between device, host and disk.

    Args:
        sizes: the bytes of values by name. Only those that transfers read are needed.
    """
    sums: dict[tuple[str, tuple[str, ...], str, str], list[int]] = {}
    scalars = 0
    for line in schedule.instructions:
        if isinstance(line, ReduceScalars):
            scalars += 8 * schedule.scalars  # in fp64
            continue
        # A transfer moves whole values; a collective sends a share of its buffer, which depends on the ranks.
        if line.lane == TRANSFER:
            size, axes, sent = sum(sizes[n] for n in line.reads), (), 0
        else:
            size, axes = line.wire_bytes(schedule), line.axes_of(schedule)
            sent = int(line.sent_share(schedule.mesh.axes_size(axes)) * size)
        if size:
            entry = sums.setdefault((line.verb, axes, line.unit, line.phase.partition(".")[0]), [0, 0, 0])
            for i, n in enumerate((1, size, sent)):
                entry[i] += n
    return Traffic(tuple(Row(*key, *entry) for key, entry in sums.items()), scalars)
