"""Device time: the kinds of work, kernels, gaps and copies of a step, from a trace of `torch.profiler`.

On a GPU kernels and copies count. A trace of a CPU has none, so instructions of a schedule take their place,
or, without any, PyTorch's outermost operators. Times of a trace are microseconds; results are milliseconds of
a step.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fnshard.debug.profile import DEVICE, LAUNCHES, PREFIX

Event = Mapping[str, Any]
KINDS = (
    "products", "attention", "elementwise", "update", "casts", "communication", "other", "idle",
)  # fmt: skip
# The kind of a kernel is the first whose pattern its name matches...
BY_NAME = (
    ("communication", re.compile(r"nccl|c10d|gloo", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.I)),
    ("products", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|triton_tem", re.I)),
)
# ... or else the one of the verb of the instruction that launched it.
BY_VERB = {
    "run": "elementwise", "update": "update", "overlapped_update": "update", "norms": "update",
    "reduce_update": "update", "stack_update": "update", "compute_stack": "update",
    "reduce_scalars": "update", "": "other",
}  # fmt: skip
# In a step without instructions it is the first of these.
OF_TORCH = (
    ("update", re.compile(r"adam|multi_tensor|foreach", re.I)),
    ("casts", re.compile(r"memcpy|memset|copy|::to\b", re.I)),
    ("elementwise", re.compile(r"triton|elementwise|reduce|softmax|index|scatter|embedding", re.I)),
    ("products", re.compile(r"mm\b|linear|backward", re.I)),
)
GAP_US = 5.0  # a device that waits less than this is busy: launches are never closer together
SHOWN = 12  # the kernels that are listed
LONGEST = 5  # the gaps that are listed
NAME = 64  # the letters that are shown of a kernel's name


@dataclass(frozen=True)
class DeviceTrace:
    """A trace of a device's work over some steps, in order of time.

    Args:
        work: kernels and copies, or the events that take their place.
        lines: the spans of instructions on the host. A step that is not fnshard's has none.
        launches: the times at which the host launched the work, by correlation; empty on a CPU.
        steps: the number of steps that were traced.
    """

    work: list[Event]
    lines: list[Event]
    launches: Mapping[Any, float]
    steps: int

    @cached_property
    def line_starts(self) -> list[float]:
        return [line["ts"] for line in self.lines]

    @property
    def on_device(self) -> bool:
        return bool(self.work) and self.work[0].get("cat") in DEVICE


def read_events(events: Iterable[Event], steps: int) -> DeviceTrace:
    """Find the device's work in the events of a trace.

    Raises:
        ValueError: the trace holds no work.
    """
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
    lines = [e for e in spans if e["name"].startswith(f"{PREFIX} ") and e.get("cat") != "gpu_user_annotation"]
    launches = {_get_correlation(e): e["ts"] for e in spans if e.get("cat") in LAUNCHES}
    launches.pop(None, None)  # those without a correlation
    work = [e for e in spans if e.get("cat") in DEVICE]
    if not work:
        work = lines or list(_drop_nested(e for e in spans if e.get("cat") == "cpu_op"))
    if not work:
        raise ValueError("no kernel, instruction or operator of a step is in the trace.")
    return DeviceTrace(work, lines, launches, steps)


def _get_correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _drop_nested(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events that are not within others of their thread."""
    ends: dict[Any, float] = {}
    for event in events:
        if event["ts"] >= ends.get(event.get("tid"), -math.inf):
            ends[event.get("tid")] = event["ts"] + event["dur"]
            yield event


def time_kinds(trace: DeviceTrace) -> dict[str, float]:
    """Return the milliseconds of a step by kind of work. In those of "idle" no work runs."""
    totals = dict.fromkeys(KINDS, 0.0)
    for event in trace.work:
        totals[_find_kind(event, trace)] += event["dur"]
    totals["idle"] = sum(length for length, _, _ in _find_gaps(trace.work, least=0.0))
    return {kind: total / trace.steps / 1e3 for kind, total in totals.items()}


def _find_kind(event: Event, trace: DeviceTrace) -> str:
    """Return the kind of an event of the work, one of `KINDS`."""
    for kind, pattern in BY_NAME if trace.on_device else ():
        if pattern.search(event["name"]):
            return kind
    if not trace.lines:
        return next((kind for kind, pattern in OF_TORCH if pattern.search(event["name"])), "other")

    # The instruction that ran on the host when the work was launched, if one did.
    at = trace.launches.get(_get_correlation(event), -math.inf) if trace.on_device else event["ts"]
    line = trace.lines[max(0, bisect_right(trace.line_starts, at) - 1)]
    is_inside = line["ts"] <= at <= line["ts"] + line["dur"]
    verb = line["name"].rpartition(" ")[2] if is_inside else ""
    return BY_VERB.get(verb, "casts")


def list_kernels(trace: DeviceTrace, shown: int = SHOWN) -> list[str]:
    """Return the kernels that take most time, with their milliseconds and calls in a step."""
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in trace.work:
        seconds[event["name"]] += event["dur"]
        calls[event["name"]] += 1
    return [
        f"{total / trace.steps / 1e3:.3f} ms, {calls[name] / trace.steps:.3g} calls: {name:.{NAME}}"
        for name, total in seconds.most_common(shown)
    ]


def list_gaps(trace: DeviceTrace, shown: int = LONGEST) -> dict[str, Any]:
    """Return how long and how often the device waits, and between which kernels it waits longest."""
    gaps = sorted(_find_gaps(trace.work, GAP_US), key=lambda gap: -gap[0])
    return {
        "ms": sum(length for length, _, _ in gaps) / trace.steps / 1e3,
        "count": len(gaps) / trace.steps,
        "longest": [f"{length:.0f} us: {a:.{NAME}} -> {b:.{NAME}}" for length, a, b in gaps[:shown]],
    }


def _find_gaps(work: Iterable[Event], least: float) -> Iterator[tuple[float, str, str]]:
    """Yield the lengths above `least` in which no work runs, with the names of the work before and after."""
    end, before = math.inf, ""  # no gap precedes the first event
    for event in work:
        if event["ts"] - end > least:
            yield event["ts"] - end, before, event["name"]
        stop = event["ts"] + event["dur"]
        if end == math.inf or stop > end:
            end, before = stop, event["name"]


def list_copies(trace: DeviceTrace) -> list[str]:
    """Return the copies and fills that are no kernels, by name, with the bytes that a step moves."""
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for event in trace.work:
        if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            name = event["name"]
            microseconds[name] += event["dur"]
            calls[name] += 1
            moved[name] += event.get("args", {}).get("bytes", 0)
    return [
        f"{total / trace.steps / 1e3:.3f} ms, {calls[name] / trace.steps:.3g} calls, "
        f"{moved[name] / trace.steps / 1e6:.3g} MB: {name}"
        for name, total in microseconds.most_common()
    ]
