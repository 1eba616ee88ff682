"""The bench's command line, as Hydra composes it."""

from __future__ import annotations

from experiments.bench.cases import CASES
from experiments.bench.config import BenchConfig
from experiments.bench.defaults import complete
from experiments.cli.command_spec import CommandSpec, Help
from experiments.cli.main import answer

__all__ = ["SPEC", "answer"]

HELP = Help(
    about="Measurements of fnshard, a case at a time.",
    options={
        "case": f"one of {', '.join(CASES)}",
        "device": "cpu: gloo ranks of one thread each; cuda: one GPU",
        "ranks": "how many; null: 2 on the CPU, 1 GPU",
        "size": "a file of conf/model; null: 25m, or 1b on a GPU",
        "dtype": "of compute: fp32 or bf16",
        "rounds": "timed samples of each contender, of `steps` steps",
        "contenders": "who takes part in case=peers",
    },
    examples={
        "python -m experiments.bench": "step time and bytes next to DDP, FSDP2 and others",
        "python -m experiments.bench size=5m rounds=5 losses=0": "a short look",
        "python -m experiments.bench case=gpu device=cuda": "the first hour on a GPU",
    },
)
SPEC = CommandSpec("bench", BenchConfig, HELP, complete=complete)
