"""Draft panel: the form of a new run, its prediction, its command line, and the button that starts it."""

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

# The keys that stand above all others in the form, if the command has them.
FIRST = ("model", "data.train", "run.steps", "data.rows", "data.context", "optimizer.lr", "mesh.shard")
HIDDEN = ("hardware",)  # the groups that the form leaves out: the list of machines stands for it
# Hydra has one state for the whole process, and each browser's draft is composed in a thread.
COMPOSE_LOCK = threading.Lock()
# The first entries of the list of machines, as `hardware=` and as the list names them.
MACHINES = {AUTO: "this machine", f"{MEASURED}{OUTPUTS}": "this machine, as its runs have measured it"}
# The properties of fields for text. They report what was typed when nothing was typed for 500 ms.
DEBOUNCE = "dense outlined debounce=500"


def compose_form(draft: Draft) -> Form:
    """Read the form of a draft. Any thread may call it."""
    with COMPOSE_LOCK:
        return read_form(draft)


class DraftPanel:
    """A panel of one browser.

    A person changes the draft, and timers of the page call `compose` and `predict`, which catch up with it.

    Args:
        on_start: a function that is called with the folder of a run that was started.
    """

    def __init__(self, runs: Runs, predictor: Predictor, on_start: Callable[[Any], None]):
        self.runs, self.predictor, self.on_start = runs, predictor, on_start
        self.draft = Draft()  # what the form holds now
        self.machine = AUTO  # `hardware=` of the prediction
        # Changes of the draft are counted, so the number of a change says which draft was meant.
        self.changes = 1  # the number of the newest change
        self.composed = 0  # the number of the change that `compose` has checked last
        self.predicted = 0  # the number of the change that `predict` has taken up last; 0 makes it due
        self.is_right = False  # whether the draft that was composed last has no problem
        self.arguments: list[str] = []  # the arguments of the draft that was composed last
        self.is_built = False  # whether the page shows the keys of the files that the draft chooses

    # -------------------------------------------------------------- what is on the page

    def build(self) -> None:
        """Lay the panel out. `compose` and `predict` fill it."""
        # On the left are the keys.
        with ui.row().classes("wide no-wrap top"):
            with ui.column().classes("form"):
                with ui.row().classes("items-center"):
                    self.job = ui.toggle(list(JOBS), value=self.draft.job, on_change=self._change_job)
                    ui.label("what is empty is as the grey text says").classes("quiet")
                self.keys = ui.column().classes("wide")
                self.more = ui.textarea(
                    "more arguments, as in a shell", value="", on_change=lambda e: self._set_more(e.value)
                )
                self.more.props(f"{DEBOUNCE} autogrow data-testid=more").classes("wide")
            # On the right are the command line and the prediction.
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
        self._suggest_name()

    def load(self, draft: Draft) -> None:
        """Show another draft."""
        self.draft, self.is_built = draft, False
        self.job.set_value(draft.job)
        self.more.set_value(draft.more)
        self._suggest_name()
        self._mark_changed()

    def _mark_changed(self) -> None:
        """Note a change. Until `compose` has checked it, no run can be started."""
        self.changes += 1
        self.button.disable()
        self._mark_old()

    def _mark_old(self) -> None:
        """Grey out the prediction that is shown. It is of an older draft, or of another machine."""
        self.prediction.classes("old")

    def _suggest_name(self) -> None:
        """Set the name of the run to the time."""
        prefix = "" if self.draft.job == "train" else f"{self.draft.job}/"
        self.name.set_value(prefix + time.strftime("%Y-%m-%d/%H-%M-%S"))

    def _build_keys(self, form: Form) -> None:
        """Show the files of all groups and the first keys, and below them the other keys of each group."""
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
                others = [each for each in group.fields if each.key not in FIRST]
                if others:
                    with ui.expansion(group.name or "others").classes("wide").props("dense"):
                        ui.label(group.about).classes("quiet")
                        with ui.row().classes("fields"):
                            for each in others:
                                self._build_field(each, each.name)

    def _build_choice(self, group: Group) -> None:
        """Show a group's files. The file of the command itself is named unless another one is chosen."""
        chosen = self.draft.choices.get(group.name, "")
        default = "(default)" if chosen else f"{group.chosen or 'none'} (default)"
        ui.select(
            {"": default} | {choice: choice for choice in group.choices}, value=chosen, label=group.name,
            on_change=lambda e: self._choose_file(group.name, e.value),
        ).props(f"dense outlined data-testid={group.name}").classes("field")  # fmt: skip

    def _build_field(self, each: Field, label: str) -> None:
        """Show a key, as a list of its values if there are only a few, and otherwise as a field for text."""
        typed = self.draft.values.get(each.key, "")
        on_change = lambda e: self._set_value(each, e.value)  # noqa: E731
        if each.choices:
            options = {"": "(default)" if typed else f"{each.value} (default)"}
            options |= {choice: choice for choice in each.choices}
            element = ui.select(options, value=typed, label=label, on_change=on_change)
            element.props("dense outlined")
        else:
            element = ui.input(label, value=typed, placeholder=each.value, on_change=on_change)
            element.props(f"{DEBOUNCE} stack-label")
        element.classes("field").props(f"data-testid={each.key}")

    # -------------------------------------------------------------- what a person does

    def _change_job(self, event: Any) -> None:
        if event.value != self.draft.job:
            self.load(Draft(event.value))

    def _choose_file(self, group: str, choice: str) -> None:
        self.draft, self.is_built = self.draft.choose(group, choice), False
        self._mark_changed()

    def _set_value(self, each: Field, typed: str | None) -> None:
        self.draft = self.draft.put(each.key, each.as_hydra(typed or ""))
        self._mark_changed()

    def _set_more(self, text: str) -> None:
        if text != self.draft.more:
            self.draft = replace(self.draft, more=text or "")
            self._mark_changed()

    def _change_machine(self, name: str) -> None:
        self.machine, self.predicted = name, 0  # so `predict` is due again
        self._mark_old()

    def _start(self) -> None:
        try:
            folder = self.runs.start(self.draft.job, self.arguments, self.name.value.strip())
        except ConfigError as error:
            ui.notify(str(error), type="negative", multi_line=True)
            return
        self._suggest_name()
        self.on_start(folder)

    # -------------------------------------------------------------- what follows from it

    async def compose(self) -> None:
        """Compose the draft if it has changed. A timer of the page calls it."""
        if self.composed == self.changes:
            return
        changes, draft = self.changes, self.draft
        try:
            form = await asyncio.to_thread(compose_form, draft)
            problems = form.problems
        except ConfigError as error:
            form, problems = None, (str(error),)
        if changes != self.changes:  # the draft has changed meanwhile, so the next call composes it
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
        """Predict the draft if it is right and has changed. A timer of the page calls it.

        What is predicted, an error too, is shown only if neither the draft nor the machine has changed
        meanwhile. What was shown before stays greyed out then, and the next calls predict the newer draft.
        """
        if self.composed != self.changes or self.predicted == self.changes or not self.is_right:
            return
        asked = self.changes, self.machine
        self.predicted = self.changes
        self.waiting.set_visibility(True)
        self._mark_old()
        prediction = await asyncio.to_thread(self.predictor.ask, self.draft, self.machine)
        self.waiting.set_visibility(False)
        if asked != (self.changes, self.machine):
            return
        self.prediction.classes(remove="old")
        self._show_prediction(prediction)

    def _show_command(self) -> None:
        """Show the command line that the button starts, or what is wrong with the run's name."""
        try:
            folder = self.runs.new_folder(self.draft.job, self.name.value.strip())
        except ConfigError as error:
            self.command.set_content(f"# {error}")
            return
        self.command.set_content(command_line(self.draft.job, self.runs.command(self.arguments, folder)))

    def _show_prediction(self, prediction: Prediction) -> None:
        """Show whether a step fits, its peak and time, and the command that predicts the same."""
        self.prediction.clear()
        with self.prediction:
            if prediction.error:
                ui.label(prediction.error).classes("quiet prewrap").props("data-testid=unpredicted")
            else:
                verdict = "fits" if prediction.fits else "does not fit"
                sizes = f"{byte_text(prediction.peak_bytes)} of {byte_text(prediction.device_bytes)} a rank"
                label = ui.label(f"{verdict}: {sizes}").classes("fits" if prediction.fits else "wrong")
                label.props("data-testid=verdict")
                ui.echart(chart_peak(prediction.peak)).classes("bars")
                hours = prediction.hours
                duration = f"{hours:.2g} hours" if hours >= 1 else f"{60 * hours:.2g} minutes"
                step_time = f"{time_text(prediction.step_seconds)} a step"
                label = ui.label(f"{step_time}; {prediction.steps:,} steps take {duration}")
                label.props("data-testid=time")
                for name, text in prediction.summary.items():
                    ui.label(f"{name}: {text}").classes("quiet")
            if prediction.command:
                ui.code(prediction.command, language="bash").classes("wide command")
