"""`python -m experiments.evaluate model=FOLDER tasks=[arc:test.jsonl]`."""

from __future__ import annotations

from experiments.evaluate.config import COMMAND
from experiments.evaluate.run import evaluate
from experiments.lib.compose import answer

if __name__ == "__main__":
    answer(COMMAND, evaluate)
