"""Draw the pictures of `fnshard.plot` in characters, for a terminal; each function returns a string.

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

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fnshard.compiler.ir.program import short_dtype
from fnshard.errors import SpecError
from fnshard.errors import leaves as count_of
from fnshard.layout.partition import P, block_shape, boxes
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, check_specs
from fnshard.mesh import Mesh
from fnshard.plot.pictures import (
    check_timeline,
    headline,
    memory_series,
    phase_runs,
    span_name,
    spans_by_lane,
    stages_of,
    totals_of,
)
from fnshard.plot.scales import byte_text, byte_unit, digits, ranks_text, time_unit

__all__ = ["leaf", "memory", "stages", "timeline", "tree"]

FIELDS = ("storage", "gradient", "optimizer")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
EIGHTHS = " ▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉█"
MOST_ROWS = 16  # the most blocks that are shown; of more, those in the middle are left out
LETTERS = {
    "forward": "F", "backward": "B", "update": "U", "packing and the rest": "P", "gather": "G",
    "reduce scatter": "R", "all reduce": "A", "publish": "W", "reduce scalars": "S", "to device": "I",
    "to host": "O", "exchange": "X", "send": ">", "aggregate buffers": "M", "overlapped update": "U",
}  # fmt: skip


def leaf(spec: LayoutSpec | P, mesh: Mesh, *, shape: Sequence[int] | None = None) -> str:
    """Show which ranks hold which block of a leaf, in its storage, gradient, optimizer and compute layouts.

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
        SpecError: `spec` is not a layout, no shape is known, or they do not fit each other and the mesh.
    """
    layouts, full = layouts_of(spec, shape)
    lines = [f"{list(full)} on {mesh}"]
    for layout, fields in layouts.items():
        blocks = blocks_of(layout, full, mesh)
        rows = [(f"  {block}", f"ranks {ranks_text(ranks)}") for block, ranks in blocks.items()]
        lines.append(f"{fields}: {layout!r}")
        if len(rows) > MOST_ROWS:
            rows[MOST_ROWS - 3 : -2] = [("  ⋮", "")]
        lines += _align_columns(rows, (str.ljust, str.ljust))
    return "\n".join(lines)


def tree(specs: Any, mesh: Mesh, *, params: Any = None, width: int = 32) -> str:
    """Show a tree's layout by bytes; leaves whose paths differ in numbers alone share a line.

    Args:
        specs: a tree of LayoutSpecs.
        mesh: the mesh, which may be abstract.
        params: the tree of parameters, for specs that were written by hand and know no shapes yet.
        width: the width of the longest bar, in characters.

    Raises:
        SpecError: specs know no shapes, or do not fit the mesh.
    """
    leaves = leaves_of(specs, mesh, params)
    full, on_rank = sum(leaf.bytes for leaf in leaves), sum(leaf.mine for leaf in leaves)

    # Each row has a count of alike leaves, their name, spec and bytes, and a bar.
    rows = join_alike(leaves)
    most = max((row.bytes for row in rows), default=0)
    counts = [f"{row.count} × " if row.count > 1 else "" for row in rows]
    count_width = max(map(len, counts), default=0)
    cells = []
    for row, count in zip(rows, counts, strict=True):
        name = f"{count.rjust(count_width)}{row.path} {list(row.shape)}"
        bar = _draw_bar(row.bytes / most if most else 0.0, width)
        cells.append((name, row.label, byte_text(row.bytes), bar))

    title = f"{count_of(len(leaves))}, {byte_text(full)} stored; {byte_text(on_rank)} on one rank of {mesh}"
    return "\n".join([title, *_align_columns(cells, (str.ljust, str.ljust, str.rjust, str.ljust))])


def memory(memory: Any, *, width: int = 72, height: int = 8) -> str:
    """Show the bytes on one rank's device over the schedule, with phases and the peak.

    Args:
        memory: a `Lowered`, its `memory_timeline()`, or that as a dict, as `fs.plot.memory` takes it.
        width, height: the size in characters.

    >>> from fnshard.plot import text
    >>> steps = {"lines": ["forward a", "forward b", "backward c", "update d"], "weights": [1, 2, 4, 1]}
    >>> print(text.memory(steps, width=4, height=2))
    4 B |  █
        |▄██▄
    0 B +----
         f bu
    peak 4 B in line 2: backward c
    """
    lines, series = memory_series(memory)
    totals = totals_of(series)
    if not totals:
        return "nothing runs"

    # A column shows the largest of the instructions that fall into it.
    count = len(totals)
    peak = max(range(count), key=totals.__getitem__)
    top, width = totals[peak] or 1, min(width, count)
    columns = [max(totals[count * i // width : max(count * (i + 1) // width, 1)]) for i in range(width)]
    scale, unit = byte_unit(top)
    high, low = f"{digits(top * scale)} {unit}", f"0 {unit}"
    left = max(len(high), len(low))

    # Draw rows from the top; a cell is full, empty, or so many eighths.
    out = []
    for row in range(height, 0, -1):
        cells = ""
        for column in columns:
            eighths = round(8 * (column / top * height - (row - 1)))
            cells += EIGHTHS[min(max(eighths, 0), 8)]
        out.append(f"{(high if row == height else '').rjust(left)} |{cells}".rstrip())
    out.append(f"{low.rjust(left)} +{'-' * width}")
    out.append(" " * (left + 2) + _write_phases(lines, count, width))
    peak_line = f": {lines[peak]}" if lines else ""
    return "\n".join([*out, f"peak {byte_text(totals[peak])} in line {peak}{peak_line}"])


def _write_phases(lines: Sequence[str], count: int, width: int) -> str:
    """Return the names of phases at the columns where they begin, shortened to fit."""
    text = ""
    for name, start, end in phase_runs(lines):
        column = width * start // count
        room = width * end // count - column
        # A space follows each name, unless there is room for one letter alone.
        if len(name) >= room:
            name = name[: max(room - 1, min(room, 1))]
        text = text.ljust(column)[:column] + name
    return text


def timeline(timeline: Any, *, width: int = 72) -> str:
    """Show a step's lanes as rows of letters, one per equal part of the step.

    Args:
        timeline: what `lowered.timeline(hardware)` returns.
        width: the width in characters.

    Raises:
        SpecError: the argument is not a `Timeline`.
    """
    lanes = spans_by_lane(check_timeline(timeline))
    seconds = timeline.step_seconds
    left = max(map(len, lanes), default=0)
    out = [headline(timeline)]
    used: dict[str, None] = {}  # the names that the legend explains, in order
    for lane, spans in lanes.items():
        used |= dict.fromkeys(map(span_name, spans))
        out.append(f"{lane.ljust(left)} |{_draw_lane(spans, seconds, width)}|")
    scale, unit = time_unit(seconds)
    out.append(f"{' ' * left}  0{f'{digits(seconds * scale)} {unit}'.rjust(width - 1)}")
    letters = ", ".join(f"{_choose_letter(name)} {name}" for name in used)
    return "\n".join([*out, f"{letters}; small: less than half of the time, ·: nothing"])


def stages(timeline: Any, *, width: int = 72) -> str:
    """Show the stages of a pipeline, a row each: forward and backward, and below it what is sent.

    Args:
        timeline: what `lowered.timeline(hardware)` returns for a step on a mesh with a pipeline.
        width: the width in characters.

    Raises:
        SpecError: the argument is not a `Timeline`, or the step has one stage.
    """
    shown, seconds = stages_of(timeline), timeline.step_seconds
    left = len(f"stage {len(shown) - 1}")
    out = [f"{len(shown)} stages, bubble {timeline.bubble:.1%}: the share of the step in which they wait"]
    for number, stage in enumerate(shown):
        tasks = [span for span in stage.spans if span.verb in ("run", "update")]
        sends = [span for span in stage.spans if span.verb == "send"]
        name = f"stage {number}".ljust(left)
        out.append(f"{name} |{_draw_lane(tasks, seconds, width)}| {stage.bubble:.1%} idle")
        out.append(f"{'sends'.rjust(left)} |{_draw_lane(sends, seconds, width)}|")
    scale, unit = time_unit(seconds)
    out.append(f"{' ' * left}  0{f'{digits(seconds * scale)} {unit}'.rjust(width - 1)}")
    return "\n".join([*out, "F forward, B backward, U update, > sent; small: less than half of the time"])


def _draw_lane(spans: Iterable[Any], longest: float, width: int) -> str:
    """Return one letter per part of a lane: that of the work that takes most of the part."""
    # Add up, for each part, the seconds of each kind of work.
    parts: list[dict[str, float]] = [{} for _ in range(width)]
    part_seconds = longest / width or 1.0
    for span in spans:
        name = span_name(span)
        first = min(int(span.start / part_seconds), width - 1)
        last = min(int(span.end / part_seconds), width - 1)
        for i in range(first, last + 1):
            seconds = min(span.end, (i + 1) * part_seconds) - max(span.start, i * part_seconds)
            parts[i][name] = parts[i].get(name, 0.0) + max(seconds, 0.0)

    # Write a small letter where work takes less than half of the part.
    text = ""
    for part in parts:
        busy = sum(part.values())
        # A span that ends with a part may, by rounding, reach a little into the next one.
        letter = _choose_letter(max(part, key=part.__getitem__)) if busy > 1e-6 * part_seconds else "·"
        text += letter if busy >= part_seconds / 2 else letter.lower()
    return text


def _choose_letter(name: str) -> str:
    """Return the letter of a kind of work."""
    return LETTERS.get(name, name[:1].upper())


def _draw_bar(share: float, width: int) -> str:
    """Return a bar of that share of a width, to an eighth of a character; a share above 0 is always seen."""
    full, eighths = divmod(round(share * width * 8), 8)
    bar = PARTS[8] * full
    if eighths:
        bar += PARTS[eighths]
    return bar or (PARTS[1] if share else "")


def _align_columns(rows: Sequence[Sequence[str]], aligns: Sequence[Any]) -> list[str]:
    """Return each row's cells side by side; `aligns` has a function for each column, such as `str.ljust`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


# ------------------------------------------------------------------ layouts
def blocks_of(layout: P, shape: Sequence[int], mesh: Mesh) -> dict[str, list[int]]:
    """Return the ranks that hold each block of a leaf, by the text of the block's slices, or "padding".

    >>> from fnshard.mesh import make_mesh
    >>> blocks_of(P("shard"), (3,), make_mesh(replicate=2, shard=2, abstract=True))
    {'[0:2]': [0, 2], '[2:3]': [1, 3]}
    """
    wrong = [f"it has no axis {axis!r}" for axis in layout.axes if axis not in mesh.names]
    if len(layout.parts) > len(shape):
        wrong.append(f"{layout!r} names {len(layout.parts)} dims, the leaf {list(shape)} has {len(shape)}")
    if wrong:
        raise SpecError(f"{layout!r} does not fit mesh {mesh}:", wrong, "fs.match_specs checks both.")
    ranks: dict[str, list[int]] = {}
    for rank in range(mesh.size):
        for full, _ in boxes(shape, layout, mesh, mesh.coordinate(rank)):
            is_empty = any(each.start >= each.stop for each in full)
            text = f"[{', '.join(f'{each.start}:{each.stop}' for each in full)}]"
            ranks.setdefault("padding" if is_empty else text, []).append(rank)
    return ranks


def layouts_of(spec: LayoutSpec | P, shape: Sequence[int] | None) -> tuple[dict[P, str], tuple[int, ...]]:
    """Return a spec's layouts, with the names of the fields that have each, and the leaf's shape.

    Raises:
        SpecError: `spec` is not a layout, or no shape is known.
    """
    if not isinstance(spec, LayoutSpec | P):
        raise SpecError(
            f"a leaf's layout is a LayoutSpec or a P, not {type(spec).__name__}.",
            fix='pass one leaf of the spec tree, such as specs["layers.0.attn.wq.weight"].',
        )
    full = getattr(spec, "shape", None) if shape is None else shape
    if full is None:
        raise SpecError(
            f"{spec!r} knows no shape.",
            fix="shape=leaf.shape; or a spec of fs.match_specs or a preset, which know theirs.",
        )
    if isinstance(spec, P):
        return {spec: "layout"}, tuple(full)

    named: dict[P, list[str]] = {}
    for field in FIELDS if spec.trainable is not False else FIELDS[:1]:
        value = getattr(spec, field)
        named.setdefault(spec.storage if value is None else value, []).append(field)
    if spec.compute.axes:
        named.setdefault(spec.compute, []).append("compute")
    return {layout: ", ".join(fields) for layout, fields in named.items()}, tuple(full)


@dataclass
class LeafBytes:
    """One leaf, or `count` leaves whose paths differ in numbers alone.

    Args:
        label: the spec in a few words.
        bytes: what the whole leaf takes.
        mine: what one rank stores of it, padding included.
    """

    path: str
    shape: tuple[int, ...]
    label: str
    bytes: int = 0
    mine: int = 0
    count: int = 0


def leaves_of(specs: Any, mesh: Mesh, params: Any = None) -> list[LeafBytes]:
    """Return all stored leaves of a spec tree, with a coded leaf's parts in its place.

    Args:
        specs, mesh, params: as for `tree`.
    """
    resolved = ResolvedSpecs.of(specs)
    if params is not None:
        resolved = resolved.resolve(params)
    if not resolved.complete:
        lines = [f"{leaf} knows no shape" for leaf in resolved.incomplete]
        raise SpecError("specs were written by hand:", lines, "pass params=, or fs.match_specs.")
    check_specs(resolved.stored, mesh)
    return [
        LeafBytes(
            path,
            spec.shape,
            label_of(spec),
            math.prod(spec.shape) * spec.storage_dtype.itemsize,
            math.prod(block_shape(spec.shape, spec.storage, mesh)) * spec.storage_dtype.itemsize,
            1,
        )
        for path, spec in resolved.stored.items()
    ]


def label_of(spec: LayoutSpec) -> str:
    """Return a spec in a few words, without fields that have their defaults.

    >>> from fnshard.layout.spec import P
    >>> import torch
    >>> spec = LayoutSpec(P(), gradient=P("shard"), optimizer=P("shard"), compute_dtype=torch.bfloat16)
    >>> label_of(spec.resolve(torch.ones(4), "unit"))
    "P() f32 → bf16, gradient and optimizer P('shard')"
    >>> label_of(LayoutSpec(P(("tensor", "shard")), compute=P("tensor")).resolve(torch.ones(4), "unit"))
    "P(('tensor', 'shard')) f32, computed P('tensor')"
    """
    stored, computed = short_dtype(spec.storage_dtype), short_dtype(spec.compute_dtype)
    parts = [f"{spec.storage!r} {stored}" + ("" if stored == computed else f" → {computed}")]

    if not spec.trainable:
        parts.append("frozen")
    elif spec.gradient == spec.optimizer != spec.storage:
        parts.append(f"gradient and optimizer {spec.gradient!r}")
    else:
        other = {"gradient": spec.gradient, "optimizer": spec.optimizer}
        parts += [f"{name} {layout!r}" for name, layout in other.items() if layout != spec.storage]

    if spec.compute.axes:
        parts.append(f"computed {spec.compute!r}")
    if spec.storage.axes and not spec.reshard:
        parts.append("kept gathered")
    if spec.memory != "device":
        parts.append(f"on the {spec.memory}")
    if spec.trainable and spec.optimizer_memory != "device":
        streamed = " (streamed)" if spec.updated_on == "device" else ""
        parts.append(f"optimizer on the {spec.optimizer_memory}{streamed}")
    return ", ".join(parts)


def join_alike(leaves: Sequence[LeafBytes]) -> list[LeafBytes]:
    """Join leaves whose paths differ in numbers alone and whose shapes and specs are equal; largest first."""
    joined: dict[tuple[str, tuple[int, ...], str], LeafBytes] = {}
    for leaf in leaves:
        path = NUMBER.sub("*", leaf.path)
        row = joined.setdefault((path, leaf.shape, leaf.label), LeafBytes(path, leaf.shape, leaf.label))
        row.bytes += leaf.bytes
        row.mine += leaf.mine
        row.count += 1
    return sorted(joined.values(), key=lambda row: -row.bytes)
