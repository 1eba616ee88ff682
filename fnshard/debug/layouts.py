"""Layouts: two of one function, run side by side, and the first instruction where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnshard.compiler.schedule.instructions import COMMUNICATION, Cast, Instruction, Run, Wait
from fnshard.compiler.schedule.ir import Schedule
from fnshard.debug.batch import (
    as_arguments,
    difference,
    full_params,
    full_tensor,
    simulated_mesh,
    split_batch,
    tolerance,
    valid_parts,
)
from fnshard.debug.record import RecordedTensor, Recording, ValueKey, record
from fnshard.layout.spec import P
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer
from fnshard.runtime.collectives.simulated import Adversary
from fnshard.step.step import shard_step


@dataclass(frozen=True)
class LayoutDifference:
    """One thing that differs. `number`: the line of `b`'s schedule behind which it does; -1 is before it.

    `absolute`, `relative`: the largest difference, and that by the largest number of either side.
    """

    number: int
    instruction: str
    kind: str
    leaf: str
    what: str
    rank: int
    absolute: float
    relative: float
    note: str = ""

    def __str__(self) -> str:
        where = f"line {self.number}: {self.instruction}" if self.number >= 0 else "before the step"
        size = f"off by {self.absolute:.2e} ({self.relative:.2e} of its largest), rank {self.rank}"
        return f"{where}\n    {self.what}: " + "; ".join(
            filter(None, (size if not self.failed else "", self.note))
        )

    @property
    def failed(self) -> bool:
        """Whether the instruction could not be run at all."""
        return self.kind == "failure"


@dataclass(frozen=True)
class BisectReport:
    """What `fs.debug.bisect` found: all that differs, in the order of `b`'s schedule; false if nothing does.

    `compared`: how many values were laid side by side. `note`: what could not be compared.
    """

    findings: tuple[LayoutDifference, ...]
    compared: int
    rtol: float | None
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

    @property
    def failure(self) -> LayoutDifference | None:
        """The instruction that a side could not run."""
        return next((f for f in self.findings if f.failed), None)

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        tail = [self.note] if self.note else []
        if not self:
            return "\n".join([f"no difference in {self.compared} values", *tail])
        lines = [f"{len(self.findings)} of {self.compared} values differ; the first:", f"  {self.first}"]
        for word in ("kernel", "collective", "leaf", "failure"):
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
    parts = split_batch(as_arguments(fn, batch, keywords), mesh.data_size)
    sides = []
    for specs, options in ((specs_a, options_a), (specs_b, options_b)):
        how = {"optimizer": optimizer, **(options or {}), "backend": "eager"}
        step = shard_step(fn, specs, mesh=mesh, **how)
        sides.append(record(step, full, parts, seed=seed, adversary=adversary))
    return compare(*sides, rtol=rtol, atol=atol)


def compare(a: Recording, b: Recording, *, rtol: float | None = None, atol: float = 0.0) -> BisectReport:
    """Two recordings of one function on one mesh, laid side by side."""
    left_out, note = _incomparable(a, b)
    known = {rank: _by_key(entries) for rank, entries in a.ranks.items()}
    here = {rank: _by_key(entries) for rank, entries in b.ranks.items()}
    found: list[tuple[int, int, LayoutDifference]] = []
    compared: set[tuple[ValueKey, str]] = set()
    for rank, entries in b.ranks.items():
        for place, entry in enumerate(entries):
            if entry.key[0] in left_out:
                continue
            pair = _pair(a, b, known, here, rank, entry)
            if pair is None:
                continue
            compared.add((entry.key, entry.version))
            finding = _finding(b.schedule, rank, entry, *pair, rtol, atol)
            if finding:
                found.append((entry.number, place, finding))
    found.sort(key=lambda f: f[:2])
    findings = _worst_of_ranks([f for _, _, f in found])
    for side, name in ((b, "b"), (a, "a")):
        if side.failure:
            findings.append(_failed(side, name))
    findings.sort(key=lambda f: f.number)  # stable: a failure comes behind what differs at its line
    return BisectReport(tuple(findings), len(compared), rtol, note, (a.schedule, b.schedule))


def _by_key(entries: list[RecordedTensor]) -> dict[tuple[ValueKey, str], RecordedTensor]:
    """By key and version, and by key alone: the first version."""
    out: dict[tuple[ValueKey, str], RecordedTensor] = {}
    for entry in entries:
        out[entry.key, entry.version] = entry
    for entry in reversed(entries):
        out[entry.key, "first"] = entry
    return out


def _pair(a: Recording, b: Recording, known: Any, here: Any, rank: int, entry: RecordedTensor) -> Any:
    """What side `a` has for an entry of `b`, and `b`'s, laid out alike; and how they are stored."""
    key = (entry.key, entry.version)
    other = known.get(rank, {}).get(key) or known.get(rank, {}).get((entry.key, "first"))
    if other is None:
        return None
    if entry.layout is None and other.layout is None:
        return other.value, entry.value
    path, mesh = entry.key[1], b.schedule.mesh
    spec_a, spec_b = a.specs[path], b.specs[path]
    layout_a, layout_b = other.layout or P(), entry.layout or P()
    blocks = {r: e[entry.key, "first"].value for r, e in known.items() if (entry.key, "first") in e}
    others = {r: e[entry.key, "first"].value for r, e in here.items() if (entry.key, "first") in e}
    # Every block of `b` against the whole of `a`; and this rank's block of `a` against the whole of `b`, so
    # that a replica that only one rank has wrong is seen on either side.
    pairs = []
    if len(blocks) == mesh.size:
        whole = full_tensor(blocks, spec_a, layout_a, mesh)
        parts = valid_parts(entry.value, spec_b, layout_b, mesh, rank)
        pairs += [(whole[slices], valid) for slices, valid in parts]
    if len(others) == mesh.size:
        whole = full_tensor(others, spec_b, layout_b, mesh)
        parts = valid_parts(other.value, spec_a, layout_a, mesh, rank)
        pairs += [(valid, whole[slices]) for slices, valid in parts]
    return max(pairs, key=lambda p: difference(*p)[0]) if pairs else None


def _finding(
    schedule: Schedule,
    rank: int,
    entry: RecordedTensor,
    a: Tensor,
    b: Tensor,
    rtol: float | None,
    atol: float,
) -> LayoutDifference | None:
    gap, scale = difference(a, b)
    if rtol is None and entry.key[0] == "scalar":  # summed in fp64, whatever they were computed in
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
    elif factor := _factor(a, b):
        notes.append(f"b is {factor:g} times a")
    kind, name, *more = entry.key
    leaf = name if kind not in ("value", "scalar", "gradient of value", "sum") else ""
    if kind == "gradient of leaf":
        leaf = name.leaf
    if kind == "leaf":
        kind = "leaf as kernels see it"
    what = f"{kind} {leaf or name!r}" if not leaf else f"{kind} {leaf!r}"
    what += f", slot {more[0]}" if entry.key[0] == "optimizer state" else ""
    line = schedule.instructions[entry.number] if entry.number >= 0 else None
    relative = gap / scale if scale else float("inf")
    return LayoutDifference(
        entry.number, _text(line), _kind(line), leaf, what, rank, gap, relative, "; ".join(notes)
    )


def _factor(a: Tensor, b: Tensor) -> float | None:
    """The one number that `b` is off by, if it is one: a sum in place of a mean says so."""
    x, y = a.double().flatten(), b.double().flatten()
    square = float(x @ x)
    if not 0 < square < float("inf"):
        return None
    factor = float(x @ y) / square
    gap = difference(factor * x, y)[0]
    near = gap <= 1e-3 * float(y.abs().max())
    return round(factor, 4) if near and abs(factor - 1.0) > 1e-3 and factor else None


def _kind(line: Instruction | None) -> str:
    if isinstance(line, Run):
        return "kernel"
    source = line.of if isinstance(line, Wait) else line
    if source is not None and source.lane == COMMUNICATION:
        return "collective"
    return {Cast: "cast"}.get(type(line), "input" if line is None else "instruction")


def _text(line: Instruction | None) -> str:
    return "" if line is None else f"{line.phase} {line.unit} {line.verb} {line.detail}"


def _worst_of_ranks(findings: list[LayoutDifference]) -> list[LayoutDifference]:
    """One finding a value: of the rank where it is largest."""
    out: dict[tuple[int, str], LayoutDifference] = {}
    for each in findings:
        key = each.number, each.what
        if key not in out or each.absolute > out[key].absolute:
            out[key] = each
    return list(out.values())


def _failed(side: Recording, name: str) -> LayoutDifference:
    failure = side.failure
    line = side.schedule.instructions[failure.number]
    error = f"{type(failure.error).__name__}: {failure.error}".splitlines()[0]
    note = error if name == "b" else f"{error} (in the schedule of a)"
    inf = float("inf")
    what = f"{name} cannot run it"
    return LayoutDifference(failure.number, _text(line), "failure", "", what, failure.rank, inf, inf, note)


def _incomparable(a: Recording, b: Recording) -> tuple[frozenset[str], str]:
    """Kinds of values whose names do not mean the same on both sides, and why."""
    nodes = [[(n.name, str(n.target)) for n in r.lowered.program.graph.nodes] for r in (a, b)]
    per_value = frozenset({"value", "gradient of leaf", "gradient of value", "sum"})
    if nodes[0] != nodes[1]:
        return per_value, (
            f"`fn` is another program on each side ({len(nodes[0])} and {len(nodes[1])} nodes), as it may be "
            "where dtypes differ or an axis splits what it computes: only leaves, reduced gradients, the "
            "loss and updates are compared."
        )
    if a.schedule.accumulate != b.schedule.accumulate:
        return per_value | {"gradient of a micro-batch", "accumulated gradient"}, (
            "micro-batches differ: only leaves, reduced gradients, the loss and updates are compared."
        )
    cuts = [[(s.inputs, s.outputs) for s in r.lowered.segments.segments] for r in (a, b)]
    if cuts[0] != cuts[1]:
        return frozenset({"gradient of leaf", "gradient of value", "sum"}), (
            "the two are cut into other kernels: kernels' gradients are compared once they are reduced."
        )
    return frozenset(), ""
