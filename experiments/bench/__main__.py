"""`python -m experiments.bench`: start the ranks and wait for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments import ranks
from experiments.bench.config import SPEC, BenchConfig
from experiments.cli.main import answer


def start(config: BenchConfig, folder: Path) -> None:
    """Measure; the ranks write their results to `folder`.

    Raises:
        LaunchError: a rank failed.
    """
    values = {"config": dataclasses.asdict(config), "folder": str(folder)}
    one_thread = config.device == "cpu"
    ranks.start("experiments.bench.rank", values, folder, config.ranks, one_thread=one_thread)


if __name__ == "__main__":
    answer(SPEC, start)
