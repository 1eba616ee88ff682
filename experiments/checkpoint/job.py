"""What is measured, and on what state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fnshard as fs
from experiments.bench.contenders import rank_batch
from experiments.configs.decoders import decoder
from experiments.training.decoder import Decoder, DecoderConfig, loss_function


@dataclass(frozen=True)
class CheckpointJob:
    """All options.

    Args:
        part: "throughput", "async", or "both".
        folder: below which checkpoints are written, and deleted again: the disk that is measured.
        size: a file of `conf/model`.
        preset: of fnshard.
        backend: of the training step.
        rounds: of saves and restores of each kind; pairs of windows of steps.
        steps: of a window, of which every `every`th saves, or none.
        rows, length: of one rank's batch of tokens.
    """

    part: str
    folder: str
    size: str = "25m"
    preset: str = "full_shard"
    backend: str = "inductor"
    rounds: int = 9
    steps: int = 8
    every: int = 2
    rows: int = 2
    length: int = 256
    seed: int = 0

    @property
    def model(self) -> DecoderConfig:
        return decoder(self.size)


def world() -> fs.Mesh:
    return fs.make_mesh(shard=-1, device="cpu")


def training(job: CheckpointJob, mesh: fs.Mesh) -> tuple[Any, Any]:
    """A step and its first state: fp32, AdamW; its moments are noise, so that there is something to read."""
    torch.manual_seed(job.seed)
    loss, params = loss_function(Decoder(job.model))
    specs = fs.presets.PRESETS[job.preset](params, mesh)
    optimizer = fs.optim.adamw(3e-4, weight_decay=0.1)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend=job.backend)
    state = step.init({path: leaf.detach() for path, leaf in params.items()})
    torch.manual_seed(mesh.rank)
    for slots in state.opt_state.values():
        for slot in slots.values():
            slot.uniform_(0, 1e-3)
    return step, state


def batch(job: CheckpointJob, mesh: fs.Mesh, number: int) -> tuple[Tensor, ...]:
    return rank_batch(number, job.seed, mesh, job.rows, job.length, job.model.vocab)


def as_dtensors(step: Any, state: Any, mesh: fs.Mesh, fresh: bool = False) -> dict[str, Tensor]:
    """The state as users of torch's checkpoints hold it; plain tensors in a process of one.

    Args:
        fresh: new tensors of the same shapes, instead of the state's own.
    """
    out: dict[str, Tensor] = {}
    for path, spec in step.specs.items():
        named = {f"params/{path}": (state.params[path], spec.storage)}
        slots = state.opt_state.get(path, {})
        named |= {f"optimizer/{path}/{name}": (slot, spec.optimizer) for name, slot in slots.items()}
        for name, (block, layout) in named.items():
            local = torch.empty_like(block) if fresh else block
            if mesh.size == 1:
                out[name] = local
                continue
            placements = layout.to_placements(mesh)
            out[name] = DTensor.from_local(local, mesh.device_mesh, placements, run_check=False)
            if tuple(out[name].shape) != spec.shape:
                raise ValueError(f"{name}: DTensors cannot say that blocks are padded; take another size.")
    return out


def nbytes(step: Any, state: Any) -> int:
    """Of the whole state, each leaf once, without padding."""
    leaves = [(s.shape, state.params[p].dtype) for p, s in step.specs.items()]
    leaves += [(step.specs[p].shape, t.dtype) for p, slots in state.opt_state.items() for t in slots.values()]
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in leaves)
