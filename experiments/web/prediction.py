"""Prediction: what `experiments.explain` says of a draft.

Another process computes it, so that the page answers meanwhile.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import fnshard as fs
from experiments.explain import config as explain_config
from experiments.explain import report
from experiments.explain.step_on_paper import explain
from experiments.lib.checks import targets_in
from experiments.lib.compose import compose, is_mistake, is_outside, text_of
from experiments.lib.config import AUTO
from experiments.lib.launch import find_accelerators, fit_to_machine
from experiments.lib.plan import hardware_of
from experiments.web.form import Draft, command_line, read_form
from fnshard.launcher.rank import end_with_parent

NOT_FOR_TUNING = (
    "experiments.explain knows the models of experiments.train. A run of finetune says in its first lines "
    "what a step takes, before it makes one; it is shown with the run."
)
ASK_IT = "Fix: the command below predicts it."


@dataclass(frozen=True)
class Prediction:
    """The prediction of a draft before it runs.

    Args:
        command: the command line of `experiments.explain` that predicts the same.
        error: the reason if there is no prediction. Then all fields but `command` are empty.
        summary: the summary of `experiments.explain`.
        device_bytes: the bytes that a step may take of a rank's device.
        peak: the bytes at the peak, by category.
        steps: the number of the run's steps.
    """

    command: str = ""
    error: str = ""
    summary: Mapping[str, str] = field(default_factory=dict)
    device_bytes: int = 0
    peak: Mapping[str, int] = field(default_factory=dict)
    step_seconds: float = 0.0
    steps: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.device_bytes

    @property
    def hours(self) -> float:
        """Return the hours of all steps, without those of the start, evaluation and checkpoints."""
        return self.steps * self.step_seconds / 3600


def predict(draft: Draft, hardware: str) -> Prediction:
    """Return what `experiments.explain` says of a draft of the training command.

    Args:
        hardware: its `hardware=`; "auto" is this machine.
    """
    if draft.job != "train":
        return Prediction(error=NOT_FOR_TUNING)
    command = ""
    try:
        form = read_form(draft)
        if form.config is None:
            return Prediction(error="\n".join(form.problems))
        arguments = explain_arguments(draft, form.config, precision_of(form), hardware)
        command = command_line("explain", arguments)
        # The settings may be those of somebody else's run, whose code runs only when a person starts it.
        # Names are compared whole: one that begins with this library may end in a module that it imports.
        ours = {f"fnshard.optim.{name}" for name in fs.optim.__all__}
        targets = targets_in(asdict(form.config))
        foreign = [target for target in targets if target.partition("_target_=")[2] not in ours]
        if foreign:
            return Prediction(
                command, f"{' '.join(foreign)}: code of one's own runs when it is started. {ASK_IT}"
            )
        paper = explain(compose(explain_config.COMMAND, arguments).config)
    except Exception as error:  # the process answers further questions
        is_known = is_mistake(error) or is_outside(error)
        return Prediction(command, text_of(error) if is_known else f"{type(error).__name__}: {error}")
    return Prediction(
        command, "", report.summary(paper), paper.device_bytes, dict(paper.memory.peak),
        paper.timeline.step_seconds, form.config.run.steps,
    )  # fmt: skip


def precision_of(form: Any) -> str:
    """Return the file of the group `precision` that counts."""
    return next(group.chosen for group in form.groups if group.name == "precision")


def explain_arguments(draft: Draft, config: Any, precision: str, hardware: str) -> list[str]:
    """Return the arguments of `experiments.explain` for the run that a draft starts.

    They are the draft's own, and those of keys whose defaults differ between the two commands.

    Args:
        config: the configuration that the draft makes.
        precision: the file that it chooses.
    """
    added: dict[str, Any] = {"precision": precision}
    rows = config.data.get("rows") if isinstance(config.data, dict) else config.data.rows
    if rows:
        added["data.rows"] = rows
    # "auto" stands for this machine: its device, by name, and as many ranks as the run would have.
    if hardware == AUTO:
        here = fit_to_machine(config, accelerators=find_accelerators())
        mesh = fs.make_mesh(shard=1, device=here.run.device, abstract=True)
        hardware = hardware_of(AUTO, mesh).name
        added["mesh.shard"] = here.mesh.shard
    replaced = {"hardware", "hardware.name", *added}
    kept = [argument for argument in draft.arguments if argument.partition("=")[0] not in replaced]
    return [*kept, *(f"{key}={value}" for key, value in added.items()), f"hardware={hardware}"]


# ------------------------------------------------------------------ in a process of its own


class Predictor:
    """A predictor in a process of its own, which answers one question at a time.

    Its state is the process, which is replaced after a question that took too long.
    """

    def __init__(self, patience_s: float):
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, draft: Draft, hardware: str) -> Prediction:
        """Wait for the prediction of a draft, and return it."""
        with self._lock:
            self._start()
            try:
                self._pipe.send((draft, hardware))
                if self._pipe.poll(self.patience_s):
                    return self._pipe.recv()
            except (EOFError, OSError):
                self._end()
                return Prediction(
                    error="the process that predicts has ended. Fix: change something, or wait."
                )
            self._end()
            return Prediction(
                error=f"no answer within {self.patience_s:g} s. Fix: python -m experiments.explain takes its "
                "time; or patience_s= of this page."
            )

    def prepare(self) -> None:
        """Start the process, whose imports take some seconds."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the process. A question that it works on gets no answer."""
        if self._process is not None:
            self._process.kill()

    def _start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        # The fork server has imported this module already, so a process starts at once, also after one was
        # killed.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=answer_questions, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None


def answer_questions(pipe: Connection) -> None:
    """Answer questions until the page's process ends.

    The fork server ends with the page's process, and this process, its child, is killed then.
    """
    end_with_parent(signal.SIGKILL, os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the page
    logging.getLogger("fnshard").setLevel(logging.WARNING)
    while True:
        try:
            draft, hardware = pipe.recv()
            pipe.send(predict(draft, hardware))
        except (EOFError, OSError):
            return
