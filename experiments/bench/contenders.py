"""The contenders: all train one model with AdamW from the same parameters, each by a step of its own."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import fnshard as fs
from experiments.bench.config import FNSHARD, BenchConfig
from experiments.lib.decoder import Decoder, next_token_loss
from fnshard.runtime.collectives.connect import connection

ADAMW = {"lr": 3e-4, "weight_decay": 0.1}
Batch = tuple[Tensor, Tensor]  # tokens and targets, int64 [rows, length]


@dataclass(frozen=True)
class BenchTask:
    """The inputs of every contender.

    Args:
        model: fp32 parameters on the CPU, equal on all ranks. Contenders copy it, and never change it.
        mesh: a mesh with an axis "shard" and those that split a row's computation.
    """

    config: BenchConfig
    model: Decoder
    mesh: fs.Mesh

    @property
    def is_mixed(self) -> bool:
        return self.config.compute_dtype != torch.float32


def make_task(config: BenchConfig) -> BenchTask:
    """Make the task, with the same initial parameters on every rank.

    They are drawn on the device, which is faster than a CPU.
    """
    torch.manual_seed(config.seed)
    with torch.device(config.device):
        model = Decoder(replace(config.model, context=max(config.length, config.model.context))).cpu()
    return BenchTask(config, model, fs.make_mesh(**config.axes, device=config.device))


@dataclass(frozen=True)
class Contender:
    """A contender, which runs steps.

    Args:
        run: trains one step, and returns this rank's loss or all ranks' mean.
        trains: whether its losses are those of a training on all ranks' batches.
    """

    run: Callable[[Tensor, Tensor], Tensor]
    trains: bool = True

    def transport_bytes(self) -> int:
        """Count the bytes that its communication holds and no allocator shows."""
        return 0

    def close(self) -> None:
        """Release everything that the next contender would meet."""


def repeat_step(contender: Contender | Training, batches: Iterable[Batch]) -> Callable[[], Tensor]:
    """Make a function that runs a step on the next of some batches, which repeat without end."""
    feed = cycle(list(batches))
    return lambda: contender.run(*next(feed))


# ------------------------------------------------------------------ torch's own


def ddp(task: BenchTask) -> Contender:
    """Train with DistributedDataParallel, which is eager. Only the loss is compiled.

    In bf16 it uses autocast, and torch's hook for a bf16 wire.
    """
    device = task.mesh.device
    model = nn.parallel.DistributedDataParallel(
        copy.deepcopy(task.model).to(device), device_ids=None if device.type == "cpu" else [device]
    )
    if task.config.reduce_dtype == torch.bfloat16:
        model.register_comm_hook(None, _compress_to_bf16)
    autocast = functools.partial(torch.autocast, device.type, task.config.compute_dtype, task.is_mixed)

    @contextlib.contextmanager
    def context(is_last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if is_last else model.no_sync(), autocast():
            yield

    return _train_module(task, model, context)


def _compress_to_bf16(state, bucket):  # DDP inspects annotations, and takes no strings for them
    # Torch refuses its hook by name on gloo, where it works as well.
    return bf16_compress_hook(state, bucket)


def fsdp2(task: BenchTask, compiled: bool = False, local: bool = False) -> Contender:
    """Train with `fully_shard` on every block and on the root, with its defaults. The loss is compiled.

    Args:
        compiled: whether blocks are compiled too, or run eagerly.
        local: whether gradients of micro-batches are summed whole, and reduced with the last.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = copy.deepcopy(task.model).to(task.mesh.device), task.mesh.device_mesh
    dtypes = {"param_dtype": task.config.compute_dtype, "reduce_dtype": task.config.reduce_dtype}
    policy = MixedPrecisionPolicy(**(dtypes if task.is_mixed else {}))
    for block in model.layers:
        if compiled and task.config.backend == "inductor":
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def context(is_last: bool) -> contextlib.AbstractContextManager[None]:
        if local:
            model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    return _train_module(task, model, context)


def _train_module(task: BenchTask, model: nn.Module, context: Callable[[bool], Any]) -> Contender:
    """Train a module as torch's users do.

    Args:
        context: makes the context of a micro-batch's forward. It is told whether that is the last of a step.
    """
    parts = task.config.accumulate
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    loss_of = next_token_loss
    if task.config.backend == "inductor":  # as fnshard's is
        loss_of = torch.compile(loss_of, fullgraph=True)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for number, (rows, its_targets) in enumerate(
            zip(tokens.chunk(parts), targets.chunk(parts), strict=True), 1
        ):
            with context(number == parts):
                logits = model(rows)
            loss = loss_of(logits, its_targets) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contender(run)


def limit(task: BenchTask) -> Contender:
    """Run the work that no sharded step can do without, so that none is faster.

    Every rank has the whole model under `torch.compile` and communicates nothing, and its optimizer updates
    this rank's share of the leaves.
    """
    model = copy.deepcopy(task.model).to(task.mesh.device, task.config.compute_dtype)

    # Leaves are shared out from the largest to the smallest, each to the rank that has least so far.
    leaves = sorted(model.parameters(), key=torch.numel, reverse=True)
    shares: list[list[nn.Parameter]] = [[] for _ in range(task.mesh.size)]
    for leaf in leaves:
        min(shares, key=lambda share: sum(p.numel() for p in share)).append(leaf)
    mine = shares[task.mesh.rank]
    masters = [p.detach().float() for p in mine] if task.is_mixed else mine
    optimizer = torch.optim.AdamW(masters, **ADAMW, fused=True)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(model(tokens), targets)

    if task.config.backend == "inductor":
        loss_of = torch.compile(loss_of, fullgraph=True)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        if task.is_mixed:
            for master, leaf in zip(masters, mine, strict=True):
                master.grad = leaf.grad.float()
        optimizer.step()
        if task.is_mixed:
            torch._foreach_copy_([p.detach() for p in mine], masters)
        model.zero_grad()
        return loss.detach()

    return Contender(run, trains=False)


# ------------------------------------------------------------------ fnshard


OPTIMIZERS = {
    "adamw": functools.partial(fs.optim.adamw, **ADAMW),
    "muon": functools.partial(fs.optim.muon, 1e-3),
}


@dataclass(frozen=True)
class Setup:
    """A way in which fnshard trains.

    Args:
        optimizer: a name of `OPTIMIZERS`.
        clip: the bound of the gradients' global norm, for which all of them wait.
        dropout: the share of the logits that becomes 0.
        narrow: whether products with most matrices are in eight bits.
        one_unit: whether the whole model is one unit; otherwise each block is one.
        chunks: the number of chunks of each stage of a pipeline.
        tiers: `memory=` and `optimizer_memory=` of a preset.
        options: keywords of `shard_step`.
    """

    preset: str = "full_shard"
    optimizer: str = "adamw"
    clip: float | None = None
    dropout: float = 0.0
    narrow: bool = False
    one_unit: bool = False
    chunks: int = 1
    tiers: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Training:
    """A contender: a step of fnshard on the task's model, and its state."""

    trains = True

    def __init__(self, task: BenchTask, setup: Setup):
        config = task.config
        mesh = fs.make_mesh(**config.axes, device=config.device)  # with a connection of its own
        apply, self._params = fs.make_functional(task.model)

        def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = apply(params, tokens)
            return next_token_loss(F.dropout(logits, setup.dropout) if setup.dropout else logits, targets)

        compute_dtype = torch.float8_e4m3fn if setup.narrow else config.compute_dtype
        specs = fs.presets.PRESETS[setup.preset](
            self._params, mesh, units=(lambda p: dict.fromkeys(p, "model")) if setup.one_unit else None,
            tensor="tensor" if config.tensor > 1 else None, chunks=setup.chunks,
            compute_dtype=compute_dtype, reduce_dtype=config.reduce_dtype,
            storage_dtype=config.store_dtype, optimizer_dtype=torch.float32, **setup.tiers,
        )  # fmt: skip
        optimizer = OPTIMIZERS[setup.optimizer]()
        if setup.clip is not None:
            optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(setup.clip), optimizer)
        options = {"backend": config.backend, "accumulate": config.accumulate, **setup.options}
        self.step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, **options)
        self.begin()

    def begin(self) -> None:
        """Return to the first state."""
        self.state = None  # frees the last one before a new one is made
        self.state = self.step.init({path: leaf.detach() for path, leaf in self._params.items()})

    def run(self, *batch: Tensor) -> Tensor:
        self.state, metrics = self.step(self.state, *batch)
        return metrics["loss"]

    def lower(self, *batch: Tensor) -> Any:
        return self.step.lower(self.state, *batch)

    def transport_bytes(self) -> int:
        return connection(self.step.mesh).transport_bytes()

    def close(self) -> None:
        connection(self.step.mesh).close()


CONTENDERS: dict[str, Callable[[BenchTask], Contender | Training]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_compiled": functools.partial(fsdp2, compiled=True),
    "fsdp2_local": functools.partial(fsdp2, local=True),
    "limit": limit,
    **{name: functools.partial(Training, setup=Setup(name)) for name in FNSHARD},
    "full_shard_fp8": functools.partial(Training, setup=Setup(narrow=True)),
    "full_shard_breadth": functools.partial(Training, setup=Setup(options={"micro_order": "breadth"})),
    "muon": functools.partial(Training, setup=Setup(optimizer="muon")),
    "muon_no_shard": functools.partial(Training, setup=Setup("no_shard", optimizer="muon")),
}


# ------------------------------------------------------------------ the reference, and batches


def reference_losses(task: BenchTask, batches: Iterable[Batch]) -> list[float]:
    """Train in fp64 with plain torch, in one process and row by row, and return the loss before each update.

    On a GPU each block is recomputed in backward, since fp64 attention there is a [T, T] matrix.
    """
    model = copy.deepcopy(task.model).to(task.mesh.device, torch.float64)
    if task.mesh.device_type != "cpu":
        for block in model.layers:
            block.forward = functools.partial(
                torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
            )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for tokens, targets in batches:
        total = 0.0
        for row, target in zip(tokens.split(1), targets.split(1), strict=True):
            loss = next_token_loss(model(row), target) / len(tokens)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def global_batches(task: BenchTask, steps: int) -> Iterator[Batch]:
    """Yield the batches of all ranks together. They count upwards with noise, a pattern that can be
    learned."""
    config, vocab = task.config, task.model.config.vocab
    rows, length = task.mesh.data_size * config.rows, config.length + 1
    for step in range(steps):
        random = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        start = torch.randint(vocab, (rows, 1), generator=random)
        text = start + torch.arange(length) + torch.randint(3, (rows, length), generator=random)
        text = (text % vocab).to(task.mesh.device)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def batches(task: BenchTask, steps: int) -> Iterator[Batch]:
    """Yield this rank's rows of `global_batches`."""
    first = task.mesh.data_rank * task.config.rows
    for batch in global_batches(task, steps):
        yield tuple(part[first:][: task.config.rows].clone() for part in batch)
