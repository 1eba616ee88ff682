"""The options of the bench, and their defaults by machine; `experiments.gpu` imports it without Hydra."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch

from experiments.bench.contenders import CONTENDERS, FNSHARD, GRAPH, TENSOR
from experiments.configs.checks import ConfigError, configuration, out_of_range, refusal, with_defaults
from experiments.configs.decoders import DecoderConfig, decoder, names

WITH_TENSOR = (*TENSOR, *FNSHARD)
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
        tensor: how many of them split each matrix; the others take other rows.
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
    tensor: int = 1
    size: str | None = None
    dtype: str | None = None
    reduce: str | None = None
    store: str | None = None
    contenders: tuple[str, ...] = field(
        default=tuple(name for name in CONTENDERS if name != GRAPH and name not in TENSOR)
    )
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
        return decoder(self.size)

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def reduce_dtype(self) -> torch.dtype:
        return DTYPES[self.reduce or self.dtype]

    @property
    def store_dtype(self) -> torch.dtype:
        """dtype of fnshard's parameters between steps."""
        return DTYPES[self.store or (self.dtype if self.device == "cuda" else "fp32")]

    @property
    def tokens(self) -> int:
        return self.ranks // self.tensor * self.rows * self.length


def complete(config: BenchConfig) -> BenchConfig:
    """Fill in what depends on the device."""
    if config.device not in DEFAULTS:
        raise ConfigError(f"device={config.device}: one of {', '.join(DEFAULTS)}.")
    config = with_defaults(config, DEFAULTS[config.device])
    choices = {
        "size": names(), "dtype": DTYPES, "reduce": DTYPES, "store": DTYPES, "contenders": CONTENDERS,
        "update": ("auto", "eager", "compiled"), "backend": ("inductor", "eager"),
    }  # fmt: skip
    least = dict.fromkeys(("ranks", "tensor", "rounds", "steps", "warmup", "rows", "length"), 1)
    least |= {"losses": 0, "memory": 0}
    problems = out_of_range(config, choices, least)
    alone = [name for name in config.contenders if config.tensor > 1 and name not in WITH_TENSOR]
    if config.ranks % config.tensor:
        problems.append(f"tensor={config.tensor} does not divide ranks={config.ranks}.")
    if alone:
        problems.append(
            f"tensor={config.tensor}: {', '.join(alone)} split no matrix. "
            f"Fix: contenders=[{','.join(WITH_TENSOR)}]."
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
