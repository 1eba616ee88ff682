"""The main job: `python -m experiments.train`, or the same under `torchrun`.

What needs torch is imported where it is used: a mistake in a command line is reported before that has loaded.
"""

from __future__ import annotations

from experiments.cli.command_spec import CommandSpec, Job
from experiments.cli.main import main
from experiments.configs.train import TrainConfig

SPEC = CommandSpec(
    "train",
    TrainConfig,
    "Train a small language model from text, sharded over ranks: as many as there are GPUs, or two on the "
    "CPU. The same command again resumes what was not finished.",
    {
        "python -m experiments.train experiment=laptop": "a whole recipe; what follows it changes it",
        "python -m experiments.train model=25m strategy=zero2 precision=bf16 mesh.shard=4 run.steps=2000": (
            "choices of groups and single keys"
        ),
        "python -m experiments.train --multirun strategy=full_shard,zero2,no_shard run.steps=100": (
            "a sweep: three runs, and a table of them"
        ),
    },
)


def prepare(config: TrainConfig) -> TrainConfig:
    """As it is, if its data are there, and what its `_target_`s name."""
    from experiments.training.dataset import open_dataset
    from experiments.training.own import check_targets

    check_targets(config)
    if not isinstance(config.data, dict):
        open_dataset(config)
    return config


JOB = Job(SPEC, "experiments.train", "experiments.training.loop:train", prepare)

if __name__ == "__main__":
    main(JOB)
