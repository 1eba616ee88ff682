"""Result: what a run leaves for the table of its sweep, in `result.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.data.files import read_json, write_json

RESULT = "result.json"
STOPPED = "stopped"  # the status of a run that can be resumed


def write_result(folder: Path, **values: Any) -> None:
    """What the table says of the run in `folder`: `status`, `overrides`, and numbers by name."""
    write_json(folder / RESULT, values)


def read_result(folder: Path) -> dict[str, Any]:
    """What `write_result` has left in a folder; the status is "no result" where there is none."""
    return read_json(folder / RESULT) or {"status": "no result", "overrides": []}
