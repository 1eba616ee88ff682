"""Search: plans of a decoder on paper, and the descent to the fastest that fits.

A plan's step is lowered at two small depths, with two and three micro-batches, and carried on from there:
layers are alike, so time and memory are affine in both. The plan that is chosen is lowered in full.

How much is recomputed is no knob of the descent. For every setting of the other knobs it is found by
bisection: recomputing less is faster and takes more memory, but for some per cent in tiny models, so the best
share is about the largest that fits.
`remat="offload"` is not tried.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import fnshard as fs
from experiments.explain.words import counted
from experiments.lib.config import MeshConfig, ScheduleConfig
from experiments.lib.plan import axis_of, dtypes_of, make_optimizer
from experiments.plan.config import DEVICE_SHARE, PlanConfig
from fnshard.analysis.memory import MemoryTimeline
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.lower import Front, schedule_for
from fnshard.compiler.schedule.instructions import Run
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.plot.scales import byte_text, rough, time_text
from fnshard.step.batches import bytes_of_batch
from fnshard.step.lowered import Lowered
from fnshard.step.plan import plan_of

DEPTHS = (4, 5)  # numbers of layers that are lowered
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


Move = Callable[[Knobs], Knobs | None]


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
    progress: Progress = field(default_factory=lambda: Progress())
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

    def moves(self) -> dict[str, list[Move]]:
        """Return the steps along each knob; a factor goes from one axis to another.

        Recomputation is not among them: `within_budget` finds its share for each plan. A step gives None
        where there is none, and may give a plan that is not valid: two of them together may be.
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

        primes = _primes(self.config.batch_rows)
        return {
            "rows": [step(prime) for prime in primes for step in (take_rows, leave_rows)],
            "optimizer": [set_knob("optimizer", tier) for tier in TIERS],
            "keep": [set_knob("keep", keep) for keep in (False, True)],
            "dtype": [set_knob("optimizer_dtype", d) for d in (None, *self.config.optimizer_dtypes)],
            "axes": [
                hand_over(prime, source, target)
                for prime in _primes(self.devices)
                for source, target in itertools.permutations(AXES, 2)
            ],
        }  # fmt: skip

    def steps(self, knobs: Knobs, moves: Iterable[Move]) -> list[Knobs]:
        """Return the valid plans that are one of these moves away."""
        found = dict.fromkeys(move(knobs) for move in moves)
        return [k for k in found if k is not None and k != knobs and self.valid(k)]

    def pairs(self, knobs: Knobs) -> list[Knobs]:
        """Return the valid plans that are two moves away, whether or not one of the two alone is valid."""
        moves = [move for each in self.moves().values() for move in each]
        near = {knobs, *self.steps(knobs, moves)}
        first = [k for k in dict.fromkeys(move(knobs) for move in moves) if k is not None and k != knobs]
        both = dict.fromkeys(move(k) for k in first for move in moves)
        return [k for k in both if k is not None and k not in near and self.valid(k)]

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
            by_count[count] = {n: v for n, v in found.items() if isinstance(n, str)}
            if len(depths) > 1:  # else the peak is known, and no layer stands for others
                by_count[count]["peak"] = max(v for n, v in found.items() if isinstance(n, tuple))
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
            "peak": memory.peak_bytes, "host_bytes": memory.host_bytes, "seconds": time.step_seconds,
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
        subject = self.config.subject(layers)
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
        options = replace(options, remat=knobs.remat, prefetch=(1, 1), overlap=1)
        stages = schedule_for(front, resolved.stored, mesh, options, self._kernels, False)
        sizes = bytes_of_batch(Arguments(batch, {}))
        return Lowered(stages, options, optimizer=optimizer, batch_bytes=sizes)

    # -------------------------------------------------------------- the search
    def is_too_small(self) -> bool:
        """Whether not even the plans that save most memory fit."""
        frugal = [replace(k, remat="unit", optimizer="host") for k in self.starts()]
        return all(self.look(k).peak_bytes > self.budget for k in frugal)

    def best(self, say: Callable[[str], None] = lambda text: None) -> Candidate:
        """Return the fastest plan that fits: no neighbour, one or two moves away, is faster and fits.

        Where nothing fits it is the plan that lacks least. Descends from the two best of `starts`, one for
        each split of sequences and matrices; from the second where it is nearly as good, or nothing fits.

        Raises:
            BudgetError: the devices cannot share the rows.
        """
        starts = list(self.starts())
        if not starts:
            raise fs.BudgetError(self.nothing())
        ways = f"{counted(len(starts), 'way')} to split {counted(self.devices, 'device')}"
        say(f"{ways}; the first price takes some seconds, as its kernels are traced")
        self.progress = Progress(say)
        begun = []
        for knobs in starts:
            begun.append(self.look(knobs))
            self._say(begun[-1])
        nearest = sorted(begun, key=self.cost)[:2]
        first, *second = sorted((self.within_budget(c.knobs) for c in nearest), key=self.cost)
        best = self.descend(first)
        for other in second:
            if best.peak_bytes > self.budget or other.seconds < RIVALRY * first.seconds:
                best = min(best, self.descend(other), key=self.cost)
        say("the best plan is priced with all its layers")
        while self.cost(found := self.exact(best.knobs)) > self.cost(best):
            self.seen[best.knobs] = found  # carried on from few layers, it looked better than it is
            best = self.descend(self.within_budget(best.knobs))
        return found

    def cost(self, candidate: Candidate) -> tuple[float, float, float]:
        """Return what the search makes small."""
        return candidate.cost(self.budget)

    def descend(self, best: Candidate) -> Candidate:
        """Return the plan at which no move, and no two of them, is better.

        One knob after another takes its best value. Two are moved together only when no single one helps.
        """
        while True:
            begun = best
            for moves in self.moves().values():
                while True:  # a knob goes on in a direction that pays
                    better = self.improve(best, self.steps(best.knobs, moves))
                    if better is best:
                        break
                    best = better
                    self._say(best)
            if best is begun:
                best = self.improve(best, self.pairs(best.knobs))
                if best is begun:
                    return best
                self._say(best)

    def improve(self, best: Candidate, others: Iterable[Knobs]) -> Candidate:
        """Return the best of a plan and of others, each with the recomputation that it needs."""
        for knobs in others:
            best = min(best, self.within_budget(knobs, best), key=self.cost)
            self.progress.count(len(self.seen), best)
        return best

    def within_budget(self, knobs: Knobs, rival: Candidate | None = None) -> Candidate:
        """Return this plan with the least recomputation that fits, or with all of it if none does.

        The share that is kept is found to a 200th. What recomputes less is faster, so the smallest share that
        does not fit bounds all that do: bisection ends where they can be no faster than what is known.

        Args:
            rival: another plan; one that fits is a bound, too.
        """
        most = self.look(replace(knobs, remat="none"))
        fits = rival is not None and rival.peak_bytes <= self.budget
        limit = rival.seconds if fits else math.inf
        if most.peak_bytes <= self.budget or most.seconds >= limit:
            return most
        best = self.look(replace(knobs, remat="unit"))
        if best.peak_bytes > self.budget:
            return best
        low, high, bound = 0, SHARES, most.seconds
        while high - low > 1 and bound < min(limit, best.seconds) * (1 - CLOSE):
            middle = (low + high) // 2
            found = self.look(replace(knobs, remat=middle / SHARES))
            if found.peak_bytes <= self.budget:
                low, best = middle, min(best, found, key=self.cost)
            else:
                high, bound = middle, found.seconds
        return best

    def _say(self, found: Candidate) -> None:
        self.progress.say(f"{brief(found, self.budget)}: {found.knobs.overrides(self.config.batch_rows)}")

    def nothing(self) -> str:
        rows, parts = self.config.batch_rows, self.devices
        return (
            f"{counted(parts, 'device')} cannot share {rows:,} rows: "
            f"a rank has whole rows, and at most {self.hardware.ranks_per_node} share its matrices. "
            f"Fix: rows={math.lcm(rows, parts)}, or devices={math.gcd(rows, parts)}."
        )


AXES = ("replicate", "shard", "tensor", "context")
SHARES = 200  # what a segment keeps for its backward is chosen in so many parts of what the backward reads
CLOSE = 5e-4  # plans whose times differ by less are as fast
RIVALRY = 1.15  # the descent from the second start is left out where it begins slower by more
SILENCE_S = 5.0  # at most, between two lines


@dataclass
class Progress:
    """Lines about a search: what it finds at once, and how far it is every few seconds."""

    say_line: Callable[[str], None] = lambda text: None
    last: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        self.say_line(text)
        self.last = time.monotonic()

    def count(self, priced: int, best: Candidate) -> None:
        """Say how many plans were priced, if nothing was said for some seconds."""
        if time.monotonic() - self.last > SILENCE_S:
            self.say(f"{counted(priced, 'plan')} priced, the best {time_text(rough(best.seconds))}")


def brief(found: Candidate, budget: int) -> str:
    """Return time and bytes of a plan in a few words."""
    lacks = "" if found.peak_bytes <= budget else ", which is too much"
    return f"{time_text(rough(found.seconds))}, {byte_text(found.peak_bytes)}{lacks}"


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
