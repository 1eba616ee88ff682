"""`python -m experiments.evaluate model=FOLDER tasks=[arc:test.jsonl]`."""

from __future__ import annotations

from pathlib import Path

from experiments.cli.main import answer
from experiments.evaluate.config import SPEC, EvaluateConfig


def start(config: EvaluateConfig, folder: Path) -> None:
    """Torch is imported here: a mistake in a command line does not wait for it."""
    from experiments.evaluate.run import evaluate

    evaluate(config, folder)


if __name__ == "__main__":
    answer(SPEC, start)
