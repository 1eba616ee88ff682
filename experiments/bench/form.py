"""What the bench's command line may say."""

from __future__ import annotations

from experiments.bench.config import BenchConfig, build
from experiments.cli.command_spec import CommandSpec, Help

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
SPEC = CommandSpec("bench", BenchConfig, HELP, build=build)
