"""The cases of the bench and their options, which can be read without Hydra.

A bare GPU machine lacks Hydra.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from experiments.bench.sizes import read_decoder, size_names
from experiments.lib.checks import ConfigError, configuration, join_problems
from experiments.lib.decoder import DecoderConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# The contenders of the case peers. `contenders.py` says what each of them runs.
FNSHARD = ("full_shard", "shard_grad_op", "no_shard")  # presets of fnshard, with AdamW
MUON = ("muon", "muon_no_shard")  # the presets full_shard and no_shard with `fs.optim.muon`
TORCH = ("ddp", "fsdp2", "fsdp2_compiled", "limit")  # no sharded step can be faster than "limit"
# Variants of "fsdp2" and "full_shard" that communicate less where `accumulate` is above 1.
MICRO = ("fsdp2_local", "full_shard_breadth")
NARROW = ("full_shard_fp8",)  # the preset full_shard with matrix products in fp8


@dataclass(frozen=True)
class Case:
    """A measurement of the bench.

    Args:
        function: "module:name" in this package, of a function `(config, folder) -> Result` whose docstring is
            the question that it answers.
        defaults: the values of options that are None in this case on a CPU, if they differ from those of
            `CPU`.
        on_ranks: whether `config.ranks` processes run it together, or the process of the command does.
        only_ranks: the one value that `config.ranks` may have; None if the case takes any.
    """

    function: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    on_ranks: bool = False
    only_ranks: int | None = None

    @property
    def run(self) -> Callable[[BenchConfig, Path], Any]:
        """Import the function. It is imported late, since one case may need a package that others do not."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(f"experiments.bench.{module}"), name)


CPU = {"ranks": 2, "size": "25m", "dtype": "fp32", "rows": 1, "length": 256, "rounds": 30, "steps": 1,
       "memory": 2}  # fmt: skip
# On a GPU a 1B-class decoder at its full context.
CUDA = {"ranks": 1, "size": "1b", "dtype": "bf16", "rows": 2, "length": 4096, "rounds": 12, "steps": 10,
        "memory": 1}  # fmt: skip
TINY = {"ranks": 1, "size": "tiny", "rows": 2, "length": 64, "rounds": 2, "steps": 2}
CASES = {
    "peers": Case("peers:run", on_ranks=True),
    "memory": Case("plans:run", {"rows": 4, "rounds": 3}, on_ranks=True),
    "predict": Case("plans:run", {"rows": 4, "rounds": 7, "memory": 1}, on_ranks=True),
    "bubble": Case("bubble:run", {"size": "5m", "rounds": 5, "memory": 0}, on_ranks=True),
    "budget": Case("budget:run", {"rounds": 7}),
    "checkpoint": Case("checkpoint:run", {"rows": 2, "rounds": 9, "steps": 8}, on_ranks=True),
    "executor": Case("micro:executor", {"rounds": 200}),
    "parity": Case("parity:run", on_ranks=True, only_ranks=2),
    "published": Case("published:run"),
    "starts": Case("micro:starts", {"rounds": 5}),
    "gpu": Case("gpu:run", TINY),
}


@configuration
class BenchConfig:
    """The options of the bench. Those that are None depend on the case and the device.

    Args:
        case: a name of `CASES`.
        device: "cpu" (gloo ranks of one thread each) or "cuda" (one rank over NCCL).
        ranks: the number of processes, and so the size of the mesh.
        size: the name of a file of `conf/model`.
        dtype: the dtype of compute. Parameters are updated in fp32.
        reduce: the dtype of gradients on the wire; None stands for `dtype`.
        tensor, context, pipeline: the sizes of fnshard's axes next to "shard".
        backend: the backend of fnshard, and of the loss of torch's contenders.
        rows, length: the sizes of one rank's batch of tokens.
        accumulate: in the case peers, the number of micro-batches into which a rank's rows are cut. DDP sums
            them up locally, FSDP2 only as "fsdp2_local" (`set_requires_gradient_sync`), and fnshard only as
            "full_shard_breadth".
        rounds: the number of timed samples of each contender.
        steps: the steps of one sample. On a GPU they are several, which are launched without a pause. In the
            case checkpoint, the steps that are timed with saves among them.
        warmup: the steps before the first sample, the first of which compiles.
        seed: the seed of the model's parameters, of the batches, and of the order in which contenders take
            turns.
        contenders: in the case peers, the names of what takes part.
        losses: in the case peers, the number of steps whose losses are compared with an fp64 reference; 0
            skips it.
        memory: in the cases peers, memory, predict and bubble, how many times bytes are counted, each time
            with a contender that is made anew; 0 counts none. Memory whose release was not seen makes a count
            too large, so the smallest one is shown.
        plans: in the cases memory, predict and bubble, the plans that take part, each named by words of
            `plans.WORDS` that hyphens join. The case has its own if there are none; predict has them by the
            number of ranks.
        clock: in the case predict, "wall", or "cpu", which leaves out what other processes took.
        every: in the case checkpoint, the number of steps from one save to the next.
        checkout: in the case starts, another checkout that takes turns with this one.
        overrides: in the case starts, words for `python -m experiments.train`.
        folder: in the case checkpoint, a folder on the disk to be measured; in the case gpu, that of the
            results (outputs/gpu).
        parts: in the case gpu, names of `gpu.STAGES` and of their parts, which alone run; what others have
            found in `folder` stays.
        until: in the case gpu, the seconds from the start after which nothing runs: a stage whose budget is
            not left does not begin.
    """

    case: str = "peers"
    device: str = "cpu"
    ranks: int | None = None
    size: str | None = None
    dtype: str | None = None
    reduce: str | None = None
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    backend: str = "inductor"
    rows: int | None = None
    length: int | None = None
    accumulate: int = 1
    rounds: int | None = None
    steps: int | None = None
    warmup: int = 3
    seed: int = 0
    contenders: tuple[str, ...] = ("ddp", "fsdp2", "fsdp2_compiled", "limit", *FNSHARD)
    losses: int = 20
    memory: int | None = None
    plans: tuple[str, ...] = ()
    clock: str = "wall"
    every: int = 2
    checkout: str | None = None
    overrides: str = ""
    folder: str | None = None
    parts: tuple[str, ...] = ()
    until: float = 560.0

    @property
    def model(self) -> DecoderConfig:
        return read_decoder(self.size)

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def reduce_dtype(self) -> torch.dtype:
        return DTYPES[self.reduce or self.dtype]

    @property
    def store_dtype(self) -> torch.dtype:
        """Return the dtype of fnshard's parameters between steps.

        On a CPU it is fp32, which takes fewer bytes than bf16 with a master copy.
        """
        return self.compute_dtype if self.device == "cuda" else torch.float32

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes of fnshard's mesh."""
        split = {"context": self.context, "tensor": self.tensor}
        stages = {"pipeline": self.pipeline} if self.pipeline > 1 else {}
        shard = self.ranks // self.context // self.tensor // self.pipeline
        return {**stages, "shard": shard, **{name: size for name, size in split.items() if size > 1}}

    @property
    def tokens(self) -> int:
        """Count the tokens of one step, of all ranks together."""
        return self.axes["shard"] * self.rows * self.length

    def words(self) -> list[str]:
        """Return the command line of this configuration, as `read` takes it."""
        values = dataclasses.asdict(self)
        return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


def read(words: Sequence[str]) -> BenchConfig:
    """Read `key=value` words without Hydra.

    >>> read(["case=gpu", "rows=2", "parts=[works,saves]"]).parts
    ('works', 'saves')
    """
    values: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text[1:-1].split(",") if text[:1] == "[" else text
        values[key] = tuple(value) if isinstance(value, list) else value
    return complete(BenchConfig(**values))


def complete(config: BenchConfig) -> BenchConfig:
    """Fill in what depends on the case and the device, and check what depends on other values."""
    if config.case not in CASES:
        raise ConfigError(f"case={config.case}: one of {', '.join(CASES)}.")
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(f"device={config.device}: one of cpu, cuda.")
    only_ranks = CASES[config.case].only_ranks
    if config.device == "cuda" and only_ranks not in (None, 1):
        raise ConfigError(
            f"device=cuda: case={config.case} runs on {only_ranks} processes, and the bench has one GPU. "
            "Fix: device=cpu."
        )
    defaults = CUDA if config.device == "cuda" else CPU | CASES[config.case].defaults
    config = replace(config, **{name: v for name, v in defaults.items() if getattr(config, name) is None})
    contenders = (*TORCH, *FNSHARD, *MUON, *MICRO, *NARROW)
    choices = {
        "size": size_names(), "dtype": DTYPES, "reduce": DTYPES, "contenders": contenders,
        "backend": ("inductor", "eager"), "clock": ("wall", "cpu"),
    }  # fmt: skip
    counts = ("ranks", "rounds", "steps", "warmup", "rows", "length", "every", "tensor", "context",
              "pipeline", "accumulate")  # fmt: skip
    least = dict.fromkeys(counts, 1) | {"losses": 0, "memory": 0}

    # Each value alone: it is one of a few, or a count.
    problems = []
    for name, value in vars(config).items():
        if value is None:
            continue
        values = value if isinstance(value, tuple) else (value,)
        if name == "ranks" and only_ranks not in (None, value):
            problems.append(
                f"ranks={value}: case={config.case} runs on {only_ranks} processes. Fix: ranks={only_ranks}."
            )
        elif name in choices:
            known = choices[name]
            problems += [f"{name}={v}: one of {', '.join(known)}." for v in values if v not in known]
            if not values:
                problems.append(f"{name}: at least one of {', '.join(known)}.")
        elif name in least:
            problems += [f"{name}={v}: must be {least[name]} or more." for v in values if v < least[name]]

    # Values together, which are checked only if each of them is right.
    splits = {name: getattr(config, name) for name in ("tensor", "context", "pipeline")}
    if not problems and config.ranks % math.prod(splits.values()):
        split = " times ".join(f"{name}={size}" for name, size in splits.items() if size > 1)
        problems.append(f"ranks={config.ranks}: {split} does not divide them.")
    if not problems and config.rows % config.accumulate:
        problems.append(f"accumulate={config.accumulate}: does not divide rows={config.rows}.")
    if config.device == "cuda" and not torch.cuda.is_available():
        problems.append("device=cuda: this machine has no CUDA device that torch can use. Fix: device=cpu.")
    elif config.device == "cuda" and config.ranks != 1:
        problems.append(f"ranks={config.ranks}: on device=cuda the bench runs on one GPU. Fix: ranks=1.")
    if problems:
        raise join_problems(problems)
    return config
