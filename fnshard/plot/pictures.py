"""Pictures: draw a schedule's memory over its instructions, and what runs when, as .png or .svg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnshard.analysis.timeline import Span, Timeline
from fnshard.compiler.schedule.instructions import LANES
from fnshard.errors import MissingExtraError, SpecError
from fnshard.plot.scales import byte_text, byte_unit, time_text, time_unit

# Okabe and Ito's palette, whose colours every kind of colour vision tells apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#999999", "#000000")
PHASES = {"forward": "#0072B2", "backward": "#D55E00", "update": "#009E73"}
REST = "packing and the rest"
LANE_VERBS = {
    "gather": "#56B4E9", "reduce_scatter": "#E69F00", "all_reduce": "#E69F00", "publish": "#F0E442",
    "reduce_scalars": "#CC79A7", "exchange": "#009E73", "to_device": "#56B4E9", "to_host": "#E69F00",
    "aggregate_buffers": "#CC79A7", "overlapped_update": "#009E73",
}  # fmt: skip
TIERS = ("host", "disk")  # categories whose bytes are not on the device


def memory(memory: Any, path: str | Path, *, limit: float | None = None) -> Path:
    """Draw bytes by category over the schedule, stacked, with phases and the peak.

    Args:
        memory: a `Lowered`, its `memory_timeline()`, or that as a dict: bytes at each instruction by
            category, and under "lines" the text of each instruction.
        path: the file of the picture, .png or .svg; its folder is made.
        limit: the device's memory in bytes, drawn as a dashed line.
    """
    lines, series = memory_series(memory)
    totals = totals_of(series)
    count = len(totals)
    scale, unit = byte_unit(max(totals, default=0))
    # Colours are given before empty categories are left out: a category has the same one in every picture.
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    shown = {name: values for name, values in series.items() if any(values)}
    figure, [[axes]] = figure_of(11, 5)
    axes.stackplot(
        range(count),
        [[b * scale for b in values] for values in shown.values()],
        labels=list(shown),
        colors=[colours[name] for name in shown],
        step="post",
        linewidth=0,
    )

    # Mark the peak, and the limit if it is near.
    peak = max(range(count), key=totals.__getitem__, default=0)
    if count:
        axes.plot([peak], [totals[peak] * scale], "v", color="black", clip_on=False)
        axes.annotate(
            f"peak {byte_text(totals[peak])}, line {peak}",
            (peak, totals[peak] * scale),
            xytext=(0, 7),
            textcoords="offset points",
            ha="right" if peak > count / 2 else "left",
        )
    top = max(totals, default=0)
    if limit is not None and limit < 3 * top:  # a limit far above would flatten all else
        axes.axhline(limit * scale, color="black", linewidth=1.2, linestyle="--")
        top = max(top, limit)

    axes.set_ylim(0, 1.2 * top * scale or 1)
    axes.set_xlim(0, max(count - 1, 1))
    for name, start, end in phase_runs(lines):
        if end - start < max(3, len(lines) / 30):  # the name of so short a phase would not fit
            continue
        middle = (start + end) / 2
        axes.text(middle, 0.99, name, transform=axes.get_xaxis_transform(), ha="center", va="top")
        if start:
            axes.axvline(start, color="black", linewidth=0.6, linestyle=":")
    axes.set_xlabel("instruction of the schedule")
    axes.set_ylabel(f"{unit} on one rank")
    axes.set_title("memory of one rank during a step, by what it holds", fontsize=11, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, reverse=True)
    return save(figure, path)


def memory_series(memory: Any) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
    """Return the text of each instruction, and the bytes on the device at each, by category."""
    if hasattr(memory, "memory_timeline"):
        memory = memory.memory_timeline()
    values = memory.as_dict() if hasattr(memory, "as_dict") else dict(memory)
    lines = values.pop("lines", ())
    return lines, {name: list(series) for name, series in values.items() if name not in TIERS}


def totals_of(series: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the bytes of all categories at each instruction."""
    return [sum(values) for values in zip(*series.values(), strict=True)]


def phase_runs(lines: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return each phase with its first instruction and the one after its last.

    Updates within a phase belong to it.
    """
    phases = [line.split(" ", 1)[0].replace(".", " ") for line in lines]
    last_of = {phase: index for index, phase in enumerate(phases)}
    runs: list[tuple[str, int, int]] = []
    for index, phase in enumerate(phases):
        # The phase that runs goes on after this update.
        if runs and phase.startswith("update") and last_of[runs[-1][0]] > index:
            phase = runs[-1][0]
        if runs and runs[-1][0] == phase:
            runs[-1] = (phase, runs[-1][1], index + 1)
        else:
            runs.append((phase, index, index + 1))
    return runs


def timeline(timeline: Timeline, path: str | Path, *, measured: Timeline | None = None) -> Path:
    """Draw a step's lanes as a Gantt chart: what runs when, and where compute waits.

    Args:
        timeline: what `lowered.timeline(hardware)` returns.
        path: the file of the picture, .png or .svg; its folder is made.
        measured: the same step as it ran, drawn below on the same axis of time.

    Raises:
        SpecError: an argument is not a `Timeline`, but a `Lowered`, say, which knows no hardware.
    """
    if measured is None:
        shown = {"": check_timeline(timeline)}
    else:
        shown = {"predicted": check_timeline(timeline), "measured": check_timeline(measured)}
    longest = max(each.step_seconds for each in shown.values())
    scale, unit = time_unit(longest)
    lanes = {name: spans_by_lane(each) for name, each in shown.items()}
    heights = [max(len(rows), 1) for rows in lanes.values()]
    height = 0.9 + sum(0.6 + 0.8 * rows for rows in heights)
    figure, grid = figure_of(11, height, len(shown), sharex=True, height_ratios=heights)
    # After `figure_of`, which says how to install matplotlib where it is missing.
    from matplotlib.patches import Patch

    colours: dict[str, str] = {}
    for axes, (name, each) in zip(grid.flat, shown.items(), strict=True):
        colours |= _draw_lanes(axes, lanes[name], scale, longest)
        axes.set_title(f"{name}: {headline(each)}" if name else headline(each), fontsize=11, loc="left")
    # Axes share their time, and a legend.
    grid.flat[0].set_xlim(0, longest * scale or 1)
    grid.flat[-1].set_xlabel(f"{unit} since the step began")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if handles:
        grid.flat[0].legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False)
    return save(figure, path)


def stages(timeline: Timeline, path: str | Path) -> Path:
    """Draw the stages of a pipeline, a lane each.

    A lane shows which micro-batch runs when, forward and backward, and below that what the stage sends. Its
    name says for which share of the step the stage waits for others.

    Args:
        timeline: what `lowered.timeline(hardware)` returns for a step on a mesh with a pipeline.
        path: the file of the picture, .png or .svg; its folder is made.

    Raises:
        SpecError: the argument is not a `Timeline`, or the step has one stage.
    """
    shown = stages_of(timeline)
    scale, unit = time_unit(timeline.step_seconds)
    figure, [[axes]] = figure_of(11, 1.2 + 0.7 * len(shown))
    # After `figure_of`, which says how to install matplotlib where it is missing.
    from matplotlib.patches import Patch

    # Draw each stage as a row: its tasks, with the numbers of their micro-batches, and below what it sends.
    thin = timeline.step_seconds / 60  # a number would not fit
    colours = PHASES | {"send": COLOURS[7]}
    for row, stage in enumerate(shown):
        for phase, micro, start, end in tasks_of(stage):
            bar = [(start * scale, (end - start) * scale)]
            axes.broken_barh(bar, (row - 0.4, 0.6), facecolors=colours[phase], edgecolors="white")
            if end - start > thin and micro:
                middle = (start + end) / 2 * scale
                axes.text(middle, row - 0.1, micro, ha="center", va="center", color="white", fontsize=7)
        sent = [(s.start * scale, (s.end - s.start) * scale) for s in stage.spans if s.verb == "send"]
        axes.broken_barh(sent, (row + 0.24, 0.14), facecolors=colours["send"])

    axes.set_yticks(range(len(shown)), [f"stage {n}\n{each.bubble:.1%} idle" for n, each in enumerate(shown)])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, timeline.step_seconds * scale or 1)
    axes.set_xlabel(f"{unit} since the step began")
    axes.set_title(f"{headline(timeline)}, bubble {timeline.bubble:.1%}", fontsize=11, loc="left")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False)
    return save(figure, path)


def stages_of(timeline: Any) -> tuple[Timeline, ...]:
    """Return the timelines of a pipeline's stages.

    Raises:
        SpecError: the argument is not a `Timeline`, or the step has one stage.
    """
    if not check_timeline(timeline).stages:
        raise SpecError(
            "this step has one stage: its mesh has no pipeline.",
            fix="fs.plot.timeline draws it; fs.make_mesh(pipeline=2, ...) makes stages.",
        )
    return timeline.stages


def tasks_of(timeline: Timeline) -> list[tuple[str, str, float, float]]:
    """Return what a stage runs one after another: phase, number of the micro-batch, start and end."""
    tasks: list[tuple[str, str, float, float]] = []
    for span in timeline.spans:
        phase, _, micro = span.phase.partition(".")
        if span.verb not in ("run", "update"):
            continue
        if tasks and tasks[-1][:2] == (phase, micro):
            tasks[-1] = phase, micro, tasks[-1][2], span.end
        else:
            tasks.append((phase, micro, span.start, span.end))
    return tasks


def check_timeline(timeline: Any) -> Timeline:
    """Return the argument, if it is a Timeline.

    Raises:
        SpecError: it is not.
    """
    if not hasattr(timeline, "spans"):
        raise SpecError(
            f"fs.plot.timeline draws a Timeline, not {type(timeline).__name__}.",
            fix='pass lowered.timeline(hardware), such as lowered.timeline("h100").',
        )
    return timeline


def spans_by_lane(timeline: Timeline) -> dict[str, list[Span]]:
    """Return the spans of each lane that has any, by the lane's name; each communicator is a lane."""
    lanes: dict[str, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda s: LANES.index(s.lane)):
        lanes.setdefault(span.communicator or span.lane, []).append(span)
    return lanes


def headline(timeline: Timeline) -> str:
    """Return ranks, hardware, step time, MFU and waiting time as one line of text."""
    text = f"{timeline.ranks} × {timeline.hardware}, {time_text(timeline.step_seconds)} a step"
    if timeline.mfu:
        text += f", MFU {timeline.mfu:.0%}"
    exposed = {
        "communication": timeline.exposed_communication_seconds,
        "transfers": timeline.exposed_transfer_seconds,
    }
    waits = [f"{time_text(seconds)} for {what}" for what, seconds in exposed.items() if seconds]
    return f"{text}, compute waits {' and '.join(waits)}" if waits else text


def span_name(span: Span) -> str:
    """Return a span's name in legends: its verb, or the phase of a kernel."""
    if span.lane != "compute":
        return span.verb.replace("_", " ")
    if span.verb == "run":
        return span.phase.split(".")[0]
    return "update" if span.verb == "update" else REST


def _draw_lanes(
    axes: Any, lanes: Mapping[str, Sequence[Span]], scale: float, longest: float
) -> Mapping[str, str]:
    """Draw the bars of all lanes on an axis of `longest` seconds; return the colours by name."""
    colours: dict[str, str] = {}
    thin = longest * scale / 200
    for row, (lane, spans) in enumerate(lanes.items()):
        bars = [(s.start * scale, (s.end - s.start) * scale) for s in spans]
        if lane == "compute":
            faces = [PHASES.get(span_name(s), COLOURS[7]) for s in spans]
        else:
            faces = [LANE_VERBS.get(s.verb, COLOURS[8]) for s in spans]
        colours |= zip(map(span_name, spans), faces, strict=True)

        # White edges tell bars apart. They would hide thin bars, which get an edge of their own colour.
        edges = ["white" if width > thin else face for (_, width), face in zip(bars, faces, strict=True)]
        axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=faces, edgecolors=edges, linewidth=0.4)

    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    return colours


def figure_of(width: float, height: float, rows: int = 1, **grid: Any) -> tuple[Any, Any]:
    """Make a figure of a size in inches, and its axes, [rows, 1]."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "fnshard.plot draws with matplotlib, which is not installed.", fix="pip install fnshard[plot]."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, squeeze=False, **grid)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: str | Path) -> Path:
    """Write a figure as .png or .svg, by the suffix of its path, and create the folder."""
    path = Path(path)
    kind = path.suffix.removeprefix(".")
    if kind not in ("png", "svg"):
        raise SpecError(f"{path.name!r} is no name of a picture.", fix="end it in .png or .svg.")
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date, and with fixed ids, the same picture has the same bytes.
    options = {"metadata": {"Date": None}} if kind == "svg" else {}
    with rc_context({"svg.hashsalt": "fnshard"}):
        # "tight": a title longer than the axes widens the picture, instead of being cut off.
        figure.savefig(path, dpi=130, format=kind, bbox_inches="tight", pad_inches=0.1, **options)
    return path
