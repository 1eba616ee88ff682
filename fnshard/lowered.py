"""`Lowered`: a step on paper, every stage printable; and the cache of those that a step has compiled."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import nn

from fnshard import compiles, tree
from fnshard.arguments import Arguments, signature_of
from fnshard.batches import Batch, Key, batch_key, bytes_of_batch, check_arguments, check_leaves, micro_batch
from fnshard.codecs import decoding
from fnshard.compiler import cudagraph
from fnshard.compiler.attention import backends
from fnshard.compiler.build import AccumulateMode
from fnshard.compiler.compare import Difference, compare
from fnshard.compiler.fused_update import is_compiled
from fnshard.compiler.indices import Indices, explain, ranges
from fnshard.compiler.kernels import Boxed, compile_kernels, warm_up
from fnshard.compiler.ledger import Given, Ledger, MemoryAnalysis, MemoryTimeline, check_fits, measure
from fnshard.compiler.lower import Keeping, Passes, PlanOf, Stages, lower, trace_and_split
from fnshard.compiler.program import Program
from fnshard.compiler.remat import Remat
from fnshard.compiler.remat import check as check_remat
from fnshard.compiler.schedule import TRANSFERS, Run, Schedule
from fnshard.compiler.split import Segments
from fnshard.compiler.timeline import Timeline, simulate
from fnshard.compiler.trace import deterministic, flatten_batch, without_autocast
from fnshard.compiler.traffic import Traffic, analyse
from fnshard.compiler.transport import Kind
from fnshard.errors import SpecError, StateError, TraceError, report
from fnshard.hardware import Hardware
from fnshard.mesh import Mesh
from fnshard.programs import Programs, fits
from fnshard.runtime.collectives import DEFAULT_TIMEOUT
from fnshard.scaling import LossScale
from fnshard.shards import aligned, leaf_paths, resolve_specs, spec_paths
from fnshard.spec import LayoutSpec, check_specs
from fnshard.transform import Optimizer

__all__ = ["Lowered", "diff"]

Backend = Literal["inductor", "eager"]
UpdateMode = Literal["auto", "eager", "compiled"]
Kernels = Mapping[str, tuple[Boxed, Boxed | None]]


@dataclass(frozen=True)
class Options:
    """Everything about a step that is not its function, specs, mesh or optimizer; see `shard_step`."""

    accumulate: int = 1
    accumulate_mode: AccumulateMode = "reduce"
    passes: Passes = Passes()
    backend: Backend = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float | Literal["dynamic"] | None = None
    grad_norm: bool = False
    cache: int = 8
    timeout: float = DEFAULT_TIMEOUT
    remat: Remat = "none"
    save: tuple[str, ...] = ()
    disk_dir: str | None = None
    deterministic: bool = False
    update: UpdateMode = "auto"

    def __post_init__(self) -> None:
        wrong = check_remat(self.remat, self.save)
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            wrong.append(f"accumulate={self.accumulate!r}: a whole number of micro-batches, at least 1")
        if self.accumulate_mode not in ("reduce", "local"):
            wrong.append(f"accumulate_mode={self.accumulate_mode!r}: 'reduce' or 'local'")
        if self.backend not in ("inductor", "eager"):
            wrong.append(f"backend={self.backend!r}: 'inductor' or 'eager'")
        if self.update not in get_args(UpdateMode):
            wrong.append(f"update={self.update!r}: 'auto', 'eager' or 'compiled'")
        if not _counts(self.passes.prefetch, 2):
            wrong.append(f"prefetch={self.passes.prefetch!r}: a number of kernels, or (forward, backward)")
        if not _counts((self.passes.overlap,), 1):
            wrong.append(f"overlap={self.passes.overlap!r}: a whole number of kernels, 0 (none) or more")
        if not _counts((self.cache,), 1) or self.cache < 1:
            wrong.append(f"cache={self.cache!r}: a whole number of batch shapes, at least 1")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            wrong.append(f"timeout={self.timeout!r}: seconds, more than 0")
        if not isinstance(self.deterministic, bool):
            wrong.append(f"deterministic={self.deterministic!r}: True or False")
        if self.disk_dir is not None and not isinstance(self.disk_dir, str | os.PathLike):
            wrong.append(f"disk_dir={self.disk_dir!r}: the path of an existing directory")
        if wrong:
            raise SpecError(report("these options of a step are not to be had:", wrong))
        LossScale.choose(self.loss_scale, fp16=False)

    def compiles_update(self, optimizer: Optimizer | None, device_type: str) -> bool:
        """Whether Inductor compiles the optimizer, too, for such a device."""
        return is_compiled(self.update, optimizer, self.backend, device_type)


def _counts(values: Any, length: int) -> bool:
    """Whether these are so many whole numbers, none negative."""
    return (
        isinstance(values, tuple)
        and len(values) == length
        and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
    )


@dataclass(repr=False)
class Lowered:
    """A step for one batch shape, on paper: `program`, `segments`, `kernels`, `schedule`.

    Nothing has run, nothing is compiled until `compile`. Printing it prints the schedule. `batch_bytes`: of
    this rank's batch, by leaf. `moved`: bytes of transfers by instruction number, once a ledger was made.
    """

    stages: Stages
    options: Options
    compiled: Kernels | None = None
    optimizer: Optimizer | None = None
    batch_bytes: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[int, int] | None = field(default=None, init=False, repr=False)

    @property
    def program(self) -> Program:
        """The forward of `fn` as composite ATen ops."""
        return self.stages.program

    @cached_property
    def indices(self) -> Indices:
        """What it looks up by integers of the batch."""
        return Indices.of(self.program)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """Of the batch leaves and the random keys that it takes, by kind ("batch", "key")."""
        inputs = self.program.inputs
        return {kind: [i.name for i in inputs if i.kind == kind] for kind in ("batch", "key")}

    @property
    def segments(self) -> Segments:
        """The program, cut."""
        return self.stages.segments

    @property
    def kernels(self) -> Mapping[str, Any]:
        """The distinct segments, differentiated."""
        return self.stages.kernels

    @property
    def schedule(self) -> Schedule:
        """The ordered instructions."""
        return self.stages.schedule

    @property
    def attention(self) -> dict[str, int]:
        """How many attentions of one forward were frozen as which of torch's kernels: `{"cudnn": 12}`."""
        runs = [line for line in self.schedule.instructions if isinstance(line, Run) and not line.backward]
        each = {name: backends(k.source.graph, k.forward.graph) for name, k in self.schedule.kernels.items()}
        return dict(sum((each[run.kernel] for run in runs), Counter()))

    def as_text(self) -> str:
        """The schedule, a line per instruction."""
        return self.schedule.as_text()

    def memory_analysis(self, *, transport: Kind | None = None) -> MemoryAnalysis:
        """Bytes of one rank: the peak and what it is made of, between steps, host and disk, by unit and leaf.

        After `compile` with Inductor its generated code is counted, fusion and all; before, or with the
        eager backend, the liveness of the kernels' graphs.

        Args:
            transport: "shared" (CPU ranks of one host), "p2p", "native"; None looks at the mesh.

        Raises:
            SpecError: another transport.
        """
        return self._ledger(transport).analysis

    def memory_timeline(self, *, transport: Kind | None = None) -> MemoryTimeline:
        """Bytes by category at every instruction of the schedule, each at its worst moment."""
        return self._ledger(transport).timeline

    def _ledger(self, transport: Kind | None = None) -> Ledger:
        if transport is not None and transport not in get_args(Kind):
            raise SpecError(
                report(f"transport={transport!r}: one of {', '.join(map(repr, get_args(Kind)))}, or None.")
            )
        given = Given(
            self.program, self.batch_bytes, self.optimizer, self.compiled, transport, self._fused_update
        )
        found = measure(self.schedule, given)
        self.moved = found.moved
        return found

    def _moved(self) -> Mapping[int, int]:
        """Bytes of transfers; they do not depend on how kernels are compiled, or on the transport."""
        if self.moved is None:
            transfers = any(isinstance(line, TRANSFERS) for line in self.schedule.instructions)
            self.moved = self._ledger().moved if transfers else {}
        return self.moved

    def assert_fits(self, bytes: float) -> None:
        """Refuse a step whose peak on the device is above `bytes`; for tests of one's own.

        Raises:
            BudgetError: the peak, where it is, the biggest parts of it, and the ways out.
            SpecError: `bytes` is no number above 0.
        """
        if isinstance(bytes, bool) or not isinstance(bytes, int | float) or not bytes > 0:
            raise SpecError(report(f"assert_fits({bytes!r}): a number of bytes above 0, such as 24e9."))
        check_fits(self.memory_analysis(), bytes)

    def comm_analysis(self) -> Traffic:
        """Bytes on the wire of one step: by collective, axes, unit and phase, and transfers to the host.

        `analysis["gather"]["bytes"]`: of whole buffers; see `compiler.traffic`.
        """
        return analyse(self.schedule, self._moved())

    def timeline(self, hardware: Hardware | str) -> Timeline:
        """A simulated run on `hardware`: step time, what is exposed, MFU; see `compiler.timeline`.

        Args:
            hardware: a `Hardware`, or the name of one ("h100").

        Raises:
            SpecError: neither.
        """
        hardware, tokens = Hardware.of(hardware), self._tokens()
        fused = self.options.backend == "inductor"
        slots = len(self.optimizer.slots) if self.optimizer else 0
        return simulate(
            self.schedule, hardware, fused=fused, slots=slots, tokens=tokens, moved=self._moved(),
            fused_update=self._fused_update,
        )  # fmt: skip

    @property
    def _fused_update(self) -> bool:
        return self.options.compiles_update(self.optimizer, self.schedule.mesh.device_type)

    def _tokens(self) -> int | None:
        """Of one step on all ranks: where all int64 leaves of the batch with two dims, as they are before
        they are cut into micro-batches, have as many numbers.
        """
        program = self.stages.program
        named = zip(program.inputs, program.placeholders, strict=True)
        values = {known.name: node.meta["val"] for known, node in named if known.kind == "batch"}
        rows = {n for n, v in values.items() if v.dim() == 2 and v.dtype == torch.int64}
        counts = {self.batch_bytes[n] // 8 for n in rows & set(self.batch_bytes)}
        return counts.pop() * self.schedule.mesh.data_size if len(counts) == 1 else None

    def compile(self) -> Lowered:
        """Compile the kernels on the options' backend, once; returns itself."""
        if self.compiled is None:
            with deterministic(self.options.deterministic):
                self.compiled = compile_kernels(
                    self.stages.kernels.values(), backend=self.options.backend, options=self.options.inductor
                )
        return self

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        attention = "".join(f"{n} {name} attentions, " for name, n in self.attention.items())
        return f"Lowered({self.schedule!r}, {attention}{'not ' if self.compiled is None else ''}compiled)"


def diff(before: Lowered, after: Lowered) -> Difference:
    """What one lowered step has that another has not: instructions, bytes, collectives; prints short.

    >>> from fnshard import LayoutSpec, P, make_mesh, match_specs, shard_step
    >>> params, mesh = {"w": torch.ones(4, 4)}, make_mesh(shard=4, abstract=True)
    >>> def lowered(spec):
    ...     step = shard_step(lambda p, x: (x @ p["w"]).sum(), match_specs(params, [("*", spec)]), mesh=mesh)
    ...     return step.lower(params, torch.ones(2, 4))
    >>> list(diff(lowered(LayoutSpec()), lowered(LayoutSpec(P("shard")))).collectives)
    ['all_reduce', 'gather', 'reduce_scatter']

    Raises:
        SpecError: one of them is no `Lowered`.
    """
    wrong = [type(each).__name__ for each in (before, after) if not isinstance(each, Lowered)]
    if wrong:
        raise SpecError(
            report(
                f"fs.diff compares two lowered steps, not {' and '.join(wrong)}.",
                fix="step.lower(params, *batch) of each.",
            )
        )
    return compare(
        *((each.schedule, each.memory_analysis(), each.comm_analysis()) for each in (before, after))
    )


class Lowering:
    """A function, its specs and how to plan its step; lowers each batch shape once (a bounded cache),
    and again for other values of what `fn` reads beside its arguments."""

    def __init__(
        self,
        fn: Callable[..., Any],
        specs: Any,
        mesh: Mesh,
        options: Options,
        plan: PlanOf | None,
        optimizer: Optimizer | None = None,
    ):
        if isinstance(fn, nn.Module):
            raise TraceError(
                report(
                    f"`fn` is a function of (params, *batch), not the module {type(fn).__name__}.",
                    fix="apply, params = fs.make_functional(model), and a function that calls "
                    "apply(params, *inputs) and returns the loss.",
                )
            )
        if not callable(fn):
            raise TraceError(f"`fn` is a function of (params, *batch), not {type(fn).__name__}.")
        if not isinstance(mesh, Mesh):
            raise SpecError(f"mesh={mesh!r} is no mesh: make one with fs.make_mesh(shard=8).")
        self.fn, self.mesh, self.options, self.plan = fn, mesh, options, plan
        self._signature = signature_of(fn)
        self.optimizer = optimizer
        self._take(specs)
        self.programs = Programs(options.cache)
        self.on_paper: tuple[Key, Lowered] | None = None
        self.lock = threading.RLock()

    def arguments(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Arguments:
        """A batch in one form, however it was passed: there is one program for it."""
        return Arguments(tuple(positional), keywords).in_order_of(self._signature)

    def resolve(self, params: Any) -> None:
        """Complete handwritten specs from a tree of full leaves, in the form of that tree."""
        with self.lock:
            specs = resolve_specs(self.tree, params)
            if not self.resolved or not self._lowered:
                self._take(specs)

    def follow(self, blocks: Any) -> None:
        """Take the form of a tree of stored blocks: `fn` sees the parameters' own tree, not the specs'.

        What is lowered keeps the form that it was lowered with.
        """
        with self.lock:
            if not self._lowered and tree.flatten(blocks)[1] != self.structure:
                self._take(aligned(self.tree, blocks))

    def adopt(self, specs: Any) -> None:
        """Take the same specs with what they left open."""
        if not self.resolved:
            self._take(specs)

    @property
    def _lowered(self) -> bool:
        return len(self.programs) > 0 or self.on_paper is not None

    def _take(self, specs: Any) -> None:
        """`specs`: of what is stored, by path; `leaves`: of what `fn` sees.

        `resolved`: whether the specs know shape, unit and trainability of their leaves.
        """
        self.tree = specs
        self.specs: Mapping[str, LayoutSpec]
        self.specs, self.structure = spec_paths(specs)
        self.leaves, self.leaf_structure = leaf_paths(specs)
        self.resolved = all(s.resolved for s in self.specs.values())
        if self.resolved:
            check_specs(self.specs, self.mesh)

    def lower(self, batch: Batch) -> Lowered:
        """All stages for this rank's batch; the last one lowered is kept for the step that may follow.

        Raises:
            StateError: the batch does not fit `fn`, or cannot be cut into micro-batches.
        """
        check_arguments(self.fn, batch)
        check_leaves(batch)
        key, micro = batch_key(batch), micro_batch(batch, self.options.accumulate)
        with self.lock, without_autocast(), deterministic(self.options.deterministic):
            known = self.programs.get(key)
            if known is not None:
                return known
            if self.on_paper is None or not fits(self.on_paper, key):
                compiles.announce(self, key)
                if self.mesh.kind != "abstract":
                    warm_up(self.mesh.device_type, self.options.backend)
                keeping = Keeping(self.options.remat, self.options.save)
                stages = lower(*self._front(micro), self.options.passes, keeping)
                if self.options.passes.graph:
                    cudagraph.check(stages.schedule, self.optimizer is not None)
                sizes = bytes_of_batch(batch)
                lowered = Lowered(stages, self.options, optimizer=self.optimizer, batch_bytes=sizes)
                self.on_paper = key, lowered
            return self.on_paper[1]

    def _front(self, micro: Batch) -> tuple[Any, ...]:
        fn = decoding(self.fn, self.tree)
        return fn, self.specs, self.structure, micro, self.mesh, self.plan

    def check_indices(self, lowered: Lowered, batch: Batch, micros: Sequence[Mapping[str, Any]]) -> None:
        """Refuse numbers of a batch that are outside of what they are looked up in.

        Args:
            micros: the tensors of each micro-batch, by name.

        Raises:
            StateError: each lookup with its table, the line of the user's code, and the batch's numbers.
        """
        for values in micros:
            if not lowered.indices.outside(values, lowered.program.constants):
                continue
            with self.lock, without_autocast():  # once more, for the lines of code
                micro = micro_batch(batch, self.options.accumulate)
                program = trace_and_split(*self._front(micro), sources=True).program
            outside = Indices.of(program).outside(values, program.constants)
            raise StateError(
                report(
                    "numbers of the batch are outside of what they are looked up in:",
                    [*explain(program, outside), *ranges(flatten_batch(batch)[0])],
                    "token ids below the size of the vocabulary: is the tokenizer the model's own, and its "
                    "embedding as large? Targets that do not count are ignore_index, -100.",
                )
            )

    def of(self, batch: Batch) -> Lowered:
        """A program that is kept, or lowered now; a warning says what makes another one again and again."""
        check_leaves(batch, values=True)
        key = batch_key(batch)
        with self.lock:
            known = self.programs.get(key)
            if known is not None:
                return known
            if self.on_paper is not None and fits(self.on_paper, key):
                compiles.announce(self, key, adopted=True)
            lowered, self.on_paper = self.lower(batch), None
            warning = self.programs.compare(key, lowered) if len(self.programs) else None
            self.programs.put(key, lowered)
            if warning:
                warnings.warn(warning, stacklevel=4)
            return lowered
