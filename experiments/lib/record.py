"""Record: what a run is, what it takes, and what was predicted of that, in `run.json`.

It is written at every checkpoint and at the end.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.lib.files import DamagedError, read_record, write_record
from experiments.lib.metrics import METRICS
from fnshard.analysis.calibrate import vary
from fnshard.analysis.hardware import mfu
from fnshard.step.lowered import Lowered

PACKAGES = (
    "fnshard", "torch", "numpy", "hydra-core", "safetensors", "transformers", "tensorboard", "wandb",
    "mlflow-skinny",
)  # fmt: skip
# The parts that all seconds of a command are divided into; "other" is the rest. "start" lasts from the
# command's first moment to the job's first step: imports, launch, data, model. "lowering" traces and plans a
# step. "compile" generates its kernels, and the first step belongs to it; a run that compiles nothing has
# none of it.
PARTS = (
    "start", "lowering", "compile", "steps", "data", "rollouts", "evaluation", "samples", "saves", "export",
    "tracing", "reports", "other",
)  # fmt: skip
# The numbers of a result that differ between two runs of one configuration.
VARIES = (
    "mfu",
    "measured_peak_bytes",
    "process_peak_bytes",
    "predicted_peak_bytes",
    *(f"{name}_s" for name in PARTS),
)
HERE = Path(__file__).resolve()
RUN = "run.json"  # a file in a run's folder


# ------------------------------------------------------------------ facts


def facts_of(config: Any, job: str, overrides: Sequence[str], mesh: fs.Mesh, hosts: Sequence[str]) -> dict:
    """Return the facts of a run: command, seed, configuration, code, packages, machine.

    Args:
        job: the module of `experiments` that was started.
        hosts: the hosts of all ranks.
    """
    return {
        "command": shlex.join(["python", "-m", f"experiments.{job}", *overrides]),
        "seed": config.run.seed,
        "git": git_of(HERE),
        "packages": {"python": platform.python_version(), **packages()},
        "hardware": {**machine(mesh), "ranks": mesh.size, "hosts": sorted(set(hosts))},
        "config": dataclasses.asdict(config),
    }


def git_of(file: Path) -> dict[str, Any] | None:
    """Return the commit of a file's repository, and whether tracked files have changed since.

    It is None if git does not track the file: an installed copy may be inside of somebody else's repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def packages() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    # torch's own version names the CUDA that it was built for, which the metadata of PyPI's builds leave out.
    return versions | {"torch": torch.__version__}


def machine(mesh: fs.Mesh) -> dict[str, Any]:
    """Return the facts of this rank's device and host."""
    facts = {
        "device": mesh.device_type,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    if mesh.device_type == "cuda":
        gpu = torch.cuda.get_device_properties(mesh.device)
        facts |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory, "cuda": torch.version.cuda}
    return facts


# ------------------------------------------------------------------ time and work


def process_began() -> float:
    """Return the time at which this process began, before any import, in seconds of `time.time`.

    If the system does not say it, return the present time.
    """
    # The name of the program is in parentheses, and may hold blanks: fields are counted from behind it.
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # the time from the machine's start to this process's
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - age


@dataclass
class TimeSpent:
    """A clock that divides all seconds since it was made among `PARTS`.

    In nested blocks the inner one counts, so that no second counts twice. Seconds that passed before it was
    made are added to `seconds`.

    >>> ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    >>> timer = TimeSpent(clock=lambda: next(ticks))
    >>> with timer.during("evaluation"), timer.during("samples"):
    ...     pass
    >>> {part: seconds for part, seconds in timer.parts().items() if seconds}
    {'evaluation': 6.0, 'samples': 3.0, 'other': 6.0}
    """

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def __post_init__(self) -> None:
        self._since, self._open = self.clock(), ["other"]

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the seconds of the block for a part."""
        self._charge()
        self._open.append(part)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        self._charge()
        return dict(self.seconds)

    def between_steps(self) -> float:
        """Return the seconds that went neither to steps nor to what is done once before the first step."""
        once = ("start", "lowering", "compile", "steps")
        return sum(seconds for part, seconds in self.parts().items() if part not in once)

    @staticmethod
    def since(folder: Path, began: float) -> tuple[TimeSpent, float]:
        """Return the clock of a process that works on the run of a folder, and the time from which it counts.

        It counts from the beginning of the command. If an earlier process of the same command has counted
        from there, as before a restart, it counts from the beginning of this process; and if a user's program
        calls the job, from now.
        """
        if not began:
            return TimeSpent(), 0.0
        try:
            known = read_run_record(folder)
        except DamagedError:  # `RunRecord` reports it
            known = {}
        if any(each.get("began") == began for each in known.get("attempts", [])):
            began = process_began()
        timer = TimeSpent()
        timer.seconds["start"] = max(0.0, time.time() - began)
        return timer, began

    def _charge(self) -> None:
        """Add the seconds since the last call to the innermost part."""
        since, self._since = self._since, self.clock()
        self.seconds[self._open[-1]] += self._since - since


@dataclass(frozen=True)
class StepWork:
    """The prediction of a step, for one rank.

    Args:
        peak_flops: the hardware's FLOPs a second; NaN if they are not known.
        attention: the number of attentions of one forward by torch kernel.
        prediction: the prediction of its time, as `run.json` keeps it.
    """

    model_flops: float
    ranks: int
    peak_bytes: int
    peak_flops: float = math.nan
    attention: Mapping[str, int] = field(default_factory=dict)
    prediction: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(lowered: Any, hardware: fs.Hardware | None, predicted_for: fs.Hardware | None = None) -> StepWork:
        """Read the work off a lowered step. Its FLOPs are the same on any hardware.

        Args:
            hardware: the hardware whose peak an MFU is a share of.
            predicted_for: the hardware that its time is predicted for.
        """
        timeline = lowered.timeline(hardware or "cpu")
        peak = math.nan if hardware is None else timeline.peak_flops
        peak_bytes = lowered.memory_analysis().peak_bytes
        predicted = {} if predicted_for is None else prediction_of(lowered, predicted_for)
        return StepWork(timeline.model_flops, timeline.ranks, peak_bytes, peak, lowered.attention, predicted)

    def mfu(self, seconds: float) -> float:
        """Return the MFU of a step that takes so long, as `fnshard.analysis.hardware.mfu` defines it."""
        return mfu(self.model_flops, seconds, self.peak_flops)


def prediction_of(lowered: Lowered, hardware: fs.Hardware) -> dict[str, Any]:
    """Return what `run.json` keeps of a step before it runs."""
    predicted = {name: lowered.timeline(each).step_seconds for name, each in vary(hardware).items()}
    return {"hardware": hardware.as_dict(), "predicted_s": predicted}


def peak_memory(device_type: str) -> dict[str, int]:
    """Return the peak bytes of this process.

    On a GPU they are what was allocated there, and can be compared with a prediction. On a CPU they are all
    that the process took, Python and torch among it, and cannot.
    """
    if device_type == "cuda":
        return {"measured_peak_bytes": torch.cuda.max_memory_allocated()}
    # ru_maxrss is in KiB.
    return {"process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def read_run_record(folder: Path) -> dict[str, Any]:
    """Read what earlier processes have left in `run.json`; an empty dict if there is no such file.

    Raises:
        DamagedError: it is no record of a run.
    """
    known = read_record(folder / RUN) or {}
    attempts, totals = known.get("attempts", []), known.get("totals", {})
    is_record = isinstance(attempts, list) and isinstance(totals, dict)
    # The seconds of all attempts are added up, so they have to be numbers.
    for attempt in attempts if is_record else ():
        if isinstance(attempt, dict) and isinstance(attempt.get("spent_s"), dict):
            seconds = (attempt.get("seconds"), *attempt["spent_s"].values())
            is_record &= all(type(value) in (int, float) for value in seconds)
        else:
            is_record = False
    if not is_record:
        raise DamagedError(f"{folder / RUN} is no record of a run.")
    return known


@dataclass
class RunRecord:
    """The content of `run.json`: facts, an entry for each process that has worked on the run, and their sum.

    Args:
        made: the steps that earlier processes made.
        timer: the clock of this process.
        began: the time at which the command of this process began, by the clock of the host.
    """

    folder: Path
    facts: Mapping[str, Any]
    made: int = 0
    timer: TimeSpent = field(default_factory=TimeSpent)
    began: float = 0.0

    def __post_init__(self) -> None:
        self._started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            self._known = read_run_record(self.folder)
            if not self._known and self.made and (self.folder / METRICS).exists():
                raise DamagedError(f"{self.folder / RUN} is missing.")
        except DamagedError as error:
            print(f"{error} What earlier processes took is not known.", file=sys.stderr, flush=True)
            self._known = {}

    def write(
        self,
        status: str,
        step: int,
        attention: Mapping[str, int] | None = None,
        prediction: Mapping[str, Any] | None = None,
        **measured: float,
    ) -> dict[str, Any]:
        """Write the record after step `step`. A number that is NaN is not known: its earlier value is kept.

        Args:
            attention: that of `StepWork`; None if it is not known yet.
            prediction: that of `StepWork`, with the seconds that a step has taken (`measured_s`).

        Returns:
            The totals over all processes.
        """
        # Make the entry of this process, which replaces the one that it wrote before.
        parts = self.timer.parts()
        attempt = {
            "started": self._started,
            "began": self.began,
            "revision": (self.facts.get("git") or {}).get("revision"),
            "steps": [self.made, step],
            "seconds": round(sum(parts.values()), 4),
            "spent_s": {name: round(seconds, 4) for name, seconds in parts.items()},
        }
        # Seconds are added up over all processes; other numbers are the last ones.
        attempts = [*self._known.get("attempts", []), attempt]
        totals = {**self._known.get("totals", {}), "steps": step}
        totals["seconds"] = round(sum(each["seconds"] for each in attempts), 4)
        for name in PARTS:
            totals[f"{name}_s"] = round(sum(each["spent_s"].get(name, 0.0) for each in attempts), 4)
        totals |= {name: value for name, value in measured.items() if math.isfinite(value)}
        values = {
            "status": status, "totals": totals, "attempts": attempts,
            "attention": self._known.get("attention") if attention is None else dict(attention),
            "prediction": self._known.get("prediction") if prediction is None else dict(prediction),
        }  # fmt: skip
        write_record(self.folder / RUN, values | dict(self.facts))
        return totals


def varying(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of `VARIES`, for the result."""
    return {name: totals[name] for name in VARIES if name in totals}


def speed_name(unit: str) -> str:
    """Return the name of a run's speed in its rows: bytes and tokens of text are both called tokens.

    >>> speed_name("byte"), speed_name("row")
    ('tokens_per_s', 'rows_per_s')
    """
    return "tokens_per_s" if unit in ("byte", "token") else f"{unit}s_per_s"


def in_words(totals: Mapping[str, Any]) -> str:
    """Return the totals in two lines.

    >>> print(in_words({"steps": 9, "seconds": 20.0, "compile_s": 5.0, "steps_s": 12.0,
    ...     "evaluation_s": 2.0, "saves_s": 1.0, "tracing_s": 0.0, "tokens_per_s": 1200.0, "mfu": 0.25,
    ...     "predicted_peak_bytes": 2e6, "measured_peak_bytes": 3e6}))
    9 steps in 20.0 s, 1,200 tokens/s, MFU 25.0%; peak memory of the device 3.0 MB, predicted 2.0 MB
    spent on: compile 5.0 s (25%), steps 12.0 s (60%), evaluation 2.0 s (10%), saves 1.0 s (5%)
    """
    seconds = max(totals["seconds"], 1e-9)
    # The first line has steps, speed and memory.
    head = [f"{totals['steps']} steps in {seconds:.1f} s"]
    head += [f"{v:,.0f} {n.removesuffix('_per_s')}/s" for n, v in totals.items() if n.endswith("_per_s")]
    if "mfu" in totals:
        head.append(f"MFU {totals['mfu']:.1%}")
    sizes = {name: f"{totals[name] / 1e6:.1f} MB" for name in totals if name.endswith("_peak_bytes")}
    memory = ""
    if "predicted_peak_bytes" in sizes:
        predicted = sizes["predicted_peak_bytes"]
        measured = sizes.get("measured_peak_bytes")
        memory = f"; a step needs {predicted} of each rank's memory, by prediction"
        if measured is not None:
            memory = f"; peak memory of the device {measured}, predicted {predicted}"
    # The second line says where the seconds went.
    parts = [(name, totals.get(f"{name}_s", 0.0)) for name in PARTS]
    shares = (f"{name} {each:.1f} s ({each / seconds:.0%})" for name, each in parts if each >= 0.05)
    return f"{', '.join(head)}{memory}\nspent on: {', '.join(shares)}"
