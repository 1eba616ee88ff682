"""What a run is and what it took, in `run.json`; written at every checkpoint and at the end."""

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.data.files import read_json, write_json
from fnshard.analysis.hardware import mfu

RUN = "run.json"
PACKAGES = (
    "fnshard", "torch", "numpy", "hydra-core", "safetensors", "transformers", "tensorboard", "wandb",
    "mlflow-skinny",
)  # fmt: skip
# What the time of a process goes to: all of it, "other" is the rest.
PARTS = (
    "start", "compile", "steps", "data", "evaluation", "samples", "saves", "export", "tracing", "reports",
    "other",
)  # fmt: skip
# What of a result differs from run to run of one configuration.
VARIES = ("mfu", "measured_peak_bytes", "predicted_peak_bytes", *(f"{name}_s" for name in PARTS))
HERE = Path(__file__).resolve()


# ------------------------------------------------------------------ at the start


def facts_of(config: Any, command: str, mesh: fs.Mesh, hosts: Sequence[str]) -> dict[str, Any]:
    """What a run is: command, seed, configuration, code, packages, machine."""
    return {
        "command": command,
        "seed": config.run.seed,
        "git": git_of(HERE),
        "packages": packages(),
        "hardware": {**machine(mesh), "ranks": mesh.size, "hosts": sorted(set(hosts))},
        "config": dataclasses.asdict(config),
    }


def command_of(job: str, overrides: Sequence[str]) -> str:
    """The command line, as a shell takes it.

    >>> command_of("train", ["model=5m", "run.prompt=def x"])
    "python -m experiments.train model=5m 'run.prompt=def x'"
    """
    return shlex.join(["python", "-m", f"experiments.{job}", *overrides])


def git_of(file: Path) -> dict[str, Any] | None:
    """The commit that a file is of, and whether tracked files have been changed since; None where git does
    not know the file (an installed copy, which may lie in somebody else's repository)."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", file.name) is None:
        return None
    revision, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return revision and {"revision": revision, "dirty": bool(changed)}


def packages() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine(mesh: fs.Mesh) -> dict[str, Any]:
    """The device of this rank and the host it is on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "device": mesh.device_type,
        "cpu": _cpu_name(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    if mesh.device_type == "cuda":
        properties = torch.cuda.get_device_properties(mesh.device)
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


# ------------------------------------------------------------------ meanwhile


@dataclass
class TimeSpent:
    """All seconds since this was made, by what they went to: one of `PARTS`. Of blocks in blocks the inner
    one counts, so that no second counts twice.

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

    def _turn(self) -> None:
        since, self._since = self._since, self.clock()
        self.seconds[self._open[-1]] += self._since - since


@dataclass(frozen=True)
class StepWork:
    """What a step is on paper, for one rank.

    `peak_flops`: per second, of the hardware named `hardware`; None where nobody knows it. `attention`: how
    many of one forward are which of torch's kernels.
    """

    model_flops: float
    ranks: int
    peak_bytes: int
    hardware: str = ""
    peak_flops: float | None = None
    attention: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(lowered: Any, hardware: fs.Hardware | None) -> StepWork:
        """Read off a lowered step; any hardware has the same FLOPs."""
        paper = lowered.timeline(hardware or "cpu")
        peak = paper.peak_flops if hardware else None
        named = hardware.name if hardware else ""
        peak_bytes = lowered.memory_analysis().peak_bytes
        return StepWork(paper.model_flops, paper.ranks, peak_bytes, named, peak, lowered.attention)

    def mfu(self, seconds: float) -> float | None:
        """Of a step that takes so long, as `fnshard.analysis.hardware.mfu` defines it."""
        return None if self.peak_flops is None else mfu(self.model_flops, seconds, self.peak_flops)


def peak_memory(device_type: str) -> tuple[int, str]:
    """The peak bytes of this process, and of what they are."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated(), "allocated on the device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "of the process, libraries and all"


@dataclass
class RunRecord:
    """`run.json`: the facts, one entry for each process that has worked on the run, and their sum."""

    folder: Path
    facts: Mapping[str, Any]
    made: int = 0
    spent: TimeSpent = field(default_factory=TimeSpent)

    def __post_init__(self) -> None:
        self._started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        known = read_json(self.folder / RUN)
        self._attempts: list[dict[str, Any]] = known.get("attempts", [])
        self._totals: dict[str, Any] = known.get("totals", {})
        self._attention: Mapping[str, int] | None = known.get("attention")

    def write(
        self,
        status: str,
        step: int,
        compile_s: float,
        attention: Mapping[str, int] | None = None,
        **measured: Any,
    ) -> dict[str, Any]:
        """How the run stands behind step `step`; what is None is not known, and what was known before stays.

        Args:
            compile_s: of the seconds of steps, those in which the first one was compiled.
            attention: of `StepWork`.

        Returns:
            The totals over all processes.
        """
        parts = self.spent.parts()
        parts["compile"] += compile_s
        parts["steps"] -= compile_s
        git = self.facts.get("git") or {}
        attempt = {
            "started": self._started,
            "revision": git.get("revision"),
            "steps": [self.made, step],
            "seconds": round(sum(parts.values()), 4),
            "spent_s": {name: round(seconds, 4) for name, seconds in parts.items()},
        }
        attempts = [*self._attempts, attempt]
        known = {n: v for n, v in measured.items() if v is not None and math.isfinite(v)}  # JSON has no NaN
        totals = {**self._totals, "steps": step, "seconds": round(sum(a["seconds"] for a in attempts), 4)}
        each = [attempt.get("spent_s", {}) for attempt in attempts]
        totals |= {f"{name}_s": round(sum(spent.get(name, 0.0) for spent in each), 4) for name in PARTS}
        totals |= known
        self._attention = self._attention if attention is None else attention
        values = {"status": status, "totals": totals, "attempts": attempts, "attention": self._attention}
        values |= self.facts
        write_json(self.folder / RUN, values)
        return totals


def varying(totals: Mapping[str, Any]) -> dict[str, Any]:
    return {name: totals[name] for name in VARIES if name in totals}


def in_words(totals: Mapping[str, Any], told_of: str = "") -> str:
    """The totals in two lines.

    Args:
        told_of: what the measured memory is of.

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
        for name, what in (("predicted_peak_bytes", "predicted"), ("measured_peak_bytes", told_of))
        if name in totals
    ]
    speed = [f"{totals['tokens_per_s']:,.0f} tokens/s, {mfu}"] if "tokens_per_s" in totals else []
    head = ", ".join([f"{totals['steps']} steps in {seconds:.1f} s", *speed])
    parts = [(name, totals.get(f"{name}_s", 0.0)) for name in PARTS]
    shares = (f"{name} {each:.1f} s ({each / seconds:.0%})" for name, each in parts if each >= 0.05)
    return f"{head}; peak memory {', '.join(memory)}\nspent on: {', '.join(shares)}"
