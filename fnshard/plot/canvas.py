"""Canvas: a figure without a display, its palette, its legend, and how it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnshard.errors import MissingExtraError, SpecError

# Okabe and Ito's palette: apart for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#999999", "#000000")
FORMATS = {".png": "png", ".svg": "svg"}


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Any, Any]:
    """Make a figure of a size in inches, and its axes: one, or an array of them.

    Raises:
        MissingExtraError: no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "fnshard.plot draws with matplotlib, which is not installed.", fix="pip install fnshard[plot]."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, **grid)
    for each in [axes] if rows == columns == 1 and not grid else axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend(axes: Any, colours: Mapping[str, str]) -> None:
    """Draw a legend of named colours beside the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if handles:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False)


def colour_map(name: str) -> Any:
    """A colour map of matplotlib by its name."""
    from matplotlib import colormaps

    return colormaps[name]


def text_on(colour: Any) -> str:
    """Black or white, whichever has more contrast with a colour."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if luminance > 0.179 else "white"


def save(figure: Any, path: str | Path) -> Path:
    """Write a figure as .png or .svg, by the suffix of its path, and create the folder.

    Raises:
        SpecError: another ending.
    """
    path = Path(path)
    kind = FORMATS.get(path.suffix)
    if kind is None:
        raise SpecError(f"{path.name!r} is no name of a picture.", fix="end it in .png or .svg.")
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    more = {"metadata": {"Date": None}} if kind == "svg" else {}
    with rc_context({"svg.hashsalt": "fnshard"}):  # the same picture, the same bytes
        # "tight": a title longer than the axes widens the picture, instead of being cut off.
        figure.savefig(path, dpi=130, format=kind, bbox_inches="tight", pad_inches=0.1, **more)
    return path
