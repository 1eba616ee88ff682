"""Live tensor bytes, as the allocator saw them: inside compiled kernels and gloo's buffers too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "bench step"


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: at the worst moment of a step, and between two."""

    peak: int
    between: int


def live_bytes(make: Callable[[], Callable[[], Any]], device: torch.device, steps: int = 3) -> Memory:
    """What `make()` and the step it returns hold; the first step (it compiles) is not looked at.

    On a CPU every allocation since before `make` is followed through the profiler's `[memory]`
    events, so what lives longer than a step is counted as well.
    """
    gc.collect()
    if device.type != "cpu":
        return _on_accelerator(make, device, steps)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step = make()
        for _ in range(1 + steps):
            with record_function(MARK):
                step()
        del step
    return follow(_events(profiled), first=1)


def _events(profiled: profile) -> Iterable[tuple[str, int, int, int]]:
    """(name, start ns, end ns, bytes) of every event."""
    for event in profiled.profiler.kineto_results.events():
        yield event.name(), event.start_ns(), event.end_ns(), event.nbytes()


def follow(events: Iterable[tuple[str, int, int, int]], first: int) -> Memory:
    """Peak and resting bytes over the marked steps from number `first` on.

    >>> step = [("bench step", 10, 20, 0), ("bench step", 30, 40, 0)]
    >>> memory = [("[memory]", 5, 5, 100), ("[memory]", 32, 32, 7), ("[memory]", 35, 35, -7)]
    >>> follow(step + memory, first=1)
    Memory(peak=107, between=100)
    """
    marks, changes = [], []
    for name, start, end, size in events:
        if name == MARK:
            marks.append((start, end))
        elif name == "[memory]":
            changes.append((start, size))
    marks = sorted(marks)[first:]
    live, peak, between, at = 0, 0, 0, 0
    changes = sorted(changes, key=lambda change: change[0])
    for start, end in marks:
        while at < len(changes) and changes[at][0] < start:
            live, at = live + changes[at][1], at + 1
        peak = max(peak, live)
        while at < len(changes) and changes[at][0] <= end:
            live, at = live + changes[at][1], at + 1
            peak = max(peak, live)
        between = max(between, live)
    return Memory(peak, between)


def _on_accelerator(make: Callable[[], Callable[[], Any]], device: torch.device, steps: int) -> Memory:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    step = make()
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    return Memory(
        torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    )
