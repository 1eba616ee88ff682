"""Run panel: a table of the folder's runs, and below it the chosen run, or several side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nicegui import ui

from experiments.compare.table import as_text, rank_outcomes
from experiments.lib.checks import ConfigError
from experiments.lib.files import read_json
from experiments.lib.record import PARTS, RUN
from experiments.web.charts import MEMORY, chart_curves, chart_memory, chart_speed
from experiments.web.form import Draft, command_line, draft_of
from experiments.web.runs import SAMPLES, Runs, RunView, log_of, read_tail
from fnshard.plot.scales import byte_text, time_text

COLUMNS = {
    "name": "run",
    "job": "command",
    "status": "status",
    "step": "step",
    "value": "judged by",
    "speed": "speed",
}


def row_of(view: RunView) -> dict[str, Any]:
    """Return a run's row of the table."""
    rows, goal = (view.outcome.rows, view.outcome.goal) if view.outcome else ((), None)
    shown = {"value": "", "speed": ""}  # the newest of either
    for row in rows[-50:]:
        for name, value in row.items():
            if goal is not None and name in (goal.name, goal.held_out):
                shown["value"] = f"{value:.3f}"
            if name.endswith("_per_s"):
                shown["speed"] = f"{value:,.0f} {name.removesuffix('_per_s')}/s"
    step = f"{view.step}/{view.steps}" if view.steps else str(view.step)
    return {"name": view.name, "job": view.job, "status": view.status, "step": step, **shown}


class RunPanel:
    """A panel of one browser.

    Its state is the runs as they were seen last, by name; which of them are chosen; and what is drawn of
    these.

    Args:
        reuse: a function that is called with the draft of a run whose settings are wanted for another.
    """

    def __init__(self, runs: Runs, reuse: Callable[[Draft], None]):
        self.runs, self.reuse = runs, reuse
        self.views: dict[str, RunView] = {}
        self.drawn: Any = None

    def build(self) -> None:
        """Lay the panel out. `refresh` fills it."""
        columns = [
            {"name": name, "label": label, "field": name, "align": "left", "sortable": True}
            for name, label in COLUMNS.items()
        ]
        ui.label("choose one to see it, several to compare them").classes("quiet")
        self.table = ui.table(
            rows=[], columns=columns, row_key="name", selection="multiple", pagination=10,
            on_select=lambda _: self._draw(),
        ).props("dense flat bordered data-testid=runs").classes("wide")  # fmt: skip
        self.empty = ui.label("no run is in this folder yet")
        self.shown = ui.column().classes("wide").props("data-testid=shown")

    def choose(self, folder: Path) -> None:
        """Show one run alone."""
        name = str(folder.relative_to(self.runs.root))
        self.table.selected = [{"name": name}]
        self._draw()

    @property
    def chosen(self) -> list[RunView]:
        names = [row["name"] for row in self.table.selected]
        return [self.views[name] for name in names if name in self.views]

    async def refresh(self) -> None:
        """Look at the runs again, and draw what has changed. A timer of the page calls it."""
        views = await asyncio.to_thread(self.runs.views)
        self.views = {view.name: view for view in views}
        rows = [row_of(view) for view in views]
        if rows != self.table.rows:
            self.table.rows = rows
        self.empty.set_visibility(not rows)
        self._draw()

    # -------------------------------------------------------------- what is drawn

    def _draw(self) -> None:
        """Draw the chosen runs, if others were chosen or their files or status have changed."""
        chosen = self.chosen
        wanted = [(view.name, view.status, id(view.outcome), stamp(view)) for view in chosen]
        if wanted == self.drawn:
            return
        before = [each[:2] for each in self.drawn or []]
        self.drawn = wanted

        # A run of the same name and status keeps its elements, whose contents alone are updated.
        if len(chosen) == 1 and before == [each[:2] for each in wanted]:
            self._update(chosen[0])
            return
        self.shown.clear()
        with self.shown:
            if len(chosen) == 1:
                self._build_one(chosen[0])
                self._update(chosen[0])
            elif chosen:
                self._build_comparison(chosen)

    def _build_one(self, view: RunView) -> None:
        """Show a run's status, buttons and command, and elements that `_update` fills."""
        reuse = lambda view: self.reuse(draft_of(view.job, view.arguments))  # noqa: E731
        with ui.row().classes("items-center"):
            ui.label(f"{view.name}: {view.status}").classes("text-h6").props("data-testid=status")
            if view.is_at_work:
                stop = ui.button("stop", on_click=lambda: self._act(self.runs.stop, view)).props("outline")
                stop.props("data-testid=stop").set_enabled(view.status != "stopping")
            if view.can_resume:
                button = ui.button("resume", on_click=lambda: self._act(self.runs.resume, view))
                button.props("data-testid=resume")
            if view.job and view.arguments:
                button = ui.button("use its settings", on_click=lambda: self._act(reuse, view))
                button.props("flat").props("data-testid=reuse")
        if view.job:
            command = command_line(view.job, self.runs.command(view.arguments, view.folder))
            ui.code(command, language="bash").classes("wide command")
        self.curve = ui.echart({}).classes("chart").props("data-testid=curve")
        with ui.row().classes("wide no-wrap"):
            self.speed = ui.echart({}).classes("chart half")
            with ui.column().classes("half"):
                ui.label("memory of a rank").classes("text-subtitle2")
                self.memory = ui.echart({}).classes("bars")
                self.numbers = ui.label("").classes("prewrap")
        self.sample = ui.label("").classes("printed").props("data-testid=sample")
        with ui.expansion("what the command has printed", value=not view.outcome).classes("wide"):
            self.log = ui.label("").classes("printed").props("data-testid=log")

    def _update(self, view: RunView) -> None:
        """Fill in what grows while a run is at work."""
        record = read_json(view.folder / RUN)
        totals = record.get("totals", {})
        if view.outcome is not None:
            for element, options in (
                (self.curve, chart_curves([view.outcome])),
                (self.speed, chart_speed([view.outcome])),
                (self.memory, chart_memory(totals)),
            ):
                element.options.clear()
                element.options.update(options)
                element.update()
        self.numbers.set_text(numbers_of(view, record))
        samples = [read_tail(view.folder / name) for name in SAMPLES]
        self.sample.set_text("\n".join(filter(None, samples)))
        self.log.set_text(read_tail(log_of(view.folder)) or "nothing: it was started elsewhere")

    def _build_comparison(self, chosen: Sequence[RunView]) -> None:
        """Show the curves and the ranking of several runs, and the command that compares them."""
        outcomes = [view.outcome for view in chosen if view.outcome and view.outcome.rows]
        if not outcomes:
            ui.label("none of them has made a step yet")
            return
        ui.echart(chart_curves(outcomes)).classes("chart tall").props("data-testid=comparison")
        ui.label(as_text(rank_outcomes(outcomes))).classes("printed").props("data-testid=ranking")
        places = [str(view.folder.relative_to(self.runs.root)) for view in chosen]
        ui.code(command_line("compare", places), language="bash").classes("wide command")

    # -------------------------------------------------------------- what a person does

    def _act(self, action: Callable[[RunView], None], view: RunView) -> None:
        """Do something with a run, and show the error if it is refused."""
        try:
            action(view)
        except ConfigError as error:
            ui.notify(str(error), type="negative", multi_line=True)


def stamp(view: RunView) -> Any:
    """Return a value that changes when there is more to show of a run."""
    log = log_of(view.folder)
    return view.step, log.stat().st_size if log.exists() else 0


def numbers_of(view: RunView, record: dict[str, Any]) -> str:
    """Return the numbers of a run's outcome, and the step time that was predicted, a line each."""
    predicted, lines = record.get("prediction") or {}, []
    if view.outcome is not None and view.outcome.reason:
        lines.append(view.outcome.reason)
    if "measured_s" in predicted:
        before = predicted.get("predicted_s", {}).get("", 0.0)
        lines.append(f"a step: {time_text(predicted['measured_s'])}, predicted {time_text(before)}")
    charted = {*MEMORY, *(f"{part}_s" for part in PARTS)}  # `experiments.explain run=` shows the latter
    for name, value in (view.outcome.numbers if view.outcome else {}).items():
        if name in charted:
            continue
        shown = byte_text(value) if name.endswith("_bytes") else f"{value:.4g}"
        lines.append(f"{name.replace('_', ' ')}: {shown}")
    return "\n".join(lines)
