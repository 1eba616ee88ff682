"""What all cases share: clocks over ranks, interleaved rounds, and how results are shown and kept."""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from experiments.bench.config import CASES, BenchConfig
from experiments.data.files import write_json
from fnshard.analysis.tables import columns

Work = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """What a case found.

    Args:
        rows: of its table; the first is the head.
        notes: lines below it.
        values: everything that was measured, for the JSON file.
    """

    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False


def show(config: BenchConfig, folder: Path) -> Result:
    """Run a case; the first rank prints its table and leaves it in `folder` as `CASE.txt` and `CASE.json`."""
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
    """A line about what is being done, on the first rank."""
    if rank() == 0:
        print(f"... {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ ranks


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def over_ranks(numbers: Sequence[float], how: Any = dist.ReduceOp.MAX) -> list[float]:
    """Of all ranks, entry by entry: the largest, or what `how` says."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, how)
    return values.tolist()


@contextmanager
def shared_folder(within: str | Path | None = None) -> Iterator[Path]:
    """A temporary folder that all ranks see, removed when all have left it."""
    named = [tempfile.mkdtemp(prefix="fnshard-bench-", dir=within) if rank() == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(named, src=0)
    try:
        yield Path(named[0])
        barrier()
    finally:
        if rank() == 0:
            shutil.rmtree(named[0], ignore_errors=True)


@contextmanager
def fresh_cache() -> Iterator[None]:
    """An empty Inductor cache, shared by the ranks, for what is compiled within."""
    with shared_folder() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder)):
        yield


# ------------------------------------------------------------------ clocks


def timed(
    work: Work, *, steps: int = 1, device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of a call, the mean of the next `steps`, from a common start; by CUDA's own events on a GPU."""
    barrier()
    if device == "cpu":
        began = clock()
        for _ in range(steps):
            work()
        return (clock() - began) / steps
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / steps


def interleaved(
    works: Mapping[Any, Work], rounds: int, *, seed: int = 0, **how: Any
) -> dict[Any, list[float]]:
    """Seconds of each by round: a round makes one sample of each, in a new order; the slowest rank counts.

    Args:
        how: of `timed`.
    """
    order, own = random.Random(seed), {name: [] for name in works}
    for _ in range(rounds):
        for name in order.sample(list(works), len(works)):
            own[name].append(timed(works[name], **how))
    return {name: over_ranks(seconds) for name, seconds in own.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """25%, 50%, 75%; of one value itself."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of the quotient of two times of one round, so that slow drift cancels.

    >>> ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    2.0
    """
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; 1 of fewer than three.

    >>> rank_correlation([1, 5, 3], [10, 30, 20])
    1.0
    """
    if len(a) < 3:
        return 1.0
    ranks = [[float(sorted(values).index(v)) for v in values] for values in (a, b)]
    return statistics.correlation(*ranks)
