"""Fit: find the fastest plan whose predicted peak is within a budget, on paper."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fnshard.analysis.hardware import Hardware
from fnshard.analysis.timeline import Timeline
from fnshard.compiler.ir.arguments import arguments_for
from fnshard.compiler.options import StepOptions, read_options
from fnshard.errors import BudgetError, SpecError, is_number
from fnshard.layout import presets
from fnshard.mesh import Mesh
from fnshard.optim.optimizer import Optimizer
from fnshard.optim.optimizers import adamw
from fnshard.search.price import Candidate
from fnshard.search.space import Choice, FunctionSpace, choose_preset, list_meshes
from fnshard.search.walk import SearchEffort, Walk
from fnshard.step.batches import check_arguments
from fnshard.step.lowered import Lowered

__all__ = ["Fit", "fit"]

# The options that `fit` chooses.
CHOSEN = ("accumulate", "micro_order", "zero_bubble_memory", "remat", "save", "prefetch", "overlap")
LIMIT_LINES = 50_000  # lines of programs and schedules of a search over meshes, about a minute's work
QUIET_S = 3.0  # seconds between two lines on the console, and before the first
NOT_LOOKED_AT = "not looked at, the search was cut short; fit(..., mesh=) looks at one mesh"


@dataclass(frozen=True)
class Fit:
    """A choice of `fit`.

    Args:
        specs, mesh, options: arguments for `shard_step(fn, specs, mesh=mesh, optimizer=..., **options)`.
        chosen: the plan with its price.
        rejected: the plans that differ in one decision, each with the reason why it was not taken.
        device_bytes: the budget.
        lowered: the step on paper.
        timeline: the predicted run of the step.
        looked_at: the number of plans that were priced.
        meshes: the other meshes of as many ranks, each with the reason why it was not taken.
        cut_short: whether the search ended before it had tried all moves, so that there may be a faster plan.
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
        """Return the bytes on the device at the peak, by prediction."""
        return self.chosen.peak_bytes

    @property
    def seconds(self) -> float:
        """Return the seconds of one step, by prediction."""
        return self.chosen.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {
            "plan": {name: value for name, value in vars(self.chosen.choice).items() if name != "mesh"},
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
        cut = ", where the search was cut short" if self.cut_short else ""
        lines = [f"within {format_bytes(self.device_bytes)}, of {self.looked_at} plans looked at{cut}:"]

        # The chosen plan, with its mesh if there was a choice, and its interval if the hardware has one.
        notes = ["chosen"]
        if self.meshes:
            notes.append(f"on {self.mesh}")
        if self.timeline.interval:
            bounds = [f"{seconds * 1e3:.1f}" for seconds in self.timeline.interval]
            notes.append(f"{' to '.join(bounds)} ms")
        lines.append(f"  {format_plan(self.chosen)}  <- {', '.join(notes)}")

        lines += [f"  {format_plan(candidate)}: {why}" for candidate, why in self.rejected]
        lines += [f"  on {mesh}: {why}" for mesh, why in self.meshes]
        return "\n".join(lines)


def format_plan(candidate: Candidate) -> str:
    """Return a plan and its price in one line."""
    price = f"{format_bytes(candidate.peak_bytes):>10} {candidate.seconds * 1e3:10.1f} ms"
    host = f" ({format_bytes(candidate.host_bytes)} there)" if candidate.host_bytes else ""
    return f"{price}  {candidate.choice}{host}"


def format_bytes(nbytes: float) -> str:
    """Return bytes in the unit that shows some digits.

    >>> format_bytes(79_820_000_000), format_bytes(5_300_000)
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
    """Find the fastest plan whose predicted peak is at most `device_bytes`.

    A plan has specs, micro-batches and their order, remat, prefetch and, with `ranks`, a mesh. A batch is not
    cut into micro-batches if `fn` has an exchange (`fs.psum`) over a data axis, since that would be another
    function. With `ranks` the search takes about a minute, and looks at the same plans on every rank and
    machine. It reports its progress on the console, and names in `meshes` the meshes that it left out.

    Args:
        fn, params: arguments of `shard_step` and `Step.lower`. The parameters may be meta.
        mesh: the mesh, which may be abstract.
        batch: this rank's batch of one step, with all micro-batches, which may be meta. With `ranks` it is
            the batch of all ranks.
        ranks: the number of ranks, in place of a mesh. The search looks at all ways to split them into
            `pipeline`, `replicate`, `shard` and, within a node, `tensor`.
        keywords: the part of the batch that `fn` takes by name.
        device_bytes: the budget of one rank's device; by default all the memory of `hardware`.
        hardware: the hardware for which time is predicted, a `Hardware` or the name of one.
        optimizer: the optimizer; by default AdamW.
        specs: the specs to start from, whose layouts and dtypes are taken as they are; by default
            `presets.full_shard`. With `ranks` a function of a mesh; by default `presets.hybrid_shard` on
            meshes with an axis "replicate", else `presets.full_shard`.
        options: the fields of `StepOptions`, except for those that are chosen here.

    Raises:
        BudgetError: nothing fits. The error says the smallest budget that would do, what the memory goes to,
            and which one dimension to change.

    >>> import torch
    >>> from fnshard import make_mesh
    >>> params = {"a.w": torch.ones(64, 64, device="meta"), "b.w": torch.ones(64, 64, device="meta")}
    >>> def loss(p, x):
    ...     return torch.tanh(x @ p["a.w"]).matmul(p["b.w"]).square().mean()
    >>> plan = fit(loss, params, make_mesh(shard=4, abstract=True), batch=(torch.ones(8, 64),))
    >>> plan.options["remat"], plan.peak_bytes < 1e6
    ('none', True)
    """
    space = make_space(
        fn, params, mesh, batch=batch, ranks=ranks, keywords=keywords, hardware=hardware, optimizer=optimizer,
        specs=specs, **options,
    )  # fmt: skip
    return search_space(space, space.hardware.memory_bytes if device_bytes is None else device_bytes)


def make_space(
    fn: Callable[..., Any],
    params: Any,
    mesh: Mesh | None = None,
    *,
    batch: Sequence[Any],
    ranks: int | None = None,
    keywords: Mapping[str, Any] | None = None,
    hardware: Hardware | str = "h100",
    optimizer: Optimizer | None = None,
    specs: Any = None,
    **options: Any,
) -> FunctionSpace:
    """Make the space of plans from which `fit` chooses, from its arguments without the budget.

    Raises:
        SpecError: arguments are wrong. The error names all of them.
    """
    if ranks is not None:
        is_count = type(ranks) is int and ranks >= 1
        if mesh is not None or not is_count or not (specs is None or callable(specs)):
            raise SpecError(f"ranks={ranks!r}: a whole number from 1, for which fit chooses the mesh.",
                            fix="leave mesh= out, and give specs= as a function of a mesh.")  # fmt: skip

    # One error names all other mistakes. `read_options` raises it, and adds those in the options.
    defaults = StepOptions()
    wrong = [
        f"{name}={options[name]!r}: fit chooses it; leave it out"
        for name in CHOSEN
        if name in options and options[name] != defaults[name]
    ]
    if isinstance(params, nn.Module):
        wrong.append("params is a module: apply, params = fs.make_functional(module)")
    if ranks is None and not isinstance(mesh, Mesh):
        wrong.append(f"mesh={mesh!r}: make one with fs.make_mesh(shard=8, abstract=True)")
    if not isinstance(batch, tuple | list):
        wrong.append(
            f"batch is {type(batch).__name__}: a tuple of the arguments of `fn` after the parameters"
        )
    if not isinstance(hardware, str | Hardware):
        wrong.append(f"hardware={hardware!r}: a name such as 'h100', or a Hardware")
    step_options = read_options("fit", options, wrong)

    # The arguments are right by themselves; the batch must fit `fn`, too.
    hardware = Hardware.of(hardware)
    arguments = arguments_for(fn, tuple(batch), keywords)
    check_arguments(fn, arguments)

    # A search over meshes takes long: it has a limit, and reports its progress.
    if ranks is not None:
        meshes = tuple(list_meshes(ranks, hardware.ranks_per_node))
        began = time.monotonic()

        def say(text: str) -> None:
            print(f"fit, {time.monotonic() - began:.0f} s: {text}", file=sys.stderr, flush=True)

        work = SearchEffort(say, LIMIT_LINES, QUIET_S)
    else:
        meshes, work = (mesh,), SearchEffort()

    def specs_for(mesh: Mesh) -> Any:
        if ranks is None:
            return presets.full_shard(params, mesh) if specs is None else specs
        return choose_preset(params, mesh) if specs is None else specs(mesh)

    optimizer = adamw(1e-3) if optimizer is None else optimizer
    return FunctionSpace(fn, params, arguments, meshes, specs_for, optimizer, hardware, step_options, work)


def search_space(space: FunctionSpace, budget: int, seen: dict[Choice, Candidate] | None = None) -> Fit:
    """Find the fastest plan of a space within a budget.

    Args:
        seen: plans with their prices from searches for other budgets.

    Raises:
        BudgetError: nothing fits.
    """
    if not is_number(budget) or budget <= 0:
        raise SpecError(f"device_bytes={budget!r}: a number of bytes, more than 0.")
    walk = Walk(space, budget, space.work, {} if seen is None else seen, format_plan)
    best = walk.run()
    if best is None or not best.fits(budget):
        raise explain_nothing_fits(space, walk, best)

    # Say why the neighbours of the best plan, and the other meshes, were not taken.
    mesh = best.choice.mesh
    neighbours = [walk.seen[c] for c in space.neighbours(best.choice) if c in walk.seen]
    neighbours.sort(key=lambda c: (not c.fits(budget), c.seconds))  # those that fit come first
    meshes = {other: why for other, why in explain_meshes(space, walk, best).items() if other != mesh}

    # Plans are priced without verifying their schedules, so the best one is lowered again.
    lowered = space.lower(best.choice)
    plans = space.on(mesh)
    return Fit(
        specs=plans.specs_of(best.choice),
        options=plans.options_of(best.choice),
        chosen=best,
        device_bytes=budget,
        rejected=tuple((c, explain_rejection(c, best, budget)) for c in neighbours),
        lowered=lowered,
        timeline=lowered.timeline(space.hardware),
        mesh=mesh,
        looked_at=len(walk.seen),
        meshes=tuple(meshes.items()),
        cut_short=space.work.is_spent() or NOT_LOOKED_AT in meshes.values(),
    )


def explain_rejection(candidate: Candidate, best: Candidate, budget: int) -> str:
    """Say why a plan was not taken."""
    if not candidate.fits(budget):
        return f"{format_bytes(candidate.peak_bytes - budget)} too many"
    slower = candidate.relative_slowdown(best)
    return f"fits, {slower:.1%} slower" if slower > 0 else "fits, as fast"


def explain_meshes(space: FunctionSpace, walk: Walk, best: Candidate | None) -> dict[Mesh, str]:
    """Say why each mesh was not taken, by the best of its plans that were looked at.

    Args:
        best: the plan that was taken; None if none fits.
    """
    why: dict[Mesh, str] = {}
    for mesh in space.meshes:
        priced = [c for c in walk.seen.values() if c.choice.mesh == mesh]
        if not priced:
            why[mesh] = space.left_out.get(mesh, NOT_LOOKED_AT)
            continue

        # Where no priced plan fits, the fastest of them is a lower bound on those that would.
        cheapest, fastest = min(priced, key=walk.cost), min(priced, key=lambda c: c.seconds)
        if best is not None and cheapest.fits(walk.budget):
            why[mesh] = f"{cheapest.relative_slowdown(best):.1%} slower"
        elif best is not None and fastest.seconds >= best.seconds:
            why[mesh] = f"at least {fastest.relative_slowdown(best):.1%} slower"
        else:
            lacks = format_bytes(cheapest.peak_bytes - walk.budget)
            why[mesh] = f"nothing fits into {format_bytes(walk.budget)}: {lacks} too many"
    return why


def explain_nothing_fits(space: FunctionSpace, walk: Walk, least: Candidate | None) -> BudgetError:
    """Make the error of a budget that is too small.

    Args:
        least: the plan that lacks least; None if no mesh has a plan.
    """
    if len(space.meshes) > 1 or least is None:
        causes = [f"{mesh}: {cause}" for mesh, cause in explain_meshes(space, walk, None).items()]
        return BudgetError(
            f"nothing fits on {space.meshes[0].size} ranks, whatever the mesh:",
            causes,
            "more ranks, or rows that they divide.",
        )

    # On one mesh, name the smallest budget that would do, and what the memory goes to.
    analysis = space.lower(least.choice).memory_analysis()
    largest = sorted(analysis.peak.items(), key=lambda item: -item[1])[:3]
    return BudgetError(
        f"nothing fits into {format_bytes(walk.budget)}: the most frugal plan takes "
        f"{format_bytes(least.peak_bytes)} ({least.choice}). "
        f"Its peak, in instruction {analysis.at} ({analysis.line}), is made of:",
        [f"{name}: {format_bytes(count)}" for name, count in largest],
        f"a budget of {format_bytes(math.ceil(least.peak_bytes / 1e6) * 1e6)} would do; or change one thing: "
        f"more ranks (the mesh has {space.meshes[0].size}) for shards and state, smaller units "
        "(fnshard.units) for gathered units and gradients, a shorter sequence for activations.",
    )
