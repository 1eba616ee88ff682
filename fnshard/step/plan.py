"""Plan: a step's options, and what it does besides running `fn`, as pure functions of optimizer, specs and
options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from fnshard.analysis.slots import owner_work_of, sums_of
from fnshard.analysis.transport import kind_of
from fnshard.compiler.ir.program import Program
from fnshard.compiler.kernels.remat import check as check_remat
from fnshard.compiler.kernels.segments import Segments
from fnshard.compiler.lower import LowerOptions
from fnshard.compiler.place.strategies import ContextAttention, Residual
from fnshard.compiler.schedule.build import AccumulateMode, Plan
from fnshard.errors import SpecError, counts, is_number, misfits, one_of
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer
from fnshard.optim.loss_scale import LossScale
from fnshard.runtime.collectives.base import DEFAULT_TIMEOUT
from fnshard.runtime.executor.fused_update import is_compiled
from fnshard.runtime.executor.scalars import Scalars
from fnshard.step.agreement import optimizer_text
from fnshard.step.buckets import Buckets

Backend = Literal["inductor", "eager"]
UpdateMode = Literal["auto", "eager", "compiled"]
FLAGS = ("out_of_data", "stop")  # what a rank may report to the others with a step
REPORTED = (*FLAGS, "rows")  # what is summed over ranks besides results and norms
FORWARD = Plan(update=False, differentiate=False)


@dataclass(frozen=True)
class Options:
    """Everything about a step that is not its function, specs, mesh or optimizer; see `shard_step`."""

    accumulate: int = 1
    accumulate_mode: AccumulateMode = "reduce"
    lowering: LowerOptions = LowerOptions()
    backend: Backend = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float | Literal["dynamic"] | None = None
    grad_norm: bool = False
    cache: int = 8
    timeout: float = DEFAULT_TIMEOUT
    disk_dir: str | None = None
    deterministic: bool = False
    update: UpdateMode = "auto"
    shapes: Buckets | None = None

    def __post_init__(self) -> None:
        low = self.lowering
        values = {**vars(low), **vars(self)}
        wrong = [*check_remat(low.remat, low.save), *misfits(values, _EXPECTED)]
        if wrong:
            raise SpecError("invalid options of a step:", wrong)
        LossScale.choose(self.loss_scale, fp16=False)

    def compiles_update(self, optimizer: Optimizer | None, device_type: str) -> bool:
        """Whether Inductor compiles the optimizer, too, for such a device."""
        return is_compiled(self.update, optimizer, self.backend, device_type)


def default_depth(mesh: Mesh) -> int:
    """How many kernels early a step gathers, and how many later it waits for reductions, if nobody says.

    CPU ranks that share memory move bytes on the thread that computes: nothing would travel while a
    kernel runs, and what waits would only take memory.
    """
    return 0 if isinstance(mesh, Mesh) and kind_of(mesh) == "shared" else 1


_EXPECTED = {
    "accumulate": counts(1, "a whole number of micro-batches"),
    "accumulate_mode": one_of(*get_args(AccumulateMode)), "backend": one_of(*get_args(Backend)),
    "update": one_of(*get_args(UpdateMode)), "residual": one_of(*get_args(Residual)),
    "context_attention": one_of(*get_args(ContextAttention)),
    "expert_capacity": (lambda v: v is None or (is_number(v) and v > 0), "a number above 0, or None"),
    "deterministic": one_of(True, False), "grad_norm": one_of(True, False),
    "shapes": (lambda v: isinstance(v, Buckets | None), "fs.Buckets([256, 512], pad=...), or None"),
    "prefetch": (
        lambda v: isinstance(v, tuple) and len(v) == 2 and all(map(counts(0)[0], v)),
        "a number of kernels, or (forward, backward)",
    ),
    "overlap": counts(0, "a whole number of kernels"),
    "passes": (
        lambda v: v is None or (isinstance(v, tuple) and all(map(callable, v))),
        "a list of functions from a schedule to a schedule, fs.passes.default() + [mine], or None",
    ),
    "cache": counts(1, "a whole number of batch shapes"),
    "timeout": (lambda v: is_number(v) and v > 0, "seconds, more than 0"),
    "disk_dir": (lambda v: isinstance(v, str | os.PathLike | None), "the path of an existing directory"),
}  # fmt: skip


def loss_scale_of(optimizer: Optimizer | None, specs: ResolvedSpecs, options: Options) -> LossScale:
    """The loss scale: as the options say, or dynamic where a leaf trains in fp16."""
    fp16 = any(s.trainable and s.compute_dtype == torch.float16 for s in specs.stored.values())
    return LossScale.choose(options.loss_scale, fp16, optimizer is not None)


def plan_of(optimizer: Optimizer | None, specs: ResolvedSpecs, mesh: Mesh, options: Options) -> Plan:
    """What a training step does, whatever `fn` returns."""
    needs = optimizer.needs if optimizer is not None else frozenset()
    dynamic = loss_scale_of(optimizer, specs, options).dynamic
    stands_between = "global_norm" in needs or dynamic
    norms = stands_between or options.grad_norm
    return Plan(
        accumulate=options.accumulate,
        accumulate_mode=options.accumulate_mode,
        update=optimizer is not None,
        norms=norms,
        scalars=norms + len(REPORTED),
        barrier=stands_between,
        owner_work=owner_work_of(optimizer, specs.stored, mesh) if optimizer is not None else {},
        sums=sums_of(optimizer, specs.stored, mesh) if optimizer is not None else {},
    )


def scalars_of(
    program: Program,
    segments: Segments,
    optimizer: Optimizer | None,
    specs: ResolvedSpecs,
    mesh: Mesh,
    options: Options,
) -> Scalars:
    """The numbers of a step that ranks sum."""
    return Scalars(
        outputs=program.outputs,
        results=segments.results,
        mesh=mesh,
        specs=specs.stored,
        accumulate=options.accumulate,
        norms=plan_of(optimizer, specs, mesh, options).norms,
        flags=REPORTED,
    )


def settings_of(
    optimizer: Optimizer | None, specs: ResolvedSpecs, options: Options, seed: int, step: int
) -> dict[str, str]:
    """What must be alike on all ranks besides the schedule, as text by name."""
    text, scale = optimizer_text(optimizer, specs.stored), loss_scale_of(optimizer, specs, options)
    return {"optimizer": text, "loss scale": repr(scale), "seed": str(seed), "step": str(step)}


def items_of(program: Program) -> float:
    """How many items a Mean of this rank may count at most: its declared bound, or an estimate (targets and
    masks are integers).

    Gradients travel divided by it: too large a guess costs digits in fp16, never correctness.
    """
    if program.outputs.bound is not None:
        return program.outputs.bound
    nodes = zip(program.placeholders, program.inputs, strict=True)
    values = [n.meta["val"] for n, i in nodes if i.kind == "batch"]
    whole = [v.numel() for v in values if not v.is_floating_point()]
    rows = [v.shape[0] for v in values if v.dim()]
    return max([1, *(whole or rows)])
