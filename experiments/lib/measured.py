"""Measured: how runs compare with predictions, the traces of `run.profile`, and hardware that runs of a
folder have measured (`hardware=measured:FOLDER`). A run without these needs nothing of this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.lib.checks import ConfigError
from experiments.lib.config import MEASURED
from experiments.lib.files import first_few, read_record, write_record, write_text
from experiments.lib.record import RUN
from fnshard.analysis.calibrate import Observation, correct, vary
from fnshard.analysis.hardware import TABLE
from fnshard.analysis.timeline import Timeline
from fnshard.errors import MissingExtraError, report
from fnshard.step.lowered import Lowered

LINES = Path("profile", "lines.json")  # a file in a run's folder
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
MOST = 5  # the number of damaged files that an error names
FOLDER, TRACE, TEXT, PICTURE = LINES.parent, "trace.json", "timeline.txt", "timeline.png"
FIRST = 3  # the first step that is traced: step 1 compiles, and memory is measured in step 2


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of a run.

    Args:
        hardware: the hardware that its step was predicted for.
        machine: the machine that it ran on.
        step: the step's predicted and measured seconds.
        kinds: those of each kind of line, if the run has a profile.
    """

    hardware: Mapping[str, Any]
    machine: Mapping[str, Any]
    step: Observation
    kinds: tuple[Observation, ...] = ()


def lines_of(lowered: Lowered, hardware: fs.Hardware, measured: Timeline) -> dict[str, Any]:
    """Return what a profile keeps: predicted and measured seconds of each line of the schedule, and of each
    kind of line, of which those that were predicted count for `hardware_of_runs`."""
    # List each line of the schedule, and how long it keeps the device waiting.
    instructions = lowered.schedule.instructions
    waits = fs.profile.exposed(measured)
    predicted_s, measured_s = _sum_by_line(lowered.timeline(hardware)), _sum_by_line(measured)
    lines = [
        {
            "kind": fs.profile.kind_of(line), "unit": line.unit, "phase": line.phase,
            "predicted_s": predicted_s.get(n, 0.0), "measured_s": measured_s.get(n, 0.0),
            "exposed_s": waits.get(n, 0.0),
        }
        for n, line in enumerate(instructions)
    ]  # fmt: skip

    # Predict each kind of line for the hardware, and for each constant of it that is changed, so that
    # `calibrate` knows what the seconds depend on.
    measured_kinds = fs.profile.by_kind(measured, instructions)
    predicted_kinds: dict[str, dict[str, float]] = {}
    for constant, varied in vary(hardware).items():
        for kind, value in fs.profile.by_kind(lowered.timeline(varied), instructions).items():
            predicted_kinds.setdefault(kind, {})[constant] = value
    kinds = []
    for kind, values in predicted_kinds.items():
        if measured_kinds.get(kind) and all(values.values()):
            kinds.append({"kind": kind, "predicted_s": values, "measured_s": measured_kinds[kind]})
    return {"lines": lines, "kinds": kinds}


def _sum_by_line(timeline: Timeline) -> dict[int, float]:
    """Return the seconds of each line of a schedule."""
    out: dict[int, float] = {}
    for span in timeline.spans:
        out[span.index] = out.get(span.index, 0.0) + span.end - span.start
    return out


def read_measurements(folder: Path) -> MeasuredRun | None:
    """Return what a run has measured; None if it made no second step, or an older version kept nothing.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: a file is damaged.
    """
    record = read_record(folder / RUN) or {}
    prediction, facts = record.get("prediction") or {}, record.get("hardware", {})
    if prediction.get("measured_s") is None:
        return None
    machine = {name: facts.get(name) for name in ("device", "gpu", "gpu_memory_bytes", "cores")}
    machine["ranks_of_host"] = facts.get("ranks", 1) / max(1, len(facts.get("hosts", ())))
    # Seconds are predicted for the hardware as it is, under "", and with each constant that `vary` changes,
    # under its name.
    step = Observation(prediction["predicted_s"], float(prediction["measured_s"]))
    if not step.predicted[""] > 0:
        raise ValueError("nothing was predicted")

    # The weight of a kind of line is its share of the seconds that are predicted for all kinds.
    kinds: tuple[Observation, ...] = ()
    if (folder / LINES).exists():
        profile = read_record(folder / LINES) or {}
        if missing := {"lines", "kinds", "exposed_s"} - profile.keys():
            raise KeyError(", ".join(sorted(missing)))
        values = profile["kinds"]
        if not all(each["predicted_s"][""] > 0 for each in values):
            raise ValueError(f"{LINES}: nothing was predicted for a kind of line")
        total = sum(each["predicted_s"][""] for each in values)
        kinds = tuple(
            Observation(v["predicted_s"], v["measured_s"], v["predicted_s"][""] / total) for v in values
        )
    return MeasuredRun(prediction["hardware"], machine, step, kinds)


def hardware_of_runs(place: str) -> fs.Hardware:
    """Return the hardware of the newest run in a folder or below it, corrected by measurements.

    The measurements are those of all runs there on such a machine, with as many ranks on a host.

    Raises:
        ConfigError: no run has measured anything, or files are damaged.
    """
    # Read all runs, from the oldest to the newest.
    folders = sorted(
        (path.parent for path in Path(place).rglob(RUN)), key=lambda f: (f / RUN).stat().st_mtime
    )
    runs, damaged = [], []
    for folder in folders:
        try:
            runs.append(read_measurements(folder))
        except DAMAGED as error:
            damaged.append(f"{folder}: {type(error).__name__}: {error}")
    if damaged:
        fix = "another folder, or remove what cannot be read."
        raise ConfigError(
            report(f"hardware={MEASURED}{place}: runs are damaged:", first_few(damaged, MOST), fix)
        )
    known = [run for run in runs if run is not None]
    if not known:
        raise ConfigError(
            f"hardware={MEASURED}{place}: no run in it says what it measured; those of experiments.train and "
            "experiments.finetune do, from their second step on."
        )

    # Correct the hardware of the newest run by all runs on such a machine.
    last = known[-1]
    base = fs.Hardware.from_dict(last.hardware)
    base = replace(base, memory_bytes=last.machine["gpu_memory_bytes"] or base.memory_bytes)
    alike = [r for r in known if (r.hardware, r.machine) == (last.hardware, last.machine)]
    name = f"{base.name} as {len(alike)} run{'s' if len(alike) > 1 else ''} measured"
    return correct(base, [(run.step, *run.kinds) for run in alike], name)


# ------------------------------------------------------------------ traces


@dataclass
class Tracer:
    """A tracer of `steps` steps of this process. All ranks trace, so that one sees which rank is waited for.

    Args:
        lowered: the lowered step, which has not run.
        hardware: the hardware of the timeline beside the trace: `hardware=` of the run if it names one, else
            `base`.
        base: the hardware of this machine, which `run.json` predicts with.
        folder: the folder of the run.
    """

    step: Any
    steps: int
    lowered: Any
    hardware: fs.Hardware
    base: fs.Hardware
    folder: Path
    _traced: int = 0
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._predicted = self.lowered.timeline(self.hardware)  # before the step is compiled

    @contextmanager
    def on(self, here: int) -> Iterator[None]:
        """Trace the `here`th step of this process in the block, if it is to be traced.

        The trace opens at step `FIRST` and stays open until `write`.
        """
        if here == FIRST:
            self._open.enter_context(fs.profile.traced(self.step, self._trace))
        yield
        self._traced += FIRST <= here < FIRST + self.steps

    def is_last(self, here: int) -> bool:
        """Return whether the `here`th step of this process is the last one that is traced."""
        return here == FIRST + self.steps - 1

    @property
    def _trace(self) -> Path:
        """Return the file of this rank. That of rank 0 is kept, and the others are read and removed."""
        rank = self.step.mesh.rank
        return self.folder / FOLDER / (f"rank-{rank}.json" if rank else TRACE)

    def write(self) -> str:
        """End the trace and write what was measured. Return a line about it, or "" if no step was traced.

        All ranks call it together.
        """
        self._open.close()
        if not self._traced:
            return ""
        folder, predicted = self.folder / FOLDER, self._predicted
        measured = fs.profile.measured(self._trace, self.lowered, self.hardware)
        # All ranks say how long they waited; rank 0 writes.
        waited = self.step.gather_strings(str(measured.exposed_communication_seconds))
        if self.step.mesh.rank:
            self._trace.unlink()
            return ""
        values = lines_of(self.lowered, self.base, measured)
        write_record(self.folder / LINES, {**values, "exposed_s": [float(text) for text in waited]})
        name = self.hardware.name
        nominal = f"; predicted with the nominal speeds of {name}: hardware=measure takes this machine's"
        note = nominal if name in TABLE else ""
        head = f"{self._traced} steps traced, medians{note}"
        table = fs.profile.table(self.lowered, predicted, measured)
        text = "\n\n".join([head, table, f"predicted:\n{predicted}", f"measured:\n{measured}"])
        write_text(folder / TEXT, f"{text}\n")
        with suppress(MissingExtraError):  # there is no picture without matplotlib
            fs.plot.timeline(predicted, folder / PICTURE, measured=measured)
        where = f"in {folder / TRACE} (for ui.perfetto.dev) and {folder / TEXT}"
        return f"steps traced: {self._traced}, {where}{note}"
