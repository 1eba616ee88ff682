"""Layouts: two of one function, run side by side, and the first instruction where they differ.

Names of values differ between layouts; what they stand for does not: a leaf as kernels see it, a value of
the program, a leaf's reduced gradient. So a run is recorded by what its instructions' results mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.values import Kind, stored
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    Accumulate,
    Action,
    Add,
    Cast,
    Env,
    Exchange,
    Gather,
    Instruction,
    Local,
    OverlappedUpdate,
    Publish,
    Reduced,
    ReduceScalars,
    Run,
    StoreBuffers,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.debug.values import (
    as_arguments,
    describe_line,
    difference,
    full_params,
    full_tensor,
    located,
    simulated_mesh,
    tensors,
    tolerance,
    valid_parts,
)
from fnshard.layout.partition import block_shape
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, P
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer
from fnshard.runtime.collectives.simulated import Adversary, simulate
from fnshard.runtime.executor.context import Watch
from fnshard.step.batches import check_leaves, split_batch
from fnshard.step.lowered import Lowered
from fnshard.step.step import Step, shard_step

Meaning = tuple[str, ...]  # ("leaf", path), ("value", name), ("reduced gradient", path), ...
PER_VALUE = frozenset({"value", "gradient of leaf", "gradient of value", "sum"})


@dataclass(frozen=True)
class LayoutDifference:
    """One thing that differs. `number`: the line of `b`'s schedule that gave it; -1 is before the step.

    `kind`: "kernel", "collective", "cast", "input", "instruction".
    `absolute`, `relative`: the largest difference, and that by the largest number of either side.
    """

    number: int
    instruction: str
    kind: str
    leaf: str
    what: str
    rank: int
    absolute: float = float("inf")
    relative: float = float("inf")
    note: str = ""

    def __str__(self) -> str:
        where = f"line {self.number}: {self.instruction}" if self.number >= 0 else "before the step"
        size = f"off by {self.absolute:.2e} ({self.relative:.2e} of its largest), rank {self.rank}"
        return f"{where}\n    {self.what}: " + "; ".join(filter(None, [size, self.note]))


@dataclass(frozen=True)
class BisectReport:
    """What `fs.debug.bisect` found: all that differs, in the order of `b`'s schedule; false if nothing does.

    `compared`: how many values were laid side by side. `note`: what could not be compared.
    """

    findings: tuple[LayoutDifference, ...]
    compared: int
    note: str = ""
    schedules: tuple[Schedule, Schedule] = field(repr=False, default=())

    @property
    def first(self) -> LayoutDifference | None:
        """The first difference of all."""
        return next(iter(self.findings), None)

    @property
    def kernel(self) -> LayoutDifference | None:
        """The first kernel whose results differ."""
        return next((f for f in self.findings if f.kind == "kernel"), None)

    @property
    def collective(self) -> LayoutDifference | None:
        """The first collective (its wait) whose results differ."""
        return next((f for f in self.findings if f.kind == "collective"), None)

    @property
    def leaf(self) -> LayoutDifference | None:
        """The first leaf that differs: stored, gathered, or by its gradient."""
        return next((f for f in self.findings if f.leaf), None)

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        tail = [self.note] if self.note else []
        if not self:
            return "\n".join([f"no difference in {self.compared} values", *tail])
        lines = [f"{len(self.findings)} of {self.compared} values differ; the first:", f"  {self.first}"]
        for word in ("kernel", "collective", "leaf"):
            found = getattr(self, word)
            if found is not None and found is not self.first:
                lines.append(f"first {word}: {found}")
        return "\n".join(lines + tail)


def bisect(
    fn: Callable[..., Any],
    specs_a: Any,
    specs_b: Any,
    params: Any,
    batch: Any,
    *,
    keywords: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    optimizer: Optimizer | None = None,
    options_a: Mapping[str, Any] | None = None,
    options_b: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    seed: int = 0,
    adversary: Adversary = None,
) -> BisectReport:
    """Run both layouts once and name the first kernel, collective and leaf where they differ.

    All ranks are simulated in this process, on the eager backend; every value is kept, so give it a small
    model and batch.

    Args:
        specs_a: the layout that is trusted (`fs.presets.no_shard` for one).
        params: the full tree, or the TrainState of one rank.
        batch, keywords: the global batch, as for `check`.
        mesh: of both, simulated; default two ranks along each axis that the specs name.
        optimizer: compare its update too.
        options_a, options_b: of `shard_step`, by side: remat, accumulate, prefetch, ...
        rtol: differences below are none, by the largest number of a value; default by its dtype, the finer
            one where they differ.
        atol: differences below are none, in numbers.
        adversary: as `fs.simulate` takes it: shows what is read before it was waited for.

    Raises:
        SpecError, StateError: as `shard_step` and `check`.
        DebugError: a side broke off, and at which line.

    >>> import torch
    >>> from fnshard import LayoutSpec, P, match_specs
    >>> params = {"w": torch.ones(4, 4)}
    >>> a, b = (match_specs(params, [("*", LayoutSpec(p))]) for p in (P(), P("shard")))
    >>> bool(bisect(lambda p, x: (x @ p["w"]).mean(), a, b, params, torch.ones(4, 4)))
    False
    """
    full, specs_a = full_params(params, specs_a)
    specs_b = full_params(params, specs_b)[1]
    mesh = simulated_mesh(mesh, specs_a, specs_b)
    passed = as_arguments(fn, batch, keywords)
    check_leaves(passed)
    parts = list(split_batch(passed, mesh.data_size, "parts, one a rank,"))
    sides = []
    for specs, options in ((specs_a, options_a), (specs_b, options_b)):
        how = {"optimizer": optimizer, **(options or {}), "backend": "eager"}
        step = shard_step(fn, specs, mesh=mesh, **how)
        sides.append(record(step, full, parts, seed, adversary))
    return _compare(*sides, rtol, atol)


def _compare(a: Recording, b: Recording, rtol: float | None, atol: float) -> BisectReport:
    """Two recordings of one function on one mesh, side by side."""
    left_out, known, compared = _incomparable(a, b), a.by_meaning(versions=False), 0
    note = f"not compared, as sides differ in it: {', '.join(sorted(left_out))}" if left_out else ""
    findings = []
    for (meaning, _), ranks in b.by_meaning().items():
        others = known.get((meaning, ""))
        if meaning[0] in left_out or others is None:
            continue
        compared += 1
        found = [_difference(b.schedule, ranks, *pair, rtol, atol) for pair in _pairs(a, b, others, ranks)]
        worst = max(filter(None, found), key=lambda f: f.absolute, default=None)
        findings += [worst] if worst else []
    findings.sort(key=lambda f: f.number)
    return BisectReport(tuple(findings), compared, note, (a.schedule, b.schedule))


def _pairs(
    a: Recording, b: Recording, others: Mapping[int, RecordedTensor], ranks: Mapping[int, RecordedTensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What of `a` each rank's value of `b` is compared with: (rank, a's, b's).

    Every block of `b` is compared with the whole of `a`, and every block of `a` with the whole of `b`: a
    replica that only one rank has wrong is seen on either side.
    """
    one, other = next(iter(ranks.values())), next(iter(others.values()))
    if one.layout is None and other.layout is None:
        yield from ((r, others[r].value, e.value) for r, e in ranks.items() if r in others)
        return
    path, mesh = one.meaning[1], b.schedule.mesh
    sides = (others, a.specs[path], other.layout or P()), (ranks, b.specs[path], one.layout or P())
    for (blocks, spec, layout), (parts, spec_of_parts, layout_of_parts) in (sides, sides[::-1]):
        whole = full_tensor({r: e.value for r, e in blocks.items()}, spec, layout, mesh)
        for rank, entry in parts.items():
            for slices, valid in valid_parts(entry.value, spec_of_parts, layout_of_parts, mesh, rank):
                yield (rank, whole[slices], valid) if parts is ranks else (rank, valid, whole[slices])


def _difference(
    schedule: Schedule,
    ranks: Mapping[int, RecordedTensor],
    rank: int,
    a: Tensor,
    b: Tensor,
    rtol: float | None,
    atol: float,
) -> LayoutDifference | None:
    entry = next(iter(ranks.values()))
    kind, name, *more = entry.meaning
    gap, scale = difference(a, b)
    if rtol is None and kind == "scalar":  # summed in fp64, whatever they were computed in
        rtol = tolerance(*(s.compute_dtype for s in schedule.specs.values()))
    elif rtol is None:
        rtol = min(tolerance(a.dtype), tolerance(b.dtype))
    if gap <= atol + rtol * scale:
        return None
    notes = []
    if a.dtype != b.dtype:
        notes.append(f"a has {str(a.dtype).removeprefix('torch.')}, b {str(b.dtype).removeprefix('torch.')}")
    if a.shape != b.shape:
        notes.append(f"a is {list(a.shape)}, b {list(b.shape)}")
    leaf = name.leaf if kind == "gradient of leaf" else "" if kind in (*PER_VALUE, "scalar") else name
    what = f"{'leaf as kernels see it' if kind == 'leaf' else kind} {leaf or name!r}"
    what += f", slot {more[0]}" if kind == "optimizer state" else ""
    line = schedule.instructions[entry.number] if entry.number >= 0 else None
    text = describe_line(line) if line is not None else ""
    relative = gap / scale if scale else float("inf")
    return LayoutDifference(
        entry.number, text, _kind(line), leaf, what, rank, gap, relative, "; ".join(notes)
    )


def _kind(line: Instruction | None) -> str:
    if isinstance(line, Run):
        return "kernel"
    source = line.of if isinstance(line, Wait) else line
    if source is not None and source.lane == COMMUNICATION:
        return "collective"
    return {Cast: "cast"}.get(type(line), "input" if line is None else "instruction")


def _incomparable(a: Recording, b: Recording) -> frozenset[str]:
    """Kinds of values whose names do not mean the same on both sides."""
    if a.schedule.accumulate != b.schedule.accumulate:
        return PER_VALUE | {"gradient of a micro-batch", "accumulated gradient"}
    nodes = [[(n.name, str(n.target)) for n in r.lowered.program.graph.nodes] for r in (a, b)]
    if nodes[0] != nodes[1]:  # dtypes differ, or an axis splits what `fn` computes
        return PER_VALUE
    cuts = [[(s.inputs, s.outputs) for s in r.lowered.segments.segments] for r in (a, b)]
    return PER_VALUE - {"value"} if cuts[0] != cuts[1] else frozenset()


@dataclass(frozen=True)
class RecordedTensor:
    """One tensor that a rank had after an instruction. `layout`: of a block of a leaf; None: no block.

    `version`: tells apart several that mean the same (a leaf gathered twice).
    """

    number: int
    meaning: Meaning
    value: Tensor
    layout: P | None = None
    version: str = ""


@dataclass
class Recording:
    """A step's run: by rank, its entries in order.

    `specs`: of the whole leaves, whose layouts the entries have.
    """

    lowered: Lowered
    specs: Mapping[str, LayoutSpec]
    ranks: dict[int, list[RecordedTensor]] = field(default_factory=dict)

    @property
    def schedule(self) -> Schedule:
        return self.lowered.schedule

    def by_meaning(self, *, versions: bool = True) -> dict[tuple[Meaning, str], dict[int, RecordedTensor]]:
        """By meaning and version (else the first of that meaning, under ""), each rank's entry."""
        out: dict[tuple[Meaning, str], dict[int, RecordedTensor]] = {}
        for rank, entries in self.ranks.items():
            for entry in entries:
                out.setdefault((entry.meaning, entry.version * versions), {}).setdefault(rank, entry)
        return out

    def watch(self, rank: int) -> Watch:
        """What the executor shows this rank's instructions to."""
        entries = self.ranks.setdefault(rank, [])

        def keep(number: int, found: Iterator[tuple[Meaning, Tensor, P | None, str]]) -> None:
            for meaning, value, layout, version in found:
                copy = value.detach().to("cpu", copy=True)
                entries.append(RecordedTensor(number, meaning, copy, layout, version))

        def around(number: int, line: Instruction, action: Action) -> Action:
            def watched(env: Env) -> None:
                if number == 0:
                    keep(-1, _stored(env, self.specs))
                keep(number, _before(line, env, self.specs))
                with located(number, line):
                    action(env)
                keep(number, _after(line, env, self.schedule, self.specs))

            return watched

        return around


def record(
    step: Step, params: Any, parts: Sequence[Arguments], seed: int = 0, adversary: Adversary = None
) -> Recording:
    """Run a step once on all ranks of its simulated mesh."""
    recording = Recording(parts[0].call(step.lower, params), ResolvedSpecs.of(step.specs).paired)

    def run(rank: int) -> None:
        state = step.init(params, seed=seed if step.optimizer else None)
        with step.watching(recording.watch(rank)):
            parts[step.mesh.data_rank].call(step if step.optimizer else partial(step, rng=(seed, 0)), state)

    simulate(step.mesh, run, adversary=adversary)
    return recording


_Found = Iterator[tuple[Meaning, Tensor, P | None, str]]
_Specs = Mapping[str, LayoutSpec]


def _stored(env: Env, specs: _Specs) -> _Found:
    for name in stored(specs):
        if isinstance(env.get(name), Tensor):
            yield ("stored leaf", name.path), env[name], specs[name.path].storage, ""


def _computed(path: str, specs: _Specs) -> P | None:
    return specs[path].compute if specs[path].compute.axes else None


def _before(line: Instruction, env: Env, specs: _Specs) -> _Found:
    """Leaves that a kernel reads as they are stored: nothing was gathered or cast."""
    if isinstance(line, Run):
        for name in line.reads:
            if name.original.kind is Kind.STORED and isinstance(env.get(name), Tensor):
                yield ("leaf", name.leaf), env[name], _computed(name.leaf, specs), ""


def _after(line: Instruction, env: Env, schedule: Schedule, specs: _Specs) -> _Found:
    """What an instruction gave."""
    waited = isinstance(line, Wait)
    source = line.of if waited else type(line)
    if source in (Run, Add) or (source is Exchange and waited):
        count = len(line.writes)
        if source is Run and not line.backward:  # after its results come values saved for the backward
            count = len(schedule.kernels[line.kernel].source.outputs)
        for name in line.writes[:count]:
            kind = "sum" if source is Add else "value"
            if name.kind is Kind.TANGENT or (source is Run and line.backward):
                kind = "gradient of leaf" if name.leaf else "gradient of value"
            yield (kind, name), env[name], None, ""
    elif source is Cast or (source is Gather and waited):
        for name in line.writes:
            yield ("leaf", name.leaf), env[name], _computed(name.leaf, specs), name.version[1:]
    elif source is ReduceScalars and waited:
        for name, tensor in tensors(env[line.writes[0]]):
            if name in ("loss", "norm", "count"):
                yield ("scalar", name), tensor, None, ""
    elif source is StoreBuffers or (source is Publish and waited):
        for name in line.writes:
            yield ("updated leaf", name.leaf), env[name], specs[name.leaf].storage, ""
    elif source is OverlappedUpdate and waited:
        yield from _of_update(schedule.issues[line.reads[0]], env, schedule.mesh, specs)
    elif isinstance(line, Wait | Local | Accumulate):
        yield from _of_reduction(line, env, schedule, specs)
    elif type(line) is Update:
        yield from _of_update(line, env, schedule.mesh, specs)


def _of_reduction(line: Wait | Local | Accumulate, env: Env, schedule: Schedule, specs: _Specs) -> _Found:
    """A leaf's gradient that all ranks have summed; of what is summed in two stages, the second."""
    name = next(iter(line.writes), None)
    value = env.get(name)
    if not isinstance(value, Reduced) or name.kind is not Kind.REDUCED or name.version.endswith("."):
        return
    last = name in {n.original for n in schedule.reduced.values()}
    kind = "accumulated gradient" if isinstance(line, Accumulate) else "gradient of a micro-batch"
    for path, block in value.blocks.items():
        meaning = ("reduced gradient", path) if last else (kind, path, name.version[1:])
        yield meaning, block, specs[path].gradient, ""


def _of_update(line: Update, env: Env, mesh: Mesh, specs: _Specs) -> _Found:
    """Of an optimizer's state what is of its leaf's shape, and no codes."""
    for path in line.paths:
        spec = specs[path]
        if spec.storage == spec.optimizer and path in line.params:
            yield ("updated leaf", path), env[line.params[path]], spec.storage, ""
        slots = env.get(line.slots.get(path, ""))
        for slot, tensor in tensors(slots) if slots is not None else ():
            shape = block_shape(spec.shape, spec.optimizer, mesh)
            if tensor.dim() and tuple(tensor.shape) == shape and tensor.is_floating_point():
                yield ("optimizer state", path, slot), tensor, spec.optimizer, ""
