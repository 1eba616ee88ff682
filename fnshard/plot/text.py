"""Text: the pictures of `fnshard.plot` in characters, for a terminal; each function returns a string.

>>> import torch, fnshard as fs
>>> mesh = fs.make_mesh(shard=4, abstract=True)
>>> params = {"embed.w": torch.ones(6, 4), "layers.0.w": torch.ones(4, 4), "layers.1.w": torch.ones(4, 4)}
>>> specs = fs.presets.full_shard(params, mesh)
>>> print(tree(specs, mesh, width=20))
3 leaves, 224 B stored; 56 B on one rank of (shard=4)
2 × layers.*.w [4, 4]  P('shard') f32        128 B  ████████████████████
    embed.w [6, 4]     P(None, 'shard') f32   96 B  ███████████████
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fnshard.errors import leaves as count_of
from fnshard.layout.spec import LayoutSpec, P
from fnshard.mesh import Mesh
from fnshard.plot.layouts import blocks_of, layouts_of, leaves_of, together
from fnshard.plot.pictures import busy_lanes, check, headline, memory_series, phase_runs, span_name, totals_of
from fnshard.plot.scales import byte_text, byte_unit, digits, ranks_text, time_unit

EIGHTHS = " ▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉█"
MOST_ROWS = 16  # of blocks; the rest, between the first and the last, is left out
LETTERS = {
    "forward": "F", "backward": "B", "update": "U", "packing and the rest": "P", "gather": "G",
    "reduce scatter": "R", "all reduce": "A", "publish": "W", "reduce scalars": "S", "to device": "I",
    "to host": "O", "exchange": "X", "aggregate buffers": "M",
}  # fmt: skip


def leaf(spec: LayoutSpec | P, mesh: Mesh, *, shape: Sequence[int] | None = None) -> str:
    """Show which ranks hold which block of a leaf: of its storage, gradient, optimizer state, and computed.

    >>> from fnshard import P, make_mesh
    >>> from fnshard.plot import text
    >>> print(text.leaf(P("shard"), make_mesh(replicate=2, shard=4, abstract=True), shape=(3, 8)))
    [3, 8] on (replicate=2, shard=4)
    layout: P('shard')
      [0:1, 0:8]  ranks 0, 4
      [1:2, 0:8]  ranks 1, 5
      [2:3, 0:8]  ranks 2, 6
      padding     ranks 3, 7

    Raises:
        SpecError: no layout, no shape, or they do not fit each other and the mesh.
    """
    layouts, full = layouts_of(spec, shape)
    lines = [f"{list(full)} on {mesh}"]
    for layout, fields in layouts.items():
        rows = [
            (f"  {block}", f"ranks {ranks_text(r)}") for block, r in blocks_of(layout, full, mesh).items()
        ]
        lines += [f"{fields}: {layout!r}"]
        lines += _columns(_cut(rows, MOST_ROWS, ("  ⋮", "")), (str.ljust, str.ljust))
    return "\n".join(lines)


def tree(specs: Any, mesh: Mesh, *, params: Any = None, width: int = 32) -> str:
    """Show a tree's layout by bytes; leaves whose paths differ in numbers alone share a line.

    Args:
        specs: a tree of LayoutSpecs.
        mesh: may be abstract.
        params: for specs that were written by hand, and know no shapes yet.
        width: of the longest bar.

    Raises:
        SpecError: specs without shapes, or that do not fit the mesh.
    """
    leaves = leaves_of(specs, mesh, params)
    full, one = sum(x.bytes for x in leaves), sum(x.mine for x in leaves)
    rows = together(leaves)
    most, wide = max((x.bytes for x in rows), default=0), len(f"{max((x.count for x in rows), default=1)} × ")
    cells = [
        (
            (f"{x.count} × " if x.count > 1 else "").rjust(wide if any(r.count > 1 for r in rows) else 0)
            + f"{x.path} {list(x.shape)}",
            x.label,
            byte_text(x.bytes),
            _bar(x.bytes / most if most else 0.0, width),
        )
        for x in rows
    ]
    title = f"{count_of(len(leaves))}, {byte_text(full)} stored; {byte_text(one)} on one rank of {mesh}"
    return "\n".join([title, *_columns(cells, (str.ljust, str.ljust, str.rjust, str.ljust))])


def memory(memory: Any, *, width: int = 72, height: int = 8) -> str:
    """Show the bytes on one rank's device over the schedule, with phases and the peak.

    Args:
        memory: a `Lowered`, its `memory_timeline()`, or that as a dict, as `fs.plot.memory` takes it.
        width, height: in characters.

    >>> from fnshard.plot import text
    >>> steps = {"lines": ["forward a", "forward b", "backward c", "update d"], "weights": [1, 2, 4, 1]}
    >>> print(text.memory(steps, width=4, height=2))
    4 B |  █
        |▄██▄
    0 B +----
         f bu
    peak 4 B in line 2: backward c
    """
    phases, series = memory_series(memory)
    totals = totals_of(series)
    memory = memory.memory_timeline() if hasattr(memory, "memory_timeline") else memory
    lines = (memory.as_dict() if hasattr(memory, "as_dict") else memory).get("lines", ())
    if not totals:
        return "nothing runs"
    peak = max(range(len(totals)), key=totals.__getitem__)
    top, width = totals[peak] or 1, min(width, len(totals))
    columns = [
        max(totals[len(totals) * i // width : max(len(totals) * (i + 1) // width, 1)]) for i in range(width)
    ]
    scale, unit = byte_unit(top)
    high, low = f"{digits(top * scale)} {unit}", f"0 {unit}"
    left = max(len(high), len(low))
    out = []
    for row in range(height, 0, -1):
        cells = "".join(EIGHTHS[min(max(round(8 * (c / top * height - (row - 1))), 0), 8)] for c in columns)
        out.append(f"{(high if row == height else '').rjust(left)} |{cells}".rstrip())
    out.append(f"{low.rjust(left)} +{'-' * width}")
    out.append(" " * (left + 2) + _phase_line(phases, len(totals), width))
    at = f": {lines[peak]}" if lines else ""
    return "\n".join([*out, f"peak {byte_text(totals[peak])} in line {peak}{at}"])


def _phase_line(phases: Sequence[str], count: int, width: int) -> str:
    """The names of phases at the columns where they begin, shortened to fit."""
    out = ""
    for name, start, end in phase_runs(phases):
        at, until = width * start // count, width * end // count
        room = until - at
        out = out.ljust(at)[:at] + (name if len(name) < room else name[: max(room - 1, min(room, 1))])
    return out


def timeline(timeline: Any, *, width: int = 72) -> str:
    """Show a step's lanes as rows of letters, one per equal part of the step.

    Args:
        timeline: of `lowered.timeline(hardware)`.
        width: in characters.

    Raises:
        SpecError: something else.
    """
    lanes, seconds = busy_lanes(check(timeline)), timeline.step_seconds
    left = max(map(len, lanes), default=0)
    out, used = [headline(timeline)], dict[str, None]()
    for lane in lanes:
        spans = [s for s in timeline.spans if s.lane == lane]
        used |= dict.fromkeys(map(span_name, spans))
        out.append(f"{lane.ljust(left)} |{_lane(spans, seconds, width)}|")
    scale, unit = time_unit(seconds)
    out.append(f"{' ' * left}  0{f'{digits(seconds * scale)} {unit}'.rjust(width - 1)}")
    letters = ", ".join(f"{_letter(name)} {name}" for name in used)
    return "\n".join([*out, f"{letters}; small: less than half of the time, ·: nothing"])


def _lane(spans: Iterable[Any], longest: float, width: int) -> str:
    """One letter per part of a lane: the work that takes most of that part."""
    parts: list[dict[str, float]] = [{} for _ in range(width)]
    each = longest / width or 1.0
    for span in spans:
        name, last = span_name(span), min(int(span.end / each), width - 1)
        for place in range(min(int(span.start / each), width - 1), last + 1):
            seconds = min(span.end, (place + 1) * each) - max(span.start, place * each)
            parts[place][name] = parts[place].get(name, 0.0) + max(seconds, 0.0)
    out = ""
    for part in parts:
        busy = sum(part.values())
        # Where one part ends and the next begins is rounded.
        letter = _letter(max(part, key=part.__getitem__)) if busy > 1e-6 * each else "·"
        out += letter if busy >= each / 2 else letter.lower()
    return out


def _letter(name: str) -> str:
    return LETTERS.get(name, name[:1].upper())


def _cut(items: list[Any], most: int, gap: Any = "…") -> list[Any]:
    """A list shortened to its beginning and its end."""
    return items if len(items) <= most else [*items[: most - 3], gap, *items[-2:]]


def _bar(share: float, width: int) -> str:
    """A bar of that share of a width, to an eighth of a character."""
    full, rest = divmod(round(share * width * 8), 8)
    bar = PARTS[8] * full + (PARTS[rest] if rest else "")
    return bar or (PARTS[1] if share else "")


def _columns(rows: Sequence[Sequence[str]], how: Sequence[Any]) -> list[str]:
    """Cells side by side, each column aligned one way."""
    wide = [max(len(row[i]) for row in rows) for i in range(len(how))] if rows else []
    return ["  ".join(f(c, w) for f, c, w in zip(how, row, wide, strict=True)).rstrip() for row in rows]
