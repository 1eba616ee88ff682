"""Page: two panels for each browser that opens it, one for a new run and one for the runs of the folder."""

from __future__ import annotations

from pathlib import Path

from nicegui import ui

from experiments.web.draft_panel import DraftPanel
from experiments.web.form import Draft
from experiments.web.prediction import Predictor
from experiments.web.run_panel import RunPanel
from experiments.web.runs import Runs

LOOK_S = 0.2  # seconds between two looks at what was typed
STYLE = """
.wide { width: 100% } .grow { flex-grow: 1 } .half { width: 50% } .top { align-items: flex-start }
.form { width: 58%; min-width: 24rem } .side { width: 42%; position: sticky; top: 1rem }
.fields { gap: .5rem; width: 100% } .field { width: 11rem }
.old { opacity: .4 }
.quiet { color: #6b7280; font-size: .8rem } .prewrap, .wrong { white-space: pre-wrap }
.wrong { color: #b91c1c; white-space: pre-wrap } .fits { color: #047857 }
.printed { white-space: pre-wrap; font-family: monospace; font-size: .75rem }
.command pre { white-space: pre-wrap; word-break: break-all; font-size: .75rem }
.chart { height: 18rem; width: 100% } .chart.half { width: 50% } .chart.tall { height: 24rem }
.bars { height: 9rem; width: 100% }
"""


def build_page(runs: Runs, predictor: Predictor, refresh_s: float) -> None:
    """Define the page. Each browser gets panels of its own over the same runs."""

    @ui.page("/")
    def page() -> None:
        ui.add_css(STYLE)
        with ui.tabs() as tabs:
            new_tab, runs_tab = ui.tab("new run"), ui.tab("runs")
        ui.label(str(runs.root)).classes("quiet")

        def show_run(folder: Path) -> None:
            run_panel.choose(folder)
            tabs.set_value(runs_tab)

        def reuse(draft: Draft) -> None:
            draft_panel.load(draft)
            tabs.set_value(new_tab)

        draft_panel, run_panel = DraftPanel(runs, predictor, show_run), RunPanel(runs, reuse)
        with ui.tab_panels(tabs, value=new_tab).classes("wide").props("keep-alive"):
            with ui.tab_panel(new_tab):
                draft_panel.build()
            with ui.tab_panel(runs_tab):
                run_panel.build()
        ui.timer(LOOK_S, draft_panel.compose)
        ui.timer(LOOK_S, draft_panel.predict)
        ui.timer(refresh_s, run_panel.refresh)
