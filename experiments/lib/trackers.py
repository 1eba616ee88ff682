"""Trackers: they write a run's numbers to TensorBoard, Weights & Biases or MLflow, besides `metrics.jsonl`.

Their libraries are imported when a run gives them its first rows, and never otherwise. To add a tracker,
write a class and a row of `TRACKERS` here, and a field of `TrackerConfig`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from hydra.utils import instantiate

from experiments.lib.checks import TARGET, ConfigError, flatten_keys
from experiments.lib.config import TrackerConfig
from experiments.lib.files import DamagedError, read_record, write_record
from fnshard.errors import report

Row = Mapping[str, Any]  # a row of metrics.jsonl: "step", and numbers by name
FOLDER = "trackers"  # a folder in the run's, with a file for each tracker that says how many rows it has
EVERY_S = 1.0  # the seconds between two looks at the file: many rows at once cost less
ANSWERS_S = 60.0  # the seconds that a tracker may take for what it is asked
BATCH = 1000  # the most rows, or numbers, that are logged at once


@dataclass(frozen=True)
class RunInfo:
    """The facts that a tracker gets at the start of a process.

    Args:
        facts: the facts of `lib.record`.
        id: what the tracker's `start` returned in an earlier process of this run; empty in the first.
    """

    folder: Path
    facts: Mapping[str, Any]
    id: str = ""


class Tracker(Protocol):
    """A place to write a run's numbers to.

    If a method raises, or takes longer than `ANSWERS_S`, the tracker gets nothing more, and the run goes on.
    """

    def start(self, run: RunInfo) -> str:
        """Begin, or resume the run named `run.id`; return the name that the next process resumes."""

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows in order; they outlive this process when this returns."""

    def artifact(self, path: Path) -> None:
        """Take a file of the run's folder, a text or a picture."""

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """End the process; the run is "ok", "stopped" (it may be resumed) or "failed"."""


def numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row, without its step."""
    return {name: float(value) for name, value in row.items() if name != "step"}


@dataclass
class Feed:
    """A tracker, and the number of rows of a run's `metrics.jsonl` that it has.

    A tracker that raises or hangs is reported once, and training goes on without it. A file notes how many
    rows the tracker has. A resumed run writes the rows after its checkpoint again, as they were, so the next
    process skips that many. Rows that were logged when the process was killed, but not noted, are logged
    again, with equal values.

    Args:
        metrics: the file of rows, to which the report appends.
        facts: the facts of the run for the tracker.
        say: a function that gets the line about a tracker that fails.
    """

    name: str
    tracker: Tracker
    metrics: Path
    facts: Mapping[str, Any]
    say: Callable[[str], None]
    every_s: float = EVERY_S
    answers_s: float = ANSWERS_S
    failed: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._looked, self._file, self._read, self._logged = time.monotonic(), None, 0, 0
        self._note = self.metrics.parent / FOLDER / f"{self.name}.json"

    def follow(self, *, at_once: bool = False) -> None:
        """Hand the tracker the new rows of the file: now with `at_once`, else once in `every_s` seconds."""
        if at_once or time.monotonic() >= self._looked + self.every_s:
            self._attempt(self._log)
            self._looked = time.monotonic()

    def finish(self, status: str, artifacts: Sequence[Path] = (), **summary: Any) -> None:
        """Hand the tracker all rows that are left, and the result, at the end of the run or of this
        process."""

        def end() -> None:
            self._log()
            for path in artifacts:
                self.tracker.artifact(path)
            self.tracker.finish(status, summary)
            self._file.close()

        self._attempt(end)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread, unless the tracker has failed, and note if it fails."""
        if self.failed:
            return

        def attempt() -> None:
            try:
                work()
                reasons.append("")
            except BaseException as error:  # whatever the tracker's library raises, SystemExit too
                reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])

        # A thread may be left behind, whereas a library that waits for its server cannot be interrupted.
        reasons: list[str] = []
        thread = threading.Thread(target=attempt, name=f"tracker {self.name}", daemon=True)
        thread.start()
        thread.join(self.answers_s)
        self.failed = reasons[0] if reasons else f"it has not answered for {self.answers_s:g} s"
        if self.failed:
            self.say(
                f"tracker {self.name} gets no more rows, training goes on: {self.failed} "
                "(all numbers are in metrics.jsonl)"
            )

    def _log(self) -> None:
        """Log the rows that the tracker does not have."""
        # Start it before the first rows.
        if self._file is None:
            try:
                known = read_record(self._note) or {}
            except DamagedError as error:
                self.say(f"{error} Tracker {self.name} begins a run anew.")
                known = {}
            self._logged = known.get("rows", 0)
            self._id = self.tracker.start(RunInfo(self.metrics.parent, self.facts, known.get("id", "")))
            write_record(self._note, {"id": self._id, "rows": self._logged})
            self._file = self.metrics.open("rb")
        # `failed` is set while this runs if the tracker takes too long: whatever it does then is dropped.
        while not self.failed and (rows := list(islice(_read_rows(self._file), BATCH))):
            # The tracker has the first `_logged` rows of the file, by this process or an earlier one.
            new = rows[max(0, self._logged - self._read) :]
            self._read += len(rows)
            if new:
                self.tracker.log(new)
                self._logged = self._read
                write_record(self._note, {"id": self._id, "rows": self._logged})


def _read_rows(file: BinaryIO) -> Iterator[Row]:
    """Yield the rows behind the file's position. A line without its end is left for later."""
    while (line := file.readline()).endswith(b"\n"):
        yield json.loads(line)
    file.seek(-len(line), 1)


# ------------------------------------------------------------------ TensorBoard


class TensorBoard:
    """A tracker of scalars by name and step, texts and pictures.

    `tensorboard --logdir` of a folder of runs shows all of them.
    """

    def start(self, run: RunInfo) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._step = SummaryWriter(str(run.folder / "tensorboard")), 0
        if not run.id:
            self._add_text("run", json.dumps(run.facts, indent=1))
        return "tensorboard"

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._step = row["step"]
            for name, value in numbers(row).items():
                self._writer.add_scalar(name, value, self._step)
        self._writer.flush()

    def artifact(self, path: Path) -> None:
        if path.suffix == ".png":
            from matplotlib import image

            self._writer.add_image(path.stem, image.imread(path)[..., :3], self._step, dataformats="HWC")
        else:
            self._add_text(path.name, path.read_text(encoding="utf-8", errors="replace"))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self._add_text("result", json.dumps({"status": status, **summary}, indent=1))
        self._writer.close()

    def _add_text(self, name: str, text: str) -> None:
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown shows it unchanged
        self._writer.add_text(name, indented, self._step)


# ------------------------------------------------------------------ Weights & Biases

# wandb would collect output, which is in ranks/rank0.log, and code, packages and machine, which are facts.
QUIET = {
    "silent": True, "console": "off", "disable_git": True, "save_code": False, "x_save_requirements": False,
    "x_disable_stats": True, "x_disable_machine_info": True, "symlink": False,
}  # fmt: skip


class WandB:
    """A run of `project`; a process that resumes it adds another folder with the same id.

    It is offline unless `WANDB_MODE` says otherwise, so it needs no login and no network, and asks nothing.
    """

    def __init__(self, project: str):
        self._project = project

    def start(self, run: RunInfo) -> str:
        import wandb

        name, folder, facts = run.id or uuid.uuid4().hex[:8], str(run.folder), dict(run.facts)
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=self._project, id=name, name=run.folder.name, dir=folder, resume="allow",
            reinit="create_new", config={**facts.pop("config", {}), "facts": facts},
            settings=wandb.Settings(mode=mode, root_dir=folder, **QUIET),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        return name

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows with `step` as a number among the others.

        A row of a held-out loss has the step of the row before, and wandb's own steps must rise.
        """
        for row in rows:
            self._run.log({**numbers(row), "step": row["step"]})

    def artifact(self, path: Path) -> None:
        import wandb

        if path.suffix == ".png":
            self._run.log({f"pictures/{path.stem}": wandb.Image(str(path))})
        else:
            self._run.save(str(path), base_path=str(path.parent), policy="now")

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=int(status == "failed"))


# ------------------------------------------------------------------ MLflow

LONGEST, PARAMS = 6000, 100  # the most characters of a parameter, and parameters that are logged at once
STATES = {"ok": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """A run of the experiment `experiment`.

    Args:
        store: a folder, relative to where the job was started; or a URI, such as sqlite:///runs.db.
    """

    def __init__(self, experiment: str, store: str):
        self._experiment, self._store = experiment, store

    def start(self, run: RunInfo) -> str:
        # MLflow 3 needs a switch for stores of files, and another one to keep it from reporting its use.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        store = self._store if "://" in self._store else Path(self._store).resolve().as_uri()
        self._client, self._run = MlflowClient(tracking_uri=store), run.id
        if run.id:
            self._client.update_run(run.id, "RUNNING")
            return run.id
        # Create a run of the experiment, which is made if need be, with the facts as parameters.
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        git = run.facts.get("git") or {}
        tags = {"mlflow.source.git.commit": git["revision"]} if git else {}
        self._run = self._client.create_run(experiment, run_name=run.folder.name, tags=tags).info.run_id
        params = [Param(name, str(value)[:LONGEST]) for name, value in flatten_keys(run.facts)]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(self._run, params=params[first : first + PARAMS])
        return self._run

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, row["step"]) for row in rows for name, value in numbers(row).items()
        ]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run, metrics[first : first + BATCH])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        for name, value in flatten_keys({"status": status, **summary}):
            self._client.set_tag(self._run, f"result.{name}", value)
        self._client.set_terminated(self._run, STATES[status])


# ------------------------------------------------------------------ by name

# Trackers by the name of their package, which is also that of the extra and of the field of TrackerConfig.
TRACKERS: dict[str, Callable[[TrackerConfig], Tracker]] = {
    "tensorboard": lambda config: TensorBoard(),
    "wandb": lambda config: WandB(config.project),
    "mlflow": lambda config: MLflow(config.project, config.store),
}


def choose_trackers(config: TrackerConfig) -> dict[str, Tracker]:
    """Make the trackers that a configuration names, by name."""
    own = {each[TARGET]: instantiate(each) for each in config.own}
    return {name: make(config) for name, make in TRACKERS.items() if getattr(config, name)} | own


def check_installed(config: TrackerConfig) -> None:
    """Refuse trackers whose packages are not installed, before a rank starts."""
    missing = [n for n in TRACKERS if getattr(config, n) and importlib.util.find_spec(n) is None]
    if missing:
        problems = [f"tracker={name}: the package {name} is not installed." for name in missing]
        fix = f"pip install 'fnshard[{','.join(missing)}]'; metrics.jsonl is written in any case."
        raise ConfigError(report("packages of these trackers are missing:", problems, fix))
