"""Measured: start ranks for one job and read what they found; Markdown tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.memory.plans import MemoryJob
from experiments.ranks import start

MEASURED = "measured.json"


def measure(job: MemoryJob, folder: Path, timeout_s: float) -> dict[str, Any]:
    """What `experiments.memory.rank` measures of a job, from new processes of one thread each.

    Raises:
        LaunchError: a rank failed.
    """
    values = {"job": dataclasses.asdict(job), "folder": str(folder), "timeout_s": timeout_s}
    start("experiments.memory.rank", values, folder, job.ranks)
    return json.loads((folder / MEASURED).read_text(encoding="utf-8"))


def ratio(found: Mapping[str, Any], name: str, base: str) -> float:
    """Median over rounds of the quotient of two steps of one round, so that the machine's drift cancels."""
    pairs = zip(found["plans"][name]["seconds"], found["plans"][base]["seconds"], strict=True)
    return median(a / b for a, b in pairs)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head, the first column is text, the others are numbers.

    >>> print(markdown([["a", "b"], ["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]])


def mega(size: float) -> str:
    """Bytes as MB of 1e6, whole.

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
