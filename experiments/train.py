"""The main job: `python -m experiments.train`, or the same under `torchrun`.

What needs torch is imported where it is used: a mistake in a command line is reported before that has loaded.
"""

from __future__ import annotations

from experiments.cli.command_spec import CommandSpec, Help, Job
from experiments.cli.main import main
from experiments.configs.train import TrainConfig

HELP = Help(
    about="Train a small language model from text, sharded over ranks: as many as there are GPUs, or two on "
    "the CPU. The same command again resumes what was not finished.",
    options={
        "run.steps": "optimizer steps",
        "run.device": "cpu, cuda; auto takes the GPUs if there are some",
        "run.backend": "inductor compiles, eager does not",
        "run.accumulate": "micro-batches of a step",
        "run.device_gb": "of one rank, for strategy=auto: what its plan may take, in 1e9 bytes",
        "run.save_every": "steps between checkpoints; 0: only at the end, and when stopped",
        "run.resume": "auto goes on, never begins anew, a path starts from that run or checkpoint",
        "run.seed": "of weights, batches and samples",
        "mesh.shard": "ranks that share one copy of the model; null: all that are left",
        "mesh.replicate": "copies of the model",
        "mesh.tensor": "ranks that split the matrices, of the same rows",
        "mesh.context": "ranks that split the sequences, of the same rows",
        "data.rows": "rows of the global batch",
        "data.root": "a folder of text files, or with data=shards of shards; null: Python's own library",
        "optimizer.lr": "the peak rate",
        "strategy.remat": "what the backward computes again: none, unit, offload, or a fraction to keep",
        "hydra.run.dir": "the folder of the results",
    },
    examples={
        "python -m experiments.train experiment=laptop": "a whole recipe; what follows it changes it",
        "python -m experiments.train model=25m strategy=zero2 precision=bf16 mesh.shard=4 run.steps=2000": (
            "choices of groups and single keys"
        ),
        "python -m experiments.train --multirun strategy=full_shard,zero2,no_shard run.steps=100": (
            "a sweep: three runs, and a table of them"
        ),
    },
)
SPEC = CommandSpec("train", TrainConfig, HELP)


def prepare(config: TrainConfig) -> TrainConfig:
    """As it is, if its text or its shards are there."""
    from experiments.training.dataset import open_dataset

    open_dataset(config)
    return config


JOB = Job(SPEC, "experiments.train", "experiments.training.loop:train", prepare)

if __name__ == "__main__":
    main(JOB)
