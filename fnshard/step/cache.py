"""Cache: keep the programs of a step by what they read of a batch, so that each is lowered once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fnshard import losses, tree
from fnshard.analysis.flops import kernel_flops
from fnshard.compiler.frontend.contexts import check_autocast, deterministic
from fnshard.compiler.frontend.indices import Indices, explain, ranges
from fnshard.compiler.frontend.trace import flatten_batch
from fnshard.compiler.ir.arguments import Arguments, signature_of
from fnshard.compiler.ir.deferred_imports import trace_again
from fnshard.compiler.kernels.inductor import warm_up
from fnshard.compiler.lower import Front, lower, schedule_for, trace_and_split
from fnshard.compiler.options import StepOptions
from fnshard.compiler.schedule.build import StepSettings
from fnshard.errors import StateError, TraceError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import check_specs
from fnshard.losses import unwrap_leaf
from fnshard.mesh import Mesh, check_mesh
from fnshard.optim.optimizer import Optimizer
from fnshard.runtime.executor.execute import cut_batch
from fnshard.step.batches import (
    Batch,
    BatchKey,
    batch_key,
    batch_tensors,
    bytes_of_batch,
    check_arguments,
    check_leaves,
    split_batch,
)
from fnshard.step.lowered import CompileStats, Lowered
from fnshard.step.programs import Programs, announce, fits
from fnshard.step.settings import FORWARD, check_order, fill_depths, step_settings

LENGTHS = 64  # the least number of programs that a step with `shapes` keeps: sequences may differ in length


class ProgramCache:
    """A cache of the programs of a function with its specs and options.

    It lowers the function once for each batch shape, and again for other values of what `fn` reads besides
    its arguments. It keeps at most `options.cache` programs.

    Args:
        trains: whether `fn` is differentiated; if not, the programs are forwards.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        specs: Any,
        mesh: Mesh,
        options: StepOptions,
        optimizer: Optimizer | None = None,
        *,
        trains: bool = True,
    ):
        if isinstance(fn, nn.Module):
            raise TraceError(
                f"`fn` is a function of (params, *batch), not the module {type(fn).__name__}.",
                fix="apply, params = fs.make_functional(model), and a function that calls "
                "apply(params, *inputs) and returns the loss.",
            )
        if not callable(fn):
            raise TraceError(f"`fn` is a function of (params, *batch), not {type(fn).__name__}.")

        check_mesh(mesh)
        self.fn, self.mesh, self.trains = fn, mesh, trains
        check_order(options, mesh)
        self.options = fill_depths(options, mesh)
        self._signature = signature_of(fn)
        context = mesh.axis_size("context") if "context" in mesh.names else 1
        self.shapes = options.shapes and options.shapes.of_function(self._signature, context)
        self.optimizer = optimizer
        self._set_specs(ResolvedSpecs.of(specs))
        if options.shapes is not None or options.micro_rows is not None:  # batches differ on purpose
            self.programs = Programs(max(options.cache, LENGTHS), lengths=True)
        else:
            self.programs = Programs(options.cache)

        # The latest program that `lower` made, and where the number of micro-batches varies, the latest one
        # by the key of one micro-batch.
        self.on_paper: tuple[BatchKey, Lowered] | None = None
        self._latest_micro: tuple[BatchKey, Lowered] | None = None
        self.lock = threading.RLock()
        self.stats = CompileStats()

    def arguments(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Arguments:
        """Return a batch in one form, however it was passed, so that there is one program for it.

        Sequences are padded, where `options.shapes` asks for it.
        """
        passed = Arguments(tuple(positional), keywords).in_order_of(self._signature)
        if self.shapes is not None:
            check_leaves(passed)
            passed = self.shapes.padded(passed)
        return passed

    def resolve(self, params: Any) -> None:
        """Complete handwritten specs from a tree of full leaves, in the form of that tree."""
        with self.lock:
            specs = self.specs.resolve(params)
            if not self.specs.complete or not self._has_programs:
                self._set_specs(specs)

    def share(self, other: ProgramCache) -> None:
        """Use the programs of another cache, which has the same options; both then share them."""
        self.programs, self.lock = other.programs, other.lock

    def follow(self, blocks: Any) -> None:
        """Take the form of a tree of stored blocks: `fn` sees the tree of parameters, not that of specs.

        Programs keep the form that they were lowered with. On one rank, blocks complete the specs.

        Raises:
            StateError: there are several ranks, and the specs do not know their leaves.
        """
        if not self.specs.complete:
            if self.mesh.size > 1:
                fix = "make them with match_specs or a preset, or call step.init first."
                raise StateError("the specs do not know the leaves' full shapes.", fix=fix)
            return self.resolve(blocks)
        with self.lock:
            # What `fn` was traced with must not change under its programs.
            if not self._has_programs and tree.flatten(blocks)[1] != self.specs.structure:
                self._set_specs(self.specs.align(blocks))

    def adopt(self, specs: Any) -> None:
        """Take specs that complete those of this cache, if these leave something open."""
        if not self.specs.complete:
            self._set_specs(ResolvedSpecs.of(specs))

    @property
    def _has_programs(self) -> bool:
        """Whether programs were lowered already, with the form that the parameters' tree has now."""
        return len(self.programs) > 0 or self.on_paper is not None

    def _set_specs(self, specs: ResolvedSpecs) -> None:
        """Check specs, and take them as those of this cache."""
        if specs.complete:
            check_specs(specs.seen, self.mesh)
        self.specs = specs

    def options_of(self, batch: Batch) -> StepOptions:
        """Return the options of this batch's program, in which `micro_rows` has become `accumulate`.

        Raises:
            StateError: the batch's leaves have different numbers of rows, or no multiple of `micro_rows`.
        """
        size = self.options.micro_rows
        if size is None:
            return self.options
        leaves = Arguments.of(batch).leaves[0]
        cut = {n: unwrap_leaf(v) for n, v in leaves.items() if isinstance(v, Tensor | losses.Sequence)}
        counts = {v.shape[0] if v.dim() else 0 for v in cut.values()}
        count = counts.pop() if len(counts) == 1 else 0
        if count == 0 or count % size:
            raise StateError(
                f"micro_rows={size}: a batch has as many rows in each of its leaves, a multiple of {size}:",
                [f"batch[{n!r}] {list(v.shape)}" for n, v in cut.items()],
                "add rows that count for nothing, or wrap what must not be cut in fs.Whole(...).",
            )
        return replace(self.options, accumulate=count // size, micro_rows=None)

    def lower(self, batch: Batch) -> Lowered:
        """Lower this rank's batch; the latest program is kept for the step that may follow."""
        check_arguments(self.fn, batch)
        check_leaves(batch)
        options = self.options_of(batch)
        key, micro = batch_key(batch), next(split_batch(batch, options.accumulate))
        check_autocast()
        with self.lock, deterministic(self.options.deterministic):
            known = self.programs.get(key)
            if known is not None:
                return known
            # The latest on paper is kept, so that a step after a look at its program is not traced again.
            if self.on_paper is None or not fits(self.on_paper, key):
                self.on_paper = key, self._make_program(key, batch, micro, options)
            return self.on_paper[1]

    def _make_program(self, key: BatchKey, batch: Batch, micro: Arguments, options: StepOptions) -> Lowered:
        """Make the program of a batch, from the kernels of the last one where they fit."""
        announce(self.fn, self.programs, key)
        if self.mesh.kind != "abstract":
            warm_up(self.mesh.device_type, options.backend)

        # Schedule known kernels, or trace and split `fn`.
        settings, known, compiled = self._step_settings(options), self._latest_micro, None
        if known is not None and fits(known, batch_key(micro)):
            # Another number of the same micro-batches needs nothing but another schedule of the same kernels.
            stages, compiled = known[1].stages, known[1].compiled
            front = Front(stages.program, stages.segments, settings.for_program(stages.program))
            stages = schedule_for(
                front, self.specs.stored, self.mesh, options, dict(stages.kernels), cost_of=kernel_flops
            )
        else:
            self.stats.traces += 1
            stages = lower(self.fn, self.specs, micro, self.mesh, settings, options, kernel_flops)

        lowered = Lowered(
            stages, options, compiled, self.optimizer, bytes_of_batch(batch),
            stats=self.stats, first=not len(self.programs),
        )  # fmt: skip
        # A thread may still compile the kernels that were taken over.
        if compiled is None and known is not None and stages.program is known[1].program:
            lowered.ahead = known[1].ahead
        if self.options.micro_rows is not None:
            self._latest_micro = batch_key(micro), lowered
        return lowered

    def _step_settings(self, options: StepOptions) -> StepSettings:
        """Return the settings of a training step, or of a forward."""
        return step_settings(self.optimizer, self.specs, self.mesh, options) if self.trains else FORWARD

    def front(self, batch: Batch, **changes: Any) -> Front:
        """Return the stages that read nothing but `fn`, for this rank's batch; the cache keeps none of it."""
        options = replace(self.options_of(batch), **changes)
        micro = next(split_batch(batch, options.accumulate))
        with self.lock:
            settings = self._step_settings(options)
            return trace_again(
                lambda: trace_and_split(self.fn, self.specs, micro, self.mesh, settings, options)
            )

    def tensors(self, lowered: Lowered, batch: Batch) -> tuple[dict[str, Tensor], set[str]]:
        """Return what `batch_tensors` returns for a batch, after a check of its indices.

        An index outside its table would read other memory, or stop a GPU without a line of code.

        Raises:
            StateError: indices are outside of the tables that they are looked up in.
        """
        tensors, whole = batch_tensors(batch, lowered.names["batch"])
        for values in cut_batch(tensors, whole, lowered.options.accumulate):
            if not lowered.indices.outside(values, lowered.program.constants):
                continue
            # Trace it again with the lines of code, which the error names: to keep them always would be slow.
            program = self.front(batch, sources=True).program
            program = program.traced or program
            outside = Indices.of(program).outside(values, program.constants)
            raise StateError(
                "numbers of the batch are outside of what they are looked up in:",
                [*explain(program, outside), *ranges(flatten_batch(batch)[0])],
                "token ids below the size of the vocabulary: is the tokenizer the model's own, and its "
                "embedding as large? Targets that do not count are ignore_index, -100.",
            )
        return tensors, whole

    def get(self, batch: Batch) -> Lowered:
        """Return the program of a batch: one that is kept, or one that is lowered now.

        Warn where batches need new programs again and again.
        """
        check_leaves(batch, values=True)
        key = batch_key(batch)
        with self.lock:
            known = self.programs.get(key)
            if known is not None:
                return known
            # The program that `lower` kept for this step moves to those that run.
            lowered, self.on_paper = self.lower(batch), None
            warning = self.programs.compare(key, lowered) if len(self.programs) else None
            self.programs.put(key, lowered)
            if warning:
                warnings.warn(warning, stacklevel=4)
            return lowered
