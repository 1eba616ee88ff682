"""Start ranks for one job and read what they measured; texts about that."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.memory.plans import MemoryJob
from experiments.ranks import start
from experiments.tables import ratio

MEASURED = "measured.json"


def measure(job: MemoryJob, folder: Path, timeout_s: float) -> dict[str, Any]:
    """What `experiments.memory.rank` measures of a job, from new processes of one thread each."""
    values = {"job": dataclasses.asdict(job), "folder": str(folder), "timeout_s": timeout_s}
    start("experiments.memory.rank", values, folder, job.ranks)
    return json.loads((folder / MEASURED).read_text(encoding="utf-8"))


def step_ratio(found: Mapping[str, Any], name: str, base: str) -> float:
    """See `ratio`: of a plan's steps to those of another."""
    return ratio(found["plans"][name]["seconds"], found["plans"][base]["seconds"])


def mega(size: float) -> str:
    """Bytes as MB of 1e6, rounded.

    >>> mega(1.6e6)
    '2'
    """
    return f"{size / 1e6:,.0f}"


def giga(size: float) -> str:
    return f"{size / 1e9:,.2f}"


def setting(found: Mapping[str, Any]) -> str:
    job = found["job"]
    before, after = found["load_average"]
    return (
        f"{found['parameters'] / 1e6:.1f}M parameters, {job['ranks']} CPU ranks x {job['rows']} x "
        f"{job['length']} tokens, {job['backend']}, load {before:.1f} to {after:.1f}"
    )
