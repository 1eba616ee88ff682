"""What runs were predicted to take, next to what they took: kept with each run, read back as a `Hardware`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.configs.train import MEASURED, ConfigError
from experiments.data.files import first_few, read_record
from fnshard.analysis.calibrate import Observation, changed, corrected
from fnshard.analysis.timeline import Timeline
from fnshard.errors import report
from fnshard.step.lowered import Lowered

RUN, LINES = "run.json", Path("profile", "lines.json")  # of a run's folder
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
MOST = 5  # damaged files that an error names


@dataclass(frozen=True)
class MeasuredRun:
    """One run. `hardware`: what it was predicted for; `machine`: what it ran on; `kinds`: of a run with a
    profile, kinds of lines."""

    hardware: Mapping[str, Any]
    machine: Mapping[str, Any]
    step: Observation
    kinds: tuple[Observation, ...] = ()


def prediction_of(lowered: Lowered, hardware: fs.Hardware) -> dict[str, Any]:
    """What `run.json` keeps of a step before it runs."""
    found = {name: lowered.timeline(each).step_seconds for name, each in changed(hardware).items()}
    return {"hardware": hardware.as_dict(), "predicted_s": found}


def lines_of(lowered: Lowered, hardware: fs.Hardware, measured: Timeline) -> dict[str, Any]:
    """What a profile keeps: predicted and measured seconds of each line of the schedule, and of each kind of
    line, of which those that were predicted count for `measured_hardware`."""
    lines = lowered.schedule.instructions
    waits = fs.profile.exposed(measured)
    seconds = [_by_line(lowered.timeline(hardware)), _by_line(measured)]
    kinds = fs.profile.by_kind(measured, lines)
    found: dict[str, dict[str, float]] = {}
    for constant, each in changed(hardware).items():
        for kind, value in fs.profile.by_kind(lowered.timeline(each), lines).items():
            found.setdefault(kind, {})[constant] = value
    return {
        "lines": [
            {
                "kind": fs.profile.kind_of(line), "unit": line.unit, "phase": line.phase,
                "predicted_s": seconds[0].get(n, 0.0), "measured_s": seconds[1].get(n, 0.0),
                "exposed_s": waits.get(n, 0.0),
            }
            for n, line in enumerate(lines)
        ],
        "kinds": [
            {"kind": kind, "predicted_s": values, "measured_s": kinds[kind]}
            for kind, values in found.items() if kinds.get(kind) and all(values.values())
        ],
    }  # fmt: skip


def _by_line(timeline: Timeline) -> dict[int, float]:
    out: dict[int, float] = {}
    for span in timeline.spans:
        out[span.index] = out.get(span.index, 0.0) + span.end - span.start
    return out


def measured_run(folder: Path) -> MeasuredRun | None:
    """What a run has measured; None if it made no second step, or is of a version that kept nothing.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: a file is damaged.
    """
    record = read_record(folder / RUN) or {}
    found, there = record.get("prediction") or {}, record.get("hardware", {})
    if found.get("measured_s") is None:
        return None
    machine = {name: there.get(name) for name in ("device", "gpu", "gpu_memory_bytes", "cores")}
    machine["ranks_of_host"] = there.get("ranks", 1) / max(1, len(there.get("hosts", ())))
    step = Observation(found["predicted_s"], float(found["measured_s"]))
    if not step.predicted[""] > 0:
        raise ValueError("nothing was predicted")
    kinds: tuple[Observation, ...] = ()
    if (folder / LINES).exists():
        profile = read_record(folder / LINES) or {}
        values, _ = profile["kinds"], (profile["lines"], profile["exposed_s"])
        total = sum(each["predicted_s"][""] for each in values)
        kinds = tuple(
            Observation(v["predicted_s"], v["measured_s"], v["predicted_s"][""] / total) for v in values
        )
    return MeasuredRun(found["hardware"], machine, step, kinds)


def measured_hardware(place: str) -> fs.Hardware:
    """The hardware of the newest run in a folder or below it, as all runs there have measured it that ran on
    such a machine, with as many ranks on a host.

    Raises:
        ConfigError: no run says what it measured, or a file of one is damaged.
    """
    folders = sorted(
        (path.parent for path in Path(place).rglob(RUN)), key=lambda f: (f / RUN).stat().st_mtime
    )
    runs, damaged = [], []
    for folder in folders:
        try:
            runs.append(measured_run(folder))
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
    last = known[-1]
    base = fs.Hardware.from_dict(last.hardware)
    base = replace(base, memory_bytes=last.machine["gpu_memory_bytes"] or base.memory_bytes)
    alike = [r for r in known if (r.hardware, r.machine) == (last.hardware, last.machine)]
    name = f"{base.name} as {len(alike)} run{'s' if len(alike) > 1 else ''} measured"
    return corrected(base, [(run.step, *run.kinds) for run in alike], name)
