"""Whether two runs of the main job are equal bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.training.metrics_file import METRICS
from experiments.training.result import read_result
from experiments.training.resume import CHECKPOINTS
from experiments.training.run_record import VARIES

TIMES = ("tokens_per_s", "seconds", *VARIES)  # what two equal runs differ in


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics; of a torn last line nothing."""
    rows = []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def differences(unbroken: Path, broken: Path) -> list[str]:
    """In what two runs differ that should be equal bit for bit: every loss, every parameter, the position."""
    wrong = []
    rows, others = (
        [{k: v for k, v in row.items() if k not in TIMES} for row in rows_of(f)] for f in (unbroken, broken)
    )
    if rows != others:
        pairs = enumerate(zip(rows, others, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(rows), len(others)))
        wrong.append(f"metrics differ from row {at} on: {rows[at : at + 1]} and {others[at : at + 1]}")
    results = [{k: v for k, v in read_result(f).items() if k not in TIMES} for f in (unbroken, broken)]
    if results[0] != results[1]:
        wrong.append(f"results differ: {results[0]} and {results[1]}")
    saved = [fs.checkpoint.latest(f / CHECKPOINTS) for f in (unbroken, broken)]
    a, b = (fs.checkpoint.verify(path) for path in saved)
    wrong += [f"{name} differs" for name in a.leaves if a.leaves[name] != b.leaves.get(name)]
    wrong += [f"{name} differs" for name in ("step", "seed", "data") if getattr(a, name) != getattr(b, name)]
    return wrong
