"""The fine-tuning job, as command lines and ranks know it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from experiments.config import ConfigError
from experiments.finetune.bases import PRETRAINED, RANDOM, directory_of
from experiments.finetune.config import FinetuneConfig
from experiments.finetune.loop import finetune
from experiments.finetune.materials import prepared
from experiments.job import CONF, Job, start
from experiments.sweep import STOPPED
from fnshard.launch import under_launcher

MOST = 1e-3  # a rate that is told of, for a model of one's own


def prepare(config: FinetuneConfig) -> FinetuneConfig:
    """The configuration with directories in the place of names: of the model, and of tokenised data.

    Raises:
        ConfigError: see `bases.directory_of`, `materials.prepared`.
    """
    rate = config.optimizer.lr
    if config.model not in (PRETRAINED, *RANDOM) and rate > MOST and os.environ.get("RANK", "0") == "0":
        print(f"optimizer.lr={rate:g} is much for a model that has learned: try 2e-4.", file=sys.stderr)
    return prepared(replace(config, model=directory_of(config, _pretrain)))


def _pretrain(config: FinetuneConfig, folder: Path) -> None:
    """Make a base by a job of its own."""
    if under_launcher():
        raise ConfigError(
            "model=stdlib is made by a job of its own, which cannot be started under torchrun. Fix: run "
            "`python -m experiments.finetune` without it once, or name a model directory."
        )
    try:
        if start(JOB, config, folder, [], chosen=True) == STOPPED:
            raise SystemExit(0)
    except ConfigError as error:
        if "another process is at work" in str(error):
            raise ConfigError(f"model={PRETRAINED}: another process makes it. Fix: wait for that.") from None
        raise


# A folder of its own: a group that is called "model", as the main job has, would take `model=` for its own.
JOB = Job(
    "finetune",
    "experiments.finetune.job",
    FinetuneConfig,
    finetune,
    prepare,
    CONF / "finetune",
    ("mesh", "data"),
)
