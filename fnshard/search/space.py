"""Space: the plans of a function, its parameters and a batch, on one mesh or on all meshes of so many ranks.

A plan says for each unit whether it is recomputed and whether it stays gathered. It says what rests on the
host, how many micro-batches a step and how many chunks a stage of a pipeline has, and how many kernels ahead
leaves are gathered. Every plan that is priced is lowered completely.
"""

from __future__ import annotations

import glob
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.analysis.flops import kernel_flops
from fnshard.analysis.hardware import Hardware
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.lower import Front, schedule_for
from fnshard.compiler.options import StepOptions
from fnshard.compiler.schedule.stages import assign_chunks
from fnshard.compiler.schedule.tasks import MicroOrder
from fnshard.errors import OptimizerError, SpecError, StateError
from fnshard.layout import presets
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, is_spec
from fnshard.mesh import Mesh, make_mesh
from fnshard.optim.optimizer import Optimizer
from fnshard.search.price import MAX_KERNELS_AHEAD, ORDERS, Candidate, price
from fnshard.search.walk import Dial, Move, SearchEffort
from fnshard.step.batches import bytes_of_batch, split_batch
from fnshard.step.lowered import Lowered
from fnshard.step.step import Step

OPTIMIZER = ("device", "streamed", "host")
# A recomputed unit keeps half of what its backward wants, its inputs, or its inputs on the host. The order is
# from most memory to most time.
REMAT_CHOICES = (0.5, "unit", "unit+offload")
AXES = ("replicate", "shard", "tensor", "pipeline")
MOST_CHUNKS = 8  # the most chunks of a stage of a pipeline


@dataclass(frozen=True)
class Choice:
    """A plan of a function.

    Args:
        mesh: the mesh on which it runs.
        accumulate: the number of micro-batches in a step.
        order: the order of these, as in `StepOptions.micro_order`.
        zero_bubble_memory: see `StepOptions`.
        remat: what recomputed units keep.
        recomputed: the number of units that are recomputed, from the first on.
        kept: the number of units that stay gathered between forward and backward, from the last on.
        optimizer: the place where its state rests and is updated: "device", "host", or "streamed", which
            rests on the host and is updated on the device.
        parameters_on_host: whether stored shards rest on the host.
        prefetch_depth: the number of kernels by which gathers are issued earlier, and reductions waited for
            later.
        chunks: the number of chunks of each stage of a pipeline; None leaves that of the specs to start from.
    """

    mesh: Mesh
    accumulate: int = 1
    order: MicroOrder = "depth"
    remat: str | float = REMAT_CHOICES[0]
    recomputed: int = 0
    kept: int = 0
    optimizer: str = "device"
    parameters_on_host: bool = False
    prefetch_depth: int = 1
    chunks: int | None = None
    zero_bubble_memory: float = 1.0

    @property
    def effort(self) -> tuple[int, ...]:
        """Return what is done to save memory, as numbers. Of plans that are as fast the least is chosen."""
        moved, chunks = (self.optimizer != "device") + self.parameters_on_host, self.chunks or 0
        return moved, self.accumulate, self.order != "depth", self.recomputed, -self.kept, chunks

    def __str__(self) -> str:
        optimizer = {"device": [], "host": ["optimizer"], "streamed": ["optimizer (streamed)"]}[
            self.optimizer
        ]
        where = optimizer + (["parameters"] if self.parameters_on_host else [])
        without_limit = ", any number under way" if self.mesh.stages > 1 else " breadth-first"
        apart = ", weight gradients apart"
        if self.zero_bubble_memory != 1:
            apart += f" in {self.zero_bubble_memory:g} times the memory"
        order = {"depth": "", "breadth": without_limit, "zero_bubble": apart}[self.order]
        parts = [f"{self.accumulate} micro-batch{'es' if self.accumulate > 1 else ''}{order}"]
        parts.append(f"{self.recomputed} units remat={self.remat!r}" if self.recomputed else "no remat")
        parts.append(f"{self.kept} units kept gathered" if self.kept else "all resharded")
        parts += [f"{' and '.join(where)} on the host"] if where else []
        parts += [] if self.chunks is None else [f"{self.chunks} chunk{'s' * (self.chunks > 1)} a stage"]
        ahead = {0: ["no prefetch"], 1: []}.get(self.prefetch_depth, [f"{self.prefetch_depth} kernels ahead"])
        return ", ".join(parts + ahead)


@dataclass
class FunctionSpace:
    """The plans of a function, as a `walk.Space`.

    Args:
        batch: the batch of one step, with all micro-batches, of this rank, or of all ranks if there are
            several meshes.
        meshes: the meshes to choose from. If there are several, a plan becomes another by a factor that goes
            from one axis to another.
        specs: gives the layouts to start from on a mesh.
        work: counts lowerings.
        left_out: the meshes without plans, each with the reason.
    """

    fn: Callable[..., Any]
    params: Any
    batch: Arguments
    meshes: tuple[Mesh, ...]
    specs: Callable[[Mesh], Any]
    optimizer: Optimizer
    hardware: Hardware
    options: StepOptions
    work: SearchEffort = field(default_factory=SearchEffort)
    left_out: dict[Mesh, str] = field(default_factory=dict)
    _plans: dict[Mesh, MeshPlans | None] = field(default_factory=dict)
    # A greater depth may pay for these plans.
    _waits_for_collectives: set[Choice] = field(default_factory=set)
    _kernels: dict[str, Kernel] = field(default_factory=dict)  # shared by meshes whose programs are alike

    def on(self, mesh: Mesh) -> MeshPlans | None:
        """Return the plans on a mesh, for which a front is traced once.

        The result is None if there can be no plans, and `left_out` says why.
        """
        if mesh not in self._plans:
            self._plans[mesh] = None
            try:
                self._plans[mesh] = self._plans_on(mesh)
            except (SpecError, StateError, OptimizerError, UserWarning) as error:
                if len(self.meshes) == 1:
                    raise
                self.left_out[mesh] = str(error).splitlines()[0]
        return self._plans[mesh]

    def _plans_on(self, mesh: Mesh) -> MeshPlans:
        part = self.batch
        if len(self.meshes) > 1:
            part = next(split_batch(self.batch, mesh.data_size, "parts for ranks"))
        with warnings.catch_warnings():
            if len(self.meshes) > 1:
                warnings.simplefilter("error", UserWarning)  # leaves that an axis leaves whole
            base = self.specs(mesh)
        step = Step(self.fn, base, mesh, self.optimizer, self.options)
        step.resolve(self.params)
        plans = MeshPlans(step, part, self.work, self._kernels)
        if mesh.stages > 1 and len(self.meshes) > 1:
            # A step that a pipeline cannot run is refused when it is lowered.
            if plans.divisors[-1] < mesh.stages:
                raise SpecError(f"{mesh.stages} stages, and rows for {plans.divisors[-1]} micro-batches")
            plans.lower(Choice(mesh, plans.fewest), verified=False)
        return plans

    # -------------------------------------------------------------- what a walk asks for
    def starts(self) -> Iterator[Choice]:
        """Yield the plan of each mesh that saves nothing."""
        for number, mesh in enumerate(self.meshes, 1):
            self.work.murmur(f"mesh {number} of {len(self.meshes)}, {mesh}")
            if (plans := self.on(mesh)) is not None:
                yield Choice(mesh, plans.fewest)

    def is_valid(self, choice: Choice) -> bool:
        """Return whether there is such a plan.

        Its mesh has to have plans, and the batch to be cut into so many micro-batches. One micro-batch has
        the order "depth". "zero_bubble" needs stages, whose idle time it fills. A stage has to have so many
        chunks.
        """
        plans = self.on(choice.mesh)
        is_cut = choice.accumulate > 1 or choice.order == "depth"
        is_cut = is_cut and (choice.order != "zero_bubble" or choice.mesh.stages > 1)
        known = plans is not None and choice.accumulate in plans.divisors
        return known and is_cut and choice.chunks in plans.chunks

    def moves(self) -> dict[str, list[Move]]:
        """Return the moves by decision.

        A move makes more or fewer micro-batches, changes their order, the chunks of a stage, what is on the
        host or how far ahead units are gathered, or hands a factor from one axis of the mesh to another.
        """

        def set_field(name: str, value: Any) -> Move:
            return lambda choice: replace(choice, **{name: value}) if self.on(choice.mesh).has(name) else None

        def set_order(order: MicroOrder, memory: float) -> Move:
            return lambda choice: replace(choice, order=order, zero_bubble_memory=memory)

        def change_micro_batches(by: int) -> Move:
            def move(choice: Choice) -> Choice | None:
                divisors = self.on(choice.mesh).divisors
                at = divisors.index(choice.accumulate) + by if choice.accumulate in divisors else -1
                return replace(choice, accumulate=divisors[at]) if 0 <= at < len(divisors) else None

            return move

        def change_chunks(by: int) -> Move:
            def move(choice: Choice) -> Choice | None:
                counts = self.on(choice.mesh).chunks
                at = counts.index(choice.chunks) + by if choice.chunks in counts else -1
                return replace(choice, chunks=counts[at]) if 0 <= at < len(counts) else None

            return move

        def change_prefetch_depth(by: int) -> Move:
            def move(choice: Choice) -> Choice | None:
                depth, plans = choice.prefetch_depth + by, self.on(choice.mesh)
                may_pay = by < 0 or choice.prefetch_depth == 0 or choice in self._waits_for_collectives
                is_depth = 0 <= depth <= MAX_KERNELS_AHEAD and plans.has("prefetch_depth")
                return replace(choice, prefetch_depth=depth) if is_depth and may_pay else None

            return move

        return {
            "micro-batches": [change_micro_batches(1), change_micro_batches(-1)],
            "order": [set_order(*each) for each in ORDERS],
            "chunks": [change_chunks(1), change_chunks(-1)],
            "optimizer": [set_field("optimizer", each) for each in OPTIMIZER],
            "parameters": [set_field("parameters_on_host", each) for each in (False, True)],
            "prefetch_depth": [change_prefetch_depth(1), change_prefetch_depth(-1)],
            "mesh": self._hand_overs(),
        }

    def _hand_overs(self) -> list[Move]:
        """Return the moves that hand a factor from one axis to another, between the meshes that there are."""
        by_sizes = (
            {tuple(_sizes(mesh).values()): mesh for mesh in self.meshes} if len(self.meshes) > 1 else {}
        )

        def hand_over(prime: int, source: str, target: str) -> Move:
            def move(choice: Choice) -> Choice | None:
                sizes = _sizes(choice.mesh)
                if sizes[source] % prime:
                    return None
                sizes[source] //= prime
                sizes[target] *= prime
                mesh = by_sizes.get(tuple(sizes.values()))
                if mesh is None or self.on(mesh) is None:
                    return None
                return replace(choice, mesh=mesh, chunks=choice.chunks if mesh.stages > 1 else None)

            return move

        ranks = max((mesh.size for mesh in by_sizes.values()), default=1)
        primes = [p for p in range(2, ranks + 1) if ranks % p == 0 and all(p % q for q in range(2, p))]
        return [hand_over(p, *pair) for p in primes for pair in itertools.permutations(AXES, 2)]

    def dials(self, choice: Choice) -> list[Dial]:
        """Return a dial for each way to recompute.

        Its levels first stop keeping units gathered, one at a time from the first, and then recompute them in
        the same order.
        """
        plans = self.on(choice.mesh)
        count = len(plans.units)
        kept = count if plans.gathers else 0

        def dial(remat: str | float) -> Dial:
            def at(level: int) -> Choice:
                again = max(0, level - kept)
                way = remat if again else REMAT_CHOICES[0]
                return replace(choice, remat=way, recomputed=again, kept=max(0, kept - level))

            return Dial(kept + count, at)

        return [dial(remat) for remat in REMAT_CHOICES]

    def returning_dials(self, choice: Choice) -> list[Dial]:
        """Return the dial that keeps units gathered again, if recomputation has saved too much."""
        plans = self.on(choice.mesh)
        count = len(plans.units)
        if not choice.recomputed or not plans.gathers:
            return []
        return [Dial(count, lambda level: replace(choice, kept=count - level))]

    def neighbours(self, choice: Choice) -> list[Choice]:
        """Return the plans on the same mesh that differ in one decision, or in one unit."""
        plans = self.on(choice.mesh)
        count, moves = len(plans.units), self.moves()
        out = [move(choice) for name in ("micro-batches", "order", "chunks") for move in moves[name]]
        out += [replace(choice, recomputed=n) for n in (choice.recomputed - 1, choice.recomputed + 1)
                if 0 <= n <= count]  # fmt: skip
        out += [replace(choice, kept=n) for n in (choice.kept - 1, choice.kept + 1)
                if 0 <= n <= count and plans.gathers]  # fmt: skip
        out += [replace(choice, remat=remat) for remat in REMAT_CHOICES if choice.recomputed]
        out += [
            move(choice) for name in ("optimizer", "parameters", "prefetch_depth") for move in moves[name]
        ]
        plain = [c if c.recomputed else replace(c, remat=REMAT_CHOICES[0]) for c in out if c is not None]
        return [c for c in dict.fromkeys(plain) if c != choice and self.is_valid(c)]

    def frugal(self) -> Iterator[Choice]:
        """Yield the plans of each mesh that save as much as possible, with and without parameters on the
        host."""
        for mesh in self.meshes:
            if (plans := self.on(mesh)) is not None:
                rest = {"optimizer": "host"} if plans.has("optimizer") else {}
                for on_host in (False, True) if plans.has("parameters_on_host") else (False,):
                    base = Choice(mesh, plans.divisors[-1], parameters_on_host=on_host,
                                  prefetch_depth=0 if plans.has("prefetch_depth") else 1,
                                  **rest)  # fmt: skip
                    yield from (dial.at(dial.levels) for dial in self.dials(base))

    def price(self, choice: Choice) -> Candidate:
        """Lower a plan and return its predicted bytes and seconds."""
        self.work.murmur(f"{choice} on {choice.mesh}")
        lowered = self.lower(choice, verified=False)
        self.work.count_schedule(sum(len(schedule.instructions) for schedule in lowered.schedules))
        found = price(choice, lowered.memory_analysis(), lowered.timeline(self.hardware))
        if self.hardware.overlap and found.waits_for_collectives():
            self._waits_for_collectives.add(choice)
        return found

    def lower(self, choice: Choice, *, verified: bool = True) -> Lowered:
        """Lower the step of a plan, without compiling anything."""
        return self.on(choice.mesh).lower(choice, verified)


class MeshPlans:
    """The plans of one mesh, which share the layouts to start from, units and traces.

    `base` has the specs to start from, and `divisors` the numbers of equal micro-batches into which the batch
    can be cut. `units` may be recomputed or kept, in this order. `chunks` has the numbers of chunks that a
    stage may have, among them None for that of the specs.
    """

    def __init__(self, step: Step, batch: Arguments, work: SearchEffort, kernels: dict[str, Kernel]):
        self._step, self.base, self._batch = step, step.specs, batch
        self._work, self._kernels = work, kernels
        self._fronts: dict[int, Front] = {}
        self.divisors = _divisors(batch)
        front = self._front(1)
        # A batch is not cut if `fn` has an exchange over a data axis, since that would be another function.
        if any(set(each.axes) & set(step.mesh.data_axes) for each in front.segments.exchanges):
            self.divisors = [1]
        # The last segment's backward follows its forward at once, so its units are neither recomputed nor
        # kept.
        segments = [s for s in front.segments.segments if s.units]
        last = segments[-1].units if segments else ()
        found = dict.fromkeys(u for s in segments for u in s.units)
        self.units = tuple(u for u in found if u not in last)
        specs = tree.flatten(self.base, is_spec)[0]
        self.chunks = self._chunks(specs)
        self.gathers = any(step.mesh.ordered(s.storage.axes) for s in specs)
        trained = [s for s in specs if s.trainable]
        self._movable = {
            "optimizer": any(s.optimizer_memory == "device" for s in trained),
            "parameters_on_host": any(s.memory == "device" for s in trained),
            "prefetch_depth": step.options.passes is None,  # the user's passes have a depth of their own
        }

    @property
    def fewest(self) -> int:
        """Return the fewest micro-batches to begin with, which is 1, or as many as stages can share."""
        stages = self._step.mesh.stages
        enough = [d for d in self.divisors if d >= stages]
        return next((d for d in enough if d % stages == 0), next(iter(enough), self.divisors[-1]))

    def _chunks(self, specs: Sequence[LayoutSpec]) -> tuple[int | None, ...]:
        """Return the numbers of chunks that a stage may have, with which `fn` reads their leaves in order."""
        mesh, counts = self._step.mesh, [None]
        if mesh.stages == 1:
            return (None,)
        segments = self._front(1).segments
        for count in (2**n for n in range(1, MOST_CHUNKS.bit_length())):
            try:
                stored = ResolvedSpecs.of(self._specs_in_chunks(self.base, count)).stored
                assign_chunks(segments, stored, mesh)
            except SpecError:
                break
            counts.append(count)
        return tuple(counts)

    def _specs_in_chunks(self, specs: Any, chunks: int) -> Any:
        """Return a spec tree with so many chunks a stage. Leaves that all stages hold stay with all."""
        named, structure = tree.flatten_with_paths(specs, is_spec)
        cut = {path: spec for path, spec in named.items() if spec.chunk != "all"}
        leaves = {path: torch.empty(s.shape, dtype=s.storage_dtype, device="meta") for path, s in cut.items()}
        units = {path: spec.unit for path, spec in cut.items()}
        computes = {path: spec.compute for path, spec in cut.items()}
        chunk_of = presets.cut_chunks(leaves, units, self._step.mesh, chunks, computes)
        new = {path: replace(spec, chunk=chunk_of.get(path, spec.chunk)) for path, spec in named.items()}
        return tree.unflatten(list(new.values()), structure)

    def has(self, name: str) -> bool:
        """Return whether plans may differ in such a field of `Choice`."""
        return self._movable[name]

    def _front(self, accumulate: int) -> Front:
        """Return the front that all plans with so many micro-batches share."""
        if accumulate not in self._fronts:
            step = self._step
            options = replace(step.options, accumulate=accumulate)
            cut = Step(step.fn, self.base, step.mesh, step.optimizer, options)
            self._fronts[accumulate] = self._batch.call(cut.front)
            self._work.count_program(len(self._fronts[accumulate].program.graph.nodes))
        return self._fronts[accumulate]

    def specs_of(self, choice: Choice) -> Any:
        """Return the spec tree of a plan."""
        kept = set(self.units[len(self.units) - choice.kept :])

        def choose(spec: LayoutSpec) -> LayoutSpec:
            # State that the caller's specs rest on the host or on disk stays there.
            changes: dict[str, Any] = {"reshard": spec.unit not in kept} if spec.unit in self.units else {}
            if choice.optimizer != "device" and spec.trainable and spec.optimizer_memory == "device":
                place = "device" if choice.optimizer == "streamed" else "host"
                changes |= {"optimizer_memory": "host", "update_on": place}
            if choice.parameters_on_host and spec.memory == "device":
                changes["memory"] = "host"
            return replace(spec, **changes)

        specs = tree.map(choose, self.base, is_leaf=is_spec)
        return specs if choice.chunks is None else self._specs_in_chunks(specs, choice.chunks)

    def options_of(self, choice: Choice) -> StepOptions:
        """Return the options of a plan."""
        units = self.units[: choice.recomputed]
        remat = {glob.escape(u): choice.remat for u in units} if units else "none"
        depth = choice.prefetch_depth
        how = {"prefetch": depth, "overlap": depth} if self.has("prefetch_depth") else {}
        how |= {"accumulate": choice.accumulate, "micro_order": choice.order}
        how |= {"zero_bubble_memory": choice.zero_bubble_memory}
        return replace(self._step.options, remat=remat, **how)

    def lower(self, choice: Choice, verified: bool) -> Lowered:
        front, options = self._front(choice.accumulate), self.options_of(choice)
        order = {"micro_order": choice.order, "zero_bubble_memory": choice.zero_bubble_memory}
        front = replace(front, settings=replace(front.settings, **order))
        specs, mesh = ResolvedSpecs.of(self.specs_of(choice)).stored, self._step.mesh
        stages = schedule_for(front, specs, mesh, options, self._kernels, verified, kernel_flops)
        sizes = bytes_of_batch(self._batch)
        return Lowered(stages, options, optimizer=self._step.optimizer, batch_bytes=sizes)


def meshes_of(ranks: int, near: int) -> Iterator[Mesh]:
    """Yield the meshes of so many ranks, those with fewer stages first, and among these those that shard
    most.

    The ranks of a tensor group are neighbours in a node of `near` ranks.
    """
    for pipeline in _divisors_of(ranks):
        rest = ranks // pipeline
        for tensor in (d for d in _divisors_of(rest) if d <= near):
            for shard in reversed(_divisors_of(rest // tensor)):
                axes = {"pipeline": pipeline, "replicate": rest // tensor // shard, "shard": shard}
                axes["tensor"] = tensor
                axes = {n: size for n, size in axes.items() if size > 1 or n == "shard"}
                yield make_mesh(**axes, abstract=True, device="cpu")


def preset_for(params: Any, mesh: Mesh) -> Any:
    """Return the specs of the preset that goes with a mesh's axes."""
    preset = presets.hybrid_shard if "replicate" in mesh.names else presets.full_shard
    return preset(params, mesh, tensor="tensor" if "tensor" in mesh.names else None)


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {name: mesh.axis_size(name) if name in mesh.names else 1 for name in AXES}


def _divisors(batch: Arguments) -> list[int]:
    """Return the numbers of equal micro-batches into which the batch can be cut."""
    named = tree.flatten_with_paths(batch)[0]
    rows = [v.shape[0] for v in named.values() if isinstance(v, Tensor) and v.dim()]
    scalars = any(isinstance(v, Tensor) and not v.dim() for v in named.values())
    return _divisors_of(math.gcd(*rows) if rows and not scalars else 1)


def _divisors_of(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
