"""Pictures: bytes by level and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fnshard.plot.canvas import COLOURS


def bars(levels: Mapping[str, Sequence[Mapping[str, int]]], worlds: Sequence[str], path: Path) -> None:
    """A group of bars for each number of ranks, a bar for each level: at rest, and above it the peak.

    Args:
        levels: by name, for each of `worlds` "resident_bytes" and "peak_bytes".
        path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(levels)
    for place, (name, found) in enumerate(levels.items()):
        at = [i + (place - (len(levels) - 1) / 2) * width for i in range(len(worlds))]
        rest = [each["resident_bytes"] / 1e9 for each in found]
        peak = [each["peak_bytes"] / 1e9 for each in found]
        axes.bar(at, peak, 0.92 * width, color=COLOURS[place], alpha=0.35)
        axes.bar(at, rest, 0.92 * width, color=COLOURS[place], label=name)
    axes.set_xticks(range(len(worlds)), worlds)
    axes.set(xlabel="ranks", ylabel="GB on each (pale: at the peak)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
