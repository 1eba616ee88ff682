"""Profiles: trace a step's instructions as spans with `torch.profiler`, and read them as a `Timeline`.

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
# Categories of events in a trace: what the host asked for, and what the device did.
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MICRO = 1e-6  # the unit of a trace's times, in seconds
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
    """Write a Chrome trace of the steps in the block, with a span for each instruction of the schedule.

    On several ranks each may trace its own, or one alone. Look at the trace in https://ui.perfetto.dev, or
    read it with `measured`.

    Args:
        step: a step that has run before, since otherwise its compilation would be in the trace.
        path: the file of the trace, JSON; its folder is made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = step.mesh.device_type == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        with step.watching(_record):
            yield
        if on_gpu:
            torch.cuda.synchronize()  # so that the trace has the last kernels, too
    profiler.export_chrome_trace(str(path))


def measured(trace: str | Path | Mapping[str, Any], lowered: Lowered, hardware: Any = None) -> Timeline:
    """Read a step as it ran: for each instruction the median start and length over the traced steps.

    On a CPU every instruction is a stretch of the one thread, on the lane of its kind. On CUDA it is the
    kernels and copies that the instruction launched, or the update that the host makes.

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
    host_spans = _find_spans(events, lowered.schedule)
    launched = _find_launched(events, host_spans)

    # Collect for each line and lane its start and length in every step, and the length of every step.
    stretches: dict[tuple[int, str], list[tuple[float, float]]] = {}
    seconds = []
    for spans in _cut_into_steps(host_spans):
        step_start = spans[0]["ts"]
        step_end = max(map(_find_end, spans))
        for span in spans:
            number = _read_number(span)
            for lane, start, end in _find_lanes(span, lowered.schedule.instructions[number], launched):
                step_end = max(step_end, end)  # the device may finish after the host
                stretches.setdefault((number, lane), []).append((start - step_start, end - start))
        seconds.append((step_end - step_start) * MICRO)
    return _make_timeline(stretches, statistics.median(seconds), lowered, hardware)


def _find_spans(events: Iterable[Event], schedule: Schedule) -> list[Event]:
    """Return the host's spans of instructions, in order of time; refuse those of another schedule."""
    # The profiler copies a span to the device's side of the trace, as an annotation there.
    not_host = (*DEVICE, "gpu_user_annotation")
    named = [e for e in events if e["name"].startswith(f"{PREFIX} ") and e.get("cat") not in not_host]
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


def _read_number(span: Event) -> int:
    """Return the number of a span's line in the schedule."""
    return int(span["name"].split(" ", 2)[1])


def _find_end(event: Event) -> float:
    """Return the time at which an event ends, in microseconds."""
    return event["ts"] + event["dur"]


def _cut_into_steps(spans: Sequence[Event]) -> list[list[Event]]:
    """Cut spans into steps, where the schedule begins anew; leave out a step that failed before its end."""
    steps: list[list[Event]] = []
    for span in spans:
        if not steps or _read_number(span) <= _read_number(steps[-1][-1]):
            steps.append([])
        steps[-1].append(span)
    longest = max(map(len, steps))
    return [step for step in steps if len(step) == longest]


def _find_launched(events: Sequence[Event], host_spans: Sequence[Event]) -> dict[int, list[Event]] | None:
    """Return what the device did for each span of the host, by the span's `id`; None without a device."""
    on_device = [e for e in events if e.get("cat") in DEVICE]
    if not on_device:
        return None
    # An event on the device and the host's call that launched it have the same correlation number.
    calls = {e.get("args", {}).get("correlation"): e for e in events if e.get("cat") in LAUNCHES}
    starts = [span["ts"] for span in host_spans]
    launched: dict[int, list[Event]] = {}
    for event in on_device:
        call = calls.get(event.get("args", {}).get("correlation"))
        if call is None:
            continue
        # The last span that began before the launch is the one that the launch is in, if any.
        index = bisect_right(starts, call["ts"]) - 1
        if index < 0:
            continue
        # What is launched between instructions, or by another thread, such as a loader's, is no span's.
        span = host_spans[index]
        if call["ts"] <= _find_end(span) and call.get("tid") == span.get("tid"):
            launched.setdefault(id(span), []).append(event)
    return launched


def _find_lanes(
    span: Event, line: Instruction, launched: Mapping[int, list[Event]] | None
) -> list[tuple[str, float, float]]:
    """Return when an instruction was at work, lane by lane: (lane, start, end)."""
    start, end = span["ts"], _find_end(span)
    if launched is None:  # a machine that does one thing at a time: waiting is communication
        return [(line.of.lane if isinstance(line, Wait) else line.lane, start, end)]

    # Sort what the device did by its lane; an instruction may use several.
    lanes: dict[str, list[Event]] = {}
    for event in launched.get(id(span), ()):
        if "nccl" in event["name"].lower():
            lane = COMMUNICATION
        elif line.lane == OPTIMIZER:
            lane = OPTIMIZER
        elif line.lane == TRANSFER and event["cat"] == "gpu_memcpy":
            lane = TRANSFER
        else:
            lane = COMPUTE
        lanes.setdefault(lane, []).append(event)
    # An update that launched nothing is made by the host.
    if not lanes and isinstance(line, Update):
        return [(HOST, start, end)]
    return [(lane, min(e["ts"] for e in done), max(map(_find_end, done))) for lane, done in lanes.items()]


def _make_timeline(
    stretches: Mapping[tuple[int, str], Sequence[tuple[float, float]]],
    seconds: float,
    lowered: Lowered,
    hardware: Any,
) -> Timeline:
    """Return a timeline of the medians over the steps."""
    # What a trace does not tell is taken from the predicted timeline; FLOPs are the same on any hardware.
    predicted = lowered.timeline(Hardware.of(hardware or "cpu"))
    communicators = {(s.index, s.lane): s.communicator for s in predicted.spans}
    spans = []
    for (number, lane), intervals in stretches.items():
        line = lowered.schedule.instructions[number]
        start = statistics.median(s for s, _ in intervals) * MICRO
        end = start + statistics.median(d for _, d in intervals) * MICRO
        communicator = communicators.get((number, lane), "")
        spans.append(Span(number, lane, start, end, line.verb, line.unit, line.phase, communicator))
    spans.sort(key=lambda s: (s.start, s.index))
    busy = [s for s in spans if s.lane in (COMPUTE, HOST)]
    tokens = predicted.tokens_per_second
    return Timeline(
        "measured" if hardware is None else f"{predicted.hardware}, measured",
        seconds,
        tuple(spans),
        {lane: time_alone([s for s in spans if s.lane == lane]) for lane in LANES},
        time_alone([s for s in spans if s.lane == COMMUNICATION], busy),
        time_alone([s for s in spans if s.lane == TRANSFER], busy),
        predicted.model_flops,
        predicted.hardware_flops,
        math.nan if hardware is None else predicted.peak_flops,
        predicted.ranks,
        None if tokens is None else tokens * predicted.step_seconds / seconds,
    )


def table(lowered: Lowered, predicted: Timeline, measured: Timeline) -> str:
    """Return a table of predicted and measured milliseconds by kind of instruction, as text.

    A Wait counts as what it waits for. A kind that has neither time is left out.
    """
    # Kinds are sorted by the longer of both times.
    lines = lowered.schedule.instructions
    times = [by_kind(t, lines) for t in (predicted, measured)]
    kinds = sorted(set(times[0]) | set(times[1]), key=lambda k: -max(t.get(k, 0.0) for t in times))
    rows = [("step", predicted.step_seconds, measured.step_seconds)]
    rows += [(f"  {k}", times[0].get(k, 0.0), times[1].get(k, 0.0)) for k in kinds]
    exposed = [t.exposed_communication_seconds for t in (predicted, measured)]
    rows.append(("exposed communication", *exposed))
    out = [f"{'':24s} {'predicted':>12s} {'measured':>12s} {'ratio':>7s}   (predicted: {predicted.hardware})"]
    for name, expected, actual in rows:
        ratio = f"{actual / expected:7.2f}" if expected else f"{'-':>7s}"
        out.append(f"{name:24s} {expected * 1e3:9.3f} ms {actual * 1e3:9.3f} ms {ratio}")
    return "\n".join(out)


def by_kind(timeline: Timeline, lines: Sequence[Instruction]) -> dict[str, float]:
    """Return the seconds of a timeline by the kind of its instructions, as `kind_of` names it."""
    out: dict[str, float] = {}
    for span in timeline.spans:
        kind = kind_of(lines[span.index])
        out[kind] = out.get(kind, 0.0) + span.end - span.start
    return out


def exposed(timeline: Timeline) -> dict[int, float]:
    """Return, for the line of each collective and transfer, the seconds in which nothing is computed."""
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
