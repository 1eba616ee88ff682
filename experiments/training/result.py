"""Result: what a run leaves for the table of its sweep, in `result.json`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.data.files import DamagedError, read_record, write_record

RESULT = "result.json"
STOPPED = "stopped"  # the status of a run that can be resumed


def write_result(folder: Path, **values: Any) -> None:
    """What the table says of the run in `folder`: `status`, `overrides`, and numbers by name."""
    write_record(folder / RESULT, values)


def read_result(folder: Path) -> dict[str, Any]:
    """Read what `write_result` has left in a folder; the status is "no result" where there is none, or where
    it is damaged, which is said."""
    try:
        found = read_record(folder / RESULT)
        if found is not None and not _is_result(found):
            raise DamagedError(f"{folder / RESULT} holds no result.")
    except DamagedError as error:
        print(f"{error} It counts as none.", file=sys.stderr, flush=True)
        found = None
    return found or {"status": "no result", "overrides": []}


def _is_result(values: dict[str, Any]) -> bool:
    kinds = {"status": str, "overrides": list, "reason": str, "error": str}
    needed = {"status", "overrides"} <= values.keys()
    return needed and all(isinstance(values.get(name, kind()), kind) for name, kind in kinds.items())
