"""The contenders: one model, the same initial parameters, AdamW, no clipping; who runs the step differs."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import fnshard as fs
from experiments.training.decoder import Decoder, next_token_loss
from fnshard.runtime.collectives.connect import connection

LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BenchTask:
    """The inputs of every contender.

    `model`: fp32 parameters on the CPU, equal on all ranks, not to be changed. `mesh`: an axis
    "shard" and an axis "tensor". `compute`, `reduce`: dtypes of the kernels and of gradients on the wire.
    `store`: the dtype that fnshard keeps parameters in, beside an fp32 master where it is not fp32; `update`:
    its option.
    """

    model: Decoder
    mesh: fs.Mesh
    compute: torch.dtype
    reduce: torch.dtype
    lr: float
    weight_decay: float
    backend: str
    store: torch.dtype = torch.float32
    update: str = "auto"


@dataclass(frozen=True)
class Contender:
    """`step(tokens, targets)` trains one step and gives a loss: this rank's, or all ranks' mean.

    `trains`: whether its losses are those of a training on all ranks' batches. `transport_bytes`: memory of
    its own communication that no allocator shows.
    """

    step: LossOf
    trains: bool = True
    transport_bytes: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None


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


def fsdp2(task: BenchTask) -> Contender:
    """`fully_shard` on every block and the root, eager, its defaults."""
    return _fsdp2(task, compiled=False)


def fsdp2_compiled(task: BenchTask) -> Contender:
    return _fsdp2(task, compiled=True)


def _fsdp2(task: BenchTask, compiled: bool) -> Contender:
    model = copy.deepcopy(task.model).to(task.mesh.device)
    return _trained(_fully_sharded(model, task, compiled), task, contextlib.nullcontext)


def _fully_sharded(model: nn.Module, task: BenchTask, compiled: bool) -> nn.Module:
    """`fully_shard` over the axis "shard"."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed, mesh = task.compute != torch.float32, task.mesh.device_mesh["shard"]
    policy = (
        MixedPrecisionPolicy(param_dtype=task.compute, reduce_dtype=task.reduce)
        if mixed
        else MixedPrecisionPolicy()
    )
    for block in model.layers:
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def fsdp2_tensor(task: BenchTask, compiled: bool = False) -> Contender:
    """DTensor's tensor and sequence parallelism (torchtitan's plan for Llama), and `fully_shard`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    ranks, mesh = task.mesh.axis_size("tensor"), task.mesh.device_mesh["tensor"]
    model = _of_torch_modules(task.model).to(task.mesh.device)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    for block in model.layers:
        c = block.attn.config
        own = {"heads": c.heads // ranks, "kv_heads": c.kv_heads // ranks}
        block.attn.config = SimpleNamespace(head=c.head, theta=c.theta, **own)
        plan = {
            "attn_norm": SequenceParallel(), "attn": whole, "attn.wq": columns, "attn.wk": columns,
            "attn.wv": columns, "attn.wo": rows, "mlp_norm": SequenceParallel(), "mlp": whole,
            "mlp.gate": columns, "mlp.up": columns, "mlp.down": rows,
        }  # fmt: skip
        parallelize_module(block, mesh, plan)
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {"embed": table, "norm": SequenceParallel(), "head": head})
    if task.mesh.axis_size("shard") > 1:
        _fully_sharded(model, task, compiled)
    elif compiled:
        for block in model.layers:
            block.compile(fullgraph=True)
    return _trained(model, task, contextlib.nullcontext)


def _of_torch_modules(model: Decoder) -> Decoder:
    """A copy whose layers are torch's own, which `parallelize_module` knows."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind, (rows, *columns) = type(child).__name__, getattr(child, "weight", torch.empty(0)).shape
            made: nn.Module | None = None
            if kind == "Linear":
                made = nn.Linear(*columns, rows, bias=False)
            elif kind == "Embedding":
                made = nn.Embedding(rows, *columns)
            elif kind == "RMSNorm":
                made = nn.RMSNorm(rows, eps=1e-5)
            if made is not None:
                made.weight = child.weight
                setattr(parent, name, made)
    return model


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


def sharded(
    task: BenchTask, preset: str, *, dropout: float = 0.0, clip: float | None = None, **options: Any
) -> tuple[fs.Step, fs.TrainState]:
    """The step and its first state; `dropout` falls on the logits, `options` are `shard_step`'s."""
    sizes = dict(zip(task.mesh.names, task.mesh.sizes, strict=True))
    mesh = fs.make_mesh(**sizes, device=task.mesh.device_type)  # with a connection of its own
    apply, params = fs.make_functional(task.model)
    specs = fs.presets.PRESETS[preset](
        params, mesh, compute_dtype=task.compute, reduce_dtype=task.reduce,
        storage_dtype=task.store, optimizer_dtype=torch.float32, tensor="tensor",
    )  # fmt: skip

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = apply(params, tokens)
        return next_token_loss(F.dropout(logits, dropout) if dropout else logits, targets)

    optimizer = fs.optim.adamw(task.lr, weight_decay=task.weight_decay)
    if clip is not None:
        optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(clip), optimizer)
    options = {"backend": task.backend, "update": task.update, **options}
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, **options)
    return step, step.init({path: leaf.detach() for path, leaf in params.items()})


def _fnshard(preset: str, task: BenchTask, **options: Any) -> Contender:
    step, state = sharded(task, preset, **options)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, tokens, targets)
        return metrics["loss"]

    return Contender(
        run,
        transport_bytes=lambda: connection(step.mesh).transport_bytes(),
        close=lambda: connection(step.mesh).close(),
    )


TENSOR = ("fsdp2_tensor", "fsdp2_tensor_compiled")
FNSHARD = ("full_shard", "shard_grad_op", "no_shard")
GRAPH = "full_shard_graph"  # on one GPU
CONTENDERS: dict[str, Callable[[BenchTask], Contender]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_compiled": fsdp2_compiled,
    "fsdp2_tensor": fsdp2_tensor,
    "fsdp2_tensor_compiled": functools.partial(fsdp2_tensor, compiled=True),
    "limit": limit,
    **{name: functools.partial(_fnshard, name) for name in FNSHARD},
    GRAPH: functools.partial(_fnshard, "full_shard", mode="reduce-overhead"),
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


def global_batch(step: int, task_seed: int, rows: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all ranks, int64 [rows, length]; noisy counting, so that there is a pattern."""
    random = torch.Generator().manual_seed(task_seed * 1_000_003 + step)
    start = torch.randint(vocab, (rows, 1), generator=random)
    noise = torch.randint(3, (rows, length + 1), generator=random)
    text = (start + torch.arange(length + 1) + noise) % vocab
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def rank_batch(
    step: int, seed: int, mesh: fs.Mesh, rows: int, length: int, vocab: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of `global_batch`."""
    parts = global_batch(step, seed, mesh.data_size * rows, length, vocab)
    first = mesh.coordinate()["shard"] * rows
    return tuple(part[first:][:rows].clone() for part in parts)


def mean_over_ranks(loss: Tensor) -> float:
    value = loss.double().cpu()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()
