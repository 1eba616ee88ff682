"""Options: all that a step is made with besides its function, specs, mesh and optimizer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from fnshard.compiler.kernels.inductor import inductor_options
from fnshard.compiler.kernels.remat import Remat
from fnshard.compiler.kernels.remat import check as check_remat
from fnshard.compiler.length_buckets import Buckets
from fnshard.compiler.place.strategies import ContextAttention, Residual
from fnshard.compiler.schedule.build import AccumulateMode
from fnshard.compiler.schedule.passes import Pass
from fnshard.compiler.schedule.tasks import MicroOrder
from fnshard.errors import SpecError, counts, is_number, misfits, nearest, one_of
from fnshard.mesh.deadlock import DEFAULT_TIMEOUT
from fnshard.optim.loss_scale import LossScale

__all__ = ["StepOptions"]

Backend = Literal["inductor", "eager"]
UpdateMode = Literal["auto", "eager", "compiled"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class StepOptions(Mapping[str, Any]):
    """The options of a step: all that it is made with besides its function, specs, mesh and optimizer.

    `shard_step`, `shard_forward` and `fit` take these fields as keyword arguments. An instance is a mapping
    of them, so that two stars pass it whole: `shard_step(fn, specs, **options)`, as `fit(...).options` is.

    Args:
        accumulate: micro-batches per step; batch leaves are cut along dim 0, unless `Whole`.
        micro_rows: instead of `accumulate`, the rows of a micro-batch: a batch is cut into as many
            micro-batches as it takes, the same number on all ranks. Each number is scheduled once, with the
            same kernels.
        accumulate_mode: "reduce" every micro-batch, or accumulate "local" full gradients and reduce once.
        micro_order: "depth": each micro-batch runs forward and backward before the next. "breadth": all run
            through one unit before the next unit, so that a unit's leaves are gathered once forward and once
            backward, and its gradients are summed by each rank and reduced once, however many micro-batches
            there are (Lamy-Poirier 2022); `accumulate_mode` has no effect. What the backward needs is kept
            for all of them: with `remat="unit"` the units' inputs, with "unit+offload" on the host. On a mesh
            with an axis "pipeline" each stage runs the micro-batches that have come to it, and sums their
            gradients before ranks do: "depth" limits how many are under way (1F1B, interleaved where a stage
            has several chunks), "breadth" does not (GPipe). "zero_bubble" limits them as "depth" does, and
            divides each backward in two: the cotangents that other stages wait for come first, the gradients
            of leaves when a stage would be idle, or when it would keep too much (Qi et al. 2023).
        zero_bubble_memory: with "zero_bubble", the bytes that a stage may keep for its backward, as a
            multiple of the most that any stage keeps with "depth". With more, less time is idle, up to what p
            micro-batches of each chunk keep on p stages.
        prefetch: how many kernels ahead gathers are issued, (forward, backward); 0 is none. All kernels of a
            unit count as one where micro-batches run breadth-first, here and for `overlap`. None is 1, and 0
            for CPU ranks that share memory, whose collectives run on the thread that computes.
        overlap: how many kernels later reductions are waited for, and updates, which GPUs compute on a stream
            of their own where they wait for nothing global (clipping, an `fs.Mean`); None as with
            `prefetch`.
        passes: functions from a schedule to a schedule, instead of `prefetch` and `overlap`:
            `fs.passes.default(prefetch=2) + [mine]`. The schedule is verified after each of them.
        backend: "inductor", or "eager": the same graphs uncompiled.
        mode, options: as `torch.compile` takes them, but for those that make CUDA graphs, which are an error.
        loss_scale: a number, "dynamic", or None: dynamic where a leaf trains in fp16. With a dynamic scale,
            and no other, a step that overflows is skipped: it is no update, for the optimizer's count and for
            the rate's schedule; what `fn` has written to leaves is stored all the same, as BatchNorm's
            statistics are in torch. The host then waits for its norm, and a device idles before updates.
        grad_norm: put the global gradient norm into the metrics (clipping does anyway).
        remat: what is kept for the backward: "none" (all that it needs), "unit" (a unit's inputs; the rest
            is computed again), "offload" (all, on the host), "unit+offload", a fraction of what it needs; or
            a dict from unit globs to these, where units that no glob matches keep everything. With "unit" and
            with a fraction, 1.0 too, what ranks along a tensor axis have gathered of their sequences is
            gathered again for the backward. With "unit" a unit whose rows go to experts runs forward again
            before its backward, all-to-alls and all, so that these rows are not kept.
        save: with "unit", ops whose results are kept all the same: "matmul", "attention", "aten.mm", globs.
        disk_dir: an existing directory for what is stored on disk (`LayoutSpec.memory`, `optimizer_memory`).
        deterministic: torch's deterministic algorithms alone, and no benchmarks in Inductor: the same bits
            again on the same GPUs. An op that has none is an error. CPUs give the same bits without.
        update: "compiled": Inductor makes one kernel of a unit's update, casts and stored copies in it;
            "eager": torch's fused optimizers. "auto" compiles on accelerators with backend "inductor", where
            the optimizer has `numbers`. What the host updates is updated eagerly.
        residual: what activations are between layers that a tensor axis splits (`LayoutSpec.compute`):
            "split" along the sequence (sequence parallelism: less memory, as many bytes), or "whole".
        context_attention: how attention runs over a sequence that the "context" axis splits: "ulysses", by
            all-to-alls from sequence to heads and back; "gather", each rank's queries with all keys and
            values; "ring", keys and values go round the ranks, one block at a time, and what is kept of them
            is the rank's own (Liu et al. 2023; no dropout). "auto" is what moves the fewest bytes of whole
            attention over heads, rows or gathered keys.
        expert_capacity: room for the rows that a rank sends to each other's experts, where a data axis splits
            stacks of experts (`LayoutSpec.compute`), as a multiple of an even share. None: for all rows, so
            any routing fits; with less, a step that needs more is a StateError, and says how much.
        shapes: pads batches to few lengths, `fs.Buckets([256, 512], pad={"labels": -100, "*": 0})`.
        cache: how many compiled programs are kept, by batch shape and by the values that `fn` reads; with
            `shapes` at least 64.
        timeout: seconds after which a silent peer is an error.
        sources: let programs keep the line of your code that each of their ops comes from; tracing takes
            longer. Errors name lines without it.

    Raises:
        SpecError: every field that is not what it may be, in one error.

    >>> options = StepOptions(accumulate=4, prefetch=2)
    >>> options.prefetch, {**options}["accumulate"]
    ((2, 2), 4)
    """

    accumulate: int = 1
    micro_rows: int | None = None
    accumulate_mode: AccumulateMode = "reduce"
    micro_order: MicroOrder = "depth"
    zero_bubble_memory: float = 1.0
    prefetch: int | tuple[int, int] | None = None
    overlap: int | None = None
    passes: Sequence[Pass] | None = None
    backend: Backend = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    grad_norm: bool = False
    remat: Remat = "none"
    save: Sequence[str] = ()
    disk_dir: str | None = None
    deterministic: bool = False
    update: UpdateMode = "auto"
    residual: Residual = "split"
    context_attention: ContextAttention = "auto"
    expert_capacity: float | None = None
    shapes: Buckets | None = None
    cache: int = 8
    timeout: float = DEFAULT_TIMEOUT
    sources: bool = False

    def __post_init__(self) -> None:
        wrong = [*check_remat(self.remat, self.save), *misfits(vars(self), _EXPECTED)]
        fix = ""
        if self.passes is not None and (self.prefetch, self.overlap) != (None, None):
            wrong.append("passes= takes the place of prefetch= and overlap=, and both are given")
            fix = "passes=fs.passes.default(prefetch=(2, 2), overlap=1) + [mine]."
        if self.micro_rows is not None and self.accumulate != 1:
            wrong.append("micro_rows= takes the place of accumulate=, and both are given")
        if wrong:
            raise SpecError("invalid options of a step:", wrong, fix)
        LossScale.choose(self.loss_scale, fp16=False)
        _ = self.inductor  # refuses what torch.compile does not have

        # Write sequences in one form, so that equal options compare equal.
        depth = (self.prefetch, self.prefetch) if isinstance(self.prefetch, int) else self.prefetch
        passes = None if self.passes is None else tuple(self.passes)
        for name, value in {"prefetch": depth, "passes": passes, "save": tuple(self.save)}.items():
            object.__setattr__(self, name, value)

    @property
    def inductor(self) -> dict[str, Any]:
        """`mode` and `options` as one dict of Inductor's options."""
        return inductor_options(self.mode, self.options)

    def __getitem__(self, name: str) -> Any:
        if name not in vars(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


_EXPECTED = {
    "accumulate": counts(1, "a whole number of micro-batches"),
    "micro_rows": (lambda v: v is None or counts(1)[0](v), "a whole number of rows, or None"),
    "accumulate_mode": one_of(*get_args(AccumulateMode)), "micro_order": one_of(*get_args(MicroOrder)),
    "backend": one_of(*get_args(Backend)),
    "update": one_of(*get_args(UpdateMode)), "residual": one_of(*get_args(Residual)),
    "context_attention": one_of(*get_args(ContextAttention)),
    "expert_capacity": (lambda v: v is None or (is_number(v) and v > 0), "a number above 0, or None"),
    "zero_bubble_memory": (lambda v: is_number(v) and v >= 1, "a number from 1"),
    "deterministic": one_of(True, False), "grad_norm": one_of(True, False), "sources": one_of(True, False),
    "shapes": (lambda v: isinstance(v, Buckets | None), "fs.Buckets([256, 512], pad=...), or None"),
    "prefetch": (
        lambda v: v is None or counts(0)[0](v)
        or (isinstance(v, tuple) and len(v) == 2 and all(map(counts(0)[0], v))),
        "a number of kernels, or (forward, backward)",
    ),
    "overlap": (lambda v: v is None or counts(0)[0](v), "a whole number of kernels, at least 0"),
    "passes": (
        lambda v: v is None or (isinstance(v, tuple | list) and all(map(callable, v))),
        "a list of functions from a schedule to a schedule, fs.passes.default() + [mine], or None",
    ),
    "cache": counts(1, "a whole number of batch shapes"),
    "timeout": (lambda v: is_number(v) and v > 0, "seconds, more than 0"),
    "disk_dir": (lambda v: isinstance(v, str | os.PathLike | None), "the path of an existing directory"),
}  # fmt: skip


def takes_options(function: F) -> F:
    """Show the fields of `StepOptions` in the signature of a function that takes them as keywords.

    `help` and an editor's console read it. They are declared nowhere else.
    """
    signature = inspect.signature(function)
    declared = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    # Annotations are evaluated, since the function's own module may not have these names.
    options = inspect.signature(StepOptions, eval_str=True).parameters.values()
    function.__signature__ = signature.replace(parameters=[*declared, *options])
    return function


def read_options(function: str, given: Mapping[str, Any], wrong: Sequence[str] = ()) -> StepOptions:
    """Return the keyword arguments of a function as options.

    Args:
        function: its name.
        wrong: what is wrong with its other arguments, a line each.

    Raises:
        SpecError: names that no option has, and what is wrong besides; or as `StepOptions` raises.
    """
    names = [each.name for each in fields(StepOptions)]
    unknown = [name for name in given if name not in names]
    wrong = [*wrong, *(f"{name}=: no option of a step{nearest(name, names)}" for name in unknown)]
    if wrong:
        raise SpecError(f"invalid arguments of {function}:", wrong, "help(fs.StepOptions) has all options.")
    return StepOptions(**given)
