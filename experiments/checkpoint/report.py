"""Tables of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def throughput(ranks: int, found: dict[str, Any]) -> str:
    """MB/s of state and the median of paired ratios: more than 1 is faster than DCP."""
    size = found["bytes"] / 1e6
    lines = [
        f"{ranks} rank(s), {found['leaves']} leaves, {size:.0f} MB of state",
        "| | fnshard MB/s | DCP MB/s | fnshard / DCP, median of pairs | quartiles |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, seconds in found["seconds"].items():
        ours, theirs = seconds["fnshard"], seconds["dcp"]
        rates = [size / statistics.median(each) for each in (ours, theirs)]
        low, middle, high = quartiles([t / o for o, t in zip(ours, theirs, strict=True)])
        shown = f"{rates[0]:.0f} | {rates[1]:.0f} | {middle:.2f} | {low:.2f} to {high:.2f}"
        lines.append(f"| {kind} | {shown} |")
    return "\n".join(lines)


def training(ranks: int, found: dict[str, Any]) -> str:
    """What a save costs a window of steps, by the wall clock and in CPU time."""
    windows, steps, saves = found["windows"], found["steps"], found["saves"]
    one = {clock: statistics.median(windows["none"][clock]) / steps for clock in ("wall", "cpu")}
    lines = [
        f"{ranks} rank(s), {found['bytes'] / 1e6:.0f} MB of state, a save every {found['every']} steps",
        f"a step without saves: {1e3 * one['wall']:.0f} ms, {1e3 * one['cpu']:.0f} ms of CPU on all ranks",
        "| | clock | windows, with / without | quartiles | ms a save | 10% of a step from every |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for kind in ("async", "sync"):
        for clock in ("wall", "cpu"):
            pairs = list(zip(windows["none"][clock], windows[kind][clock], strict=True))
            low, ratio, high = quartiles([with_ / without for without, with_ in pairs])
            cost = statistics.median([with_ - without for without, with_ in pairs]) / saves
            shown = f"{ratio:.3f} | {low:.3f} to {high:.3f} | {1e3 * cost:.0f}"
            lines.append(
                f"| {kind} | {clock} | {shown} | {max(1, math.ceil(10 * cost / one[clock]))} steps |"
            )
    inside, waited = (statistics.median(windows["async"][n]) for n in ("inside", "waited"))
    lines.append(
        f"save_async itself takes {1e3 * inside / saves:.0f} ms; {1e3 * waited:.0f} ms were waited at the "
        "end of a window"
    )
    return "\n".join(lines)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))
