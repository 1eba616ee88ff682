"""Tables of what was measured."""

from __future__ import annotations

import math
import statistics
from typing import Any

from experiments.tables import markdown, quartiles


def throughput(ranks: int, found: dict[str, Any]) -> str:
    """MB/s of state and the median of paired ratios: more than 1 is faster than DCP."""
    size = found["bytes"] / 1e6
    rows = [["", "fnshard MB/s", "DCP MB/s", "fnshard / DCP, median of pairs", "quartiles"]]
    for kind, seconds in found["seconds"].items():
        ours, theirs = seconds["fnshard"], seconds["dcp"]
        rates = [size / statistics.median(each) for each in (ours, theirs)]
        low, middle, high = quartiles([t / o for o, t in zip(ours, theirs, strict=True)])
        rows.append([kind, *(f"{rate:.0f}" for rate in rates), f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    head = f"{ranks} rank(s), {found['leaves']} leaves, {size:.0f} MB of state"
    return f"{head}\n{markdown(rows)}"


def training(ranks: int, found: dict[str, Any]) -> str:
    """What a save costs a window of steps, by the wall clock and in CPU time."""
    windows, steps, saves = found["windows"], found["steps"], found["saves"]
    one = {clock: statistics.median(windows["none"][clock]) / steps for clock in ("wall", "cpu")}
    lines = [
        f"{ranks} rank(s), {found['bytes'] / 1e6:.0f} MB of state, a save every {found['every']} steps",
        f"a step without saves: {1e3 * one['wall']:.0f} ms, {1e3 * one['cpu']:.0f} ms of CPU on all ranks",
    ]
    rows = [["", "clock", "windows, with / without", "quartiles", "ms a save", "10% of a step from every"]]
    for kind in ("async", "sync"):
        for clock in ("wall", "cpu"):
            pairs = list(zip(windows["none"][clock], windows[kind][clock], strict=True))
            low, ratio, high = quartiles([with_ / without for without, with_ in pairs])
            cost = statistics.median([with_ - without for without, with_ in pairs]) / saves
            most = max(1, math.ceil(10 * cost / one[clock]))
            shown = f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", f"{1e3 * cost:.0f}", f"{most} steps"
            rows.append([kind, clock, *shown])
    inside, waited = (statistics.median(windows["async"][n]) for n in ("inside", "waited"))
    lines += [markdown(rows, left=2)]
    lines.append(
        f"save_async itself takes {1e3 * inside / saves:.0f} ms; {1e3 * waited:.0f} ms were waited at the "
        "end of a window"
    )
    return "\n".join(lines)
