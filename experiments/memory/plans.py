"""Plans: ways to train a decoder, as a step on paper and as one that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.bench.contenders import CONTENDERS, BenchTask, rank_batch
from experiments.training.decoder import Decoder, DecoderConfig, loss_function
from fnshard import tree
from fnshard.runtime.collectives.connect import connection
from fnshard.step.lowered import Lowered

# Meta's Llama 3.2 1B, Llama 3.1 8B and 70B: shapes alone.
LLAMA = {
    "1b": DecoderConfig(
        width=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        context=4096,
        vocab=128256,
        mlp=8192,
        tied=True,
        theta=5e5,
    ),
    "8b": DecoderConfig(
        width=4096, layers=32, heads=32, kv_heads=8, context=4096, vocab=128256, mlp=14336, theta=5e5
    ),
    "70b": DecoderConfig(
        width=8192, layers=80, heads=64, kv_heads=8, context=4096, vocab=128256, mlp=28672, theta=5e5
    ),
}
MIXED = {
    "storage_dtype": torch.bfloat16,
    "compute_dtype": torch.bfloat16,
    "reduce_dtype": torch.float32,
    "optimizer_dtype": torch.float32,
}  # bf16 parameters, an fp32 master copy and fp32 moments: 14 bytes a parameter at rest
DDP = "ddp"  # torch's own, measured beside


@dataclass(frozen=True)
class MemoryPlan:
    """One way to train.

    Args:
        preset: of `fnshard.presets`, or "ddp": torch's.
        dtype: of compute and of gradients on the wire; parameters and optimizer stay fp32.
        one_unit: the whole model is one unit (no wrap policy), not one a block.
        clip: gradients' global norm is clipped, so that all of them wait for it.
        fit_share: if not 0, `fnshard.fit` chooses, within this share of the preset's predicted peak.
    """

    name: str
    preset: str = "full_shard"
    dtype: str = "float32"
    remat: str | float = "none"
    memory: str = "device"
    optimizer_memory: str = "device"
    one_unit: bool = False
    clip: bool = False
    fit_share: float = 0.0

    def specs(self, params: Any, mesh: fs.Mesh, **policy: Any) -> Any:
        """Its spec tree; `policy`: dtypes that go before its own."""
        dtypes = {} if self.dtype == "float32" else {"compute_dtype": getattr(torch, self.dtype)}
        return fs.presets.PRESETS[self.preset](
            params, mesh, units=_one_unit if self.one_unit else None, memory=self.memory,
            optimizer_memory=self.optimizer_memory, **{**dtypes, **policy},
        )  # fmt: skip

    def optimizer(self) -> fs.optim.Optimizer:
        made = fs.optim.adamw(1e-3)
        return fs.optim.chain(fs.optim.clip_by_global_norm(1.0), made) if self.clip else made


def _one_unit(params: Any) -> dict[str, str]:
    return dict.fromkeys(tree.flatten_with_paths(params)[0], "model")


@dataclass(frozen=True)
class MemoryJob:
    """What the ranks of one launch measure.

    Args:
        rounds: of one timed step each; 0: none.
        steps: after the first that are followed byte by byte; what one of them gets wrong (gloo frees some
            buffers unseen) makes numbers larger only, so that the smallest counts.
        pictures: draw each plan's memory over its schedule.
    """

    model: DecoderConfig
    plans: tuple[MemoryPlan, ...]
    ranks: int
    rows: int
    length: int
    rounds: int
    backend: str
    steps: int = 6
    pictures: bool = False
    seed: int = 0


@dataclass
class RunningPlan:
    step: Callable[[], Any]
    lowered: Lowered | None = None
    optimizer_device_bytes: Callable[[], int] = lambda: 0
    transport_bytes: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None


def loss_of(config: DecoderConfig) -> tuple[Decoder, Callable[..., Tensor], Any]:
    """A decoder built under `fs.deferred`, its loss as a pure function, and its parameters."""
    with fs.deferred():
        model = Decoder(config)
    loss_fn, params = loss_function(model)
    return model, loss_fn, params


def on_paper(
    plan: MemoryPlan, model: DecoderConfig, ranks: int, rows: int, length: int, **policy: Any
) -> Lowered:
    """The step for so many ranks that do not exist; "cpu" in name only: nothing here needs a device."""
    mesh = fs.make_mesh(shard=ranks, device="cpu", abstract=True)
    _, loss_fn, params = loss_of(replace(model, context=length))
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    specs = plan.specs(params, mesh, **policy)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=plan.optimizer(), remat=plan.remat)
    return step.lower(params, tokens, tokens)


def batch_of(job: MemoryJob, mesh: fs.Mesh) -> tuple[Tensor, Tensor]:
    return rank_batch(0, job.seed, mesh, job.rows, job.length, job.model.vocab)


def choose(plan: MemoryPlan, job: MemoryJob, world: fs.Mesh) -> fs.Fit | None:
    """What `fnshard.fit` chooses within `fit_share` of the plan's predicted peak; None where it is 0."""
    if not plan.fit_share:
        return None
    _, loss_fn, params = loss_of(replace(job.model, context=job.length))
    batch, specs, optimizer = batch_of(job, world), plan.specs(params, world), plan.optimizer()
    step = fs.shard_step(loss_fn, specs, mesh=world, optimizer=optimizer, backend=job.backend)
    budget = int(plan.fit_share * step.lower(params, *batch).memory_analysis().peak_bytes)
    return fs.fit(
        loss_fn, params, world, batch=batch, device_bytes=budget, hardware="cpu", optimizer=optimizer,
        specs=specs, backend=job.backend,
    )  # fmt: skip


def start(plan: MemoryPlan, job: MemoryJob, world: fs.Mesh, found: fs.Fit | None = None) -> RunningPlan:
    """Make a plan's step and state on this rank; the first step compiles. `found`: of `choose`."""
    config, batch = replace(job.model, context=job.length), batch_of(job, world)
    if plan.preset == DDP:
        torch.manual_seed(job.seed)
        dtypes = (getattr(torch, plan.dtype),) * 2
        contender = CONTENDERS[DDP](BenchTask(Decoder(config), world, *dtypes, 1e-3, 0.0, job.backend))
        return RunningPlan(lambda: contender.step(*batch))
    mesh = fs.make_mesh(shard=job.ranks, device="cpu")  # with a connection of its own
    model, loss_fn, params = loss_of(config)
    specs, optimizer = plan.specs(params, mesh), plan.optimizer()
    options: dict[str, Any] = {"remat": plan.remat, "backend": job.backend}
    if found is not None:
        specs, options = found.specs, dict(found.options)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, **options)
    lowered, state = step.lower(params, *batch), step.init(model, seed=job.seed)

    def run() -> None:
        nonlocal state
        state, _ = step(state, *batch)

    def optimizer_device_bytes() -> int:
        """Of the state that is not on the host or the disk."""
        slots = [v for p, v in state.opt_state.items() if step.specs[p].optimizer_memory == "device"]
        return sum(t.numel() * t.element_size() for group in slots for t in group.values())

    return RunningPlan(
        run, lowered, optimizer_device_bytes, lambda: connection(mesh).transport_bytes(),
        lambda: connection(mesh).close(),
    )  # fmt: skip
