"""Fit: the fastest plan whose predicted peak is within a budget, found on paper.

A plan says for each unit whether it is recomputed and whether it stays gathered, what rests on the host, how
many micro-batches a step has and whether anything is prefetched. Every plan that is looked at is lowered in
full, its peak taken from the ledger and its time from the cost model; nothing runs. The search is best-first
over the coarse decisions (each bounded by what it would cost if memory were no matter), by interpolation over
how many units are recomputed or kept, and ends with a descent, so that no neighbour that fits is faster.
"""

from __future__ import annotations

import glob
import heapq
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fnshard import tree
from fnshard.analysis.hardware import Hardware
from fnshard.analysis.timeline import Timeline
from fnshard.compiler.ir.arguments import Arguments, arguments_for
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.compiler.lower import Front, schedule_for
from fnshard.compiler.options import StepOptions, read_options
from fnshard.errors import BudgetError, SpecError, StateError, is_number
from fnshard.layout import presets
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, is_spec
from fnshard.mesh import Mesh, make_mesh
from fnshard.optim.optimizer import Optimizer
from fnshard.optim.optimizers import adamw
from fnshard.step.batches import bytes_of_batch, check_arguments, split_batch
from fnshard.step.lowered import Lowered
from fnshard.step.step import Step

__all__ = ["fit"]

CHOSEN = ("accumulate", "remat", "save", "prefetch", "overlap")  # options that `fit` gives
OPTIMIZER = ("device", "streamed", "host")
RECOMPUTE = (0.5, "unit", "unit+offload")  # what a recomputed unit does, from most memory to most time


@dataclass(frozen=True)
class Choice:
    """One plan.

    Args:
        accumulate: micro-batches in a step.
        remat: what recomputed units do.
        recomputed: how many units are, from the first on.
        kept: how many units stay gathered between forward and backward, from the last on.
        optimizer: where its state rests and is updated: "device"; "host"; or "streamed", which rests on the
            host and is updated on the device.
        parameters_on_host: whether stored shards rest there.
        ahead: how many kernels ahead gathers are issued, and later reductions waited for.
    """

    accumulate: int = 1
    remat: str | float = RECOMPUTE[0]
    recomputed: int = 0
    kept: int = 0
    optimizer: str = "device"
    parameters_on_host: bool = False
    ahead: int = 1

    def __str__(self) -> str:
        optimizer = {"device": [], "host": ["optimizer"], "streamed": ["optimizer (streamed)"]}[
            self.optimizer
        ]
        where = optimizer + (["parameters"] if self.parameters_on_host else [])
        parts = [f"{self.accumulate} micro-batch{'es' if self.accumulate > 1 else ''}"]
        parts.append(f"{self.recomputed} units remat={self.remat!r}" if self.recomputed else "no remat")
        parts.append(f"{self.kept} units kept gathered" if self.kept else "all resharded")
        parts += [f"{' and '.join(where)} on the host"] if where else []
        return ", ".join(parts) + ("" if self.ahead else ", no prefetch")


@dataclass(frozen=True)
class Candidate:
    """A plan that was lowered: its predicted peaks on the device and on the host, and its predicted time."""

    choice: Choice
    peak_bytes: int
    seconds: float
    host_bytes: int = 0

    @property
    def cost(self) -> tuple[float, int, int, int, int]:
        """What the search makes small: time to a microsecond, then what is done to save memory."""
        c = self.choice
        moved = (c.optimizer != "device") + c.parameters_on_host
        return round(self.seconds, 6), moved, c.accumulate, c.recomputed, -c.kept

    def __str__(self) -> str:
        host = f" ({size(self.host_bytes)} there)" if self.host_bytes else ""
        return f"{size(self.peak_bytes):>10} {self.seconds * 1e3:10.1f} ms  {self.choice}{host}"


@dataclass(frozen=True)
class Fit:
    """What `fit` chose.

    `specs`, `mesh` and `options` are what `shard_step(fn, specs, mesh=mesh, optimizer=..., **options)` takes;
    `lowered` is that step on paper, `timeline` its predicted run. `rejected`: the plans that differ in one
    decision, with why they were not taken; `meshes`: the other meshes of as many ranks, likewise.
    `cut_short`: whether that search ended before it was through, so that a faster plan may be left.
    """

    specs: Any
    options: StepOptions
    chosen: Candidate
    device_bytes: int
    rejected: tuple[tuple[Candidate, str], ...]
    lowered: Lowered = field(repr=False)
    timeline: Timeline = field(repr=False)
    mesh: Mesh
    looked_at: int = 0
    meshes: tuple[tuple[Mesh, str], ...] = ()
    cut_short: bool = False

    @property
    def peak_bytes(self) -> int:
        """Predicted, on the device."""
        return self.chosen.peak_bytes

    @property
    def seconds(self) -> float:
        """Of one step, predicted."""
        return self.chosen.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "plan": vars(self.chosen.choice) | {},
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.chosen.host_bytes,
            "device_bytes": self.device_bytes,
            "seconds": self.seconds,
            "interval": self.timeline.interval,
            "mfu": self.timeline.mfu,
            "rejected": [
                {"plan": str(c.choice), "peak_bytes": c.peak_bytes, "seconds": c.seconds, "why": why}
                for c, why in self.rejected
            ],
            "looked_at": self.looked_at,
            "cut_short": self.cut_short,
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            "meshes": [{"mesh": str(mesh), "why": why} for mesh, why in self.meshes],
        }

    def __str__(self) -> str:
        cut = ", where the search was cut short" * self.cut_short
        lines = [f"within {size(self.device_bytes)}, of {self.looked_at} plans looked at{cut}:"]
        between = [f"{s * 1e3:.1f}" for s in self.timeline.interval or ()]
        why = [f"on {self.mesh}"] * bool(self.meshes) + [f"{' to '.join(between)} ms"] * bool(between)
        lines.append(f"  {self.chosen}  <- " + ", ".join(["chosen", *why]))
        lines += [f"  {candidate}: {why}" for candidate, why in self.rejected]
        lines += [f"  on {mesh}: {why}" for mesh, why in self.meshes]
        return "\n".join(lines)


def size(nbytes: float) -> str:
    """In the unit that shows some digits.

    >>> size(79_820_000_000), size(5_300_000)
    ('79.820 GB', '5.300 MB')
    """
    return f"{nbytes / 1e9:.3f} GB" if abs(nbytes) >= 1e9 else f"{nbytes / 1e6:.3f} MB"


def fit(
    fn: Callable[..., Any],
    params: Any,
    mesh: Mesh | None = None,
    *,
    batch: Sequence[Any],
    ranks: int | None = None,
    keywords: Mapping[str, Any] | None = None,
    device_bytes: int | None = None,
    hardware: Hardware | str = "h100",
    optimizer: Optimizer | None = None,
    specs: Any = None,
    **options: Any,
) -> Fit:
    """The fastest specs and remat whose predicted peak is at most `device_bytes`.

    With `ranks` the search over meshes makes so many plans that it takes about a minute, the same ones on
    every rank and machine. It says on the console what it is at, and names in `meshes` what it left out. A
    batch is not cut into micro-batches where `fn` has an exchange (`fs.psum`) over a data axis: that is
    another function.

    Args:
        fn, params: as `shard_step` and `Step.lower` take them; `params` may be meta.
        mesh: may be abstract.
        batch: this rank's batch of one step, all micro-batches; may be meta. With `ranks` that of all ranks.
        ranks: in place of a mesh: all ways to split so many ranks into `replicate`, `shard` and, within a
            node, `tensor` are looked at, those first that are fastest with room for all.
        keywords: of the batch, what `fn` takes by name.
        device_bytes: of one rank's device; default all that `hardware` has.
        hardware: what the time is predicted for; a `Hardware` or the name of one.
        optimizer: default AdamW.
        specs: where to start from; layouts and dtypes are taken as they are. Default `presets.full_shard`.
            With `ranks` a function of a mesh.
        options: the fields of `StepOptions`, but for those that are chosen here (`CHOSEN`).

    Raises:
        BudgetError: nothing fits; says the smallest budget that would do, what the memory goes to, and which
            one dimension to change.

    >>> import torch
    >>> from fnshard import make_mesh
    >>> params = {"a.w": torch.ones(64, 64, device="meta"), "b.w": torch.ones(64, 64, device="meta")}
    >>> def loss(p, x):
    ...     return torch.tanh(x @ p["a.w"]).matmul(p["b.w"]).square().mean()
    >>> plan = fit(loss, params, make_mesh(shard=4, abstract=True), batch=(torch.ones(8, 64),))
    >>> plan.options["remat"], plan.peak_bytes < 1e6
    ('none', True)
    """
    how = {"hardware": hardware, "optimizer": optimizer, **options}
    if ranks is not None:
        whole = type(ranks) is int and ranks >= 1
        if mesh is not None or not whole or not (specs is None or callable(specs)):
            raise SpecError(f"ranks={ranks!r}: a whole number from 1, for which fit chooses the mesh.",
                            fix="leave mesh= out, and give specs= as a function of a mesh.")  # fmt: skip
        return _over_meshes(
            fn, params, ranks, Arguments(tuple(batch), keywords or {}), specs, device_bytes, how
        )
    search = Search(fn, params, mesh, batch=batch, keywords=keywords, specs=specs, **how)
    return search.fit(search.hardware.memory_bytes if device_bytes is None else device_bytes)


def _over_meshes(
    fn: Callable[..., Any],
    params: Any,
    ranks: int,
    batch: Arguments,
    specs: Callable[[Mesh], Any] | None,
    device_bytes: int | None,
    how: Mapping[str, Any],
) -> Fit:
    """The best of all meshes; one that is slower than the best so far even with room for all is passed by."""
    hardware = Hardware.of(how["hardware"])
    budget = hardware.memory_bytes if device_bytes is None else device_bytes
    bounds: list[tuple[float, int, Search]] = []
    why: dict[Mesh, str] = {}
    work = _Work()
    kernels = dict[str, Kernel]()  # meshes whose programs are alike share these
    meshes = list(_meshes(ranks, hardware.ranks_per_node))
    for number, mesh in enumerate(meshes, 1):
        if bounds and work.lines > LIMIT_LINES / 2:
            why[mesh] = _NOT_LOOKED_AT
            continue
        work.say(f"mesh {number} of {len(meshes)}, {mesh}")
        try:
            part = next(split_batch(batch, mesh.data_size, "parts for ranks"))
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # leaves that an axis leaves whole
                base = specs(mesh) if specs is not None else _preset(params, mesh)
            search = Search(
                fn, params, mesh, batch=part.positional, keywords=part.keywords, specs=base,
                kernels=kernels, work=work, **how,
            )  # fmt: skip
        except (SpecError, StateError, UserWarning) as error:
            why[mesh] = str(error).splitlines()[0]
            continue
        free = search.look(search._free(Choice(accumulate=search.divisors[0])))
        bounds.append((free.seconds, len(bounds), search))
    found: list[Fit] = []
    least = math.inf
    for bound, _, search in sorted(bounds):
        if bound >= least:
            continue  # even with room for all
        if found and work.is_up:
            why[search.mesh] = _NOT_LOOKED_AT
            continue
        work.say(f"plans on {search.mesh}")
        try:
            found.append(search.fit(budget))
        except BudgetError as error:
            why[search.mesh] = str(error).splitlines()[0].partition(" (")[0]
        else:
            least = min(least, found[-1].seconds)
    if not found:
        causes = [f"{mesh}: {cause}" for mesh, cause in why.items()]
        raise BudgetError(
            f"nothing fits on {ranks} ranks, whatever the mesh:",
            causes,
            "more ranks, or rows that they divide.",
        )
    best = min(found, key=lambda each: each.seconds)
    slower = {each.mesh: f"{each.seconds / least - 1:.1%} slower" for each in found}
    bounded = {s.mesh: f"at least {bound / least - 1:.1%} slower" for bound, _, s in bounds if bound >= least}
    reasons = bounded | slower | why
    meshes = tuple((mesh, cause) for mesh, cause in reasons.items() if mesh != best.mesh)
    return replace(best, meshes=meshes, cut_short=work.is_up or _NOT_LOOKED_AT in why.values())


LIMIT_LINES = 50_000  # of programs and schedules, that a search over meshes makes: a minute's work or so
QUIET_s = 3.0  # between two lines on the console, and before the first
_NOT_LOOKED_AT = "not looked at, the search was cut short; fit(..., mesh=) looks at one mesh"


@dataclass
class _Work:
    """How much a search over meshes has done, and what it says of that.

    It is counted in lines and not in seconds: all ranks, and a machine that is busy, find the same plan.

    Args:
        lines: of programs and schedules that were made.
        longest: of the schedules, in lines.
        begun, told: when the search began, and last said something.
    """

    lines: int = 0
    longest: int = 0
    begun: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    @property
    def is_up(self) -> bool:
        """Whether to be content with the best plan so far: one more may be as long as the longest was."""
        return self.lines + self.longest > LIMIT_LINES

    def say(self, text: str) -> None:
        """Show a search that takes long what it is at."""
        now = time.monotonic()
        if now - self.told >= QUIET_s:
            self.told = now
            print(f"fit, {now - self.begun:.0f} s: {text}", file=sys.stderr, flush=True)


def _meshes(ranks: int, near: int) -> Iterator[Mesh]:
    """All of so many ranks; those of a tensor group are neighbours in a node of `near`."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for tensor in (d for d in divisors if d <= near):
        for shard in reversed(
            [d for d in divisors if ranks // tensor % d == 0]
        ):  # those that shard most first
            axes = {"replicate": ranks // tensor // shard, "shard": shard, "tensor": tensor}
            axes = {n: size for n, size in axes.items() if size > 1 or n == "shard"}
            yield make_mesh(**axes, abstract=True, device="cpu")


def _preset(params: Any, mesh: Mesh) -> Any:
    preset = presets.hybrid_shard if "replicate" in mesh.names else presets.full_shard
    return preset(params, mesh, tensor="tensor" if "tensor" in mesh.names else None)


class Search:
    """The plans of one function, batch and mesh; remembers those it has lowered, for many budgets.

    Takes what `fit` takes, but for the budget; and `kernels` that other searches share with it, and the
    `work` that they have done, which ends it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        params: Any,
        mesh: Mesh,
        *,
        batch: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
        hardware: Hardware | str = "h100",
        optimizer: Optimizer | None = None,
        specs: Any = None,
        kernels: dict[str, Kernel] | None = None,
        work: _Work | None = None,
        **options: Any,
    ):
        wrong = _wrong_arguments(params, mesh, batch, hardware, options)
        self.options = read_options("fit", options, wrong)
        self.fn, self.mesh, self.batch = fn, mesh, tuple(batch)
        self.hardware = Hardware.of(hardware)
        self.optimizer = adamw(1e-3) if optimizer is None else optimizer
        self.arguments = arguments_for(fn, self.batch, keywords)
        check_arguments(fn, self.arguments)
        base = presets.full_shard(params, mesh) if specs is None else specs
        step = Step(fn, base, mesh, self.optimizer, self.options)
        step.resolve(params)
        self.base = step.specs
        self.divisors = _divisors(self.arguments)
        self.fronts: dict[int, Front] = {}
        self.kernels, self.work = {} if kernels is None else kernels, work
        self.seen: dict[Choice, Candidate] = {}
        self.units = self._units()
        exchanges = self._front(self.divisors[0]).segments.exchanges
        if any(set(each.axes) & set(mesh.data_axes) for each in exchanges):
            self.divisors = self.divisors[:1]

    def _units(self) -> tuple[str, ...]:
        """Units that may be recomputed or kept, in order: all but the last segment's, whose backward follows
        its forward at once.
        """
        front = self._front(self.divisors[0])
        segments = [s for s in front.segments.segments if s.units]
        last = segments[-1].units if segments else ()
        found = dict.fromkeys(u for s in segments for u in s.units)
        return tuple(u for u in found if u not in last)

    def _front(self, accumulate: int) -> Front:
        """What all plans with so many micro-batches share."""
        if accumulate not in self.fronts:
            options = replace(self.options, accumulate=accumulate)
            step = Step(self.fn, self.base, self.mesh, self.optimizer, options)
            front = self.arguments.call(step.front)
            self.fronts[accumulate] = front
            if self.work is not None:
                self.work.lines += len(front.program.graph.nodes)
        return self.fronts[accumulate]

    def specs_of(self, choice: Choice) -> Any:
        """The spec tree of a plan."""
        kept = set(self.units[len(self.units) - choice.kept :])

        def chosen(spec: LayoutSpec) -> LayoutSpec:
            # What the caller rests on the host or on disk stays there.
            changes: dict[str, Any] = {"reshard": spec.unit not in kept} if spec.unit in self.units else {}
            if choice.optimizer != "device" and spec.trainable and spec.optimizer_memory == "device":
                place = "device" if choice.optimizer == "streamed" else "host"
                changes |= {"optimizer_memory": "host", "update_on": place}
            if choice.parameters_on_host and spec.memory == "device":
                changes["memory"] = "host"
            return replace(spec, **changes)

        return tree.map(chosen, self.base, is_leaf=is_spec)

    def options_of(self, choice: Choice) -> StepOptions:
        """The options of a plan."""
        units = self.units[: choice.recomputed]
        remat = {glob.escape(u): choice.remat for u in units} if units else "none"
        depths = {"prefetch": choice.ahead, "overlap": choice.ahead} if self._chooses_depth else {}
        return replace(self.options, accumulate=choice.accumulate, remat=remat, **depths)

    def lower(self, choice: Choice, *, verified: bool = True) -> Lowered:
        """A plan on paper."""
        front, options = self._front(choice.accumulate), self.options_of(choice)
        specs = ResolvedSpecs.of(self.specs_of(choice)).stored
        stages = schedule_for(front, specs, self.mesh, options, self.kernels, verified)
        sizes = bytes_of_batch(self.arguments)
        return Lowered(stages, options, optimizer=self.optimizer, batch_bytes=sizes)

    def look(self, choice: Choice) -> Candidate:
        """A plan's peak and time; each is lowered once."""
        if choice not in self.seen:
            if self.work is not None:
                self.work.say(f"{choice} on {self.mesh}")
            lowered = self.lower(choice, verified=False)
            memory, seconds = lowered.memory_analysis(), lowered.timeline(self.hardware).step_seconds
            if self.work is not None:
                lines = len(lowered.schedule.instructions)
                self.work.lines += lines
                self.work.longest = max(self.work.longest, lines)
            self.seen[choice] = Candidate(choice, memory.peak_bytes, seconds, memory.host_bytes)
        return self.seen[choice]

    def fit(self, device_bytes: int) -> Fit:
        """The fastest plan within a budget; see `fit`."""
        if not is_number(device_bytes) or device_bytes <= 0:
            raise SpecError(f"device_bytes={device_bytes!r}: a number of bytes, more than 0.")
        fastest = self.look(self._free(Choice(accumulate=self.divisors[0])))
        if fastest.peak_bytes > device_bytes and self._frugal().peak_bytes > device_bytes:
            raise self._impossible(device_bytes)
        best = self._best_first(device_bytes)
        if best is None:  # the most frugal plan fits, and the search that is bounded passed it by
            best = self._frugal()
        best, rejected = self._descend(best, device_bytes)
        lowered = self.lower(best.choice)
        shown = sorted(rejected, key=lambda c: (c.peak_bytes > device_bytes, c.seconds))
        return Fit(
            self.specs_of(best.choice), self.options_of(best.choice), best, device_bytes,
            tuple((c, _why(c, best, device_bytes)) for c in shown), lowered, lowered.timeline(self.hardware),
            self.mesh, len(self.seen),
        )  # fmt: skip

    def _best_first(self, budget: int) -> Candidate | None:
        """Coarse decisions in the order of their time if all units were kept and none recomputed."""
        best: Candidate | None = None
        queue: list[tuple[float, int, Choice]] = []
        tickets, known = itertools.count(), set()

        def push(coarse: Choice) -> None:
            if coarse not in known:
                known.add(coarse)
                heapq.heappush(queue, (self.look(self._free(coarse)).seconds, next(tickets), coarse))

        push(Choice(accumulate=self.divisors[0]))
        while queue:
            bound, _, coarse = heapq.heappop(queue)
            if best is not None and (bound >= best.seconds or self._is_late):
                break
            free = self.look(self._free(coarse))
            if free.peak_bytes <= budget:
                best = _faster(best, free)
                continue  # whatever saves more can only be slower
            for remat in RECOMPUTE if self.units else ():
                if best is not None and self._is_late:
                    break
                best = _faster(best, self._within(replace(coarse, remat=remat), budget, best))
            for saving in self._savings(coarse):
                push(saving)
        return best

    @property
    def _is_late(self) -> bool:
        return self.work is not None and self.work.is_up

    def _free(self, coarse: Choice) -> Choice:
        """A coarse choice at its fastest."""
        return replace(coarse, remat=RECOMPUTE[0], recomputed=0, kept=len(self.units) if self._gathers else 0)

    @property
    def _chooses_depth(self) -> bool:
        """Whether nobody gives the passes, which have a depth of their own."""
        return self.options.passes is None

    @property
    def _gathers(self) -> bool:
        return any(self.mesh.ordered(s.storage.axes) for s in tree.flatten(self.base, is_spec)[0])

    def _moves(self, tier: str) -> bool:
        """Whether any leaf has the field, "memory" or "optimizer_memory", "device"."""
        return any(getattr(s, tier) == "device" for s in tree.flatten(self.base, is_spec)[0] if s.trainable)

    def _savings(self, coarse: Choice) -> Iterator[Choice]:
        """Coarse choices that save memory by one more decision."""
        at = self.divisors.index(coarse.accumulate)
        if at + 1 < len(self.divisors):
            yield replace(coarse, accumulate=self.divisors[at + 1])
        if coarse.optimizer == "device" and self._moves("optimizer_memory"):
            yield from (replace(coarse, optimizer=o) for o in OPTIMIZER[1:])
        if not coarse.parameters_on_host and self._moves("memory"):
            yield replace(coarse, parameters_on_host=True)
        if coarse.ahead and self._chooses_depth:
            yield replace(coarse, ahead=0)

    def _within(self, coarse: Choice, budget: int, best: Candidate | None) -> Candidate | None:
        """The fewest units recomputed that fit, then the most kept gathered."""
        count = len(self.units)
        bare = self._least(lambda n: replace(coarse, recomputed=n, kept=0), 0, count, budget, best)
        if bare is None or not self._gathers:
            return bare
        freed = self._least(lambda n: replace(bare.choice, kept=count - n), 0, count, budget, None)
        return _faster(bare, freed)

    def _least(
        self, of: Callable[[int], Choice], low: int, high: int, budget: int, best: Candidate | None
    ) -> Candidate | None:
        """The plan with the least n from `low` to `high` that fits; peaks fall with n, nearly in a line."""
        top = self.look(of(high))
        if top.peak_bytes > budget:
            return None
        bottom = self.look(of(low))
        if bottom.peak_bytes <= budget:
            return bottom
        while high - low > 1:
            slope = (bottom.peak_bytes - budget) / max(bottom.peak_bytes - top.peak_bytes, 1)
            guess = min(max(low + math.ceil(slope * (high - low)), low + 1), high - 1)
            middle = self.look(of(guess))
            if middle.peak_bytes <= budget:
                high, top = guess, middle
            else:
                low, bottom = guess, middle
                if best is not None and middle.seconds >= best.seconds:
                    return None  # fewer do not fit, and so many are too slow already
        return top

    def neighbours(self, choice: Choice) -> list[Choice]:
        """Plans that differ from one in one decision."""
        at, count = self.divisors.index(choice.accumulate), len(self.units)
        out = [replace(choice, accumulate=d) for d in self.divisors[max(at - 1, 0) : at + 2]]
        for n in (choice.recomputed - 1, choice.recomputed + 1):
            out += [replace(choice, recomputed=n)] if 0 <= n <= count else []
        for n in (choice.kept - 1, choice.kept + 1):
            out += [replace(choice, kept=n)] if 0 <= n <= count and self._gathers else []
        if choice.recomputed:
            out += [replace(choice, remat=r) for r in RECOMPUTE]
        out += [replace(choice, optimizer=o) for o in OPTIMIZER] if self._moves("optimizer_memory") else []
        if self._moves("memory"):
            out.append(replace(choice, parameters_on_host=not choice.parameters_on_host))
        out += [replace(choice, ahead=1 - choice.ahead)] if self._chooses_depth else []
        plain = [c if c.recomputed else replace(c, remat=RECOMPUTE[0]) for c in out]
        return [c for c in dict.fromkeys(plain) if c != choice]

    def _descend(self, best: Candidate, budget: int) -> tuple[Candidate, list[Candidate]]:
        """Step to a faster neighbour that fits while there is one; and the last one's neighbours."""
        while True:
            around = [
                self.look(c) for c in self.neighbours(best.choice) if c in self.seen or not self._is_late
            ]
            better = [c for c in around if c.peak_bytes <= budget and c.cost < best.cost]
            if not better:
                return best, around
            best = min(better, key=lambda c: c.cost)

    def _frugal(self) -> Candidate:
        """The plan that does everything to save memory."""
        count = len(self.units)
        plans = [
            Choice(
                self.divisors[-1],
                remat,
                count if remat != RECOMPUTE[0] else 0,
                0,
                "host",
                parameters,
                0 if self._chooses_depth else 1,
            )
            for remat in RECOMPUTE
            for parameters in (False, True)
        ]
        return min((self.look(c) for c in plans), key=lambda c: c.peak_bytes)

    def _impossible(self, budget: int) -> BudgetError:
        least = self._frugal()
        analysis = self.lower(least.choice).memory_analysis()
        largest = sorted(analysis.peak.items(), key=lambda item: -item[1])[:3]
        return BudgetError(
            f"nothing fits into {size(budget)}: the most frugal plan takes {size(least.peak_bytes)} "
            f"({least.choice}). Its peak, in instruction {analysis.at} ({analysis.line}), is made of:",
            [f"{name}: {size(count)}" for name, count in largest],
            f"a budget of {size(math.ceil(least.peak_bytes / 1e6) * 1e6)} would do; or change one thing: "
            f"more ranks (the mesh has {self.mesh.size}) for shards and state, smaller units (fnshard.units) "
            "for gathered units and gradients, a shorter sequence for activations.",
        )


def _faster(*found: Candidate | None) -> Candidate | None:
    return min(filter(None, found), key=lambda c: c.cost, default=None)


def _why(candidate: Candidate, best: Candidate, budget: int) -> str:
    if candidate.peak_bytes > budget:
        return f"{size(candidate.peak_bytes - budget)} too many"
    slower = candidate.seconds / best.seconds - 1
    return f"fits, {slower:.1%} slower" if slower > 0 else "fits, as fast"


def _divisors(batch: Arguments) -> list[int]:
    """How many equal micro-batches the batch can be cut into."""
    named = tree.flatten_with_paths(batch)[0]
    rows = [v.shape[0] for v in named.values() if isinstance(v, Tensor) and v.dim()]
    scalars = any(isinstance(v, Tensor) and not v.dim() for v in named.values())
    most = math.gcd(*rows) if rows and not scalars else 1
    return [d for d in range(1, most + 1) if most % d == 0]


def _wrong_arguments(
    params: Any, mesh: Any, batch: Any, hardware: Any, options: Mapping[str, Any]
) -> list[str]:
    """Return what is wrong with arguments of `fit`, a line each."""
    usual = StepOptions()
    wrong = [
        f"{name}={options[name]!r}: fit chooses it; leave it out"
        for name in CHOSEN
        if name in options and options[name] != usual[name]
    ]
    if isinstance(params, nn.Module):
        wrong.append("params is a module: apply, params = fs.make_functional(module)")
    if not isinstance(mesh, Mesh):
        wrong.append(f"mesh={mesh!r}: make one with fs.make_mesh(shard=8, abstract=True)")
    if not isinstance(batch, tuple | list):
        wrong.append(
            f"batch is {type(batch).__name__}: a tuple of the arguments of `fn` after the parameters"
        )
    if not isinstance(hardware, str | Hardware):
        wrong.append(f"hardware={hardware!r}: a name such as 'h100', or a Hardware")
    return wrong
