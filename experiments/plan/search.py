"""Search: the plans of a configuration on so many devices, which `fnshard.search.walk` walks through.

A plan's step is lowered at two small depths, with two and three micro-batches, and carried on from there:
layers are alike, so time and memory are affine in both. Of a pipeline it is lowered with few stages, few
layers in each chunk and few micro-batches: the time of a step is affine in each of these, too, while
micro-batches come in groups as large as the pipeline. The plan that is chosen is lowered in full.

How much is recomputed is the dial of a plan, in 200ths of what a backward reads. `remat="offload"` is not
tried.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import fnshard as fs
from experiments.lib.checks import counted
from experiments.lib.config import MeshConfig, ScheduleConfig
from experiments.lib.plan import axis_of, dtypes_of
from experiments.lib.task import make_optimizer
from experiments.plan.config import DEVICE_SHARE, PlanConfig, layer_of
from experiments.plan.unroll import unroll
from fnshard.analysis.flops import kernel_flops
from fnshard.analysis.memory import MemoryTimeline
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.compiler.lower import Front, schedule_for
from fnshard.compiler.schedule.instructions import Run
from fnshard.compiler.schedule.tasks import MicroOrder
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.plot.scales import byte_text, rough, time_text
from fnshard.search.price import MAX_KERNELS_AHEAD, PARTS, Candidate, price
from fnshard.search.walk import Dial, Move, SearchEffort, Walk
from fnshard.step.batches import bytes_of_batch
from fnshard.step.lowered import Lowered
from fnshard.step.plan import plan_of
from fnshard.step.step import Step

TRACED = 4  # layers, in the place of more
DEPTHS = (4, 5)  # numbers of layers that are lowered; more where kernels further ahead count
STAGES = (3, 4)  # of a pipeline, that are lowered in the place of more
GROUPS = (2, 3)  # of micro-batches, likewise, each as many as there are stages
MOST_CHUNKS = 8  # of a stage
ENDS = 2  # of a decoder, besides its layers, that may be a chunk each: the embedding and the head
FAMILIES = 6  # of plans, whose traces are kept
AXES = ("replicate", "shard", "tensor", "context", "pipeline", "expert")
SHARES = 200  # what a segment keeps for its backward is chosen in so many parts of what the backward reads
PIPELINE_SHARES = 20  # likewise, in a pipeline
LIMIT_LINES = 400_000  # of programs and schedules, that a search makes: ten minutes' work or so
TIERS = {  # of the optimizer's state
    "device": {},
    "streamed": {"optimizer_memory": "host", "update_on": "device"},
    "host": {"optimizer_memory": "host"},
}


@dataclass(frozen=True)
class Knobs:
    """A plan.

    Args:
        micro_rows: of a rank's micro-batch.
        order: in which micro-batches run, see `StepOptions.micro_order`.
        keep: leaves stay gathered until their backward.
        optimizer_dtype: None is the precision's.
        prefetch, overlap: how many kernels ahead gathers are issued, and later reductions waited for.
        chunks: of each stage of a pipeline.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    micro_rows: int = 1
    order: MicroOrder = "depth"
    remat: str | float = "none"
    keep: bool = False
    optimizer: str = "device"
    optimizer_dtype: str | None = None
    prefetch: int = 1
    overlap: int = 1
    pipeline: int = 1
    chunks: int = 1
    expert: int = 1

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard * self.expert

    @property
    def mesh(self) -> MeshConfig:
        return MeshConfig(**{n: getattr(self, n) for n in AXES})

    @property
    def effort(self) -> tuple[float, ...]:
        """Return what is done to save memory, as numbers: of plans that are as fast the least is chosen."""
        return ((self.optimizer != "device") + 1 - {"none": 1.0, "unit": 0.0}.get(self.remat, self.remat),)

    @property
    def reach(self) -> int:
        """Return how many layers, with its own, hold what is gathered and reduced during a kernel."""
        return max(self.prefetch, self.overlap) + 1

    @property
    def preset(self) -> str:
        """Return the name of one in `fnshard.presets`, which is a strategy's, too."""
        return "hybrid_shard" if self.replicate > 1 else "shard_grad_op" if self.keep else "full_shard"

    @property
    def tiers(self) -> dict[str, str]:
        """Return where state rests, as fields of `LayoutSpec` and of a strategy."""
        return TIERS[self.optimizer]

    def overrides(self, rows: int) -> str:
        """Return the plan as arguments of `experiments.train` and `experiments.explain`."""
        accumulate = rows // self.data_ranks // self.micro_rows
        words = {
            "strategy": self.preset, "mesh.shard": self.shard, "data.rows": rows,
            **{f"mesh.{n}": v for n in AXES if n != "shard" and (v := getattr(self, n)) > 1},
            **({"strategy.chunks": self.chunks} if self.chunks > 1 else {}),
            **({"strategy.remat": self.remat} if self.remat != "none" else {}),
            **{f"strategy.{name}": value for name, value in self.tiers.items()},
            **({f"strategy.prefetch_{way}": self.prefetch for way in ("forward", "backward")}
               if self.prefetch != 1 else {}),
            **({"strategy.overlap": self.overlap} if self.overlap != 1 else {}),
            **({"run.accumulate": accumulate} if accumulate > 1 else {}),
            **({"run.micro_order": self.order} if self.order != "depth" else {}),
            **({"precision.optimizer": self.optimizer_dtype} if self.optimizer_dtype else {}),
        }  # fmt: skip
        return " ".join(f"{key}={value}" for key, value in words.items())


@dataclass
class Family:
    """A store of traces, by depth and axes, and of kernels, which plans share whose micro-batches are split
    and shaped alike."""

    fronts: dict[Any, Front] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)


@dataclass
class Planner:
    """The plans of one configuration on so many devices, a `walk.Space`; it remembers those that it has
    looked at."""

    config: PlanConfig
    devices: int
    hardware: fs.Hardware
    work: SearchEffort = field(default_factory=SearchEffort)
    seen: dict[Knobs, Candidate] = field(default_factory=dict)
    _families: dict[Any, Family] = field(default_factory=dict)
    _optimizers: dict[Any, fs.optim.Optimizer] = field(default_factory=dict)
    _cuts: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by stages and chunks

    @property
    def budget(self) -> int:
        gigabytes = self.config.device_gb
        return int(DEVICE_SHARE * self.hardware.memory_bytes if gigabytes is None else gigabytes * 1e9)

    @property
    def walk(self) -> Walk:
        """Return the search through these plans."""
        return Walk(self, self.budget, self.work, self.seen, self.describe)

    def best(self, say: Callable[[str], None] = lambda text: None) -> Candidate:
        """Return the fastest plan that fits, see `Walk.run`, priced with all its layers.

        Raises:
            BudgetError: the devices cannot share the rows.
        """
        splits = len(list(self.splits()))
        if not splits:
            raise fs.BudgetError(self.nothing())
        self.work = SearchEffort(say, LIMIT_LINES)
        self.work.tell(f"{counted(splits, 'way')} to split {counted(self.devices, 'device')}")
        walk = self.walk
        best = walk.run()
        self.work.tell("the best plan is priced with all its layers")
        exact: dict[Knobs, Candidate] = {}
        while best.choice not in exact:
            exact[best.choice] = found = self.exact(best.choice)
            if walk.cost(found) <= walk.cost(best):
                break
            self.seen[best.choice] = found  # carried on from few layers, it looked better than it is
            best = walk.descend(walk.within_budget(best.choice))
        return exact[best.choice]

    def is_too_small(self) -> bool:
        """Return whether not even the plans that save most memory fit."""
        return not any(self.walk.price_once(knobs).fits(self.budget) for knobs in self.frugal())

    # -------------------------------------------------------------- which plans there are
    def is_valid(self, knobs: Knobs) -> bool:
        """Return whether the axes divide what they split, and all rows are taken."""
        axes = math.prod(getattr(knobs, axis) for axis in AXES)
        rows, own = self.config.batch_rows, knobs.data_ranks * knobs.micro_rows
        return (
            axes == self.devices and rows % own == 0 and self.is_piped(knobs)
            and knobs.tensor <= self.hardware.ranks_per_node
            and not (knobs.keep and knobs.replicate > 1)
            and (knobs.order == "depth" or rows > own)
            and self.config.is_split(knobs.mesh)
        )  # fmt: skip

    def is_piped(self, knobs: Knobs) -> bool:
        """Return whether there are layers for all chunks, and micro-batches in groups as large as the
        pipeline."""
        if knobs.pipeline == 1:
            return knobs.chunks == 1 and knobs.order != "zero_bubble"
        micro = self.config.batch_rows // (knobs.data_ranks * knobs.micro_rows)
        return (
            micro > 0 and micro % knobs.pipeline == 0 and knobs.order != "breadth"
            and self.config.is_layered and knobs.pipeline * knobs.chunks <= self.config.layers + ENDS
        )  # fmt: skip

    def splits(self) -> Iterator[Knobs]:
        """Yield each way to split rows' sequences and matrices, all other ranks a shard, or as many as can be
        an axis of experts; rows one by one."""
        near = self.hardware.ranks_per_node
        least = max(near, self.devices // math.gcd(self.devices, self.config.batch_rows))  # that share a row
        for tensor in _divisors(self.devices):
            for context in _divisors(self.devices // tensor):
                shard = self.devices // tensor // context
                for expert in dict.fromkeys((1, self.most_experts(shard))):
                    knobs = Knobs(1, shard // expert, tensor, context, expert=expert)
                    if tensor * context <= least and self.is_valid(knobs):
                        yield knobs

    def most_experts(self, ranks: int) -> int:
        """Return how many of some ranks can be an axis of experts."""
        return math.gcd(self.config.experts, ranks)

    def starts(self) -> Iterator[Knobs]:
        """Yield plans with a pipeline, then those of `splits`, with as many rows at a time as fit where all
        is kept.

        More ranks for a sequence, or for a matrix, are not looked at where fewer are slower than a plan that
        fits even with room for all: they exchange more. Pipelines come first, as they may rule out all these.
        """
        yield from self.pipelines()
        for _, splits in itertools.groupby(self.splits(), lambda knobs: knobs.tensor):
            slow: list[bool] = []
            for knobs in splits:
                rows = list(reversed(_divisors(self.config.batch_rows // knobs.data_ranks)))
                dial = Dial(len(rows) - 1, lambda level, k=knobs, r=rows: replace(k, micro_rows=r[level]))
                most = self.walk.price_once(dial.at(0))
                known = [c.seconds for c in self.seen.values() if c.fits(self.budget) and c is not most]
                limit = min(known, default=math.inf)
                slow.append(most.seconds >= limit)
                yield most.choice if slow[-1] else self.walk.least_that_fits(dial, limit).choice
                if slow[-1]:
                    break
            if slow[0]:
                break

    def pipelines(self) -> Iterator[Knobs]:
        """Yield a plan with a pipeline for each number of ranks that share a matrix, while more pay.

        It has so many stages that more are slower, as many chunks as there may be, rows one by one, and
        leaves that stay gathered.
        """
        found: list[Candidate] = []
        for tensor in (d for d in _divisors(self.devices) if d <= self.hardware.ranks_per_node):
            best: Candidate | None = None
            for pipeline in _divisors(self.devices // tensor)[1:]:
                chunks = (
                    2 ** min(MOST_CHUNKS, max((self.config.layers + ENDS) // pipeline, 1)).bit_length() // 2
                )
                shard = self.devices // tensor // pipeline
                expert = self.most_experts(shard)
                knobs = Knobs(
                    1, shard // expert, tensor, keep=True, remat="unit", pipeline=pipeline, chunks=chunks,
                    expert=expert,
                )  # fmt: skip
                if not self.is_valid(knobs):
                    continue
                next_one = self.walk.price_once(knobs)
                if best is not None and self.walk.cost(next_one) >= self.walk.cost(best):
                    break
                best = next_one
            if best is None:
                continue
            if found and self.walk.cost(best) >= self.walk.cost(found[-1]):
                break
            found.append(best)
            yield replace(best.choice, remat="none")

    def frugal(self) -> list[Knobs]:
        """Return the plans of each split that recompute all and rest the optimizer on the host."""
        return [replace(knobs, remat="unit", optimizer="host") for knobs in self.splits()]

    def dials(self, knobs: Knobs) -> list[Dial]:
        """Return the dial that recomputes a larger share of the layers at each level; of a pipeline, whose
        price takes seconds, in larger parts."""
        shares = min(SHARES, PIPELINE_SHARES) if knobs.pipeline > 1 else SHARES

        def at(level: int) -> Knobs:
            remat = {0: "none", shares: "unit"}.get(level, (shares - level + 1) / shares)
            return replace(knobs, remat=remat)

        return [Dial(shares, at)]

    def returning_dials(self, knobs: Knobs) -> list[Dial]:
        """Return none: a share of the layers that is recomputed has no second dial."""
        return []

    def neighbours(self, knobs: Knobs) -> list[Knobs]:
        """Return none: all decisions are moves."""
        return []

    def moves(self) -> dict[str, list[Move]]:
        """Return the moves by decision; a factor goes from one axis to another.

        A move gives None where there is none, and may give a plan that is not valid: two of them together may
        be.
        """

        def set_knob(name: str, value: Any) -> Move:
            return lambda knobs: replace(knobs, **{name: value})

        def take_rows(prime: int) -> Move:
            return lambda knobs: replace(knobs, micro_rows=knobs.micro_rows * prime)

        def leave_rows(prime: int) -> Move:
            return lambda knobs: (
                None if knobs.micro_rows % prime else replace(knobs, micro_rows=knobs.micro_rows // prime)
            )

        def hand_over(prime: int, source: str, target: str) -> Move:
            def move(knobs: Knobs) -> Knobs | None:
                size, other = getattr(knobs, source), getattr(knobs, target)
                return (
                    None if size % prime else replace(knobs, **{source: size // prime, target: other * prime})
                )

            return move

        def go_ahead(name: str, by: int) -> Move:
            def move(knobs: Knobs) -> Knobs | None:
                depth, found = getattr(knobs, name) + by, self.seen.get(knobs)
                may_pay = by < 0 or (found is not None and found.waits_for_collectives())
                is_depth = 1 <= depth <= MAX_KERNELS_AHEAD and self.hardware.overlap
                return replace(knobs, **{name: depth}) if is_depth and may_pay else None

            return move

        primes = _primes(self.config.batch_rows)
        return {
            "rows": [step(prime) for prime in primes for step in (take_rows, leave_rows)],
            "order": [set_knob("order", order) for order in get_args(MicroOrder)],
            "optimizer": [set_knob("optimizer", tier) for tier in TIERS],
            "keep": [set_knob("keep", keep) for keep in (False, True)],
            "chunks": [set_knob("chunks", 2**n) for n in range(MOST_CHUNKS.bit_length())],
            "ahead": [go_ahead(name, by) for name in ("prefetch", "overlap") for by in (1, -1)],
            "dtype": [set_knob("optimizer_dtype", d) for d in (None, *self.config.optimizer_dtypes)],
            "axes": [
                hand_over(prime, source, target)
                for prime in _primes(self.devices)
                for source, target in itertools.permutations(AXES, 2)
            ],
        }  # fmt: skip

    # -------------------------------------------------------------- what is predicted of one
    def price(self, knobs: Knobs) -> Candidate:
        """Return a plan's bytes and time, carried on from few layers, micro-batches and stages."""
        if knobs.pipeline > 1:
            return self._of_pipeline(knobs)
        layers, more = self.config.layers, self.config.odd_layers + 2 * (knobs.reach - 2)
        depths = tuple(depth + more for depth in DEPTHS)
        return self._predicted(knobs, depths if layers > depths[-1] else (layers,))

    def exact(self, knobs: Knobs) -> Candidate:
        """Return a plan's bytes and time, of all layers."""
        if knobs.pipeline > 1:
            lowered = self.lowered(knobs, self.config.layers, self.micro_batches(knobs))
            return price(knobs, lowered.memory_analysis(), lowered.timeline(self.hardware))
        return self._predicted(knobs, (self.config.layers,))

    def _of_pipeline(self, knobs: Knobs) -> Candidate:
        """Return the bytes and time of a plan with a pipeline, carried on along stages, groups of
        micro-batches and layers of a chunk, one after another; the fullest of the first two stages and the
        last two holds most."""
        counts = self.layers_by_chunk(knobs)
        most, groups = max(counts[1:-1] or counts), self.micro_batches(knobs) // knobs.pipeline
        least = max(knobs.reach, most - min(counts))
        by_depth = {}
        for depth in (least, least + 1) if most > least + 1 else (most,):
            fewer = [max(count - most + depth, 0) for count in (counts[0], most, counts[-1])]
            by_group = {}
            for group in GROUPS if groups > GROUPS[-1] else (groups,):
                by_stages = {}
                for stages in STAGES if knobs.pipeline > STAGES[-1] else (knobs.pipeline,):
                    ends = [fewer[1]] * (stages * knobs.chunks - 2)
                    layers = (fewer[0], *ends, fewer[2])
                    by_stages[stages] = self.measured_stages(knobs, layers, stages, group * stages)
                by_group[group] = _line(by_stages, knobs.pipeline)
            by_depth[depth] = _line(by_group, groups)
        found = _line(by_depth, most)
        peak = max(value for name, value in found.items() if isinstance(name, int))
        parts = {name: found[name] for name in PARTS}
        totals = peak, found["seconds"], found["host_bytes"]
        return Candidate(knobs, *totals, parts, found["flops"], found["peak_flops"])

    def layers_by_chunk(self, knobs: Knobs) -> list[int]:
        """Return how many layers each chunk has, as presets cut them."""
        key = knobs.pipeline, knobs.chunks
        if key in self._cuts:
            return self._cuts[key]
        subject = self.config.subject(self.config.layers)
        units, mesh = fs.units.numeric(subject.params), self.mesh(knobs)
        chunk_of = fs.presets.cut_chunks(subject.params, units, mesh, knobs.chunks)
        layers = {units[path]: chunk for path, chunk in chunk_of.items() if layer_of(units[path]) is not None}
        found = Counter(layers.values())
        self._cuts[key] = [found[chunk] for chunk in range(knobs.pipeline * knobs.chunks)]
        return self._cuts[key]

    def _predicted(self, knobs: Knobs, depths: tuple[int, ...]) -> Candidate:
        """Return a plan's bytes and time, carried on from steps of so many layers; which of a step's moments
        is the peak changes with the depth, so each of them is carried on."""
        micro, by_count = self.micro_batches(knobs), {}
        # Gradients are summed from the second micro-batch on. Breadth-first they hide what is gathered and
        # reduced once, so that time is no line in their number.
        is_line = micro > 3 and knobs.order == "depth"
        for count in (2, 3) if is_line else (micro,):
            found = _line({d: self.measured(knobs, d, count) for d in depths}, self.config.layers)
            by_count[count] = {n: v for n, v in found.items() if isinstance(n, str)}
            if len(depths) > 1:  # else the peak is known, and no layer stands for others
                by_count[count]["peak"] = max(v for n, v in found.items() if isinstance(n, tuple))
        found = _line(by_count, micro)
        parts = {name: found[name] for name in PARTS}
        totals = (found[name] for name in ("peak", "seconds", "host_bytes"))
        return Candidate(knobs, *totals, parts, found["flops"], found["peak_flops"])

    def micro_batches(self, knobs: Knobs) -> int:
        return self.config.batch_rows // knobs.data_ranks // knobs.micro_rows

    def measured(self, knobs: Knobs, layers: int, micro: int) -> dict[Any, float]:
        """Return the price of a step of so many layers and micro-batches, and its bytes by `_moments`."""
        lowered = self.lowered(knobs, layers, micro)
        found = price(knobs, lowered.memory_analysis(), lowered.timeline(self.hardware))
        return _moments(lowered.memory_timeline(), layers, knobs.reach) | found.parts | {
            "peak": found.peak_bytes, "seconds": found.seconds, "host_bytes": found.host_bytes,
            "flops": found.flops, "peak_flops": found.peak_flops,
        }  # fmt: skip

    def measured_stages(
        self, knobs: Knobs, layers: Sequence[int], stages: int, micro: int
    ) -> dict[Any, float]:
        """Return the price of a step of fewer stages, whose chunks have so many layers; and by stage, counted
        from the first and from the last, its peak."""
        lowered = self.lowered(replace(knobs, pipeline=stages), sum(layers), micro, layers)
        found = price(knobs, lowered.memory_analysis(), lowered.timeline(self.hardware))
        peaks = [lowered.memory_analysis(stage=stage).peak_bytes for stage in range(stages)]
        ends = {0: peaks[0], 1: peaks[1], -2: peaks[-2], -1: peaks[-1]}
        return {stage: float(peak) for stage, peak in ends.items()} | found.parts | {
            "seconds": found.seconds, "host_bytes": found.host_bytes,
            "flops": found.flops, "peak_flops": found.peak_flops,
        }  # fmt: skip

    def mesh(self, knobs: Knobs) -> fs.Mesh:
        """Make the plan's mesh: axes that split nothing are left out; those that exchange most lie in one
        node, as the last."""
        axes = {n: s for n, s in knobs.mesh.axes.items() if s > 1 or n == "shard"}
        return fs.make_mesh(**axes, device="cuda" if self.hardware.overlap else "cpu", abstract=True)

    def lowered(
        self, knobs: Knobs, layers: int, micro: int, by_chunk: Sequence[int] | None = None
    ) -> Lowered:
        """Lower the step of so many layers and micro-batches; plans that trace alike share traces.

        Args:
            by_chunk: of a pipeline, how many layers each chunk has; None is what the preset makes of it.
        """
        step, batch = self.step(knobs, layers, micro, by_chunk)
        family, mesh, optimizer = self._family(knobs), step.mesh, step.optimizer
        resolved, options = ResolvedSpecs.of(step.specs), step.options
        front = self.front(knobs, layers, step, batch)
        front = replace(front, plan=plan_of(optimizer, resolved, mesh, options).for_program(front.program))
        options = replace(options, remat=knobs.remat, prefetch=(knobs.prefetch,) * 2, overlap=knobs.overlap)
        stages = schedule_for(front, resolved.stored, mesh, options, family.kernels, False, kernel_flops)
        self.work.count_schedule(sum(len(schedule.instructions) for schedule in stages.schedules))
        sizes = bytes_of_batch(Arguments(batch, {}))
        return Lowered(stages, options, optimizer=optimizer, batch_bytes=sizes)

    def step(
        self, knobs: Knobs, layers: int, micro: int, by_chunk: Sequence[int] | None = None
    ) -> tuple[Step, tuple[Any, ...]]:
        """Make the step of so many layers and micro-batches; return it and a rank's batch."""
        mesh, subject = self.mesh(knobs), self.config.subject(layers)
        precision = self.config.precision
        precision = replace(precision, optimizer=knobs.optimizer_dtype or precision.optimizer)
        how = {axis: axis_of(axis, mesh) for axis in ("tensor", "expert")}
        how |= {**dtypes_of(precision), **knobs.tiers}
        specs = fs.presets.PRESETS[knobs.preset](subject.params, mesh, chunks=knobs.chunks, **how)
        if by_chunk is not None:
            specs = _with_chunks(specs, by_chunk)
        step = fs.shard_step(
            subject.loss, specs, mesh=mesh, optimizer=self._optimizer(subject.undecayed), grad_norm=True,
            accumulate=micro, micro_order=knobs.order, expert_capacity=self.config.mesh.expert_capacity,
        )  # fmt: skip
        step.resolve(subject.params)
        return step, subject.batch(knobs.micro_rows * micro)

    def front(self, knobs: Knobs, layers: int, step: Step, batch: tuple[Any, ...]) -> Front:
        """Return the trace of a step. Of many layers a few are traced, and stand for the others."""
        config, fronts = self.config, self._family(knobs).fronts
        # A function of one's own may look at the axes over which rows are split; the decoder does not.
        looked_at = () if config.is_decoder else (knobs.replicate, knobs.shard, knobs.pipeline > 1)
        key = layers, looked_at
        if key in fronts:
            return fronts[key]
        few = config.odd_layers + TRACED
        # Of stages a buffer is cut out, too.
        all_train = all(spec.trainable for spec in ResolvedSpecs.of(step.specs).stored.values())
        if config.is_layered and layers > few and (all_train or knobs.pipeline == 1):
            alone = replace(knobs, pipeline=1, chunks=1, order="depth")  # stages are cut where units are
            short = self.front(alone, few, *self.step(alone, few, 1))
            segments = unroll(short.segments, layers)
            if segments is not None:
                fronts[key] = replace(short, segments=segments)
                return fronts[key]
        fronts[key] = step.front(*batch)
        self.work.count_program(len(fronts[key].program.graph.nodes))
        return fronts[key]

    def _optimizer(self, undecayed: tuple[str, ...]) -> fs.optim.Optimizer:
        """Return the optimizer that all plans share, and with it the traces of its updates."""
        if undecayed not in self._optimizers:
            constant = ScheduleConfig(name="constant")
            self._optimizers[undecayed] = make_optimizer(self.config.optimizer, constant, 1, undecayed)
        return self._optimizers[undecayed]

    def _family(self, knobs: Knobs) -> Family:
        """Return what such plans share; of a few families alone, as traces take memory."""
        key = knobs.tensor, knobs.context, knobs.expert, knobs.micro_rows
        self._families[key] = self._families.pop(key, None) or Family()
        for oldest in list(self._families)[:-FAMILIES]:
            del self._families[oldest]
        return self._families[key]

    # -------------------------------------------------------------- what is said
    def describe(self, found: Candidate) -> str:
        """Return time and bytes of a plan in a few words, and what it is."""
        lacks = "" if found.fits(self.budget) else ", which is too much"
        words = found.choice.overrides(self.config.batch_rows)
        return f"{time_text(rough(found.seconds))}, {byte_text(found.peak_bytes)}{lacks}: {words}"

    def nothing(self) -> str:
        rows, parts = self.config.batch_rows, self.devices
        return (
            f"{counted(parts, 'device')} cannot share {rows:,} rows: "
            f"a rank has whole rows, and at most {self.hardware.ranks_per_node} share its matrices. "
            f"Fix: rows={math.lcm(rows, parts)}, or devices={math.gcd(rows, parts)}."
        )


def _moments(timeline: MemoryTimeline, layers: int, reach: int) -> dict[Any, float]:
    """Return the bytes of the device by line. A line is named by the unit of the kernel before it, a layer as
    counted from the first, and from the last; after the last kernel by its own. `reach` layers from either
    end are alike at all depths: what is gathered and reduced during a kernel is of its neighbours."""
    lines = [moment.instruction for moment in timeline.moments]
    last = max((n for n, line in enumerate(lines) if isinstance(line, Run)), default=0)
    out: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    kernel = "", ""
    for n, (line, moment) in enumerate(zip(lines, timeline.moments, strict=True)):
        if isinstance(line, Run):
            kernel = line.phase, line.unit
        phase, unit = kernel if n <= last else (line.verb, line.unit)
        nth = counts[phase, unit] = counts.get((phase, unit), 0) + 1
        out |= {(phase, name, nth): float(moment.bytes) for name in _numbered(unit, layers, reach)}
    return out


def _numbered(unit: str, layers: int, reach: int) -> list[Any]:
    """Return the names of a unit: its own; of a layer how far it is from the first and from the last, where
    it is near."""
    number = layer_of(unit)
    if number is None:
        return [unit]
    return [n for n in (number, number - layers) if -reach <= n < reach]


def _with_chunks(specs: Mapping[str, fs.LayoutSpec], by_chunk: Sequence[int]) -> dict[str, fs.LayoutSpec]:
    """Return specs of a decoder with so many layers in each chunk; what stands before all layers is of the
    first chunk, what stands behind them of the last."""
    chunk_of = [chunk for chunk, count in enumerate(by_chunk) for _ in range(count)]
    numbers = {path: layer_of(path) for path in specs}
    first = next(place for place, number in enumerate(numbers.values()) if number is not None)
    ends = {path: 0 if place < first else len(by_chunk) - 1 for place, path in enumerate(numbers)}
    return {
        path: replace(spec, chunk=ends[path] if numbers[path] is None else chunk_of[numbers[path]])
        for path, spec in specs.items()
    }


def _line(points: Mapping[int, Mapping[Any, float]], at: int) -> dict[Any, float]:
    """Return values at one place of lines through two points, of those that both have; with one point, its
    values."""
    (first, a), *more = points.items()
    if not more:
        return dict(a)
    second, b = more[0]
    share = (at - first) / (second - first)
    return {name: a[name] + share * (b[name] - a[name]) for name in a.keys() & b.keys()}


def _divisors(n: int) -> list[int]:
    return sorted({d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})


def _primes(n: int) -> list[int]:
    """Return the prime factors, each once."""
    return [p for p in _divisors(n) if p > 1 and all(p % q for q in range(2, math.isqrt(p) + 1))]
