"""Parts that say whether something holds: a tiny step, tests, syncs, equal bits, saves, predictions."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments import ROOT
from experiments.bench.measure import make_task
from experiments.bench.memory import live_bytes
from experiments.gpu.setup import GpuSetup, GpuTraining, clocked

Found = dict[str, Any]
CORE = ("trace", "differentiate", "remat", "schedule", "step")  # `tests/versions.py` has them, too
# What a step is asked for beside; each may bring a wait for the device of its own.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "clipping": {"clip": 1.0},
    "micro-batches": {"accumulate": 2},
}


def versions(setup: GpuSetup) -> Found:
    found: Found = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if setup.device == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(),
            "bytes": torch.cuda.get_device_properties(0).total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def tiny(setup: GpuSetup) -> Found:
    """Five compiled steps of the smallest model, and which kernels its attention was frozen as."""
    training = GpuTraining(_small(setup))
    began = time.perf_counter()
    losses = [training.run().item() for _ in range(5)]
    seconds = time.perf_counter() - began
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"losses are not finite: {losses}")
    return {"losses": losses, "seconds": seconds, "attention": training.lowered().attention}


def _small(setup: GpuSetup) -> GpuSetup:
    return replace(setup, size="tiny", length=min(setup.length, 256))


# ------------------------------------------------------------------ tests


def tests(setup: GpuSetup) -> Found:
    """The tests that need a GPU, but for the bench, which is parts of its own."""
    return _pytest(["tests/runtime/test_gpu.py", "-m", "gpu", "-k", "not bench"])


def core(setup: GpuSetup) -> Found:
    """The core's tests with the GPU hidden."""
    files = [next((ROOT / "tests").rglob(f"test_{name}.py")) for name in CORE]
    return _pytest([*map(str, files), "-m", "not long and not gpu"], {"CUDA_VISIBLE_DEVICES": ""})


def _pytest(which: Sequence[str], env: Mapping[str, str] | None = None) -> Found:
    """Counts, and the names of what failed. The plugins that `pyproject.toml` names need not be there."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", f"--junitxml={report}", *which]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))

    def named(*kinds: str) -> list[str]:
        return [case.get("name", "") for case in cases if any(case.find(kind) is not None for kind in kinds)]

    failed, skipped = named("failure", "error"), named("skipped")
    passed = len(cases) - len(failed) - len(skipped)
    return {"passed": passed, "failed": failed, "skipped": len(skipped), "tail": done.stdout[-4000:]}


# ------------------------------------------------------------------ waits for the device


def syncs(setup: GpuSetup) -> Found:
    """The first place where steps 3 to 6 wait for the device, "" if there is none; None on a CPU, which has
    no such mode."""
    return {name: _waits(GpuTraining(_small(setup), **options)) for name, options in VARIANTS.items()}


def _waits(training: GpuTraining) -> str | None:
    for _ in range(2):
        training.run()
    training.setup.synchronize()
    try:
        _forbid(training.setup, "error")
        for _ in range(4):
            training.run()
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if f"{os.sep}fnshard{os.sep}" in f.filename), frames[-1])
        return f"{Path(place.filename).name}:{place.lineno} {place.line}: {str(error).splitlines()[0]}"
    finally:
        _forbid(training.setup, "default")
    return "" if training.setup.device == "cuda" else None


def _forbid(setup: GpuSetup, mode: str) -> None:
    if setup.device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


# ------------------------------------------------------------------ bits, saves, predictions


def equal_bits(setup: GpuSetup) -> Found:
    """Whether two equal runs of 20 steps have the same bits, as they are and with `deterministic=True`."""
    ways = {"plain": False, "deterministic": True}
    return {name: _again(GpuTraining(setup, deterministic=value)) for name, value in ways.items()}


def _again(training: GpuTraining, steps: int = 20) -> Found:
    runs = []
    for _ in range(2):
        training.begin()
        losses = [training.run() for _ in range(steps)]
        leaves = {path: leaf.cpu() for path, leaf in training.state.params.items()}
        runs.append((torch.stack(losses).tolist(), leaves))
    (one, ones), (other, others) = runs
    apart = [path for path, leaf in ones.items() if not torch.equal(leaf, others[path])]
    return {
        "equal": not apart and one == other,
        "leaves_apart": len(apart),
        "losses_apart": [step for step, (a, b) in enumerate(zip(one, other, strict=True)) if a != b],
        "step_s": training.seconds(3, 5),
    }


def saves(setup: GpuSetup) -> Found:
    """What saves in the background take: the call, the step beside it, all until it is on disk."""
    training = GpuTraining(setup)
    for _ in range(3):
        training.run()
    found: Found = {"step_s": training.seconds(5)}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            setup.synchronize()
            began = time.perf_counter()
            saving = fs.checkpoint.save_async(Path(folder) / name, training.state)
            found[f"{name}_call_s"] = time.perf_counter() - began
            found[f"{name}_step_beside_s"] = clocked(training.run, setup)
            saving.wait()
            found[f"{name}_whole_s"] = time.perf_counter() - began
        files = [f for f in (Path(folder) / "second").rglob("*") if f.is_file()]
        found["bytes"] = sum(f.stat().st_size for f in files)
    return found


def predictions(setup: GpuSetup) -> Found:
    """Bytes and seconds of a step, predicted and measured."""
    made: list[GpuTraining] = []
    task = make_task(setup.bench())  # the model itself is no part of the step

    def make() -> Any:
        made.append(GpuTraining(setup, 1, task))
        return made[-1].run

    if setup.device == "cuda":  # cuBLAS takes its workspace at the first product
        one = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
        one.mm(one)
    live = live_bytes(make, torch.device(setup.device), steps=3)
    training = made.pop()
    lowered = training.lowered()
    found: Found = {
        "peak_bytes": live.peak,
        "predicted_peak_bytes": lowered.memory_analysis().peak_bytes,
        "step_s": training.seconds(3, setup.steps),
    }
    known = fs.Hardware.of_gpu(torch.cuda.get_device_name()) if setup.device == "cuda" else None
    machines = {"data sheet": known, "measured rates": fs.Hardware.measure(training.step.mesh)}
    times = {name: lowered.timeline(hardware).step_seconds for name, hardware in machines.items() if hardware}
    return found | {"predicted_s": times}
