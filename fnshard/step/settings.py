"""Settings: derive what a step does besides `fn`, by pure functions of optimizer, specs and options."""

from __future__ import annotations

from dataclasses import replace

import torch

from fnshard.analysis.transport import transport_of
from fnshard.compiler.ir.program import Program
from fnshard.compiler.kernels.segments import Segments
from fnshard.compiler.options import StepOptions
from fnshard.compiler.schedule.build import StepSettings
from fnshard.compiler.update.family import families_of
from fnshard.errors import SpecError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.optim.loss_scale import LossScale
from fnshard.optim.optimizer import Optimizer
from fnshard.runtime.executor.scalars import Scalars
from fnshard.step.rank_agreement import optimizer_text

# A flag is 1 on a rank that has raised it (`step.raise_flag`), else 0. Where the sum over ranks is not 0, all
# know that one of them has raised it.
FLAGS = ("out_of_data", "stop")
# The numbers that ranks sum besides `fn`'s results and norms: the flags, and how many rows the batch of each
# rank has, by which a batch that is shorter than others is found.
REPORTED = (*FLAGS, "rows")
# The settings of `shard_forward`, which runs `fn` alone: no backward, and no optimizer.
FORWARD = StepSettings(update=False, differentiate=False)


def fill_depths(options: StepOptions, mesh: Mesh) -> StepOptions:
    """Return options in which the depths of the default passes are filled in, where the user gave none.

    CPU ranks that share memory move bytes on the thread that computes. Nothing would travel while a kernel
    runs, and buffers that wait would only take memory: their depths are 0.
    """
    if options.passes is not None:
        return options
    depth = 0 if transport_of(mesh) == "shared" else 1
    prefetch = depth if options.prefetch is None else options.prefetch
    overlap = depth if options.overlap is None else options.overlap
    return replace(options, prefetch=prefetch, overlap=overlap)


def check_order(options: StepOptions, mesh: Mesh) -> None:
    """Refuse an order of micro-batches that fills the idle time of stages, if there are no stages.

    Raises:
        SpecError: the order is "zero_bubble", and the mesh has no pipeline.
    """
    if options.micro_order == "zero_bubble" and mesh.stages == 1:
        raise SpecError(
            'micro_order="zero_bubble" fills the time in which stages of a pipeline wait for others; the '
            f"mesh {mesh} has no stages.",
            fix='make_mesh(pipeline=4, ...), or micro_order="depth" or "breadth".',
        )


def loss_scale_of(optimizer: Optimizer | None, specs: ResolvedSpecs, options: StepOptions) -> LossScale:
    """Return the loss scale of the options; where they name none, a dynamic one if a leaf trains in fp16."""
    fp16 = any(s.trainable and s.compute_dtype == torch.float16 for s in specs.stored.values())
    return LossScale.choose(options.loss_scale, fp16, optimizer is not None)


def step_settings(
    optimizer: Optimizer | None, specs: ResolvedSpecs, mesh: Mesh, options: StepOptions
) -> StepSettings:
    """Return the settings of a training step, as far as they do not depend on what `fn` returns."""
    families = families_of(optimizer, specs.stored, mesh) if optimizer is not None else {}
    dynamic = loss_scale_of(optimizer, specs, options).dynamic
    # An update that needs the norm, or that may be skipped, waits for the gradients of all leaves.
    waits_for_all = any(family.needs_norm for family in families.values()) or dynamic
    norms = waits_for_all or options.grad_norm
    return StepSettings(
        accumulate=options.accumulate,
        accumulate_mode=options.accumulate_mode,
        micro_order=options.micro_order,
        zero_bubble_memory=options.zero_bubble_memory,
        update=optimizer is not None,
        norms=norms,
        scalars=len(REPORTED) + (1 if norms else 0),  # squared norms of all leaves are summed to one number
        barrier=waits_for_all,
        families=families,
    )


def scalars_of(
    program: Program,
    segments: Segments,
    optimizer: Optimizer | None,
    specs: ResolvedSpecs,
    mesh: Mesh,
    options: StepOptions,
) -> Scalars:
    """Return the numbers of a step that ranks sum."""
    return Scalars(
        outputs=program.outputs,
        results=segments.results,
        mesh=mesh,
        specs=specs.stored,
        accumulate=options.accumulate,
        norms=step_settings(optimizer, specs, mesh, options).norms,
        flags=REPORTED,  # "rows" is a count; it is summed as the flags are
    )


def texts_to_compare(
    optimizer: Optimizer | None, specs: ResolvedSpecs, options: StepOptions, seed: int, step: int
) -> dict[str, str]:
    """Return texts by name of what must be alike on all ranks besides the schedule."""
    text, scale = optimizer_text(optimizer, specs.stored), loss_scale_of(optimizer, specs, options)
    return {"optimizer": text, "loss scale": repr(scale), "seed": str(seed), "step": str(step)}


def items_of(program: Program) -> float:
    """Return how many items a Mean of this rank may count at most: its declared bound, or an estimate.

    The estimate is the size of the largest leaf of integers, since targets and masks are integers. Gradients
    travel divided by it: too large a guess costs digits in fp16, never correctness.
    """
    if program.outputs.bound is not None:
        return program.outputs.bound
    nodes = zip(program.placeholders, program.inputs, strict=True)
    values = [n.meta["val"] for n, i in nodes if i.kind == "batch"]
    integers = [v.numel() for v in values if not v.is_floating_point()]
    rows = [v.shape[0] for v in values if v.dim()]
    return max([1, *(integers or rows)])  # without integers a row is the best guess of an item
