"""Live tensor bytes, as the allocator saw them: inside compiled kernels and gloo's buffers too."""

from __future__ import annotations

import bisect
import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "bench step"
Change = tuple[float, int, int]  # when, address, bytes (negative: freed)
Span = tuple[float, float]


@dataclass(frozen=True)
class AllocationLog:
    """Bytes of one rank: at the worst moment of a step, and between two."""

    peak: int
    between: int


def live_bytes(make: Callable[[], Callable[[], Any]], device: torch.device, steps: int = 6) -> AllocationLog:
    """What `make()` and the step it returns hold; the first step (it compiles) is not looked at.

    On a CPU every allocation since before `make` is followed through the profiler's `[memory]`
    events, so that what lives longer than a step is counted as well.
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
    spans, changes = _read(profiled)
    return follow(spans[1:], changes)


def _read(profiled: profile) -> tuple[list[Span], list[Change]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == MARK and "dur" in e]
    changes = [(e["ts"], e["args"]["Addr"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    return sorted(spans), sorted(changes, key=lambda change: change[0])


@dataclass
class Heap:
    """Blocks that are alive, by address. What a new block overlaps has been freed unseen.

    The profiler watches the threads of the program, not gloo's, which now and then drops the last
    reference to a buffer.
    """

    live: int = 0
    starts: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def apply(self, address: int, size: int) -> None:
        if size < 0:
            if address in self.sizes:
                self._drop(bisect.bisect_left(self.starts, address))
            return
        at = bisect.bisect_left(self.starts, address)
        if at and self.starts[at - 1] + self.sizes[self.starts[at - 1]] > address:
            at -= 1
        while at < len(self.starts) and self.starts[at] < address + size:
            self._drop(at)
        self.starts.insert(at, address)
        self.sizes[address] = size
        self.live += size

    def _drop(self, at: int) -> None:
        self.live -= self.sizes.pop(self.starts.pop(at))


def follow(spans: Sequence[Span], changes: Iterable[Change]) -> AllocationLog:
    """Peak and resting bytes of the steps `spans`.

    All steps are alike, and a free that was not seen can only make a number too large: of each the
    smallest over the steps.

    >>> follow([(1.0, 4.0)], [(0.0, 64, 100), (2.0, 512, 7), (3.0, 512, -7)])
    AllocationLog(peak=107, between=100)
    """
    heap, todo, peaks, rests = Heap(), iter([*changes, (float("inf"), 0, 0)]), [], []
    change = next(todo)
    for start, end in spans:
        while change[0] < start:
            heap.apply(*change[1:])
            change = next(todo)
        peak = heap.live
        while change[0] <= end:
            heap.apply(*change[1:])
            change = next(todo)
            peak = max(peak, heap.live)
        peaks.append(peak)
        rests.append(heap.live)
    return AllocationLog(min(peaks), min(rests))


def _on_accelerator(make: Callable[[], Callable[[], Any]], device: torch.device, steps: int) -> AllocationLog:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    step = make()
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    return AllocationLog(
        torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    )
