"""Profile: trace a step's instructions as spans with `torch.profiler`, and read them back as a `Timeline`.

    with fs.profile.traced(step, "trace.json"):      # a few steps, after the first, which compiles
        for batch in batches:
            state, metrics = step(state, *batch)
    lowered = step.lower(state, *batch)
    measured = fs.profile.measured("trace.json", lowered)
    print(fs.profile.table(lowered, lowered.timeline("h100"), measured))

A step is bound a second time for this, with every instruction watched; outside of `traced` it runs as before.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from fnshard.analysis.hardware import Hardware
from fnshard.analysis.timeline import Span, Timeline, time_alone
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    LANES,
    OPTIMIZER,
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

__all__ = ["by_kind", "exposed", "kind_of", "measured", "table", "traced"]

PREFIX = "fnshard"
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of events in a trace: what the host asked for
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # and what the device did
MICRO = 1e-6  # the unit of a trace
Event = Mapping[str, Any]


def span_name(number: int, line: Instruction) -> str:
    """Return an instruction's name in a trace: its line of the schedule, phase, unit and verb."""
    return f"{PREFIX} {number} {line.phase} {line.unit} {line.verb}"


def _record(number: int, line: Instruction, action: Action) -> Action:
    """Return an action that runs the given one in a span of the trace."""
    name = span_name(number, line)

    def run(env: Env) -> None:
        with record_function(name):
            action(env)

    return run


@contextmanager
def traced(step: Step, path: str | Path) -> Iterator[None]:
    """Write a Chrome trace of the steps made in here, with a span for each instruction of the schedule.

    On several ranks each may trace its own, or one alone. Look at the trace in https://ui.perfetto.dev, or
    read it with `measured`.

    Args:
        step: one that has run before, or compiling would be in the trace.
        path: the file of the trace, JSON; its folder is made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = step.mesh.device_type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        with step.watching(_record):
            yield
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def measured(trace: str | Path | Mapping[str, Any], lowered: Lowered, hardware: Any = None) -> Timeline:
    """Read a step as it ran: by instruction the median start and length over the traced steps.

    On a CPU every instruction is a stretch of the one thread, on the lane of its kind. On CUDA what counts
    are the kernels and copies that an instruction launched, and the updates that the host makes.

    Args:
        trace: what `traced` wrote, or the same as a dict.
        lowered: the step that was traced.
        hardware: the hardware whose peak the MFU is a share of (`hardware.mfu`), as `lowered.timeline` takes
            it; without it the MFU is NaN.

    Raises:
        SpecError: the trace holds no instruction, or those of another schedule.
    """
    values = trace if isinstance(trace, Mapping) else json.loads(Path(trace).read_text(encoding="utf-8"))
    events = [e for e in values.get("traceEvents", ()) if e.get("ph") == "X"]
    hosts = _spans(events, lowered.schedule)
    launched = _find_launched(events, hosts)

    stretches: dict[tuple[int, str], list[tuple[float, float]]] = {}
    seconds = []
    for spans in _steps(hosts):
        began = spans[0]["ts"]
        ended = max(map(_end, spans))
        for span in spans:
            number = _number(span)
            for lane, start, end in _lanes(span, lowered.schedule.instructions[number], launched):
                ended = max(ended, end)
                stretches.setdefault((number, lane), []).append((start - began, end - start))
        seconds.append((ended - began) * MICRO)
    return _timeline(stretches, statistics.median(seconds), lowered, hardware)


def _spans(events: Iterable[Event], schedule: Schedule) -> list[Event]:
    """Return the host's spans of instructions, in order of time; refuse those of another schedule."""
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


def _number(span: Event) -> int:
    """Return the line of the schedule that a span is of."""
    return int(span["name"].split(" ", 2)[1])


def _end(event: Event) -> float:
    """Return the time at which an event ends, in microseconds."""
    return event["ts"] + event["dur"]


def _steps(spans: Sequence[Event]) -> list[list[Event]]:
    """Cut spans into steps, where the schedule begins anew; leave out a step that failed before its end."""
    out: list[list[Event]] = []
    for span in spans:
        if not out or _number(span) <= _number(out[-1][-1]):
            out.append([])
        out[-1].append(span)
    longest = max(map(len, out))
    return [each for each in out if len(each) == longest]


def _find_launched(events: Sequence[Event], hosts: Sequence[Event]) -> dict[int, list[Event]] | None:
    """Return what the device did for each span of the host, by the span's `id`; None without a device."""
    worked = [e for e in events if e.get("cat") in DEVICE]
    if not worked:
        return None
    calls = {e.get("args", {}).get("correlation"): e for e in events if e.get("cat") in LAUNCHES}
    starts = [span["ts"] for span in hosts]
    out: dict[int, list[Event]] = {}
    for event in worked:
        call = calls.get(event.get("args", {}).get("correlation"))
        # The last span that began before the launch is the one that it lies in, if any.
        place = bisect_right(starts, call["ts"]) - 1 if call else -1
        # What is launched between instructions, or by another thread, such as a loader's, is no span's.
        if place >= 0 and call["ts"] <= _end(hosts[place]) and call.get("tid") == hosts[place].get("tid"):
            out.setdefault(id(hosts[place]), []).append(event)
    return out


def _lanes(
    span: Event, line: Instruction, launched: Mapping[int, list[Event]] | None
) -> list[tuple[str, float, float]]:
    """Return when an instruction was at work, lane by lane: (lane, start, end)."""
    host = span["ts"], _end(span)
    if launched is None:  # a machine that does one thing at a time: waiting is communication
        return [(line.of.lane if isinstance(line, Wait) else line.lane, *host)]
    lanes: dict[str, list[Event]] = {}
    for event in launched.get(id(span), ()):
        copies = event["cat"] == "gpu_memcpy" and line.lane == TRANSFER
        own = OPTIMIZER if line.lane == OPTIMIZER else TRANSFER if copies else COMPUTE
        lane = COMMUNICATION if "nccl" in event["name"].lower() else own
        lanes.setdefault(lane, []).append(event)
    # An update that launched nothing is made by the host.
    if not lanes and isinstance(line, Update):
        return [(HOST, *host)]
    return [(lane, min(e["ts"] for e in own), max(map(_end, own))) for lane, own in lanes.items()]


def _timeline(
    stretches: Mapping[tuple[int, str], Sequence[tuple[float, float]]],
    seconds: float,
    lowered: Lowered,
    hardware: Any,
) -> Timeline:
    """Return a timeline of the medians over the steps."""
    paper = lowered.timeline(Hardware.of(hardware or "cpu"))  # FLOPs are the same on any
    communicators = {(s.index, s.lane): s.communicator for s in paper.spans}
    spans = []
    for (number, lane), intervals in stretches.items():
        line = lowered.schedule.instructions[number]
        start = statistics.median(s for s, _ in intervals) * MICRO
        end = start + statistics.median(d for _, d in intervals) * MICRO
        about = line.verb, line.unit, line.phase
        spans.append(Span(number, lane, start, end, *about, communicators.get((number, lane), "")))
    spans.sort(key=lambda s: (s.start, s.index))
    busy = [s for s in spans if s.lane in (COMPUTE, HOST)]
    tokens = paper.tokens_per_second
    return Timeline(
        "measured" if hardware is None else f"{paper.hardware}, measured",
        seconds,
        tuple(spans),
        {lane: time_alone([s for s in spans if s.lane == lane]) for lane in LANES},
        time_alone([s for s in spans if s.lane == COMMUNICATION], busy),
        time_alone([s for s in spans if s.lane == TRANSFER], busy),
        paper.model_flops,
        paper.hardware_flops,
        math.nan if hardware is None else paper.peak_flops,
        paper.ranks,
        None if tokens is None else tokens * paper.step_seconds / seconds,
    )


def table(lowered: Lowered, predicted: Timeline, measured: Timeline) -> str:
    """Return a table of predicted and measured milliseconds by kind of instruction, as text.

    A Wait counts as what it waits for. A kind that has neither time is left out.
    """
    lines = lowered.schedule.instructions
    both = [by_kind(t, lines) for t in (predicted, measured)]
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


def by_kind(timeline: Timeline, lines: Sequence[Instruction]) -> dict[str, float]:
    """Return the seconds of a timeline by the kind of its instructions, as `kind_of` names it."""
    out: dict[str, float] = {}
    for span in timeline.spans:
        kind = kind_of(lines[span.index])
        out[kind] = out.get(kind, 0.0) + span.end - span.start
    return out


def exposed(timeline: Timeline) -> dict[int, float]:
    """Return the seconds of each collective and transfer in which nothing is computed, by its line."""
    busy = [s for s in timeline.spans if s.lane in (COMPUTE, HOST)]
    out: dict[int, float] = {}
    for span in timeline.spans:
        if span.lane in (COMMUNICATION, TRANSFER):
            out[span.index] = out.get(span.index, 0.0) + time_alone([span], busy)
    return out


def kind_of(line: Instruction) -> str:
    """Return what an instruction does: its verb, or that of what it waits for; a kernel's direction."""
    if isinstance(line, Run):
        return f"run {'backward' if line.of_backward else 'forward'}"
    return (line.of if isinstance(line, Wait) else line).verb
