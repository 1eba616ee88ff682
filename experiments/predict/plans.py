"""The plans that are predicted and run: models, presets, remat, micro-batches, dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import fnshard as fs
from experiments.training.decoder import Decoder, DecoderConfig, loss_function

MODELS = {
    "5m": DecoderConfig(width=256, layers=6, heads=8, kv_heads=4, context=256),
    "25m": DecoderConfig(width=512, layers=8, heads=8, kv_heads=4, context=256),
}


@dataclass(frozen=True)
class PredictPlan:
    """One way to train a model. `rows`: per rank and step, of `length` tokens each."""

    model: str
    preset: str
    dtype: str = "float32"
    remat: str | float = "none"
    accumulate: int = 1
    clip: float | None = None
    rows: int = 4
    length: int = 256

    @property
    def name(self) -> str:
        """All that is not the default."""
        parts = [self.model, self.preset, {"float32": "f32", "bfloat16": "bf16"}[self.dtype]]
        plain = PredictPlan(self.model, self.preset)
        if self.remat != plain.remat:
            parts.append(f"remat={self.remat}")
        if self.accumulate != plain.accumulate:
            parts.append(f"accumulate={self.accumulate}")
        if self.clip is not None:
            parts.append("clip")
        if (self.rows, self.length) != (plain.rows, plain.length):
            parts.append(f"{self.rows}x{self.length}")
        return " ".join(parts)


PLANS = (
    PredictPlan("5m", "full_shard"),
    PredictPlan("5m", "no_shard", rows=8),
    PredictPlan("5m", "full_shard", remat="unit"),
    PredictPlan("5m", "zero2", "bfloat16", accumulate=4, rows=16),
    PredictPlan("25m", "full_shard"),
    PredictPlan("25m", "full_shard", "bfloat16", remat=0.5),
    PredictPlan("25m", "shard_grad_op", "bfloat16", clip=1.0, rows=8),
    PredictPlan("25m", "no_shard", remat="unit", accumulate=2),
    PredictPlan("25m", "zero1", "bfloat16", rows=2, length=512),
    PredictPlan("5m", "zero3", "bfloat16", remat="unit", clip=1.0, length=1024),
)


class Trained:
    def __init__(self, plan: PredictPlan, mesh: fs.Mesh, backend: str, seed: int = 0):
        torch.manual_seed(seed)
        self.plan = plan
        model = Decoder(replace(MODELS[plan.model], context=plan.length))
        loss_fn, params = loss_function(model)
        dtype = getattr(torch, plan.dtype)
        specs = fs.presets.PRESETS[plan.preset](params, mesh, compute_dtype=dtype, reduce_dtype=torch.float32)

        optimizer = fs.optim.adamw(1e-3)
        if plan.clip is not None:
            optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(plan.clip), optimizer)
        more = {} if plan.remat == "none" else {"remat": plan.remat}
        self.step = fs.shard_step(
            loss_fn,
            specs,
            mesh=mesh,
            optimizer=optimizer,
            accumulate=plan.accumulate,
            backend=backend,
            **more,
        )
        random = torch.Generator().manual_seed(seed + 1 + mesh.rank)
        text = torch.randint(model.config.vocab, (plan.rows, plan.length + 1), generator=random)
        self.batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        self.lowered = self.step.lower(params, *self.batch)
        self.state = self.step.init({path: leaf.detach() for path, leaf in params.items()})

    def run(self) -> None:
        self.state, _ = self.step(self.state, *self.batch)
