"""Build the plainest correct Schedule of Segments and Kernels; passes make it fast.

Every segment gathers what it reads right before it runs, forward and backward; every reduction is
waited for at once; all updates come at the end. The chain rule across segments is plain reverse
accumulation, written out. `tasks` says in which order micro-batches run; where several run through a
stretch of the program in one round, they share what it gathers, and its gradients are reduced once.

In a pipeline there is a schedule for each stage. Each is written by walking through the tasks of all stages
in their one order. The stage's own tasks are written out, with what they send. In the place of another
stage's task, the Recv of what that sends here is inserted; its Wait is inserted before the first reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fnshard.compiler.ir.program import Outputs, Program
from fnshard.compiler.ir.values import LOSS_TANGENT, SCALARS, SCALES, Kind, ValueName, slots, stored_names
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segment_source import Argument
from fnshard.compiler.kernels.segments import Exchanged, Segment, Segments, Way, last_first
from fnshard.compiler.schedule.aggregate import aggregate
from fnshard.compiler.schedule.buckets import (
    Bucket,
    Part,
    common_dtype,
    make_buckets,
    replica_axes,
    stack_buckets,
    wire_dtype,
)
from fnshard.compiler.schedule.instructions import (
    Accumulate,
    AllReduce,
    Cast,
    ComputeStack,
    Gather,
    Instruction,
    Local,
    Names,
    Norms,
    Publish,
    Recv,
    ReduceScalars,
    ReduceScatter,
    ReduceUpdate,
    Run,
    Scales,
    Send,
    StackUpdate,
    Update,
    Wait,
    Zeros,
)
from fnshard.compiler.schedule.instructions.exchange import exchange
from fnshard.compiler.schedule.instructions.kernels import add_part
from fnshard.compiler.schedule.ir import Schedule, with_wait
from fnshard.compiler.schedule.reruns import Rerun
from fnshard.compiler.schedule.stages import Crossing, StagePlan, one_stage
from fnshard.compiler.schedule.tasks import MicroOrder, Round, Task, order_tasks
from fnshard.compiler.update.derive import Compute, Reduce, Stack
from fnshard.compiler.update.family import Family
from fnshard.compiler.update.steps import flow_of, stacks_of, steps_key
from fnshard.compiler.update.trace import GRAD, UPDATE
from fnshard.layout.spec import LayoutSpec, stage_of, summed_axes
from fnshard.mesh import Mesh

AccumulateMode = Literal["reduce", "local"]
_SCALARS_FLIGHT = ValueName(Kind.FLIGHT, "scalars")
Made = Mapping[ValueName, Set[str]]  # by the result of each line of an update, the names of the values in it


@dataclass(frozen=True)
class StepSettings:
    """The part of a step that does not come from `fn`.

    Args:
        accumulate: the number of micro-batches in one step.
        accumulate_mode: "reduce" each micro-batch's gradients into the sharded accumulator, or
            accumulate "local" full gradients and reduce once.
        micro_order: "depth", or "breadth", which accumulates locally whatever `accumulate_mode` says, or, in
            a pipeline, "zero_bubble".
        zero_bubble_memory: with "zero_bubble", the bytes that a stage may keep, see `StepOptions`.
        update: whether to run the optimizer; if not, the step returns the gradients.
        norms: whether to reduce squared norms with the scalars.
        barrier: whether updates wait for something global that is made of all gradients (a norm, an overflow
            flag).
        counted: whether updates need the scalars of the forward (a Mean's count). These are then summed
            before the backward, so that updates stay in it.
        families: by path, how each leaf that trains is updated.
        scalars: the number of numbers that ride on ReduceScalars besides what `fn` returns.
        differentiate: whether there is a backward; False is a forward alone.
        rows: the number of rows of this rank's batch, which weight it in averages of buffers.
    """

    accumulate: int = 1
    accumulate_mode: AccumulateMode = "reduce"
    micro_order: MicroOrder = "depth"
    zero_bubble_memory: float = 1.0
    update: bool = True
    norms: bool = False
    barrier: bool = False
    counted: bool = False
    families: Mapping[str, Family] = field(default_factory=dict)
    scalars: int = 0
    differentiate: bool = True
    rows: int = 1

    @property
    def apart(self) -> bool:
        """Whether separate kernels make the gradients of leaves."""
        return self.differentiate and self.micro_order == "zero_bubble"

    def for_program(self, program: Program) -> StepSettings:
        """Return a copy with the fields that depend on `fn`'s outputs filled in."""
        counted = self.update and program.outputs.count is not None
        return replace(
            self,
            rows=program.rows,
            barrier=self.barrier or (counted and self.norms),
            counted=counted and not self.norms,
        )


def build(
    segments: Segments,
    kernels: Sequence[Kernel],
    outputs: Outputs,
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    settings: StepSettings,
    stages: StagePlan | None = None,
    stage: int = 0,
    tasks: Sequence[Task] = (),
    reruns: Sequence[Rerun] = (),
) -> Schedule:
    """Return the plain schedule of one step; in a pipeline, that of one stage.

    Args:
        kernels: the kernel of each segment.
        stages: how stages share the program, see `plan_stages`; None where one stage runs all of it.
        stage: the stage whose schedule it is.
        tasks: the tasks of all stages of a pipeline, in the order in which they run.
        reruns: the parts of the forward that run again for their backward.
    """
    stages = stages or one_stage(segments)
    if stages.stages > 1:
        # Ranks of all stages meet in the sums of scalars. Every stage has these at its end, in one order, and
        # so the updates that read them come there, too.
        settings = replace(settings, barrier=settings.barrier or settings.counted, counted=False)

    # Write out every task; those of one round share what they gather.
    builder = _Builder(segments, kernels, outputs, specs, mesh, settings, stages, stage, tasks, reruns)
    for tasks_of_round in builder.rounds:
        builder.is_shared_round = len(tasks_of_round) > 1
        builder.held = {} if builder.is_shared_round else None
        for task in tasks_of_round:
            builder.write_task(task)

    # Then what is left: messages under way, updates, outputs.
    builder.wait_for_results()
    if settings.differentiate:
        builder.finish()
    return builder.make_schedule()


def find_active(segments: Segments, kernels: Sequence[Kernel], outputs: Outputs) -> set[int]:
    """Return the segments whose backward runs, because one of their outputs reaches the loss."""
    # Values that reach the loss, from the end of the program to its beginning: readers before makers.
    exchanges, reaches_loss = segments.exchanges_after(), {segments.results[outputs.loss]}
    active: set[int] = set()
    for segment in reversed(segments.segments):
        kernel = kernels[segment.index]
        for each in last_first(exchanges[segment.index]):
            if each.received in reaches_loss:
                reaches_loss.add(each.sent)
        if not kernel.grads:
            continue
        if any(segment.outputs[i] in reaches_loss for i in kernel.tangents):
            active.add(segment.index)
            reaches_loss |= {segment.inputs[i] for i in kernel.grads}
    return active


def find_results(made: Made, values: Set[str]) -> Names:
    """Return the results that hold some of these values."""
    return tuple(name for name, held in made.items() if held & values)


@dataclass
class _Builder:
    """A walk through the tasks of a step that writes the lines of one stage.

    `__post_init__` derives what does not change: the stage's specs and segments, its buckets, and the place
    at which each bucket is reduced. The attributes that the walk changes are set at its end.
    """

    segments: Segments
    kernels: Sequence[Kernel]
    outputs: Outputs
    specs: Mapping[str, LayoutSpec]
    mesh: Mesh
    settings: StepSettings
    stages: StagePlan
    stage: int
    tasks: Sequence[Task] = ()
    reruns: Sequence[Rerun] = ()
    lines: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The leaves of this stage: `whole_specs` has their specs, and `specs` those of the parts that a rank
        # computes with.
        self.summed = summed_axes(self.specs.values(), self.mesh)
        self.whole_specs = {
            p: s for p, s in self.specs.items() if stage_of(s, self.mesh) in (None, self.stage)
        }
        self.specs = {p: s.local(self.mesh) for p, s in self.whole_specs.items()}
        self.is_pipeline = self.stages.stages > 1
        stage_by = self.stages.stage_of
        self.own_segments = [s for s in self.segments.segments if stage_by[s.index] == self.stage]

        # Buckets: of leaves that are gathered or cast, of gradients, and of leaves that are stored whole and
        # updated in blocks.
        read = {p for s in self.own_segments for p in s.leaves}
        moved = {p: s for p, s in self.specs.items() if p in read and not self._is_alias(p)}
        trained = {p: s for p, s in self.specs.items() if s.trainable}
        self.gathers = make_buckets(
            moved,
            self.mesh,
            lambda s: s.storage,
            wire_dtype,
            "gather",
            apart=lambda s: (s.compute_dtype, self.find_chunk(s)),
        )
        self.reduces = make_buckets(
            trained,
            self.mesh,
            lambda s: s.gradient,
            lambda s: s.reduce_dtype,
            "reduce",
            apart=lambda s: (s.memory, s.optimizer_memory, s.updated_on, s.compute.axes, self.find_chunk(s)),
        )
        ordered = self.mesh.ordered
        published = {
            p: s
            for p, s in trained.items()
            if self.settings.update and ordered(s.optimizer.axes) and not ordered(s.storage.axes)
        }
        self.publishes = make_buckets(
            published, self.mesh, lambda s: s.optimizer, lambda s: s.storage_dtype, "publish", self.find_chunk
        )
        self.gather_of = {p: b for b in self.gathers for p in b.paths}

        # Leaves that `fn` writes to: the names of their new values, and the sums over ranks of the last ones.
        self.written = {self.segments.results[i]: p for p, i in self.outputs.writes.items()}
        here = {n: p for n, p in self.written.items() if p in self.specs}
        last = {p: self.name_value(n, self.settings.accumulate - 1) for n, p in here.items()}
        self.aggregated, self.aggregations, self.stores = aggregate(
            last, self.segments.alike, self.specs, self.mesh, self.settings.rows
        )

        # The backward: which segments have one, behind which of them the gradients of each bucket are
        # complete, and the order in which these arrive.
        self.exchanges = self.segments.exchanges_after()
        self.active = (
            find_active(self.segments, self.kernels, self.outputs) if self.settings.differentiate else set()
        )
        self.completed_by = self._find_completion()
        self.arriving = sorted(self.reduces, key=lambda b: -(self.completed_by[b.name] or 0))
        self.stacks = self._make_stacks()
        self.rounds = self._order_rounds()
        self.rerun_before = {rerun.unit[-1].index: rerun for rerun in self.reruns}
        self.held_until = {rerun.unit[0].index for rerun in self.reruns}
        self.run_twice = {segment.index for rerun in self.reruns for segment in rerun.unit}

        # What changes as tasks are written out.
        self.reduced: dict[str, ValueName] = {}  # the sum over ranks of each bucket's gradients
        self.accumulated: dict[str, ValueName] = {}  # this rank's own sum over micro-batches, by bucket
        self.sent: dict[str, Made] = {}  # by path, values of an update before the leaf is computed whole
        self.tangents: dict[int, dict[ValueName, ValueName]] = {}  # by micro-batch
        self.gradients: dict[int, dict[str, ValueName]] = {}  # by micro-batch and path, those not yet summed
        # By bucket, the leaves that were gathered for several tasks of a round, or for a unit that runs again
        # and its backward.
        self.held: dict[str, dict[str, ValueName]] | None = None
        self.is_shared_round = False  # whether the round has several tasks
        self.remade: dict[ValueName, ValueName] = {}  # the names of values that were made again
        self.sending: list[Wait] = []  # the waits for what the last task of this stage has sent
        # The waits for what other stages have sent here and nothing has read.
        self.incoming: dict[ValueName, Wait] = {}
        # Cotangents that other stages have sent and nothing has added up, by micro-batch and value.
        self.arriving_tangents: dict[tuple[int, ValueName], list[ValueName]] = {}

    def _order_rounds(self) -> list[Round]:
        """Return the tasks of the step, of all stages, in rounds."""
        if self.is_pipeline:
            return [(task,) for task in self.tasks]
        settings, maker = self.settings, {n: s.index for s in self.segments.segments for n in s.outputs}
        maker |= {e.received: e.after for e in self.segments.exchanges}
        # A micro-batch reads what the one before has written, which limits how far they run side by side.
        written = [(path, maker[name]) for name, path in self.written.items() if name in maker]
        return order_tasks(
            self.segments.segments, written, settings.accumulate, settings.micro_order, settings.differentiate
        )

    def _make_stacks(self) -> dict[str, list[tuple[Bucket, Bucket]]]:
        """Return buckets that go to the ranks that compute whole leaves, and back; see `stack_buckets`."""

        def describe(names: Sequence[str], side: Stack) -> list[Part]:
            layouts = [layout.contiguous for layout in side.layouts]
            return list(zip(names, side.shapes, layouts, strict=True))

        parts, dtypes, axes = {}, {}, {}
        for path, family in self.families.items():
            there, back = stacks_of(family.derived)
            if there is not None:
                parts[path] = describe(there.sends, there), describe(back.receives, back)
                dtypes[path] = common_dtype(there.dtypes), common_dtype(back.dtypes)
                axes[path] = there.axes
        return stack_buckets(self.arriving, parts, dtypes, axes, self.whole_specs, self.mesh)

    @property
    def families(self) -> dict[str, Family]:
        """The families of this stage's leaves, by path."""
        return {p: f for p, f in self.settings.families.items() if p in self.specs}

    def find_chunk(self, spec: LayoutSpec) -> object:
        """Return the chunk of a leaf in a pipeline, which all leaves of a bucket have in common."""
        return spec.chunk if self.is_pipeline else None

    def _is_alias(self, path: str) -> bool:
        """Return whether `fn` sees the stored leaf itself: it is neither gathered nor cast."""
        spec = self.specs[path]
        return (
            spec.wire_dtype is None
            and not self.mesh.ordered(spec.storage.axes)
            and spec.compute_dtype == spec.storage_dtype
        )

    def _find_completion(self) -> dict[str, int | None]:
        """Return, for each reduce bucket, the segment whose backward makes its last gradient.

        It is None where the stage reads no leaf of the bucket.
        """
        first: dict[str, int] = {}
        for segment in self.own_segments:
            if segment.index in self.active:
                for i in self.kernels[segment.index].grads:
                    name = segment.inputs[i]
                    if name.kind is Kind.LEAF:
                        first.setdefault(name.path, segment.index)
        return {b.name: min((first[p] for p in b.paths if p in first), default=None) for b in self.reduces}

    # -------------------------------------------------------------- names
    def name_phase(self, name: str, micro: int) -> str:
        """Return the name of a phase, with the micro-batch where there are several."""
        return f"{name}.{micro}" if self.settings.accumulate > 1 else name

    def name_value(self, name: ValueName, micro: int) -> ValueName:
        """Return the name of a value of the program in a micro-batch."""
        if name in self.written:
            return ValueName(Kind.WRITTEN, self.written[name], micro=self.name_micro(micro))
        return name if name.kind in (Kind.CONSTANT, Kind.AXIS) else name.of(self.name_micro(micro))

    def name_micro(self, micro: int) -> int | None:
        """Return the micro-batch as names have it: None where there is one alone."""
        return micro if self.settings.accumulate > 1 else None

    def name_unit(self, segment: Segment) -> str:
        """Return the units of a segment, as its lines name them."""
        return "+".join(segment.units) or "-"

    # -------------------------------------------------------------- leaves
    def fetch(self, segment: Segment, paths: Sequence[str], phase: str, micro: int) -> dict[str, ValueName]:
        """Gather the buckets that hold `paths`, and return the name of each leaf.

        Buckets that the round has gathered before are not gathered again. Behind the first micro-batch, a
        leaf that `fn` writes to is what the micro-batch before has written.
        """
        # Leaves that are not gathered: those that `fn` has written to before, and stored ones.
        written = self.outputs.writes if micro else ()
        names = {
            p: ValueName(Kind.WRITTEN, p, micro=self.name_micro(micro - 1)) for p in paths if p in written
        }
        paths = [p for p in paths if p not in names]
        names |= {n.path: n for n in stored_names(p for p in paths if p not in self.gather_of)}

        # The buckets of all others. A leaf is gathered several times a step, each time under another name.
        version = f"{phase[0]}{micro}.{segment.index}"
        for bucket in dict.fromkeys(self.gather_of[p] for p in paths if p in self.gather_of):
            if self.held is not None and bucket.name in self.held:
                names = self.held[bucket.name] | names
                continue
            shards = stored_names(bucket.paths)
            fresh = tuple(ValueName(Kind.GATHERED, p, f"#{version}") for p in bucket.paths)
            scales = (SCALES,) if self.specs[bucket.paths[0]].wire_dtype is not None else ()
            if bucket.axes:
                flight = ValueName(Kind.FLIGHT, bucket.name, f"#{version}")
                gather = Gather(bucket.unit, phase, shards + scales, (flight,), bucket=bucket.name)
                self.lines += with_wait(gather, *fresh)
            else:
                self.lines.append(Cast(bucket.unit, phase, shards + scales, fresh, bucket=bucket.name))
            gathered = dict(zip(bucket.paths, fresh, strict=True))
            if self.held is not None:
                self.held[bucket.name] = gathered
            names = gathered | names  # a bucket may have leaves that `fn` has written to: their names stay
        return names

    # -------------------------------------------------------------- stages
    def write_task(self, task: Task) -> None:
        """Write out a task of this stage; for a task of another stage, receive what it sends here."""
        if task.stage != self.stage:
            self.write_receives(task)
            return
        # What the task before has sent travels while this one runs, and is waited for behind it.
        sent, self.sending = self.sending, []
        if task.way is Way.FORWARD:
            self.write_forward(task)
        else:
            self.write_backward(task)
        self.lines += sent

    def write_sends(self, segment: Segment, task: Task, phase: str) -> None:
        """Send what other stages read of a segment's results, or their cotangents."""
        micro = task.micro
        for crossing in self.stages.behind(segment, task.backward, task.is_last):
            names = tuple(self.name_value(n, micro) for n in crossing.values)
            # The cotangents that other stages have sent here are part of what is sent on.
            if task.backward:
                for n in crossing.values:
                    self.settle(n, micro, self.name_unit(segment), phase)
                names = tuple(self.tangents[micro][n] for n in crossing.values)
            sent = self.make_message(Send, crossing, crossing.target, segment, micro, phase, reads=names)
            self.sending += with_wait(sent)[1:]
            self.lines.append(sent)

    def write_receives(self, task: Task) -> None:
        """Write the Recvs of what a task of another stage sends here."""
        if task.way is Way.WEIGHTS:  # such a task sends nothing
            return

        micro = task.micro
        phase = self.name_phase("backward" if task.backward else "forward", micro)
        # In the order in which that stage sends: messages of a pair arrive in order.
        for segment in reversed(task.segments) if task.backward else task.segments:
            for crossing in self.stages.behind(segment, task.backward, task.is_last):
                if crossing.target != self.stage:
                    continue
                names = tuple(self.name_value(n, micro) for n in crossing.values)
                if task.backward:
                    names = tuple(
                        ValueName(
                            Kind.TANGENT, n.path, f"@stage {crossing.source}", micro=self.name_micro(micro)
                        )
                        for n in crossing.values
                    )
                    for n, tangent in zip(crossing.values, names, strict=True):
                        self.arriving_tangents.setdefault((micro, n), []).append(tangent)
                received = self.make_message(Recv, crossing, crossing.source, segment, micro, phase)
                self.lines.append(received)
                self.incoming |= dict.fromkeys(names, with_wait(received, *names)[1])

    def make_message(
        self, kind: type[Send] | type[Recv], crossing: Crossing, stage: int, segment: Segment, micro: int,
        phase: str, reads: Names = (),
    ) -> Send | Recv:  # fmt: skip
        """Return one end of a message: a Send or a Recv, with `stage` at the other end."""
        values = tuple(self.name_value(n, micro) for n in crossing.values)
        if crossing.backward:
            values = tuple(
                ValueName(Kind.TANGENT, n.path, micro=self.name_micro(micro)) for n in crossing.values
            )
        likes = tuple(Argument.of(self.segments.values[n], "value") for n in crossing.values)
        flight = ValueName(Kind.FLIGHT, f"{', '.join(values)} from {crossing.source} to {crossing.target}")
        return kind(self.name_unit(segment), phase, reads, (flight,), stage=stage, values=values, likes=likes)

    def wait_for(self, names: Iterable[ValueName]) -> None:
        """Wait for those of the values that are on their way here, with all that is in the same message."""
        for name in names:
            if name in self.incoming:
                wait = self.incoming[name]
                self.lines.append(wait)
                for arrived in wait.writes:
                    del self.incoming[arrived]

    def settle(self, name: ValueName, micro: int, unit: str, phase: str) -> None:
        """Add the cotangents that other stages have sent to this stage's own."""
        for tangent in self.arriving_tangents.pop((micro, name), ()):
            self.wait_for([tangent])
            self.lines += add_part(self.tangents[micro], name, tangent, unit, phase)

    def wait_for_results(self) -> None:
        """Wait for values that `fn` returns and other stages have made, so that nothing is under way."""
        self.lines += self.sending
        self.wait_for(list(self.incoming))

    # -------------------------------------------------------------- forward
    def gather_scales(self, phase: str) -> None:
        """Compute the scales of the leaves that are gathered in eight bits, if there are any."""
        paths = tuple(p for b in self.gathers for p in b.paths if self.specs[p].wire_dtype is not None)
        axes = self.mesh.ordered({a for p in paths for a in self.whole_specs[p].storage.axes})
        if paths:
            flight = ValueName(Kind.FLIGHT, SCALES)
            largest = Scales("-", phase, stored_names(paths), (flight,), paths=paths, axes=axes)
            self.lines += with_wait(largest, SCALES)

    def write_forward(self, task: Task) -> None:
        """Write out a forward: segments, exchanges, and messages to other stages."""
        micro, phase = task.micro, self.name_phase("forward", task.micro)
        # The scales of leaves in eight bits are made once a step, before the first gather.
        if micro == 0 and task.segments[0] is self.own_segments[0]:
            self.gather_scales(phase)

        for segment in task.segments:
            # What its kernel reads, and what it makes: values, and what it saves for its backward. A segment
            # that runs again saves then.
            kernel = self.kernels[segment.index]
            names = self.fetch(segment, segment.leaves, phase, micro)
            reads = tuple(self.name_read(n, names, micro) for n in segment.inputs)
            self.wait_for(reads)
            keeps = segment.index in self.active and segment.index not in self.run_twice
            saved = self.name_saved(segment, micro) if keeps else ()
            writes = tuple(self.name_value(n, micro) for n in segment.outputs) + saved
            # The kernel makes what it would save even if no backward reads it here: these values need names.
            if not saved:
                unread = self.name_saved(segment, micro)
                writes += tuple(ValueName(Kind.VALUE, f"_{n.path}", micro=n.micro) for n in unread)
            self.lines.append(
                Run(
                    self.name_unit(segment), phase, reads, writes,
                    kernel=kernel.name, segment=segment.index, units=segment.units,
                )
            )  # fmt: skip

            # What ranks exchange behind the segment, and stages send.
            for each in self.exchanges[segment.index]:
                names = self.name_value(each.sent, micro), self.name_value(each.received, micro)
                self.wait_for(names[:1])
                self.lines += exchange(each, self.mesh, self.name_unit(segment), phase, *names)
            self.write_sends(segment, task, phase)

        # Behind the last forward, ranks join what `fn` has written, and sum scalars that nothing holds up.
        if task.is_last and task.segments[-1] is self.own_segments[-1]:
            self.lines += self.aggregations
            if self.settings.differentiate and not self.are_scalars_late:
                self.issue_scalars()

    @property
    def are_scalars_late(self) -> bool:
        """Whether scalars are summed behind the last backward: norms need it, or stages meet there."""
        return self.settings.barrier or self.settings.norms or self.is_pipeline

    def name_read(self, name: ValueName, leaves: Mapping[str, ValueName], micro: int) -> ValueName:
        """Return the name by which a micro-batch reads a leaf or value of the program."""
        if name.kind is Kind.LEAF:
            return leaves[name.path]
        value = self.name_value(name, micro)
        return self.remade.get(value, value)

    def name_saved(self, segment: Segment, micro: int) -> Names:
        """Return the names of what a segment's forward saves for its backward."""
        count, index = len(self.kernels[segment.index].saved), self.name_micro(micro)
        return tuple(ValueName(Kind.VALUE, f"x{segment.index}.{i}", micro=index) for i in range(count))

    # -------------------------------------------------------------- backward
    def run_again(self, rerun: Rerun, micro: int, phase: str) -> None:
        """Write out a unit's forward once more, with its exchanges, as far as its backward reads of it."""

        def rename(name: ValueName) -> ValueName:
            value = self.name_value(name, micro)
            self.remade[value] = ValueName(Kind.VALUE, name.path, "@again", micro=value.micro)
            return self.remade[value]

        for segment in rerun.unit:
            unit = self.name_unit(segment)
            if segment.index in rerun.runs:
                leaves = self.fetch(segment, segment.leaves, phase, micro)
                reads = tuple(self.name_read(n, leaves, micro) for n in segment.inputs)
                saved = self.name_saved(segment, micro)
                self.lines.append(
                    Run(
                        unit, phase, reads, (*map(rename, segment.outputs), *saved),
                        kernel=self.kernels[segment.index].name, segment=segment.index, units=segment.units,
                        again=True,
                    )
                )  # fmt: skip
            for each in self.exchanges[segment.index]:
                if each.received in rerun.exchanges:
                    sent, received = self.name_read(each.sent, {}, micro), rename(each.received)
                    self.lines += exchange(each, self.mesh, unit, phase, sent, received)

    def write_backward(self, task: Task) -> None:
        """Write out a backward, or one half of it, and the reductions of gradients that it completes."""
        # The cotangent of the loss exists on the stage that makes the loss.
        micro, phase = task.micro, self.name_phase("backward", task.micro)
        loss = self.segments.results[self.outputs.loss]
        seeded = {loss: LOSS_TANGENT} if self.stages.maker_of.get(loss, self.stage) == self.stage else {}
        tangents = self.tangents.setdefault(micro, seeded)
        grads = self.gradients.setdefault(micro, {})

        # In a backward in two halves, the later one makes the gradients of leaves.
        makes_last = task.way is (Way.WEIGHTS if self.settings.apart else Way.BACKWARD)
        for segment in reversed(task.segments):
            # A unit that keeps its inputs alone runs again first, and holds what it gathers for its backward.
            if task.backward and segment.index in self.rerun_before:
                self.held = {} if self.held is None else self.held
                self.run_again(self.rerun_before[segment.index], micro, phase)
            # Cotangents go back through the exchanges behind the segment, and then through the segment.
            for each in last_first(self.exchanges[segment.index]) if task.backward else ():
                self.settle(each.received, micro, self.name_unit(segment), phase)
                self.exchange_back(each, self.name_unit(segment), phase, micro, tangents)
            if segment.index in self.active and task.way in self.kernels[segment.index].halves:
                self.write_backward_kernel(segment, task.way, micro, phase, tangents, grads)
            if segment.index in self.held_until and not self.is_shared_round:
                self.held = None
            if task.backward:
                self.write_sends(segment, task, phase)

            # Reduce the buckets whose last gradient this segment has made.
            complete = [
                b for b in self.reduces
                if makes_last and self.completed_by[b.name] == segment.index and not self.is_shared(b)
            ]  # fmt: skip
            for bucket in complete:
                self.reduce(bucket, task, phase, grads)
            if complete and self.settings.counted and task.is_last:
                self.wait_for_scalars()

        # Other chunks, or this one's weight gradients, will add to the gradients that are left. They are
        # summed now, so that one full gradient is alive, and not one for each micro-batch.
        if self.is_shared_round or self.accumulates_locally:
            version = f"@{task.segments[0].index}" + ("" if makes_last else f".{task.way}")
            for bucket in self.reduces:
                if not grads.keys().isdisjoint(bucket.paths):
                    self.accumulate(bucket, micro, phase, grads, version)

        # Buckets of leaves that no kernel reads have gradients of zeros.
        if makes_last and task.is_last and task.segments[0] is self.own_segments[0]:
            for bucket in self.reduces:
                if self.completed_by[bucket.name] is not None or self.is_shared(bucket):
                    continue
                name = ValueName(Kind.REDUCED, bucket.name)
                self.lines.append(Local(bucket.unit, phase, (), (name,), bucket=bucket.name))
                self.reduced[bucket.name] = name

    def write_backward_kernel(
        self, segment: Segment, way: Way, micro: int, phase: str, tangents: dict[ValueName, ValueName],
        grads: dict[str, ValueName],
    ) -> None:  # fmt: skip
        """Write out the backward of a segment, or a half of it."""
        # What the kernel reads: inputs and outputs of the forward, saved values, cotangents.
        kernel = self.kernels[segment.index]
        half = kernel.halves[way]
        unit, index = self.name_unit(segment), self.name_micro(micro)
        saved = self.name_saved(segment, micro)
        between = [
            ValueName(Kind.VALUE, f"w{segment.index}.{number}", micro=index)
            for number in range(len(kernel.between))
        ]

        read = [segment.inputs[r.index] for r in half.inputs if r.kind == "input"]
        paths = [n.path for n in read if n.kind is Kind.LEAF]
        names = self.fetch(segment, paths, phase, micro)
        reads = []
        for ref in half.inputs:
            if ref.kind == "input":
                reads.append(self.name_read(segment.inputs[ref.index], names, micro))
            elif ref.kind == "output":
                reads.append(self.name_read(segment.outputs[ref.index], names, micro))
            elif ref.kind == "saved":
                reads.append(saved[ref.index])
            elif ref.kind == "between":
                reads.append(between[ref.index])
            else:
                reads.append(self.find_tangent(segment, ref.index, unit, phase, micro, tangents))

        # What it makes: gradients of leaves and cotangents of values, added to those of other readers.
        writes, adds = [], []
        for name in [segment.inputs[number] for number in half.grads]:
            of_leaf = name.kind is Kind.LEAF
            known, key = (grads, name.path) if of_leaf else (tangents, name)
            kind = Kind.GRADIENT if of_leaf else Kind.TANGENT
            fresh = ValueName(kind, name.path, f"@{segment.index}", micro=index)
            writes.append(fresh)
            adds += add_part(known, key, fresh, unit, phase)
        if way is Way.BACKWARD:
            writes += between
        self.lines.append(
            Run(
                unit, phase, tuple(reads), tuple(writes),
                kernel=kernel.name, way=way, segment=segment.index, units=segment.units,
            )
        )  # fmt: skip
        self.lines.extend(adds)

    def exchange_back(
        self, each: Exchanged, unit: str, phase: str, micro: int, tangents: dict[ValueName, ValueName]
    ) -> None:
        """Write out the dual of an exchange: cotangents of what was received make that of what was sent."""
        if each.received in tangents and each.like.requires_grad:
            fresh = ValueName(Kind.TANGENT, each.sent.path, f"@{each.received}", micro=self.name_micro(micro))
            lines = exchange(each, self.mesh, unit, phase, tangents[each.received], fresh, backward=True)
            self.lines += [*lines, *add_part(tangents, each.sent, fresh, unit, phase)]

    def find_tangent(
        self, segment: Segment, index: int, unit: str, phase: str, micro: int,
        tangents: dict[ValueName, ValueName],
    ) -> ValueName:  # fmt: skip
        """Return the cotangent of a segment's output: zeros where nothing that reaches the loss reads it."""
        name = segment.outputs[index]
        self.settle(name, micro, unit, phase)
        if name not in tangents:
            zero = ValueName(Kind.TANGENT, name.path, micro=self.name_micro(micro))
            like = self.kernels[segment.index].source.outputs[index]
            self.lines.append(Zeros(unit, phase, (), (zero,), like=like))
            tangents[name] = zero
        return tangents[name]

    # -------------------------------------------------------------- gradients
    @property
    def accumulates_locally(self) -> bool:
        """Whether each rank sums its gradients over micro-batches before ranks sum them."""
        return self.settings.accumulate > 1 and (self.is_pipeline or self.settings.accumulate_mode == "local")

    def is_shared(self, bucket: Bucket) -> bool:
        """Return whether all stages have a bucket's leaves, and so meet to sum their gradients."""
        return self.is_pipeline and self.specs[bucket.paths[0]].chunk == "all"

    def reduce_shared(self) -> None:
        """Sum the gradients of leaves of all stages, in one order, behind the last backward."""
        micro = self.settings.accumulate - 1
        # Several micro-batches have been summed already (`accumulates_locally`), a single one has not.
        phase, grads = self.name_phase("backward", micro), self.gradients.get(0, {})
        for bucket in filter(self.is_shared, self.reduces):
            paths = tuple(p for p in bucket.paths if p in grads)
            reads = tuple(grads[p] for p in paths)
            if bucket.name in self.accumulated:
                reads, paths = (self.accumulated[bucket.name],), ()
            self.reduced[bucket.name] = self.sum_over_ranks(bucket, phase, reads, paths, micro)

    def reduce(self, bucket: Bucket, task: Task, phase: str, grads: dict[str, ValueName]) -> None:
        """Sum a bucket's gradients over ranks, now that they are complete for a micro-batch.

        Where each rank sums over micro-batches first, ranks sum behind the last one.
        """
        micro, accumulated = task.micro, self.settings.accumulate > 1
        is_local = accumulated and (self.is_shared_round or self.accumulates_locally)
        if is_local:
            if not grads.keys().isdisjoint(bucket.paths):
                self.accumulate(bucket, micro, phase, grads)
            if not task.is_last:
                return

        # Sum over ranks.
        if bucket.name in self.accumulated:
            reads, paths = (self.accumulated[bucket.name],), ()
        else:
            paths = tuple(p for p in bucket.paths if p in grads)
            reads = tuple(grads[p] for p in paths)
        name = self.sum_over_ranks(bucket, phase, reads, paths, micro)

        # Add the sum to those of earlier micro-batches.
        if accumulated and not is_local:
            before = self.reduced.get(bucket.name)
            total = ValueName(Kind.REDUCED, bucket.name, f"+{micro}")
            self.lines.append(
                Accumulate(
                    bucket.unit, phase, (name, before) if before else (name,), (total,),
                    bucket=bucket.name, first=before is None,
                )
            )  # fmt: skip
            name = total
        self.reduced[bucket.name] = name

    def accumulate(
        self, bucket: Bucket, micro: int, phase: str, grads: dict[str, ValueName], version: str = ""
    ) -> None:
        """Add the gradients of a bucket's leaves to this rank's own sum over micro-batches."""
        before, paths = self.accumulated.get(bucket.name), tuple(p for p in bucket.paths if p in grads)
        reads = tuple(grads.pop(p) for p in paths)
        name = ValueName(Kind.ACCUMULATED, bucket.name, version, micro=micro)
        self.lines.append(
            Accumulate(
                bucket.unit, phase, (*reads, before) if before else reads, (name,),
                bucket=bucket.name, paths=paths, first=before is None,
            )
        )  # fmt: skip
        self.accumulated[bucket.name] = name

    def sum_over_ranks(
        self, bucket: Bucket, phase: str, reads: Names, paths: tuple[str, ...], micro: int
    ) -> ValueName:
        """Reduce-scatter gradients over their own axes, and all-reduce over others.

        A stage that reads no leaf of the bucket has zeros: its ranks need no reduce-scatter among themselves,
        and join the sum of all stages.
        """
        replicas = replica_axes(bucket, self.specs, self.summed)
        name = ValueName(Kind.REDUCED, bucket.name, micro=micro)
        flight = ValueName(Kind.FLIGHT, bucket.name, micro=micro)
        if not bucket.axes and not replicas:
            self.lines.append(Local(bucket.unit, phase, reads, (name,), bucket=bucket.name, paths=paths))
            return name

        if bucket.axes and reads:
            part = name.of(micro, ".") if replicas else name  # summed over a part of the ranks
            scatter = ReduceScatter(bucket.unit, phase, reads, (flight,), bucket=bucket.name, paths=paths)
            self.lines += with_wait(scatter, part)
            reads, paths = (part,), ()
        if replicas:
            flight = flight.of(micro, ".sum")
            where = {"bucket": bucket.name, "paths": paths, "axes": replicas}
            self.lines += with_wait(AllReduce(bucket.unit, phase, reads, (flight,), **where), name)
        return name

    # -------------------------------------------------------------- the end of the step
    def issue_scalars(self, norms: Names = ()) -> None:
        """Write out the issue of the sum of scalars, with norms if there are any."""
        results = dict.fromkeys(self.segments.results[i] for i in self.outputs.summed)
        # Each stage has the results that it makes, and zeros for the others.
        names = [n for n in results if self.stages.maker_of.get(n, self.stage) == self.stage]
        reads = [self.name_value(n, m) for m in range(self.settings.accumulate) for n in names]
        self.lines.append(ReduceScalars("-", "update", (*reads, *norms), (_SCALARS_FLIGHT,)))

    def wait_for_scalars(self) -> None:
        """Write out the Wait for scalars, once.

        The first call comes behind the issue of the first reduction, which thus leaves before the host
        blocks.
        """
        wait = Wait("-", "update", (_SCALARS_FLIGHT,), (SCALARS,), of=ReduceScalars)
        if wait not in self.lines:
            self.lines.append(wait)

    def finish(self) -> None:
        """Write out the end of a step that trains: shared gradients, buffers, norms, scalars, updates."""
        self.reduce_shared()
        # Leaves that `fn` writes to get their new values only now: the backward has read the old ones.
        self.lines += self.stores

        # Norms are of the gradients' sums, and travel with the scalars.
        if self.are_scalars_late:
            norms = []
            for bucket in self.reduces if self.settings.norms else ():
                reads, name = (self.reduced[bucket.name],), ValueName(Kind.NORMS, bucket.name)
                replicas = self.mesh.axes_size(replica_axes(bucket, self.specs, self.summed))
                self.lines.append(
                    Norms(bucket.unit, "update", reads, (name,), bucket=bucket.name, replicas=replicas)
                )
                norms.append(name)
            self.issue_scalars(tuple(norms))

        # Updates that read a scalar come behind the Wait; with other updates the scalars travel meanwhile.
        if self.settings.barrier or self.settings.counted:
            self.wait_for_scalars()
        if self.settings.update:
            self.write_updates()
        self.wait_for_scalars()

    def write_updates(self) -> None:
        """Write out the optimizer by buckets; leaves whose updates exchange alike are updated together."""
        for bucket in self.arriving:
            groups: dict[Any, list[str]] = {}
            for path in bucket.paths:
                groups.setdefault(steps_key(self.settings.families[path].derived), []).append(path)
            for number, paths in enumerate(groups.values()):
                self.write_stretch(bucket, tuple(paths), number)
            for there, back in self.stacks.get(bucket.name, ()):
                self.write_stack(there, back)

        # Leaves that are stored whole are gathered from the blocks that ranks have updated.
        for bucket in self.publishes:
            shards, flight = stored_names(bucket.paths), ValueName(Kind.FLIGHT, bucket.name)
            publish = Publish(bucket.unit, "update", shards, (flight,), bucket=bucket.name)
            self.lines += with_wait(publish, *shards)

    def write_stretch(self, bucket: Bucket, paths: tuple[str, ...], group: int) -> None:
        """Write out the updates of leaves of one form, up to where they are sent to be computed whole."""
        steps = self.settings.families[paths[0]].derived.steps
        end = next((i for i, step in enumerate(steps) if isinstance(step, Stack)), len(steps))
        results = self.write_steps(bucket, paths, range(end), f"{group}", {self.reduced[bucket.name]: {GRAD}})
        if end < len(steps):
            self.sent |= dict.fromkeys(paths, results)

    def write_steps(
        self, bucket: Bucket, paths: tuple[str, ...], numbers: Sequence[int], group: str, made: Made
    ) -> Made:
        """Write out some steps of the update of leaves of one form.

        Args:
            made: the results of the lines before, with the values in them.

        Returns:
            `made`, with the results of these steps.
        """
        derived = {path: self.settings.families[path].derived for path in paths}
        where = {"unit": bucket.unit, "phase": "update", "bucket": bucket.name, "paths": paths}
        for number in numbers:
            name = ValueName(Kind.UPDATED, bucket.name, f" {group}#{number}")
            own = {path: each.steps[number] for path, each in derived.items()}
            step = own[paths[0]]
            # A reduction sends the values of all leaves together, in one dtype.
            if isinstance(step, Reduce):
                sent = [derived[p].values[n] for p, each in own.items() for n in each.sends]
                flight = ValueName(Kind.FLIGHT, bucket.name, f" {group}#{number}")
                reads = find_results(made, {n for each in own.values() for n in each.sends})
                line = ReduceUpdate(
                    **where, reads=reads, writes=(flight,), axes=step.axes, how=step.how,
                    dtype=common_dtype([dtype for _, dtype in sent]),
                    sends={p: each.sends for p, each in own.items()},
                    receives={p: each.receives for p, each in own.items()},
                    shapes={p: tuple(derived[p].values[n][0] for n in each.sends) for p, each in own.items()},
                )  # fmt: skip
                self.lines += with_wait(line, name)
                made = made | {name: {n for each in own.values() for n in each.receives}}
                continue

            # A computation reads state and values, writes what is final, and keeps what later steps read.
            flows = [flow_of(each, number) for each in derived.values()]
            commits = {n for flow in flows for n in flow.commits}
            keeps = {n for flow in flows for n in flow.keeps}
            reads = find_results(made, {n for each in own.values() for n in each.reads} | commits | keeps)
            writes = stored_names(paths) if UPDATE in commits else ()
            writes += slots(paths) if commits - {UPDATE} or writes else ()
            writes += (name,) if keeps else ()
            if not writes:  # the leaves have no elements
                continue
            self.lines.append(
                Update(
                    **where,
                    reads=(*reads, *self.find_state_reads(paths)),
                    writes=writes,
                    number=number,
                    work=own,
                )
            )
            # The line may scale the gradient in place. What is read of it later is a copy, among `keeps`.
            made = {n: values for n, values in made.items() if n.kind is not Kind.REDUCED} | {name: keeps}
        return made

    def find_state_reads(self, paths: tuple[str, ...]) -> Names:
        """Return what an update of leaves reads besides gradients."""
        scalars = (SCALARS,) if self.settings.barrier or self.settings.counted else ()
        spec = self.specs[paths[0]]
        # Where the host updates a leaf that the device stores, the optimizer reads its own master copy.
        params = () if spec.updated_on == "host" and spec.memory == "device" else stored_names(paths)
        return (*params, *slots(paths), *scalars)

    def write_stack(self, there: Bucket, back: Bucket) -> None:
        """Write out updates of whole leaves: the way there, the computation, the way back, later steps."""
        # What is sent there, what all ranks know anyway, and what comes back.
        derived = {path: self.settings.families[path].derived for path in there.paths}
        work = {p: next(s for s in d.steps if isinstance(s, Compute) and s.whole) for p, d in derived.items()}
        sends = {p: set(stacks_of(d)[0].sends) for p, d in derived.items()}
        arrive = {p: set(stacks_of(d)[0].receives) for p, d in derived.items()}
        receives = {n for d in derived.values() for n in stacks_of(d)[1].receives}
        parts = tuple(dict.fromkeys(n for p in there.paths for n in find_results(self.sent[p], sends[p])))
        alike = {p: set(compute.reads) - arrive[p] for p, compute in work.items()}
        known = tuple(dict.fromkeys(n for p in there.paths for n in find_results(self.sent[p], alike[p])))

        # The way there, the computation on the ranks that have leaves whole, and the way back.
        sent, whole, received = (
            ValueName(Kind.UPDATED, bucket.name, mark)
            for bucket, mark in ((there, ""), (there, "#whole"), (back, ""))
        )
        to, fro = (ValueName(Kind.FLIGHT, bucket.name) for bucket in (there, back))
        where = {"unit": there.unit, "phase": "update"}
        self.lines += [
            *with_wait(StackUpdate(**where, bucket=there.name, reads=parts, writes=(to,)), sent),
            ComputeStack(**where, bucket=there.name, reads=(sent, *known), writes=(whole,), work=work),
            *with_wait(
                StackUpdate(**where, bucket=back.name, reads=(whole,), writes=(fro,), back=True), received
            ),
        ]

        # The steps behind them, on blocks again.
        groups: dict[Any, list[str]] = {}
        for path in there.paths:
            groups.setdefault(steps_key(derived[path]), []).append(path)
        for number, paths in enumerate(groups.values()):
            # Some of these computations read what came back. Others were ready before, and follow it, too.
            steps = derived[paths[0]].steps
            start = next(i for i, s in enumerate(steps) if isinstance(s, Stack)) + 1
            numbers = [
                i for i, s in enumerate(steps[start:], start)
                if not isinstance(s, Stack) and not (isinstance(s, Compute) and s.whole)
            ]  # fmt: skip
            results = {n: held for path in paths for n, held in self.sent[path].items()}
            results |= {received: receives}
            self.write_steps(back, tuple(paths), numbers, f"{number}", results)

    def make_schedule(self) -> Schedule:
        """Return the schedule of the lines that were written."""
        last = self.settings.accumulate - 1
        outputs = [self.name_value(self.segments.results[i], last) for i in self.outputs.returned]
        if self.settings.differentiate:
            outputs.append(SCALARS)
        if self.settings.differentiate and not self.settings.update:
            outputs += self.reduced.values()

        # Inputs are stored shards, and all that lines read and none writes. Slots are written in place.
        named = dict.fromkeys(n for line in self.lines for n in line.reads)
        made = {n for line in self.lines for n in line.writes}
        inputs = [
            *stored_names(self.specs),
            *(n for n in named if n.kind is not Kind.STORED and (n not in made or n.kind is Kind.SLOTS)),
        ]

        # Every bucket that a line moves, by name.
        of_updates = (b for some in self.stacks.values() for pair in some for b in pair)
        moved = (*self.gathers, *self.reduces, *self.publishes, *of_updates, *self.aggregated)
        # The kernels of a unit that runs again share what is gathered with its backward, and those of a
        # round's tasks with one another.
        return Schedule(
            tuple(self.lines),
            {self.kernels[s.index].name: self.kernels[s.index] for s in self.own_segments},
            {b.name: b for b in moved},
            self.specs,
            self.mesh,
            tuple(inputs),
            tuple(outputs),
            self.settings.accumulate,
            scalars=self.settings.scalars + (len(self.outputs.summed) if self.settings.differentiate else 0),
            reduced=dict(self.reduced),
            families=self.families,
            stage=self.stage,
            rounds={
                (segment.index, True): len(self.rounds) + number
                for number, rerun in enumerate(self.reruns) for segment in rerun.unit
            } | {
                (segment.index, task.backward): number
                for number, tasks in enumerate(self.rounds) if len(tasks) > 1
                for task in tasks for segment in task.segments
            },
        )  # fmt: skip
