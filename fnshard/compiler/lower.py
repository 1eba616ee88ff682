"""Lower: trace -> split -> differentiate -> schedule -> passes -> verify, as one function of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fnshard import tree
from fnshard.compiler.build import Plan, build
from fnshard.compiler.differentiate import Kernel, differentiate_all
from fnshard.compiler.passes import insert_frees, overlap, prefetch, reshard, update_in_backward
from fnshard.compiler.program import Program
from fnshard.compiler.schedule import Schedule
from fnshard.compiler.split import Segments, split
from fnshard.compiler.trace import trace
from fnshard.compiler.verify import verify
from fnshard.mesh import Mesh
from fnshard.spec import LayoutSpec

PlanOf = Callable[[Program], Plan]


@dataclass(frozen=True)
class Passes:
    """How the plain schedule is made fast.

    Args:
        prefetch: how many kernels ahead gathers are issued, forward and backward; 0 is none.
        overlap: how many kernels later a reduction is waited for.
    """

    prefetch: tuple[int, int] = (1, 1)
    overlap: int = 1


@dataclass(frozen=True)
class Stages:
    """What each stage made of the one before, for reading."""

    program: Program
    segments: Segments
    kernels: Mapping[str, Kernel]
    schedule: Schedule


def lower(
    fn: Callable[..., Any],
    specs: Mapping[str, LayoutSpec],
    structure: tree.TreeDef,
    batch: Sequence[Any],
    mesh: Mesh,
    plan_of: PlanOf | None,
    passes: Passes,
) -> Stages:
    """All stages for one batch shape; needs no device and no process group.

    Args:
        batch: one micro-batch of this rank.
        plan_of: what the step is to do, given what `fn` returns; None is a forward alone.
    """
    shapes = {p: (tuple(s.shape), s.compute_dtype) for p, s in specs.items()}
    differentiate = plan_of is not None
    plan = Plan(update=False, differentiate=False)
    with torch.inference_mode(False), torch.enable_grad():  # whatever mode the caller is in
        program = trace(
            fn, shapes, structure, specs, batch, device=trace_device(mesh), differentiate=differentiate
        )
        cuts = frozenset(p for p, s in specs.items() if s.trainable or mesh.ordered(s.storage.axes))
        if plan_of is not None:
            plan = plan_of(program)
        segments = split(program, specs, cuts)
        kernels = differentiate_all(segments.sources, trainable=differentiate)
        schedule = build(segments, kernels, program.outputs, specs, mesh, plan)
    return Stages(program, segments, kernels, run_passes(schedule, passes))


def run_passes(schedule: Schedule, passes: Passes) -> Schedule:
    """The passes in their order, then `verify`."""
    schedule = reshard(schedule)
    schedule = update_in_backward(schedule)
    schedule = overlap(schedule, passes.overlap)
    schedule = prefetch(schedule, *passes.prefetch)
    return verify(insert_frees(schedule))


def trace_device(mesh: Mesh) -> torch.device:
    """The mesh's device; the CPU for an abstract mesh, whose device need not be here."""
    return torch.device("cpu") if mesh.kind == "abstract" else mesh.device
