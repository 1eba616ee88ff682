"""The main job: `python -m experiments.train`, or the same under `torchrun`."""

from __future__ import annotations

from experiments.config import TrainConfig
from experiments.job import Job, main
from experiments.loop import train
from experiments.reading import reading_of


def prepare(config: TrainConfig) -> TrainConfig:
    """As it is, if its text or its shards are there.

    Raises:
        ConfigError: they are not, or not as the model needs them.
    """
    reading_of(config)
    return config


JOB = Job("train", "experiments.train", TrainConfig, train, prepare)

if __name__ == "__main__":
    main(JOB)
