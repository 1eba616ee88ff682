"""What a run is and what it takes, in `run.json`; written at every checkpoint and at the end."""

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
from experiments.configs.measured import RUN, prediction_of
from experiments.data.files import DamagedError, read_record, write_record
from experiments.training.metrics_file import METRICS
from fnshard.analysis.hardware import mfu

PACKAGES = (
    "fnshard", "torch", "numpy", "hydra-core", "safetensors", "transformers", "tensorboard", "wandb",
    "mlflow-skinny",
)  # fmt: skip
# What the seconds of a process go to: all of them, "other" is the rest; the first step compiles.
PARTS = (
    "start", "compile", "steps", "data", "evaluation", "samples", "saves", "export", "tracing", "reports",
    "other",
)  # fmt: skip
# What of a result differs from run to run of one configuration.
VARIES = ("mfu", "measured_peak_bytes", "predicted_peak_bytes", *(f"{name}_s" for name in PARTS))
HERE = Path(__file__).resolve()


# ------------------------------------------------------------------ facts


def facts_of(config: Any, job: str, overrides: Sequence[str], mesh: fs.Mesh, hosts: Sequence[str]) -> dict:
    """What a run is: command, seed, configuration, code, packages, machine.

    Args:
        job: the module of `experiments` that was started.
        hosts: of all ranks.
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
    """The commit of a file's repository, and whether tracked files have been changed since; None where git
    does not track the file: an installed copy may lie in somebody else's repository."""

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
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # The metadata of PyPI's builds leave out what torch itself says: the CUDA that it was built for.
    return found | {"torch": torch.__version__}


def machine(mesh: fs.Mesh) -> dict[str, Any]:
    """The device of this rank and the host it is on."""
    found = {
        "device": mesh.device_type,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    if mesh.device_type == "cuda":
        gpu = torch.cuda.get_device_properties(mesh.device)
        found |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory, "cuda": torch.version.cuda}
    return found


# ------------------------------------------------------------------ time and work


@dataclass
class TimeSpent:
    """All seconds since this was made, by what they went to: one of `PARTS`. Of nested blocks the inner one
    counts, so that no second counts twice.

    >>> ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    >>> spent = TimeSpent(clock=lambda: next(ticks))
    >>> with spent.on("evaluation"), spent.on("samples"):
    ...     pass
    >>> {part: seconds for part, seconds in spent.parts().items() if seconds}
    {'evaluation': 6.0, 'samples': 3.0, 'other': 6.0}
    """

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def __post_init__(self) -> None:
        self._since, self._open = self.clock(), ["other"]

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        self._turn()
        self._open.append(part)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def parts(self) -> dict[str, float]:
        self._turn()
        return dict(self.seconds)

    def between_steps(self) -> float:
        """What neither steps nor compiling took."""
        return sum(seconds for part, seconds in self.parts().items() if part not in ("compile", "steps"))

    def _turn(self) -> None:
        since, self._since = self._since, self.clock()
        self.seconds[self._open[-1]] += self._since - since


@dataclass(frozen=True)
class StepWork:
    """What is predicted of a step, for one rank.

    `peak_flops`: per second, of the hardware; NaN where it is not known. `attention`: how many of one forward
    are which of torch's kernels. `prediction`: of its time, as `run.json` keeps it.
    """

    model_flops: float
    ranks: int
    peak_bytes: int
    peak_flops: float = math.nan
    attention: Mapping[str, int] = field(default_factory=dict)
    prediction: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(lowered: Any, hardware: fs.Hardware | None, predicted_for: fs.Hardware | None = None) -> StepWork:
        """Read off a lowered step; any hardware has the same FLOPs.

        Args:
            hardware: whose peak an MFU is a share of.
            predicted_for: whose speed its time is predicted with.
        """
        timeline = lowered.timeline(hardware or "cpu")
        peak = math.nan if hardware is None else timeline.peak_flops
        peak_bytes = lowered.memory_analysis().peak_bytes
        predicted = {} if predicted_for is None else prediction_of(lowered, predicted_for)
        return StepWork(timeline.model_flops, timeline.ranks, peak_bytes, peak, lowered.attention, predicted)

    def mfu(self, seconds: float) -> float:
        """Of a step that takes so long, as `fnshard.analysis.hardware.mfu` defines it."""
        return mfu(self.model_flops, seconds, self.peak_flops)


def peak_memory(device_type: str) -> tuple[int, str]:
    """The peak bytes of this process, and what they are of."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated(), "allocated on the device"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "of the process, libraries and all"


@dataclass
class RunRecord:
    """`run.json`: the facts, one entry for each process that has worked on the run, and their sum."""

    folder: Path
    facts: Mapping[str, Any]
    made: int = 0
    spent: TimeSpent = field(default_factory=TimeSpent)

    def __post_init__(self) -> None:
        self._started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            found = read_record(self.folder / RUN)
            if found is None and self.made and (self.folder / METRICS).exists():
                raise DamagedError(f"{self.folder / RUN} is missing.")
            self._known = found or {}
            for each in self._known.get("attempts", []):
                _ = float(each["seconds"]), each["spent_s"].get
            _ = dict(self._known.get("totals", {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = error if isinstance(error, DamagedError) else f"{self.folder / RUN} is no record of a run."
            print(f"{why} What earlier processes took is not known.", file=sys.stderr, flush=True)
            self._known = {}

    def write(
        self,
        status: str,
        step: int,
        attention: Mapping[str, int] | None = None,
        prediction: Mapping[str, Any] | None = None,
        **measured: float,
    ) -> dict[str, Any]:
        """The run after step `step`. What is NaN is not known, and what was known before stays.

        Args:
            attention: of `StepWork`; None: not known yet.
            prediction: of `StepWork`, with the seconds that a step has taken (`measured_s`).

        Returns:
            The totals over all processes.
        """
        parts = self.spent.parts()
        attempt = {
            "started": self._started,
            "revision": (self.facts.get("git") or {}).get("revision"),
            "steps": [self.made, step],
            "seconds": round(sum(parts.values()), 4),
            "spent_s": {name: round(seconds, 4) for name, seconds in parts.items()},
        }
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
    """The numbers of `VARIES`, for the result."""
    return {name: totals[name] for name in VARIES if name in totals}


def in_words(totals: Mapping[str, Any], memory_of: str = "") -> str:
    """The totals in two lines.

    Args:
        memory_of: what the measured memory is of.

    >>> print(in_words({"steps": 9, "seconds": 20.0, "compile_s": 5.0, "steps_s": 12.0,
    ...     "evaluation_s": 2.0, "saves_s": 1.0, "tracing_s": 0.0, "tokens_per_s": 1200.0, "mfu": 0.25,
    ...     "predicted_peak_bytes": 2e6, "measured_peak_bytes": 3e6}, "allocated on the device"))
    9 steps in 20.0 s, 1,200 tokens/s, MFU 25.0%; peak memory 2.0 MB predicted, 3.0 MB allocated on the device
    spent on: compile 5.0 s (25%), steps 12.0 s (60%), evaluation 2.0 s (10%), saves 1.0 s (5%)
    """
    seconds = max(totals["seconds"], 1e-9)
    mfu = f"MFU {totals['mfu']:.1%}" if "mfu" in totals else "MFU unknown (no known peak for this device)"
    memory = [
        f"{totals[name] / 1e6:.1f} MB {what}"
        for name, what in (("predicted_peak_bytes", "predicted"), ("measured_peak_bytes", memory_of))
        if name in totals
    ]
    speed = [f"{totals['tokens_per_s']:,.0f} tokens/s, {mfu}"] if "tokens_per_s" in totals else []
    head = ", ".join([f"{totals['steps']} steps in {seconds:.1f} s", *speed])
    parts = [(name, totals.get(f"{name}_s", 0.0)) for name in PARTS]
    shares = (f"{name} {each:.1f} s ({each / seconds:.0%})" for name, each in parts if each >= 0.05)
    return f"{head}; peak memory {', '.join(memory)}\nspent on: {', '.join(shares)}"
