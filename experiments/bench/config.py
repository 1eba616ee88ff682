"""The options of the bench; read without Hydra, which a bare GPU machine lacks."""

from __future__ import annotations

import torch

from experiments.configs.checks import configuration
from experiments.configs.decoders import DecoderConfig, decoder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@configuration
class BenchConfig:
    """All options; those that are None depend on the case and the device (`defaults.DEFAULTS`).

    Args:
        case: a name of `cases.CASES`.
        device: "cpu" (gloo ranks of one thread each) or "cuda" (one rank over NCCL).
        ranks: how many processes, a mesh of that size.
        tensor: how many of them split each matrix; the others take other rows.
        size: a file of `conf/model`.
        dtype: of compute; parameters are updated in fp32.
        reduce: dtype of gradients on the wire; None is `dtype`.
        store: dtype that fnshard stores parameters in, with an fp32 master if it is another; None is `dtype`
            on a GPU, and fp32 on a CPU, where it takes fewer bytes.
        backend, update: of fnshard.
        rows, length: of one rank's batch of tokens.
        rounds: timed samples of each contender, each of `steps` steps; `warmup` steps come before, of which
            the first compiles. A GPU takes several steps, so that they are launched without a pause.
        contenders: of peers and gpu, names of `contenders.CONTENDERS`.
        losses: how many steps of peers are compared with the fp64 reference; 0 skips it.
        memory: how often bytes of peers are followed (what one pass gets wrong makes numbers larger only, so
            the smallest counts); 0 skips it.
        profile: whether peers end with the time of the first fnshard contender by kind of instruction.
        plans: of memory and predict, the names that take part; none: all.
        clock: of predict: "wall", or "cpu", which leaves out what other processes took.
        every: of checkpoint, steps from one save to the next.
        mb: of collectives, sizes in MiB.
        vocab, frozen: of loss: words, and whether the head has no gradient, as under LoRA.
        lengths, multiple: of lengths: how many from 100 to `length`, and what they are padded to.
        checkout: of starts, another checkout that takes turns with this one.
        overrides: of starts, watch, loader and long_run, words for `python -m experiments.train`.
        folder: of checkpoint, on the disk to be measured; of gpu, where results lie (outputs/gpu).
        parts, again: of gpu, names of `gpu.PARTS`: these alone; made once more though they have a result.
        minutes: of gpu, that one part may take.
        triton: of cuda, whether Triton assembles the kernels for sm_90.
    """

    case: str = "peers"
    device: str = "cpu"
    ranks: int | None = None
    tensor: int = 1
    size: str | None = None
    dtype: str | None = None
    reduce: str | None = None
    store: str | None = None
    backend: str = "inductor"
    update: str = "auto"
    rows: int | None = None
    length: int | None = None
    rounds: int | None = None
    steps: int | None = None
    warmup: int = 3
    seed: int = 0
    timeout_s: float = 600.0
    contenders: tuple[str, ...] = (
        "ddp",
        "fsdp2",
        "fsdp2_compiled",
        "limit",
        "full_shard",
        "shard_grad_op",
        "no_shard",
    )
    losses: int = 20
    memory: int = 2
    profile: bool = True
    plans: tuple[str, ...] = ()
    clock: str = "wall"
    every: int = 2
    mb: tuple[float, ...] = (1.0, 8.0, 32.0, 128.0)
    vocab: int = 128_256
    frozen: bool = False
    lengths: int = 32
    multiple: int = 64
    checkout: str | None = None
    overrides: str = ""
    folder: str | None = None
    parts: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    minutes: float = 8.0
    triton: bool = True

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
        """Of one step, all ranks together."""
        return self.ranks // self.tensor * self.rows * self.length
