"""The parts that all cases share: clocks over ranks, interleaved rounds, live bytes, and written results."""

from __future__ import annotations

import bisect
import dataclasses
import gc
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from experiments.bench.config import CASES, BenchConfig
from experiments.lib.files import write_json
from fnshard.analysis.tables import columns

Work = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """A result of a case.

    Args:
        rows: the rows of its table, of which the first is the head.
        notes: the lines below the table.
        values: everything that was measured, for the JSON file.
        failed: whether the command ends with status 1.
    """

    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False


def show(config: BenchConfig, folder: Path) -> Result:
    """Run a case. The first rank prints its table, and writes `CASE.txt` and `CASE.json` to `folder`."""
    load = os.getloadavg()[0]
    result = CASES[config.case].run(config, folder)
    if rank() == 0:
        device = f"{os.cpu_count()} cores {platform.machine()}"
        environment = {
            "torch": torch.__version__, "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if config.device == "cuda" else device,
            "load_average": [load, os.getloadavg()[0]],
        }  # fmt: skip
        about = ", ".join(f"{key} {value}" for key, value in environment.items())
        text = "\n".join([config.case, about, "", *columns(result.rows), *result.notes])
        values = {"config": dataclasses.asdict(config), **environment, "rows": result.rows, **result.values}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{config.case}.json", values)
        (folder / f"{config.case}.txt").write_text(f"{text}\n", encoding="utf-8")
        print(f"\n{text}\n\nresults: {folder}", flush=True)
    return result


def say(text: str) -> None:
    """Print a line on the first rank about the work that begins."""
    if rank() == 0:
        print(f"... {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ ranks


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def reduce_over_ranks(numbers: Sequence[float], how: Any = dist.ReduceOp.MAX) -> list[float]:
    """Reduce numbers over all ranks, entry by entry, to the largest or by another operation `how`."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, how)
    return values.tolist()


@contextmanager
def make_shared_folder(within: str | Path | None = None) -> Iterator[Path]:
    """Make a temporary folder that all ranks see, and remove it when all have left it."""
    names = [tempfile.mkdtemp(prefix="fnshard-bench-", dir=within) if rank() == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    try:
        yield Path(names[0])
        barrier()
    finally:
        if rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Compile within this context with empty caches, which the ranks share."""
    with (
        make_shared_folder() as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder), FNSHARD_CACHE=str(folder)),
    ):
        yield


# ------------------------------------------------------------------ clocks


def time_work(
    work: Work, *, steps: int = 1, device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measure the seconds of a call, the mean of the next `steps`, from a common start of all ranks.

    On a GPU a call returns before the device has done its work. So CUDA's events are the clock, between which
    the work of all streams is done.
    """
    barrier()
    if device == "cpu":
        began = clock()
        for _ in range(steps):
            work()
        return (clock() - began) / steps
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        work()
    torch.cuda.synchronize()  # an event alone would wait for its own stream only
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / steps


def interleave(
    works: Mapping[Any, Work], rounds: int, *, seed: int = 0, **how: Any
) -> dict[Any, list[float]]:
    """Measure the seconds of each work by round. Those of the slowest rank count.

    A round takes one sample of each, in a new order, so that the machine's drift affects all of them alike.

    Args:
        how: keywords of `time_work`.
    """
    order = random.Random(seed)
    of_this_rank: dict[Any, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name in order.sample(list(works), len(works)):
            of_this_rank[name].append(time_work(works[name], **how))
    return {name: reduce_over_ranks(seconds) for name, seconds in of_this_rank.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of values. Those of a single value are the value itself."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of the quotient of two times of one round, so that slow drift cancels.

    >>> ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    2.0
    """
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, or 1 if there are fewer than three pairs.

    >>> rank_correlation([1, 5, 3], [10, 30, 20])
    1.0
    """
    if len(a) < 3:
        return 1.0
    ranks = [[float(sorted(values).index(v)) for v in values] for values in (a, b)]
    return statistics.correlation(*ranks)


# ------------------------------------------------------------------ live bytes

MARK = "bench step"
Change = tuple[float, int, int]  # when, address, bytes (negative: freed)
Span = tuple[float, float]


@dataclass(frozen=True)
class AllocationLog:
    """A log of one rank's live tensor bytes: the most within a step, and those between two steps.

    Tensors inside compiled kernels and gloo's buffers count, too.
    """

    peak: int
    between: int


def log_live_bytes(make: Callable[[], Work], device: torch.device, steps: int = 6) -> AllocationLog:
    """Log the bytes that `make()` and the step that it returns hold.

    The first step compiles, and is left out. On a CPU every allocation since before `make` is followed
    through the profiler's `[memory]` events, so that tensors that live longer than a step are counted as
    well.
    """
    gc.collect()
    if device.type != "cpu":
        return _log_on_accelerator(make, device, steps)

    # Trace the steps.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step = make()
        for _ in range(1 + steps):
            with record_function(MARK):
                step()
        del step

    # Read the spans of steps and the allocations from the trace.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == MARK and "dur" in e]
    changes = [(e["ts"], e["args"]["Addr"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    return find_peaks(sorted(spans)[1:], sorted(changes, key=lambda change: change[0]))


@dataclass
class Heap:
    """A heap of the blocks that are alive, by address.

    The profiler observes the program's threads, but not gloo's, which now and then drops the last reference
    to a buffer. So a block that a new one overlaps has been freed unseen.
    """

    live: int = 0
    starts: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def apply(self, address: int, size: int) -> None:
        """Add a block, or free one if the size is negative."""
        if size < 0:
            if address in self.sizes:
                self._drop(bisect.bisect_left(self.starts, address))
            return

        # Drop the blocks that the new one overlaps: perhaps the one before its address, and those within it.
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


def find_peaks(spans: Sequence[Span], changes: Iterable[Change]) -> AllocationLog:
    """Find the bytes at the peak of a step and between two steps.

    All steps are alike, and a free that was not seen can only make a number too large. So the smallest of
    each over the steps is taken.

    Args:
        spans: the beginning and the end of each step, in order.
        changes: all allocations and frees, in order.

    >>> find_peaks([(1.0, 4.0)], [(0.0, 64, 100), (2.0, 512, 7), (3.0, 512, -7)])
    AllocationLog(peak=107, between=100)
    """
    heap, peaks, between = Heap(), [], []
    remaining = iter([*changes, (float("inf"), 0, 0)])  # the last one is never applied
    change = next(remaining)
    for start, end in spans:
        while change[0] < start:
            heap.apply(*change[1:])
            change = next(remaining)
        peak = heap.live
        while change[0] <= end:
            heap.apply(*change[1:])
            change = next(remaining)
            peak = max(peak, heap.live)
        peaks.append(peak)
        between.append(heap.live)
    return AllocationLog(min(peaks), min(between))


def _log_on_accelerator(make: Callable[[], Work], device: torch.device, steps: int) -> AllocationLog:
    """Log the bytes of steps by the counters of CUDA's allocator."""
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
