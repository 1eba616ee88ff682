"""Profile: the instructions of a step as spans of a `torch.profiler` trace, and read back as a `Timeline`.

    with fs.profile.traced(step, "trace.json"):      # a few steps, behind the first, which compiles
        for batch in batches:
            state, metrics = step(state, *batch)
    lowered = step.lower(state, *batch)
    measured = fs.profile.measured("trace.json", lowered)
    print(fs.profile.table(lowered, lowered.timeline("h100"), measured))

A step is bound a second time for this, with every instruction watched; outside, it runs as it did before.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from fnshard.analysis.hardware import Hardware
from fnshard.analysis.timeline import Span, Timeline
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    LANES,
    TRANSFER,
    Action,
    Env,
    Instruction,
    Run,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.errors import SpecError
from fnshard.step.lowered import Lowered
from fnshard.step.step import Step

__all__ = ["measured", "table", "traced"]

PREFIX = "fnshard"
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of a trace: what the host asked for
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # and what the device did of it
MICRO = 1e-6  # the unit of a trace


# ------------------------------------------------------------------ writing a trace


def span_name(number: int, line: Instruction) -> str:
    """What an instruction is called in a trace: its line of the schedule, phase, unit and verb."""
    return f"{PREFIX} {number} {line.phase} {line.unit} {line.verb}"


def _named(number: int, line: Instruction, action: Action) -> Action:
    name = span_name(number, line)

    def run(env: Env) -> None:
        with record_function(name):
            action(env)

    return run


@contextmanager
def traced(step: Step, path: str | Path) -> Iterator[None]:
    """Write a Chrome trace of the steps made in here, with a span for each instruction of the schedule.

    On several ranks each may trace its own, or one alone. Look at it in https://ui.perfetto.dev, or read it
    with `measured`.

    Args:
        step: it has run before, or compiling is in the trace.
        path: of the trace, JSON; its folder is made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = step.mesh.device_type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        with step.watching(_named):
            yield
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


# ------------------------------------------------------------------ reading a trace


@dataclass(frozen=True)
class _Stretch:
    """What one instruction did on one lane in one step; microseconds."""

    number: int
    lane: str
    start: float
    end: float


def measured(trace: str | Path | Mapping[str, Any], lowered: Lowered, hardware: Any = None) -> Timeline:
    """A step as it ran: by instruction the median start and length over the traced steps.

    On a CPU every instruction is a stretch of the one thread, on the lane of its kind. On CUDA the kernels
    and copies that an instruction has launched are what counts, and what the host updates.

    Args:
        trace: what `traced` wrote, or the same as a dict.
        lowered: the step that was traced.
        hardware: whose peak the MFU is a share of (`hardware.mfu`), as `lowered.timeline` takes it; None: it
            is NaN.

    Raises:
        SpecError: no instruction is in the trace, or those of another schedule are.
    """
    values = trace if isinstance(trace, Mapping) else json.loads(Path(trace).read_text(encoding="utf-8"))
    events = [e for e in values.get("traceEvents", ()) if e.get("ph") == "X"]
    hosts = _spans(events, lowered.schedule)
    on_device = _on_device(events, hosts, lowered.schedule)
    runs = _steps(hosts)
    stretches: dict[tuple[int, str], list[tuple[float, float]]] = {}
    seconds = []
    for spans in runs:
        began = spans[0]["ts"]
        ended = max(span["ts"] + span["dur"] for span in spans)
        for stretch in _of_step(spans, on_device, lowered.schedule):
            ended = max(ended, stretch.end)
            intervals = stretches.setdefault((stretch.number, stretch.lane), [])
            intervals.append((stretch.start - began, stretch.end - stretch.start))
        seconds.append((ended - began) * MICRO)
    spans = sorted(_medians(stretches, lowered.schedule), key=lambda s: (s.start, s.index))
    return _timeline(spans, statistics.median(seconds), lowered, hardware)


def _spans(events: Iterable[Mapping[str, Any]], schedule: Schedule) -> list[Mapping[str, Any]]:
    """The host's spans of instructions, in order of time."""
    named = [e for e in events if e["name"].startswith(f"{PREFIX} ") and e.get("cat") not in
             (*DEVICE, "gpu_user_annotation")]  # fmt: skip
    if not named:
        raise SpecError(
            "no instruction of a schedule is in this trace.",
            fix="make the steps within `with fs.profile.traced(step, path):`.",
        )
    expected = [span_name(number, line) for number, line in enumerate(schedule.instructions)]
    foreign = sorted({e["name"] for e in named} - set(expected))
    if foreign:
        raise SpecError(
            f"the trace is of another schedule; {len(foreign)} of its instructions are not in this one:",
            [repr(name) for name in foreign[:5]],
            "lower the step that was traced, with a batch of the same shape.",
        )
    return sorted(named, key=lambda e: e["ts"])


def _number(span: Mapping[str, Any]) -> int:
    return int(span["name"].split(" ", 2)[1])


def _steps(spans: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Cut where the schedule begins anew; a step that is not whole (it failed) is left out."""
    out: list[list[Mapping[str, Any]]] = []
    for span in spans:
        if not out or _number(span) <= _number(out[-1][-1]):
            out.append([])
        out[-1].append(span)
    longest = max(map(len, out))
    return [each for each in out if len(each) == longest]


def _on_device(
    events: Sequence[Mapping[str, Any]], hosts: Sequence[Mapping[str, Any]], schedule: Schedule
) -> dict[int, list[_Stretch]] | None:
    """By the identity of a span, what its launches did on the device; None where there is none."""
    launched = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})
    }
    worked = [e for e in events if e.get("cat") in DEVICE]
    if not worked:
        return None
    starts = [span["ts"] for span in hosts]
    out: dict[int, list[_Stretch]] = {}
    for event in worked:
        launch = launched.get(event.get("args", {}).get("correlation"))
        place = bisect_right(starts, launch["ts"]) - 1 if launch else -1
        if place < 0 or launch["ts"] > hosts[place]["ts"] + hosts[place]["dur"]:
            continue  # between instructions: nobody's
        if launch.get("tid") != hosts[place].get("tid"):
            continue  # a thread of its own, such as a loader's
        number = _number(hosts[place])
        lane = _device_lane(event, schedule.instructions[number])
        stretch = _Stretch(number, lane, event["ts"], event["ts"] + event["dur"])
        out.setdefault(id(hosts[place]), []).append(stretch)
    return out


def _device_lane(event: Mapping[str, Any], line: Instruction) -> str:
    if "nccl" in event["name"].lower():
        return COMMUNICATION
    return TRANSFER if event["cat"] == "gpu_memcpy" and line.lane == TRANSFER else COMPUTE


def _of_step(
    spans: Sequence[Mapping[str, Any]], on_device: Mapping[int, list[_Stretch]] | None, schedule: Schedule
) -> Iterator[_Stretch]:
    """What one step's instructions did, a stretch a lane."""
    for span in spans:
        number = _number(span)
        line = schedule.instructions[number]
        host = _Stretch(number, lane_of(line), span["ts"], span["ts"] + span["dur"])
        if on_device is None:
            yield host
            continue
        parts = on_device.get(id(span), [])
        if not parts and isinstance(line, Update):
            yield _Stretch(number, HOST, host.start, host.end)
        for lane in {part.lane for part in parts}:
            of_lane = [part for part in parts if part.lane == lane]
            yield _Stretch(number, lane, min(p.start for p in of_lane), max(p.end for p in of_lane))


def lane_of(line: Instruction) -> str:
    """Where an instruction stands on a machine that does one thing at a time: waiting is communication."""
    return line.of.lane if isinstance(line, Wait) else line.lane


def _medians(
    stretches: Mapping[tuple[int, str], Sequence[tuple[float, float]]], schedule: Schedule
) -> Iterator[Span]:
    for (number, lane), intervals in stretches.items():
        line = schedule.instructions[number]
        start = statistics.median(s for s, _ in intervals) * MICRO
        length = statistics.median(d for _, d in intervals) * MICRO
        yield Span(number, lane, start, start + length, line.verb, line.unit, line.phase)


def _timeline(spans: Sequence[Span], seconds: float, lowered: Lowered, hardware: Any) -> Timeline:
    paper = lowered.timeline(Hardware.of(hardware or "cpu"))  # FLOPs are the same on any
    exposed = {
        lane: _alone([s for s in spans if s.lane == lane], [s for s in spans if s.lane in (COMPUTE, HOST)])
        for lane in (COMMUNICATION, TRANSFER)
    }
    tokens = paper.tokens_per_second
    return Timeline(
        "measured" if hardware is None else f"{paper.hardware}, measured",
        seconds,
        tuple(spans),
        {lane: sum(s.end - s.start for s in spans if s.lane == lane) for lane in LANES},
        exposed[COMMUNICATION],
        exposed[TRANSFER],
        paper.model_flops,
        paper.hardware_flops,
        math.nan if hardware is None else paper.peak_flops,
        paper.ranks,
        None if tokens is None else tokens * paper.step_seconds / seconds,
    )


def _alone(spans: Sequence[Span], beside: Sequence[Span]) -> float:
    """How long some spans run while none of the others does."""
    edges = [(s.start, 1, 0) for s in spans] + [(s.end, -1, 0) for s in spans]
    edges += [(s.start, 0, 1) for s in beside] + [(s.end, 0, -1) for s in beside]
    total, mine, others, before = 0.0, 0, 0, 0.0
    for at, a, b in sorted(edges):
        if mine and not others:
            total += at - before
        mine, others, before = mine + a, others + b, at
    return total


# ------------------------------------------------------------------ beside the prediction


def table(lowered: Lowered, predicted: Timeline, measured: Timeline) -> str:
    """Predicted beside measured seconds, by kind of instruction: a Wait counts as what it waits for.

    Kinds that no time was foretold for, and none was measured of, are left out.
    """
    lines = lowered.schedule.instructions
    both = [_by_kind(t, lines) for t in (predicted, measured)]
    kinds = sorted(set(both[0]) | set(both[1]), key=lambda k: -max(t.get(k, 0.0) for t in both))
    rows = [("step", predicted.step_seconds, measured.step_seconds)]
    rows += [(f"  {k}", both[0].get(k, 0.0), both[1].get(k, 0.0)) for k in kinds]
    exposed = [t.exposed_communication_seconds for t in (predicted, measured)]
    rows.append(("exposed communication", *exposed))
    out = [f"{'':24s} {'predicted':>12s} {'measured':>12s} {'ratio':>7s}   (predicted: {predicted.hardware})"]
    for name, a, b in rows:
        ratio = f"{b / a:7.2f}" if a else f"{'-':>7s}"
        out.append(f"{name:24s} {a * 1e3:9.3f} ms {b * 1e3:9.3f} ms {ratio}")
    return "\n".join(out)


def _by_kind(timeline: Timeline, lines: Sequence[Instruction]) -> dict[str, float]:
    out: dict[str, float] = {}
    for span in timeline.spans:
        kind = _kind(lines[span.index])
        out[kind] = out.get(kind, 0.0) + span.end - span.start
    return out


def _kind(line: Instruction) -> str:
    if isinstance(line, Run):
        return f"run {'backward' if line.backward else 'forward'}"
    return (line.of if isinstance(line, Wait) else line).verb
