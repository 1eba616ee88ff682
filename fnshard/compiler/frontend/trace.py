"""Trace `fn` on fake leaves into a Program, in stages.

This is the only module that uses torch's proxy tracer before autograd dispatch, and that makes fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx

from fnshard import tree
from fnshard.compiler.frontend.contexts import LOCK, Surroundings, check_autocast
from fnshard.compiler.frontend.exchange import DIFFERENTIABLE, copy_outgoing, tracing_on
from fnshard.compiler.frontend.functions import HOOK
from fnshard.compiler.frontend.host_random import GENERATORS, refuse_draws
from fnshard.compiler.frontend.normalize import normalize
from fnshard.compiler.frontend.ragged import run as ragged_run
from fnshard.compiler.frontend.refusals import (
    check_constants,
    check_program,
    check_requires_grad,
    written_inputs,
)
from fnshard.compiler.frontend.size_bounds import Limits
from fnshard.compiler.frontend.transforms import Differentiable, Retrace
from fnshard.compiler.frontend.unsupported import refusals
from fnshard.compiler.ir import source_lines
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.containers import is_plain
from fnshard.compiler.ir.failures import explain, higher_order
from fnshard.compiler.ir.guard import Guard
from fnshard.compiler.ir.program import Input, Outputs, Program, describe, propagate
from fnshard.compiler.ir.source_lines import user_traceback
from fnshard.compiler.rewrites.causal_mask import recognise_causal
from fnshard.compiler.rewrites.hooks import apply_hooks
from fnshard.compiler.rewrites.in_place import check_backward, functionalize, index_strided
from fnshard.compiler.rewrites.rounding import keep_rounding, round_for_decisions
from fnshard.errors import TraceError, leaves, report
from fnshard.layout.spec import LayoutSpec
from fnshard.losses import Mean, unwrap_leaf
from fnshard.mesh import Mesh

DRAWS = report(
    "`fn`, or another thread while it was traced, draws random numbers by {name}, which a trace keeps as "
    "constants.",
    fix="draw with torch (torch.rand, F.dropout), which follows the state's seed and the step; or draw "
    "before the step and pass the numbers as tensors with the batch. A thread that loads data needs a "
    "generator of its own: random.Random(0), numpy.random.default_rng(0).",
)


def trace(
    fn: Callable[..., Any],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    structure: tree.TreeDef,
    specs: Mapping[str, LayoutSpec],
    batch: Arguments | Sequence[Any],
    *,
    device: torch.device,
    mesh: Mesh,
    differentiate: bool = True,
    sources: bool = False,
) -> Program:
    """Capture `fn(params, *batch)`.

    Autocast counts where `fn` itself enters it. The mode that the caller happens to be in is ignored: a
    program that is traced once must not depend on where it was called from first.

    Args:
        shapes: `{path: (full shape, compute dtype)}`.
        structure: the parameter tree's structure, in the order of `shapes`.
        specs: resolved specs; trainable leaves require grad while tracing.
        batch: this rank's micro-batch: tensors (real, meta or fake) and constants.
        mesh: the mesh whose axes the exchanges of `fn` name.
        differentiate: whether `fn` is a loss; otherwise it may return anything, and is traced under no_grad.
        sources: whether to note the line of each node (`compiler.ir.source_lines`), which is slow.

    Raises:
        TraceError: `fn` does something that cannot be captured; the message shows the way out.
    """
    request = TraceRequest(fn, shapes, structure, specs, Arguments.of(batch), device, differentiate, sources)
    check_autocast()
    with (
        tracing_on(mesh),
        LOCK,
        Surroundings(request.runs) as surroundings,
        refuse_draws(
            lambda name: TraceError(DRAWS.format(name=name)), surroundings.reached.of_type(GENERATORS)
        ),
        Limits() as limits,
    ):
        # If `fn` differentiates values that it has already computed, the first trace stops. The second runs
        # on a level of functorch, where autograd records all that `fn` computes.
        try:
            recording = capture(request, surroundings, limits, lambda run: run)
        except Retrace:
            recording = capture(request, surroundings, limits, Differentiable)

        traced = name_inputs(request, recording)
        check_program(traced.program, request.specs, request.differentiate)
        for stage in (return_writes, remove_writes, rewrite):
            traced = stage(request, traced)

        # Before each later step the guard checks whether anything that `fn` read has changed.
        guard = Guard(
            request.runs, surroundings.reached, surroundings.written, traced.closed_over, traced.copied
        )
        return replace(traced.program, guard=guard, rows=_count_rows(request.batch))


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """A function and how to trace it; the fields are the arguments of `trace`."""

    fn: Callable[..., Any]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    structure: tree.TreeDef
    specs: Mapping[str, LayoutSpec]
    batch: Arguments
    device: torch.device
    differentiate: bool
    sources: bool

    @property
    def runs(self) -> Callable[..., Any]:
        """Return a callable that reaches all that can run: `fn`, and functions in its parameter tree."""
        functions = [v for _, v in self.structure.constants if callable(v)]
        return partial(self.fn, *functions) if functions else self.fn


@dataclass(frozen=True, eq=False)
class Fakes:
    """A set of tensors without values.

    Args:
        mode: the mode that they belong to.
        leaves: the leaves by path.
        tensors: the tensors of the batch by path.
        batch: all leaves of the batch by path, constants too, without their wrappers.
        structure: the structure of the batch.
    """

    mode: FakeTensorMode
    leaves: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    batch: Mapping[str, Any]
    structure: tree.TreeDef

    @classmethod
    def of(cls, request: TraceRequest) -> Fakes:
        """Make fakes of the leaves and the batch of a request."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        batch, structure = flatten_batch(request.batch)
        leaf_values: dict[str, Tensor] = {}
        with mode:
            for path, (shape, dtype) in request.shapes.items():
                trains = request.differentiate and bool(request.specs[path].trainable)
                leaf = torch.empty(tuple(shape), dtype=dtype, device=request.device)
                leaf_values[path] = leaf.requires_grad_(trains and dtype.is_floating_point)
            # These are contiguous: collation may give tensors other strides, which the step copies.
            tensors = {
                name: torch.empty(v.shape, dtype=v.dtype, device=request.device)
                for name, v in batch.items()
                if isinstance(v, Tensor)
            }
        return cls(mode, leaf_values, tensors, batch, structure)


@dataclass(frozen=True, eq=False)
class Recording:
    """A graph that the tracer has recorded; the last `hooks` of its results are values of gradient hooks."""

    graph_module: fx.GraphModule
    hooks: int
    outputs: Outputs
    fakes: Fakes


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """A program between two stages of the trace.

    Args:
        values: a fake tensor for each of its inputs.
        hooks: how many of its results, the last ones, are values of gradient hooks.
        closed_over: tensors that `fn` closes over, and that the program reads where they are.
        copied: tensors that `fn` closes over, and of which the program has copies on another device.
    """

    program: Program
    values: Mapping[Input, Tensor]
    hooks: int
    closed_over: Sequence[Tensor]
    copied: Sequence[Tensor]

    def examples(self) -> list[Tensor]:
        """Return the values to run the graph on.

        Batch leaves are detached: a write in place would make the fake tensor itself require grad.
        """
        return [v if i.kind == "leaf" else v.detach() for i, v in self.values.items()]


@dataclass(eq=False)
class _FlatFunction:
    """A form of `fn` that takes and returns lists of tensors.

    It notes the names of tensors for errors (`names`, by id), and which results are which of `fn`'s outputs
    (`outputs`).
    """

    request: TraceRequest
    fakes: Fakes
    surroundings: Surroundings
    limits: Limits
    outputs: Outputs | None = None
    names: dict[int, str] = field(default_factory=dict)

    def __call__(self, leaf_values: list[Tensor], batch_values: list[Tensor]) -> list[Tensor]:
        # Give `fn` its trees back, and note the name of each tensor for errors.
        fakes, request = self.fakes, self.request
        tensors = dict(zip(fakes.tensors, batch_values, strict=True))
        args = tree.unflatten([tensors.get(n, v) for n, v in fakes.batch.items()], fakes.structure)
        self.limits.clear()
        before = [v.requires_grad for v in leaf_values]
        self.names |= {id(v): f"params[{p!r}]" for p, v in zip(fakes.leaves, leaf_values, strict=True)}
        self.names |= {id(v): f"batch[{n!r}]" for n, v in tensors.items()}

        # Run it, and flatten its result; the excesses of limits are results too.
        with self.surroundings.one_run():
            result = args.call(request.fn, tree.unflatten(leaf_values, request.structure))
            check_requires_grad(fakes.leaves, before, leaf_values)
            outputs, values = _read_outputs(result, loss=request.differentiate)
            self.outputs, values = self.limits.append(outputs, values)
        return values

    def run_padded(self, run: Callable[..., list[Tensor]], *values: list[Tensor]) -> list[Tensor]:
        """Return the results of `run`, which computes `fn` on padded tensors where lengths depend on data."""
        self.outputs, results = self.limits.append(self.outputs, run(*values))
        return results


def capture(
    request: TraceRequest,
    surroundings: Surroundings,
    limits: Limits,
    prepare: Callable[[Callable[..., list[Tensor]]], Callable[..., list[Tensor]]],
) -> Recording:
    """Record `fn` with `make_fx`.

    Args:
        prepare: turns the flat form of `fn` into the function that is recorded.

    Raises:
        TraceError: `fn` failed; torch's own error is explained in terms of `fn`'s code.
    """
    fakes = Fakes.of(request)
    flat = _FlatFunction(request, fakes, surroundings, limits)
    inputs = [*fakes.leaves.values()], [*fakes.tensors.values()]

    run, trace_function = prepare(flat), partial(make_fx, tracing_mode="fake", pre_dispatch=True)
    with refusals(request.device) as calls, torch.set_grad_enabled(request.differentiate):
        # Values of hooks are further results.
        run_with_hooks = lambda leaves, batch: [*run(leaves, batch), *calls.hooks.values()]  # noqa: E731
        try:
            try:
                with source_lines.record() if request.sources else nullcontext():
                    module = trace_function(run_with_hooks)(*inputs)
                return Recording(module, len(calls.hooks), flat.outputs, fakes)
            except (DynamicOutputShapeException, DataDependentOutputException):
                # A length depends on data: trace with symbols, then run that graph on padded tensors.
                calls.hooks.clear()
                padded = partial(flat.run_padded, ragged_run.capture(run, *inputs))
                if calls.hooks:
                    raise TraceError(HOOK.format(name="where lengths depend on data")) from None
                return Recording(trace_function(padded)(*inputs), 0, flat.outputs, fakes)
        except Exception as error:
            # Say what failed in terms of `fn`'s code.
            if type(error).__module__ == "torch._dynamo.exc":
                raise higher_order("torch.cond or another operator that takes functions") from error
            batch = {**fakes.batch, **fakes.tensors}
            explained = explain(error, calls.failed, flat.names, request.fn, batch)
            frames = None if getattr(explained, "placed", False) else user_traceback(error)
    raise explained.with_traceback(frames)  # out here, so that torch's own error is not chained to it


def flatten_batch(batch: Arguments | Sequence[Any]) -> tuple[dict[str, Any], tree.TreeDef]:
    """Return `{path: leaf}` of a batch, without the wrappers `Whole` and `Sequence`, and its structure."""
    named, structure = Arguments.of(batch).leaves
    return {n: unwrap_leaf(v) for n, v in named.items()}, structure


def name_inputs(request: TraceRequest, recording: Recording) -> TracedProgram:
    """Make a program of composite ATen ops with named inputs, and give every node its fake value.

    Tensors that `fn` closes over, and keys of random numbers, become inputs beside leaves and batch.
    """
    # Leaves and batch come first; `normalize` adds constants and keys after them.
    fakes, device = recording.fakes, request.device
    values = {Input("leaf", p): v for p, v in fakes.leaves.items()}
    values |= {Input("batch", n): v for n, v in fakes.tensors.items()}
    graph, keys, constants = normalize(recording.graph_module, len(values))
    check_constants(constants)

    # Tensors of this device are read where they are, others are copied to it.
    closed_over = [v for v in constants.values() if v.device.type == device.type]
    copied = [v for v in constants.values() if v.device.type != device.type and is_plain(v)]
    constants = {n: v.detach().to(device) for n, v in constants.items()}
    with fakes.mode:
        values |= {Input("constant", n): fakes.mode.from_tensor(v) for n, v in constants.items()}
        values |= {Input("key", n): torch.empty((), dtype=torch.int64, device=device) for n in keys}

    # Run the graph on fakes: later stages read shapes, dtypes and memories of its values.
    program = Program(graph, tuple(values), constants, recording.outputs, fakes.mode)
    traced = TracedProgram(program, values, recording.hooks, closed_over, copied)
    with fakes.mode, torch.set_grad_enabled(request.differentiate):
        propagate(graph, traced.examples())
    return traced


def return_writes(request: TraceRequest, traced: TracedProgram) -> TracedProgram:
    """Append the new values of leaves that `fn` writes to, such as buffers, to the results, before hooks."""
    program = traced.program
    written, end = written_inputs(program, "leaf"), len(program.results) - traced.hooks
    results, hooks = program.results[:end], program.results[end:]
    named = zip(program.placeholders, program.inputs, strict=True)
    leaf_nodes = [n for n, i in named if i.kind == "leaf" and i.name in written]
    # A leaf's placeholder as a result is its new value, once `remove_writes` has made the writes pure.
    program.graph.output_node().args = ([*results, *leaf_nodes, *hooks],)
    writes = {path: len(results) + number for number, path in enumerate(written)}
    return replace(traced, program=replace(program, outputs=replace(program.outputs, writes=writes)))


def remove_writes(request: TraceRequest, traced: TracedProgram) -> TracedProgram:
    """Replace every write in place by a new value, so that the program is pure."""
    program = traced.program
    with program.fake_mode, torch.set_grad_enabled(request.differentiate):
        # Look for writes to values that the backward reads while the program still has its writes.
        if request.differentiate:
            check_backward(program.graph, program.outputs.loss, traced.examples(), DIFFERENTIABLE)
        pure = functionalize(program.graph)
        if pure is not program.graph:
            propagate(pure, traced.examples())
        if index_strided(pure):
            propagate(pure, traced.examples())
    return replace(traced, program=replace(program, graph=pure))


def rewrite(request: TraceRequest, traced: TracedProgram) -> TracedProgram:
    """Apply hooks at their tensors, and write masks, casts and exchanges as later stages expect them."""
    graph = traced.program.graph
    apply_hooks(graph, traced.hooks)
    for rewrite_graph in (recognise_causal, keep_rounding, round_for_decisions, copy_outgoing):
        rewrite_graph(graph)
    return replace(traced, hooks=0)


def _count_rows(batch: Arguments) -> int:
    """Return how many rows a rank's batch has, which is the first dim of its first tensor that has one."""
    values = batch.leaves[0].values()
    return next((v.shape[0] for v in values if isinstance(v, Tensor) and v.dim()), 1)


# ------------------------------------------------------------------ what `fn` returns


def _read_outputs(result: Any, loss: bool) -> tuple[Outputs, list[Tensor]]:
    """Return the result of `fn` as flat tensors, and a description of which is which.

    Args:
        loss: whether the result is a loss, or `(loss, aux)`; otherwise it is any tree.

    Raises:
        TraceError: the loss is no 0-d float tensor, or a Mean is not made of sums.
    """
    values: list[Tensor] = []

    def add(value: Tensor) -> int:
        """Append a result, and return its index."""
        values.append(value)
        return len(values) - 1

    def describe_leaf(leaf: Any) -> tuple[Any, ...]:
        """Return the entry of `Outputs.aux` for a leaf, whose tensors become results."""
        if isinstance(leaf, Mean):
            _check_mean(leaf, "aux")
            return ("mean", add(leaf.total), add(_make_count(leaf)))
        if isinstance(leaf, Tensor):
            if not loss or leaf.dim():
                return ("tensor", add(leaf))
            if leaf.is_complex():
                return ("complex", add(leaf.real), add(leaf.imag))
            return ("scalar", add(leaf))
        return ("python", leaf)

    # A function that is not differentiated may return any tree of tensors and constants.
    if not loss:
        flat, structure = tree.flatten(result, constants=True)
        _check_leaves(flat, result, "output")
        return Outputs(None, None, structure, tuple(describe_leaf(leaf) for leaf in flat)), values

    # A loss is a number, or a Mean, or either with aux.
    head, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(head, Mean):
        _check_mean(head, "the loss")
        if isinstance(head.count, Tensor) and head.count.requires_grad:
            # Gradients are summed over micro-batches and ranks before the whole count is known, and divided
            # by it at the end. So the count cannot have a gradient of its own.
            raise TraceError(
                "the count of the loss's Mean depends on leaves that train, and has no gradient.",
                fix="count.detach() where it is a mere number; else return total / count, the mean of one "
                "rank, and fs.Mean(total, count) in aux.",
            )
    total = head.total if isinstance(head, Mean) else head
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.dtype.is_floating_point:
        what = describe(total) if isinstance(total, Tensor) else type(total).__name__
        raise TraceError(
            f"`fn` must return a loss that is a 0-d float tensor, or (loss, aux); it returned {what}.",
            fix="reduce it: loss.mean(), or fs.Mean(total, count) for an exact mean over all ranks.",
        )

    # The loss is the first result, and its count the second; those of aux follow.
    index = add(total)
    count = add(_make_count(head)) if isinstance(head, Mean) else None
    flat, structure = tree.flatten(aux, constants=True) if aux is not None else ([], None)
    _check_leaves(flat, aux, "aux")
    entries = tuple(describe_leaf(leaf) for leaf in flat)
    bound = head.bound if isinstance(head, Mean) else None
    return Outputs(index, count, structure, entries, bound), values


def _check_leaves(flat: list[Any], result: Any, place: str) -> None:
    """Refuse objects of unregistered classes: a tensor in one would stay the tracer's, without numbers."""
    wrong = [i for i, v in enumerate(flat) if not isinstance(v, Tensor | Mean) and not tree.is_constant(v)]
    if wrong:
        paths = list(tree.flatten_with_paths(result, constants=True)[0]) if flat[0] is not result else []
        names = [f"{place}[{paths[i]!r}] is {_describe_class(flat[i])}" for i in wrong] if paths else []
        raise TraceError(
            f"`fn` returns {leaves(len(wrong))} that are neither tensors nor plain constants:",
            names or [f"{place} is {_describe_class(result)}"],
            f"{tree.how_to_register(flat[i] for i in wrong)}return tensors and constants, in dicts, "
            "lists, tuples and registered classes.",
        )


def _describe_class(value: Any) -> str:
    """Return the name of a value's class, as errors show it."""
    return f"{type(value).__name__}{', a dataclass' if is_dataclass(value) else ''}"


def _check_mean(mean: Mean, place: str) -> None:
    """Refuse a Mean whose parts are no sums over items."""
    wrong = []
    total, count, bound = mean.total, mean.count, mean.bound
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.dtype.is_floating_point:
        wrong.append(f"total is {_describe_value(total)}, not a 0-d float tensor")
    is_scalar = isinstance(count, Tensor) and count.dim() == 0 and not count.dtype.is_complex
    if not is_scalar and not _is_number(count) and not isinstance(count, torch.SymInt):
        wrong.append(f"count is {_describe_value(count)}, not a 0-d tensor or a number")
    if bound is not None and not (_is_number(bound) and 0 < bound < float("inf")):
        wrong.append(f"bound is {_describe_value(bound)}, not a positive finite number or None")
    if wrong:
        raise TraceError(
            f"`fn` returns in {place} a Mean that is none:",
            wrong,
            "fs.Mean(losses.sum(), mask.sum()): sums over this rank's items, not vectors of them.",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _describe_value(value: Any) -> str:
    """Describe a value in an error: a tensor by shape and dtype, any other by class and text."""
    return describe(value) if isinstance(value, Tensor) else f"{type(value).__name__} {str(value)[:40]}"


def _make_count(mean: Mean) -> Tensor:
    """Return the count of a Mean as a float tensor, 0-d, on the device of its total."""
    count = mean.count
    if isinstance(count, Tensor):
        return count if count.dtype.is_floating_point else count.to(torch.float32)
    number = count if isinstance(count, torch.SymInt) else float(count)  # x[mask].shape[0] is known by then
    return torch.full((), number, dtype=torch.float32, device=mean.total.device)
