"""`python -m experiments.bench`: start the ranks and wait for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments import ranks
from experiments.bench.config import BenchConfig, complete
from experiments.cli.command_spec import CommandSpec, Help
from experiments.cli.main import answer

HELP = Help(
    about="Step time and bytes of fnshard beside DDP, FSDP2 and others, in interleaved rounds.",
    options={
        "device": "cpu: gloo ranks of one thread each; cuda: one GPU",
        "ranks": "how many; null: 2 on the CPU, 1 GPU",
        "size": "a file of conf/model; null: 25m, or 1b on a GPU",
        "dtype": "of compute: fp32 or bf16",
        "rounds": "timed samples of each contender, of `steps` steps",
        "contenders": "who takes part",
    },
    examples={
        "python -m experiments.bench": "everything, as this machine can",
        "python -m experiments.bench size=5m rounds=5 losses=0": "a short look",
        "python -m experiments.bench size=5m dtype=bf16 rows=4": "other sizes, in bf16",
    },
)
SPEC = CommandSpec("bench", BenchConfig, HELP, complete=complete)


def start(config: BenchConfig, folder: Path) -> None:
    """Measure; the ranks write their results to `folder`."""
    values = {"config": dataclasses.asdict(config), "folder": str(folder)}
    one_thread = config.device == "cpu"
    ranks.start("experiments.bench.rank", values, folder, config.ranks, one_thread=one_thread)


if __name__ == "__main__":
    answer(SPEC, start)
