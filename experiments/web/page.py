"""Page: its two panels, a new run and the runs there are, for each browser that opens it."""

from __future__ import annotations

from pathlib import Path

from nicegui import ui

from experiments.web.draft_panel import DraftPanel
from experiments.web.form import Draft
from experiments.web.prediction import Predictor
from experiments.web.run_panel import RunPanel
from experiments.web.runs import Runs

LOOK_S = 0.2  # between two looks at what was typed
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
    """Define the page; each browser gets panels of its own over the same runs."""

    @ui.page("/")
    def page() -> None:
        ui.add_css(STYLE)
        with ui.tabs() as tabs:
            new, there = ui.tab("new run"), ui.tab("runs")
        ui.label(str(runs.root)).classes("quiet")

        def show_run(folder: Path) -> None:
            panel.choose(folder)
            tabs.set_value(there)

        def reuse(draft: Draft) -> None:
            drafts.load(draft)
            tabs.set_value(new)

        drafts, panel = DraftPanel(runs, predictor, show_run), RunPanel(runs, reuse)
        with ui.tab_panels(tabs, value=new).classes("wide").props("keep-alive"):
            with ui.tab_panel(new):
                drafts.build()
            with ui.tab_panel(there):
                panel.build()
        ui.timer(LOOK_S, drafts.compose)
        ui.timer(LOOK_S, drafts.predict)
        ui.timer(refresh_s, panel.refresh)
