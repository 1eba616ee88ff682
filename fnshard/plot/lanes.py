"""Lanes: what runs when in a step, predicted and measured, as bars on a common axis of time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnshard.errors import SpecError
from fnshard.plot.canvas import COLOURS, figure_of, legend, save
from fnshard.plot.scales import time_text, time_unit

if TYPE_CHECKING:
    from fnshard.analysis.timeline import Span, Timeline

PHASES = {"forward": "#0072B2", "backward": "#D55E00", "update": "#009E73"}
REST = "packing and the rest"
LANE_VERBS = {
    "gather": "#56B4E9", "reduce_scatter": "#E69F00", "all_reduce": "#E69F00", "publish": "#F0E442",
    "reduce_scalars": "#CC79A7", "to_device": "#56B4E9", "to_host": "#E69F00",
}  # fmt: skip


def timeline(timeline: Timeline, path: str | Path, *, measured: Timeline | None = None) -> Path:
    """Draw a step's lanes as a Gantt chart: what runs when, and where compute waits.

    Args:
        timeline: of `lowered.timeline(hardware)`.
        path: of the picture, .png or .svg; its folder is made.
        measured: the same step as it ran; drawn below, on the same axis of time.

    Raises:
        SpecError: something else, such as a `Lowered`, which knows no hardware.
    """
    shown = {"": check(timeline)} if measured is None else {"predicted": check(timeline)}
    shown |= {} if measured is None else {"measured": check(measured)}
    longest = max(each.step_seconds for each in shown.values())
    scale, unit = time_unit(longest)
    lanes = {name: busy_lanes(each) for name, each in shown.items()}
    heights = [max(len(rows), 1) for rows in lanes.values()]
    figure, grid = figure_of(
        11, 0.9 + sum(0.6 + 0.8 * h for h in heights), len(shown), 1, squeeze=False, sharex=True,
        height_ratios=heights,
    )  # fmt: skip
    colours: dict[str, str] = {}
    for axes, (name, each) in zip(grid.flat, shown.items(), strict=True):
        colours |= _draw(axes, each, lanes[name], scale, longest)
        axes.set_title(f"{name}: {headline(each)}" if name else headline(each), fontsize=11, loc="left")
    grid.flat[0].set_xlim(0, longest * scale or 1)
    grid.flat[-1].set_xlabel(f"{unit} since the step began")
    legend(grid.flat[0], colours)
    return save(figure, path)


def check(timeline: Any) -> Timeline:
    """Return `timeline`.

    Raises:
        SpecError: it is no Timeline.
    """
    if not hasattr(timeline, "spans"):
        raise SpecError(
            f"fs.plot.timeline draws a Timeline, not {type(timeline).__name__}.",
            fix='pass lowered.timeline(hardware), such as lowered.timeline("h100").',
        )
    return timeline


def busy_lanes(timeline: Timeline) -> list[str]:
    """The lanes that have any work."""
    return [lane for lane, seconds in timeline.busy_seconds.items() if seconds]


def headline(timeline: Timeline) -> str:
    """Ranks, hardware, step time, MFU and waiting time in one line."""
    text = f"{timeline.ranks} × {timeline.hardware}, {time_text(timeline.step_seconds)} a step"
    if timeline.mfu:
        text += f", MFU {timeline.mfu:.0%}"
    exposed = {
        "communication": timeline.exposed_communication_seconds,
        "transfers": timeline.exposed_transfer_seconds,
    }
    waits = [f"{time_text(seconds)} for {what}" for what, seconds in exposed.items() if seconds]
    return f"{text}, compute waits {' and '.join(waits)}" if waits else text


def what(span: Span) -> str:
    """The name of a span in legends: its verb, or the phase of a kernel."""
    if span.lane != "compute":
        return span.verb.replace("_", " ")
    phase = span.phase.split(".")[0]
    return phase if span.verb == "run" else "update" if span.verb == "update" else REST


def _colour(span: Span) -> str:
    if span.lane != "compute":
        return LANE_VERBS.get(span.verb, COLOURS[8])
    return PHASES.get(what(span), COLOURS[7])


def _draw(axes: Any, timeline: Timeline, lanes: list[str], scale: float, longest: float) -> Mapping[str, str]:
    """Draw the bars of all lanes on an axis of `longest` seconds; return the colours by name."""
    colours: dict[str, str] = {}
    thin = longest * scale / 200
    for place, lane in enumerate(lanes):
        spans = [s for s in timeline.spans if s.lane == lane]
        bars = [(s.start * scale, (s.end - s.start) * scale) for s in spans]
        faces = [_colour(s) for s in spans]
        colours |= zip(map(what, spans), faces, strict=True)
        # White edges tell bars apart, and would hide thin ones, which need an edge to be seen at all.
        edges = ["white" if width > thin else face for (_, width), face in zip(bars, faces, strict=True)]
        edge = {"edgecolors": edges, "linewidth": 0.4}
        axes.broken_barh(bars, (place - 0.36, 0.72), facecolors=faces, **edge)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    return colours
