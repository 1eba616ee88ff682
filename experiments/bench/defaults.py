"""What None stands for in each case and on each device, and which values cannot be."""

from __future__ import annotations

from typing import Any

import torch

from experiments.bench.cases import CASES
from experiments.bench.config import DTYPES, BenchConfig
from experiments.bench.contenders import CONTENDERS, FNSHARD
from experiments.configs.checks import ConfigError, out_of_range, refusal, with_defaults
from experiments.configs.decoders import names

CPU: dict[str, Any] = {
    "ranks": 2,
    "size": "25m",
    "dtype": "fp32",
    "rows": 1,
    "length": 256,
    "rounds": 30,
    "steps": 1,
}
# On a GPU a 1B-class decoder at its full context.
CUDA: dict[str, Any] = {
    "ranks": 1,
    "size": "1b",
    "dtype": "bf16",
    "rows": 2,
    "length": 4096,
    "rounds": 12,
    "steps": 10,
}
# What None means in a case, where it is not what `CPU` says.
DEFAULTS: dict[str, dict[str, Any]] = {
    "memory": {"rows": 4, "rounds": 3},
    "predict": {"rounds": 7},
    "checkpoint": {"rows": 2, "rounds": 9, "steps": 8},
    "collectives": {"rounds": 7},
    "executor": {"rounds": 200},
    "loss": {"rows": 4, "length": 512, "rounds": 3},
    "lengths": {"rows": 2, "length": 1000, "steps": 1000, "size": "5m"},
    "starts": {"rounds": 5},
    "watch": {"rounds": 3, "steps": 100},
    "long_run": {"steps": 10_000, "ranks": 1},
    "loader": {"steps": 100},
    "gpu": {"ranks": 1, "size": "tiny", "rows": 2, "length": 64, "rounds": 2, "steps": 2},  # on a CPU
    "cuda": {"ranks": 8, "size": "1b", "dtype": "bf16", "rows": 2, "length": 4096},
}


def complete(config: BenchConfig) -> BenchConfig:
    """Fill in what depends on the case and the device, and check what depends on other values."""
    if config.case not in CASES:
        raise ConfigError(f"case={config.case}: one of {', '.join(CASES)}.")
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(f"device={config.device}: one of cpu, cuda.")
    config = with_defaults(config, CUDA if config.device == "cuda" else CPU | DEFAULTS.get(config.case, {}))
    choices = {
        "size": names(), "dtype": DTYPES, "reduce": DTYPES, "store": DTYPES, "contenders": CONTENDERS,
        "update": ("auto", "eager", "compiled"), "backend": ("inductor", "eager"), "clock": ("wall", "cpu"),
    }  # fmt: skip
    counts = (
        "ranks",
        "tensor",
        "rounds",
        "steps",
        "warmup",
        "rows",
        "length",
        "every",
        "vocab",
        "lengths",
        "multiple",
    )
    problems = out_of_range(config, choices, dict.fromkeys(counts, 1) | {"losses": 0, "memory": 0})
    whole = [name for name in config.contenders if config.tensor > 1 and name not in FNSHARD]
    if config.ranks % config.tensor:
        problems.append(f"tensor={config.tensor} does not divide ranks={config.ranks}.")
    if whole:
        problems.append(
            f"tensor={config.tensor}: {', '.join(whole)} split no matrix. "
            f"Fix: contenders=[{','.join(FNSHARD)}]."
        )
    if config.device == "cuda":
        if not torch.cuda.is_available():
            problems.append(
                "device=cuda: this machine has no CUDA device that torch can use. Fix: device=cpu."
            )
        elif config.ranks != 1:
            problems.append(f"ranks={config.ranks}: on device=cuda the bench runs on one GPU. Fix: ranks=1.")
    if problems:
        raise refusal(problems)
    return config
