"""Parts of the GPU hour: tests, waits for the device, where the time goes, equal bits, saves, predictions."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments import ROOT
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import Contender, Plan, Training, batches, make_task
from experiments.bench.measure import timed
from experiments.bench.peers import memory_of, mfu_of
from fnshard.debug.profile import DEVICE, LAUNCHES, PREFIX

Found = dict[str, Any]
CORE = ("trace", "differentiate", "remat", "schedule", "step")
# What a step has besides; each may bring a wait for the device of its own.
VARIANTS = {
    "plain": Plan(),
    "dropout": Plan(dropout=0.1),
    "clipping": Plan(clip=1.0),
    "micro-batches": Plan(options={"accumulate": 2}),
}


class GpuTraining:
    """`full_shard`, and batches that are on the device and come in turn."""

    def __init__(self, config: BenchConfig, plan: Plan = VARIANTS["plain"]):
        self.config, task = config, make_task(config)
        self.batches = list(batches(config, task, 4))
        self.training = Training(task, plan)
        self.feed = cycle(self.batches)

    def begin(self) -> None:
        self.training.begin()
        self.feed = cycle(self.batches)

    def run(self) -> Tensor:
        return self.training.run(*next(self.feed))

    def seconds(self, samples: int = 5, steps: int = 1) -> float:
        """Of a step: the median of samples of several steps each."""
        return median(timed(self.run, steps=steps, device=self.config.device) for _ in range(samples))

    def lowered(self) -> Any:
        return self.training.lowered(*self.batches[0])


def small(config: BenchConfig) -> BenchConfig:
    return replace(config, size="tiny", length=min(config.length, 256))


def versions(config: BenchConfig, folder: Path) -> Found:
    found: Found = {"torch": torch.__version__, "python": platform.python_version()}
    if config.device == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def tiny(config: BenchConfig, folder: Path) -> Found:
    """Five compiled steps of the smallest model, and which kernels its attention was frozen as."""
    training = GpuTraining(small(config))
    losses = [training.run().item() for _ in range(5)]
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"losses are not finite: {losses}")
    return {"losses": losses, "attention": training.lowered().attention}


# ------------------------------------------------------------------ tests


def tests(config: BenchConfig, folder: Path) -> Found:
    """The tests that need a GPU, but for the bench, which is parts of its own."""
    return pytest(["tests/runtime/test_gpu.py", "-m", "gpu", "-k", "not bench"])


def core(config: BenchConfig, folder: Path) -> Found:
    """The core's tests with the GPU hidden."""
    files = [next((ROOT / "tests").rglob(f"test_{name}.py")) for name in CORE]
    return pytest([*map(str, files), "-m", "not long and not gpu"], {"CUDA_VISIBLE_DEVICES": ""})


def pytest(which: Sequence[str], env: Mapping[str, str] | None = None) -> Found:
    """Counts, and the names of what failed. The plugins that `pyproject.toml` names need not be there."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", f"--junitxml={report}", *which]
        environment = {**os.environ, **(env or {})}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


def syncs(config: BenchConfig, folder: Path) -> Found:
    """The first place where steps 3 to 6 wait for the device, "" if there is none; None on a CPU, which has
    no such mode."""
    return {name: waits(GpuTraining(small(config), plan)) for name, plan in VARIANTS.items()}


def waits(training: GpuTraining) -> str | None:
    on_gpu = training.config.device == "cuda"
    for _ in range(2):
        training.run()
    if on_gpu:
        torch.cuda.synchronize()
    try:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            training.run()
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if f"{os.sep}fnshard{os.sep}" in f.filename), frames[-1])
        return f"{Path(place.filename).name}:{place.lineno} {place.line}: {str(error).splitlines()[0]}"
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return "" if on_gpu else None


# ------------------------------------------------------------------ bits, saves, predictions


def equal_bits(config: BenchConfig, folder: Path) -> Found:
    """Whether two equal runs of 20 steps have the same bits, as they are and with `deterministic=True`."""
    ways = {"plain": False, "deterministic": True}
    return {
        name: twice(GpuTraining(config, Plan(options={"deterministic": on}))) for name, on in ways.items()
    }


def twice(training: GpuTraining, steps: int = 20) -> Found:
    runs = []
    for _ in range(2):
        training.begin()
        losses = torch.stack([training.run() for _ in range(steps)]).tolist()
        runs.append((losses, {p: leaf.cpu() for p, leaf in training.training.state.params.items()}))
    (one, ones), (other, others) = runs
    apart = [path for path, leaf in ones.items() if not torch.equal(leaf, others[path])]
    return {"equal": not apart and one == other, "leaves_apart": len(apart), "step_s": training.seconds(3, 5)}


def saves(config: BenchConfig, folder: Path) -> Found:
    """What saves in the background take: the call, the step during it, all until it is on disk."""
    training = GpuTraining(config)
    for _ in range(3):
        training.run()
    found: Found = {"step_s": training.seconds(5)}
    with tempfile.TemporaryDirectory() as place:
        for name in ("first", "second"):
            timed(lambda: None, device=config.device)
            began = time.perf_counter()
            saving = fs.checkpoint.save_async(Path(place) / name, training.training.state)
            found[f"{name}_call_s"] = time.perf_counter() - began
            found[f"{name}_step_s"] = training.seconds(1)
            saving.wait()
            found[f"{name}_whole_s"] = time.perf_counter() - began
    return found


def predictions(config: BenchConfig, folder: Path) -> Found:
    """Bytes and seconds of a step, predicted and measured."""
    task = make_task(config)
    if config.device == "cuda":  # cuBLAS takes its workspace at the first product
        one = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
        one.mm(one)

    def made() -> Contender:
        training = Training(task, Plan())
        return Contender(training.run, training=training)

    found = memory_of(replace(config, memory=1), task, made)
    training = GpuTraining(config)
    training.run()
    lowered = training.lowered()
    found |= {
        "predicted_peak_bytes": lowered.memory_analysis().peak_bytes,
        "step_s": training.seconds(3, config.steps),
    }
    known = fs.Hardware.of_gpu(torch.cuda.get_device_name()) if config.device == "cuda" else None
    machines = {"data sheet": known, "measured rates": fs.Hardware.measure(training.training.step.mesh)}
    times = {name: lowered.timeline(hardware).step_seconds for name, hardware in machines.items() if hardware}
    return found | {"predicted_s": times}


# ------------------------------------------------------------------ where the time goes

KINDS = ("products", "attention", "elementwise", "update", "casts", "communication", "other", "idle")
TRACED = 3  # steps
Event = Mapping[str, Any]
# By the name of a kernel, or of an operator on a CPU; the first that matches. What has another name goes by
# the instruction that launched it.
NAMES = (
    ("communication", re.compile(r"nccl|c10d|gloo", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.I)),
    ("products", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|triton_tem|::(add|b)?mm\b|::matmul", re.I)),
)
UPDATES = ("update", "norms", "reduce_scalars")


def profile(config: BenchConfig, folder: Path) -> Found:
    """Milliseconds of a step by kind of work, from a trace that is left in `folder`; seconds without one."""
    training, trace = GpuTraining(config), folder / "trace.json"
    for _ in range(3):
        training.run()
    seconds = training.seconds(3, config.steps)
    with fs.profile.traced(training.training.step, trace):
        for _ in range(TRACED):
            training.run()
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return {"step_s": seconds, "traced_ms": split(events, TRACED), "mfu": mfu_of(config, seconds)}


def split(events: Iterable[Event], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kind of work, and what is none of them.

    On a GPU: kernels and copies that the device ran; between them it is idle. On a CPU: operators without
    those inside them, and instructions without their operators.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    worked = [e for e in spans if e.get("cat") in DEVICE]
    parts = list(_on_device(spans, worked) if worked else _on_host(spans))
    if not parts:
        raise ValueError("no instruction of a step is in the trace.")
    totals = dict.fromkeys(KINDS, 0.0)
    for kind, microseconds in parts:
        totals[kind] += microseconds
    of_steps = worked or [e for e in spans if _of_step(e)]
    step_us = max(e["ts"] + e["dur"] for e in of_steps) - min(e["ts"] for e in of_steps)
    totals["idle"] = step_us - _covered(of_steps)
    return {kind: total / steps / 1e3 for kind, total in totals.items()} | {"step": step_us / steps / 1e3}


def kind_of(name: str, span: str) -> str:
    """Of a kernel or operator that was launched by the instruction `span`, "" if by none."""
    for kind, pattern in NAMES:
        if pattern.search(name):
            return kind
    verb = span.rpartition(" ")[2]
    if not verb:
        return "other"
    return "update" if verb in UPDATES else "elementwise" if verb == "run" else "casts"


def _of_step(event: Event) -> bool:
    return event["name"].startswith(f"{PREFIX} ") and event.get("cat") != "gpu_user_annotation"


def _on_device(spans: Sequence[Event], worked: Sequence[Event]) -> Iterator[tuple[str, float]]:
    launches = {e["args"]["correlation"]: e for e in spans
                if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})}  # fmt: skip
    lines = sorted((e for e in spans if _of_step(e)), key=lambda e: e["ts"])
    for event in worked:
        launch = launches.get(event.get("args", {}).get("correlation"))
        around = [e for e in lines if launch and e["ts"] <= launch["ts"] <= e["ts"] + e["dur"]]
        yield kind_of(event["name"], around[-1]["name"] if around else ""), event["dur"]


def _on_host(spans: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Every operator's own time, and an instruction's; they nest."""
    named = [e for e in spans if e.get("cat") == "cpu_op" or _of_step(e)]
    nested = sorted(named, key=lambda e: (e["ts"], -e["dur"]))
    open_: list[tuple[Event, str, list[float]]] = []  # what is around: its instruction, what is inside of it
    for event in [*nested, None]:
        while open_ and (event is None or event["ts"] >= open_[-1][0]["ts"] + open_[-1][0]["dur"]):
            done, span, inside = open_.pop()
            if open_:
                open_[-1][2].append(done["dur"])
            if span:
                yield kind_of(done["name"], span), done["dur"] - sum(inside)
        if event is not None:
            span = event["name"] if _of_step(event) else open_[-1][1] if open_ else ""
            open_.append((event, span, []))


def _covered(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of them ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        start, stop = max(event["ts"], end), event["ts"] + event["dur"]
        total, end = total + max(stop - start, 0.0), max(end, stop)
    return total
