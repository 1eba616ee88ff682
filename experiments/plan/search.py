"""Search: plans of a decoder on paper, and the descent to the fastest that fits.

A plan's step is lowered at two small depths, with two and three micro-batches, and carried on from there:
layers are alike, so time and memory are affine in both. The plan that is chosen is lowered in full.

How much is recomputed is no knob of the descent. For every setting of the other knobs it is found by
bisection: recomputing less is faster and takes more memory, so the best share is the largest that fits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import fnshard as fs
from experiments.configs.plan import axis_of, dtypes_of
from experiments.configs.train import MeshConfig, ScheduleConfig
from experiments.explain.subject import subject_of
from experiments.explain.words import counted
from experiments.plan.config import DEVICE_SHARE, PlanConfig
from experiments.training.steps import make_optimizer
from fnshard.analysis.memory import MemoryTimeline
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.lower import Front, schedule_for
from fnshard.compiler.schedule.instructions import Run
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.plot.scales import byte_text, time_text
from fnshard.step.batches import bytes_of_batch
from fnshard.step.lowered import Lowered
from fnshard.step.plan import plan_of

DEPTHS = (4, 5)  # numbers of layers that are lowered
TWENTIETHS = 20  # what a segment keeps for its backward is chosen in twentieths of what the backward reads
TIERS = {  # of the optimizer's state
    "device": {},
    "streamed": {"optimizer_memory": "host", "update_on": "device"},
    "host": {"optimizer_memory": "host"},
}


@dataclass(frozen=True)
class Knobs:
    """One plan. `micro_rows`: of a rank's micro-batch; `keep`: leaves stay gathered until their backward;
    `optimizer_dtype`: None is the precision's."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    micro_rows: int = 1
    remat: str | float = "none"
    keep: bool = False
    optimizer: str = "device"
    optimizer_dtype: str | None = None

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def mesh(self) -> MeshConfig:
        return MeshConfig(**{n: getattr(self, n) for n in ("replicate", "shard", "tensor", "context")})

    @property
    def preset(self) -> str:
        """The name of one in `fnshard.presets`, and of a strategy."""
        return "hybrid_shard" if self.replicate > 1 else "shard_grad_op" if self.keep else "full_shard"

    @property
    def tiers(self) -> dict[str, str]:
        """Fields of `LayoutSpec`, and of a strategy."""
        return TIERS[self.optimizer]

    def overrides(self, rows: int) -> str:
        """What `experiments.train` and `experiments.explain` take."""
        accumulate = rows // self.data_ranks // self.micro_rows
        words = {
            "strategy": self.preset, "mesh.shard": self.shard, "data.rows": rows,
            **{f"mesh.{n}": v for n in ("replicate", "tensor", "context") if (v := getattr(self, n)) > 1},
            **({"strategy.remat": self.remat} if self.remat != "none" else {}),
            **{f"strategy.{name}": value for name, value in self.tiers.items()},
            **({"run.accumulate": accumulate} if accumulate > 1 else {}),
            **({"precision.optimizer": self.optimizer_dtype} if self.optimizer_dtype else {}),
        }  # fmt: skip
        return " ".join(f"{key}={value}" for key, value in words.items())


PARTS = {  # of a step, in seconds: what a plan may lose by
    "compute": "computing",
    "communication": "waiting for collectives",
    "transfer": "waiting for the host link",
    "host": "waiting for the host",  # its updates and launches: what is left
}


@dataclass(frozen=True)
class Candidate:
    """A plan and what is predicted of it: bytes of a device and of the host, seconds of a step and what they
    go to (`PARTS`), and the model's FLOPs of a rank."""

    knobs: Knobs
    peak_bytes: float
    host_bytes: float
    seconds: float
    parts: Mapping[str, float] = field(compare=False)
    flops: float = 0.0
    peak_flops: float = 1.0

    def cost(self, budget: int) -> tuple[float, float, int]:
        """What the search makes small: bytes too many, then time to a microsecond, then what is done."""
        done = (self.knobs.optimizer != "device") + 1 - kept_share(self.knobs.remat)
        return max(0.0, self.peak_bytes - budget), round(self.seconds, 6), done


@dataclass
class Planner:
    """The plans of one configuration on so many devices; remembers those it has looked at."""

    config: PlanConfig
    devices: int
    hardware: fs.Hardware
    seen: dict[Knobs, Candidate] = field(default_factory=dict)
    _fronts: dict[Any, Front] = field(default_factory=dict)
    _kernels: dict[str, Any] = field(default_factory=dict)

    @property
    def budget(self) -> int:
        gigabytes = self.config.device_gb
        return int(DEVICE_SHARE * self.hardware.memory_bytes if gigabytes is None else gigabytes * 1e9)

    # -------------------------------------------------------------- which plans there are
    def valid(self, knobs: Knobs) -> bool:
        """Whether the axes divide what they split, and all rows are taken."""
        axes = knobs.replicate * knobs.shard * knobs.tensor * knobs.context
        rows, own = self.config.batch_rows, knobs.data_ranks * knobs.micro_rows
        return (
            axes == self.devices and rows % own == 0
            and knobs.tensor <= self.hardware.ranks_per_node
            and not (knobs.keep and knobs.replicate > 1)
            and self.config.is_split(knobs.mesh)
        )  # fmt: skip

    def starts(self) -> Iterator[Knobs]:
        """For each way to split rows' sequences and matrices, all other ranks a shard."""
        near = self.hardware.ranks_per_node
        least = max(near, self.devices // math.gcd(self.devices, self.config.batch_rows))  # that share a row
        for tensor, context in (
            (t, c) for t in _divisors(self.devices) for c in _divisors(self.devices // t)
        ):
            data = self.devices // tensor // context
            if tensor * context > least:
                continue
            knobs = Knobs(1, data, tensor, context, remat="unit")
            if self.valid(knobs):
                yield knobs

    def moves(self, knobs: Knobs) -> dict[str, list[dict[str, Any]]]:
        """Return the changes that are one step along a knob, by knob; a factor goes from one axis to another.

        Recomputation is not among them: `within_budget` finds its share for each change.
        """
        rows, tiers = [], [{"optimizer": t} for t in TIERS if t != knobs.optimizer]
        for prime in _primes(self.config.batch_rows):
            rows.append({"micro_rows": knobs.micro_rows * prime})
            if knobs.micro_rows % prime == 0:
                rows.append({"micro_rows": knobs.micro_rows // prime})
        dtypes = [d for d in (None, *self.config.optimizer_dtypes) if d != knobs.optimizer_dtype]
        axes = [
            {source: getattr(knobs, source) // prime, target: getattr(knobs, target) * prime}
            for prime in _primes(self.devices)
            for source, target in itertools.permutations(AXES, 2)
            if getattr(knobs, source) % prime == 0
        ]
        changes = {
            "rows": rows, "optimizer": tiers, "keep": [{"keep": not knobs.keep}],
            "dtype": [{"optimizer_dtype": d} for d in dtypes], "axes": axes,
        }  # fmt: skip
        return {name: [c for c in some if self.valid(replace(knobs, **c))] for name, some in changes.items()}

    def pairs(self, knobs: Knobs) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return every two changes of different knobs that can be made together."""
        moves = self.moves(knobs)
        both = [
            (a, b)
            for first, second in itertools.combinations(moves, 2)
            for a in moves[first]
            for b in moves[second]
        ]
        return [(a, b) for a, b in both if self.valid(replace(knobs, **(a | b)))]

    # -------------------------------------------------------------- what is predicted of one
    def look(self, knobs: Knobs) -> Candidate:
        """A plan's bytes and time, carried on from few layers and micro-batches."""
        if knobs in self.seen:
            return self.seen[knobs]
        layers = self.config.layers
        depths = DEPTHS if layers > DEPTHS[1] else (layers,)
        self.seen[knobs] = self._predicted(knobs, depths)
        return self.seen[knobs]

    def exact(self, knobs: Knobs) -> Candidate:
        """The same, of all layers."""
        return self._predicted(knobs, (self.config.layers,))

    def _predicted(self, knobs: Knobs, depths: tuple[int, ...]) -> Candidate:
        """Carried on from steps of so many layers; which of a step's moments is the peak changes with the
        depth, so each of them is."""
        micro, by_count = self.micro_batches(knobs), {}
        for count in (2, 3) if micro > 3 else (micro,):  # gradients are summed from the second on
            found = _line({d: self.measured(knobs, d, count) for d in depths}, self.config.layers)
            peak = max(value for name, value in found.items() if isinstance(name, tuple))
            by_count[count] = {n: v for n, v in found.items() if isinstance(n, str)} | {"peak": peak}
        found = _line(by_count, micro)
        parts = {name: found[name] for name in PARTS}
        others = (found[n] for n in ("peak", "host_bytes", "seconds"))
        return Candidate(knobs, *others, parts, found["flops"], found["peak_flops"])

    def micro_batches(self, knobs: Knobs) -> int:
        return self.config.batch_rows // knobs.data_ranks // knobs.micro_rows

    def measured(self, knobs: Knobs, layers: int, micro: int) -> dict[str, float]:
        lowered = self.lowered(knobs, layers, micro)
        memory, time = lowered.memory_analysis(), lowered.timeline(self.hardware)
        compute = time.busy_seconds.get("compute", 0.0)
        return _moments(lowered.memory_timeline(), layers) | {
            "host_bytes": memory.host_bytes, "seconds": time.step_seconds,
            "compute": compute, "communication": time.exposed_communication_seconds,
            "transfer": time.exposed_transfer_seconds,
            "host": max(0.0, time.step_seconds - compute - time.exposed_communication_seconds
                        - time.exposed_transfer_seconds),
            "flops": time.model_flops, "peak_flops": time.peak_flops,
        }  # fmt: skip

    def mesh(self, knobs: Knobs) -> fs.Mesh:
        """Axes that split nothing are left out; those that exchange most lie in one node, as the last."""
        axes = {n: s for n, s in knobs.mesh.axes.items() if s > 1 or n == "shard"}
        return fs.make_mesh(**axes, device="cuda" if self.hardware.overlap else "cpu", abstract=True)

    def lowered(self, knobs: Knobs, layers: int, micro: int) -> Lowered:
        """The step of so many layers and micro-batches; traces are shared by plans that trace alike."""
        mesh = self.mesh(knobs)
        subject = subject_of(self.config, layers)
        loss, params, batch = subject.loss, subject.params, subject.batch(knobs.micro_rows * micro)
        precision = self.config.precision
        precision = replace(precision, optimizer=knobs.optimizer_dtype or precision.optimizer)
        how = {"tensor": axis_of("tensor", mesh), **dtypes_of(precision), **knobs.tiers}
        specs = fs.presets.PRESETS[knobs.preset](params, mesh, **how)
        constant = ScheduleConfig(name="constant")
        optimizer = make_optimizer(self.config.optimizer, constant, 1, subject.undecayed)
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, accumulate=micro, grad_norm=True)
        step.resolve(params)
        resolved, options = ResolvedSpecs.of(step.specs), step.options
        key = knobs.tensor, knobs.context, knobs.micro_rows, mesh.names, layers, micro
        if key not in self._fronts:
            self._fronts[key] = step.front(*batch)
        front = self._fronts[key]
        front = replace(front, plan=plan_of(optimizer, resolved, mesh, options).for_program(front.program))
        lowering = replace(options.lowering, remat=knobs.remat, prefetch=(1, 1), overlap=1)
        stages = schedule_for(front, resolved.stored, mesh, lowering, self._kernels, False)
        chosen, sizes = replace(options, lowering=lowering), bytes_of_batch(Arguments(batch, {}))
        return Lowered(stages, chosen, optimizer=optimizer, batch_bytes=sizes)

    # -------------------------------------------------------------- the search
    def is_too_small(self) -> bool:
        """Whether not even the plans that save most memory fit."""
        frugal = [replace(k, remat="unit", optimizer="host") for k in self.starts()]
        return all(self.look(k).peak_bytes > self.budget for k in frugal)

    def best(self, say: Callable[[str], None] = lambda text: None) -> Candidate:
        """Return the fastest plan that fits: no neighbour, one or two knobs away, is faster and fits.

        Where nothing fits it is the plan that lacks least. Descends from the best of `starts`, one for each
        split of sequences and matrices, and from the second where it is nearly as good.

        Raises:
            BudgetError: the devices cannot share the rows.
        """
        starts = list(self.starts())
        if not starts:
            raise fs.BudgetError(self.nothing())
        ways = f"{counted(len(starts), 'way')} to split {counted(self.devices, 'device')}"
        say(f"{ways}; the first price takes some seconds, as its kernels are traced")
        begun = []
        for knobs in starts:
            begun.append(self.look(knobs))
            self._say(begun[-1], say)
        first, *others = sorted(begun, key=lambda c: c.cost(self.budget))
        best = self.descend(self.within_budget(first.knobs), say)
        for other in others[:1]:
            if other.seconds < RIVALRY * first.seconds:
                best = min(
                    best,
                    self.descend(self.within_budget(other.knobs), say),
                    key=lambda c: c.cost(self.budget),
                )
        while (found := self.exact(best.knobs)).cost(self.budget) > best.cost(self.budget):
            self.seen[best.knobs] = found  # carried on from few layers, it looked better than it is
            best = self.descend(self.within_budget(best.knobs), say)
        return best

    def descend(self, best: Candidate, say: Callable[[str], None]) -> Candidate:
        """Return the plan at which no change of one knob, and none of two, is better.

        One knob after another takes its best value. Two are changed together only when no single one helps.
        """
        while True:
            begun = best
            for knob in self.moves(best.knobs):
                while True:  # a knob goes on in a direction that pays
                    changes = self.moves(best.knobs)[knob]
                    better = self.improve(best, (replace(best.knobs, **c) for c in changes))
                    if better is best:
                        break
                    best = better
                    self._say(best, say)
            if best is begun:
                pairs = (
                    replace(best.knobs, **(a | b))
                    for a, b in self.pairs(best.knobs)
                    if self._pays(best, a, b)
                )
                best = self.improve(best, pairs)
                if best is begun:
                    return best
                self._say(best, say)

    def improve(self, best: Candidate, others: Iterable[Knobs]) -> Candidate:
        """Return the best of a plan and of others, each with the recomputation that it needs."""
        for knobs in others:
            found = self.within_budget(knobs, best)
            best = min(best, found, key=lambda c: c.cost(self.budget))
        return best

    def within_budget(self, knobs: Knobs, rival: Candidate | None = None) -> Candidate:
        """Return this plan with the least recomputation that fits, or with all of it if none does.

        Args:
            rival: a plan that fits; bisection ends where what is left to find is slower than that.
        """
        fits = rival is not None and rival.peak_bytes <= self.budget
        limit = rival.seconds if fits else math.inf
        # Nothing is faster than what recomputes nothing, nor smaller than what recomputes all.
        most = self.look(replace(knobs, remat="none"))
        if most.peak_bytes <= self.budget or most.seconds >= limit:
            return most
        least = self.look(replace(knobs, remat="unit"))
        if least.peak_bytes > self.budget:
            return least
        low, high, best = 0, TWENTIETHS, least
        while high - low > 1:
            middle = (low + high) // 2
            found = self.look(replace(knobs, remat=middle / TWENTIETHS))
            if found.peak_bytes <= self.budget:
                low, best = middle, min(best, found, key=lambda c: c.cost(self.budget))
            else:
                high = middle
                if found.seconds >= limit:  # what fits keeps less than this, and is slower
                    break
        return best

    def _pays(self, best: Candidate, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        """Say whether two changes together may be better, judged by what each of them does alone."""

        def look(remat: str, change: Mapping[str, Any]) -> Candidate | None:
            return self.seen.get(replace(best.knobs, remat=remat, **change))

        none, unit = ([look(remat, c) for c in ({}, first, second)] for remat in ("none", "unit"))
        if all(none):
            seconds = none[1].seconds * none[2].seconds / none[0].seconds
            if best.peak_bytes <= self.budget and seconds > MARGIN * best.seconds:
                return False
        if all(unit):
            peak = unit[1].peak_bytes + unit[2].peak_bytes - unit[0].peak_bytes
            return peak < MARGIN * max(self.budget, best.peak_bytes)
        return True

    def _say(self, found: Candidate, say: Callable[[str], None]) -> None:
        says = f"{time_text(found.seconds)}, {byte_text(found.peak_bytes)}"
        lacks = "" if found.peak_bytes <= self.budget else ", too many"
        say(f"{says}{lacks}: {found.knobs.overrides(self.config.batch_rows)}")

    def nothing(self) -> str:
        rows, parts = self.config.batch_rows, self.devices
        return (
            f"{counted(parts, 'device')} cannot share {rows:,} rows: "
            f"a rank has whole rows, and at most {self.hardware.ranks_per_node} share its matrices. "
            f"Fix: rows={math.lcm(rows, parts)}, or devices={math.gcd(rows, parts)}."
        )


AXES = ("replicate", "shard", "tensor", "context")
MARGIN = 1.05  # what two changes do together may differ so much from the product of what each does
RIVALRY = 1.15  # a start that is slower than the best one by more does not overtake it on its way down


def kept_share(remat: str | float) -> float:
    """Return the share of what a backward reads that is kept for it, and not recomputed."""
    return {"none": 1.0, "unit": 0.0}.get(remat, remat)


def _moments(timeline: MemoryTimeline, layers: int) -> dict[Any, float]:
    """Bytes of the device by line. A line is named by the unit of the kernel before it, a layer as counted
    from the first, and from the last; after the last kernel by its own. Two layers from either end are alike
    at all depths: what is gathered and reduced during a kernel is of its neighbours."""
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
        out |= {(phase, name, nth): float(moment.bytes) for name in _numbered(unit, layers)}
    return out


def _numbered(unit: str, layers: int) -> list[Any]:
    """A unit by its name; a layer by how far it is from the first and from the last, where it is near."""
    found = re.fullmatch(r"layers\.(\d+)", unit)
    if found is None:
        return [unit]
    number = int(found[1])
    return [n for n in (number, number - layers) if -2 <= n < 2]


def _line(points: Mapping[int, Mapping[Any, float]], at: int) -> dict[Any, float]:
    """Values at one place of lines through two, of those that both have; or of the one that is known."""
    (first, a), *more = points.items()
    if not more:
        return dict(a)
    second, b = more[0]
    share = (at - first) / (second - first)
    return {name: a[name] + share * (b[name] - a[name]) for name in a.keys() & b.keys()}


def _divisors(n: int) -> list[int]:
    return sorted({d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})


def _primes(n: int) -> list[int]:
    """The prime factors, each once."""
    return [p for p in _divisors(n) if p > 1 and all(p % q for q in range(2, math.isqrt(p) + 1))]
