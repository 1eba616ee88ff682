"""Charts: runs as the options of ECharts, which draws them in the browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.compare.outcome import Outcome
from experiments.compare.table import name_runs, points
from experiments.lib.metrics import smooth
from fnshard.plot.scales import byte_text

POINTS = 300  # of a curve, at most: each is the mean of the steps around it
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
SPEED = "_per_s"  # the end of the name of a run's speed
MEMORY = {
    "predicted_peak_bytes": "predicted, of a step",
    "measured_peak_bytes": "measured, of the device",
    "process_peak_bytes": "measured, of rank 0's process, Python and torch included",
}


def chart_curves(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return a chart of the goal that runs are judged by: lines in training, marks on held-out data."""
    names, series = label_runs(outcomes), []
    for number, outcome in enumerate(outcomes):
        goal, colour = outcome.goal, COLOURS[number % len(COLOURS)]
        name = names[outcome.folder] if len(outcomes) > 1 else "training"
        held_out = name if len(outcomes) > 1 else "held-out"
        series.append(make_line(name, points(outcome, goal.name), colour))
        marks = make_line(held_out, points(outcome, goal.held_out), colour)
        marks |= {"symbolSize": 7, "showSymbol": True, "lineStyle": {"type": "dashed", "width": 1}}
        series.append(marks)
    return make_chart(series, outcomes[0].goal.label if outcomes else "")


def chart_speed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return a chart of tokens, or rows, a second, by step."""
    names, series, label = label_runs(outcomes), [], ""
    for number, outcome in enumerate(outcomes):
        key = next((name for row in outcome.rows for name in row if name.endswith(SPEED)), "")
        name = names[outcome.folder] if len(outcomes) > 1 else key.replace(SPEED, " a second")
        label = key.replace(SPEED, " a second") or label
        # The first step is left out, since it compiles.
        series.append(make_line(name, points(outcome, key)[1:], COLOURS[number % len(COLOURS)]))
    return make_chart(series, label)


def chart_memory(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return bars of the memory that was predicted for a rank, and of what was measured.

    Args:
        totals: the `totals` of `run.json`.
    """
    return make_bars({text: totals[name] for name, text in MEMORY.items() if name in totals})


def chart_peak(peak: Mapping[str, int]) -> dict[str, Any]:
    """Return bars of the parts of a step's peak, the largest first."""
    sizes = {name: size for name, size in peak.items() if size}
    return make_bars(dict(sorted(sizes.items(), key=lambda item: -item[1])))


def label_runs(outcomes: Sequence[Outcome]) -> dict[Path, str]:
    """Return a name for each run, by its folder, that tells it from the others."""
    return {folder: name or folder.name for folder, name in name_runs(outcomes).items()}


def make_line(name: str, curve: Sequence[tuple[float, float]], colour: str) -> dict[str, Any]:
    """Return a line of a chart, with at most `POINTS` points. Numbers that are not finite are left out."""
    means = smooth(curve, POINTS)[0] if curve else []
    data = [[step, float(f"{value:.6g}")] for step, value in means if math.isfinite(value)]
    return {"name": name, "type": "line", "data": data, "color": colour, "showSymbol": False}


def make_chart(series: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    """Return a chart of lines by step."""
    return {
        "animation": False,
        "grid": {"left": 60, "right": 20, "top": 40, "bottom": 40},
        "legend": {"type": "scroll", "top": 0},
        "tooltip": {"trigger": "axis"},
        "xAxis": {"type": "value", "name": "step", "nameLocation": "middle", "nameGap": 24, "minInterval": 1},
        "yAxis": {"type": "value", "name": label, "scale": True, "nameTextStyle": {"align": "left"}},
        "series": list(series),
    }


def make_bars(sizes: Mapping[str, float]) -> dict[str, Any]:
    """Return a chart of bytes, a bar each, with words beside it."""
    return {
        "animation": False,
        "grid": {"left": 10, "right": 80, "top": 5, "bottom": 5, "containLabel": True},
        "xAxis": {"type": "value", "show": False},
        "yAxis": {"type": "category", "inverse": True, "data": list(sizes), "axisTick": {"show": False}},
        "series": [{
            "type": "bar", "color": COLOURS[0], "barMaxWidth": 16,
            "data": [
                {"value": n, "label": {"show": True, "position": "right", "formatter": byte_text(n)}}
                for n in sizes.values()
            ],
        }],
    }  # fmt: skip
