"""Text: the pictures of `fnshard.plot` in characters, for a terminal; each function returns a string.

>>> import torch, fnshard as fs
>>> mesh = fs.make_mesh(shard=4, abstract=True)
>>> params = {"embed.w": torch.ones(6, 4), "layers.0.w": torch.ones(4, 4), "layers.1.w": torch.ones(4, 4)}
>>> specs = fs.presets.full_shard(params, mesh)
>>> print(leaf(specs["embed.w"], mesh))
[6, 4] on (shard=4)
storage, gradient, optimizer: P(None, 'shard')
        0:1   1:2   2:3   3:4
      +-----+-----+-----+-----+
0:6   | 0   | 1   | 2   | 3   |
      +-----+-----+-----+-----+
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
from fnshard.plot.blocks import Grid, grid_of, layouts_of, mesh_rows, padding_text
from fnshard.plot.leaves import leaves_of, together
from fnshard.plot.scales import byte_text, byte_unit, digits, ranks_text, time_unit
from fnshard.plot.steps import (
    busy_lanes,
    check,
    headline,
    memory_series,
    phase_runs,
    totals_of,
    traffic_rows,
    what,
)

EIGHTHS = " ▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉█"
MOST_ROWS, MOST_COLUMNS = 16, 12  # of blocks; between the first and the last the rest is left out
LETTERS = {
    "forward": "F", "backward": "B", "update": "U", "packing and the rest": "P", "gather": "G",
    "reduce scatter": "R", "all reduce": "A", "publish": "W", "reduce scalars": "S", "to device": "I",
    "to host": "O", "exchange": "X", "aggregate buffers": "M",
}  # fmt: skip


def mesh(mesh: Mesh) -> str:
    """Show a mesh's ranks on its axes, the last axis across.

    >>> from fnshard import make_mesh
    >>> from fnshard.plot import text
    >>> print(text.mesh(make_mesh(replicate=2, shard=4, abstract=True)))
    (replicate=2, shard=4): 8 ranks, the batch is split over replicate, shard
    replicate 0  0 1 2 3
    replicate 1  4 5 6 7
    """
    laid = mesh_rows(mesh)
    wide = len(str(mesh.size - 1))
    rows = [
        (name, " ".join(r.rjust(wide) for r in _cut([str(rank) for rank in row], 2 * MOST_ROWS)))
        for name, row in laid
    ]
    label = max(len(name) for name, _ in rows)
    title = f"{mesh}: {mesh.size:,} rank{'s' if mesh.size > 1 else ''}"
    title += f", the batch is split over {', '.join(mesh.data_axes) or 'no axis'}"
    return "\n".join([title, *(f"{n.ljust(label)}  {r}" for n, r in _cut(rows, 2 * MOST_ROWS, ("⋮", "")))])


def leaf(spec: LayoutSpec | P, mesh: Mesh, *, shape: Sequence[int] | None = None) -> str:
    """Show which rank holds which rows and columns of a leaf: its storage, gradient and optimizer state.

    >>> from fnshard import P, make_mesh
    >>> from fnshard.plot import text
    >>> print(text.leaf(P("shard"), make_mesh(replicate=2, shard=4, abstract=True), shape=(3,)))
    [3] on (replicate=2, shard=4)
    layout: P('shard')
          +------+
    0:1   | 0, 4 |
          +------+
    1:2   | 1, 5 |
          +------+
    2:3   | 2, 6 |
          +------+
    -     | 3, 7 |
          +------+
    padding: 1 of 4 rows; 2 of 8 ranks hold nothing else

    Raises:
        SpecError: no layout, no shape, or they do not fit each other and the mesh.
    """
    layouts, full = layouts_of(spec, shape)
    lines = [f"{list(full)} on {mesh}"]
    for layout, fields in layouts.items():
        grid = grid_of(layout, full, mesh)
        lines += [f"{fields}: {layout!r}", *_table(grid), *filter(None, [padding_text(grid)])]
        lines += [f"dim {d} is cut too: the ranks of a block hold pieces of it" for d in grid.hidden]
    return "\n".join(lines)


def _table(grid: Grid) -> list[str]:
    """The lines of a grid with borders."""
    down, across = (_cut(list(range(len(s))), n, -1) for s, n in (
        (grid.rows, MOST_ROWS), (grid.columns, MOST_COLUMNS)))  # fmt: skip
    cells = [["⋮" if i < 0 else "…" if j < 0 else ranks_text(grid.ranks[i, j]) for j in across] for i in down]
    heads = ["…" if j < 0 else _span(grid.columns[j]) for j in across]
    sides = ["⋮" if i < 0 else _span(grid.rows[i]) for i in down]
    wide = [max(len(row[k]) for row in [heads, *cells]) for k in range(len(across))]
    left = max(5, *map(len, sides)) + 1
    rule = " " * left + "+" + "+".join("-" * (w + 2) for w in wide) + "+"
    lines = []
    if len(grid.columns) > 1:
        joined = "  ".join(h.ljust(w + 1) for h, w in zip(heads, wide, strict=True))
        lines.append(" " * (left + 2) + joined.rstrip())
    lines.append(rule)
    for side, row in zip(sides, cells, strict=True):
        joined = "|".join(f" {c.ljust(w)} " for c, w in zip(row, wide, strict=True))
        lines += [f"{side.ljust(left)}|{joined}|", rule]
    return lines


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}:{span[1]}" if span[0] < span[1] else "-"


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


def traffic(comm: Any, *, width: int = 32) -> str:
    """Show the bytes that one rank sends to others in a step, by collective, then those of transfers.

    >>> from fnshard.plot import text
    >>> print(text.traffic({"gather": {"sent_bytes": 4e9, "count": 2}, "all_reduce": {"sent_bytes": 1e9}}))
    gather        4 GB, 2 ×  ████████████████████████████████
    all reduce    1 GB, 0 ×  ████████
    """
    rows = traffic_rows(comm)
    most = max((size for _, size, _ in rows), default=0)
    cells = [
        (verb.replace("_", " "), byte_text(size), f"{count} ×", _bar(size / most if most else 0.0, width))
        for verb, size, count in rows
    ]
    texts = [(f"{name}  ", f"{size}, {count}", bar) for name, size, count, bar in cells]
    return "\n".join(_columns(texts, (str.ljust, str.rjust, str.ljust))) or "nothing is sent"


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
    totals, lines = totals_of(series), _lines_of(memory)
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
        cells = "".join(_eighth(8 * (c / top * height - (row - 1)), EIGHTHS) for c in columns)
        out.append(f"{(high if row == height else '').rjust(left)} |{cells}".rstrip())
    out.append(f"{low.rjust(left)} +{'-' * width}")
    out.append(" " * (left + 2) + _phase_line(phases, len(totals), width))
    at = f": {lines[peak]}" if lines else ""
    return "\n".join([*out, f"peak {byte_text(totals[peak])} in line {peak}{at}"])


def _lines_of(memory: Any) -> Sequence[str]:
    memory = memory.memory_timeline() if hasattr(memory, "memory_timeline") else memory
    return (memory.as_dict() if hasattr(memory, "as_dict") else memory).get("lines", ())


def _phase_line(phases: Sequence[str], count: int, width: int) -> str:
    """The names of phases at the columns where they begin, shortened to fit."""
    out = ""
    for name, start, end in phase_runs(phases):
        at, until = width * start // count, width * end // count
        room = until - at
        out = out.ljust(at)[:at] + (name if len(name) < room else name[: max(room - 1, min(room, 1))])
    return out


def timeline(timeline: Any, *, measured: Any = None, width: int = 72) -> str:
    """Show a step's lanes as rows of letters, one per equal part of the step; predicted above measured.

    Args:
        timeline: of `lowered.timeline(hardware)`.
        measured: the same step as it ran, on the same axis of time.
        width: in characters.

    Raises:
        SpecError: something else.
    """
    shown = {"": check(timeline)} if measured is None else {"predicted: ": timeline, "measured: ": measured}
    longest = max(check(each).step_seconds for each in shown.values())
    left = max((len(lane) for each in shown.values() for lane in busy_lanes(each)), default=0)
    out, used = [], dict[str, None]()
    for name, each in shown.items():
        out.append(f"{name}{headline(each)}")
        for lane in busy_lanes(each):
            row = _lane([s for s in each.spans if s.lane == lane], longest, width)
            used |= dict.fromkeys(what(s) for s in each.spans if s.lane == lane)
            out.append(f"{lane.ljust(left)} |{row}|")
    scale, unit = time_unit(longest)
    out.append(f"{' ' * left}  0{f'{digits(longest * scale)} {unit}'.rjust(width - 1)}")
    letters = ", ".join(f"{_letter(name)} {name}" for name in used)
    return "\n".join([*out, f"{letters}; small: less than half of the time, ·: nothing"])


def _lane(spans: Iterable[Any], longest: float, width: int) -> str:
    """One letter per part of a lane: the work that takes most of that part."""
    parts: list[dict[str, float]] = [{} for _ in range(width)]
    each = longest / width or 1.0
    for span in spans:
        name, last = what(span), min(int(span.end / each), width - 1)
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


# ------------------------------------------------------------------ characters


def _cut(items: list[Any], most: int, gap: Any = "…") -> list[Any]:
    """A list shortened to its beginning and its end."""
    return items if len(items) <= most else [*items[: most - 3], gap, *items[-2:]]


def _eighth(amount: float, signs: str) -> str:
    return signs[min(max(round(amount), 0), 8)]


def _bar(share: float, width: int) -> str:
    """A bar of that share of a width, to an eighth of a character."""
    full, rest = divmod(round(share * width * 8), 8)
    bar = PARTS[8] * full + (PARTS[rest] if rest else "")
    return bar or (PARTS[1] if share else "")


def _columns(rows: Sequence[Sequence[str]], how: Sequence[Any]) -> list[str]:
    """Cells side by side, each column aligned one way."""
    wide = [max(len(row[i]) for row in rows) for i in range(len(how))] if rows else []
    return ["  ".join(f(c, w) for f, c, w in zip(how, row, wide, strict=True)).rstrip() for row in rows]
