"""Plot: pictures of a step on paper, one PNG each: memory over the schedule, its timeline, its traffic.

Needs matplotlib, the extra `plot`; it is imported when something is drawn, and draws without a display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnshard.errors import MissingExtraError, SpecError, report

if TYPE_CHECKING:
    from fnshard.compiler.timeline import Timeline

# Okabe and Ito's palette: apart for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#999999", "#000000")
PHASES = {"forward": "#0072B2", "backward": "#D55E00", "update": "#009E73"}
TIERS = ("host", "disk")  # whose bytes are not on the device
TRANSFERRED = ("to_device", "to_host")  # which go over a rank's own link, not from rank to rank
LANE_VERBS = {
    "gather": "#56B4E9", "reduce_scatter": "#E69F00", "all_reduce": "#E69F00", "publish": "#009E73",
    "reduce_scalars": "#CC79A7", "to_device": "#56B4E9", "to_host": "#E69F00",
}  # fmt: skip


def timeline(timeline: Timeline, path: str | Path) -> Path:
    """A step's lanes as a Gantt picture: what runs when, and where compute stands still.

    Args:
        timeline: of `lowered.timeline(hardware)`.
        path: of the PNG; its folder is made.

    Raises:
        SpecError: something else, such as a `Lowered`, which knows no hardware.
    """
    if not hasattr(timeline, "spans"):
        raise SpecError(
            report(
                f"fs.plot.timeline draws a Timeline, not {type(timeline).__name__}.",
                fix='pass lowered.timeline(hardware), such as lowered.timeline("h100").',
            )
        )
    scale, unit = _time_unit(timeline.step_seconds)
    lanes = [lane for lane, seconds in timeline.busy_seconds.items() if seconds]
    figure, axes = _figure(11, 1.5 + 0.8 * len(lanes))
    colours: dict[str, str] = {}
    for place, lane in enumerate(lanes):
        spans = [s for s in timeline.spans if s.lane == lane]
        bars = [(s.start * scale, (s.end - s.start) * scale) for s in spans]
        labels = [_what(s.lane, s.verb, s.phase) for s in spans]
        faces = [_colour(s.lane, s.verb, s.phase) for s in spans]
        colours |= zip(labels, faces, strict=True)
        # White edges tell bars apart, and would hide thin ones, which need an edge to be seen at all.
        few = len(spans) < 200
        edge = {"edgecolors": "white", "linewidth": 0.4} if few else {"edgecolors": faces, "linewidth": 0.4}
        axes.broken_barh(bars, (place - 0.36, 0.72), facecolors=faces, **edge)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, timeline.step_seconds * scale or 1)
    axes.set_xlabel(f"{unit} since the step began")
    exposed = timeline.exposed_communication_seconds, timeline.exposed_transfer_seconds
    axes.set_title(
        f"{timeline.ranks} × {timeline.hardware}: {timeline.step_seconds * scale:.4g} {unit} a step, "
        f"MFU {timeline.mfu:.0%}, exposed: communication {exposed[0] * scale:.3g} {unit}, "
        f"transfers {exposed[1] * scale:.3g} {unit}"
    )
    _legend(axes, colours)
    return _save(figure, path)


def memory(memory: Any, path: str | Path) -> Path:
    """Bytes by category over the schedule, stacked; phases and the peak are marked.

    Args:
        memory: a `Lowered`, its `memory_timeline()`, or that as a dict: bytes at each instruction by
            category, and under "lines" the text of each instruction.
        path: of the PNG; its folder is made.
    """
    phases, series = memory_series(memory)
    count = len(next(iter(series.values()), ()))
    totals = [sum(values[i] for values in series.values()) for i in range(count)]
    scale, unit = _byte_unit(max(totals, default=0))
    colours = {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)
    }  # of a category, always the same
    shown = {name: values for name, values in series.items() if any(values)}
    figure, axes = _figure(11, 5)
    axes.stackplot(
        range(count),
        [[b * scale for b in values] for values in shown.values()],
        labels=list(shown),
        colors=[colours[name] for name in shown],
        step="post",
        linewidth=0,
    )
    peak = max(range(count), key=totals.__getitem__, default=0)
    if count:
        axes.plot([peak], [totals[peak] * scale], "v", color="black", clip_on=False)
        axes.annotate(
            f"peak {totals[peak] * scale:.4g} {unit}, line {peak}",
            (peak, totals[peak] * scale),
            xytext=(0, 7),
            textcoords="offset points",
            ha="right" if peak > count / 2 else "left",
        )
    axes.set_ylim(0, 1.12 * max(totals, default=0) * scale or 1)
    axes.set_xlim(0, max(count - 1, 1))
    _mark_phases(axes, phases)
    axes.set_xlabel("instruction of the schedule")
    axes.set_ylabel(f"{unit} on one rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, reverse=True)
    return _save(figure, path)


def traffic(comm: Any, path: str | Path) -> Path:
    """Bytes that one rank sends to others, by collective; below them, hatched, those that transfers move
    over its host link.

    Args:
        comm: a `Lowered`, its `comm_analysis()`, or `{verb: {"sent_bytes": b, "count": n}}`; of the
            transfers, "to_device" and "to_host", `bytes` is drawn.
        path: of the PNG; its folder is made.

    Raises:
        SpecError: something else.
    """
    rows = traffic_rows(comm)
    scale, unit = _byte_unit(max((size for _, size, _ in rows), default=0))
    figure, axes = _figure(8, 1.4 + 0.5 * max(len(rows), 1))
    values = [size * scale for _, size, _ in rows]
    colours = [LANE_VERBS.get(name.split()[0], COLOURS[0]) for name, _, _ in rows]
    bars = axes.barh(range(len(rows)), values, color=colours, edgecolor="white")
    for bar, (name, _, _) in zip(bars, rows, strict=True):
        bar.set_hatch("//" if name in TRANSFERRED else None)
    axes.bar_label(
        bars, [f"{v:.4g} {unit}, {n} ×" for v, (_, _, n) in zip(values, rows, strict=True)], padding=4
    )
    axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name, _, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.3)
    hatched = any(name in TRANSFERRED for name, _, _ in rows)
    axes.set_xlabel(
        f"{unit} that one rank sends to others in a step{'; hatched: over its host link' if hatched else ''}"
    )
    return _save(figure, path)


# ------------------------------------------------------------------ what is drawn


def memory_series(memory: Any) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
    """Phases by instruction, and bytes by category and instruction."""
    if hasattr(memory, "memory_timeline"):
        memory = memory.memory_timeline()
    values = memory.as_dict() if hasattr(memory, "as_dict") else dict(memory)
    phases = [line.split(" ", 1)[0] for line in values.pop("lines", ())]
    return phases, {name: list(series) for name, series in values.items() if name not in TIERS}


def traffic_rows(comm: Any) -> list[tuple[str, float, int]]:
    """Verb, bytes and count: collectives by what one rank sends, then transfers by what they move."""
    if hasattr(comm, "comm_analysis"):
        comm = comm.comm_analysis()
    values = comm.as_dict() if hasattr(comm, "as_dict") else comm
    if not isinstance(values, Mapping):
        raise SpecError(
            report(
                f"fs.plot.traffic draws a step's traffic, not {type(comm).__name__}.",
                fix="pass a lowered step, or its lowered.comm_analysis().",
            )
        )
    rows = [
        (verb, float(sums["bytes" if verb in TRANSFERRED else "sent_bytes"]), int(sums.get("count", 0)))
        for verb, sums in values.get("verbs", values).items()
        if isinstance(sums, Mapping)
    ]
    return sorted(rows, key=lambda row: (row[0] in TRANSFERRED, -row[1]))


def _what(lane: str, verb: str, phase: str) -> str:
    if lane != "compute":
        return verb.replace("_", " ")
    phase = phase.split(".")[0]
    return phase if verb == "run" else "update" if verb == "update" else "packing and the rest"


def _colour(lane: str, verb: str, phase: str) -> str:
    if lane != "compute":
        return LANE_VERBS.get(verb, COLOURS[2])
    what = _what(lane, verb, phase)
    return PHASES.get(what, COLOURS[7])


def _mark_phases(axes: Any, phases: Sequence[str]) -> None:
    """A line and a name where the schedule turns from one phase to the next; updates are strewn in."""
    plain = [p.replace(".", " ") for p in phases]
    runs, last, start = [], None, 0
    for index, phase in enumerate([*plain, None]):
        if phase is not None and phase.startswith("update") and any(p == last for p in plain[index:]):
            continue
        if phase != last:
            runs.append((last, start, index))
            last, start = phase, index
    for name, start, end in runs:
        if name is not None and end - start >= max(3, len(plain) / 30):  # or its name would not fit
            axes.text(
                (start + end) / 2, 0.99, name, transform=axes.get_xaxis_transform(), ha="center", va="top"
            )
            if start:
                axes.axvline(start, color="black", linewidth=0.6, linestyle=":")


# ------------------------------------------------------------------ how


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 10 else (1e3, "ms")


def _byte_unit(size: float) -> tuple[float, str]:
    return (1e-9, "GB") if size >= 1e9 else (1e-6, "MB")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            report(
                "fnshard.plot draws with matplotlib, which is not installed.",
                fix="pip install fnshard[plot].",
            )
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if handles:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False)


def _save(figure: Any, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")
    return path
