"""Stages: which stage of a pipeline runs which part of a program, and what stages send one another, as data.

A spec names the chunk of a leaf, and stage = chunk mod stages. A segment belongs to the chunk of the leaves
that it reads; a segment that reads only leaves of all stages goes with the segment before it. A value that
another stage reads is sent straight there, once for each micro-batch and reader. Its cotangent comes back
from each stage that has read it, when that has added up its own part. All of this follows from the program
and its specs alone, so that every stage finds the same messages in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fnshard.compiler.ir.program import Outputs
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segments import Segment, Segments, last_first
from fnshard.errors import SpecError
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh

SHOWN = 12  # the number of leaves that an error lists
WAYS_OUT = (
    'chunk="all" in the spec of a leaf that several stages read (a tied embedding, a table): each stage then '
    'holds it, and its gradients are summed, rules=[("embed.weight", LayoutSpec(P("shard"), chunk="all"))]. '
    "Else number chunks in the order in which `fn` reads their leaves."
)


@dataclass(frozen=True)
class Crossing:
    """Values of the program that one stage sends another behind a segment.

    Args:
        values: the names of the values in the program; of a backward, the values whose cotangents are sent.
        last_only: whether they are results that `fn` returns, of which the last micro-batch's are kept.
    """

    source: int
    target: int
    values: tuple[ValueName, ...]
    backward: bool = False
    last_only: bool = False


@dataclass(frozen=True)
class StagePlan:
    """A division of a program among stages.

    Args:
        chunks: consecutive segments, with the stage that runs them.
        stage_of: the stage of each segment, by its number.
        maker_of: by value, the stage that makes it.
        crossings: by segment and whether it is its backward, what is sent behind it.
    """

    stages: int
    chunks: tuple[tuple[int, tuple[Segment, ...]], ...]
    stage_of: Mapping[int, int]
    maker_of: Mapping[ValueName, int]
    crossings: Mapping[tuple[int, bool], tuple[Crossing, ...]] = field(default_factory=dict)

    def behind(self, segment: Segment, backward: bool, is_last: bool) -> list[Crossing]:
        """Return what is sent behind a segment of one micro-batch."""
        crossings = self.crossings.get((segment.index, backward), ())
        return [m for m in crossings if is_last or not m.last_only]


def one_stage(segments: Segments) -> StagePlan:
    """Return the plan of a mesh without a pipeline, where one stage runs all of the program."""
    stage_of = {s.index: 0 for s in segments.segments}
    return StagePlan(1, ((0, segments.segments),), stage_of, find_makers(segments, stage_of))


def plan_stages(
    segments: Segments,
    kernels: Sequence[Kernel],
    active: Iterable[int],
    outputs: Outputs,
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
) -> StagePlan:
    """Share a program among the stages of a mesh.

    Args:
        kernels: the kernel of each segment.
        active: the segments whose backward runs.

    Raises:
        SpecError: an error of `assign_chunks`; or `fn` writes to a leaf that another stage, or every one,
            holds.
    """
    if mesh.stages == 1:
        return one_stage(segments)

    # Chunk c runs on stage c mod stages.
    chunk_of = assign_chunks(segments, specs, mesh)
    stage_of = {s.index: chunk % mesh.stages for s, chunk in zip(segments.segments, chunk_of, strict=True)}
    chunks = tuple(
        (
            chunk % mesh.stages,
            tuple(s for s, c in zip(segments.segments, chunk_of, strict=True) if c == chunk),
        )
        for chunk in dict.fromkeys(chunk_of)
    )

    # What crosses from stage to stage, forward and backward.
    maker_of = find_makers(segments, stage_of)
    _refuse_writes(segments, outputs, specs, maker_of, mesh)
    crossings: dict[tuple[int, bool], list[Crossing]] = {}
    for key, crossing in [
        *_find_forward_crossings(segments, stage_of, outputs),
        *_find_backward_crossings(segments, kernels, set(active), stage_of, maker_of, outputs),
    ]:
        crossings.setdefault(key, []).append(crossing)
    return StagePlan(mesh.stages, chunks, stage_of, maker_of, {k: tuple(m) for k, m in crossings.items()})


def assign_chunks(segments: Segments, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> list[int]:
    """Return the chunk of each segment.

    Raises:
        SpecError: a segment reads leaves of two chunks; the program reads chunks in another order than
            theirs; or a stage has no segment.
    """
    # A segment belongs to the highest chunk among its leaves. A leaf of a lower chunk than that, or than an
    # earlier segment's, is an error.
    chunks: list[int | None] = []
    wrong: list[str] = []
    latest, reader = 0, ""  # the highest chunk so far, and a leaf of it
    for segment in segments.segments:
        chunk_of = {p: specs[p].chunk for p in segment.leaves if specs[p].chunk != "all"}
        highest = max(chunk_of, key=chunk_of.__getitem__, default="")
        for path, chunk in chunk_of.items():
            where = f"params[{path!r}] of chunk {chunk} is read{_find_line(segments, segment, path)}"
            if chunk < latest:
                wrong.append(f"{where}, after {reader} of chunk {latest}")
            elif chunk < chunk_of[highest]:
                wrong.append(f"{where}, together with params[{highest!r}] of chunk {chunk_of[highest]}")
        if chunk_of and chunk_of[highest] >= latest:
            latest, reader = chunk_of[highest], f"params[{highest!r}]"
        chunks.append(latest if chunk_of else None)

    if wrong:
        shown = wrong[:SHOWN]
        if len(wrong) > SHOWN:
            shown.append(f"and {len(wrong) - SHOWN} more")
        raise SpecError(
            f"`fn` does not read the leaves of {mesh.stages} stages one stage after another:",
            shown,
            WAYS_OUT,
        )

    # A segment without a chunk joins the one before it, the first ones the next.
    latest = next((chunk for chunk in chunks if chunk is not None), None)
    for number, chunk in enumerate(chunks):
        latest = latest if chunk is None else chunk
        chunks[number] = latest

    has_segment = {chunk % mesh.stages for chunk in chunks if chunk is not None}
    if missing := [stage for stage in range(mesh.stages) if stage not in has_segment]:
        raise SpecError(
            f"{len(missing)} of {mesh.stages} stages have nothing to run: `fn` reads no leaf of theirs.",
            [f"stage {stage}: {_describe_leaves(stage, specs, mesh)}" for stage in missing],
            "presets give each stage units, fs.presets.full_shard(params, mesh); in specs of your own "
            "LayoutSpec(chunk=0), 1, ... says it by leaf. A mesh needs no more stages than there are units.",
        )
    return chunks


def _describe_leaves(stage: int, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> str:
    """Describe the leaves of a stage that has nothing to run, for an error."""
    own = [f"params[{p!r}]" for p, s in specs.items() if s.chunk != "all" and s.chunk % mesh.stages == stage]
    if not own:
        return "no leaf is of its chunks"
    more = f" and {len(own) - 3} more" if len(own) > 3 else ""
    return f"has {', '.join(own[:3])}{more}, which `fn` does not read"


def _find_line(segments: Segments, segment: Segment, path: str) -> str:
    """Return where `fn` reads a leaf in a segment, if lines were kept."""
    graph = segments.sources[segment.source].graph
    inputs = zip(graph.find_nodes(op="placeholder"), segment.inputs, strict=True)
    users = [user for node, n in inputs if n.kind is Kind.LEAF and n.path == path for user in node.users]
    line = next((user.meta["stack_trace"] for user in users if user.meta.get("stack_trace")), "")
    return f" at {line}" if line else ""


def _refuse_writes(
    segments: Segments, outputs: Outputs, specs: Mapping[str, LayoutSpec], maker_of: Mapping[ValueName, int],
    mesh: Mesh,
) -> None:  # fmt: skip
    """Refuse leaves that `fn` writes to on a stage that does not hold them.

    Micro-batches hand such leaves on in order, which they can do within one stage alone.
    """
    wrong = []
    for path, index in outputs.writes.items():
        maker, chunk = maker_of.get(segments.results[index], 0), specs[path].chunk
        if chunk == "all":
            wrong.append(f'params[{path!r}] has chunk="all", and stage {maker} writes to it')
        elif chunk % mesh.stages != maker:
            wrong.append(f"params[{path!r}] of stage {chunk % mesh.stages} is written by stage {maker}")
    if wrong:
        raise SpecError(
            "`fn` writes to leaves that other stages hold:",
            wrong,
            "give a buffer the chunk of the unit that writes to it: LayoutSpec(chunk=...).",
        )


def find_makers(segments: Segments, stage_of: Mapping[int, int]) -> dict[ValueName, int]:
    """Return the stage that makes each value of the program."""
    made = {name: stage_of[s.index] for s in segments.segments for name in s.outputs}
    return made | {e.received: stage_of[e.after] for e in segments.exchanges}


def _find_forward_crossings(
    segments: Segments, stage_of: Mapping[int, int], outputs: Outputs
) -> list[tuple[tuple[int, bool], Crossing]]:
    """Return what is sent behind each segment's forward: values that other stages read, and results."""
    # The stages that read each value, in a segment or in an exchange.
    readers: dict[ValueName, set[int]] = {}
    for segment in segments.segments:
        for name in segment.inputs:
            readers.setdefault(name, set()).add(stage_of[segment.index])
    for each in segments.exchanges:
        readers.setdefault(each.sent, set()).add(stage_of[each.after])

    # To each other stage: what it reads, and the results that `fn` returns, which every stage hands out.
    returned = {segments.results[index] for index in outputs.returned}
    after = segments.exchanges_after()
    stages, out = sorted(set(stage_of.values())), []
    for segment in segments.segments:
        here = stage_of[segment.index]
        made = [*segment.outputs, *(e.received for e in after[segment.index])]
        for stage in (s for s in stages if s != here):
            read = tuple(n for n in made if stage in readers.get(n, ()))
            results = tuple(n for n in made if n in returned and n not in read)
            for values, last_only in ((read, False), (results, True)):
                if values:
                    crossing = Crossing(here, stage, values, last_only=last_only)
                    out.append(((segment.index, False), crossing))
    return out


def _find_backward_crossings(
    segments: Segments, kernels: Sequence[Kernel], active: set[int], stage_of: Mapping[int, int],
    maker_of: Mapping[ValueName, int], outputs: Outputs,
) -> list[tuple[tuple[int, bool], Crossing]]:  # fmt: skip
    """Return what is sent behind each segment's backward: cotangents that a stage has added up."""
    if outputs.loss is None:
        return []
    # By value and stage, the segment that adds to its cotangent last.
    after, has_tangent = segments.exchanges_after(), {segments.results[outputs.loss]}
    last: dict[tuple[ValueName, int], int] = {}
    for segment in reversed(segments.segments):
        added = []
        for each in last_first(after[segment.index]):
            if each.received in has_tangent and each.like.requires_grad:
                added.append(each.sent)
                has_tangent.add(each.sent)
        if segment.index in active:
            added += [segment.inputs[index] for index in kernels[segment.index].grads]
            has_tangent.update(added)
        last |= {(n, stage_of[segment.index]): segment.index for n in added if n.kind is not Kind.LEAF}

    # A segment without a backward does not ask for the cotangents of what it makes.
    asked = {s.outputs[i] for s in segments.segments if s.index in active for i in kernels[s.index].tangents}
    asked |= {e.received for e in segments.exchanges if e.like.requires_grad}

    # Behind that segment the cotangents go to the stage that has made the values.
    sent: dict[tuple[int, int, int], list[ValueName]] = {}
    for (name, stage), index in last.items():
        if maker_of[name] != stage and name in asked:
            sent.setdefault((index, stage, maker_of[name]), []).append(name)
    return [
        ((index, True), Crossing(stage, target, tuple(names), backward=True))
        for (index, stage, target), names in sent.items()
    ]
