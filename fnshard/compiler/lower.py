"""Lower: trace -> split -> differentiate -> schedule -> passes -> verify, as one function of data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fnshard.compiler.frontend.trace import trace
from fnshard.compiler.ir.arguments import Arguments, sequence_dims
from fnshard.compiler.ir.deferred_imports import trace_again
from fnshard.compiler.ir.program import Program
from fnshard.compiler.kernels.differentiate import differentiate_all, kernel_key
from fnshard.compiler.kernels.inductor import TRACING
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.remat import policies
from fnshard.compiler.kernels.segments import Segments, Way, group_by_unit
from fnshard.compiler.kernels.split import split
from fnshard.compiler.options import StepOptions
from fnshard.compiler.place.experts import place_experts
from fnshard.compiler.place.place import place_axes
from fnshard.compiler.rewrites.fp8 import fp8_products
from fnshard.compiler.schedule.build import StepSettings, build, find_active
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.schedule.kept_bytes import KeptBytes, count_kept_bytes, find_fetched_again
from fnshard.compiler.schedule.passes import Pass, default, insert_frees
from fnshard.compiler.schedule.reruns import Rerun, plan_rerun
from fnshard.compiler.schedule.stages import StagePlan, assign_chunks, plan_stages
from fnshard.compiler.schedule.tasks import Task, order_pipeline
from fnshard.compiler.schedule.together import together
from fnshard.compiler.schedule.verify import verify
from fnshard.errors import FnshardError, ScheduleError, SpecError, TraceError, report
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh

CostOf = Callable[[Kernel, Way], float]  # the time of a kernel one way, in seconds or any unit


def equal_costs(kernel: Kernel, way: Way) -> float:
    """Return the cost of a kernel if all are alike: a backward costs two forwards, each of its halves one."""
    return 2.0 if way is Way.BACKWARD and kernel.weights is None else 1.0


@dataclass(frozen=True)
class Front:
    """The part of lowering that depends neither on layouts nor on remat or passes.

    One trace serves many schedules (`fit`).
    """

    program: Program
    segments: Segments
    settings: StepSettings


@dataclass(frozen=True)
class Stages:
    """The results of the stages of lowering, for reading.

    Args:
        schedules: the schedule, or one for each stage of a pipeline.
    """

    program: Program
    segments: Segments
    kernels: Mapping[str, Kernel]
    schedules: tuple[Schedule, ...]

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of the stage that this rank runs."""
        return self.schedules[self.schedules[0].mesh.stage]


def trace_and_split(
    fn: Callable[..., Any],
    specs: ResolvedSpecs,
    batch: Arguments | Sequence[Any],
    mesh: Mesh,
    settings: StepSettings,
    options: StepOptions,
) -> Front:
    """Run the stages of lowering that look at `fn`.

    Args:
        batch: one micro-batch of this rank.
        settings: what the step is to do, whatever `fn` returns.
    """
    stored = specs.stored
    shapes = {p: (tuple(s.shape), s.compute_dtype) for p, s in stored.items()}
    # The program of one device, whole.
    with TRACING, torch.inference_mode(False), torch.enable_grad():  # whatever mode the caller is in
        program = trace(
            specs.decode_before(fn), shapes, specs.structure, stored, batch,
            device=trace_device(mesh), mesh=mesh, differentiate=settings.differentiate,
            sources=options.sources,
        )  # fmt: skip

        # Linear layers of leaves that travel in eight bits multiply in eight bits, too.
        narrow = {p: s.scaling == "rowwise" for p, s in stored.items() if s.wire_dtype is not None}
        if narrow:
            program = fp8_products(program, narrow)

        # Each rank's program: first experts, then tensor and context axes.
        sequences = {name: dims[0] for name, dims in sequence_dims(batch).items()}
        program = place_experts(program, stored, mesh, options.expert_capacity)
        program = place_axes(program, stored, mesh, options.residual, sequences, options.context_attention)

        # Cut where a leaf is gathered, where its gradient is needed by itself, and where a chunk begins.
        local = {p: s.local(mesh) for p, s in stored.items()}
        cuts = frozenset(
            p
            for p, s in local.items()
            if s.trainable or mesh.ordered(s.storage.axes) or (mesh.stages > 1 and s.chunk != "all")
        )
        segments = split(program, stored, cuts, mesh.ordered(mesh.data_axes))
        return Front(program, segments, settings.for_program(program))


def schedule_for(
    front: Front,
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    options: StepOptions,
    known: MutableMapping[str, Kernel] | None = None,
    verified: bool = True,
    cost_of: CostOf = equal_costs,
) -> Stages:
    """Run the stages of lowering that look at specs and remat.

    Args:
        known: kernels that were made before, see `differentiate_all`.
        cost_of: the costs by which the tasks of a pipeline are put in order.
        verified: whether schedules are verified. A search verifies only the plan that it chooses.
    """
    program, segments, settings = front.program, front.segments, front.settings

    # What each segment keeps for its backward, and the kernels that follow from it.
    units = (spec.unit for spec in specs.values())
    kept = policies(segments, options.remat, options.save, units, mesh.data_axes)
    with TRACING, torch.inference_mode(False), torch.enable_grad():
        kernels = differentiate_all(
            segments, kept,
            trainable=settings.differentiate, known=known, target=mesh.device_type, apart=settings.apart,
        )  # fmt: skip

    segment_policies = list(zip(segments.segments, kept, strict=True))
    segment_kernels = [kernels[kernel_key(s.source, p, settings.apart)] for s, p in segment_policies]

    # Which segments keep it elsewhere, or make it again.
    offloaded = frozenset(s.index for s, p in segment_policies if p.offload)
    recomputed = frozenset(s.index for s, p in segment_policies if p.gathers_again)
    active = find_active(segments, segment_kernels, program.outputs) if settings.differentiate else set()
    reruns = [
        plan_rerun(unit, segments, segment_kernels, active, set(mesh.data_axes))
        for unit in group_by_unit(segments.segments)
        if settings.differentiate and kept[unit[0].index].runs_again
    ]

    # In a pipeline, what each stage runs, and in which order.
    stages = plan_stages(segments, segment_kernels, active, program.outputs, specs, mesh)
    tasks = ()
    if mesh.stages > 1:
        keeps = ()
        if settings.apart:  # only the order of separate gradients is limited by bytes
            fetched_again = find_fetched_again(segments, recomputed, mesh.data_axes)
            keeps = [
                count_kept_bytes(chunk, segments, segment_kernels, active, reruns, fetched_again)
                for _, chunk in stages.chunks
            ]
        tasks = _order_tasks(stages, segment_kernels, settings, cost_of, reruns, keeps)

    # Write out the schedule of each stage, and let the passes make it fast.
    schedules = []
    for stage in range(mesh.stages):
        schedule = build(
            segments, segment_kernels, program.outputs, specs, mesh, settings, stages, stage, tasks, reruns
        )
        schedule = replace(schedule, offloaded=offloaded, recomputed=recomputed)
        if options.passes is None:
            schedule = run_passes(schedule, default(options.prefetch, options.overlap))
        else:
            schedule = run_passes(schedule, options.passes, verified=True)
        schedules.append(verify(schedule) if verified else schedule)

    # The merge is the proof that stages do not wait for one another for ever.
    if verified and mesh.stages > 1:
        together(schedules)
    return Stages(program, segments, kernels, tuple(schedules))


def _order_tasks(
    stages: StagePlan,
    kernels: Sequence[Kernel],
    settings: StepSettings,
    cost_of: CostOf,
    reruns: Sequence[Rerun],
    keeps: Sequence[KeptBytes],
) -> list[Task]:
    """Put the tasks of a pipeline in order, by the costs of its chunks' kernels and by what chunks keep."""
    # A segment that runs again does so in the task of its backward.
    run_again = {index for rerun in reruns for index in rerun.runs}

    def count_cost(index: int, way: Way) -> float:
        cost = cost_of(kernels[index], way)
        if way is Way.BACKWARD and index in run_again:
            cost += cost_of(kernels[index], Way.FORWARD)
        return cost

    # A task takes some time even where its kernels take none: the order is made by times.
    costs = {
        (chunk, way): max(1.0, sum(count_cost(s.index, way) for s in segments))
        for chunk, (_, segments) in enumerate(stages.chunks)
        for way in Way
        if settings.apart or way is not Way.WEIGHTS
    }
    return order_pipeline(
        stages.chunks, settings.accumulate, settings.micro_order, settings.differentiate,
        lambda chunk, way: costs[chunk, way], keeps, settings.zero_bubble_memory,
    )  # fmt: skip


def lower(
    fn: Callable[..., Any],
    specs: ResolvedSpecs,
    batch: Arguments | Sequence[Any],
    mesh: Mesh,
    settings: StepSettings,
    options: StepOptions,
    cost_of: CostOf = equal_costs,
) -> Stages:
    """Run all stages for one batch shape, which needs no device and no process group.

    A trace has no lines of code, unless `sources` asks for them. If an error would name one, `fn` is traced
    once more.
    """
    try:
        front = trace_again(lambda: trace_and_split(fn, specs, batch, mesh, settings, options))
    except TraceError as error:
        if getattr(error, "placed", True):
            raise
        front = trace_and_split(fn, specs, batch, mesh, settings, replace(options, sources=True))
    # The error of a program that stages cannot share among them names lines of code.
    if mesh.stages > 1:
        try:
            assign_chunks(front.segments, specs.stored, mesh)
        except SpecError:  # it is raised below, with lines
            with_lines = replace(options, sources=True)
            front = trace_again(lambda: trace_and_split(fn, specs, batch, mesh, settings, with_lines))

    # With fewer micro-batches than stages, most stages wait most of the time.
    stages, micros = mesh.stages, settings.accumulate
    if settings.differentiate and micros < stages:
        idle, less = ((stages - 1) / (count + stages - 1) for count in (micros, 4 * stages))
        warnings.warn(
            report(
                f"accumulate={micros}, on {stages} stages of a pipeline: they have nothing to do for "
                f"{idle:.0%} of a step.",
                fix=f"accumulate={4 * stages} leaves {less:.0%}; batches are cut into as many micro-batches.",
            ),
            stacklevel=1,
        )
    return schedule_for(front, specs.stored, mesh, options, cost_of=cost_of)


def run_passes(schedule: Schedule, passes: Sequence[Pass], verified: bool = False) -> Schedule:
    """Run passes in order, and insert frees behind the last.

    Args:
        verified: whether the schedule is verified behind each pass.

    Raises:
        ScheduleError: a pass, which is named, fails, breaks a rule, or returns no schedule.
    """
    for each in passes:
        name = getattr(getattr(each, "func", each), "__name__", repr(each))  # a partial has a `func`
        with _locate_errors(f"in the pass {name}"):
            schedule = each(schedule)
        if not isinstance(schedule, Schedule):
            kind = type(schedule).__name__
            raise ScheduleError(
                f"the pass {name} returns {kind}, and no Schedule.",
                fix="return schedule.with_instructions([...]), or the schedule as it came.",
            )
        if verified:
            with _locate_errors(f"behind the pass {name}"):
                verify(insert_frees(schedule))
    return insert_frees(schedule)


@contextmanager
def _locate_errors(place: str) -> Iterator[None]:
    """Turn any error of a pass, or of its lines, into one that names the place: a pass may be the user's."""
    try:
        yield
    except FnshardError as error:
        raise ScheduleError(f"{place}: {error}") from error
    except Exception as error:
        raise ScheduleError(
            f"{place}: {type(error).__name__}: {error}",
            fix="return schedule.with_instructions([...]) of whole lines, or the schedule as it came.",
        ) from error


def trace_device(mesh: Mesh) -> torch.device:
    """Return the mesh's device, or the CPU for an abstract mesh, whose device need not be here."""
    return torch.device("cpu") if mesh.kind == "abstract" else mesh.device
