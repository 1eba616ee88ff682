"""`python -m experiments.bench case=NAME`: run one case and print its table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("optree") is None:
    sys.exit("optree is not installed. Fix: pip install optree, or its wheel where there is no network.")

from experiments.bench import ranks
from experiments.bench.config import CASES, BenchConfig, read
from experiments.bench.measure import show


def start(config: BenchConfig, folder: Path) -> None:
    """Run the case in this process, or on ranks of its own if it takes some."""
    if CASES[config.case].on_ranks:
        ranks.start(config, folder)
    elif show(config, folder).failed:
        sys.exit(1)


def main() -> None:
    """Read the command line by Hydra, or by hand where Hydra is not installed, as on a bare GPU machine."""
    if importlib.util.find_spec("hydra") is None:
        return start(read(sys.argv[1:]), Path("outputs", "bench").resolve())
    from experiments.bench.command import COMMAND
    from experiments.lib.compose import answer

    answer(COMMAND, start)


if __name__ == "__main__":
    main()
