"""Search: the plans of a configuration on a number of devices, which `fnshard.search.walk` walks through.

A plan is priced by lowering its step with few layers and few micro-batches, and by extrapolating to all of
them: layers are alike, so time and memory are affine in both numbers. With a pipeline the step is lowered
with few stages, too: time is affine in their number as well, while micro-batches come in groups as large as
the pipeline. The plan that is chosen is lowered in full.

The dial of a plan is how much it recomputes, in 200ths of what a backward reads. `remat="offload"` is not
tried.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import fnshard as fs
from experiments.lib.checks import pluralize
from experiments.lib.config import MeshConfig, ScheduleConfig
from experiments.lib.plan import axis_of, dtypes_of
from experiments.lib.task import make_optimizer
from experiments.plan.config import DEVICE_SHARE, PlanConfig, layer_of
from experiments.plan.unroll import lower_from, trace_few_layers
from fnshard.analysis.memory import MemoryTimeline
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.lower import Front
from fnshard.compiler.schedule.instructions import Run
from fnshard.compiler.schedule.tasks import MicroOrder
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.plot.scales import byte_text, rough, time_text
from fnshard.search.price import MAX_KERNELS_AHEAD, ORDERS, PARTS, Candidate, price
from fnshard.search.walk import Dial, Move, SearchEffort, Walk
from fnshard.step.lowered import Lowered
from fnshard.step.step import Step

DEPTHS = (4, 5)  # the numbers of layers that are lowered; more where kernels go further ahead
STAGES = (3, 4)  # the numbers of stages that are lowered in place of more
GROUPS = (2, 3)  # the numbers of groups of micro-batches that are lowered; a group has one for each stage
VALUES = ("seconds", "host_bytes", "flops", "peak_flops")  # extrapolated, besides the parts of the time
MOST_CHUNKS = 8  # the most chunks of a stage
ENDS = 2  # the units besides layers that may be a chunk each: the embedding and the head
CACHES = 6  # the most `TraceCache`s that are kept
AXES = ("replicate", "shard", "tensor", "context", "pipeline", "expert")
SHARES = 200  # the levels of the dial: parts of what a backward reads
PIPELINE_SHARES = 20  # the levels of the dial of a pipeline, whose price takes seconds
LIMIT_LINES = 400_000  # the lines of programs and schedules of a search, about ten minutes' work
TIERS = {  # where the optimizer's state is stored, and where it is updated
    "device": {},
    "streamed": {"optimizer_memory": "host", "update_on": "device"},
    "host": {"optimizer_memory": "host"},
}


@dataclass(frozen=True)
class DecoderPlan:
    """A plan of a decoder's training step.

    Args:
        replicate, shard, tensor, context, pipeline, expert: the sizes of the mesh's axes.
        micro_rows: the rows of a rank's micro-batch.
        order: the order of micro-batches, see `StepOptions.micro_order`.
        zero_bubble_memory: see `StepOptions`.
        remat: what is recomputed, see `StepOptions.remat`.
        keep: whether leaves stay gathered until their backward.
        optimizer: one of `TIERS`.
        optimizer_dtype: the dtype of the optimizer's state; None is the precision's.
        prefetch, overlap: how many kernels ahead gathers are issued, and how many kernels later reductions
            are waited for.
        chunks: the number of chunks of each stage of a pipeline.
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
    zero_bubble_memory: float = 1.0

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that have rows of their own."""
        return self.replicate * self.shard * self.expert

    @property
    def mesh(self) -> MeshConfig:
        """Return the axes as a group of the main job's configuration."""
        return MeshConfig(**{n: getattr(self, n) for n in AXES})

    @property
    def effort(self) -> tuple[float, ...]:
        """Return how much is done to save memory. Of equally fast plans the one with the least is chosen."""
        kept_share = {"none": 1.0, "unit": 0.0}.get(self.remat, self.remat)
        return ((self.optimizer != "device") + 1 - kept_share,)

    @property
    def reach(self) -> int:
        """Return how many layers have something gathered or reduced during a kernel, its own among them."""
        return max(self.prefetch, self.overlap) + 1

    @property
    def preset(self) -> str:
        """Return the name of the preset in `fnshard.presets`, which is also the strategy's."""
        if self.replicate > 1:
            return "hybrid_shard"
        return "shard_grad_op" if self.keep else "full_shard"

    @property
    def tiers(self) -> dict[str, str]:
        """Return where state is stored, as fields of `LayoutSpec` and of a strategy."""
        return TIERS[self.optimizer]

    def overrides(self, rows: int) -> str:
        """Return the plan as arguments of `experiments.train` and `experiments.explain`."""
        # Each key with its value, and whether it is named: always, or only if it differs from the default.
        accumulate = rows // self.data_ranks // self.micro_rows
        keys = [
            ("strategy", self.preset, True),
            ("mesh.shard", self.shard, True),
            ("data.rows", rows, True),
            *((f"mesh.{n}", getattr(self, n), getattr(self, n) > 1) for n in AXES if n != "shard"),
            ("strategy.chunks", self.chunks, self.chunks > 1),
            ("strategy.remat", self.remat, self.remat != "none"),
            *((f"strategy.{name}", value, True) for name, value in self.tiers.items()),
            ("strategy.prefetch_forward", self.prefetch, self.prefetch != 1),
            ("strategy.prefetch_backward", self.prefetch, self.prefetch != 1),
            ("strategy.overlap", self.overlap, self.overlap != 1),
            ("run.accumulate", accumulate, accumulate > 1),
            ("run.micro_order", self.order, self.order != "depth"),
            ("run.zero_bubble_memory", self.zero_bubble_memory, self.zero_bubble_memory != 1),
            ("precision.optimizer", self.optimizer_dtype, self.optimizer_dtype is not None),
        ]
        return " ".join(f"{key}={value}" for key, value, is_named in keys if is_named)


@dataclass
class TraceCache:
    """A cache of traces and kernels. Plans whose micro-batches are split and shaped alike share one.

    Args:
        fronts: the traces, by depth and by the axes that a function looks at.
    """

    fronts: dict[Any, Front] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)


@dataclass
class Planner:
    """A `walk.Space` of the plans of one configuration on a number of devices.

    Args:
        work: the effort of the search so far.
        seen: the plans that were priced.
    """

    config: PlanConfig
    devices: int
    hardware: fs.Hardware
    work: SearchEffort = field(default_factory=SearchEffort)
    seen: dict[DecoderPlan, Candidate] = field(default_factory=dict)
    _traces: dict[Any, TraceCache] = field(default_factory=dict)
    _optimizers: dict[Any, fs.optim.Optimizer] = field(default_factory=dict)
    _layers_by_chunk: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # see layers_by_chunk

    @property
    def budget(self) -> int:
        """Return the bytes of a device that a step may take."""
        gigabytes = self.config.device_gb
        return int(DEVICE_SHARE * self.hardware.memory_bytes if gigabytes is None else gigabytes * 1e9)

    @property
    def walk(self) -> Walk:
        """Return the search through these plans."""
        return Walk(self, self.budget, self.work, self.seen, self.describe)

    def find_best(self, say: Callable[[str], None] = lambda text: None) -> Candidate:
        """Return the fastest plan that fits, priced with all its layers; see `Walk.run`.

        Raises:
            BudgetError: the devices cannot share the rows.
        """
        splits = len(list(self.splits()))
        if not splits:
            raise fs.BudgetError(self.describe_misfit())
        self.work = SearchEffort(say, LIMIT_LINES)
        self.work.tell(f"{pluralize(splits, 'way')} to split {pluralize(self.devices, 'device')}")
        walk = self.walk
        best = walk.run()

        # Extrapolated from few layers, a plan may look better than it is. Then the walk goes on with its
        # exact price, until the best plan is one whose exact price is known.
        self.work.tell("the best plan is priced with all its layers")
        exact: dict[DecoderPlan, Candidate] = {}
        while best.choice not in exact:
            exact[best.choice] = exact_price = self.price_exactly(best.choice)
            if walk.cost(exact_price) <= walk.cost(best):
                break
            self.seen[best.choice] = exact_price
            best = walk.descend(walk.within_budget(best.choice))
        return exact[best.choice]

    def is_too_small(self) -> bool:
        """Return whether not even the plans that save most memory fit."""
        return not any(self.walk.price_once(plan).fits(self.budget) for plan in self.frugal())

    # -------------------------------------------------------------- the plans
    def is_valid(self, plan: DecoderPlan) -> bool:
        """Return whether the axes divide what they split, and all rows are taken."""
        axes = math.prod(getattr(plan, axis) for axis in AXES)
        rows, micro_batch = self.config.batch_rows, plan.data_ranks * plan.micro_rows
        return (
            axes == self.devices and rows % micro_batch == 0 and self.has_valid_pipeline(plan)
            and plan.tensor <= self.hardware.ranks_per_node
            and not (plan.keep and plan.replicate > 1)
            and (plan.order == "depth" or rows > micro_batch)
            and self.config.can_split(plan.mesh)
        )  # fmt: skip

    def has_valid_pipeline(self, plan: DecoderPlan) -> bool:
        """Return whether there are enough layers for all chunks, and micro-batches fill groups of the
        pipeline's size."""
        if plan.pipeline == 1:
            return plan.chunks == 1 and plan.order != "zero_bubble"
        micro = self.config.batch_rows // (plan.data_ranks * plan.micro_rows)
        return (
            micro > 0 and micro % plan.pipeline == 0 and plan.order != "breadth"
            and self.config.is_layered and plan.pipeline * plan.chunks <= self.config.layers + ENDS
        )  # fmt: skip

    def splits(self) -> Iterator[DecoderPlan]:
        """Yield a plan for each way to split matrices and sequences. The other ranks are the axis "shard",
        or as many of them as experts allow the axis "expert". Micro-batches have one row."""
        near = self.hardware.ranks_per_node
        # At least so many ranks share a row.
        least = max(near, self.devices // math.gcd(self.devices, self.config.batch_rows))
        for tensor in _find_divisors(self.devices):
            for context in _find_divisors(self.devices // tensor):
                shard = self.devices // tensor // context
                for expert in dict.fromkeys((1, self.find_expert_ranks(shard))):
                    plan = DecoderPlan(1, shard // expert, tensor, context, expert=expert)
                    if tensor * context <= least and self.is_valid(plan):
                        yield plan

    def find_expert_ranks(self, ranks: int) -> int:
        """Return how many of these ranks can form the axis "expert"."""
        return math.gcd(self.config.experts, ranks)

    def starts(self) -> Iterator[DecoderPlan]:
        """Yield plans of `splits`, with as many rows in a micro-batch as fit if nothing is recomputed. Plans
        with a pipeline follow the first of these.

        More ranks exchange more. So a split into more ranks is left out if one into fewer, with all the
        memory that it may want, is slower than a known plan that fits. Pipelines come early, since they may
        rule out all other splits; but their prices take longest, so they need a plan to be compared with.
        """
        pipelines = self.pipelines()
        for _, splits in itertools.groupby(self.splits(), lambda plan: plan.tensor):
            is_slow: list[bool] = []
            for plan in splits:
                # At level 0 of the dial a micro-batch has the most rows, and takes the most memory.
                rows = list(reversed(_find_divisors(self.config.batch_rows // plan.data_ranks)))
                dial = Dial(len(rows) - 1, lambda level, k=plan, r=rows: replace(k, micro_rows=r[level]))
                most = self.walk.price_once(dial.at(0))
                known = [c.seconds for c in self.seen.values() if c.fits(self.budget) and c is not most]
                limit = min(known, default=math.inf)
                is_slow.append(most.seconds >= limit)
                yield most.choice if is_slow[-1] else self.walk.least_that_fits(dial, limit).choice
                yield from pipelines  # the generator yields all of them after the first split, and then none
                if is_slow[-1]:
                    break
            if is_slow[0]:
                break

    def pipelines(self) -> Iterator[DecoderPlan]:
        """Yield a plan with a pipeline for each size of the axis "tensor", as long as a larger one is better.

        It has the number of stages that is the fastest of those that fit, as many chunks as possible, one row
        in a micro-batch, and leaves that stay gathered.
        """
        last: Candidate | None = None
        for tensor in (d for d in _find_divisors(self.devices) if d <= self.hardware.ranks_per_node):
            best: Candidate | None = None
            for plan in self.pipelines_of(tensor):
                candidate = self.walk.price_once(plan)
                if best is None or self.walk.cost(candidate) < self.walk.cost(best):
                    best = candidate
                elif best.fits(self.budget):
                    break
            if best is None:
                continue
            if last is not None and self.walk.cost(best) >= self.walk.cost(last):
                break
            last = best
            yield replace(best.choice, remat="none")

    def pipelines_of(self, tensor: int) -> list[DecoderPlan]:
        """Return plans that recompute everything, with more and more stages.

        The first has the fewest stages whose gathered leaves and gradients fit. If none fit, there is one
        plan, with the most stages.
        """
        plans = []
        for pipeline in _find_divisors(self.devices // tensor)[1:]:
            chunks = 2 ** min(MOST_CHUNKS, max((self.config.layers + ENDS) // pipeline, 1)).bit_length() // 2
            shard = self.devices // tensor // pipeline
            expert = self.find_expert_ranks(shard)
            plan = DecoderPlan(
                1, shard // expert, tensor, keep=True, remat="unit", pipeline=pipeline, chunks=chunks,
                expert=expert,
            )  # fmt: skip
            if self.is_valid(plan):
                plans.append(plan)

        # The gathered leaves and the gradients of a rank's part of the model have to fit.
        dtypes = dtypes_of(self.config.precision)
        kept = self.config.parameters * (dtypes["compute_dtype"].itemsize + dtypes["reduce_dtype"].itemsize)
        fitting = [p for p in plans if kept / (p.tensor * p.pipeline * p.expert) <= self.budget]
        return fitting or plans[-1:]

    def frugal(self) -> list[DecoderPlan]:
        """Return a plan for each split that recomputes everything and keeps the optimizer's state on the
        host."""
        return [replace(plan, remat="unit", optimizer="host") for plan in self.splits()]

    def dials(self, plan: DecoderPlan) -> list[Dial]:
        """Return the only dial of a plan, which recomputes more at each level."""
        shares = min(SHARES, PIPELINE_SHARES) if plan.pipeline > 1 else SHARES

        def at(level: int) -> DecoderPlan:
            remat = {0: "none", shares: "unit"}.get(level, (shares - level + 1) / shares)
            return replace(plan, remat=remat)

        return [Dial(shares, at)]

    def returning_dials(self, plan: DecoderPlan) -> list[Dial]:
        """Return no dials, since a plan has only one."""
        return []

    def neighbours(self, plan: DecoderPlan) -> list[DecoderPlan]:
        """Return no plans, since all decisions are moves."""
        return []

    def moves(self) -> dict[str, list[Move]]:
        """Return the moves by decision. Those of "axes" move a prime factor from one axis to another.

        A move gives None where it does not apply. It may give a plan that is not valid, since two moves
        together may give a valid one.
        """

        def set_field(name: str, value: Any) -> Move:
            return lambda plan: replace(plan, **{name: value})

        def set_order(order: MicroOrder, memory: float) -> Move:
            return lambda plan: replace(plan, order=order, zero_bubble_memory=memory)

        def multiply_rows(prime: int) -> Move:
            return lambda plan: replace(plan, micro_rows=plan.micro_rows * prime)

        def divide_rows(prime: int) -> Move:
            def move(plan: DecoderPlan) -> DecoderPlan | None:
                if plan.micro_rows % prime:
                    return None
                return replace(plan, micro_rows=plan.micro_rows // prime)

            return move

        def hand_over(prime: int, source: str, target: str) -> Move:
            def move(plan: DecoderPlan) -> DecoderPlan | None:
                size, other = getattr(plan, source), getattr(plan, target)
                if size % prime:
                    return None
                return replace(plan, **{source: size // prime, target: other * prime})

            return move

        def go_ahead(name: str, by: int) -> Move:
            def move(plan: DecoderPlan) -> DecoderPlan | None:
                # Going further ahead can only pay where kernels wait for collectives.
                depth, candidate = getattr(plan, name) + by, self.seen.get(plan)
                may_pay = by < 0 or (candidate is not None and candidate.waits_for_collectives())
                is_depth = 1 <= depth <= MAX_KERNELS_AHEAD and self.hardware.overlap
                return replace(plan, **{name: depth}) if is_depth and may_pay else None

            return move

        primes = _find_primes(self.config.batch_rows)
        return {
            "rows": [step(prime) for prime in primes for step in (multiply_rows, divide_rows)],
            "order": [set_order(*each) for each in ORDERS],
            "optimizer": [set_field("optimizer", tier) for tier in TIERS],
            "keep": [set_field("keep", keep) for keep in (False, True)],
            "chunks": [set_field("chunks", 2**n) for n in range(MOST_CHUNKS.bit_length())],
            "ahead": [go_ahead(name, by) for name in ("prefetch", "overlap") for by in (1, -1)],
            "dtype": [set_field("optimizer_dtype", d) for d in (None, *self.config.optimizer_dtypes)],
            "axes": [
                hand_over(prime, source, target)
                for prime in _find_primes(self.devices)
                for source, target in itertools.permutations(AXES, 2)
            ],
        }  # fmt: skip

    # -------------------------------------------------------------- the price of a plan
    def price(self, plan: DecoderPlan) -> Candidate:
        """Return a plan with its bytes and time, extrapolated from few layers, micro-batches and stages."""
        if plan.pipeline > 1:
            return self._price_pipeline(plan)
        # More layers are lowered if the first are not alike, or if kernels go further ahead.
        layers, more = self.config.layers, self.config.odd_layers + 2 * (plan.reach - 2)
        depths = tuple(depth + more for depth in DEPTHS)
        return self._price_layers(plan, depths if layers > depths[-1] else (layers,))

    def price_exactly(self, plan: DecoderPlan) -> Candidate:
        """Return a plan with the bytes and time of a step of all layers.

        Most of the work is the ledger of a pipeline's stages. Groups of micro-batches repeat one another, so
        few of them are enough to know how large values are and which stage is the fullest.
        """
        if plan.pipeline == 1:
            return self._price_layers(plan, (self.config.layers,))
        layers, micro, few = self.config.layers, self.count_micro_batches(plan), GROUPS[0] * plan.pipeline
        lowered, fullest = self.lower(plan, layers, micro), None
        if micro > few:
            fewer = self.lower(plan, layers, few)
            lowered = replace(lowered, fewer=fewer)
            fullest = max(
                range(plan.pipeline), key=lambda stage: fewer.memory_analysis(stage=stage).peak_bytes
            )
        return price(plan, lowered.memory_analysis(stage=fullest), lowered.timeline(self.hardware))

    def _price_pipeline(self, plan: DecoderPlan) -> Candidate:
        """Return a plan with a pipeline, with its bytes and time.

        They are extrapolated along groups of micro-batches, then along stages, then along layers of a chunk.
        The fullest stage is one of the first or of the last two.
        """
        # Layers that are not like the others are in the first chunks, which are lowered as they are.
        counts = self.layers_by_chunk(plan)
        sums = itertools.accumulate(counts)
        first = 1 + sum(total < self.config.odd_layers for total in sums)

        # A chunk in the middle has `most` layers. It is lowered with `depth` of them, and the chunks at the
        # ends with as many fewer.
        most, groups = max(counts[1:-1] or counts), self.count_micro_batches(plan) // plan.pipeline
        least = max(plan.reach, most - min(counts))
        few_stages = tuple(count + first - 1 for count in STAGES)
        by_depth = {}
        for depth in (least, least + 1) if most > least + 1 else (most,):
            begin = [max(count - most + depth, 0) for count in counts[:first]]
            end = max(counts[-1] - most + depth, 0)
            by_stages = {}
            for stages in few_stages if plan.pipeline > few_stages[-1] else (plan.pipeline,):
                chunks = stages * plan.chunks
                layers = (*[*begin, *[depth] * chunks][: chunks - 1], end)
                by_stages[stages] = self.measure_stages(plan, layers, stages, groups, first)
            by_depth[depth] = _extrapolate(by_stages, plan.pipeline)
        values = _extrapolate(by_depth, most)
        peak = max(value for name, value in values.items() if isinstance(name, int))  # stages have numbers
        return _candidate_of(plan, peak, values)

    def layers_by_chunk(self, plan: DecoderPlan) -> list[int]:
        """Return the number of layers of each chunk, as presets cut them."""
        key = plan.pipeline, plan.chunks, plan.tensor, plan.expert
        if key in self._layers_by_chunk:
            return self._layers_by_chunk[key]
        params = self.config.subject(self.config.layers).params
        specs = self._make_specs(plan, params, self.make_mesh(plan))
        chunk_of = {layer_of(path): spec.chunk for path, spec in specs.items() if spec.chunk != "all"}
        counts = Counter(chunk for layer, chunk in chunk_of.items() if layer is not None)
        self._layers_by_chunk[key] = [counts[chunk] for chunk in range(plan.pipeline * plan.chunks)]
        return self._layers_by_chunk[key]

    def _price_layers(self, plan: DecoderPlan, depths: tuple[int, ...]) -> Candidate:
        """Return a plan with its bytes and time, extrapolated from steps of these numbers of layers.

        Every moment of a step is extrapolated, since with another depth another moment may be the peak.
        """
        micro, by_count = self.count_micro_batches(plan), {}
        # Gradients are summed from the second micro-batch on. Breadth-first they hide what is gathered and
        # reduced once, so that time is no line in their number.
        is_line = micro > 3 and plan.order == "depth"
        for count in (2, 3) if is_line else (micro,):
            values = _extrapolate({d: self.measure(plan, d, count) for d in depths}, self.config.layers)
            by_count[count] = {name: value for name, value in values.items() if isinstance(name, str)}
            # The peak is the largest of the extrapolated moments, whose names are tuples. With a single depth
            # all layers were lowered, and it is known.
            if len(depths) > 1:
                moments = [value for name, value in values.items() if isinstance(name, tuple)]
                by_count[count]["peak"] = max(moments)
        values = _extrapolate(by_count, micro)
        return _candidate_of(plan, values["peak"], values)

    def count_micro_batches(self, plan: DecoderPlan) -> int:
        """Return the number of a rank's micro-batches in a step."""
        return self.config.batch_rows // plan.data_ranks // plan.micro_rows

    def measure(self, plan: DecoderPlan, layers: int, micro: int) -> dict[Any, float]:
        """Return the price of a step of some layers and micro-batches, and its bytes by `_name_moments`."""
        lowered = self.lower(plan, layers, micro)
        candidate = price(plan, lowered.memory_analysis(), lowered.timeline(self.hardware))
        moments = _name_moments(lowered.memory_timeline(), layers, plan.reach)
        return moments | _values_of(candidate) | {"peak": candidate.peak_bytes}

    def measure_stages(
        self, plan: DecoderPlan, layers: Sequence[int], stages: int, groups: int, first: int
    ) -> dict[Any, float]:
        """Return the price of a step of fewer stages, and the peaks of its first stages (0, 1 and so on) and
        of the last two (-2, -1).

        Time is extrapolated along groups of micro-batches. Groups repeat one another, so the ledger of few
        tells how full stages are.

        Args:
            layers: the number of layers of each chunk.
            groups: the number of groups of the step.
            first: the number of first chunks that differ from those after them.
        """
        # Lower the step with few groups, which tell steps with more how large values are.
        shorter, total = replace(plan, pipeline=stages), sum(layers)
        few, *more = GROUPS if groups > GROUPS[-1] else (groups,)
        fewer = self.lower(shorter, total, few * stages, layers)
        lowered = {few: fewer}
        for group in more:
            lowered[group] = replace(self.lower(shorter, total, group * stages, layers), fewer=fewer)

        # Price each of them, and take the peaks of the stages that may be the fullest.
        memory = fewer.memory_analysis()
        by_group = {
            group: _values_of(price(plan, memory, each.timeline(self.hardware)))
            for group, each in lowered.items()
        }
        peaks = {
            stage: fewer.memory_analysis(stage=stage % stages).peak_bytes
            for stage in (*range(first + 1), -2, -1)
        }
        return {stage: float(peak) for stage, peak in peaks.items()} | _extrapolate(by_group, groups)

    def make_mesh(self, plan: DecoderPlan) -> fs.Mesh:
        """Make the plan's mesh, without axes of one rank. The axes that exchange most are the last, whose
        ranks share a node."""
        axes = {n: s for n, s in plan.mesh.axes.items() if s > 1 or n == "shard"}
        return fs.make_mesh(**axes, device="cuda" if self.hardware.overlap else "cpu", abstract=True)

    def lower(
        self, plan: DecoderPlan, layers: int, micro: int, by_chunk: Sequence[int] | None = None
    ) -> Lowered:
        """Lower the step of some layers and micro-batches. Plans that are traced alike share traces.

        Args:
            by_chunk: the number of layers of each chunk of a pipeline; None takes those of the preset.
        """
        step, batch = self.make_step(plan, layers, micro, by_chunk)
        front = self.trace(plan, layers, step, batch)
        options = replace(step.options, remat=plan.remat, prefetch=(plan.prefetch,) * 2, overlap=plan.overlap)
        lowered = lower_from(front, step, batch, options, self._get_traces(plan).kernels)
        self.work.count_schedule(sum(len(schedule.instructions) for schedule in lowered.schedules))
        return lowered

    def make_step(
        self, plan: DecoderPlan, layers: int, micro: int, by_chunk: Sequence[int] | None = None
    ) -> tuple[Step, tuple[Any, ...]]:
        """Make the step of some layers and micro-batches; return it and a rank's batch."""
        mesh, subject = self.make_mesh(plan), self.config.subject(layers)
        specs = self._make_specs(plan, subject.params, mesh)
        if by_chunk is not None:
            specs = _assign_chunks(specs, by_chunk)

        # All plans share one optimizer, and with it the traces of its updates.
        undecayed = subject.undecayed
        if undecayed not in self._optimizers:
            constant = ScheduleConfig(name="constant")
            self._optimizers[undecayed] = make_optimizer(self.config.optimizer, constant, 1, undecayed)
        step = fs.shard_step(
            subject.loss, specs, mesh=mesh, optimizer=self._optimizers[undecayed], grad_norm=True,
            accumulate=micro, micro_order=plan.order, zero_bubble_memory=plan.zero_bubble_memory,
            expert_capacity=self.config.mesh.expert_capacity,
        )  # fmt: skip
        step.resolve(subject.params)
        return step, subject.batch(plan.micro_rows * micro)

    def _make_specs(self, plan: DecoderPlan, params: Any, mesh: fs.Mesh) -> Any:
        """Return the spec tree of a plan."""
        precision = self.config.precision
        precision = replace(precision, optimizer=plan.optimizer_dtype or precision.optimizer)
        options = {axis: axis_of(axis, mesh) for axis in ("tensor", "expert")}
        options |= {**dtypes_of(precision), **plan.tiers}
        return fs.presets.PRESETS[plan.preset](params, mesh, chunks=plan.chunks, **options)

    def trace(self, plan: DecoderPlan, layers: int, step: Step, batch: tuple[Any, ...]) -> Front:
        """Return the trace of a step. Of many layers only a few are traced, and the others copied from
        these."""
        config, fronts = self.config, self._get_traces(plan).fronts
        # The user's own function may look at the axes over which rows are split; the decoder does not.
        looked_at = () if config.is_decoder else (plan.replicate, plan.shard, plan.pipeline > 1)
        key = layers, looked_at
        if key in fronts:
            return fronts[key]

        # Few layers are traced without a pipeline. In a pipeline a unit that only holds a buffer is cut out,
        # too, and a trace for one stage lacks it.
        all_train = all(spec.trainable for spec in ResolvedSpecs.of(step.specs).stored.values())
        if config.is_layered and (all_train or plan.pipeline == 1):
            alone = replace(plan, pipeline=1, chunks=1, order="depth")

            def trace(few: int) -> Front:
                return self.trace(alone, few, *self.make_step(alone, few, 1))

            front = trace_few_layers(trace, layers, config.odd_layers)
            if front is not None:
                fronts[key] = front
                return front

        # Otherwise all layers are traced.
        fronts[key] = step.front(*batch)
        self.work.count_program(len(fronts[key].program.graph.nodes))
        return fronts[key]

    def _get_traces(self, plan: DecoderPlan) -> TraceCache:
        """Return the traces that a plan shares with others.

        The caches that were used least recently are dropped, since traces take memory.
        """
        key = plan.tensor, plan.context, plan.expert, plan.micro_rows
        self._traces[key] = self._traces.pop(key, None) or TraceCache()  # moved to the end
        for oldest in list(self._traces)[:-CACHES]:
            del self._traces[oldest]
        return self._traces[key]

    # -------------------------------------------------------------- texts
    def describe(self, candidate: Candidate) -> str:
        """Return a plan with its time and bytes in a few words."""
        lacks = "" if candidate.fits(self.budget) else ", which is too much"
        words = candidate.choice.overrides(self.config.batch_rows)
        return f"{time_text(rough(candidate.seconds))}, {byte_text(candidate.peak_bytes)}{lacks}: {words}"

    def describe_misfit(self) -> str:
        """Return the sentence that the devices cannot share the rows, with the ways out."""
        rows, parts = self.config.batch_rows, self.devices
        return (
            f"{pluralize(parts, 'device')} cannot share {rows:,} rows: "
            f"a rank has whole rows, and at most {self.hardware.ranks_per_node} share its matrices. "
            f"Fix: rows={math.lcm(rows, parts)}, or devices={math.gcd(rows, parts)}."
        )


def _values_of(candidate: Candidate) -> dict[Any, float]:
    """Return the values of a price by name, without its peak."""
    return {**candidate.parts, **{name: getattr(candidate, name) for name in VALUES}}


def _candidate_of(plan: DecoderPlan, peak_bytes: float, values: Mapping[Any, float]) -> Candidate:
    """Return a plan with its price, from its peak and values as `_values_of` returns them."""
    parts = {name: values[name] for name in PARTS}
    return Candidate(plan, peak_bytes, parts=parts, **{name: values[name] for name in VALUES})


def _name_moments(timeline: MemoryTimeline, layers: int, reach: int) -> dict[Any, float]:
    """Return the bytes on the device at each line, under names that steps of other depths have, too.

    A line is named by the unit of the kernel before it, and after the last kernel by its own unit. A layer
    near either end is numbered from that end; lines of other layers have no name.

    Args:
        reach: how many layers from either end are near. What is gathered and reduced during their kernels
            belongs to their neighbours, so that they are alike at all depths.
    """
    lines = [moment.instruction for moment in timeline.moments]
    last = max((n for n, line in enumerate(lines) if isinstance(line, Run)), default=0)
    moments: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    kernel = "", ""
    for n, (line, moment) in enumerate(zip(lines, timeline.moments, strict=True)):
        if isinstance(line, Run):
            kernel = line.phase, line.unit
        phase, unit = kernel if n <= last else (line.verb, line.unit)
        nth = counts[phase, unit] = counts.get((phase, unit), 0) + 1
        number = layer_of(unit)
        names = [unit] if number is None else [n for n in (number, number - layers) if -reach <= n < reach]
        for name in names:
            moments[phase, name, nth] = float(moment.bytes)
    return moments


def _assign_chunks(specs: Mapping[str, fs.LayoutSpec], by_chunk: Sequence[int]) -> dict[str, fs.LayoutSpec]:
    """Return specs of a decoder with these numbers of layers in its chunks.

    Leaves before all layers belong to the first chunk, leaves after them to the last.
    """
    chunk_of = [chunk for chunk, count in enumerate(by_chunk) for _ in range(count)]
    numbers = {path: layer_of(path) for path in specs}
    first = next(place for place, number in enumerate(numbers.values()) if number is not None)
    ends = {path: 0 if place < first else len(by_chunk) - 1 for place, path in enumerate(numbers)}
    return {
        path: replace(spec, chunk=ends[path] if numbers[path] is None else chunk_of[numbers[path]])
        for path, spec in specs.items()
    }


def _extrapolate(points: Mapping[int, Mapping[Any, float]], at: int) -> dict[Any, float]:
    """Extrapolate the values that two points have in common to `at`, along a line. A single point is
    returned as it is."""
    if len(points) == 1:
        return dict(*points.values())
    (first, low), (second, high) = points.items()
    share = (at - first) / (second - first)
    return {name: low[name] + share * (high[name] - low[name]) for name in low.keys() & high.keys()}


def _find_divisors(n: int) -> list[int]:
    return sorted({d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})


def _find_primes(n: int) -> list[int]:
    """Return the prime factors, each once."""
    return [p for p in _find_divisors(n) if p > 1 and all(p % q for q in range(2, math.isqrt(p) + 1))]
