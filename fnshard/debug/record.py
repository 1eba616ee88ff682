"""Record: a step's run on simulated ranks, and what each of its instructions gave, by what it means.

Names of values differ between layouts; what they stand for does not: a leaf as kernels see it, a value of
the program, a leaf's reduced gradient. So runs of two layouts can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.values import Kind, stored
from fnshard.compiler.schedule.instructions import (
    Accumulate,
    Action,
    Add,
    Cast,
    Env,
    Exchange,
    Gather,
    Instruction,
    Local,
    Publish,
    Reduced,
    ReduceScalars,
    Run,
    StoreBuffers,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.debug.values import tensors
from fnshard.errors import CollectiveError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, P
from fnshard.runtime.collectives.simulated import Adversary, simulate
from fnshard.runtime.executor.context import Watch
from fnshard.step.lowered import Lowered
from fnshard.step.step import Step

Specs = Mapping[str, LayoutSpec]
ValueKey = tuple[str, ...]  # ("leaf", path), ("value", name), ("reduced gradient", path), ...


@dataclass(frozen=True)
class RecordedTensor:
    """One tensor that a rank had behind an instruction. `layout`: of blocks of a leaf; None: no block.

    `version`: tells apart several that mean the same (a leaf gathered twice).
    """

    number: int
    key: ValueKey
    value: Tensor
    layout: P | None = None
    version: str = ""


@dataclass(frozen=True)
class RunFailure:
    """Where a rank's run broke off."""

    number: int
    rank: int
    error: BaseException


@dataclass
class Recording:
    """A step's run: by rank, its entries in order; and where it failed, if it did.

    `specs`: of the whole leaves, whose layouts the entries have.
    """

    lowered: Lowered
    specs: Mapping[str, LayoutSpec]
    ranks: dict[int, list[RecordedTensor]] = field(default_factory=dict)
    failures: list[RunFailure] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        """Its instructions."""
        return self.lowered.schedule

    @property
    def failure(self) -> RunFailure | None:
        """The first rank that failed by itself, not because another one did."""
        own = [f for f in self.failures if not isinstance(f.error, CollectiveError)]
        return min(own or self.failures, key=lambda f: (f.number, f.rank), default=None)

    def watch(self, rank: int) -> Watch:
        """What the executor shows this rank's instructions to."""

        def around(number: int, line: Instruction, action: Action) -> Action:
            entries = self.ranks.setdefault(rank, [])

            def watched(env: Env) -> None:
                if number == 0:
                    entries.extend(self._copies(-1, _stored(env, self.specs)))
                entries.extend(self._copies(number, _before(line, env, self.specs)))
                try:
                    action(env)
                except Exception as error:
                    self.failures.append(RunFailure(number, rank, error))
                    raise
                entries.extend(self._copies(number, _after(line, env, self.schedule, self.specs)))

            return watched

        return around

    def _copies(
        self, number: int, found: Iterator[tuple[ValueKey, Tensor, P | None, str]]
    ) -> Iterator[RecordedTensor]:
        for key, value, layout, version in found:
            yield RecordedTensor(number, key, value.detach().to("cpu", copy=True), layout, version)


def record(
    step: Step, params: Any, parts: Sequence[Arguments], *, seed: int = 0, adversary: Adversary = None
) -> Recording:
    """Run a step once on all ranks of its simulated mesh.

    Args:
        step: on the eager backend; a replay of it is run, itself it stays as it was.
        params: the full tree.
        parts: the global batch, a slice for each data rank.
    """
    lowered = parts[0].call(step.lower, params)
    recording = Recording(lowered, ResolvedSpecs.of(step.specs).paired)
    again = step.replay()

    def run(rank: int) -> None:
        state = again.init(params, seed=seed if step.optimizer else None)
        part = parts[step.mesh.data_rank]
        with again.watching(recording.watch(rank)):
            part.call(again if step.optimizer else partial(again, rng=(seed, 0)), state)

    try:
        simulate(step.mesh, run, adversary=adversary)
    except Exception:
        if not recording.failures:  # before or behind the schedule: no finding, but a mistake
            raise
    return recording


# ------------------------------------------------------------------ what an instruction gave

_Found = Iterator[tuple[ValueKey, Tensor, P | None, str]]


def _stored(env: Env, specs: Specs) -> _Found:
    for name in stored(specs):
        if isinstance(env.get(name), Tensor):
            yield ("stored leaf", name.path), env[name], specs[name.path].storage, ""


def _computed(path: str, specs: Specs) -> P | None:
    return specs[path].compute if specs[path].compute.axes else None


def _before(line: Instruction, env: Env, specs: Specs) -> _Found:
    """Leaves that a kernel reads as they are stored: nothing was gathered or cast."""
    if isinstance(line, Run):
        for name in line.reads:
            if name.original.kind is Kind.STORED and isinstance(env.get(name), Tensor):
                yield ("leaf", name.leaf), env[name], _computed(name.leaf, specs), ""


def _after(line: Instruction, env: Env, schedule: Schedule, specs: Specs) -> _Found:
    if isinstance(line, Run):
        yield from _of_run(line, env, schedule)
    elif isinstance(line, Wait) and line.is_for(Exchange):
        (name,) = line.writes
        yield ("gradient of value" if name.kind is Kind.TANGENT else "value", name), env[name], None, ""
    elif isinstance(line, Add):
        yield ("sum", line.writes[0]), env[line.writes[0]], None, ""
    elif isinstance(line, Cast) or (isinstance(line, Wait) and line.is_for(Gather)):
        for name in line.writes:
            yield ("leaf", name.leaf), env[name], _computed(name.leaf, specs), name.version[1:]
    elif isinstance(line, Wait) and line.is_for(ReduceScalars):
        for name, tensor in tensors(env[line.writes[0]]):
            if name in ("loss", "norm", "count"):
                yield ("scalar", name), tensor, None, ""
    elif isinstance(line, Wait | Local | Accumulate):
        yield from _of_reduction(line, env, schedule, specs)
    if isinstance(line, Update):
        yield from _of_update(line, env, specs)
    if isinstance(line, StoreBuffers) or (isinstance(line, Wait) and line.is_for(Publish)):
        for name in line.writes:
            yield ("updated leaf", name.leaf), env[name], specs[name.leaf].storage, ""


def _of_run(line: Run, env: Env, schedule: Schedule) -> _Found:
    count = len(line.writes) if line.backward else len(schedule.kernels[line.kernel].source.outputs)
    for name in line.writes[:count]:
        if line.backward:
            path = name.leaf
            yield ("gradient of leaf" if path else "gradient of value", name), env[name], None, ""
        else:
            yield ("value", name), env[name], None, ""


def _of_reduction(line: Wait | Local | Accumulate, env: Env, schedule: Schedule, specs: Specs) -> _Found:
    """A leaf's gradient that all ranks have summed; of what is summed in two stages, the second."""
    name = next(iter(line.writes), None)
    value = env.get(name)
    if not isinstance(value, Reduced) or name.kind is not Kind.REDUCED or name.version.endswith("."):
        return
    last = name in {n.original for n in schedule.reduced.values()}
    kind = "accumulated gradient" if isinstance(line, Accumulate) else "gradient of a micro-batch"
    micro = name.version[1:]
    for path, block in value.blocks.items():
        key = ("reduced gradient", path) if last else (kind, path, micro)
        yield key, block, specs[path].gradient, ""


def _of_update(line: Update, env: Env, specs: Specs) -> _Found:
    for path in line.paths:
        spec = specs[path]
        if spec.storage == spec.optimizer and path in line.params:
            yield ("updated leaf", path), env[line.params[path]], spec.storage, ""
        slots = env.get(line.slots.get(path, ""))
        for slot, tensor in tensors(slots) if slots is not None else ():
            if tensor.dim() == len(spec.shape) and tensor.dim():
                yield ("optimizer state", path, slot), tensor, spec.optimizer, ""
