"""After a `--multirun`: one table of all its runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

RESULT, TABLE = "result.json", "table.txt"
STOPPED = "stopped"  # the status of a run that can be gone on with
COLUMNS = {
    "loss": ".3f",
    "held_out_loss": ".3f",
    "bigram": ".3f",
    "trigram": ".3f",
    "perplexity": ".3f",
    "accuracy": ".3f",
    "tokens_per_s": ",.0f",
    "seconds": ".0f",
}


def write_result(folder: Path, **values: Any) -> None:
    """What the table says of the run in `folder`: `status`, `overrides`, and numbers of `COLUMNS`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def sweep_table(folders: Sequence[Path]) -> tuple[str, int]:
    """The table, a row per run, and how many runs failed or left no result.

    Of the overrides only those are shown that not all runs have in common.
    """
    results = [read_result(folder) for folder in folders]
    common = set.intersection(*(set(r["overrides"]) for r in results)) if len(results) > 1 else set()
    columns = {key: form for key, form in COLUMNS.items() if any(key in r for r in results)}
    rows: list[tuple[str, ...]] = [("run", "overrides", "status", *columns)]
    for folder, result in zip(folders, results, strict=True):
        own = " ".join(o for o in result["overrides"] if o not in common) or "-"
        numbers = (format(result[key], form) if key in result else "-" for key, form in columns.items())
        rows.append((folder.name, own, result["status"], *numbers))
    failed = sum(result["status"] != "ok" for result in results)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        texts = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(texts + numbers).rstrip())
    return "\n".join(lines), failed


def read_result(folder: Path) -> dict[str, Any]:
    """What `write_result` has left in a folder; the status is "no result" where there is none."""
    try:
        return json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"status": "no result", "overrides": []}


class SweepTable(Callback):
    """Prints the table, and makes the exit code 1 if a run failed."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        base = Path(config.hydra.sweep.dir).resolve()
        folders = sorted(
            (f for f in base.iterdir() if f.is_dir()),
            key=lambda f: (int(f.name) if f.name.isdigit() else -1, f.name),
        )
        text, failed = sweep_table(folders)
        (base / TABLE).write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\nresults: {base}", flush=True)
        if failed:
            raise SystemExit(1)  # Hydra turns a callback's Exception into a warning
