"""Lowering: the lowered steps that a step has compiled, by what they depend on of a batch."""

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fnshard import tree
from fnshard.compiler.frontend.indices import Indices, explain, ranges
from fnshard.compiler.frontend.trace import deterministic, flatten_batch, without_autocast
from fnshard.compiler.ir.arguments import Arguments, signature_of
from fnshard.compiler.kernels.inductor import warm_up
from fnshard.compiler.kernels.split import Segments
from fnshard.compiler.kernels.symbolic import SharedKernels
from fnshard.compiler.lower import Front, Keeping, PlanOf, lower, trace_and_split
from fnshard.errors import SpecError, StateError, TraceError, leaves, report
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, check_specs
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer
from fnshard.runtime.executor import cuda_graph
from fnshard.step import compiles
from fnshard.step.batches import (
    Batch,
    BatchKey,
    batch_key,
    bytes_of_batch,
    check_arguments,
    check_leaves,
    micro_batch,
)
from fnshard.step.lowered import CompileStats, Lowered
from fnshard.step.options import Options
from fnshard.step.programs import Programs, fits

LENGTHS = 64  # of one step that are kept, at least


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
        kernels: Lowering | None = None,
    ):
        if isinstance(fn, nn.Module):
            raise TraceError(
                f"`fn` is a function of (params, *batch), not the module {type(fn).__name__}.",
                fix="apply, params = fs.make_functional(model), and a function that calls "
                "apply(params, *inputs) and returns the loss.",
            )
        if not callable(fn):
            raise TraceError(f"`fn` is a function of (params, *batch), not {type(fn).__name__}.")
        if not isinstance(mesh, Mesh):
            raise SpecError(f"mesh={mesh!r} is no mesh: make one with fs.make_mesh(shard=8).")
        self.fn, self.mesh, self.options, self.plan = fn, mesh, options, plan
        self._signature = signature_of(fn)
        self.shapes = options.shapes and options.shapes.of_function(self._signature)
        self.optimizer = optimizer
        self._take(ResolvedSpecs.of(specs))
        self.programs = (
            Programs(max(options.cache, LENGTHS), True) if options.shapes else Programs(options.cache)
        )
        self.kernels = SharedKernels()  # of batches of several lengths
        self.on_paper: tuple[BatchKey, Lowered] | None = None
        self.lock = threading.RLock()
        self.stats = CompileStats()
        self.others: Callable[[], Sequence[Lowered]] = tuple if kernels is None else kernels.known

    def arguments(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Arguments:
        """A batch in one form, however it was passed: there is one program for it. Sequences are padded, if
        they are to be."""
        passed = Arguments(tuple(positional), keywords).in_order_of(self._signature)
        if self.shapes is not None:
            check_leaves(passed)
            passed = self.shapes.padded(passed)
        return passed

    def resolve(self, params: Any) -> None:
        """Complete handwritten specs from a tree of full leaves, in the form of that tree."""
        with self.lock:
            specs = self.specs.resolve(params)
            if not self.specs.complete or not self._lowered:
                self._take(specs)

    def follow(self, blocks: Any) -> None:
        """Take the form of a tree of stored blocks: `fn` sees the parameters' own tree, not the specs'.

        What is lowered keeps the form that it was lowered with.
        """
        with self.lock:
            if not self._lowered and tree.flatten(blocks)[1] != self.specs.structure:
                self._take(self.specs.align(blocks))

    def adopt(self, specs: Any) -> None:
        """Take the same specs with what they left open."""
        if not self.specs.complete:
            self._take(ResolvedSpecs.of(specs))

    @property
    def _lowered(self) -> bool:
        return len(self.programs) > 0 or self.on_paper is not None

    def _take(self, specs: ResolvedSpecs) -> None:
        if specs.complete:
            check_specs(specs.paired, self.mesh)
        self.specs = specs

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
                self.on_paper = key, self._traced(key, batch, micro)
            return self.on_paper[1]

    def _traced(self, key: BatchKey, batch: Batch, micro: Arguments) -> Lowered:
        if self.options.shapes is None or not len(self.programs):
            compiles.announce(self, key)
        self.stats.traces += 1
        if self.mesh.kind != "abstract":
            warm_up(self.mesh.device_type, self.options.backend)
        keeping, sizes = Keeping(self.options.remat, self.options.save), bytes_of_batch(batch)
        stages = lower(
            self.fn, self.specs, micro, self.mesh, self.plan, self.options.passes, keeping,
            self.options.residual, self.options.context_attention,
        )  # fmt: skip
        shared = self._shared(batch)
        known = {"stats": self.stats, "others": self.others, "first": not len(self.programs)}
        lowered = Lowered(stages, self.options, None, self.optimizer, sizes, shared, **known)
        return self._checked(lowered)

    def _checked(self, lowered: Lowered) -> Lowered:
        if self.options.passes.graph:
            cuda_graph.check(lowered.schedule, self.optimizer is not None)
        warning = gathered_at_once(lowered.segments, self.specs.stored, self.mesh)
        if warning:
            warnings.warn(warning, stacklevel=5)
        return lowered

    def compile(self, lowered: Lowered, batch: Batch) -> None:
        """Compile what is not compiled; kernels of a further length are announced, if it needs its own."""
        before = len(self.kernels)
        lowered.compile()
        if 0 < before < len(self.kernels):
            compiles.announce(self, batch_key(batch))

    def _shared(self, batch: Batch) -> tuple[SharedKernels, int] | None:
        """What a lowering of this batch shares with those of other lengths."""
        if self.shapes is None or self.options.backend != "inductor":
            return None
        length = self.shapes.length(Arguments.of(batch))
        return None if length is None else (self.kernels, length)

    def front(self, batch: Batch, *, sources: bool = False) -> Front:
        """The stages that look at `fn` alone, for this rank's batch; nothing of it is kept.

        Args:
            sources: keep where in the user's code each node comes from.
        """
        micro = micro_batch(batch, self.options.accumulate)
        with self.lock, without_autocast():
            return trace_and_split(
                self.fn, self.specs, micro, self.mesh, self.plan, sources, self.options.residual,
                self.options.context_attention,
            )  # fmt: skip

    def known(self) -> list[Lowered]:
        """What it has lowered and keeps."""
        return [lowered for _, lowered in self._entries]

    @property
    def _entries(self) -> list[tuple[BatchKey, Lowered]]:
        return self.programs.entries + ([self.on_paper] if self.on_paper is not None else [])

    def share(self, other: Lowering) -> None:
        """Keep the programs that another lowering of the same function and specs has."""
        for key, known in other._entries:
            self.programs.put(key, replace(known, options=self.options))

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
            program = self.front(batch, sources=True).program  # once more, for the lines of code
            program = program.traced or program
            outside = Indices.of(program).outside(values, program.constants)
            raise StateError(
                "numbers of the batch are outside of what they are looked up in:",
                [*explain(program, outside), *ranges(flatten_batch(batch)[0])],
                "token ids below the size of the vocabulary: is the tokenizer the model's own, and its "
                "embedding as large? Targets that do not count are ignore_index, -100.",
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


def gathered_at_once(segments: Segments, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> str | None:
    """A warning where one kernel reads more than two units hold: prefetching keeps two anyhow."""
    full_bytes = {
        path: math.prod(spec.shape) * spec.compute_dtype.itemsize
        for path, spec in specs.items()
        if spec.reshard and mesh.ordered(spec.storage.axes)
    }
    units: Counter[str] = Counter()
    for path, size in full_bytes.items():
        units[specs[path].unit] += size
    found = [[p for p in segment.leaves if p in full_bytes] for segment in segments.segments]
    largest = max(found, key=lambda paths: sum(full_bytes[p] for p in paths), default=[])
    total = sum(full_bytes[p] for p in largest)
    if not largest or total <= 2 * max(units.values()):
        return None
    lines = [f"params[{p!r}] {full_bytes[p] / 1e6:.3f} MB" for p in largest]
    return report(
        f"one kernel reads {leaves(len(largest))} of {len({specs[p].unit for p in largest})} units, which "
        f"are gathered together, {total / 1e6:.3f} MB on every rank:",
        [*lines[:8], *([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])],
        "let an operation read the leaves of one unit: what fn stacks or concatenates can be stored as one "
        "leaf, as torch.func.stack_module_state makes it.",
    )
