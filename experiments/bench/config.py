"""What the bench is told, and what the machine makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import torch

from experiments.bench.contenders import CONTENDERS, GRAPH
from experiments.configs.checks import configuration, refusal
from experiments.configs.decoders import decoder, names
from experiments.configs.train import DecoderConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What `null` means, by device. On a GPU a 1B-class decoder at its full context.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"ranks": 2, "size": "25m", "dtype": "fp32", "rows": 1, "length": 256, "rounds": 30, "steps": 1},
    "cuda": {"ranks": 1, "size": "1b", "dtype": "bf16", "rows": 2, "length": 4096, "rounds": 12, "steps": 10},
}


@configuration
class BenchConfig:
    """All options; those that are None depend on the device (`DEFAULTS`).

    Args:
        device: "cpu" (gloo ranks of one thread each) or "cuda" (one rank over NCCL).
        ranks: how many processes, a mesh of that size.
        size: a file of `conf/model`.
        dtype: of compute; parameters are updated in fp32.
        reduce: dtype of gradients on the wire; None is `dtype`.
        store: dtype that fnshard stores parameters in, beside an fp32 master if it is another; None is
            `dtype` on a GPU, and fp32 on a CPU, where it takes fewer bytes.
        contenders: names of `contenders.CONTENDERS`; times are divided by those of `limit` and torch's.
        rounds: timed samples of each contender; `warmup` steps come before, of which the first compiles.
        steps: of one sample. A GPU takes several, or each would be launched with the one before it done.
        rows, length: of one rank's batch of tokens.
        losses: how many steps are compared with the fp64 reference; 0 skips it.
        memory: how often bytes are followed (what one pass gets wrong makes numbers larger only, so
            the smallest counts); 0 skips it.
        phases: whether to take fnshard's time by instruction.
        backend, update: of fnshard.
    """

    device: str = "cpu"
    ranks: int | None = None
    size: str | None = None
    dtype: str | None = None
    reduce: str | None = None
    store: str | None = None
    contenders: tuple[str, ...] = field(default=tuple(name for name in CONTENDERS if name != GRAPH))
    rounds: int | None = None
    steps: int | None = None
    warmup: int = 3
    rows: int | None = None
    length: int | None = None
    lr: float = 3e-4
    weight_decay: float = 0.1
    seed: int = 0
    losses: int = 20
    memory: int = 2
    phases: bool = True
    backend: str = "inductor"
    update: str = "auto"
    timeout_s: float = 600.0

    @property
    def model(self) -> DecoderConfig:
        """The decoder that `size` names."""
        return decoder(self.size)

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of the kernels and of gathers."""
        return DTYPES[self.dtype]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """dtype of gradients on the wire."""
        return DTYPES[self.reduce or self.dtype]

    @property
    def store_dtype(self) -> torch.dtype:
        """dtype of fnshard's parameters between steps."""
        return DTYPES[self.store or (self.dtype if self.device == "cuda" else "fp32")]

    @property
    def tokens(self) -> int:
        """Of one step on all ranks."""
        return self.ranks * self.rows * self.length


def build(values: Mapping[str, Any]) -> BenchConfig:
    """A complete configuration from what Hydra composed.

    Raises:
        ConfigError: unknown keys or values that cannot be; all of them at once.
    """
    known = {f.name for f in dataclasses.fields(BenchConfig)}
    problems = [
        f"{key}: no such key; there are {', '.join(sorted(known))}." for key in values if key not in known
    ]
    config = BenchConfig(**{k: tuple(v) if k == "contenders" else v for k, v in values.items() if k in known})
    if config.device not in DEFAULTS:
        problems.append(f"device={config.device}: one of {', '.join(DEFAULTS)}.")
    else:
        given = {k: v for k, v in DEFAULTS[config.device].items() if getattr(config, k) is None}
        config = replace(config, **given)
        problems += _problems(config)
    if problems:
        raise refusal(problems)
    return config


def _problems(config: BenchConfig) -> list[str]:
    out = []
    choices = {
        "size": names(),
        "dtype": list(DTYPES),
        "reduce": [None, *DTYPES],
        "store": [None, *DTYPES],
        "update": ["auto", "eager", "compiled"],
        "backend": ["inductor", "eager"],
    }
    for name, known in choices.items():
        if getattr(config, name) not in known:
            out.append(f"{name}={getattr(config, name)}: one of {', '.join(filter(None, known))}.")
    for name, least in {
        "ranks": 1,
        "rounds": 1,
        "steps": 1,
        "warmup": 1,
        "rows": 1,
        "length": 1,
        "losses": 0,
        "memory": 0,
    }.items():
        if getattr(config, name) < least:
            out.append(f"{name}={getattr(config, name)}: must be {least} or more.")
    unknown = [name for name in config.contenders if name not in CONTENDERS]
    if unknown or not config.contenders:
        out.append(f"contenders={list(config.contenders)}: some of {', '.join(CONTENDERS)}.")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            out.append("device=cuda: this machine has no CUDA device that torch can use. Fix: device=cpu.")
        elif config.ranks != 1:
            out.append(f"ranks={config.ranks}: on device=cuda the bench runs on one GPU. Fix: ranks=1.")
    return out
