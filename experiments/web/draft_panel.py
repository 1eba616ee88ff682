"""Draft panel: the form of a new run, what is predicted of it, the command line, and the button that starts
it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nicegui import ui

from experiments.lib.checks import ConfigError
from experiments.lib.config import AUTO, HARDWARE, MEASURED
from experiments.lib.folder import OUTPUTS
from experiments.web.charts import chart_peak
from experiments.web.form import JOBS, Draft, Field, Form, Group, command_line, read_form
from experiments.web.prediction import Prediction, Predictor
from experiments.web.runs import Runs
from fnshard.plot.scales import byte_text, time_text

# Keys that stand above all others, where a command has them.
FIRST = ("model", "data.train", "run.steps", "data.rows", "data.context", "optimizer.lr", "mesh.shard")
HIDDEN = ("hardware",)  # groups of which the page has its own
COMPOSE_LOCK = threading.Lock()  # Hydra's state is the process's
MACHINES = {AUTO: "this machine", f"{MEASURED}{OUTPUTS}": "this machine, as its runs have measured it"}
DEBOUNCE = "dense outlined debounce=500"


def compose_form(draft: Draft) -> Form:
    """Read a form, in a thread."""
    with COMPOSE_LOCK:
        return read_form(draft)


class DraftPanel:
    """The panel of one browser.

    Its state: the draft; how many changes there were, and which of them was composed and predicted last;
    whether that was right, and its arguments; whether the keys on the page are those of the draft's files.

    Args:
        started: called with the folder of a run that was started.
    """

    def __init__(self, runs: Runs, predictor: Predictor, started: Callable[[Any], None]):
        self.runs, self.predictor, self.started = runs, predictor, started
        self.draft, self.machine = Draft(), AUTO
        self.changes, self.composed, self.predicted = 1, 0, 0
        self.is_right = self.is_built = False
        self.arguments: list[str] = []

    # -------------------------------------------------------------- what is on the page

    def build(self) -> None:
        """Lay the panel out; it fills itself."""
        with ui.row().classes("wide no-wrap top"):
            with ui.column().classes("form"):
                with ui.row().classes("items-center"):
                    self.job = ui.toggle(list(JOBS), value=self.draft.job, on_change=self._change_job)
                    ui.label("what is empty is as the grey text says").classes("quiet")
                self.keys = ui.column().classes("wide")
                self.more = ui.textarea(
                    "more arguments, as in a shell", value="", on_change=lambda e: self._say_more(e.value)
                )
                self.more.props(f"{DEBOUNCE} autogrow data-testid=more").classes("wide")
            with ui.column().classes("side"):
                with ui.card().classes("wide"):
                    self.name = ui.input(
                        "name of the run, below outputs/", on_change=lambda _: self._show_command()
                    )
                    self.name.props("dense outlined data-testid=name").classes("wide")
                    self.command = ui.code("", language="bash").classes("wide command")
                    self.problems = ui.label("").classes("wrong")
                    self.button = ui.button("start", on_click=self._start)
                    self.button.props("unelevated data-testid=start").disable()
                with ui.card().classes("wide"):
                    with ui.row().classes("wide items-center no-wrap"):
                        ui.label("before it runs").classes("text-subtitle1")
                        names = {name: name for name in HARDWARE if name not in (AUTO, "measure")}
                        ui.select(
                            MACHINES | names, value=AUTO, label="on",
                            on_change=lambda e: self._change_machine(e.value),
                        ).props("dense outlined data-testid=machine").classes("grow")  # fmt: skip
                        self.waiting = ui.label("predicting ...").classes("quiet")
                    self.prediction = ui.column().classes("wide")
        self._name_anew()

    def load(self, draft: Draft) -> None:
        """Show another draft."""
        self.draft, self.is_built = draft, False
        self.job.set_value(draft.job)
        self.more.set_value(draft.more)
        self._name_anew()
        self._change()

    def _change(self) -> None:
        self.changes += 1
        self.button.disable()

    def _name_anew(self) -> None:
        prefix = "" if self.draft.job == "train" else f"{self.draft.job}/"
        self.name.set_value(prefix + time.strftime("%Y-%m-%d/%H-%M-%S"))

    def _build_keys(self, form: Form) -> None:
        """Show the groups: their files, and below each its keys."""
        self.is_built = True
        self.keys.clear()
        named = {each.key: each for group in form.groups for each in group.fields}
        groups = [group for group in form.groups if group.name not in HIDDEN]
        with self.keys:
            with ui.row().classes("fields"):
                for group in groups:
                    if len(group.choices) > 1:
                        self._build_choice(group)
                for key in FIRST:
                    if key in named:
                        self._build_field(named[key], key)
            for group in groups:
                rest = [each for each in group.fields if each.key not in FIRST]
                if rest:
                    with ui.expansion(group.name or "others").classes("wide").props("dense"):
                        ui.label(group.about).classes("quiet")
                        with ui.row().classes("fields"):
                            for each in rest:
                                self._build_field(each, each.name)

    def _build_choice(self, group: Group) -> None:
        said = self.draft.choices.get(group.name, "")
        default = "(default)" if said else f"{group.chosen or 'none'} (default)"
        ui.select(
            {"": default} | {choice: choice for choice in group.choices}, value=said, label=group.name,
            on_change=lambda e: self._choose(group.name, e.value),
        ).props(f"dense outlined data-testid={group.name}").classes("field")  # fmt: skip

    def _build_field(self, each: Field, label: str) -> None:
        said = self.draft.values.get(each.key, "")
        put = lambda e: self._put(each, e.value)  # noqa: E731
        if each.choices:
            options = {"": "(default)" if said else f"{each.value} (default)"}
            options |= {choice: choice for choice in each.choices}
            element = ui.select(options, value=said, label=label, on_change=put).props("dense outlined")
        else:
            element = ui.input(label, value=said, placeholder=each.value, on_change=put)
            element.props(f"{DEBOUNCE} stack-label")
        element.classes("field").props(f"data-testid={each.key}")

    # -------------------------------------------------------------- what a person does

    def _change_job(self, event: Any) -> None:
        if event.value != self.draft.job:
            self.load(Draft(event.value))

    def _choose(self, group: str, choice: str) -> None:
        self.draft, self.is_built = self.draft.choose(group, choice), False
        self._change()

    def _put(self, each: Field, typed: str | None) -> None:
        self.draft = self.draft.put(each.key, each.as_hydra(typed or ""))
        self._change()

    def _say_more(self, text: str) -> None:
        if text != self.draft.more:
            self.draft = replace(self.draft, more=text or "")
            self._change()

    def _change_machine(self, name: str) -> None:
        self.machine, self.predicted = name, 0

    def _start(self) -> None:
        try:
            folder = self.runs.start(self.draft.job, self.arguments, self.name.value.strip())
        except ConfigError as error:
            ui.notify(str(error), type="negative", multi_line=True)
            return
        self._name_anew()
        self.started(folder)

    # -------------------------------------------------------------- what follows from it

    async def compose(self) -> None:
        """Compose the draft, if it has changed since; the page calls it again and again."""
        if self.composed == self.changes:
            return
        changes, draft = self.changes, self.draft
        try:
            form = await asyncio.to_thread(compose_form, draft)
            problems = form.problems
        except ConfigError as error:
            form, problems = None, (str(error),)
        if changes != self.changes:  # meanwhile
            return
        self.composed, self.is_right = changes, not problems
        self.problems.set_text("\n".join(problems))
        if form is not None:
            self.arguments = draft.arguments
            self._show_command()
            if not self.is_built:
                self._build_keys(form)
        if self.is_right:
            self.button.enable()

    async def predict(self) -> None:
        """Predict the draft, if it is right and has changed since; the page calls it again and again."""
        if self.composed != self.changes or self.predicted == self.changes or not self.is_right:
            return
        self.predicted = self.changes
        self.waiting.set_visibility(True)
        self.prediction.classes("old")
        found = await asyncio.to_thread(self.predictor.ask, self.draft, self.machine)
        self.waiting.set_visibility(False)
        self.prediction.classes(remove="old")
        self._show_prediction(found)

    def _show_command(self) -> None:
        try:
            folder = self.runs.new_folder(self.draft.job, self.name.value.strip())
        except ConfigError as error:
            self.command.set_content(f"# {error}")
            return
        self.command.set_content(command_line(self.draft.job, self.runs.command(self.arguments, folder)))

    def _show_prediction(self, found: Prediction) -> None:
        self.prediction.clear()
        with self.prediction:
            if found.error:
                ui.label(found.error).classes("quiet prewrap").props("data-testid=unpredicted")
            else:
                verdict = "fits" if found.fits else "does not fit"
                text = f"{verdict}: {byte_text(found.peak_bytes)} of {byte_text(found.device_bytes)} a rank"
                ui.label(text).classes("fits" if found.fits else "wrong").props("data-testid=verdict")
                ui.echart(chart_peak(found.peak)).classes("bars")
                hours = f"{found.hours:.2g} hours" if found.hours >= 1 else f"{60 * found.hours:.2g} minutes"
                ui.label(f"{time_text(found.step_seconds)} a step; {found.steps:,} steps take {hours}").props(
                    "data-testid=time"
                )
                for name, text in found.summary.items():
                    ui.label(f"{name}: {text}").classes("quiet")
            if found.command:
                ui.code(found.command, language="bash").classes("wide command")
