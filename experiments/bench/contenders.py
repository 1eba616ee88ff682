"""The contenders: one model, the same initial parameters, AdamW, no clipping; who runs the step differs."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.training.decoder import Decoder, next_token_loss
from fnshard.runtime.collectives.connect import connection


@dataclass(frozen=True)
class BenchTask:
    """The inputs of every contender.

    Args:
        model: fp32 parameters on the CPU, equal on all ranks, not to be changed.
        mesh: an axis "shard", and "tensor" where ranks split matrices.
        compute, reduce: dtypes of the kernels and of gradients on the wire.
        store: the dtype that fnshard keeps parameters in, with an fp32 master where it is not fp32.
        backend, update: options of fnshard.
    """

    model: Decoder
    mesh: fs.Mesh
    compute: torch.dtype
    reduce: torch.dtype
    store: torch.dtype = torch.float32
    backend: str = "inductor"
    update: str = "auto"
    lr: float = 3e-4
    weight_decay: float = 0.1


def make_task(config: BenchConfig) -> BenchTask:
    """The same initial parameters on every rank."""
    torch.manual_seed(config.seed)
    axes = {"tensor": config.tensor} if config.tensor > 1 else {}
    mesh = fs.make_mesh(shard=config.ranks // config.tensor, **axes, device=config.device)
    sizes = replace(config.model, context=max(config.length, config.model.context))
    dtypes = config.compute_dtype, config.reduce_dtype, config.store_dtype
    return BenchTask(Decoder(sizes), mesh, *dtypes, config.backend, config.update)


@dataclass(frozen=True)
class Contender:
    """`step(tokens, targets)` trains one step and gives a loss: this rank's, or all ranks' mean.

    `trains`: whether its losses are those of a training on all ranks' batches. `training`: of fnshard's.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    trains: bool = True
    training: Training | None = None

    def transport_bytes(self) -> int:
        """Memory of its own communication that no allocator shows."""
        return self.training.transport_bytes() if self.training else 0

    def close(self) -> None:
        if self.training:
            self.training.close()


# ------------------------------------------------------------------ torch's own


def ddp(task: BenchTask) -> Contender:
    """DistributedDataParallel, eager. bf16: autocast, and the hook torch has for a bf16 wire."""
    device = task.mesh.device
    model = nn.parallel.DistributedDataParallel(
        copy.deepcopy(task.model).to(device), device_ids=None if device.type == "cpu" else [device]
    )
    if task.reduce == torch.bfloat16:
        model.register_comm_hook(None, _in_bf16)
    mixed = task.compute != torch.float32
    autocast = (
        functools.partial(torch.autocast, device.type, task.compute) if mixed else contextlib.nullcontext
    )
    return _trained(model, task, autocast)


def _in_bf16(state, bucket):  # DDP inspects annotations, and takes no strings for them
    # Torch refuses its hook by name on gloo, where it works as well.
    return bf16_compress_hook(state, bucket)


def fsdp2(task: BenchTask, compiled: bool) -> Contender:
    """`fully_shard` on every block and the root, its defaults; eager, or each block compiled."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = copy.deepcopy(task.model).to(task.mesh.device), task.mesh.device_mesh["shard"]
    dtypes = {"param_dtype": task.compute, "reduce_dtype": task.reduce}
    policy = MixedPrecisionPolicy(**(dtypes if task.compute != torch.float32 else {}))
    for block in model.layers:
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _trained(model, task, contextlib.nullcontext)


def _trained(model: nn.Module, task: BenchTask, context: Callable[[], Any]) -> Contender:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with context():
            logits = model(tokens)
        loss = next_token_loss(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender(step)


def limit(task: BenchTask) -> Contender:
    """What no sharded step is faster than: the whole model under `torch.compile` in every rank, no
    communication, and the optimizer on this rank's share of the leaves."""
    model = copy.deepcopy(task.model).to(task.mesh.device, task.compute)
    leaves = sorted(model.parameters(), key=torch.numel, reverse=True)
    shares: list[list[nn.Parameter]] = [[] for _ in range(task.mesh.size)]
    for leaf in leaves:  # largest first, to the rank that has least
        min(shares, key=lambda share: sum(p.numel() for p in share)).append(leaf)
    mine = shares[task.mesh.rank]
    masters = mine if task.compute == torch.float32 else [p.detach().float() for p in mine]
    optimizer = torch.optim.AdamW(masters, lr=task.lr, weight_decay=task.weight_decay, fused=True)
    loss_of = torch.compile(lambda tokens, targets: next_token_loss(model(tokens), targets), fullgraph=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        if masters is not mine:
            for master, leaf in zip(masters, mine, strict=True):
                master.grad = leaf.grad.float()
        optimizer.step()
        if masters is not mine:
            torch._foreach_copy_([p.detach() for p in mine], masters)
        model.zero_grad()
        return loss.detach()

    return Contender(step, trains=False)


# ------------------------------------------------------------------ fnshard


@dataclass(frozen=True)
class Plan:
    """One way in which fnshard trains.

    Args:
        clip: the bound of the gradients' global norm, for which all of them wait.
        dropout: of the logits.
        one_unit: the whole model is one unit, not each block one.
        tiers: `memory=` and `optimizer_memory=` of a preset.
        options: of `shard_step`.
    """

    preset: str = "full_shard"
    clip: float | None = None
    dropout: float = 0.0
    one_unit: bool = False
    tiers: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Training:
    """A step of fnshard on the task's model, and its state; `run` makes one step and gives the loss."""

    def __init__(self, task: BenchTask, plan: Plan):
        mesh = fs.make_mesh(**_axes(task.mesh), device=task.mesh.device_type)  # with a connection of its own
        apply, self._params = fs.make_functional(task.model)

        def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = apply(params, tokens)
            return next_token_loss(F.dropout(logits, plan.dropout) if plan.dropout else logits, targets)

        specs = fs.presets.PRESETS[plan.preset](
            self._params, mesh, units=(lambda p: dict.fromkeys(p, "model")) if plan.one_unit else None,
            compute_dtype=task.compute, reduce_dtype=task.reduce, storage_dtype=task.store,
            optimizer_dtype=torch.float32, tensor="tensor" if "tensor" in mesh.names else None, **plan.tiers,
        )  # fmt: skip
        optimizer = fs.optim.adamw(task.lr, weight_decay=task.weight_decay)
        if plan.clip is not None:
            optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(plan.clip), optimizer)
        options = {"backend": task.backend, "update": task.update, **plan.options}
        self.step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, **options)
        self.begin()

    def begin(self) -> None:
        """The first state, again."""
        self.state = None
        self.state = self.step.init({path: leaf.detach() for path, leaf in self._params.items()})

    def run(self, *batch: Tensor) -> Tensor:
        self.state, metrics = self.step(self.state, *batch)
        return metrics["loss"]

    def lowered(self, *batch: Tensor) -> Any:
        return self.step.lower(self.state, *batch)

    def transport_bytes(self) -> int:
        return connection(self.step.mesh).transport_bytes()

    def close(self) -> None:
        connection(self.step.mesh).close()


def _axes(mesh: fs.Mesh) -> dict[str, int]:
    return dict(zip(mesh.names, mesh.sizes, strict=True))


def _fnshard(plan: Plan, task: BenchTask) -> Contender:
    training = Training(task, plan)
    return Contender(training.run, training=training)


FNSHARD = ("full_shard", "shard_grad_op", "no_shard")
GRAPH = "full_shard_graph"  # on one GPU
CONTENDERS: dict[str, Callable[[BenchTask], Contender]] = {
    "ddp": ddp,
    "fsdp2": functools.partial(fsdp2, compiled=False),
    "fsdp2_compiled": functools.partial(fsdp2, compiled=True),
    "limit": limit,
    **{name: functools.partial(_fnshard, Plan(name)) for name in FNSHARD},
    GRAPH: functools.partial(_fnshard, Plan(options={"mode": "reduce-overhead"})),
}


# ------------------------------------------------------------------ what they must agree with


def reference_losses(task: BenchTask, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """fp64, one process, row by row, plain torch; the loss before each update.

    On a GPU each block is recomputed in backward: fp64 attention there is a [T, T] matrix.
    """
    model = copy.deepcopy(task.model).to(task.mesh.device, torch.float64)
    if task.mesh.device_type != "cpu":
        for block in model.layers:
            block.forward = functools.partial(
                torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
            )
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
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


def global_batch(step: int, config: BenchConfig, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all ranks, int64 [rows, length]; noisy counting, so that there is a pattern."""
    random = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    start = torch.randint(vocab, (rows, 1), generator=random)
    noise = torch.randint(3, (rows, config.length + 1), generator=random)
    text = (start + torch.arange(config.length + 1) + noise) % vocab
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def batches(config: BenchConfig, task: BenchTask, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's rows of the first so many `global_batch`es."""
    first = task.mesh.coordinate()["shard"] * config.rows
    for step in range(steps):
        whole = global_batch(step, config, task.mesh.data_size * config.rows, task.model.config.vocab)
        yield tuple(part[first:][: config.rows].clone().to(task.mesh.device) for part in whole)
