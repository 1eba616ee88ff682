"""Where the time of a step goes, by a trace: products, attention, elementwise, update, casts, idle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.bench.report import model_flops
from experiments.gpu.setup import GpuSetup, GpuTraining
from fnshard.analysis.hardware import mfu
from fnshard.debug.profile import DEVICE, LAUNCHES, PREFIX

KINDS = ("products", "attention", "elementwise", "update", "casts", "communication", "other", "idle")
STEPS = 3  # that are traced
Event = Mapping[str, Any]
# By the name of a kernel, or of an operator on a CPU; the first that matches. What has another name is told
# by the instruction that launched it.
NAMES = (
    ("communication", re.compile(r"nccl|c10d|gloo", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.I)),
    ("products", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|triton_tem|::(add|b)?mm\b|::matmul", re.I)),
)
UPDATES = ("update", "norms", "reduce_scalars")


def profile(setup: GpuSetup, trace: Path) -> dict[str, Any]:
    """Milliseconds of a step by kind, from a trace that is left at `trace`; seconds of a step without one."""
    training = GpuTraining(setup)
    for _ in range(3):
        training.run()
    seconds = training.seconds(3, setup.steps)
    with fs.profile.traced(training.step, trace):
        for _ in range(STEPS):
            training.run()
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    found: dict[str, Any] = {"step_s": seconds, "traced_ms": split(events, STEPS)}
    known = fs.Hardware.of_gpu(torch.cuda.get_device_name()) if setup.device == "cuda" else None
    if known is not None:
        config = setup.bench()
        found["mfu"] = mfu(model_flops(config), seconds, known.peak_flops[config.dtype.replace("fp", "f")])
    return found


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
