"""Ranks of an experiment: processes that run one module of `experiments` on one file of plain values."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import python_path
from experiments.data.files import write_json
from fnshard.launcher.local import launch


def start(
    module: str, values: Mapping[str, Any], folder: Path, ranks: int, *, one_thread: bool = True
) -> None:
    """Run `python -m MODULE FOLDER/job.json` on so many ranks; their logs are in `FOLDER/ranks`.

    Raises:
        LaunchError: a rank failed.
    """
    job = folder / "job.json"
    write_json(job, values)
    env = {"PYTHONPATH": python_path(), **({"OMP_NUM_THREADS": "1"} if one_thread else {})}
    launch([sys.executable, "-u", "-m", module, str(job)], ranks=ranks, logs=folder / "ranks", env=env)


def job_values() -> dict[str, Any]:
    """In a rank that `start` started: the values of its job."""
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
