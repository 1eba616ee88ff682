"""Space: the plans of a function, its parameters and a batch, on one mesh or on all meshes of so many ranks.

A plan says for each unit whether it is recomputed and whether it stays gathered. It says what is kept on the
host, how many micro-batches a step and how many chunks a stage of a pipeline has, and how many kernels ahead
leaves are gathered. Every plan that is priced is lowered completely.
"""

from __future__ import annotations

import glob
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
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
# A recomputed unit keeps half of what its backward needs, its inputs, or its inputs on the host. The order is
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
        optimizer: the place where its state is kept and updated: "device", "host", or "streamed", which is
            kept on the host and updated on the device.
        parameters_on_host: whether stored shards are kept on the host.
        prefetch_depth: the number of kernels by which gathers are issued earlier, and reductions waited for
            later.
        chunks: the number of chunks of each stage of a pipeline; None keeps the number of the base specs.
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
        """Return what is done to save memory, as numbers. Of plans that are as fast, the least is chosen."""
        offloads = int(self.optimizer != "device") + int(self.parameters_on_host)
        chunks = self.chunks or 0
        return offloads, self.accumulate, self.order != "depth", self.recomputed, -self.kept, chunks

    def __str__(self) -> str:
        # Micro-batches and their order, of which "depth" is the usual one and goes without saying.
        order = ""
        if self.order == "breadth":
            order = ", any number under way" if self.mesh.stages > 1 else " breadth-first"
        elif self.order == "zero_bubble":
            order = ", weight gradients apart"
            if self.zero_bubble_memory != 1:
                order += f" in {self.zero_bubble_memory:g} times the memory"
        parts = [f"{self.accumulate} micro-batch{'es' if self.accumulate > 1 else ''}{order}"]

        # What saves memory.
        parts.append(f"{self.recomputed} units remat={self.remat!r}" if self.recomputed else "no remat")
        parts.append(f"{self.kept} units kept gathered" if self.kept else "all resharded")
        offloaded = []
        if self.optimizer != "device":
            offloaded.append("optimizer" if self.optimizer == "host" else "optimizer (streamed)")
        if self.parameters_on_host:
            offloaded.append("parameters")
        if offloaded:
            parts.append(f"{' and '.join(offloaded)} on the host")

        # Chunks of stages, and a prefetch depth other than 1.
        if self.chunks is not None:
            parts.append(f"{self.chunks} chunk{'s' if self.chunks > 1 else ''} a stage")
        if self.prefetch_depth == 0:
            parts.append("no prefetch")
        elif self.prefetch_depth > 1:
            parts.append(f"{self.prefetch_depth} kernels ahead")
        return ", ".join(parts)


@dataclass
class FunctionSpace:
    """The plans of a function, as a `walk.Space`.

    Args:
        batch: the batch of one step, with all micro-batches. It is this rank's, or that of all ranks if there
            are several meshes.
        meshes: the meshes to choose from. If there are several, some moves hand a factor from one axis of the
            mesh to another.
        specs: a function from a mesh to the base specs on it, which plans change.
        work: a counter of the programs and schedules that are made.
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
    _waits_for_collectives: set[Choice] = field(default_factory=set)  # a greater prefetch depth may help them
    _kernels: dict[str, Kernel] = field(default_factory=dict)  # shared by meshes whose programs are alike

    def on(self, mesh: Mesh) -> MeshPlans | None:
        """Return the plans on a mesh, for which the function is traced once.

        The result is None if there can be no plans, and `left_out` says why.
        """
        if mesh not in self._plans:
            self._plans[mesh] = None
            try:
                self._plans[mesh] = self._make_plans(mesh)
            except (SpecError, StateError, OptimizerError, UserWarning) as error:
                if len(self.meshes) == 1:
                    raise
                self.left_out[mesh] = str(error).splitlines()[0]
        return self._plans[mesh]

    def _make_plans(self, mesh: Mesh) -> MeshPlans:
        """Make the plans on a mesh, or raise why there can be none."""
        is_choice = len(self.meshes) > 1
        batch = self.batch
        if is_choice:
            batch = next(split_batch(self.batch, mesh.data_size, "parts for ranks"))
        with warnings.catch_warnings():
            # A preset warns of leaves that an axis does not split: a mesh with such an axis is left out.
            if is_choice:
                warnings.simplefilter("error", UserWarning)
            base = self.specs(mesh)
        step = Step(self.fn, base, mesh, self.optimizer, self.options)
        step.resolve(self.params)
        plans = MeshPlans(step, batch, self.work, self._kernels)

        # Lowering raises an error for a step that a pipeline cannot run.
        if mesh.stages > 1 and is_choice:
            if plans.divisors[-1] < mesh.stages:
                raise SpecError(f"{mesh.stages} stages, and rows for {plans.divisors[-1]} micro-batches")
            plans.lower(Choice(mesh, plans.fewest), verified=False)
        return plans

    # -------------------------------------------------------------- what a walk asks for
    def starts(self) -> Iterator[Choice]:
        """Yield the plan of each mesh that saves no memory."""
        for number, mesh in enumerate(self.meshes, 1):
            self.work.murmur(f"mesh {number} of {len(self.meshes)}, {mesh}")
            if (plans := self.on(mesh)) is not None:
                yield Choice(mesh, plans.fewest)

    def is_valid(self, choice: Choice) -> bool:
        """Return whether there is such a plan."""
        plans = self.on(choice.mesh)
        if plans is None or choice.accumulate not in plans.divisors or choice.chunks not in plans.chunks:
            return False
        # A single micro-batch has no order, and "zero_bubble" fills the idle time of a pipeline's stages.
        if choice.accumulate == 1 and choice.order != "depth":
            return False
        return choice.order != "zero_bubble" or choice.mesh.stages > 1

    def moves(self) -> dict[str, list[Move]]:
        """Return the moves by decision.

        A move makes more or fewer micro-batches, or changes their order, the chunks of a stage, what is on
        the host, how far ahead units are gathered, or the sizes of two axes of the mesh.
        """

        # A move returns None if there is no such plan; `is_valid` refuses others.
        def set_field(name: str, value: Any) -> Move:
            return lambda choice: replace(choice, **{name: value}) if self.on(choice.mesh).has(name) else None

        def set_order(order: MicroOrder, memory: float) -> Move:
            return lambda choice: replace(choice, order=order, zero_bubble_memory=memory)

        # Counts of micro-batches and of chunks go up and down their lists. One that is not in the list, as
        # after a move to another mesh, has no neighbour.
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
                # A greater depth hides collectives: it cannot help a plan that does not wait for them.
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
            "mesh": self._make_mesh_moves(),
        }

    def _make_mesh_moves(self) -> list[Move]:
        """Return the moves between meshes that hand a prime factor from one axis to another."""
        if len(self.meshes) < 2:
            return []
        by_sizes = {tuple(_get_axis_sizes(mesh).values()): mesh for mesh in self.meshes}

        def hand_over(prime: int, source: str, target: str) -> Move:
            def move(choice: Choice) -> Choice | None:
                sizes = _get_axis_sizes(choice.mesh)
                if sizes[source] % prime:
                    return None
                sizes[source] //= prime
                sizes[target] *= prime
                mesh = by_sizes.get(tuple(sizes.values()))
                if mesh is None or self.on(mesh) is None:
                    return None
                return replace(choice, mesh=mesh, chunks=choice.chunks if mesh.stages > 1 else None)

            return move

        ranks = max(mesh.size for mesh in self.meshes)
        primes = [p for p in range(2, ranks + 1) if ranks % p == 0 and all(p % q for q in range(2, p))]
        return [hand_over(p, *pair) for p in primes for pair in itertools.permutations(AXES, 2)]

    def dials(self, choice: Choice) -> list[Dial]:
        """Return a dial for each kind of recomputation.

        Its levels first stop keeping units gathered, one at a time from the first, and then recompute them in
        the same order.
        """
        plans = self.on(choice.mesh)
        count = len(plans.units)
        most_kept = count if plans.gathers else 0

        def make_dial(remat: str | float) -> Dial:
            def at(level: int) -> Choice:
                recomputed = max(0, level - most_kept)
                return replace(
                    choice,
                    # Plans without recomputation are the same one, whatever the dial.
                    remat=remat if recomputed else REMAT_CHOICES[0],
                    recomputed=recomputed,
                    kept=max(0, most_kept - level),
                )

            return Dial(most_kept + count, at)

        return [make_dial(remat) for remat in REMAT_CHOICES]

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

        # One unit more or fewer that is recomputed, or kept; and another kind of recomputation.
        for n in (choice.recomputed - 1, choice.recomputed + 1):
            if 0 <= n <= count:
                out.append(replace(choice, recomputed=n))
        for n in (choice.kept - 1, choice.kept + 1):
            if 0 <= n <= count and plans.gathers:
                out.append(replace(choice, kept=n))
        if choice.recomputed:
            out += [replace(choice, remat=remat) for remat in REMAT_CHOICES]
        out += [
            move(choice) for name in ("optimizer", "parameters", "prefetch_depth") for move in moves[name]
        ]

        # Plans without recomputation are the same one, whatever kind they name.
        plain = [c if c.recomputed else replace(c, remat=REMAT_CHOICES[0]) for c in out if c is not None]
        return [c for c in dict.fromkeys(plain) if c != choice and self.is_valid(c)]

    def frugal(self) -> Iterator[Choice]:
        """Yield the plans of each mesh that save as much as possible, with parameters on device and host."""
        for mesh in self.meshes:
            plans = self.on(mesh)
            if plans is None:
                continue
            for on_host in (False, True) if plans.has("parameters_on_host") else (False,):
                base = Choice(
                    mesh,
                    accumulate=plans.divisors[-1],
                    optimizer="host" if plans.has("optimizer") else "device",
                    parameters_on_host=on_host,
                    prefetch_depth=0 if plans.has("prefetch_depth") else 1,
                )
                yield from (dial.at(dial.levels) for dial in self.dials(base))

    def price(self, choice: Choice) -> Candidate:
        """Lower a plan and return its predicted bytes and seconds."""
        self.work.murmur(f"{choice} on {choice.mesh}")
        lowered = self.lower(choice, verified=False)
        self.work.count_schedule(sum(len(schedule.instructions) for schedule in lowered.schedules))
        candidate = price(choice, lowered.memory_analysis(), lowered.timeline(self.hardware))
        if self.hardware.overlap and candidate.waits_for_collectives():
            self._waits_for_collectives.add(choice)
        return candidate

    def lower(self, choice: Choice, *, verified: bool = True) -> Lowered:
        """Lower the step of a plan, without compiling anything."""
        return self.on(choice.mesh).lower(choice, verified)


class MeshPlans:
    """The plans of one mesh, which share base specs, units and traces.

    `base` has the specs that plans change, and `divisors` the numbers of equal micro-batches into which the
    batch can be cut. `units` may be recomputed or kept, in this order. `chunks` has the numbers of chunks
    that a stage may have, and None for the number of the base specs.
    """

    def __init__(self, step: Step, batch: Arguments, work: SearchEffort, kernels: dict[str, Kernel]):
        self._step, self.base, self._batch = step, step.specs, batch
        self._work, self._kernels = work, kernels
        self._fronts: dict[int, Front] = {}

        # A batch can be cut where all its tensors have rows. It is not cut if `fn` has an exchange over a
        # data axis, since that would be another function.
        named = tree.flatten_with_paths(batch)[0]
        rows = [v.shape[0] for v in named.values() if isinstance(v, Tensor) and v.dim()]
        has_scalars = any(isinstance(v, Tensor) and not v.dim() for v in named.values())
        self.divisors = _list_divisors(math.gcd(*rows) if rows and not has_scalars else 1)
        front = self._trace_front(1)
        if any(set(each.axes) & set(step.mesh.data_axes) for each in front.segments.exchanges):
            self.divisors = [1]

        # The last segment's backward follows its forward at once, so its units are neither recomputed nor
        # kept.
        segments = [s for s in front.segments.segments if s.units]
        last = segments[-1].units if segments else ()
        units = dict.fromkeys(u for s in segments for u in s.units)
        self.units = tuple(u for u in units if u not in last)

        # The fields in which plans may differ depend on what the base specs leave open.
        specs = tree.flatten(self.base, is_spec)[0]
        self.chunks = self._find_chunk_counts()
        self.gathers = any(step.mesh.ordered(s.storage.axes) for s in specs)
        trained = [s for s in specs if s.trainable]
        self._movable = {
            "optimizer": any(s.optimizer_memory == "device" for s in trained),
            "parameters_on_host": any(s.memory == "device" for s in trained),
            "prefetch_depth": step.options.passes is None,  # the user's passes set their own depth
        }

    @property
    def fewest(self) -> int:
        """Return the fewest micro-batches to begin with: 1, or enough to keep all stages busy."""
        stages = self._step.mesh.stages
        # A multiple of the stages is best, then any number that is not less, and at worst the most there is.
        enough = [d for d in self.divisors if d >= stages]
        return next((d for d in enough if d % stages == 0), next(iter(enough), self.divisors[-1]))

    def _find_chunk_counts(self) -> tuple[int | None, ...]:
        """Return the numbers of chunks that a stage may have, for which `fn` reads their leaves in order."""
        mesh, counts = self._step.mesh, [None]
        if mesh.stages == 1:
            return (None,)
        segments = self._trace_front(1).segments
        for count in (2**n for n in range(1, MOST_CHUNKS.bit_length())):
            try:
                stored = ResolvedSpecs.of(self._cut_specs(self.base, count)).stored
                assign_chunks(segments, stored, mesh)
            except SpecError:
                break
            counts.append(count)
        return tuple(counts)

    def _cut_specs(self, specs: Any, chunks: int) -> Any:
        """Return a spec tree with so many chunks a stage. Leaves that all stages hold are not cut."""
        named, structure = tree.flatten_with_paths(specs, is_spec)
        cut = {path: spec for path, spec in named.items() if spec.chunk != "all"}
        leaves = {path: torch.empty(s.shape, dtype=s.storage_dtype, device="meta") for path, s in cut.items()}
        units = {path: spec.unit for path, spec in cut.items()}
        computes = {path: spec.compute for path, spec in cut.items()}
        chunk_of = presets.cut_chunks(leaves, units, self._step.mesh, chunks, computes)
        new = {path: replace(spec, chunk=chunk_of.get(path, spec.chunk)) for path, spec in named.items()}
        return tree.unflatten(list(new.values()), structure)

    def has(self, name: str) -> bool:
        """Return whether plans may differ in this field of `Choice`."""
        return self._movable[name]

    def _trace_front(self, accumulate: int) -> Front:
        """Return the traced function, which all plans with so many micro-batches share."""
        if accumulate not in self._fronts:
            step = self._step
            options = replace(step.options, accumulate=accumulate)
            accumulating = Step(step.fn, self.base, step.mesh, step.optimizer, options)
            self._fronts[accumulate] = self._batch.call(accumulating.front)
            self._work.count_program(len(self._fronts[accumulate].program.graph.nodes))
        return self._fronts[accumulate]

    def specs_of(self, choice: Choice) -> Any:
        """Return the spec tree of a plan."""
        kept = set(self.units[len(self.units) - choice.kept :])

        def choose(spec: LayoutSpec) -> LayoutSpec:
            changes: dict[str, Any] = {}
            if spec.unit in self.units:
                changes["reshard"] = spec.unit not in kept
            # State that the caller's specs keep on the host or on disk stays there.
            if choice.optimizer != "device" and spec.trainable and spec.optimizer_memory == "device":
                place = "device" if choice.optimizer == "streamed" else "host"
                changes |= {"optimizer_memory": "host", "update_on": place}
            if choice.parameters_on_host and spec.memory == "device":
                changes["memory"] = "host"
            return replace(spec, **changes)

        specs = tree.map(choose, self.base, is_leaf=is_spec)
        return specs if choice.chunks is None else self._cut_specs(specs, choice.chunks)

    def options_of(self, choice: Choice) -> StepOptions:
        """Return the options of a plan."""
        units = self.units[: choice.recomputed]
        changes: dict[str, Any] = {
            "remat": {glob.escape(unit): choice.remat for unit in units} if units else "none",
            "accumulate": choice.accumulate,
            "micro_order": choice.order,
            "zero_bubble_memory": choice.zero_bubble_memory,
        }
        if self.has("prefetch_depth"):
            changes |= {"prefetch": choice.prefetch_depth, "overlap": choice.prefetch_depth}
        return replace(self._step.options, **changes)

    def lower(self, choice: Choice, verified: bool) -> Lowered:
        """Lower the step of a plan."""
        front, options = self._trace_front(choice.accumulate), self.options_of(choice)
        # The trace does not depend on the order of micro-batches, which plans with one front may differ in.
        order = {"micro_order": choice.order, "zero_bubble_memory": choice.zero_bubble_memory}
        front = replace(front, settings=replace(front.settings, **order))
        specs, mesh = ResolvedSpecs.of(self.specs_of(choice)).stored, self._step.mesh
        stages = schedule_for(front, specs, mesh, options, self._kernels, verified, kernel_flops)
        sizes = bytes_of_batch(self._batch)
        return Lowered(stages, options, optimizer=self._step.optimizer, batch_bytes=sizes)


def list_meshes(ranks: int, ranks_per_node: int) -> Iterator[Mesh]:
    """Yield the meshes of so many ranks: fewer stages first, and then smaller tensor groups and more shards.

    The ranks of a tensor group are on one node.
    """
    for pipeline in _list_divisors(ranks):
        per_stage = ranks // pipeline
        for tensor in _list_divisors(per_stage):
            if tensor > ranks_per_node:
                continue
            for shard in reversed(_list_divisors(per_stage // tensor)):
                replicate = per_stage // tensor // shard
                axes = {"pipeline": pipeline, "replicate": replicate, "shard": shard, "tensor": tensor}
                axes = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
                yield make_mesh(**axes, abstract=True, device="cpu")


def choose_preset(params: Any, mesh: Mesh) -> Any:
    """Return the specs of the preset for a mesh's axes."""
    preset = presets.hybrid_shard if "replicate" in mesh.names else presets.full_shard
    return preset(params, mesh, tensor="tensor" if "tensor" in mesh.names else None)


def _get_axis_sizes(mesh: Mesh) -> dict[str, int]:
    return {name: mesh.axis_size(name) if name in mesh.names else 1 for name in AXES}


def _list_divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
