"""Verify: a check, on every schedule that is lowered, of rules that no numeric test can see."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fnshard.compiler.ir.values import SCALES, Kind, ValueName
from fnshard.compiler.kernels.derived_values import Derived, find_derived
from fnshard.compiler.kernels.segment_source import SegmentSource
from fnshard.compiler.schedule.buckets import gradient_axes, replica_axes
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    COMPUTE,
    AggregateBuffers,
    Cast,
    Exchange,
    Free,
    Gather,
    Instruction,
    Norms,
    Recv,
    ReduceScalars,
    ReduceUpdate,
    Run,
    Send,
    StackUpdate,
    Wait,
)
from fnshard.compiler.schedule.instructions.kernels import end_rounds, tiny_runs
from fnshard.compiler.schedule.ir import Schedule, follow_aliases
from fnshard.errors import ScheduleError


@dataclass
class _Knowledge:
    """The knowledge about values at one line of a schedule.

    Args:
        live: the values that are alive.
        memory: the values of which each may be a view, see `follow_aliases`.
        flying: the flights that are not waited for, with the number and the line of their issue.
        taken: the values that were overwritten, with the number of the line that may have written to them.
        given_back: the buffers of the host's pool, with the number of the line that has freed them.
        writers: the line that has written each value.
        problems: the faults so far.
    """

    live: set[str]
    memory: Mapping[ValueName, frozenset[ValueName]]
    flying: dict[str, tuple[int, Instruction]] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    given_back: dict[str, int] = field(default_factory=dict)
    writers: dict[str, Instruction] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify(schedule: Schedule) -> Schedule:
    """Return the schedule, or raise with every line that breaks a rule.

    The rules:

    - Every line reads values that are alive; every value is written once, before it is read.
    - A bucket has one live gathered version at a time, and it is read. No more units than planned are alive
      at once.
    - No value that depends on leaves alone is saved, or crosses a cut where `derived` says that it may not
      (this is checked on the kernels).
    - Every collective and every transfer is waited for, exactly once.
    - Nothing writes or frees what a collective or transfer in flight reads, touches what an update in flight
      changes, or reads a value that was overwritten.
    - No buffer of the host's pool is read through a view, or given back again, after it was given back.
    - Whatever is alive at the end is an output.
    - Each backward, or both halves of one, run once for a micro-batch.
    - A gradient is summed once over each axis that does not split its leaf, and over no other; no gradient is
      left out, and nothing that an update makes. A norm counts every element once.
    - Where the result of an exchange has a cotangent, what was sent has one. Where a value of another stage
      has one, it is sent back. No leaf of another stage is read.

    Raises:
        ScheduleError: the schedule breaks a rule, because of a bug in a pass.
    """
    state = _Knowledge(set(schedule.inputs), follow_aliases(schedule.instructions))

    # Each line by itself, with what the lines before it have left.
    for number, line in enumerate(schedule.instructions):
        _check_line(state, number, line, schedule)
    for name, (number, _) in state.flying.items():
        state.problems.append(f"{number}: {name} is never waited for")
    left = state.live - set(schedule.inputs) - set(schedule.outputs)
    if left:
        state.problems.append(f"alive at the end: {', '.join(sorted(left)[:8])}")
    state.problems += [f"output {n} does not exist" for n in schedule.outputs if n not in state.live]
    state.problems += [
        f"output {n} is a view of {root}, whose buffer line {state.given_back[root]} frees"
        for n in schedule.outputs for root in state.memory.get(n, ()) if root in state.given_back
    ]  # fmt: skip

    # Then rules of the schedule as a whole.
    for find in (
        _find_surplus_units, _find_double_gathers, _check_sums, _check_norms, _find_missing_duals,
        _find_unanswered, _find_missing_backwards, _find_lost_values,
    ):  # fmt: skip
        state.problems += find(schedule)
    if not state.problems:  # this check relies on every kernel reading what it should
        state.problems += _find_kept_leaves(schedule)
    if state.problems:
        raise ScheduleError("faults in the schedule:", state.problems[:20])
    return schedule


def _check_line(state: _Knowledge, number: int, line: Instruction, schedule: Schedule) -> None:
    """Check one line against what is known of values before it, and note what it changes."""
    # What it reads is alive, and nobody has written to its memory or given that back.
    here = f"{number}: {line.verb} {line.detail}"
    for name in line.reads:
        if name.leaf and name.leaf not in schedule.specs:
            state.problems.append(f"{here}: reads {name}, a leaf of another stage")
        elif name not in state.live:
            state.problems.append(f"{here}: reads {name}, which is not alive")
        _check_memory(state, here, line, name, schedule)

    # A buffer goes back to the pool once, whichever of its views frees it.
    for name in (n for n in line.drops if isinstance(line, Free) and n.is_pooled):
        for root in {name, *state.memory.get(name, ())} & state.given_back.keys():
            state.problems.append(f"{here}: gives {name} back, as line {state.given_back[root]} has done")
        state.given_back[name] = number
    state.taken |= dict.fromkeys(line.overwrites, number)

    # What is in flight must not change, and what changes in flight must not be touched.
    changed = {*line.drops, *line.changes} | (set(line.writes) & state.live)
    for flight, (issued, issue) in state.flying.items():
        if isinstance(line, Wait) and flight in line.reads:
            continue
        if torn := {*line.reads, *line.writes} & set(issue.changes):
            state.problems.append(f"{here}: touches {sorted(torn)} while line {issued} changes it")
        touched = {n for n in issue.reads if n != flight and {n, *state.memory.get(n, ())} & changed}
        still_read = {n for n in touched if not _is_copied(issue, n)}
        if still_read:
            state.problems.append(f"{here}: changes {sorted(still_read)} while line {issued} reads it")

    # Flights begin at their issue and end at their Wait, which is of the same kind.
    if line.lane != COMPUTE:
        if line.writes[0] in state.flying:
            state.problems.append(f"{here}: {line.writes[0]} is already in flight")
        state.flying[line.writes[0]] = (number, line)
    if isinstance(line, Wait):
        _, issue = state.flying.pop(line.reads[0], (0, line))
        if type(issue) is not line.of:
            state.problems.append(f"{here}: {issue.verb} has issued {line.reads[0]}")
    if isinstance(line, Free) and not line.drops:
        state.problems.append(f"{here}: frees nothing")

    # What the line writes is new, but for what is kept up to date in place.
    for name in line.writes:
        in_place = name.is_state or name.is_copy(Kind.LOADED, Kind.STORED, Kind.SLOTS)
        if name in state.live and not in_place:
            state.problems.append(f"{here}: writes {name} again")
    state.live |= set(line.writes)
    state.writers |= dict.fromkeys(line.writes, line)
    state.live -= set(line.drops)


def _check_memory(
    state: _Knowledge, here: str, line: Instruction, name: ValueName, schedule: Schedule
) -> None:
    """Look for lines that have overwritten or given back the memory that a value is, or is a view of."""
    for root in {name, *state.memory.get(name, ())}:
        view = "" if root == name else f", a view of {root}"
        reader = line if root == name else state.writers.get(name, line)
        if root in state.taken:
            # Updates of a bucket's leaves each scale their own gradients, and read no others.
            writer = schedule.instructions[state.taken[root]]
            paths, others = (set(getattr(each, "paths", ())) for each in (reader, writer))
            if not (paths and others and paths.isdisjoint(others)):
                state.problems.append(
                    f"{here}: reads {name}{view}, which line {state.taken[root]} may overwrite"
                )
        if root in state.given_back and view:
            state.problems.append(
                f"{here}: reads {name}{view}, whose buffer line {state.given_back[root]} frees"
            )


def _is_copied(issue: Instruction, name: ValueName) -> bool:
    """Return whether the issue packs this value into another buffer, so that the value may die at once."""
    if issue.reads_until_waited:
        return False
    return (
        name.kind in (Kind.GRADIENT, Kind.ACCUMULATED, Kind.NORMS, Kind.REDUCED)
        or name.is_copy(Kind.LOADED, Kind.STORED)
        or name == SCALES  # the flight holds the scales
        or isinstance(issue, AggregateBuffers | Exchange | ReduceScalars | ReduceUpdate | Send | StackUpdate)
    )


def _check_sums(schedule: Schedule) -> list[str]:
    """Find buckets whose gradients are summed over too many axes or too few."""
    # The axes over which lines sum, by bucket and phase: each micro-batch may sum for itself.
    summed: dict[tuple[str, str], list[str]] = {}
    zeros: set[str] = set()  # buckets for which this stage has no gradients
    for line in schedule.instructions:
        of_gradients = line.lane == COMMUNICATION and not isinstance(line, ReduceUpdate)
        if of_gradients and getattr(line, "bucket", "") in schedule.reduced:
            summed.setdefault((line.bucket, line.phase), []).extend(line.axes_of(schedule))
            if not line.reads:
                zeros.add(line.bucket)

    problems = []
    for name in schedule.reduced:
        shared = schedule.mesh.stages > 1 and schedule.specs[schedule.buckets[name].paths[0]].chunk == "all"
        if shared and name not in {bucket for bucket, _ in summed}:  # a tie that nothing sums
            summed[name, "backward"] = []

    # What is due: the bucket's axes too, unless this stage has nothing to sum over them.
    for (name, phase), axes in summed.items():
        bucket = schedule.buckets[name]
        due = gradient_axes(bucket, schedule.specs, schedule.summed_axes)
        expected = sorted(axis for axis in due if name not in zeros or axis not in bucket.axes)
        if sorted(axes) != expected:
            over, wanted = (", ".join(each) or "no axis" for each in (axes, expected))
            problems.append(f"{phase}: {name} is summed over {over}, where {wanted} is due")
    return problems


def _check_norms(schedule: Schedule) -> list[str]:
    """Find norms that do not count each element exactly once."""
    mesh, problems = schedule.mesh, []
    for number, line in enumerate(schedule.instructions):
        if isinstance(line, Norms):
            bucket = schedule.buckets[line.bucket]
            same = mesh.axes_size(replica_axes(bucket, schedule.specs, schedule.summed_axes))
            if line.replicas != same:
                problems.append(f"{number}: norms of {line.bucket} count {line.replicas} replicas of {same}")
    return problems


def _find_missing_duals(schedule: Schedule) -> list[str]:
    """Find exchanges whose results have cotangents that are not exchanged back."""
    # What exchanges have received, and the cotangents that exchanges take back.
    lines = schedule.instructions
    waits = {w.reads[0]: w.writes[0] for w in lines if isinstance(w, Wait) and w.is_for(Exchange)}
    # A cotangent has the path and the micro-batch of the value that it belongs to.
    made = {n for line in lines for n in line.writes if n.kind is Kind.TANGENT}
    tangents = {(n.path, n.micro) for n in made}
    exchanges = [line for line in lines if isinstance(line, Exchange)]
    back = {(e.reads[0].path, e.reads[0].micro, e.kind, e.axes) for e in exchanges}

    problems = []
    for line in exchanges:
        # An exchange of cotangents is itself a dual, and needs none.
        received = waits.get(line.writes[0])
        if received is None or not line.like.requires_grad or received.kind is Kind.TANGENT:
            continue
        key = received.path, received.micro
        if key in tangents and (*key, line.of_kind.dual, line.axes) not in back:
            problems.append(f"{line.detail}: the cotangent of {received} is not exchanged back")
    return problems


def _find_missing_backwards(schedule: Schedule) -> list[str]:
    """Find backward kernels, or halves of them, that do not run exactly once for each micro-batch."""
    runs = [line for line in schedule.instructions if isinstance(line, Run) and line.backward]
    found = Counter((run.segment, run.way, run.phase) for run in runs)
    micros = [f".{m}" for m in range(schedule.accumulate)] if schedule.accumulate > 1 else [""]
    due = {
        (run.segment, way, f"backward{micro}"): f"{run.kernel}.{way} of segment {run.segment}"
        for run in runs for way in schedule.kernels[run.kernel].halves for micro in micros
    }  # fmt: skip
    return [f"{key[2]}: {what} runs {found[key]} times" for key, what in due.items() if found[key] != 1]


def _find_unanswered(schedule: Schedule) -> list[str]:
    """Find values of other stages whose cotangents are not sent back."""
    lines = schedule.instructions
    tangents = {(n.path, n.micro) for line in lines for n in line.writes if n.kind is Kind.TANGENT}
    back = {(n.path, n.micro, i.stage) for i in lines if isinstance(i, Send) for n in i.values}
    return [
        f"{line.verb} {line.detail}: the cotangent of {name} is not sent back"
        for line in lines
        if isinstance(line, Recv)
        for name, like in zip(line.values, line.likes, strict=True)
        if name.kind is not Kind.TANGENT
        and like.requires_grad
        and (name.path, name.micro) in tangents
        and (name.path, name.micro, line.stage) not in back
    ]


def _find_lost_values(schedule: Schedule) -> list[str]:
    """Find values that are made and that nothing reads.

    A gradient, or a sum over micro-batches, is lost where a reduction comes too early; a value of an update
    where a computation of it is left out.
    """
    read = {name for line in schedule.instructions for name in line.reads}
    lost = {Kind.GRADIENT: "is in no sum", Kind.ACCUMULATED: "is in no sum", Kind.UPDATED: "is in no update"}
    return [
        f"{number}: {name} {lost[name.kind]}"
        for number, line in enumerate(schedule.instructions)
        for name in line.writes
        if name.kind in lost and name not in read
    ]


def _find_surplus_units(schedule: Schedule) -> list[str]:
    """Find resharded units that are alive, from issue to free, while no kernel of the next rounds reads them.

    The next rounds are `planned` ones, and one more where a kernel among them is tiny. So at most the units
    of that many rounds are alive; a kernel may read several.
    """
    # Kernels and where their rounds end, and the buckets that stay gathered on purpose.
    tiny, ends = tiny_runs(schedule), end_rounds(schedule)
    runs = [line for line in schedule.instructions if isinstance(line, Run)]
    last = [number for number, run in enumerate(runs) if run in ends]  # the last kernel of each round
    at = 0  # the number of the next kernel
    kept = {b.name for b in schedule.buckets.values() if not all(schedule.specs[p].reshard for p in b.paths)}
    alive: dict[str, str] = {}  # value or flight -> unit
    problems = []

    for number, line in enumerate(schedule.instructions):
        # A unit is alive from the issue of its gather, which allocates buffers, to the drop of its last leaf.
        if isinstance(line, Gather) and line.bucket not in kept:
            alive[line.writes[0]] = line.unit
        if isinstance(line, Wait) and line.reads[0] in alive:
            alive.pop(line.reads[0])
            alive |= dict.fromkeys(line.writes, line.unit)

        # At a kernel, all that is gathered must be read by it or by the kernels of the next rounds.
        if isinstance(line, Run):
            units = set(alive.values())
            rounds = last[bisect_left(last, at) :][: schedule.planned + 1]
            stop = rounds[: schedule.planned][-1] + 1
            stop = stop if tiny.isdisjoint(runs[at:stop]) else rounds[-1] + 1
            read = [n for run in runs[at:stop] for n in run.reads if n.kind is Kind.GATHERED]
            planned_units = {schedule.specs[n.path].unit for n in read}
            at += 1
            if not units <= planned_units:
                problems.append(
                    f"{number}: {len(units)} units are gathered ({', '.join(sorted(units))}), "
                    f"planned are {schedule.planned}"
                )
        for name in line.drops:
            alive.pop(name, None)
    return problems


def _find_double_gathers(schedule: Schedule) -> list[str]:
    """Find buckets that are gathered while an earlier version of them is alive, or that are never read."""
    alive: dict[str, str] = {}  # gathered value or flight -> bucket
    unread: dict[str, int] = {}  # bucket -> the line that has gathered it
    problems = []
    for number, line in enumerate(schedule.instructions):
        for name in {n for n in line.reads if n in alive and n.kind is Kind.GATHERED}:
            unread.pop(alive[name], None)
        if isinstance(line, Gather | Cast):
            if line.bucket in alive.values():
                problems.append(f"{number}: {line.bucket} is gathered again while it is alive")
            if line.bucket in unread:
                problems.append(f"{unread[line.bucket]}: {line.bucket} is gathered and never read")
            unread[line.bucket] = number
        if isinstance(line, Gather | Cast) or (isinstance(line, Wait) and line.is_for(Gather)):
            alive |= dict.fromkeys(line.writes, line.bucket)
        if isinstance(line, Wait):
            alive.pop(line.reads[0], None)
        for name in line.drops:
            alive.pop(name, None)
    return problems + [f"{n}: {b} is gathered and never read" for b, n in unread.items()]


def _find_kept_leaves(schedule: Schedule) -> list[str]:
    """Find values that depend on leaves alone and are saved, or cross a cut though they may not."""

    # What is saved for the backward.
    problems = []
    for kernel in schedule.kernels.values():
        graph, source = kernel.forward.graph, kernel.source
        derived = _find_dependencies(graph, source, ["" for a in source.inputs if a.kind == "leaf"])
        saved = graph.output_node().args[0][len(source.outputs) :]
        problems += [
            f"{kernel.name}: {_describe_node(node)} is saved" for node in saved if derived.leaves.get(node)
        ]

    # What is handed from one kernel to the next. Equal kernels are looked at once.
    runs = [line for line in schedule.instructions if isinstance(line, Run)]
    read = {name for line in runs for name in line.reads if name.kind is not Kind.WRITTEN}
    known: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    for line in [r for r in runs if not r.backward]:
        kernel = schedule.kernels[line.kernel]
        inputs = zip(kernel.source.inputs, line.reads, strict=True)
        units = [schedule.specs[n.leaf].unit for a, n in inputs if a.kind == "leaf"]
        alike = tuple(units.index(u) for u in units)  # which leaves share a unit: equal in equal blocks
        handed_on = tuple(i for i, n in enumerate(line.writes[: len(kernel.source.outputs)]) if n in read)
        if (kernel.name, alike, handed_on) in known:
            continue
        known.add((kernel.name, alike, handed_on))
        outputs = kernel.source.graph.output_node().args[0]
        derived = _find_dependencies(kernel.source.graph, kernel.source, units)
        crossing = [outputs[i] for i in handed_on if not derived.may_cross(outputs[i])]
        problems += [f"{kernel.name}: {_describe_node(node)} is handed on" for node in crossing]
    return problems


def _find_dependencies(graph: fx.Graph, source: SegmentSource, units: Sequence[str]) -> Derived:
    """Return what nodes of a kernel's graph depend on.

    Args:
        units: the units of the leaves, in the order of the source's inputs.
    """
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    kinds = [a.kind for a in source.inputs]
    leaves = [n for n, kind in zip(nodes, kinds, strict=True) if kind == "leaf"]
    constants = [n for n, kind in zip(nodes, kinds, strict=True) if kind in ("constant", "axis")]
    return find_derived(graph, dict(zip(leaves, units, strict=True)), constants)


def _describe_node(node: fx.Node) -> str:
    return f"{node} {list(node.meta['val'].shape)} rests on leaves and"
