"""The main job: `python -m experiments.train`, or the same under `torchrun`."""

from __future__ import annotations

from experiments.config import ConfigError, TrainConfig
from experiments.job import Job, main
from experiments.loop import train
from experiments.windows import corpus_of


def prepare(config: TrainConfig) -> TrainConfig:
    """As it is, if its text is there.

    Raises:
        ConfigError: no text where the configuration says.
    """
    try:
        corpus_of(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


JOB = Job("train", "experiments.train", TrainConfig, train, prepare)

if __name__ == "__main__":
    main(JOB)
