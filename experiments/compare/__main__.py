"""`python -m experiments.compare RUN_DIR...`: table, CSV and curves of any runs, finished or not."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from experiments.compare.outcome import find_outcomes
from experiments.compare.table import write_comparison
from experiments.lib.checks import ConfigError
from experiments.lib.compose import exit_with

OUT = "outputs/compare"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write `compare.txt`, `compare.csv` and `compare.png`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare",
        description="Compare runs of train and of finetune, finished or not: a table, a CSV, their curves.",
    )
    parser.add_argument("run_dir", nargs="+", help="the folder of a run, of a sweep, or above them; a glob")
    parser.add_argument("--metric", help="what they are sorted by (default: what they were trained for)")
    parser.add_argument("--out", default=OUT, help="folder for the files (default: %(default)s)")
    parser.add_argument("--direction", choices=("minimize", "maximize"), help="which of it is better")
    args = parser.parse_args(arguments)
    is_maximised = None if args.direction is None else args.direction == "maximize"
    exit_with(lambda: compare(args.run_dir, args.metric, Path(args.out), is_maximised))


def compare(places: Sequence[str], metric: str | None, out: Path, is_maximised: bool | None = None) -> None:
    """Compare the runs in some folders or below them, and print the table and the folder of the files."""
    # Runs may take long to read, so a folder that cannot be written to is refused before.
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--out={out}: {existing} is no folder that can be written to. Fix: another --out.")
    outcomes, empty = find_outcomes(places)
    text, _ = write_comparison(outcomes, metric, out, "compare", "compare.txt", is_maximised)
    if empty:
        text += f"\npassed over: {empty} of {len(places)} places hold no run"
    print(f"{text}\nresults: {out.resolve()}", flush=True)


if __name__ == "__main__":
    main()
