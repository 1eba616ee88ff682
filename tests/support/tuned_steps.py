"""A tuning job in a process of its own; what it has traced, compiled and loaded is its last line."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from experiments.finetune import loop
from experiments.finetune.config import FinetuneConfig
from experiments.training.resume import RunFolder
from fnshard.launcher.rank import Stop


def made_by(config: FinetuneConfig, folder: Path) -> list[dict]:
    """Of each step of a whole run: training, held-out losses, and the two of samples."""
    setup, prepare = loop.prepare(config), loop.prepare
    folder.mkdir()
    loop.prepare = lambda _: setup
    try:
        loop.finetune(config, RunFolder(str(folder)), [], Stop())
    finally:
        loop.prepare = prepare
    made = setup.shown.generator
    steps = setup.step, setup.held_out, made.prefill, made.decode
    return [vars(step.made) for step in steps]


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:  # which the test has written
        print(json.dumps(made_by(*pickle.load(file))))
